"""The Comm role of the dispatch: one task sends a chunk of a destination's tokens and sets their flags."""

import triton
import triton.language as tl

from uniep.kernels.memory import copy_rows, region_address
from uniep.kernels.signals import signal_ranks


@triton.jit
def num_send_tasks(send_offsets, W: tl.constexpr, RANKS: tl.constexpr, CHUNK: tl.constexpr):
    """Tasks go by chunk number and within it by destination, so all are fed at once; short destinations leave gaps."""
    ranks = tl.arange(0, RANKS)
    start = tl.load(send_offsets + ranks, mask=ranks < W, other=0)
    end = tl.load(send_offsets + ranks + 1, mask=ranks < W, other=0)
    return tl.cdiv(tl.max(end - start, 0), CHUNK) * (W - 1)


@triton.jit
def send_tokens(
    task,
    x_TD,
    send_rows_N,
    send_offsets,
    peers_W,
    watch,
    rank,
    epoch,
    received_offset_bytes,
    flags_offset_bytes,
    NUM_SLOTS: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    COPY_PER_EXPERT: tl.constexpr,
    CHUNK: tl.constexpr,
    COPY_ROWS: tl.constexpr,
    COPY_COLS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Waits for nothing. Destinations start at the next rank, so that no rank is everyone's first.

    The flags of a chunk's tokens follow its data behind one barrier; each is released by one thread (LANES threads).
    """
    destination = (rank + 1 + task % (W - 1)) % W
    first = tl.load(send_offsets + destination) + (task // (W - 1)) * CHUNK
    end = tl.minimum(first + CHUNK, tl.load(send_offsets + destination + 1))
    origin = rank.to(tl.int64) * NUM_SLOTS
    if first < end:
        received = region_address(peers_W, destination, received_offset_bytes)
        step_index = first + tl.arange(0, COPY_ROWS)
        # One step ahead, so that a copy does not wait first for the list and then for the rows.
        next_flat = tl.load(send_rows_N + step_index, mask=step_index < end, other=0)
        for _ in range(0, CHUNK, COPY_ROWS):
            step_exists = step_index < end
            step_flat = next_flat.to(tl.int64)
            step_index += COPY_ROWS
            next_flat = tl.load(send_rows_N + step_index, mask=step_index < end, other=0)
            step_slot = origin + step_flat if COPY_PER_EXPERT else (origin + step_flat) // K
            source = x_TD.to(tl.int64) + step_flat // K * (D * 2)
            copy_rows(source, received + step_slot * (D * 2), step_exists, D, COPY_COLS)
        index = first + tl.arange(0, LANES)
        exists = index < end
        flat = tl.load(send_rows_N + index, mask=exists, other=0).to(tl.int64)
        slot = origin + flat if COPY_PER_EXPERT else (origin + flat) // K
        flags = region_address(peers_W, destination, flags_offset_bytes).to(tl.pointer_type(tl.int32))
        signal_ranks(flags + slot, exists, epoch, watch)
