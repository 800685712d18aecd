"""Addresses in the symmetric heap, and copies of rows between such addresses.

The kernels get the table of peer bases and byte offsets, no tensors of the heap: a row's place is chosen among ranks
while the kernel runs. A pointer made from an integer has lost its alignment; without the hints of `row_ptrs` a copy
moves 2 bytes at a time (measured: 2.35 ms instead of 0.91 ms).
"""

import triton
import triton.language as tl


@triton.jit
def region_address(peers_W, rank, offset_bytes):
    """Address of a region of a rank's heap, or tensor of addresses for a tensor of ranks."""
    return tl.load(peers_W + rank) + offset_bytes


@triton.jit
def row_ptrs(address_B, cols_C):
    """bf16 pointers [B, C] to columns of rows that start at 16-byte aligned addresses; cols must be contiguous."""
    ptrs = address_B.to(tl.pointer_type(tl.bfloat16))[:, None] + cols_C[None, :]
    return tl.max_contiguous(tl.multiple_of(ptrs, [1, 16]), [1, cols_C.shape[0]])


@triton.jit
def copy_rows(source_B, target_B, mask_B, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Copies bf16 rows of D elements from addresses to addresses."""
    for start in range(0, D, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        mask = mask_B[:, None] & (cols < D)[None, :]
        rows = tl.load(row_ptrs(source_B, cols), mask=mask)
        tl.store(row_ptrs(target_B, cols), rows, mask=mask)
