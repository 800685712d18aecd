"""The loss and the gradient norm of two recorded runs, bit for bit: where they differ, by how much, and how that goes
on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.records import VALUES, Run

TREND_WINDOW = 10
# The relative difference wanders by small factors between steps; below this factor it "stays".
TREND_FACTOR = 2.0


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


def counted(number: int, what: str) -> str:
    """1 step, 2 steps."""
    return f"{number} {what}{'' if number == 1 else 's'}"
