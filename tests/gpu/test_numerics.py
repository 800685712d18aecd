"""The operations that stand for several of CUDA's, on every value or very many: no bit may differ from torch."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from uniep.kernels.numerics import multiply_bf16
from uniep.kernels.swiglu import reciprocal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BLOCK = 1024


@triton.jit
def reciprocal_kernel(x, out, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, reciprocal(tl.load(x + place, mask=place < size, other=1.0)), mask=place < size)


@triton.jit
def multiply_kernel(a, b, out, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    left = tl.load(a + place, mask=inside, other=0.0)
    tl.store(out + place, multiply_bf16(left, tl.load(b + place, mask=inside, other=0.0)), mask=inside)


def floats(first_bits: int, end_bits: int) -> Tensor:
    """All fp32 whose bits are in a range."""
    return torch.arange(first_bits, end_bits, dtype=torch.int32, device="cuda").view(torch.float32)


def reciprocals(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    reciprocal_kernel[(-(-len(x) // BLOCK),)](x, out, len(x), BLOCK=BLOCK)
    return out


@pytest.mark.parametrize("exponent", [0, 1, 60, 124, 125])
def test_reciprocal_is_rounded_to_the_nearest(exponent: int) -> None:
    """All fp32 of some exponents: of the others the mantissas are the same."""
    x = floats((127 + exponent) << 23, (128 + exponent) << 23)
    assert torch.equal(reciprocals(x), 1.0 / x)


def test_reciprocal_of_every_gate() -> None:
    """What a sigmoid divides by, for every bf16: up to infinity, where quotients are subnormal or zero."""
    gate = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16).float()
    x = 1.0 + torch.exp(-gate[~gate.isnan()])
    assert torch.equal(reciprocals(x), 1.0 / x)


def test_reciprocal_of_no_number_is_none() -> None:
    assert reciprocals(torch.full((BLOCK,), float("nan"), device="cuda")).isnan().all()


def test_products_of_bf16_are_rounded_once() -> None:
    """Every bf16, also infinities and the smallest, with many others."""
    every = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(0)
    left = every.repeat(512)
    right = every[torch.randint(1 << 16, (len(left),), device="cuda", generator=generator)]
    out = torch.empty_like(left)
    multiply_kernel[(len(left) // BLOCK,)](left, right, out, len(left), BLOCK=BLOCK)
    want = left * right
    number = ~want.isnan()
    assert torch.equal(out.view(torch.int16)[number], want.view(torch.int16)[number])
    assert torch.equal(out.isnan(), ~number)
