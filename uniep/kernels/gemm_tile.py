"""Tiles of a padding-free grouped GEMM: the Comp role's work.

One fp32 accumulator an output, the reduction dimension ascending. A tile reads TILE_ROWS rows from its first row
whatever its end: rows past the end are the next expert's, or not yet written, and the caller never stores them.
Columns past the end of an expert's weight are the next expert's and equally never stored. Past the end of the reduction
dimension both operands read zeros, which change no bit.
"""

import triton
import triton.language as tl

from uniep.kernels.numerics import INTERPRETED, dot_bf16, round_to_bf16, to_bf16


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
    return _add_product(acc, a, weight, row, end_row, expert, col, DEPTH, COLS, BLOCK_M, BLOCK_N, BLOCK_K, TMA)


@triton.jit
def _add_product(
    acc,
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
    for k in range(0, tl.cdiv(DEPTH, BLOCK_K)):
        a_tile = _load_tile(a, row, k * BLOCK_K, end_row, DEPTH, BLOCK_M, BLOCK_K, TMA)
        b_tile = _load_weight(weight, expert, k * BLOCK_K, col, DEPTH, COLS, BLOCK_K, BLOCK_N, TMA)
        acc = dot_bf16(a_tile, b_tile, acc)
    return acc


@triton.jit
def gemm_tile_two(
    a1,
    weight1,
    a3,
    weight3,
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
    """a1 @ weight1, packed by _pack_bf16, and a3 @ weight3 in fp32: one accumulator serves both in turn."""
    acc = gemm_tile_by_weight(a1, weight1, row, end_row, expert, col, DEPTH, COLS, BLOCK_M, BLOCK_N, BLOCK_K, TMA)
    first = _pack_bf16(acc)
    acc = gemm_tile_by_weight(a3, weight3, row, end_row, expert, col, DEPTH, COLS, BLOCK_M, BLOCK_N, BLOCK_K, TMA)
    return first, acc


@triton.jit
def gemm_tile_joined(
    a1,
    weight1,
    a3,
    weight3,
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
    """a1 @ weight1 + a3 @ weight3 in one fp32 accumulator, which nothing is rounded between."""
    acc = gemm_tile_by_weight(a1, weight1, row, end_row, expert, col, DEPTH, COLS, BLOCK_M, BLOCK_N, BLOCK_K, TMA)
    return _add_product(acc, a3, weight3, row, end_row, expert, col, DEPTH, COLS, BLOCK_M, BLOCK_N, BLOCK_K, TMA)


@triton.jit
def _pack_bf16(tile):
    """Rounds fp32 [M, N] to bf16, two neighbours of a row to an uint32 [M, N / 2]. Left to itself the compiler gives
    each bf16 that lives through a loop a register of its own, and it would see through shifts: hence the instruction.
    """
    left, right = tile.reshape(tile.shape[0], tile.shape[1] // 2, 2).split()
    if INTERPRETED:
        left_bits = to_bf16(left).to(tl.float32).to(tl.uint32, bitcast=True)
        right_bits = to_bf16(right).to(tl.float32).to(tl.uint32, bitcast=True)
        packed = (left_bits >> 16) | right_bits
    else:
        packed = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [left, right], dtype=tl.uint32, is_pure=True, pack=1
        )
    return packed


@triton.jit
def sum_of_two(packed, acc):
    """What gemm_tile_two returns, or the same columns of both: each product rounded to bf16, then their fp32 sum."""
    left = (packed << 16).to(tl.float32, bitcast=True)
    right = (packed & 0xFFFF0000).to(tl.float32, bitcast=True)
    first = tl.join(left, right).reshape(acc.shape[0], acc.shape[1])
    return first + round_to_bf16(acc)


@triton.jit
def column_parts(tiles, PARTS: tl.constexpr):
    """PARTS tiles of neighbouring columns of one tile, in order, by halving. Moves nothing: a thread of the tensor
    cores' layout holds whole rows."""
    if len(tiles) == PARTS:
        return tiles
    else:
        halves = ()
        for i in tl.static_range(len(tiles)):
            tile = tiles[i]
            pair = tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()
            halves = halves + pair
        return column_parts(halves, PARTS)
