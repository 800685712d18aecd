"""The fastest configuration of a space by the model: exact, because launches share nothing but one number.

A configuration has a part for each launch, and its time is the sum of their times. Where no number is shared each
launch is minimised alone. Where one is (the paper's warps w), each launch is minimised for each value of it, and the
value with the smallest sum wins: some 1,600 evaluations give the same optimum as all 209,088 combinations.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

from uniep.autotune.cost_model import BACKWARD, FORWARD, Candidates, fixed_us, predict
from uniep.autotune.hardware import DISPATCHES, TILES, TUNED, Floats, Hardware, HardwareError
from uniep.autotune.workload import Workload

_TILE_NAMES = tuple(TILES)
# Role counts worth trying. The time is flat around its minimum, so the steps widen.
_NUM_DISPATCH = (4, 8, 12, 16, 20, 24, 32, 40, 48, 64)
_NUM_RELAY = (4, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 72, 80, 90)
_NUM_COMBINE = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True)
class Space:
    """All that may be chosen: candidates of each launch. staged: see `cost_model.predict`."""

    launches: Mapping[str, Candidates]
    staged: bool = False


@dataclass(frozen=True)
class LaunchChoice:
    """The configuration of one launch: a name of TILES and what begins with which role."""

    tile: str
    num_link: int
    num_local: int
    predicted_us: float


@dataclass(frozen=True)
class Choice:
    """A configuration and what the model says of it, launch by launch."""

    launches: Mapping[str, LaunchChoice]
    shared: int = 0

    @property
    def predicted_us(self) -> float:
        return sum(launch.predicted_us for launch in self.launches.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Choice":
        """Raises KeyError, TypeError or ValueError for what `to_json` does not write."""
        launches = {name: LaunchChoice(**launch) for name, launch in values["launches"].items()}
        if set(launches) != set(TUNED) or any(launch.tile not in TILES for launch in launches.values()):
            raise ValueError(f"launches must be {TUNED} with tiles of {_TILE_NAMES}, got {values['launches']}")
        for name, launch in launches.items():
            roles = (launch.num_link, launch.num_local if name in DISPATCHES else 1)
            if not all(type(role) is int and role >= 1 for role in roles):
                raise ValueError(f"roles of {name} must be whole numbers from 1 on, got {launch}")
            if not (type(launch.predicted_us) in (int, float) and 0 < launch.predicted_us < math.inf):
                raise ValueError(f"predicted_us of {name} must be a positive number, got {launch.predicted_us!r}")
        return Choice(launches, values["shared"])


def candidates_of(launch: str, tiles: Iterable[str], num_multiprocessors: int) -> Candidates:
    """All role counts for each of some tiles that leave programs for the rest."""
    num_local = _NUM_RELAY if launch in DISPATCHES else (0,)
    num_link = _NUM_DISPATCH if launch in DISPATCHES else _NUM_COMBINE
    rows = [
        (_TILE_NAMES.index(tile), TILES[tile].num_warps, link, local, 0)
        for tile, link, local in product(tiles, num_link, num_local)
        if link + local < num_multiprocessors * TILES[tile].occupancy
    ]
    return _columns(rows)


def kernel_space(hardware: Hardware, tiles: Mapping[str, Iterable[str]] | None = None) -> Space:
    """Of our kernels: four launches that share nothing. tiles: those of each launch that may be chosen; None for all
    that were timed on the hardware.

    Raises:
        HardwareError: a launch has no tile, or no program beside those that it needs for sending and computing.
    """
    chosen = tiles or {launch: hardware.offers(launch) for launch in TUNED}
    for launch in TUNED:
        if not tuple(chosen[launch]):
            raise HardwareError(f"{launch} must have a tile that was timed on {hardware.name}, got none")
    launches = {launch: candidates_of(launch, chosen[launch], hardware.num_multiprocessors) for launch in TUNED}
    for launch, candidates in launches.items():
        if not len(candidates.tile):
            least = min(_NUM_DISPATCH) + min(_NUM_RELAY) if launch in DISPATCHES else min(_NUM_COMBINE)
            raise HardwareError(
                f"num_multiprocessors must be more than the {least} programs that {launch} gives its roles at least, "
                f"got {hardware.num_multiprocessors}"
            )
    return Space(launches)


def paper_space(hardware: Hardware) -> Space:
    """The paper's, 209,088 on 132 multiprocessors: w of 8, 16 or 32 warps in both launches; N_disp and N_comb by 4,
    eight N_relay by 4, eight N_red by 16. Combinations that leave no program for computing count as infinitely slow.

    The warps decide the bandwidths. How a GEMM's speed changes with them was not measured: it is that of 8 warps.
    """
    tile = _TILE_NAMES.index("wide4")
    links = range(4, hardware.num_multiprocessors + 1, 4)
    rows = {
        "up": [(tile, w, link, local, w) for w in (8, 16, 32) for link in links for local in range(1, 32, 4)],
        "down": [(tile, w, link, local, w) for w in (8, 16, 32) for link in links for local in range(1, 128, 16)],
    }
    return Space({launch: _columns(of_launch) for launch, of_launch in rows.items()}, staged=True)


def _columns(rows: Sequence[tuple[int, ...]]) -> Candidates:
    return Candidates(*np.array(rows, dtype=np.int64).reshape(-1, 5).T)


def search(work: Workload, hardware: Hardware, space: Space) -> Choice:
    """The space's fastest configuration. Of equally fast ones the first, so that all ranks find the same."""
    times = {
        launch: predict(launch, work, hardware, candidates, staged=space.staged).total_us
        for launch, candidates in space.launches.items()
    }
    values = np.unique(np.concatenate([candidates.shared for candidates in space.launches.values()]))
    best: Choice | None = None
    for value in values:
        launches = {}
        for launch, candidates in space.launches.items():
            row = int(np.argmin(np.where(candidates.shared == value, times[launch], np.inf)))
            launches[launch] = _launch_choice(candidates, times[launch], row)
        choice = Choice(launches, int(value))
        if best is None or choice.predicted_us < best.predicted_us:
            best = choice
    assert best is not None
    return best


def best_of_launch(launch: str, work: Workload, hardware: Hardware, space: Space, count: int) -> list[LaunchChoice]:
    """The count fastest configurations of one launch of a space without a shared number, the fastest first."""
    candidates = space.launches[launch]
    times = predict(launch, work, hardware, candidates, staged=space.staged).total_us
    return [_launch_choice(candidates, times, int(row)) for row in np.argsort(times, kind="stable")[:count]]


def _launch_choice(candidates: Candidates, times: Floats, row: int) -> LaunchChoice:
    return LaunchChoice(
        _TILE_NAMES[candidates.tile[row]],
        int(candidates.num_link[row]),
        int(candidates.num_local[row]),
        float(times[row]),
    )


def one_candidate(tile: str, num_link: int, num_local: int) -> Candidates:
    return _columns([(_TILE_NAMES.index(tile), TILES[tile].num_warps, num_link, num_local, 0)])


def predict_choice(work: Workload, hardware: Hardware, choice: Choice) -> Choice:
    """The same configuration, with this model's times for this work."""
    launches = {}
    for name, launch in choice.launches.items():
        candidates = one_candidate(launch.tile, launch.num_link, launch.num_local)
        total_us = float(predict(name, work, hardware, candidates).total_us[0])
        launches[name] = LaunchChoice(launch.tile, launch.num_link, launch.num_local, total_us)
    return Choice(launches, choice.shared)


def explain(work: Workload, hardware: Hardware, choice: Choice) -> list[str]:
    """Every term in microseconds, a line a step."""
    lines = []
    for step in (*FORWARD, *BACKWARD):
        if step in choice.launches:
            launch = choice.launches[step]
            found = predict(step, work, hardware, one_candidate(launch.tile, launch.num_link, launch.num_local))
            terms = {name: float(us[0]) for name, us in found.terms.items()}
            what = f"{launch.tile} {launch.num_link}+{launch.num_local}"
            alone = ", ".join(f"{name} {us[0]:.0f}" for name, us in found.alone.items())
        else:
            terms, what, alone = dict(fixed_us(step, work, hardware)), "", ""
        sums = " + ".join(f"{name} {us:.1f}" for name, us in terms.items())
        suffix = f"  (alone: {alone})" if alone else ""
        lines.append(f"{step:9} {what:14} {sum(terms.values()):9.1f} us = {sums}{suffix}")
    return lines
