"""The whole fused backward over interpreted ranks, against an oracle that sees the global batch."""

import gc
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import uniep.layer
from tests.kernels.oracle import Batch, moe_backward_ref, moe_ref, poison_new_tensors
from tests.kernels.ranks import run_ranks
from tests.kernels.test_forward import CASES as FORWARD_CASES
from tests.kernels.test_forward import Case, poison
from uniep.kernels.config import KernelConfig
from uniep.kernels.signals import wait_all_ranks
from uniep.kernels.swiglu import swiglu_backward, swiglu_backward_compiled
from uniep.kernels.wgrad import WgradConfig
from uniep.layer import fused_moe
from uniep.reference import compiled_swiglu, swiglu, swiglu_grads
from uniep.symmetric.heap import SymmetricHeap

NAMES = ("x", "scores", "w1", "w2", "w3")
WGRAD = WgradConfig(num_programs=2, block_f=32, block_d=64, use_tma=False)


def backward_config(config: KernelConfig) -> KernelConfig:
    """The forward's tiles and roles in the backward."""
    wgrad = replace(WGRAD, use_tma=config.up.use_tma)
    return replace(config, down_grad=replace(config.up, block_n=32), up_grad=config.down, wgrad=wgrad)


def draw_grads(batch: Batch, seed: int, *, exact: bool) -> list[Tensor]:
    """Gradients of every rank's output; exact as in draw_batch."""
    generator = torch.Generator().manual_seed(seed + 1000)
    grads = []
    for x_TD in batch.x:
        grad_TD = torch.randn(x_TD.shape, generator=generator)
        if exact:
            kept = torch.rand(x_TD.shape, generator=generator) < 0.5
            grad_TD = torch.where(kept, grad_TD.sign(), 0.0)
        grads.append(grad_TD.bfloat16())
    return grads


def leaves(batch: Batch, rank: int) -> list[Tensor]:
    """x, scores, w1, w2, w3 of a rank, with autograd."""
    return [t.clone().requires_grad_() for t in (batch.x[rank], batch.scores[rank], *batch.weights(rank))]


def as_arrays(tensors: list[Tensor]) -> list:
    return [tensor.detach().float().numpy() for tensor in tensors]


def run_layer(inputs: list[Tensor], expert_ids: Tensor, case: Case, heap: SymmetricHeap) -> Tensor:
    x, scores, *weights = inputs
    return fused_moe(
        x,
        scores,
        expert_ids,
        *weights,
        heap=heap,
        config=backward_config(case.config),
        numerics=case.numerics,
    )


def check_rank(case: Case, batch: Batch, grads: list[Tensor], rank: int, got: list) -> None:
    """got: output and gradients of a rank, against the oracle."""
    order = {"score_before_experts": case.score_before_experts}
    want = moe_backward_ref(batch, grads, **order).of_rank(rank, case.num_local)
    out = moe_ref(batch, **order)[rank]
    for name, expected, value in zip(("out", *NAMES), (out, *want), got, strict=True):
        value = torch.from_numpy(value)
        assert torch.isfinite(expected).all()
        if case.exact:
            assert torch.equal(value, expected.float()), name
        else:
            torch.testing.assert_close(value, expected.float(), rtol=2**-6, atol=2**-5, msg=name)


CASES = {name: replace(case, num_calls=1) for name, case in FORWARD_CASES.items()}
for _name in ("two_ranks", "no_room_at_first"):
    CASES[_name] = FORWARD_CASES[_name]
CASES["scores_first_different_tokens"] = replace(CASES["different_tokens"], score_before_experts=True)
CASES["scores_first_one_rank"] = replace(CASES["one_rank"], score_before_experts=True)


@pytest.mark.parametrize("name", CASES)
def test_equals_oracle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward in a row with other data each, on buffers that start as NaN."""
    case = CASES[name]
    batches = [case.draw(seed) for seed in range(case.num_calls)]
    grads = [draw_grads(batch, seed, exact=case.exact) for seed, batch in enumerate(batches)]
    poison_new_tensors(monkeypatch)
    monkeypatch.setattr("uniep.layer.reduces_in_kernel", lambda *_, **__: case.reduce_in_kernel)

    def body(heap: SymmetricHeap) -> list:
        poison(heap)
        if case.room_rows is not None:
            heap.room.num_rows = case.room_rows
        results = []
        for batch, grad in zip(batches, grads, strict=True):
            inputs = leaves(batch, heap.rank)
            out = run_layer(inputs, batch.expert_ids[heap.rank], case, heap)
            got = torch.autograd.grad(out, inputs, grad[heap.rank])
            heap.check()
            assert not heap.scoreboard.counters.any()
            assert [tensor.dtype for tensor in got] == [tensor.dtype for tensor in inputs]
            results.append(as_arrays([out, *got]))
        return results

    for rank, results in enumerate(run_ranks(case.layout, body)):
        for batch, grad, got in zip(batches, grads, results, strict=True):
            check_rank(case, batch, grad, rank, got)


def run_layers(inputs: list[list[Tensor]], run: Callable[[int], Tensor], grads: list[Tensor]) -> list[list]:
    """The forward of each layer, then the backwards from the last layer to the first."""
    outs = [run(layer) for layer in range(len(inputs))]
    results = []
    for layer in reversed(range(len(inputs))):
        got = torch.autograd.grad(outs[layer], inputs[layer], grads[layer])
        results.insert(0, as_arrays([outs[layer], *got]))
    return results


@pytest.mark.parametrize(
    ("score_before_experts", "num_layers", "num_kept", "again"),
    [(False, 2, 2, "kept"), (False, 3, 1, "kept"), (False, 2, 1, "run_again"), (True, 2, 1, "run_again")],
)
def test_layers_on_one_heap(
    score_before_experts: bool, num_layers: int, num_kept: int, again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a layer keeps does not lie where the next one writes, with as many buffers for it as layers and with fewer;
    with checkpointing forwards stand between the backwards; and all buffers are free again in the end."""
    case = Case(2, 3, (9, 11), score_before_experts=score_before_experts, num_kept=num_kept)
    batches = [case.draw(seed) for seed in range(num_layers)]
    grads = [draw_grads(batch, seed, exact=True) for seed, batch in enumerate(batches)]
    poison_new_tensors(monkeypatch)

    def body(heap: SymmetricHeap) -> list:
        rank = heap.rank
        poison(heap)
        inputs = [leaves(batch, rank) for batch in batches]

        def run(layer: int) -> Tensor:
            def forward(*tensors: Tensor) -> Tensor:
                return run_layer(list(tensors), batches[layer].expert_ids[rank], case, heap)

            if again == "kept":
                return forward(*inputs[layer])
            return checkpoint(forward, *inputs[layer], use_reentrant=False)

        results = run_layers(inputs, run, [grad[rank] for grad in grads])
        gc.collect()
        buffers = [heap.take_returned(keep=True) for _ in range(num_kept + 1)]
        assert [buffer.kept for buffer in buffers] == [True] * num_kept + [False]
        assert len({buffer.offset_bytes for buffer in buffers}) == num_kept + 1
        return results

    for rank, results in enumerate(run_ranks(case.layout, body)):
        for batch, grad, got in zip(batches, grads, results, strict=True):
            check_rank(case, batch, grad, rank, got)


def test_accumulates_over_steps_into_fp32_weights() -> None:
    """Two forwards and backwards before an update: gradients add up in the dtype of the weights."""
    case = Case(2, 2, (7, 7))
    batches = [case.draw(seed) for seed in range(2)]
    batches[1] = replace(batches[1], **{name: getattr(batches[0], name) for name in ("w1_EFD", "w2_EDF", "w3_EFD")})
    grads = [draw_grads(batch, seed, exact=True) for seed, batch in enumerate(batches)]

    def body(heap: SymmetricHeap) -> list:
        rank = heap.rank
        weights = [weight.float().requires_grad_() for weight in batches[0].weights(rank)]
        for batch, grad in zip(batches, grads, strict=True):
            inputs = [batch.x[rank], batch.scores[rank], *weights]
            run_layer(inputs, batch.expert_ids[rank], case, heap).backward(grad[rank])
        assert all(weight.grad.dtype == torch.float32 for weight in weights)
        return as_arrays([weight.grad for weight in weights])

    results = run_ranks(case.layout, body)
    parts = [moe_backward_ref(b, g, score_before_experts=False) for b, g in zip(batches, grads, strict=True)]
    for rank, got in enumerate(results):
        first, second = (part.of_rank(rank, case.num_local)[2:] for part in parts)
        for value, one, two in zip(got, first, second, strict=True):
            assert torch.equal(torch.from_numpy(value), one.float() + two.float())


def test_peer_waits_for_a_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 reads what came back in a backward late; rank 1 may go on, but not write over it."""
    case = replace(FORWARD_CASES["two_ranks"], score_before_experts=True)
    batches = [case.draw(seed) for seed in range(2)]
    grads = [draw_grads(batch, seed, exact=True) for seed, batch in enumerate(batches)]
    read = uniep.layer._grad_scores_before

    def body(heap: SymmetricHeap) -> list:
        rank = heap.rank

        def read_late(*tensors: Tensor) -> Tensor:
            if rank == 0:
                time.sleep(0.5)
            return read(*tensors)

        monkeypatch.setattr(uniep.layer, "_grad_scores_before", read_late)
        inputs = [leaves(batch, rank) for batch in batches]
        return run_layers(
            inputs,
            lambda layer: run_layer(inputs[layer], batches[layer].expert_ids[rank], case, heap),
            [grad[rank] for grad in grads],
        )

    for rank, results in enumerate(run_ranks(case.layout, body)):
        for batch, grad, got in zip(batches, grads, results, strict=True):
            check_rank(case, batch, grad, rank, got)


@triton.jit
def _wait_kernel(peers_W, watch, epoch, timeout_us):
    wait_all_ranks(peers_W, 0, epoch * 0, epoch, watch, timeout_us, 3, 5, 1, 1)


@pytest.mark.parametrize(("flag", "given_up"), [(7, False), (8, False), (6, True)])
def test_flag_of_a_later_epoch_counts(flag: int, given_up: bool) -> None:
    """A rank without rows for a peer may be an epoch ahead before the peer has looked."""
    flags, watch = torch.tensor([flag], dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    _wait_kernel[(1,)](torch.tensor([flags.data_ptr()]), watch, 7, 10_000)
    assert bool(watch[0]) == given_up


@triton.jit
def swiglu_backward_kernel(
    grad_h, gate, up, grad_gate, grad_up, h, BLOCK: tl.constexpr, COMPILED: tl.constexpr = False
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(grad_h + index).to(tl.float32)
    if COMPILED:
        results = swiglu_backward_compiled(grad, tl.load(gate + index), tl.load(up + index))
    else:
        results = swiglu_backward(grad, tl.load(gate + index), tl.load(up + index))
    tl.store(grad_gate + index, results[0])
    tl.store(grad_up + index, results[1])
    tl.store(h + index, results[2])


def test_swiglu_backward_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    grad_h, gate, up = (torch.randn(4096, generator=generator).mul(scale).bfloat16() for scale in (1.0, 4.0, 1.0))
    outputs = [torch.empty(4096, dtype=torch.bfloat16) for _ in range(3)]
    swiglu_backward_kernel[(1,)](grad_h, gate, up, *outputs, BLOCK=4096)
    want = (*swiglu_grads(grad_h, gate, up), swiglu(gate, up))
    for name, got, expected in zip(("grad_g", "grad_u", "h"), outputs, want, strict=True):
        assert torch.equal(got, expected), name


def test_compiled_swiglu_rounds_once() -> None:
    generator = torch.Generator().manual_seed(0)
    grad_h, gate, up = (torch.randn(4096, generator=generator).mul(scale).bfloat16() for scale in (1.0, 4.0, 1.0))
    outputs = [torch.empty(4096, dtype=torch.bfloat16) for _ in range(3)]
    swiglu_backward_kernel[(1,)](grad_h, gate, up, *outputs, BLOCK=4096, COMPILED=True)
    h_of, grads_of = compiled_swiglu("cpu")
    rounded_once = (*grads_of(grad_h, gate, up), h_of(gate, up))
    rounded = (*swiglu_grads(grad_h, gate, up), swiglu(gate, up))
    for name, got, once, each in zip(("grad_g", "grad_u", "h"), outputs, rounded_once, rounded, strict=True):
        assert torch.equal(got, once), name
        assert not torch.equal(got, each), name
