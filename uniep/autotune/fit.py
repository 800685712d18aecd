"""Fits the model's constants to measured times: a pure function, for a calibration and for a run that drifts."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from uniep.autotune.cost_model import Candidates, fixed_us, predict
from uniep.autotune.hardware import COMBINES, DISPATCHES, TILES, TUNED, Floats, Hardware, constant_names
from uniep.autotune.workload import TILE_ROWS, Workload
from uniep.shapes import MoEShape

# A time's relative error by noise, and how far a constant may be from its start (a factor of e) at the same cost.
_NOISE, _PRIOR = 0.01, 1.0
# A constant that changes no measured time by this share of its own change is not decided by the measurement.
_DECIDED = 0.02
_MAX_STEPS = 40
_LOG_STEP = 1e-4


@dataclass(frozen=True)
class Sample:
    """A measured time of one step with balanced routing.

    Attributes:
        shape, num_tokens: the layer, and T of a rank.
        step: one of TUNED, or "exchange", "plan", "wgrad" or "scores" (see `cost_model.fixed_us`).
        us: microseconds, the slowest rank's.
        tile, num_link, num_local: the launch's configuration, for one of TUNED.
    """

    shape: MoEShape
    num_tokens: int
    step: str
    us: float
    tile: str = ""
    num_link: int = 0
    num_local: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Sample":
        return Sample(**{**values, "shape": MoEShape(**values["shape"])})


@dataclass(frozen=True)
class Fit:
    """
    Attributes:
        hardware: with the constants that fit best. Those that no sample depends on are as before and named in assumed.
        errors: predicted over measured, less 1, of each sample.
    """

    hardware: Hardware
    errors: Floats


# Constants that a run's drift moves together: the same link, memory or clock serves all launches and tiles.
RESOURCES: dict[str, tuple[str, ...]] = {
    "link": (
        *(f"{launch}.send_share" for launch in DISPATCHES),
        *(f"{launch}.{tile}.link_gbs" for launch in COMBINES for tile in TILES),
    ),
    "memory": (
        *(f"{launch}.relay_share" for launch in DISPATCHES),
        *(f"{launch}.reduce_gbs" for launch in COMBINES),
    ),
    "compute": ("wgrad.step_us", *(f"{launch}.{tile}.step_us" for launch in TUNED for tile in TILES)),
}


def start_constants() -> dict[str, float]:
    """Orders of magnitude, of a Hopper GPU. A fit starts from them; those that it leaves are named as assumed."""
    constants = {
        "launch_us": 6.0, "flag_us": 1.2, "mark_us": 3.0,
        "exchange.fixed_us": 25.0, "exchange.gbs": 50.0, "plan.fixed_us": 30.0, "plan.gbs": 200.0, "scores.gbs": 3000.0,
        "wgrad.step_us": 0.45, "wgrad.tile_us": 3.0, "wgrad.memory_share": 0.1, "wgrad.scores_share": 0.5,
    }  # fmt: skip
    for launch in TUNED:
        constants[f"{launch}.memory_share"] = 0.1
        for name, tile in TILES.items():
            # 650 TFLOP/s on 132 multiprocessors, and an epilogue by its columns.
            flops = 2 * TILE_ROWS * tile.block_n * tile.block_k
            constants[f"{launch}.{name}.step_us"] = flops / 4.9e6
            constants[f"{launch}.{name}.tile_us"] = tile.block_n / 64
    for launch in DISPATCHES:
        constants |= {f"{launch}.send_share": 1.0, f"{launch}.relay_share": 0.9}
    for launch in COMBINES:
        constants[f"{launch}.reduce_gbs"] = 3000.0
        for name, tile in TILES.items():
            constants |= {f"{launch}.{name}.link_gbs": 310.0, f"{launch}.{name}.link_share": 0.4 / tile.occupancy**2}
    return constants


def fit(
    hardware: Hardware,
    samples: Sequence[Sample],
    *,
    groups: Mapping[str, Sequence[str]] | None = None,
    prior: float = _PRIOR,
) -> Fit:
    """Least squares of the logarithms of the times, by damped Gauss-Newton steps in the logarithms of the constants.

    Args:
        hardware: where the constants start. One that the samples do not decide stays there.
        samples: measured times.
        groups: name -> constants that one factor scales; None for a factor of each constant.
        prior: how far, in natural logarithms, a factor may go for the error of one sample by its noise.
    """
    if not samples:
        raise ValueError("samples must not be empty")
    scaled = dict(groups) if groups is not None else {name: (name,) for name in constant_names()}
    model = _Model(hardware, samples, scaled)
    logs = np.zeros(len(scaled))
    damping = 1e-3
    residuals = model.residuals(logs)
    for _ in range(_MAX_STEPS):
        jacobian = model.jacobian(logs, residuals)
        cost = _cost(residuals, logs, prior)
        normal = jacobian.T @ jacobian / _NOISE**2 + np.eye(len(logs)) / prior**2
        gradient = jacobian.T @ residuals / _NOISE**2 + logs / prior**2
        for _ in range(12):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            tried = logs + np.clip(step, -1.0, 1.0)
            tried_residuals = model.residuals(tried)
            if _cost(tried_residuals, tried, prior) < cost:
                break
            damping *= 4.0
        else:
            break
        gained = cost - _cost(tried_residuals, tried, prior)
        logs, residuals, damping = tried, tried_residuals, damping / 8.0
        if gained < 1e-6 * cost:
            break
    influence = np.abs(model.jacobian(logs, residuals)).max(axis=0)
    decided = {
        name for of_group, most in zip(scaled.values(), influence, strict=True) if most > _DECIDED for name in of_group
    }
    assumed = hardware.assumed if groups is not None else tuple(n for n in constant_names() if n not in decided)
    values = asdict(model.hardware(logs)) | {"assumed": assumed}
    found = Hardware(**{**values, "link": hardware.link, "copy": hardware.copy})
    return Fit(found, np.expm1(residuals))


def _cost(residuals: Floats, logs: Floats, prior: float) -> float:
    return float(residuals @ residuals) / _NOISE**2 + float(logs @ logs) / prior**2


class _Model:
    """Log of predicted over measured of all samples, as a function of the logs of the factors."""

    def __init__(self, hardware: Hardware, samples: Sequence[Sample], groups: Mapping[str, Sequence[str]]):
        self._hardware = hardware
        self._groups = groups
        self._measured = np.log([sample.us for sample in samples])
        batches: dict[tuple[str, MoEShape, int], list[int]] = defaultdict(list)
        for index, sample in enumerate(samples):
            batches[sample.step, sample.shape, sample.num_tokens].append(index)
        self._batches = [
            (step, Workload.balanced(shape, num_tokens), _candidates([samples[i] for i in rows]), np.array(rows))
            for (step, shape, num_tokens), rows in batches.items()
        ]

    def hardware(self, logs: Floats) -> Hardware:
        factors = np.exp(logs)
        constants = {
            name: self._hardware.constants[name] * float(factor)
            for names, factor in zip(self._groups.values(), factors, strict=True)
            for name in names
        }
        return self._hardware.with_constants(constants)

    def residuals(self, logs: Floats) -> Floats:
        return self._fill(self.hardware(logs), np.empty_like(self._measured), self._batches)

    def jacobian(self, logs: Floats, residuals: Floats) -> Floats:
        columns = []
        for index, names in enumerate(self._groups.values()):
            moved = logs.copy()
            moved[index] += _LOG_STEP
            some = [batch for batch in self._batches if any(_concerns(name, batch[0]) for name in names)]
            columns.append((self._fill(self.hardware(moved), residuals.copy(), some) - residuals) / _LOG_STEP)
        return np.array(columns).T

    def _fill(self, hardware: Hardware, residuals: Floats, batches: list[Any]) -> Floats:
        for step, work, candidates, rows in batches:
            if step in TUNED:
                us = predict(step, work, hardware, candidates).total_us
            else:
                us = np.full(len(rows), sum(fixed_us(step, work, hardware).values()))
            residuals[rows] = np.log(us) - self._measured[rows]
        return residuals


def _concerns(constant: str, step: str) -> bool:
    """Whether a constant can change a step's time: its first word is a step, or it is everyone's."""
    owner = constant.partition(".")[0] if "." in constant else step
    return owner == step or (owner, step) == ("scores", "wgrad")


def _candidates(samples: Sequence[Sample]) -> Candidates | None:
    if samples[0].step not in TUNED:
        return None
    names = tuple(TILES)
    return Candidates(
        np.array([names.index(sample.tile) for sample in samples]),
        np.array([TILES[sample.tile].num_warps for sample in samples]),
        np.array([sample.num_link for sample in samples]),
        np.array([sample.num_local for sample in samples]),
        np.zeros(len(samples), dtype=np.int64),
    )
