"""The symmetric heap as the kernels and the layer see it, whatever memory it lies in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from uniep.plan.layout import HeapLayout, Region
from uniep.plan.room import Room
from uniep.symmetric.returned import ReturnedBuffer, lend
from uniep.symmetric.watch import NUM_WATCH_WORDS, raise_if_given_up

# Task counters of the kernels, see uniep.kernels.tasks.
NUM_COUNTERS = 16
DEFAULT_TIMEOUT_S = 60.0


class HeapError(RuntimeError):
    """The heap could not be opened or used; the text says by which rank or setting."""


class MissingPeerError(HeapError):
    """A rank did not come to open its heap."""


@dataclass(frozen=True)
class Scoreboard:
    """What the programs of one rank tell each other; never written by peers. All int32, on the heap's device.

    Attributes:
        input_ready: [max_tiles], epoch in which the relay filled a tile's rows.
        output_ready: [max_tiles * max_col_tiles], epoch in which a tile of a GEMM + combine was stored.
        counters: [NUM_COUNTERS], task counters; the last program of a launch leaves them at zero.
        watch: see `uniep.kernels.signals`.
    """

    input_ready: Tensor
    output_ready: Tensor
    counters: Tensor
    watch: Tensor


class SymmetricHeap:
    """One rank's part of the heap and the addresses of all parts. Shared by all layers of one shape.

    Open it with one of the open_* functions of this package, close it explicitly or use it in a `with` statement. All
    ranks open it together and then make the same calls in the same order: the epoch counts them.
    """

    def __init__(
        self,
        layout: HeapLayout,
        *,
        rank: int,
        base_U8: Tensor,
        peer_addresses: Sequence[int],
        close: Callable[[], None],
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if len(peer_addresses) != layout.shape.ep_degree:
            raise HeapError(f"peers must be ep_degree = {layout.shape.ep_degree}, got {len(peer_addresses)}")
        self.layout = layout
        self.rank = rank
        self.timeout_s = timeout_s
        self.device = base_U8.device
        self.peers_W = torch.tensor(peer_addresses, dtype=torch.int64, device=self.device)
        self.scoreboard = Scoreboard(
            *(
                torch.zeros(num_words, dtype=torch.int32, device=self.device)
                for num_words in (
                    layout.max_tiles,
                    layout.max_tiles * layout.max_col_tiles,
                    NUM_COUNTERS,
                    NUM_WATCH_WORDS,
                )
            )
        )
        self._base_U8 = base_U8
        self._close: Callable[[], None] | None = close
        self._epoch = 0
        self._free_returned = list(range(layout.num_kept, 0, -1))
        self.room = Room(layout)  # of forwards that have none of their own

    def take_returned(self, *, keep: bool) -> ReturnedBuffer:
        """Where the rows of a launch come back: the working buffer, or if keep and one is free a kept one."""
        index = self._free_returned.pop() if keep and self._free_returned else 0
        region = self.layout.regions["returned"]
        num_bytes = region.num_bytes // region.shape[0]
        offset_bytes = region.offset_bytes + index * num_bytes
        memory_U8 = self._base_U8[offset_bytes : offset_bytes + num_bytes]
        if index:
            memory_U8 = lend(memory_U8, lambda: self._free_returned.append(index))
        return ReturnedBuffer(offset_bytes, memory_U8.view(region.dtype).view(region.shape[1:]), kept=index > 0)

    @property
    def num_ranks(self) -> int:
        return self.layout.shape.ep_degree

    @property
    def timeout_us(self) -> int:
        return int(self.timeout_s * 1e6)

    def region(self, name: str) -> Tensor:
        """This rank's region of that name."""
        region: Region = self.layout.regions[name]
        end = region.offset_bytes + region.num_bytes
        return self._base_U8[region.offset_bytes : end].view(region.dtype).view(region.shape)

    def offset_bytes(self, name: str) -> int:
        return self.layout.regions[name].offset_bytes

    def next_epoch(self) -> int:
        """Starts a forward or a backward: the number that its flags will hold."""
        if self._close is None:
            raise HeapError(f"heap of rank {self.rank} must be open, got a closed one")
        self._epoch += 1
        return self._epoch

    def check(self) -> None:
        """Raises WaitTimeoutError if a kernel gave up a wait. Waits for the device."""
        raise_if_given_up(self.scoreboard.watch, self.rank, self.timeout_s)

    def close(self) -> None:
        """Gives the memory back. All ranks close together, after their last kernel."""
        if self._close is not None:
            close, self._close = self._close, None
            self._base_U8 = self._base_U8.new_empty(0)
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # a rank that fails comes alone, and giving back symmetric memory waits for all
            self.close()
