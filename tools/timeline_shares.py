"""What a launch did with the time of its programs: shares, occupancies, phases."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.timeline_records import Column, Launch
from uniep.kernels.timeline import Role

_COMMUNICATION = (Role.SEND, Role.RELAY, Role.RETURN)


@dataclass(frozen=True)
class RoleShare:
    """A role's part of the time of all programs. None stands for programs that had no task.

    Attributes:
        busy: doing its tasks.
        waiting: in its tasks, for what they need.
        idle: between its tasks, before a program's first and after its last one.
    """

    role: Role | None
    num_tasks: int
    busy: float
    waiting: float
    idle: float


@dataclass(frozen=True)
class Phase:
    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Summary:
    """One launch.

    Attributes:
        roles: shares of the time of all programs; they add up to 1.
        link: share of the launch's time in which rows go to other ranks.
        tensor_cores: share of the time of all programs in which they multiply.
        bubble: share of the time of all programs that they wait or are idle before the tail.
        tail_ns: from when the first program has no task left to the end.
        phases: what of `phases_of` takes time.
    """

    duration_ns: int
    roles: tuple[RoleShare, ...]
    link: float
    tensor_cores: float
    bubble: float
    tail_ns: int
    phases: tuple[Phase, ...]


def link_intervals(launch: Launch) -> tuple[Column, Column]:
    """(starts, ends) of what writes to other ranks."""
    if launch.link_role is None:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    tasks = launch.of(launch.link_role)
    start = "store_ns" if launch.link_role == Role.COMP else "work_ns"
    return launch[start][tasks], launch["end_ns"][tasks]


def product_intervals(launch: Launch) -> tuple[Column, Column]:
    """(starts, ends) of what the Tensor Cores multiply, and where the record does not tell them apart, store."""
    tasks = launch.of(Role.COMP)
    return launch["work_ns"][tasks], launch["store_ns"][tasks]


def integral(starts: Column, ends: Column, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each edge, the summed time of the intervals before it."""
    total = np.zeros(len(edges))
    for times, sign in ((np.sort(starts), 1.0), (np.sort(ends), -1.0)):
        sums = np.concatenate([[0.0], np.cumsum(times, dtype=np.float64)])
        before = np.searchsorted(times, edges)
        total += sign * (before * edges - sums[before])
    return total


def covered_ns(starts: Column, ends: Column) -> int:
    """Time in which at least one of the intervals runs."""
    if len(starts) == 0:
        return 0
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    # An interval adds what lies behind the end of all before it.
    added = ends - np.maximum(starts, np.concatenate([starts[:1], ends[:-1]]))
    return int(np.maximum(added, 0).sum())


def phases_of(launch: Launch) -> tuple[Phase, ...]:
    """The phases in their order; one that takes no time is left out.

    - overlapped: rows are sent and relayed side by side, and nothing is multiplied yet.
    - mixed: communication and products run side by side.
    - compute: products or sums alone.
    - tail: programs run out of tasks.
    """
    start, end = launch.start_ns, launch.end_ns
    tail = int(_last_ends(launch).min())
    comp, communication = launch.of(Role.COMP), launch.of(*_COMMUNICATION)
    mixed = compute = start
    if communication.any():
        mixed = min(int(launch["work_ns"][comp].min(initial=tail)), tail)
        compute = min(max(int(launch["end_ns"][communication].max()), mixed), tail)
    bounds = (("overlapped", start, mixed), ("mixed", mixed, compute), ("compute", compute, tail), ("tail", tail, end))
    phases = (Phase(*bound) for bound in bounds)
    return tuple(phase for phase in phases if phase.end_ns > phase.start_ns)


def summarize(launch: Launch) -> Summary:
    """The shares of a launch."""
    start, end = launch.start_ns, launch.end_ns
    duration = max(end - start, 1)
    available = duration * launch.num_programs
    waiting, busy = launch["work_ns"] - launch["begin_ns"], launch["end_ns"] - launch["work_ns"]
    idle = _idle(launch)
    roles = []
    for role in Role:
        tasks = launch.of(role)
        if tasks.any():
            parts = (float(part[tasks].sum()) / available for part in (busy, waiting, idle))
            roles.append(RoleShare(role, int(tasks.sum()), *parts))
    unused = launch.num_programs - len(np.unique(launch["program"]))
    if unused or end == start:
        # A launch within one tick of the clock has no time but that.
        rest = 1.0 - sum(share.busy + share.waiting + share.idle for share in roles)
        roles.append(RoleShare(None, 0, 0.0, 0.0, rest))
    tail_start = int(_last_ends(launch).min())
    busy_before_tail = np.minimum(launch["end_ns"], tail_start) - np.minimum(launch["work_ns"], tail_start)
    before_tail = (tail_start - start) * launch.num_programs
    return Summary(
        duration_ns=end - start,
        roles=tuple(roles),
        link=covered_ns(*link_intervals(launch)) / duration,
        tensor_cores=float(np.subtract(*product_intervals(launch)[::-1]).sum()) / available,
        bubble=float(before_tail - busy_before_tail.sum()) / available,
        tail_ns=end - tail_start,
        phases=phases_of(launch),
    )


def _is_last(launch: Launch) -> NDArray[np.bool_]:
    """Which tasks are the last of their program."""
    programs = launch["program"]
    return np.concatenate([programs[1:] != programs[:-1], [True]])


def _last_ends(launch: Launch) -> Column:
    """When each program that had a task ended its last one."""
    return launch["end_ns"][_is_last(launch)]


def _idle(launch: Launch) -> Column:
    """For each task the idle time of its program after it, and before it where it is the program's first."""
    is_last = _is_last(launch)
    is_first = np.roll(is_last, 1)
    next_begin = np.where(is_last, launch.end_ns, np.roll(launch["begin_ns"], -1))
    idle = next_begin - launch["end_ns"]
    return idle + np.where(is_first, launch["begin_ns"] - launch.start_ns, 0)
