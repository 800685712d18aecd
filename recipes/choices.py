"""Choices of the autotuner and the kernels' configurations: one from the other, by hand, by the model, by measuring."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from recipes.config import Tune
from uniep.autotune.hardware import DISPATCHES, TILES, TUNED, Hardware, HardwareError, shipped
from uniep.autotune.search import Choice, LaunchChoice, Space, best_of_launch, kernel_space, search
from uniep.autotune.workload import Workload
from uniep.kernels.config import CombineConfig, DispatchConfig, KernelConfig
from uniep.shapes import MoEShape


class TuneError(ValueError):
    """A [uniep.tune] section that cannot work; the text names the key, the rule and the value."""


def find_hardware(path: str | None, device_name: str, num_multiprocessors: int) -> Hardware:
    """The description in a file, or the package's own of this GPU.

    Raises:
        TuneError: there is none, or the file is of another GPU.
    """
    hardware = _hardware_of(path, device_name)
    if hardware.num_multiprocessors != num_multiprocessors:
        raise TuneError(
            f"[uniep.tune] hardware must be of a GPU with this one's {num_multiprocessors} multiprocessors, "
            f"got {hardware.num_multiprocessors} in {path or hardware.name}"
        )
    return hardware


def _hardware_of(path: str | None, device_name: str) -> Hardware:
    if path is None:
        known = list(shipped())
        for hardware in known:
            if hardware.name == device_name:
                return hardware
        names = ", ".join(f'"{hardware.name}"' for hardware in known)
        raise TuneError(
            "[uniep.tune] hardware must name a file of `python -m tools.calibrate` on a GPU that the package does not "
            f'know (it knows {names}), got none on "{device_name}"'
        )
    try:
        hardware = Hardware.load(Path(path))
        kernel_space(hardware)
    except HardwareError as error:
        raise TuneError(f"[uniep.tune] hardware: {error}") from None
    if hardware.name != device_name:
        raise TuneError(
            f'[uniep.tune] hardware must be a file of this GPU, "{device_name}", got "{path}" of "{hardware.name}"'
        )
    return hardware


def resolve_tune(options: Tune, device_name: str, num_multiprocessors: int) -> Tune:
    """The section with a mode that is not "auto"."""
    if options.mode != "auto":
        return options
    gpu = device_name, num_multiprocessors
    described = options.hardware is not None or any((one.name, one.num_multiprocessors) == gpu for one in shipped())
    return replace(options, mode="model" if described else "off")


def fixed_by_hand(config: KernelConfig, options: Tune) -> KernelConfig:
    """The configuration with what [uniep.tune.up] and its like set.

    Raises:
        TuneError: a count cannot work on as many multiprocessors as the configuration has programs.
    """
    for launch in TUNED:
        values = {name: value for name, value in asdict(getattr(options, launch)).items() if value is not None}
        tile = values.pop("tile", None)
        for name, value in values.items():
            if value < 1:
                raise TuneError(f"[uniep.tune.{launch}] {name} must be at least 1, got {value}")
        changes: dict[str, Any] = {**(asdict(TILES[tile]) if tile else {}), **values}
        found = replace(getattr(config, launch), **changes)
        num_programs = config.num_programs * found.occupancy
        if changes and isinstance(found, DispatchConfig) and found.num_dispatch + found.num_relay >= num_programs:
            raise TuneError(
                f"[uniep.tune.{launch}] num_dispatch + num_relay must be less than the programs of the launch = "
                f"{num_programs} (multiprocessors * programs on each), got {found.num_dispatch} + {found.num_relay}"
            )
        if changes and isinstance(found, CombineConfig) and found.num_combine >= num_programs:
            raise TuneError(
                f"[uniep.tune.{launch}] num_combine must be less than the programs of the launch = {num_programs} "
                f"(multiprocessors * programs on each), got {found.num_combine}"
            )
        config = replace(config, **{launch: found})
    return config


def kernel_config(choice: Choice, base: KernelConfig) -> KernelConfig:
    """The choice as the kernels take it; what is no choice stays as in base."""
    launches = {}
    for name, launch in choice.launches.items():
        roles = (
            {"num_dispatch": launch.num_link, "num_relay": launch.num_local}
            if name in DISPATCHES
            else {"num_combine": launch.num_link}
        )
        launches[name] = replace(getattr(base, name), **asdict(TILES[launch.tile]), **roles)
    return replace(base, **launches)


def choice_of(config: KernelConfig) -> Choice:
    """The other way round, without predictions.

    Raises:
        ValueError: a launch's tile is none of TILES.
    """
    launches = {}
    for name in TUNED:
        launch = getattr(config, name)
        tile = next((n for n, tile in TILES.items() if asdict(tile).items() <= asdict(launch).items()), None)
        if tile is None:
            raise ValueError(f"{name} must have a tile of {', '.join(TILES)}, got {launch}")
        dispatches = isinstance(launch, DispatchConfig)
        launches[name] = LaunchChoice(
            tile,
            launch.num_dispatch if dispatches else launch.num_combine,
            launch.num_relay if dispatches else 0,
            0.0,
        )
    return Choice(launches)


def describe(choice: Choice) -> str:
    parts = []
    for name, launch in choice.launches.items():
        roles = f"{launch.num_link}+{launch.num_local}" if name in DISPATCHES else f"{launch.num_link}"
        parts.append(f"{name} {launch.tile} {roles} ({launch.predicted_us:.0f} us)")
    return ", ".join(parts)


@dataclass(frozen=True)
class Buckets:
    """Token counts that share a configuration: bucket b holds ((b - 1) * tokens, b * tokens]."""

    tokens: int
    max_tokens: int

    def of(self, num_tokens: int) -> int:
        return min(max(-(-num_tokens // self.tokens), 1), -(-self.max_tokens // self.tokens))

    def all(self) -> range:
        return range(1, self.of(self.max_tokens) + 1)

    def most_tokens(self, bucket: int) -> int:
        """The token count that a bucket is tuned for: its largest."""
        return min(bucket * self.tokens, self.max_tokens)


def tuned_space(hardware: Hardware, base: KernelConfig, *, fast: bool) -> Space:
    """What may be chosen. With fast numerics the bits of the scores' gradient go by the backward's tiles, which
    therefore stay those of base."""
    tiles = {launch: hardware.offers(launch) for launch in TUNED}
    if fast:
        kept = choice_of(base).launches
        tiles |= {launch: (kept[launch].tile,) for launch in ("down_grad", "up_grad")}
    return kernel_space(hardware, tiles)


def choose_by_model(shape: MoEShape, buckets: Buckets, hardware: Hardware, space: Space) -> dict[int, Choice]:
    return {
        bucket: search(Workload.balanced(shape, buckets.most_tokens(bucket)), hardware, space)
        for bucket in buckets.all()
    }


def candidates_to_measure(work: Workload, hardware: Hardware, space: Space, count: int) -> list[Choice]:
    """The i-th holds the model's i-th best of each launch: launches share nothing, so that one call of the layer
    measures a candidate of each."""
    ranked = {launch: best_of_launch(launch, work, hardware, space, count) for launch in TUNED}
    return [
        Choice({launch: found[min(index, len(found) - 1)] for launch, found in ranked.items()})
        for index in range(max(len(found) for found in ranked.values()))
    ]


def choose_by_measuring(candidates: Sequence[Choice], times_us: Callable[[Choice], dict[str, float]]) -> Choice:
    """Of each launch the fastest candidate by its measured time.

    Args:
        times_us: measures a configuration: launch -> microseconds.
    """
    measured: dict[str, list[LaunchChoice]] = {launch: [] for launch in TUNED}
    for choice in candidates:
        times = times_us(choice)
        for launch, found in choice.launches.items():
            measured[launch].append(replace(found, predicted_us=times[launch]))
    return Choice({launch: min(found, key=lambda one: one.predicted_us) for launch, found in measured.items()})
