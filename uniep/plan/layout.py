"""The only place that knows the regions of the symmetric heap: what lies where, how large, and why reuse is safe.

Letters as in uniep.shapes; M is max_tokens, the token slots of a rank.

Nothing is cleared and no barrier stands between layers. A forward runs exchange(i), plan(i), dispatch(i), combine(i) on
one stream of each rank, a backward dispatch(i), combine(i), each under an epoch i of its own, and all ranks in the same
order; each kernel ends only after its waits. A combine ends after the combine of the same epoch has sent all rows on
every rank, for it waits for all returned flags. Let rank a write to rank b in epoch i+1:

- routing (ids, scores, and where a wants its rows back): a is in exchange(i+1), so its combine(i) ended, so b's
  combine(i) sent all its rows, so the plans, dispatches and combines up to i no longer read them, and copies of them
  that stand before b's combine(i) are made.
- received rows: a is in dispatch(i+1), so again its combine(i) ended and b's dispatch(i), whose relay reads them,
  ended. The same holds for the token flags, which that relay reads.
- returned rows: a is in combine(i+1) and returns a row, for which its relay waited for b's token of epoch i+1. b sent
  it in dispatch(i+1), which stands on b's stream behind all that reads the rows of epoch i: reduce(i), and what the
  host launched after it. b writes the rows of its own experts itself, also in combine(i+1). The same holds for the
  gradients of the scores, which return with the rows where numerics are fast.
- returned flags: a sets them at b also without a row for b, and before a backward, where no exchange holds a back,
  perhaps before b has read those of epoch i. Flags only grow and a wait is for an epoch or a later one, so b misses
  nothing: a's rows of epoch i stand before its flag of i+1.
- routing flags: a is in exchange(i+1), so its last combine ended, so b's exchange, earlier on b's stream, ended.

A rank signals every peer in exchange and combine also with zero rows, so the edges exist whatever the routing. Where
the rows of a forward had no room on b, b runs dispatch(i) and combine(i) again: it sends the same tokens to the same
places and sets the same flags, and until then no rank leaves its combine(i).
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from uniep.plan.tiles import max_num_tiles
from uniep.plan.token_map import max_num_rows
from uniep.shapes import MoEShape, ShapeError

_ALIGN_BYTES = 1024
# Narrower column tiles than this do not exist: it bounds the scoreboard.
MIN_TILE_COLS = 16
# TMA and 16-byte copies need rows that start at multiples of 16 bytes.
ROW_ALIGN_ELEMENTS = 8


@dataclass(frozen=True)
class Region:
    """A typed array in the heap of every rank, at the same offset in each."""

    offset_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class HeapLayout:
    """The regions of the heap that all layers of one shape share.

    Attributes:
        shape: the layer.
        max_tokens: M, the most tokens that a rank brings.
        tile_rows: rows of a GEMM tile, which the scoreboard is sized by.
        copy_per_expert: room for a copy of a token for each expert (for measuring).
        num_kept: buffers, beside the working one, in which returned rows can stay for a backward.

    Raises:
        ShapeError: a row of D or F elements is no multiple of 16 bytes, or max_tokens is not positive.
    """

    shape: MoEShape
    max_tokens: int
    tile_rows: int = 128
    copy_per_expert: bool = False
    num_kept: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ShapeError(f"max_tokens must be at least 1, got {self.max_tokens}")
        for what in ("dim", "hidden_dim"):
            value = getattr(self.shape, what)
            if value % ROW_ALIGN_ELEMENTS:
                raise ShapeError(f"{what} must be a multiple of {ROW_ALIGN_ELEMENTS}, got {value}")

    @cached_property
    def regions(self) -> dict[str, Region]:
        """Name -> region. Flags first: they are what is zeroed when the heap opens."""
        ranks, slots, top_k, dim = self.shape.ep_degree, self.max_tokens, self.shape.top_k, self.shape.dim
        num_receive_slots = ranks * slots * (top_k if self.copy_per_expert else 1)
        wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "routing_flags": ((ranks,), torch.int32),
            "returned_flags": ((ranks,), torch.int32),
            "token_flags": ((num_receive_slots,), torch.int32),
            "expert_ids": ((ranks, slots, top_k), torch.int32),
            "scores": ((ranks, slots, top_k), torch.float32),
            "returned_offsets": ((ranks,), torch.int64),
            "score_grads": ((slots, top_k), torch.float32),
            "received": ((num_receive_slots, dim), torch.bfloat16),
            "returned": ((1 + self.num_kept, slots * top_k, dim), torch.bfloat16),
        }
        regions: dict[str, Region] = {}
        offset = 0
        for name, (shape, dtype) in wanted.items():
            regions[name] = Region(offset, shape, dtype)
            offset = _align(offset + regions[name].num_bytes)
        return regions

    @property
    def num_bytes(self) -> int:
        """Bytes of one rank's heap."""
        last = list(self.regions.values())[-1]
        return _align(last.offset_bytes + last.num_bytes)

    @property
    def num_flag_bytes(self) -> int:
        """Bytes at the start of the heap that must be zero when it opens."""
        return self.regions["expert_ids"].offset_bytes

    @property
    def max_rows(self) -> int:
        return max_num_rows(self.shape, self.max_tokens)

    @property
    def max_tiles(self) -> int:
        return max_num_tiles(self.max_rows, self.shape.num_local_experts, self.tile_rows)

    @property
    def max_col_tiles(self) -> int:
        """The most column tiles of a GEMM + combine, for the scoreboard of (row tile, column tile)."""
        return -(-self.shape.dim // MIN_TILE_COLS)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
