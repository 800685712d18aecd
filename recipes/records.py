"""The records of a run, in its folder: run.json says what ran, metrics.jsonl has a line a step."""

import fcntl
import json
import os
import platform
import subprocess
import uuid
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import torch
from torchtitan.tools.logging import logger

from recipes.expert_load import ExpertLoad
from uniep.files import replace_text

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
TIMELINE_FOLDER = "timeline"
LOCK_FILE = "run.lock"
# What run.json says of each start of a run.
START_FACTS = ("config", "versions", "commit", "devices", "backend", "data")


class FolderInUseError(ValueError):
    """A folder that another run writes now. The text is one line for the user."""


def lock_folder(folder: str | Path) -> TextIO:
    """Holds a run's folder until the returned file is closed, which the end of the process does too.

    Raises:
        FolderInUseError: another process holds it.
    """
    file = open(Path(folder, LOCK_FILE), "a", encoding="utf-8")  # noqa: SIM115  held until the run ends
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise FolderInUseError(
            f'[job] dump_folder must be a folder that no other run writes at the same time, got "{folder}"'
        ) from None
    except OSError as error:  # a network file system without locks
        logger.warning(f"{folder} cannot be locked, a second run would mix its records with this one's: {error}")
    # A data loader's worker is a fork, and would hold the lock after its rank has died.
    os.register_at_fork(after_in_child=file.close)
    return file


@dataclass(frozen=True)
class StepRecord:
    """One line of metrics.jsonl.

    Attributes:
        loss: mean over the step's valid tokens of all ranks; grad_norm: before clipping. The `_hex` of both are exact.
        tokens_seen: tokens of all ranks since the first step, over restarts.
        step_time_s: from the end of the step before to the end of this one.
        tokens_per_second: of all ranks, in this step; tokens_per_day: the same times 86400.
        memory_gib: peak since the step before: on GPUs what torch has reserved and the symmetric memory, on CPUs
            resident memory.
        data_loading_s: time this rank waited for its data.
        forward_backward_s: in forward and backward of this rank's device; the rest of the step is the clipping, the
            optimizer, and what is between them.
        unix_time_s: when the step ended.
        moe_s: in the forwards and backwards of the MoE blocks, with `[throughput] time_moe`.
        expert_load: of the steps that are logged; the line of any other lacks it.
    """

    step: int
    loss: float
    grad_norm: float
    loss_hex: str
    grad_norm_hex: str
    tokens_seen: int
    step_time_s: float
    tokens_per_second: float
    tokens_per_day: float
    memory_gib: float
    data_loading_s: float
    forward_backward_s: float
    unix_time_s: float
    moe_s: float | None = None
    expert_load: ExpertLoad | None = None

    def to_json(self) -> str:
        """One line. The expert load, most of its bytes, comes last, so that a reader can leave it unread."""
        fields = {name: value for name, value in vars(self).items() if value is not None}
        return json.dumps(fields, separators=(", ", ": "), default=vars)


class RunRecords:
    """Writes both files. A restarted run goes on where its checkpoint ends; later steps are run and written anew.

    No record is written before the first step is done: a start that fails leaves older ones as they were. run.json is
    replaced as a whole and metrics.jsonl is flushed every step, so that a crash costs at most one line.
    """

    def __init__(self, folder: str, run: dict[str, Any], *, may_continue: bool):
        """
        Args:
            folder: the run's folder, made if need be.
            run: what run.json says.
            may_continue: whether this run goes on from a checkpoint of the one whose records lie here.

        Raises:
            FolderInUseError: another run writes into the folder.
        """
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self._folder)
        self._earlier = _read_run(self._folder / RUN_FILE)
        continued = self._earlier if may_continue and self._earlier else {}
        self.run_id: str = continued.get("run_id") or uuid.uuid4().hex[:12]
        self._run = {"run_id": self.run_id, "restarts": continued.get("restarts", -1) + 1} | run
        self._run["timeline"] = continued.get("timeline", [])
        self._run["earlier_starts"] = []
        self._continued = continued
        self._metrics: TextIO | None = None

    def note(self, **facts: Any) -> None:
        """Adds facts that are known only once the model stands, before the first step is written."""
        self._run |= facts

    def add(self, **facts: Any) -> None:
        """Adds facts once steps have been written."""
        self._run |= facts
        replace_text(self._folder / RUN_FILE, _to_json(self._run))

    def add_timeline_files(self, names: list[str]) -> None:
        """Lists files of the kernel timeline, names within the folder. Some may replace those of before a restart."""
        self.add(timeline=[name for name in self._run["timeline"] if name not in names] + names)

    def write_step(self, record: StepRecord) -> None:
        if self._metrics is None:
            self._metrics = self._open_metrics(record.step)
            if self._continued and record.step > 1:
                self._run["earlier_starts"] = self._earlier_starts(record.step - 1)
            replace_text(self._folder / RUN_FILE, _to_json(self._run))
        self._metrics.write(record.to_json() + "\n")
        self._metrics.flush()

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        self._lock.close()

    def _open_metrics(self, first_step: int) -> TextIO:
        path = self._folder / METRICS_FILE
        if path.exists() and first_step == 1:
            kept = _free_folder(self._folder)
            if self._earlier is not None:
                replace_text(kept / RUN_FILE, _to_json(self._earlier))
            path.rename(kept / METRICS_FILE)
            if (timeline := self._folder / TIMELINE_FOLDER).exists():
                timeline.rename(kept / TIMELINE_FOLDER)
                self._run["timeline"] = []
            logger.warning(f"The records in {self._folder} are of an earlier run; they are kept in {kept}")
        elif path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            before = [line for line in lines if _step_of(line) < first_step]
            if len(before) < len(lines):
                logger.info(f"Steps from {first_step} on are run again; {len(lines) - len(before)} lines are replaced")
                replace_text(path, "".join(before))
        return open(path, "a", encoding="utf-8")

    def _earlier_starts(self, last_step: int) -> list[dict[str, Any]]:
        """The starts that the steps up to last_step are of: the last step of each, and what its record says otherwise
        than this start's."""

        def facts(run: dict[str, Any]) -> dict[str, Any]:
            return {key: run[key] for key in START_FACTS if key in run}

        found = []
        before = self._continued
        for start in [*before.get("earlier_starts", []), {"last_step": last_step}]:
            said = _with(facts(before), facts(start))
            last = min(start["last_step"], last_step)
            found.append({"last_step": last, **_where_different(said, self._run)})
            if last == last_step:
                break
        return found


def versions() -> dict[str, str | None]:
    """Versions of what computes the numbers."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in (
        "uniep-recipe",
        "torch",
        "triton",
        "torchtitan",
        "numpy",
        "tokenizers",
        "datasets",
        "nvshmem4py-cu13",
    ):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    if torch.cuda.is_available():
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return found


def commit() -> str | None:
    """The recipe's git commit, with "+changes" when the tree differs from it.

    RECIPE_COMMIT says it where it is set, for a copy whose own repository is another or none; None without either.
    """

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *args], check=True, capture_output=True, text=True, timeout=60
        ).stdout.strip()

    if stated := os.environ.get("RECIPE_COMMIT"):
        return stated
    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _with(values: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """`values` with what `other` says otherwise, in dicts within too."""
    return values | {
        key: _with(values[key], value) if isinstance(value, dict) and isinstance(values.get(key), dict) else value
        for key, value in other.items()
    }


def _where_different(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What `before` says otherwise than `now`, in dicts within too."""
    found = {}
    for key, value in before.items():
        other = now.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            value, other = _where_different(value, other), {}
        if value != other:
            found[key] = value
    return found


def _read_run(path: Path) -> dict[str, Any] | None:
    """None where there is none. One that cannot be read is set aside."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"must be an object, got {type(found).__name__}")
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        aside = path.with_suffix(f".unreadable-{uuid.uuid4().hex[:6]}.json")
        path.rename(aside)
        logger.warning(f"{path} cannot be read, this start begins a new record; it is kept as {aside}: {error}")
        return None


def _to_json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, default=str, ensure_ascii=False) + "\n"


def _step_of(line: str) -> float:
    """The step of a line; infinity for one that a crash cut, so that it is dropped."""
    try:
        return json.loads(line)["step"] if line.endswith("\n") else float("inf")
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")


def _free_folder(folder: Path) -> Path:
    number = 1
    while (candidate := folder / f"earlier.{number}").exists():
        number += 1
    candidate.mkdir()
    return candidate
