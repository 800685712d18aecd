"""The Reduce role: one task sums the K returned rows of a few tokens in the order of the numerics contract."""

import triton
import triton.language as tl

from uniep.kernels.memory import region_address, row_ptrs
from uniep.kernels.numerics import to_bf16


@triton.jit
def reduce_tokens(
    task,
    scores_TK,
    out_TD,
    peers_W,
    rank,
    num_tokens,
    returned_offset_bytes,
    D: tl.constexpr,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TASK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """WEIGHTED: out = sum of score[k] * y[k] as fp32 FMAs, k ascending, one rounding (torch.bmm's order).

    Else the plain sum in four interleaved fp32 parts, part k mod 4, added in order, one rounding (torch.sum's order).
    """
    returned = region_address(peers_W, rank, returned_offset_bytes)
    for step in range(0, TASK_TOKENS, ROWS):
        token = task * TASK_TOKENS + step + tl.arange(0, ROWS)
        exists = token < num_tokens
        first_row = returned + token.to(tl.int64) * (K * D * 2)
        target = out_TD.to(tl.int64) + token.to(tl.int64) * (D * 2)
        for start in range(0, D, COLS):
            cols = start + tl.arange(0, COLS)
            inside = exists[:, None] & (cols < D)[None, :]
            acc0 = tl.zeros((ROWS, COLS), tl.float32)
            acc1 = tl.zeros((ROWS, COLS), tl.float32)
            acc2 = tl.zeros((ROWS, COLS), tl.float32)
            acc3 = tl.zeros((ROWS, COLS), tl.float32)
            for k in tl.static_range(K):
                y = tl.load(row_ptrs(first_row + k * (D * 2), cols), mask=inside, other=0.0).to(tl.float32)
                if WEIGHTED:
                    score = tl.load(scores_TK + token * K + k, mask=exists, other=0.0)
                    acc0 = tl.fma(tl.zeros((ROWS, COLS), tl.float32) + score[:, None], y, acc0)
                elif k % 4 == 0:
                    acc0 += y
                elif k % 4 == 1:
                    acc1 += y
                elif k % 4 == 2:
                    acc2 += y
                else:
                    acc3 += y
            total = acc0 if WEIGHTED else ((acc0 + acc1) + acc2) + acc3
            tl.store(row_ptrs(target, cols), to_bf16(total), mask=inside)
