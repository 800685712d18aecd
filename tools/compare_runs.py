"""Compares recorded runs bit for bit, each with the first.

    python -m tools.compare_runs RUN_A RUN_B [RUN_C ...] [--plot FILE.png]

Two runs of one config are identical when the loss and the gradient norm have the same bits at every step. Runs whose
configs would give other numbers anyway are refused: a difference between them says nothing.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.command import end_with
from tools.pyplot import PlotError, load_pyplot
from tools.records import VALUES, RecordError, Run, check_output, read_run

IDENTICAL, DIFFERENT, UNCOMPARABLE = 0, 1, 2

# Every setting must be equal, except these: a section that a later version adds is then compared, not overlooked.
# Each entry is a key or a section, with why it may differ.
FREE_SETTINGS = (
    "job",  # names, paths and what is printed
    "uniep",  # what is compared
    "experimental",  # which modules are imported
    "metrics",
    "profiling",
    "throughput",
    "checkpoint",  # but see WARNED_SETTINGS
    "comm",
    "memory_estimation",
    "validation",
    "activation_checkpoint",  # recomputing must not change bits
    "compile",
    "model.hf_assets_path",
    "model.tokenizer_path",
    "model.print_after_conversion",
    "training.steps",  # but see _warn_schedule
    "training.dataset_path",  # the data's hash decides
    "training.gc_freq",
    "training.gc_debug",
    "training.dataloader.persistent_workers",
    "training.dataloader.pin_memory",
    "training.dataloader.prefetch_factor",
    "parallelism.fsdp_reshard_after_forward",  # when weights are gathered, not what is computed
    "parallelism.expert_parallel_comm_backend",
    "debug.deterministic",
    "debug.deterministic_warn_only",
)
# Free settings that may well change bits.
WARNED_SETTINGS = (
    "uniep.numerics",
    "compile",
    "model.hf_assets_path",
    "model.tokenizer_path",
    "parallelism.expert_parallel_comm_backend",
    "checkpoint.initial_load_path",
    "checkpoint.initial_load_in_hf",
    "checkpoint.exclude_from_loading",
)
# world_size has its own rule, and the size of a memory changes no number.
QUIET_DEVICES = ("world_size", "capacity_gib")

TREND_WINDOW = 10
# The relative difference wanders by small factors between steps; below this factor it "stays".
TREND_FACTOR = 2.0

EPILOG = """\
exit status:
  0  identical: loss and grad_norm have the same bits at the same steps in all runs, and so have the weights at the
     end, where both runs fingerprinted them
  1  different: a value differs, or the runs do not have the same steps
  2  not compared: a run cannot be read, the configs are not comparable (see --force), or the plot cannot be written

must be equal: model, training (not its steps), parallelism, optimizer, lr_scheduler, quantize, debug.seed, every other
section that is not listed here, and the hash of the data.
may differ: uniep, job, experimental, metrics, profiling, throughput, checkpoint, comm, validation,
activation_checkpoint, and compile (with a warning).
"""


class ComparisonError(ValueError):
    """Runs that cannot be compared, or a plot that cannot be made. The text says why in one line."""


@dataclass(frozen=True)
class UlpDistance:
    """Steps between two floats, counted in floats of `unit`: "fp32" or "fp64"."""

    count: int
    unit: str

    def __str__(self) -> str:
        return f"{self.count} {self.unit} ULP{'' if self.count == 1 else 's'}"


@dataclass(frozen=True)
class Trend:
    """How a value of two runs differs from its first differing step on.

    Attributes:
        num_differing: common steps at which the bits differ.
        steps: [common steps from the first differing one on].
        absolute: |a - b| at these steps; 0 where the bits agree, inf where only one of the two is finite, or both
            are not and differ.
        relative: absolute / max(|a|, |b|), the loss itself being a moving scale.
    """

    num_differing: int
    steps: NDArray[np.int64]
    absolute: NDArray[np.float64]
    relative: NDArray[np.float64]

    @property
    def window(self) -> int:
        """Steps at each end that the verdict compares; the two ends do not overlap."""
        return min(TREND_WINDOW, len(self.steps) // 2)

    @property
    def verdict(self) -> str:
        """The median relative difference of the last steps against that of the first: grows, stays or shrinks."""
        if not self.window:
            return "cannot be told from one step"
        first, last = np.median(self.relative[: self.window]), np.median(self.relative[-self.window :])
        # Written without a division: either may be 0 or inf.
        if first == last:
            return "stays"
        if last > TREND_FACTOR * first:
            return "grows"
        return "shrinks" if first > TREND_FACTOR * last else "stays"


@dataclass(frozen=True)
class PairComparison:
    """What comparing a run with the first one found.

    Attributes:
        common: [common steps], increasing.
        trends: for each value that differs anywhere, its trend.
        num_differing: common steps at which any value differs.
        extra_a: steps that only the first run has.
        extra_b: steps that only the other run has.
        weights_step: the step behind which both runs fingerprinted their weights, or None.
        weights: names of those that differ there.
    """

    common: NDArray[np.int64]
    trends: Mapping[str, Trend]
    num_differing: int
    extra_a: NDArray[np.int64]
    extra_b: NDArray[np.int64]
    weights_step: int | None = None
    weights: Sequence[str] = ()

    @property
    def gaps(self) -> NDArray[np.int64]:
        """Steps before the last common one that only one of the runs has."""
        extra = np.sort(np.concatenate([self.extra_a, self.extra_b]))
        return extra[extra < self.common[-1]] if len(self.common) else extra

    @property
    def identical(self) -> bool:
        return not (self.trends or len(self.extra_a) or len(self.extra_b) or self.weights)


def ulp_distance(a: float, b: float) -> UlpDistance | None:
    """Counts the floats from a to b: in fp32 where both are exactly fp32 values, in fp64 otherwise.

    0.0 and -0.0 are 0 apart. Returns None where there is no distance: one of the two is infinite or NaN.
    """
    if not (np.isfinite(a) and np.isfinite(b)):
        return None
    # A double beyond fp32's range becomes inf here, which is then not equal to it.
    with np.errstate(over="ignore", under="ignore"):
        a32, b32 = np.float32(a), np.float32(b)
    if float(a32) == a and float(b32) == b:
        return UlpDistance(abs(_ordinal(int(a32.view(np.int32)), 31) - _ordinal(int(b32.view(np.int32)), 31)), "fp32")
    a64, b64 = np.float64(a).view(np.int64), np.float64(b).view(np.int64)
    return UlpDistance(abs(_ordinal(int(a64), 63) - _ordinal(int(b64), 63)), "fp64")


def _ordinal(bits: int, num_magnitude_bits: int) -> int:
    """Maps a float's bits, read as a signed integer, to integers in the order of the floats; both zeros to 0."""
    return bits if bits >= 0 else -(bits + (1 << num_magnitude_bits))


def compare_pair(a: Run, b: Run) -> PairComparison:
    """Compares the values of b with those of a at the steps that both have."""
    common, in_a, in_b = np.intersect1d(a.steps, b.steps, assume_unique=True, return_indices=True)
    trends: dict[str, Trend] = {}
    any_differs = np.zeros(len(common), dtype=bool)
    for name in VALUES:
        value_a, value_b = a.values[name][in_a], b.values[name][in_b]
        differs = value_a.view(np.int64) != value_b.view(np.int64)
        if differs.any():
            any_differs |= differs
            trends[name] = _trend(common, value_a, value_b, differs)
    return PairComparison(
        common=common,
        trends=trends,
        num_differing=int(any_differs.sum()),
        extra_a=np.setdiff1d(a.steps, common, assume_unique=True),
        extra_b=np.setdiff1d(b.steps, common, assume_unique=True),
        **_compare_weights(a, b),
    )


def _compare_weights(a: Run, b: Run) -> dict[str, Any]:
    if a.weights is None or b.weights is None or a.weights[0] != b.weights[0]:
        return {}
    (step, of_a), (_, of_b) = a.weights, b.weights
    names = [*of_a, *(name for name in of_b if name not in of_a)]
    return {"weights_step": step, "weights": [name for name in names if of_a.get(name) != of_b.get(name)]}


def difference(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """b - a; 0 where the bits agree, also of NaN and infinities, and inf where there is no number to give."""
    with np.errstate(invalid="ignore", over="ignore"):
        delta = b - a
    delta = np.where(np.isnan(delta), np.inf, delta)
    return np.where(a.view(np.int64) == b.view(np.int64), 0.0, delta)


def difference_note(steps: NDArray[np.int64], delta: NDArray[np.float64]) -> str:
    """What the points of a `difference` do not show, to be set behind a name; nothing where they show all."""
    if not len(steps):
        return ": no common step"
    if not delta.any():
        return ": no difference"
    broken = ~np.isfinite(delta)
    return f": not finite, first at step {steps[broken.argmax()]}" if broken.any() else ""


def _trend(
    steps: NDArray[np.int64], a: NDArray[np.float64], b: NDArray[np.float64], differs: NDArray[np.bool_]
) -> Trend:
    start = int(differs.argmax())
    a, b = a[start:], b[start:]
    absolute = np.abs(difference(a, b))
    scale = np.maximum(np.abs(a), np.abs(b))
    relative = np.full_like(absolute, np.inf)
    # 0 / 0 is 0.0 against -0.0, and inf / inf has no number: both are left out of the division.
    np.divide(absolute, scale, out=relative, where=np.isfinite(absolute) & (scale > 0))
    relative[absolute == 0] = 0.0
    return Trend(int(differs.sum()), steps[start:], absolute, relative)


def config_differences(a: Run, b: Run) -> list[str]:
    """Settings that determine the numbers and differ, as "key: a's value, b's value"."""
    found = _differences(a.config, b.config, lambda key: not _listed(key, FREE_SETTINGS))
    # The degrees in a config may be -1, "all that are left", which the number of ranks fills in.
    found += [f"devices.{line}" for line in _differences(a.devices, b.devices, lambda key: key == "world_size")]
    # The data's own hash, and the tokenizer's where one is recorded.
    return found + [f"data.{line}" for line in _differences(a.data, b.data, lambda key: key.endswith("sha256"))]


def warnings_of_run(run: Run) -> list[str]:
    """Reasons why a run may not repeat its own bits, or cannot be checked."""
    found = []
    if run.config.get("debug.seed") is None:
        found.append("debug.seed is not set: the run does not repeat its own bits")
    if run.config.get("debug.deterministic") is not True:
        found.append("debug.deterministic is not true: the run may not repeat its own bits")
    if not run.data["sha256"]:
        found.append("the data has no hash: that both runs read the same data is not checked")
    for name, values in run.values.items():
        broken = ~np.isfinite(values)
        if broken.any():
            first = run.steps[int(broken.argmax())]
            found.append(f"{name} is not finite at {_count(int(broken.sum()), 'step')}, first at step {first}")
    return found


def warnings_of_pair(a: Run, b: Run) -> list[str]:
    """Differences that do not forbid a comparison but may explain what it finds."""
    found = _differences(a.config, b.config, lambda key: _listed(key, WARNED_SETTINGS))
    found += [f"versions.{line}" for line in _differences(a.versions, b.versions)]
    found += [f"devices.{line}" for line in _differences(a.devices, b.devices, lambda key: key not in QUIET_DEVICES)]
    found = [f"differs, {line}" for line in found]
    if a.folder.resolve() == b.folder.resolve():
        found.append("is the same folder: it can only be identical")
    return found + _warn_schedule(a, b) + _warn_tokens(a, b)


def _warn_schedule(a: Run, b: Run) -> list[str]:
    steps = [run.config.get("training.steps") for run in (a, b)]
    if steps[0] == steps[1] or a.config.get("lr_scheduler.total_steps") is not None:
        return []
    differing = f"differs, training.steps: {steps[0]}, {steps[1]}"
    return [f"{differing}; lr_scheduler.total_steps is not set, so the decay of the learning rate differs too"]


def _warn_tokens(a: Run, b: Run) -> list[str]:
    common, in_a, in_b = np.intersect1d(a.steps, b.steps, assume_unique=True, return_indices=True)
    differs = a.tokens_seen[in_a] != b.tokens_seen[in_b]
    if not differs.any():
        return []
    at = int(differs.argmax())
    tokens = f"{a.tokens_seen[in_a][at]}, {b.tokens_seen[in_b][at]}"
    return [f"differs, tokens_seen at step {common[at]}: {tokens}; the runs did not train on the same batches"]


def _listed(key: str, settings: Iterable[str]) -> bool:
    return any(key == setting or key.startswith(f"{setting}.") for setting in settings)


def _differences(
    a: Mapping[str, Any], b: Mapping[str, Any], wanted: Callable[[str], bool] = lambda key: True
) -> list[str]:
    """A key that one record lacks counts as None there: an optional setting that a later version adds is no change."""
    return [
        f"{key}: {_shown(a.get(key))}, {_shown(b.get(key))}"
        for key in sorted(a.keys() | b.keys())
        if wanted(key) and a.get(key) != b.get(key)
    ]


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)


def label_runs(num_runs: int) -> list[str]:
    """A, B, C, ..."""
    return [ascii_uppercase[i] if i < len(ascii_uppercase) else f"run{i + 1}" for i in range(num_runs)]


def name_runs(runs: Sequence[Run]) -> list[str]:
    """The ends of the folders' paths, as long as it takes to tell them apart."""
    paths = [run.folder.resolve() for run in runs]
    ends = ([str(Path(*path.parts[-depth:])) for path in paths] for depth in itertools.count(1))
    return next(names for names in ends if len(set(names)) == len(set(paths)))


def check_comparable(labels: Sequence[str], runs: Sequence[Run], force: bool) -> list[str]:
    """Compares the configs of all runs with the first.

    Returns:
        Warnings; with force also the differences that would have been an error.

    Raises:
        ComparisonError: settings that determine the numbers differ and force is not set, or no step is common.
    """
    first = runs[0]
    warnings = [f"{label}: {line}" for label, run in zip(labels, runs, strict=True) for line in warnings_of_run(run)]
    refused = []
    for label, run in zip(labels[1:], runs[1:], strict=True):
        if not np.isin(run.steps, first.steps).any():
            spans = f"{first.steps[0]} to {first.steps[-1]} and {run.steps[0]} to {run.steps[-1]}"
            raise ComparisonError(f"{labels[0]} and {label} must have a step in common, got steps {spans}")
        differing = config_differences(first, run)
        if differing:
            refused.append(f"{labels[0]} and {label} differ in {'; '.join(differing)}")
        warnings += [f"{label} {line}" for line in warnings_of_pair(first, run)]
    if refused and not force:
        raise ComparisonError(f"runs must have comparable configs, got: {'; '.join(refused)} (--force compares anyway)")
    return [f"compared by force: {line}" for line in refused] + warnings


def report(labels: Sequence[str], runs: Sequence[Run], pairs: Sequence[PairComparison]) -> str:
    """The text for people; `pairs` are the runs from the second on, each against the first."""
    if all(pair.identical for pair in pairs):
        weights = {pair.weights_step for pair in pairs}
        ends = "" if None in weights else f", and the weights behind step {weights.pop()}"
        lines = [f"identical: {_count(len(runs[0].steps), 'step')}{ends}"]
    else:
        different = [label for label, pair in zip(labels[1:], pairs, strict=True) if not pair.identical]
        lines = [f"different from {labels[0]}: {', '.join(different)}"]
    for label, run in zip(labels, runs, strict=True):
        commit = f", commit {run.short_commit}" if run.commit else ""
        lines.append(f"  {label}  {run.folder} (ran {run.backend}{commit}, {_count(len(run.steps), 'step')})")
        for last_step, said in run.earlier_starts:
            if said:
                lines.append(
                    f"     up to step {last_step}: {', '.join(f'{key} {value}' for key, value in said.items())}"
                )
    if any(not pair.identical for pair in pairs):
        for label, run, pair in zip(labels[1:], runs[1:], pairs, strict=True):
            lines += ["", *_report_pair(labels[0], label, runs[0], run, pair)]
    return "\n".join(lines)


def verdict(label_a: str, label_b: str, pair: PairComparison) -> str:
    """What comparing run B with run A found, in a line."""
    common = pair.common
    if pair.identical:
        return f"{label_b} is identical to {label_a}: all {len(common)} steps"
    if not len(common):
        return f"{label_b} has no step in common with {label_a}"
    if not pair.trends and pair.weights:
        return f"{label_b} is different from {label_a}: in the weights behind step {pair.weights_step}"
    if not pair.trends and len(pair.gaps):
        return (
            f"{label_b} agrees with {label_a} at the {_count(len(common), 'step')} that both have, but "
            f"{_count(len(pair.gaps), 'step')} in between, the first is step {pair.gaps[0]}, are in one of them only"
        )
    if not pair.trends:
        return f"{label_b} is identical to {label_a} up to step {common[-1]}, the last that both have"
    first = min(int(trend.steps[0]) for trend in pair.trends.values())
    names = " and ".join(name for name, trend in pair.trends.items() if trend.steps[0] == first)
    before = common[common < first]
    same = "equal at the common steps" if (pair.gaps < first).any() else "identical"
    until = f"{same} up to step {before[-1]}, " if len(before) else ""
    return f"{label_b} is different from {label_a}: {until}first differing at step {first}, in {names}"


def _report_pair(label_a: str, label_b: str, a: Run, b: Run, pair: PairComparison) -> list[str]:
    if pair.identical:
        return [f"{label_b} agrees with {label_a} on all {_count(len(pair.common), 'step')}"]
    lines = []
    if pair.trends:
        first = min(int(trend.steps[0]) for trend in pair.trends.values())
        names = [name for name, trend in pair.trends.items() if trend.steps[0] == first]
        lines.append(
            f"{label_b} differs from {label_a}: first at step {first}, in {' and '.join(names)};"
            f" {pair.num_differing} of {len(pair.common)} common steps differ"
        )
    else:
        lines.append(f"{label_b} agrees with {label_a} on the common steps, up to step {pair.common[-1]}")
    lines += _report_lengths(label_a, label_b, pair)
    if pair.weights:
        which = f"{len(pair.weights)}, the first is {pair.weights[0]}"
        lines.append(f"  weights that differ behind step {pair.weights_step}: {which}")
    for name, trend in pair.trends.items():
        lines += _report_value(label_a, label_b, a, b, name, trend)
    return lines


def _report_lengths(label_a: str, label_b: str, pair: PairComparison) -> list[str]:
    lines = []
    for label, other, extra in ((label_a, label_b, pair.extra_a), (label_b, label_a, pair.extra_b)):
        if len(extra) and extra[0] > pair.common[-1]:
            lines.append(f"  {label} has {_count(len(extra), 'step')} more, from step {extra[0]} to {extra[-1]}")
        elif len(extra):
            lines.append(f"  {label} has {_count(len(extra), 'step')} that {other} lacks, the first is step {extra[0]}")
    return lines


def _report_value(label_a: str, label_b: str, a: Run, b: Run, name: str, trend: Trend) -> list[str]:
    step = trend.steps[0]
    value_a, value_b = (float(run.values[name][np.searchsorted(run.steps, step)]) for run in (a, b))
    distance = ulp_distance(value_a, value_b)
    apart = f"{distance} apart" if distance else "no ULP distance: not both values are finite"
    if distance and not distance.count:
        apart += " (zeros of different sign)"
    width = max(len(label_a), len(label_b))
    lines = [f"  {name} at step {step}: {apart}"]
    lines += [f"    {la:<{width}}  {v!r:<24} {v.hex()}" for la, v in ((label_a, value_a), (label_b, value_b))]
    return lines + _report_trend(name, trend)


def _report_trend(name: str, trend: Trend) -> list[str]:
    rows = [(f"at step {trend.steps[0]}", trend.absolute[0], trend.relative[0])]
    after = slice(1, TREND_WINDOW + 1)
    num_after = len(trend.steps[after])
    if num_after:
        medians = np.median(trend.absolute[after]), np.median(trend.relative[after])
        rows.append((f"median of the next {_count(num_after, 'step')}", *medians))
    rows.append((f"at step {trend.steps[-1]}, the last common one", trend.absolute[-1], trend.relative[-1]))
    # Largest relative to the value: the absolute difference follows the value's own scale.
    peak = int(trend.relative.argmax())
    rows.append((f"at step {trend.steps[peak]}, the largest", trend.absolute[peak], trend.relative[peak]))
    width = max(len(what) for what, _, _ in rows)
    lines = [f"  difference of {name} from there on: {trend.verdict} ({_count(trend.num_differing, 'step')} differ)"]
    lines += [
        f"    {what:<{width}}  absolute {absolute:<9.3g}  relative {relative:.3g}" for what, absolute, relative in rows
    ]
    if trend.window:
        lines.append(
            f"    (the median relative difference of the last {trend.window} against the first {trend.window})"
        )
    return lines


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def write_plot(pyplot: Any, path: str, labels: Sequence[str], runs: Sequence[Run]) -> None:
    """Writes a PNG: the loss of every run, and below the difference of each to the first.

    Raises:
        ComparisonError: the file cannot be written.
    """
    figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, figsize=(10, 8), layout="constrained")
    top.set_title("Loss")
    top.set_ylabel("loss")
    bottom.set_title(f"Difference to the loss of {labels[0]}: linear near zero, logarithmic beyond")
    bottom.set_ylabel(f"loss - loss of {labels[0]}")
    bottom.set_xlabel("step")
    # A line of one point draws nothing without a marker; many markers hide the line.
    marker = "." if min(len(run.steps) for run in runs) <= 50 else ""
    for index, (label, name, run) in enumerate(zip(labels, name_runs(runs), runs, strict=True)):
        # Curves that coincide are the usual case: the first is a pale band that shows on both sides of the others.
        width, alpha = (6.0, 0.4) if index == 0 else (1.0, 1.0)
        text = f"{label}: {name} ({run.backend})"
        top.plot(
            run.steps,
            run.values["loss"],
            label=text,
            color=f"C{index % 10}",
            linewidth=width,
            alpha=alpha,
            marker=marker,
        )
    magnitudes = []
    size = 6 if len(runs[0].steps) <= 1000 else 1
    for index, (label, run) in enumerate(zip(labels[1:], runs[1:], strict=True), start=1):
        common, in_a, in_b = np.intersect1d(runs[0].steps, run.steps, assume_unique=True, return_indices=True)
        delta = difference(runs[0].values["loss"][in_a], run.values["loss"][in_b])
        finite = np.isfinite(delta)
        magnitudes.append(np.abs(delta[finite & (delta != 0)]))
        text = f"{label} - {labels[0]}{difference_note(common, delta)}"
        # Points: a line between differences of both signs would cross zero at every step and fill the panel.
        bottom.plot(common[finite], delta[finite], ".", label=text, color=f"C{index % 10}", markersize=size)
    _scale_differences(bottom, np.concatenate(magnitudes))
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        # Beside the axes: inside, it would hide points.
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), markerscale=6 / size)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ComparisonError(f"--plot must be a file that can be written, got {path}: {error.strerror}") from None
    finally:
        pyplot.close(figure)


def _scale_differences(axes: Any, magnitudes: NDArray[np.float64]) -> None:
    """Scales the axis of differences: linear up to the smallest one, logarithmic beyond it."""
    if not magnitudes.size:
        axes.set_ylim(-1, 1)
        axes.set_yticks([0])
        return
    largest = float(magnitudes.max())
    # More than 8 decades on each side of zero are not readable. A power of ten puts a tick where the scale changes.
    threshold = max(float(magnitudes.min()), largest * 1e-8, 1e-300)
    axes.set_yscale("symlog", linthresh=10.0 ** np.floor(np.log10(threshold)), linscale=1)
    axes.axhline(0, color="black", linewidth=0.5)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.compare_runs",
        description="Compare the loss and the gradient norm of recorded runs bit for bit, each run with the first.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("first", metavar="RUN_A", help="folder with the run.json and metrics.jsonl to compare with")
    parser.add_argument("others", metavar="RUN_B", nargs="+", help="one or more folders of runs to compare")
    parser.add_argument("--plot", metavar="FILE.png", help="write the loss curves and their difference to a PNG")
    parser.add_argument("--force", action="store_true", help="compare runs whose configs are not comparable")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status; `--help` says what each means."""
    arguments = _parser().parse_args(argv)
    folders = [arguments.first, *arguments.others]
    labels = label_runs(len(folders))
    try:
        if arguments.plot:
            check_output("--plot", arguments.plot, folders)
        pyplot = load_pyplot("--plot") if arguments.plot else None
        runs = [read_run(folder) for folder in folders]
        for warning in check_comparable(labels, runs, arguments.force):
            print(f"warning: {warning}", file=sys.stderr)
        pairs = [compare_pair(runs[0], run) for run in runs[1:]]
        print(report(labels, runs, pairs))
        if pyplot:
            write_plot(pyplot, arguments.plot, labels, runs)
            print(f"\nplot: {Path(arguments.plot)}")
    except (RecordError, ComparisonError, PlotError) as error:
        print(f"error: {error}", file=sys.stderr)
        return UNCOMPARABLE
    return IDENTICAL if all(pair.identical for pair in pairs) else DIFFERENT


if __name__ == "__main__":
    end_with(main)
