"""Copies between addresses, also past 2^31 elements: in a file with holes, which takes no memory."""

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from uniep.kernels.copy_shape import copy_shape
from uniep.kernels.memory import copy_rows
from uniep.kernels.numerics import to_bf16

DIM = 7168
NUM_ROWS = 524_288


@triton.jit
def _copy_kernel(source_address, target, rows, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    index = tl.arange(0, ROWS)
    row = tl.load(rows + index)
    from_address = source_address + row.to(tl.int64) * (D * 2)
    to_address = target.to(tl.int64) + index.to(tl.int64) * (D * 2)
    copy_rows(from_address, to_address, index < ROWS - 1, D, COLS)


@triton.jit
def _round_kernel(source, target, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(target + index, to_bf16(tl.load(source + index)))


@pytest.fixture(scope="module")
def large_rows(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    path: Path = tmp_path_factory.mktemp("holes") / "rows"
    with open(path, "wb") as file:
        file.truncate(NUM_ROWS * DIM * 2)
    rows = torch.from_file(str(path), shared=True, size=NUM_ROWS * DIM, dtype=torch.bfloat16)
    return rows.view(NUM_ROWS, DIM)


def test_copies_past_32_bits(large_rows: torch.Tensor) -> None:
    rows = torch.tensor([0, 299_999, NUM_ROWS - 1, 5], dtype=torch.int32)
    values = torch.randn(4, DIM).bfloat16()
    large_rows[rows.long()] = values
    target = torch.full((4, DIM), float("nan"), dtype=torch.bfloat16)
    _, cols = copy_shape(DIM, 16_384)
    # Only addresses go in: the interpreter would copy the whole tensor.
    _copy_kernel[(1,)](large_rows.data_ptr(), target, rows, D=DIM, ROWS=4, COLS=cols)
    assert torch.equal(target[:3], values[:3])
    assert torch.isnan(target[3].float()).all()


@pytest.mark.parametrize("dim", [8, 72, 128, 896, 1280, 2304, 4096, 5120, 7168])
def test_copy_shape_covers_every_column(dim: int) -> None:
    rows, cols = copy_shape(dim, 16_384)
    assert rows & (rows - 1) == 0
    assert cols & (cols - 1) == 0
    assert 1 <= rows <= 32
    assert rows * cols <= 16_384
    assert -(-dim // cols) * cols < 2 * dim or dim < 128


def test_rounds_to_nearest_even() -> None:
    """Ties, carries into the exponent, signs, subnormal numbers, infinities and NaN."""
    bits = torch.tensor(
        [0x3F808000, 0x3F818000, 0x3F7FFFFF, 0x3F7F8000, 0x7F7FFFFF, 0x00000001, 0x00018000, 0x7F800000, 0x7FC00000]
    )
    values = torch.cat([bits.to(torch.int32).view(torch.float32), torch.randn(7)])
    values = torch.cat([values, -values])
    rounded = torch.empty(32, dtype=torch.bfloat16)
    _round_kernel[(1,)](values, rounded, BLOCK=32)
    number = ~values.isnan()
    assert torch.equal(rounded[number].view(torch.int16), values[number].bfloat16().view(torch.int16))
    assert rounded[~number].isnan().all()
