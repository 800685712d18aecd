"""Fits the model's constants to measured times: a pure function, for a calibration and for a run that drifts."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from uniep.autotune.cost_model import BACKWARD, FORWARD, Candidates, fixed_us, predict
from uniep.autotune.hardware import DISPATCHES, TILES, TUNED, Floats, Hardware, constant_names
from uniep.autotune.workload import TILE_ROWS, Workload
from uniep.shapes import MoEShape

# A time's error by noise: a share of it, and microseconds of it, which events and the ranks' skew cost whatever the
# time is. The exchange, a few microseconds and much skew, so says little.
_NOISE, _NOISE_US = 0.01, 4.0
# The model is there to choose: what a configuration is slower than its layer's fast ones counts as noise by this share.
_NOISE_OF_SLOW = 0.3
_FAST_QUANTILE = 0.1
# Errors of this many times the noise count by their size, no longer by its square: a GPU whose clock was lowered for
# a moment is late by up to a fifth, and none is early.
_OUTLIER = 1.5
# How far a constant may be from its start, in natural logarithms, at the cost of one error by noise.
_PRIOR = 0.3
# The same for what a calibration measures by itself: shares of the link's table and of the memory's bandwidth, and the
# link's bandwidth, which between two ranks hides behind the products, so that their times do not decide it.
_PRIOR_OF_MEASURED = {"send_share": 0.05, "reduce_share": 0.05, "link_gbs": 0.02}
# A constant that changes no measured time by this share of its own change is not decided by the measurement.
_DECIDED = 0.02
_MAX_STEPS = 40
_LOG_STEP = 1e-4
# What is timed.
STEPS = (*FORWARD, *BACKWARD, "scores")


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
    "link": ("send_share", "link_gbs"),
    "memory": (*(f"{launch}.relay_share" for launch in DISPATCHES), "reduce_share"),
    "compute": ("wgrad.step_us", *(f"{launch}.{tile}.step_us" for launch in TUNED for tile in TILES)),
}


def start_constants() -> dict[str, float]:
    """Orders of magnitude, of a Hopper GPU. A fit starts from them; those that it leaves are named as assumed."""
    constants = {
        "launch_us": 6.0, "chunk_us": 5.0, "row_part_us": 0.002, "mark_us": 3.0,
        "send_share": 1.0, "link_gbs": 330.0, "reduce_share": 1.0,
        "memory_share": 0.1, "beside_share": 0.6,
        "hot_share": 0.1, "beside_hot_share": 0.1, "hot_tflop": 0.3,
        "exchange.fixed_us": 30.0, "plan.fixed_us": 30.0, "plan.gbs": 500.0,
        "scores.fixed_us": 20.0, "scores.gbs": 3000.0, "wgrad.step_us": 0.33, "wgrad.tile_us": 3.4,
    }  # fmt: skip
    # What an epilogue loads and stores: three outputs; one; two inputs and three outputs; one, of two products.
    constants |= {"up.epilogue_us": 1.5, "down.epilogue_us": 4.0, "down_grad.epilogue_us": 18.0}
    constants["up_grad.epilogue_us"] = 7.0
    constants |= {f"{launch}.relay_share": 0.6 for launch in DISPATCHES}
    for name, tile in TILES.items():
        constants[f"{name}.link_share"] = 0.3 / tile.occupancy
        # 740 TFLOP/s on 132 multiprocessors.
        step_us = 2 * TILE_ROWS * tile.block_n * tile.block_k / 5.6e6
        constants |= {f"{launch}.{name}.step_us": step_us for launch in TUNED}
    return constants


def fit(
    hardware: Hardware,
    samples: Sequence[Sample],
    *,
    groups: Mapping[str, Sequence[str]] | None = None,
    prior: float = _PRIOR,
) -> Fit:
    """The constants under which the times are most likely, by damped Gauss-Newton steps in their logarithms.

    Equal measurements count once, by their median: a step that every configuration repeats weighs no more than others.

    Args:
        hardware: where the constants start. One that the samples do not decide stays there.
        samples: measured times.
        groups: name -> constants that one factor scales; None for a factor of each constant.
        prior: how far, in natural logarithms, a factor may go for the error of one sample by its noise.
    """
    if not samples:
        raise ValueError("samples must not be empty")
    scaled = dict(groups) if groups is not None else {name: (name,) for name in constant_names()}
    held = np.array([prior if groups is not None else _PRIOR_OF_MEASURED.get(name, prior) for name in scaled])
    model = _Model(hardware, medians(samples), scaled)
    logs = np.zeros(len(scaled))
    damping = 1e-3
    residuals = model.residuals(logs)
    for _ in range(_MAX_STEPS):
        jacobian = model.jacobian(logs, residuals)
        cost = _cost(residuals / model.noise, logs / held)
        weights = 1.0 / (model.noise**2 * np.sqrt(1.0 + (residuals / model.noise / _OUTLIER) ** 2))
        normal = jacobian.T @ (weights[:, None] * jacobian) + np.diag(1.0 / held**2)
        gradient = jacobian.T @ (weights * residuals) + logs / held**2
        for _ in range(12):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            tried = logs + np.clip(step, -1.0, 1.0)
            tried_residuals = model.residuals(tried)
            if _cost(tried_residuals / model.noise, tried / held) < cost:
                break
            damping *= 4.0
        else:
            break
        gained = cost - _cost(tried_residuals / model.noise, tried / held)
        logs, residuals, damping = tried, tried_residuals, damping / 8.0
        if gained < 1e-6 * cost:
            break
    influence = np.abs(model.jacobian(logs, residuals)).max(axis=0)
    decided = {
        name for of_group, most in zip(scaled.values(), influence, strict=True) if most > _DECIDED for name in of_group
    }
    assumed = hardware.assumed if groups is not None else tuple(n for n in constant_names() if n not in decided)
    found = replace(model.hardware(logs), assumed=assumed)
    return Fit(found, errors_of(found, samples))


def errors_of(hardware: Hardware, samples: Sequence[Sample]) -> Floats:
    """Predicted over measured, less 1, of each sample."""
    model = _Model(hardware, samples, {})
    return np.expm1(model.residuals(np.zeros(0)))


def medians(samples: Sequence[Sample]) -> list[Sample]:
    """One sample of all that are equal but for their times."""
    times: dict[Sample, list[float]] = defaultdict(list)
    for sample in samples:
        times[replace(sample, us=0.0)].append(sample.us)
    return [replace(sample, us=statistics.median(us)) for sample, us in times.items()]


def _cost(errors: Floats, changes: Floats) -> float:
    """Both in units of what is expected. Errors count by squares while small, by twice _OUTLIER times their size where
    large."""
    of_errors = 2.0 * _OUTLIER**2 * (np.sqrt(1.0 + (errors / _OUTLIER) ** 2) - 1.0)
    return float(of_errors.sum() + changes @ changes)


class _Model:
    """Log of predicted over measured of all samples, as a function of the logs of the factors."""

    def __init__(self, hardware: Hardware, samples: Sequence[Sample], groups: Mapping[str, Sequence[str]]):
        self._hardware = hardware
        self._groups = groups
        us = np.array([sample.us for sample in samples])
        self._measured = np.log(us)
        self.noise = np.hypot(_NOISE, _NOISE_US / us)
        batches: dict[tuple[str, MoEShape, int], list[int]] = defaultdict(list)
        for index, sample in enumerate(samples):
            batches[sample.step, sample.shape, sample.num_tokens].append(index)
        for rows in batches.values():
            slower = us[rows] / np.quantile(us[rows], _FAST_QUANTILE) - 1.0
            self.noise[rows] = np.hypot(self.noise[rows], _NOISE_OF_SLOW * np.maximum(slower, 0.0))
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
    owner = constant.partition(".")[0]
    return owner not in STEPS or owner == step or (owner, step) == ("scores", "wgrad")


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
