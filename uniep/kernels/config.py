"""The tunables of the two fused kernels, and the switches that exist for measuring."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from uniep.kernels.wgrad import WgradConfig
from uniep.plan.layout import MIN_TILE_COLS

# The fields of KernelConfig that are launches, in the order in which they run.
LAUNCHES = ("up", "down", "down_grad", "up_grad")


def _check_counts(config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")


@dataclass(frozen=True)
class TileConfig:
    """Tiles and warps of a launch. tile_rows is the layout's.

    Attributes:
        block_n: output columns of a tile. In the up GEMM each of g and u takes half of them.
        block_k: step along the reduction dimension.
        num_warps: warps of a program, in every role.
        num_stages: tiles in flight along the reduction dimension.
        occupancy: programs that a multiprocessor holds at once: one's epilogue then runs beside another's products.
        use_tma: operands through TMA descriptors (Hopper) instead of pointers; worth 13 % there.
    """

    block_n: int = 256
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    occupancy: int = 1
    use_tma: bool = True

    def __post_init__(self) -> None:
        if self.block_n < 2 * MIN_TILE_COLS:
            raise ValueError(f"block_n must be at least {2 * MIN_TILE_COLS}, got {self.block_n}")


@dataclass(frozen=True)
class DispatchConfig(TileConfig):
    """Of dispatch + GEMM.

    Attributes:
        num_dispatch: N_disp, programs that begin with sending tokens.
        num_relay: N_relay, programs that begin with relaying.
    """

    num_dispatch: int = 16
    num_relay: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_counts(self, "num_dispatch", "num_relay")


@dataclass(frozen=True)
class CombineConfig(TileConfig):
    """Of GEMM + combine.

    Attributes:
        num_combine: N_comb, programs that begin with returning rows.
    """

    num_combine: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_counts(self, "num_combine")


@dataclass(frozen=True)
class KernelConfig:
    """How the programs of a forward and of a backward share the work.

    Attributes:
        up: dispatch + up GEMM.
        down: down GEMM + combine.
        down_grad: the backward's dispatch + GEMM through w2.
        up_grad: the backward's GEMM through w1 and w3 + combine.
        wgrad: tiles of the weight gradients; None for those that fit the device.
        num_programs: programs of a launch, or with an occupancy above 1 that many times more: one for each place on a
            multiprocessor. Any number from 1 makes progress.
        copy_elements_of_warp: elements that a warp copies at once. 2,048 are eight 16-byte loads in flight a thread,
            and a copy waits for memory.
        by_priority: send first what the first experts want (False only for measuring).
        dynamic_roles: roles by arrival, and a program without tasks goes on to the next role. False, for measuring,
            ties roles to program ids; it needs all programs resident at once.
        staged_combine: rows of other ranks go through a local buffer, from which num_combine programs send them,
            instead of straight from the GEMM's epilogue across the link. The epilogue stalls on the link, but with two
            programs on a multiprocessor the other computes meanwhile.
    """

    num_programs: int
    # On the geometric mean over the layers of benchmarks/tune_ep2_8k.json and of tune_ep2_32k.json, a forward and a
    # backward with these are within 1 % of the best that is one for all. Four stages are worth up to 7 % where the
    # reduction is long, and nothing in the down GEMM.
    up: DispatchConfig = DispatchConfig(num_stages=4)
    down: CombineConfig = CombineConfig(block_n=128, num_warps=4, occupancy=2)
    down_grad: DispatchConfig = DispatchConfig(block_n=128, num_warps=4, occupancy=2, num_dispatch=24, num_relay=40)
    up_grad: CombineConfig = CombineConfig(block_n=128, num_warps=4, occupancy=2)
    wgrad: WgradConfig | None = None
    copy_elements_of_warp: int = 2048
    by_priority: bool = True
    dynamic_roles: bool = True
    staged_combine: bool = False

    def __post_init__(self) -> None:
        _check_counts(self, "num_programs")
        needed = max(
            *(launch.num_dispatch + launch.num_relay for launch in (self.up, self.down_grad)),
            *(launch.num_combine for launch in (self.down, self.up_grad)),
        )
        if not self.dynamic_roles and self.num_programs <= needed:
            raise ValueError(f"num_programs must be more than {needed} with static roles, got {self.num_programs}")


def default_config(device: torch.device) -> KernelConfig:
    """A configuration that fits the device: all multiprocessors and TMA where there is one, small tiles on a CPU."""
    if device.type != "cuda":
        tiles: dict[str, Any] = {"block_n": 64, "block_k": 32, "use_tma": False}
        dispatch, combine = DispatchConfig(**tiles, num_dispatch=1, num_relay=1), CombineConfig(**tiles, num_combine=1)
        return KernelConfig(num_programs=3, up=dispatch, down=combine, down_grad=dispatch, up_grad=combine)
    properties = torch.cuda.get_device_properties(device)
    config = KernelConfig(num_programs=properties.multi_processor_count)
    if properties.major >= 9:
        return config
    pointers: dict[str, Any] = {
        "block_n": 128, "block_k": 32, "num_warps": 8, "num_stages": 3, "occupancy": 1, "use_tma": False
    }  # fmt: skip
    return replace(config, **{name: replace(getattr(config, name), **pointers) for name in LAUNCHES})
