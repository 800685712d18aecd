"""What a calibration measured, as it is: so that the fit can be made again later, anywhere."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from uniep.autotune.fit import Fit, Sample, fit, start_constants
from uniep.autotune.hardware import Bandwidth, Hardware, HardwareError


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
