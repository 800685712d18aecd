"""The gradient of the scores, interpreted, in the order that torch.bmm has on GPUs."""

import pytest
import torch
from torch import Tensor

from uniep.kernels.score_grad import dots_in_kernel, launch_score_grad


def in_order(grad_TD: Tensor, y_TKD: Tensor) -> Tensor:
    """16 lanes, chunks of 512 columns, every addition rounded to fp32."""
    products_TKD = grad_TD.float()[:, None] * y_TKD.float()
    dots = torch.zeros(products_TKD.shape[:2])
    for lane in range(16):
        total = torch.zeros_like(dots)
        for chunk in products_TKD.split(512, dim=2):
            acc = torch.zeros_like(dots)
            for product in chunk[..., lane::16].unbind(2):
                acc = acc + product
            total = total + acc
        dots = dots + total
    return dots


@pytest.mark.parametrize("dim", [16, 24, 512, 520, 1280, 2304])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (9, 3), (5, 8), (40, 2)])
def test_adds_in_order(num_tokens: int, top_k: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(dim + top_k)
    grad_TD = torch.randn(num_tokens, dim, generator=generator).bfloat16()
    y_TKD = torch.randn(num_tokens, top_k, dim, generator=generator).bfloat16()
    score_grad_TK = torch.full((num_tokens, top_k), float("nan"))
    launch_score_grad(grad_TD, y_TKD, score_grad_TK)
    assert torch.equal(score_grad_TK, in_order(grad_TD, y_TKD))


def test_no_tokens() -> None:
    launch_score_grad(torch.empty(0, 64).bfloat16(), torch.empty(0, 2, 64).bfloat16(), torch.empty(0, 2))


def test_sizes_with_another_order_are_left_to_torch() -> None:
    assert dots_in_kernel(8192, 8, 2048)
    assert not dots_in_kernel(1000, 8, 2048)
    assert not dots_in_kernel(8192, 8, 512)
    assert not dots_in_kernel(8192, 17, 2048)
    assert not dots_in_kernel(8192, 8, 2044)
