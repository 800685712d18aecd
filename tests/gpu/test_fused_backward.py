"""The fused backward on one GPU: W virtual ranks, a stream and a share of the multiprocessors each, against the
reference, every bit."""

import pytest
import torch

from tests.gpu.virtual_layer import CASES, VirtualLayer, reference_gradients
from tests.kernels.test_backward import swiglu_backward_kernel
from uniep.reference import swiglu, swiglu_grads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("num_ranks", [1, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_equals_reference(name: str, num_ranks: int) -> None:
    """Forward and backward in a row with other data each."""
    case = CASES[name]
    layer = VirtualLayer(case, num_ranks, num_kept=1)
    for inputs, grads in layer.draws(num_calls=3):
        saved = [kept for _, kept in layer.forward(inputs, case.numerics, save=True)]
        results = layer.backward(inputs, grads, saved, case.numerics)
        of_ranks, grad_weights = reference_gradients(case, inputs, layer.weights, grads)
        for heap, got, (grad_x, grad_scores) in zip(layer.heaps, results, of_ranks, strict=True):
            assert torch.equal(got.x_TD, grad_x), "x"
            assert torch.equal(got.scores_TK, grad_scores), "scores"
            for what, value, want in zip(
                ("w1", "w2", "w3"), (got.w1_LFD, got.w2_LDF, got.w3_LFD), grad_weights, strict=True
            ):
                assert torch.equal(value, want[layer.own(heap)]), what


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
