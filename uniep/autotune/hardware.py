"""What the cost model knows about a GPU and its links: tables and constants, read from and written to JSON.

`h200.json` beside this file is the one that comes with the package. `python -m tools.calibrate` writes one for any GPU.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from uniep.files import replace_text

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

DISPATCHES = ("up", "down_grad")
COMBINES = ("down", "up_grad")
# The launches that have a configuration, in the order in which they run.
TUNED = ("up", "down", "down_grad", "up_grad")


# The search lists all shares of them.
MAX_MULTIPROCESSORS = 1024


class HardwareError(ValueError):
    """A description that cannot be used; the text names the file, the rule and the value."""


def is_count(value: Any) -> bool:
    """Of programs, tokens and dims: what is larger by far is a damaged number."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1 << 32


def is_positive(value: Any) -> bool:
    """Of a quantity in the units used here: what is smaller or larger by far is a damaged number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-12 < value < 1e12


def check_multiprocessors(count: Any) -> None:
    if not is_count(count) or count > MAX_MULTIPROCESSORS:
        raise HardwareError(
            f"num_multiprocessors must be a whole number from 1 to {MAX_MULTIPROCESSORS}, got {count!r}"
        )


@dataclass(frozen=True)
class Bandwidth:
    """A measured table: GB/s (1e9 bytes a second) that some programs reach together.

    Attributes:
        num_warps: of a program, ascending, a row of the table each.
        num_programs: ascending, a column of the table each. One program a multiprocessor.
        gbs: [num_warps, num_programs].
    """

    num_warps: tuple[int, ...]
    num_programs: tuple[int, ...]
    gbs: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for what in ("num_warps", "num_programs"):
            counts = getattr(self, what)
            ascend = all(low < high for low, high in itertools.pairwise(counts))
            if not counts or not all(is_count(count) for count in counts) or not ascend:
                raise HardwareError(f"{what} must be whole numbers that ascend from 1, got {counts}")
        size = (len(self.num_warps), len(self.num_programs))
        rows_fit = len(self.gbs) == size[0] and all(len(row) == size[1] for row in self.gbs)
        if not rows_fit or not all(is_positive(gbs) for row in self.gbs for gbs in row):
            raise HardwareError(f"gbs must be {size[0]} x {size[1]} positive numbers, got {self.gbs}")

    def at(self, num_programs: Ints, num_warps: Ints) -> Floats:
        """GB/s, between the measured points by straight lines (over the logarithm of the warps), from 0 for no program;
        constant past the ends."""
        found = np.empty(np.broadcast(num_programs, num_warps).shape)
        for warps in set(num_warps.tolist()):
            here = num_warps == warps
            found[here] = np.interp(num_programs[here], (0, *self.num_programs), self._row(warps))
        return found

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Bandwidth":
        gbs = tuple(tuple(row) for row in values["gbs"])
        return Bandwidth(tuple(values["num_warps"]), tuple(values["num_programs"]), gbs)

    def _row(self, num_warps: int) -> tuple[float, ...]:
        """GB/s of these warps, from no program on; kept, because a search asks many times."""
        if num_warps not in self._rows:
            place = np.interp(np.log2(num_warps), np.log2(self.num_warps), range(len(self.num_warps)))
            low, high = np.array(self.gbs[math.floor(place)]), np.array(self.gbs[math.ceil(place)])
            self._rows[num_warps] = (0.0, *(low + (place - math.floor(place)) * (high - low)).tolist())
        return self._rows[num_warps]

    @cached_property
    def _rows(self) -> dict[int, tuple[float, ...]]:
        return {}


@dataclass(frozen=True)
class Tile:
    """A variant of a launch's code: what must be compiled anew. The names are TileConfig's."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    occupancy: int


# Rows of a tile are 128 in all of them.
TILES = {
    "wide4": Tile(block_n=256, block_k=64, num_warps=8, num_stages=4, occupancy=1),
    "wide3": Tile(block_n=256, block_k=64, num_warps=8, num_stages=3, occupancy=1),
    "narrow": Tile(block_n=128, block_k=64, num_warps=4, num_stages=3, occupancy=2),
}


def constant_names() -> tuple[str, ...]:
    """All constants of the model. Units stand in the names; `share` is a number without a unit."""
    names = ["launch_us", "chunk_us", "row_part_us", "mark_us", "send_share", "link_gbs", "reduce_share"]
    names += ["memory_share", "beside_share", "hot_share", "beside_hot_share", "hot_tflop"]
    names += ["exchange.fixed_us", "plan.fixed_us", "plan.gbs", "scores.fixed_us", "scores.gbs"]
    names += ["wgrad.step_us", "wgrad.tile_us"]
    names += [f"{tile}.link_share" for tile in TILES]
    # A relay of the backward scales the rows by their scores.
    names += [f"{launch}.relay_share" for launch in DISPATCHES]
    for launch in TUNED:
        names += [f"{launch}.{tile}.step_us" for tile in TILES]
        names.append(f"{launch}.epilogue_us")
    return tuple(names)


@dataclass(frozen=True)
class Hardware:
    """A GPU and its link to the others of its group.

    Attributes:
        name: as torch.cuda.get_device_name says.
        num_multiprocessors: of one GPU.
        memory_gbs: of the device memory, reads and writes together, in GB/s.
        link: programs that write into a peer's memory.
        copy: programs that copy within the device memory, reads and writes together.
        constants: see constant_names, and docs/autotuner.md for what each means.
        assumed: names of constants that no measurement decided.
        source: where all of this comes from.
    """

    name: str
    num_multiprocessors: int
    memory_gbs: float
    link: Bandwidth
    copy: Bandwidth
    constants: Mapping[str, float]
    assumed: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        check_multiprocessors(self.num_multiprocessors)
        if not isinstance(self.name, str):
            raise HardwareError(f"name must be a GPU's, got {self.name!r}")
        names = set(constant_names())
        if names != set(self.constants):
            missing, unknown = sorted(names - set(self.constants)), sorted(set(self.constants) - names)
            raise HardwareError(f"constants must be those of the model, got missing {missing}, unknown {unknown}")
        for name, value in {"memory_gbs": self.memory_gbs, **self.constants}.items():
            if not is_positive(value):
                raise HardwareError(f"{name} must be a positive number, got {value!r}")
        if unknown_names := sorted(set(self.assumed) - names):
            raise HardwareError(f"assumed must be names of constants, got {unknown_names}")

    def steps_us(self, launch: str) -> Floats:
        """Of each tile, in the order of TILES."""
        return np.array([self.constants[f"{launch}.{tile}.step_us"] for tile in TILES])

    def link_shares(self) -> Floats:
        """Of each tile, in the order of TILES."""
        return np.array([self.constants[f"{tile}.link_share"] for tile in TILES])

    def offers(self, launch: str) -> tuple[str, ...]:
        """The tiles that a search may choose for a launch: those that were timed in it."""
        return tuple(tile for tile in TILES if f"{launch}.{tile}.step_us" not in self.assumed)

    def with_constants(self, constants: Mapping[str, float]) -> "Hardware":
        return replace(self, constants={**self.constants, **constants})

    @property
    def fingerprint(self) -> str:
        """A short name of the exact content."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    def save(self, path: Path) -> None:
        replace_text(path, json.dumps(asdict(self), indent=2) + "\n")

    @staticmethod
    def load(path: Path) -> "Hardware":
        """
        Raises:
            HardwareError: there is no such file, or it is no description.
        """
        try:
            return _from_json(json.loads(path.expanduser().read_text(encoding="utf-8")))
        except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:  # RuntimeError: an unknown home
            raise HardwareError(f"{path} must be a hardware file of tools.calibrate, got {error!r}") from error


def shipped() -> Iterable[Hardware]:
    """The descriptions that come with the package."""
    for file in resources.files("uniep.autotune").iterdir():
        if file.name.endswith(".json"):
            yield _from_json(json.loads(file.read_text(encoding="utf-8")))


def _from_json(values: dict[str, Any]) -> Hardware:
    tables = {what: Bandwidth.from_json(values[what]) for what in ("link", "copy")}
    return Hardware(**{**values, **tables, "assumed": tuple(values.get("assumed", ()))})
