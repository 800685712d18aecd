"""`uniep.kernels.launch` finds a kernel's binary again by all that Triton specializes on."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from uniep.kernels.launch import launch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@triton.jit(do_not_specialize=["plus"])
def _add_kernel(source, target, described, times, plus, N: tl.constexpr, NAMED: tl.constexpr):
    index = tl.arange(0, N)
    values = tl.load(source + index).to(tl.float32) * times + plus
    if described is not None:
        values += tl.reshape(described.load([0, 0]), (N,)).to(tl.float32)
    tl.store(target + index, values + NAMED)


def _run(source: Tensor, described: TensorDescriptor | None, times: int, plus: int, named: int) -> Tensor:
    target = torch.full((len(source),), torch.nan, device="cuda")
    launch(_add_kernel, 1, source, target, described, times, plus, N=len(source), NAMED=named, num_warps=1)
    return target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arguments_of_every_kind(dtype: torch.dtype) -> None:
    values = torch.arange(200, device="cuda").to(dtype)
    table = torch.arange(64, device="cuda", dtype=torch.bfloat16).view(1, 64)
    described = TensorDescriptor.from_tensor(table, [1, 64])
    # Twice: the second time each is found again. 33 elements on, the address is no multiple of 16.
    for _ in range(2):
        for start in (0, 32, 33):
            source = values[start : start + 64]
            for times in (1, 3, 16, 48):
                for plus in (0, 1, 2, 16):
                    for named in (0, 5):
                        expected = source.float() * times + plus + named
                        assert torch.equal(_run(source, None, times, plus, named), expected)
                        assert torch.equal(_run(source, described, times, plus, named), expected + table[0].float())


def test_large_ints() -> None:
    values = torch.zeros(64, device="cuda")
    for _ in range(2):
        for plus in (5, 2**40):
            assert torch.equal(_run(values, None, 1, plus, 0), values + float(plus))
