"""The fused backward on one GPU: W virtual ranks, a stream and a share of the multiprocessors each, against the
reference, every bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.test_fused_forward import CASES, Case, draw_ids
from tests.kernels.test_backward import swiglu_backward_kernel
from uniep.layer import backward_steps, forward_steps
from uniep.plan.layout import HeapLayout
from uniep.reference import reference_moe, swiglu, swiglu_grads
from uniep.shapes import MoEShape
from uniep.symmetric.heap import SymmetricHeap
from uniep.symmetric.virtual_ranks import open_virtual_ranks, run_side_by_side

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def reference_gradients(case: Case, inputs: list[list[Tensor]], weights: list[Tensor], grads: list[Tensor]) -> Any:
    """Gradients of each rank's x and scores, and of all experts' weights, from all ranks' tokens as one rank.

    The sums over the tokens of a weight's gradient go by source rank and token, which this order keeps; sizes of
    torch.bmm choose its kernel, so the scores' gradients are taken for each rank alone.
    """
    order = {"score_before_experts": case.score_before_experts, "group": None}
    joined = [torch.cat(parts) for parts in zip(*inputs, strict=True)]
    leaves = [t.clone().requires_grad_() for t in weights]
    out = reference_moe(*joined, *leaves, **order)
    grad_weights = torch.autograd.grad(out, leaves, torch.cat(grads))
    of_ranks = []
    for (x, scores, ids), grad in zip(inputs, grads, strict=True):
        x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
        if len(x):
            of_ranks.append(torch.autograd.grad(reference_moe(x, scores, ids, *weights, **order), (x, scores), grad))
        else:
            of_ranks.append((x.detach(), scores.detach()))
    return of_ranks, grad_weights


@pytest.mark.parametrize("num_ranks", [1, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_equals_reference(name: str, num_ranks: int) -> None:
    """Forward and backward in a row with other data each, on buffers that start as NaN."""
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
    config = case.config(num_ranks)
    layout = HeapLayout(shape, max(tokens), copy_per_expert=case.copy_per_expert, num_kept=1)
    heaps = open_virtual_ranks(layout, device="cuda", timeout_s=20.0)
    streams = [torch.cuda.Stream() for _ in heaps]
    for heap in heaps:
        for region in ("received", "returned"):
            heap.region(region).fill_(float("nan"))

    # Each kernel first with all ranks alike: its first launch loads its code, which can wait for all kernels that run,
    # and one of another rank would wait for this one.
    for num_tokens in [[max(num, 1)] * num_ranks for num in sorted(set(tokens))] + [tokens] * 3:
        inputs, grads = [], []
        for num in num_tokens:
            x, grad = (torch.randn(num, case.dim, device="cuda").bfloat16() for _ in range(2))
            scores = torch.rand(num, case.top_k, device="cuda")
            inputs.append([x, scores, draw_ids(num, shape, case.experts)])
            grads.append(grad)

        def own(heap: SymmetricHeap) -> list[Tensor]:
            return [weight[heap.rank * num_local : (heap.rank + 1) * num_local] for weight in weights]

        more = {"score_before_experts": case.score_before_experts, "config": config}
        forwards = [forward_steps(*inputs[heap.rank], *own(heap), heap=heap, save=True, **more) for heap in heaps]
        saved = [kept for _, kept in run_side_by_side(forwards, streams=streams)]
        backwards = [
            backward_steps(grads[heap.rank], saved[heap.rank], *inputs[heap.rank], *own(heap), heap=heap, **more)
            for heap in heaps
        ]
        results = run_side_by_side(backwards, streams=streams)
        of_ranks, grad_weights = reference_gradients(case, inputs, weights, grads)
        for heap, got, (grad_x, grad_scores) in zip(heaps, results, of_ranks, strict=True):
            heap.check()
            assert not heap.scoreboard.counters.any()
            assert torch.equal(got.x_TD, grad_x), "x"
            assert torch.equal(got.scores_TK, grad_scores), "scores"
            local = slice(heap.rank * num_local, (heap.rank + 1) * num_local)
            for what, value, want in zip(
                ("w1", "w2", "w3"), (got.w1_LFD, got.w2_LDF, got.w3_LFD), grad_weights, strict=True
            ):
                assert torch.equal(value, want[local]), what


def test_swiglu_backward_of_every_gate() -> None:
    """All 65,536 bf16 values of g, each with many u and gradients: no bit may differ from torch."""
    gate = torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16).repeat(64)
    grad_h, up = (torch.randn(len(gate), device="cuda").bfloat16() for _ in range(2))
    outputs = [torch.empty_like(gate) for _ in range(3)]
    swiglu_backward_kernel[(len(gate) // 1024,)](grad_h, gate, up, *outputs, BLOCK=1024)
    expected = (*swiglu_grads(grad_h, gate, up), swiglu(gate, up))
    for what, got, want in zip(("grad_g", "grad_u", "h"), outputs, expected, strict=True):
        finite = torch.isfinite(gate) & torch.isfinite(want)
        assert torch.equal(got[finite], want[finite]), what
