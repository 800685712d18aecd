"""What a calibration measured, as it is: so that the fit can be made again later, anywhere."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from uniep.autotune.fit import STEPS, Fit, Sample, errors_of, fit, start_constants
from uniep.autotune.hardware import (
    DISPATCHES,
    TILES,
    TUNED,
    Bandwidth,
    Floats,
    Hardware,
    HardwareError,
    check_multiprocessors,
    is_count,
    is_positive,
)
from uniep.files import replace_text

# Of tokens, experts, columns: what no layer has is a damaged number.
_MOST = 1 << 24


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
            start_constants() | {"link_gbs": max(gbs for row in self.link.gbs for gbs in row)},
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
        replace_text(path, json.dumps(asdict(self), indent=1) + "\n")

    def _check(self) -> None:
        """What a file by hand may have wrong, and would end the fit late or spoil it."""
        check_multiprocessors(self.num_multiprocessors)
        if not isinstance(self.name, str):
            raise HardwareError(f"name must be a GPU's, got {self.name!r}")
        if not is_positive(self.memory_gbs):
            raise HardwareError(f"memory_gbs must be a positive number, got {self.memory_gbs!r}")
        if not isinstance(self.source, str):
            raise HardwareError(f"source must be text, got {self.source!r}")
        if not self.samples:
            raise HardwareError("samples must not be empty, got none")
        for index, sample in enumerate(self.samples):
            if rule := _broken_rule(sample, self.num_multiprocessors):
                raise HardwareError(f"samples[{index}].{rule}")

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
            found = Calibration(**{**values, **tables, "samples": samples})
            found._check()
            return found
        except HardwareError as error:
            raise HardwareError(f"{path} must be the samples of tools.calibrate: {error}") from error
        except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:  # RuntimeError: nested too deep
            raise HardwareError(f"{path} must be the samples of tools.calibrate, got {error!r}") from error


def _broken_rule(sample: Sample, num_multiprocessors: int) -> str | None:
    """What is wrong with a sample: "{what} must be {rule}, got {value}"."""
    if sample.step not in STEPS:
        return f"step must be one of {', '.join(STEPS)}, got {sample.step!r}"
    if not is_positive(sample.us):
        return f"us must be a positive number, got {sample.us!r}"
    counts = {"num_tokens": sample.num_tokens}
    if sample.step not in TUNED and (sample.tile, sample.num_link) != ("", 0):
        return f"tile and num_link must be those of {', '.join(TUNED)} alone, got {sample.tile!r}, {sample.num_link!r}"
    if sample.step in TUNED:
        if sample.tile not in tuple(TILES):
            return f"tile must be one of {', '.join(TILES)}, got {sample.tile!r}"
        counts["num_link"] = sample.num_link
    if sample.step in DISPATCHES:
        counts["num_local"] = sample.num_local
    elif sample.num_local:
        return f"num_local must be 0 but for {', '.join(DISPATCHES)}, got {sample.num_local!r}"
    for what, value in (*vars(sample.shape).items(), *counts.items()):
        if not is_count(value) or value > _MOST:
            return f"{what} must be a whole number from 1 to {_MOST}, got {value!r}"
    if sample.step not in TUNED:
        return None
    roles = sample.num_link + sample.num_local
    if roles >= num_multiprocessors * TILES[sample.tile].occupancy:
        return f"num_link + num_local must leave programs of {num_multiprocessors} multiprocessors, got {roles}"
    return None
