"""What a comparison of recorded runs found, as text for people."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase

import numpy as np

from tools.compare_values import TREND_WINDOW, PairComparison, Trend, counted, ulp_distance
from tools.records import Run


def label_runs(num_runs: int) -> list[str]:
    """A, B, C, ..."""
    return [ascii_uppercase[i] if i < len(ascii_uppercase) else f"run{i + 1}" for i in range(num_runs)]


def name_runs(runs: Sequence[Run]) -> list[str]:
    """The ends of the folders' paths, as long as it takes to tell them apart."""
    paths = [run.folder.resolve() for run in runs]
    ends = ([str(Path(*path.parts[-depth:])) for path in paths] for depth in itertools.count(1))
    return next(names for names in ends if len(set(names)) == len(set(paths)))


def report(labels: Sequence[str], runs: Sequence[Run], pairs: Sequence[PairComparison]) -> str:
    """The text for people; `pairs` are the runs from the second on, each against the first."""
    if all(pair.identical for pair in pairs):
        weights = {pair.weights_step for pair in pairs}
        ends = "" if None in weights else f", and the weights behind step {weights.pop()}"
        lines = [f"identical: {counted(len(runs[0].steps), 'step')}{ends}"]
    else:
        different = [label for label, pair in zip(labels[1:], pairs, strict=True) if not pair.identical]
        lines = [f"different from {labels[0]}: {', '.join(different)}"]
    for label, run in zip(labels, runs, strict=True):
        commit = f", commit {run.short_commit}" if run.commit else ""
        lines.append(f"  {label}  {run.folder} (ran {run.backend}{commit}, {counted(len(run.steps), 'step')})")
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
            f"{label_b} agrees with {label_a} at the {counted(len(common), 'step')} that both have, but "
            f"{counted(len(pair.gaps), 'step')} in between, the first is step {pair.gaps[0]}, are in one of them only"
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
        return [f"{label_b} agrees with {label_a} on all {counted(len(pair.common), 'step')}"]
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
            lines.append(f"  {label} has {counted(len(extra), 'step')} more, from step {extra[0]} to {extra[-1]}")
        elif len(extra):
            lines.append(
                f"  {label} has {counted(len(extra), 'step')} that {other} lacks, the first is step {extra[0]}"
            )
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
        rows.append((f"median of the next {counted(num_after, 'step')}", *medians))
    rows.append((f"at step {trend.steps[-1]}, the last common one", trend.absolute[-1], trend.relative[-1]))
    # Largest relative to the value: the absolute difference follows the value's own scale.
    peak = int(trend.relative.argmax())
    rows.append((f"at step {trend.steps[peak]}, the largest", trend.absolute[peak], trend.relative[peak]))
    width = max(len(what) for what, _, _ in rows)
    lines = [f"  difference of {name} from there on: {trend.verdict} ({counted(trend.num_differing, 'step')} differ)"]
    lines += [
        f"    {what:<{width}}  absolute {absolute:<9.3g}  relative {relative:.3g}" for what, absolute, relative in rows
    ]
    if trend.window:
        lines.append(
            f"    (the median relative difference of the last {trend.window} against the first {trend.window})"
        )
    return lines
