"""The Comm role of the combine: one task returns one finished tile's rows to the ranks they came from."""

import triton
import triton.language as tl

from uniep.kernels.memory import copy_rows, region_address
from uniep.kernels.signals import fence_system, wait_flags
from uniep.kernels.timeline import time_ns


@triton.jit
def return_tile(
    tile,
    y_RD,
    row_origin_R,
    tile_first_row,
    tile_end_row,
    peers_W,
    output_ready,
    watch,
    records,
    rank,
    epoch,
    timeout_us,
    returned_offset_bytes,
    KERNEL: tl.constexpr,
    WHAT: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    D: tl.constexpr,
    NUM_COL_TILES: tl.constexpr,
    COL_TILES: tl.constexpr,
    STAGED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COPY_ROWS: tl.constexpr,
    COPY_COLS: tl.constexpr,
):
    """Waits for all column tiles of the row tile, which comp stored. Rows of this rank lie in its own buffer already;
    without STAGED the others do too, and only their order remains to be kept. Returns when it ended the wait."""
    col_tiles = tl.arange(0, COL_TILES)
    wait_flags(
        output_ready + tile * NUM_COL_TILES + col_tiles,
        col_tiles < NUM_COL_TILES,
        epoch,
        watch,
        timeout_us,
        KERNEL,
        tile,
        WHAT,
        tl.zeros((COL_TILES,), tl.int32) + tile,
        SYSTEM=False,
    )
    work_ns = time_ns(records)
    if STAGED:
        first_row = tl.load(tile_first_row + tile)
        end_row = tl.load(tile_end_row + tile)
        rows = first_row + tl.arange(0, COPY_ROWS)
        # One step ahead, so that a copy does not wait first for the origins and then for the rows.
        next_origin = tl.load(row_origin_R + rows, mask=rows < end_row, other=0)
        for _ in range(0, TILE_ROWS, COPY_ROWS):
            origin = next_origin
            next_rows = rows + COPY_ROWS
            next_origin = tl.load(row_origin_R + next_rows, mask=next_rows < end_row, other=0)
            source = origin // NUM_SLOTS
            returned = (rows < end_row) & (source != rank)
            place = (origin % NUM_SLOTS).to(tl.int64) * (D * 2)
            target = region_address(peers_W, source, returned_offset_bytes) + place
            copy_rows(y_RD.to(tl.int64) + rows.to(tl.int64) * (D * 2), target, returned, D, COPY_COLS)
            rows = next_rows
    fence_system()
    return work_ns
