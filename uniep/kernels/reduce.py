"""The Reduce role: one task sums the K returned rows of a few tokens in the order of the numerics contract."""

import triton
import triton.language as tl

from uniep.kernels.memory import region_address
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
    COLS: tl.constexpr,
):
    """WEIGHTED: out = sum of score[k] * y[k] as fp32 FMAs, k ascending, one rounding (torch.bmm's order).

    Else the plain sum in four interleaved fp32 parts, part k mod 4, added in order, one rounding (torch.sum's order).
    """
    returned = region_address(peers_W, rank, returned_offset_bytes)
    returned = tl.multiple_of(returned.to(tl.pointer_type(tl.bfloat16)), 16)
    for index in range(0, TASK_TOKENS):
        token = task * TASK_TOKENS + index
        # A token past the end is summed into nothing.
        exists = token < num_tokens
        rows = returned + token.to(tl.int64) * (K * D)
        for start in range(0, D, COLS):
            cols = start + tl.arange(0, COLS)
            inside = (cols < D) & exists
            acc0 = tl.zeros((COLS,), tl.float32)
            acc1 = tl.zeros((COLS,), tl.float32)
            acc2 = tl.zeros((COLS,), tl.float32)
            acc3 = tl.zeros((COLS,), tl.float32)
            for k in tl.static_range(K):
                y = tl.load(rows + k * D + cols, mask=inside, other=0.0).to(tl.float32)
                if WEIGHTED:
                    score = tl.load(scores_TK + token * K + k, mask=exists, other=0.0)
                    acc0 = tl.fma(tl.zeros((COLS,), tl.float32) + score, y, acc0)
                elif k % 4 == 0:
                    acc0 += y
                elif k % 4 == 1:
                    acc1 += y
                elif k % 4 == 2:
                    acc2 += y
                else:
                    acc3 += y
            total = acc0 if WEIGHTED else ((acc0 + acc1) + acc2) + acc3
            tl.store(out_TD + token.to(tl.int64) * D + cols, to_bf16(total), mask=inside)
