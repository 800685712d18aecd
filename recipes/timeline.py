"""The kernel timeline of a run: the steps of `[uniep] timeline_steps`, one file a rank and step in its folder.

The first MoE layer is recorded and stands for all: its forwards, also those that activation checkpointing runs again,
and its backwards. `python -m tools.timeline RUN` shows it.
"""

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchtitan.tools.logging import logger

from recipes.records import TIMELINE_FOLDER
from uniep.kernels.timeline import LaunchRecords, Timeline


class StepTimeline:
    """Switches a layer's timeline on for the listed steps and writes what it recorded.

    Args:
        timeline: of the recorded layer; None where this rank has none.
        steps: the steps to record.
        run_folder: where the folder of the files is made.
    """

    def __init__(self, timeline: Timeline | None, steps: Collection[int], run_folder: str) -> None:
        self._timeline = timeline
        self._steps = frozenset(steps)
        self._run_folder = Path(run_folder)

    def begin(self, step: int) -> None:
        if self._timeline is not None and step in self._steps:
            logger.info(
                f"Step {step} records the kernels of its first MoE layer. Kernels that record are compiled when they "
                "are first used, which makes this step slow; ranks may wait for each other's compiler in it"
            )
            self._timeline.start()

    def end(self, step: int) -> list[str]:
        """Writes this rank's file. Returns the names of the files of all ranks, none if the step is not recorded."""
        if step not in self._steps:
            return []
        # The first step of a new run moves the files of an earlier one aside, on one rank.
        torch.distributed.barrier()
        own = self._write(self._timeline, step) if self._timeline is not None else None
        # run.json lists files that are there; a stage of a pipeline may have no MoE layer.
        names: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(names, own)
        return [name for name in names if name is not None]

    def _write(self, timeline: Timeline, step: int) -> str:
        """Returns the file's name."""
        rank = torch.distributed.get_rank()
        name = f"{TIMELINE_FOLDER}/step-{step}.rank-{rank}.npz"
        path = self._run_folder / name
        launches = timeline.stop()
        write_timeline(path, launches, step=step, rank=rank, num_unrecorded_launches=timeline.num_unrecorded_launches)
        logger.info(f"Step {step}: {sum(len(launch.records_RW) for launch in launches)} tasks are recorded in {path}")
        return name


def write_timeline(
    path: Path, launches: Sequence[LaunchRecords], *, step: int, rank: int, num_unrecorded_launches: int
) -> None:
    """Writes what one rank recorded in one step, as `tools.timeline_records` reads it.

    Per launch: names, num_programs, tasks_per_tile, link_role (0 for none), num_records, num_dropped. records: int64
    [tasks, 8], those of the launches one after another, words as in `uniep.kernels.timeline.FIELDS`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [launch.records_RW for launch in launches]
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        np.savez_compressed(
            file,
            step=step,
            rank=rank,
            num_unrecorded_launches=num_unrecorded_launches,
            names=np.array([launch.name for launch in launches], dtype=str),
            num_programs=np.array([launch.num_programs for launch in launches], dtype=np.int64),
            tasks_per_tile=np.array([launch.tasks_per_tile for launch in launches], dtype=np.int64),
            link_role=np.array([launch.link_role or 0 for launch in launches], dtype=np.int64),
            num_records=np.array([len(part) for part in records], dtype=np.int64),
            num_dropped=np.array([launch.num_dropped for launch in launches], dtype=np.int64),
            records=torch.cat(records).numpy() if records else np.zeros((0, 8), dtype=np.int64),
        )
    os.replace(partial, path)
