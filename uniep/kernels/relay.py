"""The Relay role: one task fills the rows of one GEMM tile, from the receive buffer and from the rank's own tokens."""

import triton
import triton.language as tl

from uniep.kernels.memory import region_address, row_ptrs
from uniep.kernels.numerics import to_bf16
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
    STAGES: tl.constexpr,
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
    scores = scores_address.to(tl.int64).to(tl.pointer_type(tl.float32))
    num_row_steps: tl.constexpr = (TILE_ROWS + COPY_ROWS - 1) // COPY_ROWS
    num_col_steps: tl.constexpr = (D + COPY_COLS - 1) // COPY_COLS
    # Pipelined through shared memory, which the GEMM does not need meanwhile.
    for step in tl.range(0, num_row_steps * num_col_steps, num_stages=STAGES):
        step_rows = first_row + step // num_col_steps * COPY_ROWS + tl.arange(0, COPY_ROWS)
        cols = step % num_col_steps * COPY_COLS + tl.arange(0, COPY_COLS)
        step_exists = step_rows < end_row
        step_origin = tl.load(row_origin_R + step_rows, mask=step_exists, other=0).to(tl.int64)
        step_slot = step_origin if COPY_PER_EXPERT else step_origin // K
        own = x_TD.to(tl.int64) + (step_origin - rank.to(tl.int64) * NUM_SLOTS) // K * (D * 2)
        address = tl.where(step_origin // NUM_SLOTS == rank, own, received + step_slot * (D * 2))
        inside = step_exists[:, None] & (cols < D)[None, :]
        copied = tl.load(row_ptrs(address, cols), mask=inside, other=0.0)
        if SCALE_ROWS:
            scale = tl.load(scores + step_origin, mask=step_exists, other=0.0)
            copied = to_bf16(copied.to(tl.float32) * scale[:, None])
        target = rows_RD.to(tl.int64) + step_rows.to(tl.int64) * (D * 2)
        tl.store(row_ptrs(target, cols), copied, mask=inside)
    signal_tile(input_ready + tile, epoch)
    return work_ns
