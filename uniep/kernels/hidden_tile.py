"""The Comp role of the dispatch: one task computes a tile of the hidden layer, its values or its gradients."""

import triton
import triton.language as tl

from uniep.kernels.gemm_tile import column_parts, gemm_tile_by_weight, gemm_tile_pair
from uniep.kernels.swiglu import (
    swiglu,
    swiglu_backward,
    swiglu_backward_compiled,
    swiglu_backward_scored,
    swiglu_compiled,
)
from uniep.kernels.tasks import THIRD_ROLE, claim


@triton.jit
def up_tile(
    a,
    w1,
    w3,
    g_RF,
    u_RF,
    h_RF,
    counters,
    expert,
    first_row,
    end_row,
    col,
    D: tl.constexpr,
    F: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    SAVE_HALVES: tl.constexpr,
    COMPILED: tl.constexpr,
    LANES: tl.constexpr,
):
    """g = x w1^T, u = x w3^T and h = silu(g) u. Returns the claim of the next task, taken before the epilogue."""
    b_row = expert * F + col
    gate, up = gemm_tile_pair(
        a, w1, w3, first_row, end_row, b_row, (expert + 1) * F, D, TILE_ROWS, BLOCK_N, BLOCK_K, TMA
    )
    next_task = claim(counters, THIRD_ROLE, LANES)
    gate, up, h = swiglu_compiled(gate, up) if COMPILED else swiglu(gate, up)
    rows = first_row + tl.arange(0, TILE_ROWS)
    cols = col + tl.arange(0, BLOCK_N)
    place = rows[:, None].to(tl.int64) * F + cols[None, :]
    inside = (rows < end_row)[:, None] & (cols < F)[None, :]
    if SAVE_HALVES:
        tl.store(g_RF + place, gate, mask=inside)
        tl.store(u_RF + place, up, mask=inside)
    tl.store(h_RF + place, h, mask=inside)
    return next_task


@triton.jit
def hidden_grad_tile(
    grad_y,
    w2,
    g_RF,
    u_RF,
    grad_g_RF,
    grad_u_RF,
    h_RF,
    score_parts_RP,
    scores_address,
    row_origin_R,
    counters,
    expert,
    first_row,
    end_row,
    col,
    D: tl.constexpr,
    F: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    PARTS: tl.constexpr,
    SCORED: tl.constexpr,
    COMPILED: tl.constexpr,
    LANES: tl.constexpr,
):
    """grad_h = grad_y w2, through SwiGLU to grad_g and grad_u, and h once more for the gradient of w2. Returns the
    claim of the next task.

    SCORED: the rows of grad_y are not scaled by their scores. The scores come in here, also into h, and each row of
    the tile leaves its part of the gradient of its score.
    """
    acc = gemm_tile_by_weight(grad_y, w2, first_row, end_row, expert, col, D, F, TILE_ROWS, BLOCK_N, BLOCK_K, TMA)
    next_task = claim(counters, THIRD_ROLE, LANES)
    part_cols: tl.constexpr = BLOCK_N // PARTS
    rows = first_row + tl.arange(0, TILE_ROWS)
    parts = column_parts((acc,), PARTS)
    gate, up = _load_halves(g_RF, u_RF, rows, end_row, col, F, part_cols)
    if SCORED:
        origin = tl.load(row_origin_R + rows, mask=rows < end_row, other=0)
        scores = scores_address.to(tl.int64).to(tl.pointer_type(tl.float32))
        score = tl.load(scores + origin, mask=rows < end_row, other=0.0)[:, None]
        score_part = tl.zeros((TILE_ROWS,), tl.float32)
    for part in tl.static_range(PARTS):
        part_gate, part_up = gate, up
        if part + 1 < PARTS:
            # Those of the next part meanwhile.
            gate, up = _load_halves(g_RF, u_RF, rows, end_row, col + (part + 1) * part_cols, F, part_cols)
        cols = col + part * part_cols + tl.arange(0, part_cols)
        place = rows[:, None].to(tl.int64) * F + cols[None, :]
        inside = (rows < end_row)[:, None] & (cols < F)[None, :]
        if SCORED:
            grad_gate, grad_up, h, products = swiglu_backward_scored(parts[part], part_gate, part_up, score)
            score_part += tl.sum(products, 1)
        elif COMPILED:
            grad_gate, grad_up, h = swiglu_backward_compiled(parts[part], part_gate, part_up)
        else:
            grad_gate, grad_up, h = swiglu_backward(parts[part], part_gate, part_up)
        tl.store(grad_g_RF + place, grad_gate, mask=inside)
        tl.store(grad_u_RF + place, grad_up, mask=inside)
        tl.store(h_RF + place, h, mask=inside)
    if SCORED:
        num_col_tiles: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
        part_of_row = score_parts_RP + rows.to(tl.int64) * num_col_tiles + col // BLOCK_N
        tl.store(part_of_row, score_part, mask=rows < end_row)
    return next_task


@triton.jit
def _load_halves(g_RF, u_RF, rows, end_row, col, F: tl.constexpr, COLS: tl.constexpr):
    cols = col + tl.arange(0, COLS)
    place = rows[:, None].to(tl.int64) * F + cols[None, :]
    inside = (rows < end_row)[:, None] & (cols < F)[None, :]
    return tl.load(g_RF + place, mask=inside, other=0.0), tl.load(u_RF + place, mask=inside, other=0.0)
