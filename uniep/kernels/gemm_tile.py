"""Tiles of a padding-free grouped GEMM: the Comp role's work.

One fp32 accumulator an output, the reduction dimension ascending. A tile reads TILE_ROWS rows from its first row
whatever
its end: rows past the end are the next expert's, or not yet written, and the caller never stores them. Columns past the
end of an expert's weight are the next expert's and equally never stored. Past the end of the reduction dimension both
operands read zeros, which change no bit.
"""

import triton
import triton.language as tl

from uniep.kernels.numerics import dot_bf16


@triton.jit
def _load_tile(
    source,
    row,
    col,
    end_row,
    COLS: tl.constexpr,
    ROWS_OF_TILE: tl.constexpr,
    COLS_OF_TILE: tl.constexpr,
    TMA: tl.constexpr,
):
    """A [ROWS_OF_TILE, COLS_OF_TILE] tile of a matrix with COLS columns: a TMA descriptor or a pointer."""
    if TMA:
        tile = source.load([row, col])
    else:
        rows = row + tl.arange(0, ROWS_OF_TILE)
        cols = col + tl.arange(0, COLS_OF_TILE)
        ptrs = source + rows[:, None].to(tl.int64) * COLS + cols[None, :]
        tile = tl.load(ptrs, mask=(rows < end_row)[:, None] & (cols < COLS)[None, :], other=0.0)
    return tile


@triton.jit
def gemm_tile(
    a,
    b,
    row,
    end_row,
    b_row,
    b_end_row,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """a[row:, :] @ b[b_row:, :]^T, fp32 [BLOCK_M, BLOCK_N]."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, tl.cdiv(DEPTH, BLOCK_K)):
        a_tile = _load_tile(a, row, k * BLOCK_K, end_row, DEPTH, BLOCK_M, BLOCK_K, TMA)
        b_tile = _load_tile(b, b_row, k * BLOCK_K, b_end_row, DEPTH, BLOCK_N, BLOCK_K, TMA)
        acc = dot_bf16(a_tile, b_tile.T, acc)
    return acc


@triton.jit
def gemm_tile_pair(
    a,
    b1,
    b3,
    row,
    end_row,
    b_row,
    b_end_row,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """Two products of the same rows in one pass, with w1 and w3 where they lie: each operand tile is read once."""
    acc1 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc3 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, tl.cdiv(DEPTH, BLOCK_K)):
        a_tile = _load_tile(a, row, k * BLOCK_K, end_row, DEPTH, BLOCK_M, BLOCK_K, TMA)
        b1_tile = _load_tile(b1, b_row, k * BLOCK_K, b_end_row, DEPTH, BLOCK_N, BLOCK_K, TMA)
        b3_tile = _load_tile(b3, b_row, k * BLOCK_K, b_end_row, DEPTH, BLOCK_N, BLOCK_K, TMA)
        acc1 = dot_bf16(a_tile, b1_tile.T, acc1)
        acc3 = dot_bf16(a_tile, b3_tile.T, acc3)
    return acc1, acc3


@triton.jit
def _load_weight(
    source,
    expert,
    row,
    col,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ROWS_OF_TILE: tl.constexpr,
    COLS_OF_TILE: tl.constexpr,
    TMA: tl.constexpr,
):
    """A [ROWS_OF_TILE, COLS_OF_TILE] tile of an expert's [ROWS, COLS] weight, zeros past its rows and columns: what
    follows in memory is the next expert's, and zero times an infinity is no zero."""
    if TMA:
        tile = source.load([expert, row, col]).reshape(ROWS_OF_TILE, COLS_OF_TILE)
    else:
        rows = row + tl.arange(0, ROWS_OF_TILE)
        cols = col + tl.arange(0, COLS_OF_TILE)
        ptrs = source + expert.to(tl.int64) * (ROWS * COLS) + rows[:, None].to(tl.int64) * COLS + cols[None, :]
        tile = tl.load(ptrs, mask=(rows < ROWS)[:, None] & (cols < COLS)[None, :], other=0.0)
    return tile


@triton.jit
def gemm_tile_by_weight(
    a,
    weight,
    row,
    end_row,
    expert,
    col,
    DEPTH: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """a[row:, :] @ weight[expert, :, col:], fp32 [BLOCK_M, BLOCK_N], of weights [L, DEPTH, COLS] where they lie: wgmma
    reads either operand along either dimension."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, tl.cdiv(DEPTH, BLOCK_K)):
        a_tile = _load_tile(a, row, k * BLOCK_K, end_row, DEPTH, BLOCK_M, BLOCK_K, TMA)
        b_tile = _load_weight(weight, expert, k * BLOCK_K, col, DEPTH, COLS, BLOCK_K, BLOCK_N, TMA)
        acc = dot_bf16(a_tile, b_tile, acc)
    return acc
