"""numerics = "fast" over interpreted ranks: not the contract's bits, but no larger an error, both held against fp64."""

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import uniep.layer
from tests.kernels.oracle import Batch, moe_backward_ref, moe_gradients_fp64, moe_ref, poison_new_tensors
from tests.kernels.ranks import run_ranks
from tests.kernels.test_backward import CASES as BACKWARD_CASES
from tests.kernels.test_backward import NAMES, as_arrays, backward_config, draw_grads, leaves
from tests.kernels.test_forward import MANY_ROLES, Case, poison
from uniep.kernels.config import KernelConfig
from uniep.layer import fused_moe
from uniep.symmetric.heap import SymmetricHeap

# In a few tokens' gradients the roundings do not average out: there the smaller number of them may come out larger.
MOST_OF_THE_CONTRACTS_ERROR = 1.5
# What the other routings of the backward's list change, the bitwise backward has in common with this one.
NAMES_OF_CASES = (
    "one_rank",
    "two_ranks",
    "four_ranks",
    "top_1",
    "top_10",
    "all_to_one_expert",
    "all_to_one_rank",
    "rank_without_tokens",
    "one_token",
    "different_tokens",
    "odd_dims",
    "odd_dims_tma",
    "scores_first",
    "scores_first_different_tokens",
    "torch_reduces_no_tokens",
    "one_program",
    "many_programs",
    "copy_per_expert",
    "staged_combine",
)
CASES = {name: replace(BACKWARD_CASES[name], exact=False) for name in NAMES_OF_CASES}


def run_forward(inputs: list[Tensor], ids: Tensor, case: Case, heap: SymmetricHeap) -> Tensor:
    x, scores, *weights = inputs
    numerics = replace(case.numerics, fast=True)
    return fused_moe(x, scores, ids, *weights, heap=heap, config=backward_config(case.config), numerics=numerics)


def poison_all(heap: SymmetricHeap) -> None:
    poison(heap)
    heap.region("score_grads").fill_(float("nan"))


def relative_error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """L2, of all together."""
    got_N, want_N = (torch.cat([tensor.double().flatten() for tensor in tensors]) for tensors in (got, want))
    return float((got_N - want_N).norm() / want_N.norm())


def check_errors(case: Case, batches: list[Batch], grads: list[list[Tensor]], got: list[list[list]]) -> None:
    """got: gradients by rank, call and name. Each name's error over all ranks and calls against the contract's."""
    order = {"score_before_experts": case.score_before_experts}
    exact = [moe_gradients_fp64(batch, grad, **order) for batch, grad in zip(batches, grads, strict=True)]
    bitwise = [moe_backward_ref(batch, grad, **order) for batch, grad in zip(batches, grads, strict=True)]

    def of_all(found: list, index: int) -> list[Tensor]:
        return [of_call.of_rank(rank, case.num_local)[index] for rank in range(case.num_ranks) for of_call in found]

    for index, name in enumerate(NAMES):
        fast = [torch.from_numpy(of_call[index]) for of_rank in got for of_call in of_rank]
        want = of_all(exact, index)
        allowed = MOST_OF_THE_CONTRACTS_ERROR * relative_error(of_all(bitwise, index), want)
        assert 0.0 < allowed < 2**-6, name
        assert relative_error(fast, want) <= allowed, name


@pytest.mark.parametrize("name", CASES)
def test_error_is_the_contracts_at_most(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward in a row with other data each, on buffers that start as NaN."""
    case = CASES[name]
    batches = [case.draw(seed) for seed in range(case.num_calls)]
    grads = [draw_grads(batch, seed, exact=False) for seed, batch in enumerate(batches)]
    poison_new_tensors(monkeypatch)
    monkeypatch.setattr("uniep.layer.reduces_in_kernel", lambda *_, **__: case.reduce_in_kernel)

    def body(heap: SymmetricHeap) -> list:
        poison_all(heap)
        results = []
        for batch, grad in zip(batches, grads, strict=True):
            inputs = leaves(batch, heap.rank)
            out = run_forward(inputs, batch.expert_ids[heap.rank], case, heap)
            got = torch.autograd.grad(out, inputs, grad[heap.rank])
            heap.check()
            assert not heap.scoreboard.counters.any()
            assert [tensor.dtype for tensor in got] == [tensor.dtype for tensor in inputs]
            results.append(as_arrays([out, *got]))
        return results

    ranks = run_ranks(case.layout, body)
    check_errors(case, batches, grads, [[got[1:] for got in results] for results in ranks])
    for call, batch in enumerate(batches):
        outs = moe_ref(batch, score_before_experts=case.score_before_experts)
        for results, out in zip(ranks, outs, strict=True):
            torch.testing.assert_close(torch.from_numpy(results[call][0]), out.float(), rtol=2**-7, atol=2**-6)


def test_bits_do_not_depend_on_the_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers on one heap: the same bits with other roles, and where rank 0 reads late what came back for the
    scores, while rank 1 may go on."""
    case = Case(2, 3, (5, 7), num_local=2, dim=32, exact=False)
    batches = [case.draw(seed) for seed in range(2)]
    grads = [draw_grads(batch, seed, exact=False) for seed, batch in enumerate(batches)]
    read = uniep.layer.returned_score_grads

    def read_late(num_tokens: int, heap: SymmetricHeap) -> Tensor:
        if heap.rank == 0:
            time.sleep(0.5)
        return read(num_tokens, heap)

    def results(config: KernelConfig) -> list:
        run = replace(case, config=config)

        def body(heap: SymmetricHeap) -> list:
            rank = heap.rank
            poison_all(heap)
            inputs = [leaves(batch, rank) for batch in batches]
            outs = [run_forward(inputs[i], batches[i].expert_ids[rank], run, heap) for i in range(2)]
            got = [torch.autograd.grad(outs[i], inputs[i], grads[i][rank]) for i in (1, 0)]
            return [as_arrays(list(of_layer)) for of_layer in reversed(got)]

        return run_ranks(case.layout, body)

    first = results(case.config)
    check_errors(case, batches, grads, first)
    monkeypatch.setattr(uniep.layer, "returned_score_grads", read_late)
    for again in (results(case.config), results(MANY_ROLES)):
        for got_of_rank, want_of_rank in zip(again, first, strict=True):
            for got_of_layer, want_of_layer in zip(got_of_rank, want_of_rank, strict=True):
                for name, got, want in zip(NAMES, got_of_layer, want_of_layer, strict=True):
                    assert torch.equal(torch.from_numpy(got), torch.from_numpy(want)), name
