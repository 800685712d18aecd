"""The kernel timeline: when each task of a launch began, had what it waited for, and ended.

A launch that is recorded gets a buffer, int64 [1 + max_records, 8]: row 0 holds {records taken, max_records}, every
other row is a record, see FIELDS. A launch that is not recorded gets None in its place, and of all that stands here
nothing is compiled: the kernel is the same, instruction by instruction, as one without these calls.

    begun = task_begins(records, LANES)
    ...                                                   # waits
    work_ns = time_ns(records)
    ...                                                   # works
    task_ends(records, begun, ROLE_RELAY, task, LANES, work_ns=work_ns)
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from uniep.kernels.signals import now_ns


class Role(IntEnum):
    """What a task does."""

    SEND = 1
    RELAY = 2
    COMP = 3
    RETURN = 4
    MEET = 5  # waits until every rank has come so far
    REDUCE = 6


ROLE_SEND = tl.constexpr(int(Role.SEND))
ROLE_RELAY = tl.constexpr(int(Role.RELAY))
ROLE_COMP = tl.constexpr(int(Role.COMP))
ROLE_RETURN = tl.constexpr(int(Role.RETURN))
ROLE_MEET = tl.constexpr(int(Role.MEET))
ROLE_REDUCE = tl.constexpr(int(Role.REDUCE))

# The words of a record. A task waits from begin_ns to work_ns, computes until store_ns and stores until end_ns; of a
# task that does not tell them apart the earlier two are begin_ns and the later two end_ns.
FIELDS = ("role", "task", "program", "multiprocessor", "begin_ns", "work_ns", "store_ns", "end_ns")
_WORDS = tl.constexpr(len(FIELDS))


if triton.knobs.runtime.interpret:

    @triton.jit
    def _multiprocessor():
        """The program itself: there is no other unit."""
        return tl.program_id(0)

else:

    @triton.jit
    def _multiprocessor():
        return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def time_ns(records):
    """Now, on the clock of the records; 0 where nothing is recorded."""
    if records is None:
        return 0
    else:
        return now_ns()


@triton.jit
def task_begins(records, LANES: tl.constexpr):
    """(now, the record's number, the number of records there is room for). The latter two are read early and needed
    late, and the number is held by one of LANES threads, as `tasks.claim` does: no thread waits for memory."""
    if records is None:
        return 0, 0, 0
    else:
        lanes = tl.arange(0, LANES)
        number = tl.atomic_add(records + tl.zeros((LANES,), tl.int32), 1, mask=lanes == 0, sem="relaxed")
        return now_ns(), number, tl.load(records + 1)


@triton.jit
def task_ends(records, begun, ROLE: tl.constexpr, task, LANES: tl.constexpr, work_ns=None, store_ns=None):
    """Writes the record, if there is room for it.

    Args:
        begun: what task_begins returned.
        work_ns: when the task had what it waited for; None for one that waits for nothing.
        store_ns: when it began to store; None for one that stores all along.
    """
    if records is not None:
        end_ns = now_ns()
        begin_ns, number, max_records = begun
        kept = (tl.arange(0, LANES) == 0) & (number < max_records)
        record = records + (number + 1) * _WORDS
        tl.store(record, ROLE, mask=kept)
        tl.store(record + 1, task, mask=kept)
        tl.store(record + 2, tl.program_id(0), mask=kept)
        tl.store(record + 3, _multiprocessor(), mask=kept)
        tl.store(record + 4, begin_ns, mask=kept)
        tl.store(record + 5, begin_ns if work_ns is None else work_ns, mask=kept)
        tl.store(record + 6, end_ns if store_ns is None else store_ns, mask=kept)
        tl.store(record + 7, end_ns, mask=kept)


@dataclass(frozen=True)
class LaunchRecords:
    """What one launch left.

    Attributes:
        name: the launch: exchange, up, down, down_grad, wgrad, up_grad.
        num_programs: programs of the launch, also those without a task.
        tasks_per_tile: tasks of the comp role that share a row tile (of wgrad, an expert): its tile is task // this.
        link_role: the role that writes to other ranks, if any does; COMP does it with its stores.
        records_RW: int64, one row a task, words as in FIELDS.
        num_dropped: tasks for which there was no room.
    """

    name: str
    num_programs: int
    tasks_per_tile: int
    link_role: Role | None
    records_RW: Tensor
    num_dropped: int


class Timeline:
    """Records the launches that happen between start and stop, one buffer each. Shared by nothing: one a rank.

    Args:
        device: of the kernels.
        max_launches: launches that are recorded; those beyond are counted.
        max_records: tasks of a launch that are recorded; those beyond are counted. 64 bytes each.
    """

    def __init__(self, device: torch.device, *, max_launches: int = 16, max_records: int = 65_536) -> None:
        for what, value in (("max_launches", max_launches), ("max_records", max_records)):
            if value < 1:
                raise ValueError(f"{what} must be at least 1, got {value}")
        self._device = device
        self._max_launches = max_launches
        self._max_records = max_records
        self._buffers: Tensor | None = None
        self._launches: list[tuple[str, int, int, Role | None]] = []
        self.num_unrecorded_launches = 0

    def start(self) -> None:
        """From now on launches are recorded, with memory for all of them."""
        size = (self._max_launches, 1 + self._max_records, len(FIELDS))
        self._buffers = torch.zeros(size, dtype=torch.int64, device=self._device)
        self._buffers[:, 0, 1] = self._max_records
        self._launches = []
        self.num_unrecorded_launches = 0

    def stop(self) -> list[LaunchRecords]:
        """What was recorded since start, in the order of the launches. Waits for the device, and frees the memory."""
        assert self._buffers is not None, "stop must follow a start"
        found = []
        for buffer, launch in zip(self._buffers, self._launches, strict=False):
            taken = int(buffer[0, 0])
            kept = min(taken, self._max_records)
            found.append(LaunchRecords(*launch, buffer[1 : 1 + kept].cpu().clone(), taken - kept))
        self._buffers = None
        return found

    def launch(
        self, name: str, *, num_programs: int, tasks_per_tile: int = 1, link_role: Role | None = None
    ) -> Tensor | None:
        """The buffer of the next launch; None, and a kernel without records, where nothing is to be recorded."""
        if self._buffers is None:
            return None
        if len(self._launches) == self._max_launches:
            self.num_unrecorded_launches += 1
            return None
        self._launches.append((name, num_programs, tasks_per_tile, link_role))
        return self._buffers[len(self._launches) - 1]


def launch_records(timeline: Timeline | None, name: str, **launch: Any) -> Tensor | None:
    """`Timeline.launch` of a timeline that may be missing."""
    return None if timeline is None else timeline.launch(name, **launch)
