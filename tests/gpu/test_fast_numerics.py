"""numerics = "fast" on one GPU: W virtual ranks, held against fp64 beside the reference, and against themselves."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.gpu.virtual_layer import CASES as ALL_CASES
from tests.gpu.virtual_layer import Inputs, VirtualLayer, reference_gradients
from tests.kernels.oracle import Batch, moe_gradients_fp64

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NAMES = ("x", "scores", "w1", "w2", "w3")
# In a single token's gradients the roundings do not average out.
MOST_OF_THE_CONTRACTS_ERROR = 1.5
# Those left out switch what both numerics have in common.
CASES = {name: case for name, case in ALL_CASES.items() if name not in ("four_stages", "by_token", "static_roles")}


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("num_ranks", [1, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_error_is_the_contracts_at_most(name: str, num_ranks: int) -> None:
    """Forward and backward in a row with other data each, each twice: the same bits."""
    case = CASES[name]
    layer = VirtualLayer(case, num_ranks)
    numerics = replace(case.numerics, fast=True)

    def run(inputs: Inputs, grads: list[Tensor]) -> list[Tensor]:
        """x, scores, w1, w2, w3 of all ranks, joined."""
        saved = [kept for _, kept in layer.forward(inputs, numerics, save=True)]
        results = layer.backward(inputs, grads, saved, numerics)
        parts = zip(*((g.x_TD, g.scores_TK, g.w1_LFD, g.w2_LDF, g.w3_LFD) for g in results), strict=True)
        return [torch.cat(part) for part in parts]

    for inputs, grads in layer.draws(num_calls=2):
        got = run(inputs, grads)
        of_ranks, grad_weights = reference_gradients(case, inputs, layer.weights, grads)
        bitwise = [*(torch.cat(part) for part in zip(*of_ranks, strict=True)), *grad_weights]
        # All ranks' tokens as one rank's.
        joined = Batch(layer.shape, *([torch.cat(parts)] for parts in zip(*inputs, strict=True)), *layer.weights)
        exact = moe_gradients_fp64(joined, [torch.cat(grads)], score_before_experts=case.score_before_experts)
        wanted = exact.of_rank(0, layer.shape.num_experts)
        for what, value, reference, want in zip(NAMES, got, bitwise, wanted, strict=True):
            allowed = MOST_OF_THE_CONTRACTS_ERROR * relative_error(reference, want)
            assert 0.0 < allowed < 2**-6, what
            assert relative_error(value, want) <= allowed, what
        for what, value, again in zip(NAMES, got, run(inputs, grads), strict=True):
            assert torch.equal(value, again), what
