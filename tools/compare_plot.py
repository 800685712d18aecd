"""The loss curves of recorded runs, and their differences."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.compare_report import name_runs
from tools.compare_values import difference
from tools.pyplot import PlotError
from tools.records import Run


def difference_note(steps: NDArray[np.int64], delta: NDArray[np.float64]) -> str:
    """What the points of a `difference` do not show, to be set behind a name; nothing where they show all."""
    if not len(steps):
        return ": no common step"
    if not delta.any():
        return ": no difference"
    broken = ~np.isfinite(delta)
    return f": not finite, first at step {steps[broken.argmax()]}" if broken.any() else ""


def write_plot(pyplot: Any, path: str, labels: Sequence[str], runs: Sequence[Run]) -> None:
    """Writes a PNG: the loss of every run, and below the difference of each to the first.

    Raises:
        PlotError: the file cannot be written.
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
        raise PlotError(f"--plot must be a file that can be written, got {path}: {error.strerror}") from None
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
