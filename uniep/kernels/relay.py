"""The Relay role: one task fills the rows of one GEMM tile, from the receive buffer and from the rank's own tokens."""

import triton
import triton.language as tl

from uniep.kernels.memory import copy_rows, copy_scaled_rows, region_address
from uniep.kernels.signals import signal_tile, wait_flags
from uniep.kernels.timeline import time_ns


@triton.jit
def relay_tile(
    tile,
    x_TD,
    rows_RD,
    row_origin_R,
    tile_first_row,
    tile_end_row,
    scores_address,
    peers_W,
    input_ready,
    watch,
    records,
    rank,
    epoch,
    timeout_us,
    received_offset_bytes,
    flags_offset_bytes,
    KERNEL: tl.constexpr,
    WHAT: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    COPY_PER_EXPERT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COPY_ROWS: tl.constexpr,
    COPY_COLS: tl.constexpr,
):
    """Waits for the senders of the tile's rows, which wait for nothing. A token that several experts want came once
    and is copied once for each. Rows of the rank itself come straight from x_TD. With SCALE_ROWS each row is
    multiplied by its score; scores_address is that of the scores of all ranks, [W, M, K]. Returns when it ended the
    wait."""
    first_row = tl.load(tile_first_row + tile)
    end_row = tl.load(tile_end_row + tile)
    rows = first_row + tl.arange(0, TILE_ROWS)
    exists = rows < end_row
    origin = tl.load(row_origin_R + rows, mask=exists, other=0)
    source = origin // NUM_SLOTS
    slot = origin if COPY_PER_EXPERT else origin // K
    flags = region_address(peers_W, rank, flags_offset_bytes).to(tl.pointer_type(tl.int32))
    wait_flags(
        flags + slot, exists & (source != rank), epoch, watch, timeout_us, KERNEL, tile, WHAT, source, SYSTEM=True
    )
    work_ns = time_ns(records)

    received = region_address(peers_W, rank, received_offset_bytes)
    step_rows = first_row + tl.arange(0, COPY_ROWS)
    # One step ahead, so that a copy does not wait first for the origins and then for the rows.
    next_origin = tl.load(row_origin_R + step_rows, mask=step_rows < end_row, other=0)
    for _ in range(0, TILE_ROWS, COPY_ROWS):
        step_exists = step_rows < end_row
        step_origin = next_origin.to(tl.int64)
        next_rows = step_rows + COPY_ROWS
        next_origin = tl.load(row_origin_R + next_rows, mask=next_rows < end_row, other=0)
        step_slot = step_origin if COPY_PER_EXPERT else step_origin // K
        own = x_TD.to(tl.int64) + (step_origin - rank.to(tl.int64) * NUM_SLOTS) // K * (D * 2)
        address = tl.where(step_origin // NUM_SLOTS == rank, own, received + step_slot * (D * 2))
        target = rows_RD.to(tl.int64) + step_rows.to(tl.int64) * (D * 2)
        if SCALE_ROWS:
            scores = scores_address.to(tl.int64).to(tl.pointer_type(tl.float32))
            scale = tl.load(scores + step_origin, mask=step_exists, other=0.0)
            copy_scaled_rows(address, target, scale, step_exists, D, COPY_COLS)
        else:
            copy_rows(address, target, step_exists, D, COPY_COLS)
        step_rows = next_rows
    signal_tile(input_ready + tile, epoch)
    return work_ns
