"""Times a part of every step on the device's own clock."""

import time
from collections.abc import Iterable
from types import TracebackType

import torch
from torch import nn
from torchtitan.models.moe import MoE


class StepTimer:
    """A context manager whose entries add up until they are taken. It never makes the host wait while it measures.

    An entry within an entry belongs to the outer one.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._host_s = 0.0
        self._begin: torch.cuda.Event | float = 0.0
        self._depth = 0

    def __enter__(self) -> None:
        if not self._depth:
            self._begin = record_event() if torch.cuda.is_available() else time.perf_counter()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        if isinstance(self._begin, float):
            self._host_s += time.perf_counter() - self._begin
        else:
            self._spans.append((self._begin, record_event()))

    def take_s(self) -> float:
        """Seconds in all entries since the last call. On a GPU it waits for the last of them."""
        seconds = self._host_s
        if self._spans:
            self._spans[-1][1].synchronize()
            seconds += sum(begin.elapsed_time(end) for begin, end in self._spans) / 1e3
        self._spans, self._host_s = [], 0.0
        return seconds


def record_event() -> torch.cuda.Event:
    """Now, on the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def time_moe(model_parts: Iterable[nn.Module], timer: StepTimer) -> None:
    """Enters the timer around each forward and backward of every MoE block, whoever's it is: router, routed and shared
    experts. With activation checkpointing a backward holds the recomputation of its whole layer."""
    for part in model_parts:
        for block in part.modules():
            if isinstance(block, MoE):
                block.register_forward_pre_hook(lambda *_: timer.__enter__())
                block.register_forward_hook(lambda *_: timer.__exit__(None, None, None))
                block.register_full_backward_pre_hook(lambda *_: timer.__enter__())
                block.register_full_backward_hook(lambda *_: timer.__exit__(None, None, None))
