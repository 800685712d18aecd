"""The Reduce role: one task sums the K returned rows of a few tokens in an order of the numerics contract."""

import triton
import triton.language as tl

from uniep.kernels.memory import region_address, row_ptrs
from uniep.kernels.numerics import round_to_bf16, to_bf16

_NO_KEY = tl.constexpr(2**31 - 1)


@triton.jit
def reduce_tokens(
    task,
    scores_TK,
    out_TD,
    saved_TKD,
    peers_W,
    rank,
    num_tokens,
    returned_offset_bytes,
    D: tl.constexpr,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SAVE_ROWS: tl.constexpr,
    TASK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """WEIGHTED: out = sum of score[k] * y[k] as fp32 FMAs, k ascending, one rounding (torch.bmm's order).

    Else the plain sum in four interleaved fp32 parts, part k mod 4, added in order, one rounding (torch.sum's order).

    SAVE_ROWS keeps the rows for the backward: the next layer overwrites those in the heap.
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
                row = tl.load(row_ptrs(first_row + k * (D * 2), cols), mask=inside, other=0.0)
                if SAVE_ROWS:
                    saved_row = saved_TKD.to(tl.int64) + (token.to(tl.int64) * K + k) * (D * 2)
                    tl.store(row_ptrs(saved_row, cols), row, mask=inside)
                y = row.to(tl.float32)
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


@triton.jit
def _ks_by_expert(expert_ids_TK, token, exists, K: tl.constexpr, KS: tl.constexpr):
    """K tensors, the j-th with the k of each token's j-th smallest expert id; equal ids go by k. Each next one is the
    smallest key that is larger than the last."""
    ks = tl.arange(0, KS)
    inside = exists[:, None] & (ks < K)[None, :]
    ids = tl.load(expert_ids_TK + token[:, None] * K + ks[None, :], mask=inside, other=0).to(tl.int32)
    keys = tl.where((ks < K)[None, :], ids * KS + ks[None, :], _NO_KEY)
    found = ()
    for _ in tl.static_range(K):
        key = tl.min(keys, 1)
        keys = tl.where(keys == key[:, None], _NO_KEY, keys)
        found = found + (key % KS,)  # type: ignore[assignment] # noqa: RUF005 (Triton cannot unpack here)
    return found


@triton.jit
def reduce_tokens_by_expert(
    task,
    expert_ids_TK,
    scores_TK,
    out_TD,
    peers_W,
    rank,
    num_tokens,
    returned_offset_bytes,
    D: tl.constexpr,
    K: tl.constexpr,
    KS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    TASK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """The K rows in ascending order of their experts, rounded after every addition, from zero (what the backward of
    x[index] does). With SCALE_ROWS a row is first multiplied by its score in fp32 and rounded."""
    returned = region_address(peers_W, rank, returned_offset_bytes)
    for step in range(0, TASK_TOKENS, ROWS):
        token = task * TASK_TOKENS + step + tl.arange(0, ROWS)
        exists = token < num_tokens
        ks = _ks_by_expert(expert_ids_TK, token, exists, K, KS)
        first_row = returned + token.to(tl.int64) * (K * D * 2)
        target = out_TD.to(tl.int64) + token.to(tl.int64) * (D * 2)
        for start in range(0, D, COLS):
            cols = start + tl.arange(0, COLS)
            inside = exists[:, None] & (cols < D)[None, :]
            total = tl.zeros((ROWS, COLS), tl.float32)
            for j in tl.static_range(K):
                row = tl.load(row_ptrs(first_row + ks[j] * (D * 2), cols), mask=inside, other=0.0).to(tl.float32)
                if SCALE_ROWS:
                    score = tl.load(scores_TK + token * K + ks[j], mask=exists, other=0.0)
                    row = round_to_bf16(row * score[:, None])
                total = round_to_bf16(total + row)
            tl.store(row_ptrs(target, cols), to_bf16(total), mask=inside)
