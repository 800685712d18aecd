"""Reads what recorded steps left: a file a rank, laid on one clock."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from tools.records import RUN_FILE, RecordError
from uniep.kernels.timeline import FIELDS, Role

Column = NDArray[np.int64]
_TIMES = [index for index, name in enumerate(FIELDS) if name.endswith("_ns")]


@dataclass(frozen=True)
class Launch:
    """One launch of one rank. Tasks are sorted by program and, within one, by time.

    Attributes:
        name, num_programs, tasks_per_tile, link_role, num_dropped: as in `uniep.kernels.timeline.LaunchRecords`.
        columns: [tasks] for each of `uniep.kernels.timeline.FIELDS`.
    """

    name: str
    num_programs: int
    tasks_per_tile: int
    link_role: Role | None
    num_dropped: int
    columns: dict[str, Column]

    def __getitem__(self, field: str) -> Column:
        return self.columns[field]

    def __len__(self) -> int:
        return len(self["role"])

    @property
    def start_ns(self) -> int:
        return int(self["begin_ns"].min())

    @property
    def end_ns(self) -> int:
        return int(self["end_ns"].max())

    def of(self, *roles: Role) -> NDArray[np.bool_]:
        """Which tasks are of these roles."""
        return np.isin(self["role"], roles)

    def tiles(self) -> Column:
        """The row tile (of wgrad, the expert, by falling number of rows) of each task of comp; else the task."""
        return np.where(self.of(Role.COMP), self["task"] // self.tasks_per_tile, self["task"])


@dataclass(frozen=True)
class RankTimeline:
    """What one rank recorded in one step: launches with tasks, in their order, and how many were not recorded."""

    step: int
    rank: int
    launches: tuple[Launch, ...]
    num_unrecorded_launches: int


def read_timelines(run: Path, step: int | None = None, ranks: Sequence[int] = ()) -> list[RankTimeline]:
    """The ranks of a step, on one clock: in nanoseconds since the first task of all.

    A rank's clock is its GPU's own. All ranks leave an exchange together, when the last of them has come, within the
    time that a flag takes; so the ends of their first exchanges are laid on each other.

    Args:
        run: the run's folder.
        step: a recorded step; None for the last one.
        ranks: none for all.

    Raises:
        RecordError: the run recorded no such step or rank, or a file is missing or broken.
    """
    files = _recorded_files(run)
    if not files:
        raise RecordError(f"{run / RUN_FILE}: must list recorded steps, got none; [uniep] timeline_steps names them")
    steps = sorted({key[0] for key in files})
    if step is not None and step not in steps:
        raise RecordError(f"step must be a recorded one, {', '.join(map(str, steps))}, got {step}")
    step = steps[-1] if step is None else step
    found = sorted(rank for key, rank in files if key == step)
    for rank in ranks:
        if rank not in found:
            raise RecordError(f"rank must be one of {', '.join(map(str, found))}, got {rank}")
    return _on_one_clock([_read(files[step, rank], step, rank) for rank in sorted(set(ranks)) or found])


def _recorded_files(run: Path) -> dict[tuple[int, int], Path]:
    """(step, rank) -> file, of all that run.json lists."""
    path = run / RUN_FILE
    try:
        names = json.loads(path.read_text(encoding="utf-8")).get("timeline", [])
        keys = [tuple(int(part.split("-")[1]) for part in Path(name).name.split(".")[:2]) for name in names]
    except OSError as error:
        raise RecordError(f"{path}: must be readable, got {error.strerror}") from None
    except (ValueError, AttributeError, IndexError, TypeError) as error:
        raise RecordError(f"{path}: must be one JSON object whose timeline lists files, got {error!r}") from None
    return {(key[0], key[1]): run / name for key, name in zip(keys, names, strict=True)}


def _read(path: Path, step: int, rank: int) -> RankTimeline:
    """Raises RecordError, also where the file is of another step or rank than the name says."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays: dict[str, Any] = dict(file)
        _check(arrays)
        ends = arrays["num_records"].cumsum()
        launches = []
        for index, end in enumerate(ends):
            words = arrays["records"][end - arrays["num_records"][index] : end].T
            order = np.lexsort((words[FIELDS.index("begin_ns")], words[FIELDS.index("program")]))
            launches.append(
                Launch(
                    str(arrays["names"][index]),
                    int(arrays["num_programs"][index]),
                    int(arrays["tasks_per_tile"][index]),
                    Role(arrays["link_role"][index]) if arrays["link_role"][index] else None,
                    int(arrays["num_dropped"][index]),
                    dict(zip(FIELDS, words[:, order], strict=True)),
                )
            )
        with_tasks = tuple(launch for launch in launches if len(launch))
        timeline = RankTimeline(
            int(arrays["step"]), int(arrays["rank"]), with_tasks, int(arrays["num_unrecorded_launches"])
        )
    except OSError as error:
        raise RecordError(f"{path}: must be a file of a recorded step, got {error}") from None
    except (BadZipFile, zlib.error, KeyError, IndexError, TypeError, ValueError, OverflowError, EOFError) as error:
        raise RecordError(f"{path}: must be a whole file of a recorded step, got {error!r}") from None
    if (timeline.step, timeline.rank) != (step, rank):
        raise RecordError(
            f"{path}: must hold step {step} of rank {rank}, got step {timeline.step} of rank {timeline.rank}"
        )
    return timeline


def _check(arrays: dict[str, Any]) -> None:
    """Raises ValueError where what is read does not fit together."""
    records, counts, programs = arrays["records"], arrays["num_records"], arrays["num_programs"]
    columns = [arrays[name] for name in ("names", "num_programs", "tasks_per_tile", "link_role", "num_dropped")]
    if records.ndim != 2 or records.shape[1] != len(FIELDS) or records.dtype != np.int64:
        raise ValueError(f"records must be int64 [tasks, {len(FIELDS)}], got {records.dtype} {records.shape}")
    if any(column.shape != counts.shape for column in columns) or counts.min(initial=0) < 0:
        raise ValueError("every launch must have an entry in every array")
    if counts.sum() != len(records) or arrays["tasks_per_tile"].min(initial=1) < 1:
        raise ValueError("records must be those of the launches, and a tile must have tasks")
    role, program = (records[:, FIELDS.index(name)] for name in ("role", "program"))
    if not np.isin(role, list(Role)).all() or not ((program >= 0) & (program < np.repeat(programs, counts))).all():
        raise ValueError("every record must have a role and a program of its launch")


def _on_one_clock(timelines: list[RankTimeline]) -> list[RankTimeline]:
    marks = []
    for timeline in timelines:
        mark = next((launch.end_ns for launch in timeline.launches if launch.name == "exchange"), None)
        if mark is None:
            raise RecordError(f"rank {timeline.rank} must have recorded an exchange in step {timeline.step}, got none")
        marks.append(mark)
    first = min(
        launch.start_ns - mark for timeline, mark in zip(timelines, marks, strict=True) for launch in timeline.launches
    )
    return [_shifted(timeline, mark + first) for timeline, mark in zip(timelines, marks, strict=True)]


def _shifted(timeline: RankTimeline, zero_ns: int) -> RankTimeline:
    def shifted(launch: Launch) -> Launch:
        times = {FIELDS[index]: launch[FIELDS[index]] - zero_ns for index in _TIMES}
        return replace(launch, columns=launch.columns | times)

    return replace(timeline, launches=tuple(shifted(launch) for launch in timeline.launches))
