"""Reads the folder that a run leaves: `run.json` and `metrics.jsonl`, checked line by line."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
# The values of a step that two runs are compared by, each recorded as `<name>_hex` beside its decimal.
VALUES = ("loss", "grad_norm")
# Steps and tokens end in int64 arrays.
COUNT_LIMIT = 2**63
# The expert load is most of a line's bytes and its last key: it is parsed for few lines only, evenly spaced.
LOAD_MARK = b', "expert_load": '
MAX_LOADS = 200


class RecordError(ValueError):
    """A run folder that cannot be read, or an output in a record's place. The text names the file, and the line."""


@dataclass(frozen=True)
class Run:
    """One recorded run.

    Attributes:
        folder: the folder it was read from, as the caller wrote it.
        config: the resolved job config, flattened: {"training.seq_len": 4096, ...}.
        versions: versions of what the run used, flattened.
        devices: what it ran on, flattened.
        backend: the backend that ran.
        commit: the commit it was started from.
        data: what it read; "sha256" is None where the data could not be hashed.
        steps: [steps] int64, strictly increasing.
        tokens_seen: [steps] int64.
        values: for each name in VALUES, [steps] float64 with exactly the recorded bits (NaN has one bit pattern).
        series: every other number of a line, [steps] float64; NaN at steps whose line lacks it.
        loads: (step, expert load as recorded) of at most 2 * MAX_LOADS steps, evenly spaced.
        num_loads: steps that recorded an expert load.
        tuner: what the tuner chose, as recorded (`tuner`, or `tune` of the backend); None where it did not run.
        weights: the step behind which the weights were fingerprinted, and the fingerprint of each; None where the run
            did not come to its end.
        cut: what is wrong with the last line, where a crash cut it and the caller asked to go on without it.
        earlier_starts: of a run that was restarted: the last step of each start before, and what was different then
            from what is said here, flattened.
    """

    folder: Path
    config: Mapping[str, Any]
    versions: Mapping[str, Any]
    devices: Mapping[str, Any]
    backend: str
    commit: str
    data: Mapping[str, Any]
    steps: NDArray[np.int64]
    tokens_seen: NDArray[np.int64]
    values: Mapping[str, NDArray[np.float64]]
    series: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    loads: Sequence[tuple[int, Mapping[str, Any]]] = ()
    num_loads: int = 0
    tuner: Any = None
    weights: tuple[int, Mapping[str, str]] | None = None
    cut: str | None = None
    earlier_starts: Sequence[tuple[int, Mapping[str, Any]]] = ()

    @property
    def short_commit(self) -> str:
        """12 digits, and the mark of a tree that differs from the commit."""
        digits, plus, mark = self.commit.partition("+")
        return digits[:12] + plus + mark


def read_run(folder: str | Path, *, drop_cut_line: bool = False) -> Run:
    """Reads and checks a run folder.

    Args:
        drop_cut_line: read a run whose last line was cut by a crash up to the line before it.

    Raises:
        RecordError: the folder or a file is missing or empty, a file is not JSON (a line cut in the middle), a key is
            missing or of the wrong type, a hex value is not what float.hex() writes, or the steps do not increase.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RecordError(f"a run must be a folder, got {folder}{'' if folder.exists() else ', which does not exist'}")
    path = folder / RUN_FILE
    record = _parse_object(_read_bytes(path), str(path))
    config, versions, devices, backend, data = (
        _typed(record, key, dict, str(path)) for key in ("config", "versions", "devices", "backend", "data")
    )
    _typed(data, "sha256", (str, type(None)), f"{path}: data")
    metrics = _read_metrics(folder / METRICS_FILE, drop_cut_line)
    return Run(
        folder=folder,
        config=flatten(config),
        versions=flatten(versions),
        devices=flatten(devices),
        backend=_typed(backend, "ran", str, f"{path}: backend"),
        commit=_typed(record, "commit", (str, type(None)), str(path)) or "",
        data=flatten(data),
        tuner=record.get("tuner", backend.get("tune")),
        weights=_read_weights(record, str(path)),
        earlier_starts=_read_starts(record, str(path)),
        **metrics,
    )


def check_output(option: str, path: str | Path, folders: Iterable[str | Path]) -> None:
    """Raises RecordError where writing a file would replace a record of the runs in these folders, or of any other."""
    names = (RUN_FILE, METRICS_FILE)
    target = os.path.realpath(path)
    read = {os.path.realpath(Path(folder, name)) for folder in folders for name in names}
    if target in read or os.path.basename(target) in names:
        raise RecordError(f"{option} must be a file that is not a run's {' or '.join(names)}, got {path}")


def _read_weights(record: dict[str, Any], where: str) -> tuple[int, Mapping[str, str]] | None:
    if "weights" not in record:
        return None
    weights = _typed(record, "weights", dict, where)
    return _count(weights, "step", where), _typed(weights, "fingerprints", dict, where)


def _read_starts(record: dict[str, Any], where: str) -> Sequence[tuple[int, Mapping[str, Any]]]:
    found = []
    for start in _typed({"earlier_starts": [], **record}, "earlier_starts", list, where):
        if not isinstance(start, dict):
            raise RecordError(f"{where}: earlier_starts must be a list of objects, got {start!r}")
        said = flatten({key: value for key, value in start.items() if key != "last_step"})
        found.append((_count(start, "last_step", f"{where}: earlier_starts"), said))
    return found


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"training": {"seq_len": 8}} -> {"training.seq_len": 8}. Lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _read_metrics(path: Path, drop_cut_line: bool) -> dict[str, Any]:
    """Returns the fields of Run that metrics.jsonl holds. Raises RecordError."""
    text = _read_bytes(path)
    lines = text.rstrip().splitlines()
    cut = None
    if lines and not text.endswith(b"\n") and not _is_whole(lines[-1]):
        where = f"{path} line {len(lines)}"
        if not drop_cut_line:
            raise RecordError(
                f"{where}: must be one whole JSON object, got a line that was cut in the middle, as by a crash: delete "
                "it, or look at the run with tools.dashboard, which leaves it out"
            )
        cut = f"{where} was cut in the middle and is left out"
        lines.pop()
    if not lines:
        raise RecordError(f"{path}: must hold at least one step, got {'one cut line' if cut else 'an empty file'}")
    steps: list[int] = []
    tokens_seen: list[int] = []
    values: dict[str, list[float]] = {name: [] for name in VALUES}
    series: dict[str, NDArray[np.float64]] = {}
    loads: list[tuple[int, bytes, str]] = []
    num_loads, stride = 0, 1
    for number, line in enumerate(lines, start=1):
        where = f"{path} line {number}"
        head, has_load, load = line.partition(LOAD_MARK)
        if has_load and not load.endswith(b"}}"):
            _parse_object(line, where)
        row = _parse_object(head + b"}" if has_load else line, where)
        step = _count(row, "step", where)
        if steps and step <= steps[-1]:
            raise RecordError(f"{where}: step must be greater than the line before's {steps[-1]}, got {step}")
        steps.append(step)
        tokens_seen.append(_count(row, "tokens_seen", where))
        for name in VALUES:
            if name not in row:
                raise RecordError(f"{where}: must hold the key '{name}', got a line without it")
            values[name].append(_hex_value(row, f"{name}_hex", where))
        for name, value in row.items():
            if type(value) in (float, int) and name not in ("step", "tokens_seen", *VALUES):
                if name not in series:
                    series[name] = np.full(len(lines), np.nan)
                series[name][number - 1] = value
        if has_load:
            if num_loads % stride == 0:
                loads.append((step, load[:-1], where))
            num_loads += 1
            if len(loads) > 2 * MAX_LOADS:
                loads, stride = loads[::2], 2 * stride
    return {
        "steps": np.array(steps, dtype=np.int64),
        "tokens_seen": np.array(tokens_seen, dtype=np.int64),
        "values": {name: np.array(column, dtype=np.float64) for name, column in values.items()},
        "series": series,
        "loads": [(step, _parse_load(text, where)) for step, text, where in loads],
        "num_loads": num_loads,
        "cut": cut,
    }


def _parse_load(text: bytes, where: str) -> dict[str, Any]:
    load = _parse_object(text, f"{where}: expert_load")
    for key in ("layers", "tokens_per_expert", "imbalance", "rank_imbalance", "distinct_ranks"):
        _typed(load, key, list, f"{where}: expert_load")
    _typed(load, "distinct_ranks_expected", float, f"{where}: expert_load")
    return load


def _is_whole(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise RecordError(f"{path}: must be a file, got nothing there") from None
    except OSError as error:
        raise RecordError(f"{path}: must be readable, got {error.strerror}") from None


def _parse_object(text: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    # UnicodeDecodeError and JSONDecodeError are ValueErrors; RecursionError is what brackets without end give.
    except (ValueError, RecursionError):
        shown = text[-60:].decode("utf-8", "replace")
        raise RecordError(
            f"{where}: must be one whole JSON object, got {len(text)} bytes that are not, ending in {shown!r}"
        ) from None
    if not isinstance(value, dict):
        raise RecordError(f"{where}: must be one whole JSON object, got a {type(value).__name__}")
    return value


def _typed(record: dict[str, Any], key: str, kind: type | tuple[type, ...], where: str) -> Any:
    if key not in record:
        raise RecordError(f"{where}: must hold the key '{key}', got a record without it")
    value = record[key]
    if not isinstance(value, kind):
        first = kind[0] if isinstance(kind, tuple) else kind
        raise RecordError(f"{where}: '{key}' must be a {first.__name__}, got {value!r:.60}")
    return value


def _count(row: dict[str, Any], key: str, where: str) -> int:
    if key not in row:
        raise RecordError(f"{where}: must hold the key '{key}', got a line without it")
    value = row[key]
    # bool is an int to Python; a step of `true` is a broken record.
    if type(value) is not int or not 0 <= value < COUNT_LIMIT:
        raise RecordError(f"{where}: {key} must be an integer from 0 to 2^63 - 1, got {value!r:.60}")
    return value


def _hex_value(row: dict[str, Any], key: str, where: str) -> float:
    """The float that a hex text stands for.

    Only the one text that float.hex() writes is taken: float.fromhex alone would read the decimal "1.5" as 0x1.5.
    So equal texts, equal bits and equal array elements are one and the same.
    """
    if key not in row:
        raise RecordError(f"{where}: must hold the key '{key}', got a line without it")
    text = row[key]
    try:
        value = float.fromhex(text)
        if value.hex() == text:
            return value
    except (TypeError, ValueError, OverflowError):
        pass
    raise RecordError(f"{where}: {key} must be a text that float.hex() writes, got {text!r:.60}")
