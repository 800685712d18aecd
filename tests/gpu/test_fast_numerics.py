"""numerics = "fast" on one GPU: W virtual ranks, held against fp64 beside the reference, and against themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.test_fused_backward import reference_gradients
from tests.gpu.test_fused_forward import CASES as FORWARD_CASES
from tests.gpu.test_fused_forward import draw_ids
from tests.kernels.oracle import Batch, moe_gradients_fp64
from uniep.layer import backward_steps, forward_steps
from uniep.plan.layout import HeapLayout
from uniep.shapes import MoEShape
from uniep.symmetric.heap import SymmetricHeap
from uniep.symmetric.virtual_ranks import open_virtual_ranks, run_side_by_side

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NAMES = ("x", "scores", "w1", "w2", "w3")
# In a single token's gradients the roundings do not average out.
MOST_OF_THE_CONTRACTS_ERROR = 1.5
# Those left out switch what both numerics have in common.
CASES = {name: case for name, case in FORWARD_CASES.items() if name not in ("four_stages", "by_token", "static_roles")}


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("num_ranks", [1, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_error_is_the_contracts_at_most(name: str, num_ranks: int) -> None:
    """Forward and backward in a row with other data each, on buffers that start as NaN, each twice: the same bits."""
    case = CASES[name]
    num_local = max(case.num_local, -(-(max(case.experts or (0,)) + 1) // num_ranks), -(-case.top_k // num_ranks))
    shape = MoEShape(num_local * num_ranks, case.top_k, case.dim, case.hidden_dim, num_ranks)
    tokens = case.tokens(num_ranks)
    torch.manual_seed(num_ranks)
    up_shape, down_shape = (
        (shape.num_experts, case.hidden_dim, case.dim),
        (shape.num_experts, case.dim, case.hidden_dim),
    )
    weights = [torch.randn(s, device="cuda").mul_(0.03).bfloat16() for s in (up_shape, down_shape, up_shape)]
    layout = HeapLayout(shape, max(tokens), copy_per_expert=case.copy_per_expert)
    heaps = open_virtual_ranks(layout, device="cuda", timeout_s=20.0)
    streams = [torch.cuda.Stream() for _ in heaps]
    for heap in heaps:
        for region in ("received", "returned", "score_grads"):
            heap.region(region).fill_(float("nan"))
    order = {"score_before_experts": case.score_before_experts}
    more: dict[str, Any] = {**order, "config": case.config(num_ranks), "fast": True}

    def own(heap: SymmetricHeap) -> list[Tensor]:
        return [weight[heap.rank * num_local : (heap.rank + 1) * num_local] for weight in weights]

    def run(inputs: list[list[Tensor]], grads: list[Tensor]) -> list[Tensor]:
        """x, scores, w1, w2, w3 of all ranks, joined."""
        forwards = [forward_steps(*inputs[heap.rank], *own(heap), heap=heap, save=True, **more) for heap in heaps]
        saved = [kept for _, kept in run_side_by_side(forwards, streams=streams)]
        backwards = [
            backward_steps(grads[heap.rank], saved[heap.rank], *inputs[heap.rank], *own(heap), heap=heap, **more)
            for heap in heaps
        ]
        results = run_side_by_side(backwards, streams=streams)
        for heap in heaps:
            heap.check()
            assert not heap.scoreboard.counters.any()
        parts = zip(*((g.x_TD, g.scores_TK, g.w1_LFD, g.w2_LDF, g.w3_LFD) for g in results), strict=True)
        return [torch.cat(part) for part in parts]

    # Each kernel first with all ranks alike: see test_fused_backward.
    for num_tokens in [[max(num, 1)] * num_ranks for num in sorted(set(tokens))] + [tokens] * 2:
        inputs, grads = [], []
        for num in num_tokens:
            x, grad = (torch.randn(num, case.dim, device="cuda").bfloat16() for _ in range(2))
            scores = torch.rand(num, case.top_k, device="cuda")
            inputs.append([x, scores, draw_ids(num, shape, case.experts)])
            grads.append(grad)
        got = run(inputs, grads)
        of_ranks, grad_weights = reference_gradients(case, inputs, weights, grads)
        bitwise = [*(torch.cat(part) for part in zip(*of_ranks, strict=True)), *grad_weights]
        # All ranks' tokens as one rank's.
        joined = Batch(shape, *([torch.cat(parts)] for parts in zip(*inputs, strict=True)), *weights)
        exact = moe_gradients_fp64(joined, [torch.cat(grads)], **order).of_rank(0, shape.num_experts)
        for what, value, reference, want in zip(NAMES, got, bitwise, exact, strict=True):
            allowed = MOST_OF_THE_CONTRACTS_ERROR * relative_error(reference, want)
            assert 0.0 < allowed < 2**-6, what
            assert relative_error(value, want) <= allowed, what
        for what, value, again in zip(NAMES, got, run(inputs, grads), strict=True):
            assert torch.equal(value, again), what
