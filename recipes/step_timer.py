"""Times a part of every step on the device's own clock."""

import time
from types import TracebackType

import torch


class StepTimer:
    """A context manager whose entries add up until they are taken. It never makes the host wait while it measures."""

    def __init__(self) -> None:
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._host_s = 0.0
        self._begin: torch.cuda.Event | float = 0.0

    def __enter__(self) -> None:
        self._begin = _event() if torch.cuda.is_available() else time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self._begin, float):
            self._host_s += time.perf_counter() - self._begin
        else:
            self._spans.append((self._begin, _event()))

    def take_s(self) -> float:
        """Seconds in all entries since the last call. On a GPU it waits for the last of them."""
        seconds = self._host_s
        if self._spans:
            self._spans[-1][1].synchronize()
            seconds += sum(begin.elapsed_time(end) for begin, end in self._spans) / 1e3
        self._spans, self._host_s = [], 0.0
        return seconds


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
