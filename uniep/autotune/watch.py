"""Whether a run's times still are what the model said."""

import statistics


class Watch:
    """Tells when measured and predicted times part for long. It knows no clock: times are handed in.

    Noise goes both ways and comes and goes: only samples in a row that all part by more than the share, to the same
    side, count.
    """

    def __init__(self, *, share: float, num_samples: int):
        """
        Args:
            share: |measured / predicted - 1| above which a sample parts.
            num_samples: in a row, after which it is said.
        """
        if not share > 0 or num_samples < 1:
            raise ValueError(f"share must be positive and num_samples at least 1, got {share} and {num_samples}")
        self._share = share
        self._num_samples = num_samples
        self._ratios: list[float] = []

    @property
    def parts(self) -> bool:
        """Whether the last sample parted and did not complete a row."""
        return bool(self._ratios)

    def forget(self) -> None:
        """From now on the predictions are others."""
        self._ratios.clear()

    def see(self, measured_us: float, predicted_us: float) -> float | None:
        """One sample. Returns the median of measured over predicted once they have parted, and starts anew."""
        ratio = measured_us / predicted_us
        if abs(ratio - 1.0) <= self._share:
            self._ratios.clear()
            return None
        if self._ratios and (ratio > 1.0) != (self._ratios[-1] > 1.0):
            self._ratios.clear()
        self._ratios.append(ratio)
        if len(self._ratios) < self._num_samples:
            return None
        median = statistics.median(self._ratios)
        self._ratios.clear()
        return median
