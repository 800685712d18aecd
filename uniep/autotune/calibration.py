"""What a calibration measured, as it is: so that the fit can be made again later, anywhere."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from uniep.autotune.fit import Fit, Sample, errors_of, fit, start_constants
from uniep.autotune.hardware import Bandwidth, Floats, Hardware, HardwareError


@dataclass(frozen=True)
class Calibration:
    """
    Attributes:
        name, num_multiprocessors, memory_gbs, link, copy, source: as in Hardware.
        samples: measured times of launches.
    """

    name: str
    num_multiprocessors: int
    memory_gbs: float
    link: Bandwidth
    copy: Bandwidth
    samples: tuple[Sample, ...]
    source: str = ""

    def fitted(self) -> Fit:
        """The hardware that predicts the samples best."""
        start = Hardware(
            self.name,
            self.num_multiprocessors,
            self.memory_gbs,
            self.link,
            self.copy,
            start_constants(),
            source=self.source,
        )
        return fit(start, self.samples)

    def left_out_errors(self) -> Floats:
        """Of each sample, predicted over measured, less 1, by the fit of the other layers' samples. Of two or more."""
        errors = np.empty(len(self.samples))
        for shape in {sample.shape for sample in self.samples}:
            others = tuple(sample for sample in self.samples if sample.shape != shape)
            rows = [row for row, sample in enumerate(self.samples) if sample.shape == shape]
            found = replace(self, samples=others).fitted().hardware
            errors[rows] = errors_of(found, [self.samples[row] for row in rows])
        return errors

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> "Calibration":
        """
        Raises:
            HardwareError: there is no such file, or it holds no calibration.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            tables = {what: Bandwidth.from_json(values[what]) for what in ("link", "copy")}
            samples = tuple(Sample.from_json(sample) for sample in values["samples"])
            return Calibration(**{**values, **tables, "samples": samples})
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise HardwareError(f"{path} must be the samples of tools.calibrate, got {error!r}") from error
