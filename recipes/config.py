"""The config sections that this recipe adds to TorchTitan's (`[job] custom_config_module = "recipes.config"`)."""

from dataclasses import dataclass, field
from typing import Literal

Backend = Literal["auto", "uniep", "reference", "torchtitan"]


@dataclass
class Model:
    n_layers: int | None = None
    """Keep only this many of the flavor's layers, so that a real model's layers fit on few GPUs. None keeps all."""


@dataclass
class Checkpoint:
    last_save_model_only: bool = False
    """
    Save the last step like every other, so that a finished run can be extended. True, TorchTitan's default, keeps
    only the weights of the last step, from which no run goes on.
    """


@dataclass
class DispatchRoles:
    """A launch of dispatch + GEMM by hand. With mode = "off" None is the default's value; in other modes the launch is
    given whole, or left to the mode."""

    tile: Literal["wide4", "wide3", "narrow"] | None = None
    """128 x 256 with 4 or 3 stages, or 128 x 128 and two programs a multiprocessor."""

    num_dispatch: int | None = None
    """Programs that begin with sending tokens."""

    num_relay: int | None = None
    """Programs that begin with copying tokens into the order of the experts."""


@dataclass
class CombineRoles:
    """A launch of GEMM + combine by hand, as in DispatchRoles."""

    tile: Literal["wide4", "wide3", "narrow"] | None = None
    """As in DispatchRoles."""

    num_combine: int | None = None
    """Programs that begin with returning rows."""


@dataclass
class Tune:
    """
    How the fused kernels share the GPU. No bit of the results depends on it, but with numerics = "fast" those of the
    scores' gradient go by the backward's tiles: there only a launch by hand changes them.
    """

    mode: Literal["auto", "off", "model", "measured"] = "auto"
    """
    Who chooses the kernels' configuration, for each bucket of token counts.
    - "auto": "model" on a GPU that is described, by the package or by [uniep.tune] hardware; else "off".
    - "off": the defaults.
    - "model": the fastest by the model of the GPU ([uniep.tune] hardware), in milliseconds.
    - "measured": of the model's best few, the fastest in a short measurement before the first step.
    """

    bucket_tokens: int = 4096
    """Tokens of a rank that a bucket spans: ceil(T / bucket_tokens) is a step's bucket."""

    hardware: str | None = None
    """A file of `python -m tools.calibrate`; None takes the package's own for this GPU."""

    cache: str | None = "~/.cache/uniep"
    """Folder where "measured" keeps what it found, for the next run. None keeps nothing."""

    num_candidates: int = 8
    """Configurations of each launch that "measured" times."""

    watch_calls: int = 101
    """Of so many forwards, all layers counted together, one is timed and compared with the prediction; 0 for none. A
    prime number comes to every layer in turn."""

    watch_share: float = 0.25
    """How far measured and predicted time may part, as a share of the prediction."""

    watch_samples: int = 20
    """Timed forwards in a row that part so far before the bucket is tuned again."""

    up: DispatchRoles = field(default_factory=DispatchRoles)
    down: CombineRoles = field(default_factory=CombineRoles)
    down_grad: DispatchRoles = field(default_factory=DispatchRoles)
    up_grad: CombineRoles = field(default_factory=CombineRoles)


@dataclass
class UniEP:
    backend: Backend = "auto"
    """
    Which MoE block runs.
    - "torchtitan": TorchTitan's own block, untouched.
    - "reference": ours in plain PyTorch and collectives, on GPUs and CPUs. The same bits as "torchtitan" on GPUs.
    - "uniep": the fused kernels. The same bits as "torchtitan".
    - "auto": "uniep" on GPUs, "reference" on CPUs and where TorchTitan trains under autocast, as on a single GPU
      without FSDP; the log and run.json say which.
    """

    numerics: Literal["bitwise", "fast"] = "bitwise"
    """
    Of the backward of "uniep".
    - "bitwise": the bits of "torchtitan".
    - "fast": fewer roundings, and gradients of the scores that are taken at the experts, so that a layer keeps 2 T K D
      bytes less. Other bits than "torchtitan", the same on every run.
    """

    symmetric_memory: Literal["auto", "nvshmem", "torch"] = "auto"
    """Memory that other ranks write into, for "uniep": NVSHMEM or torch's own; "auto" tries them in this order."""

    wait_timeout_s: float = 60.0
    """Seconds after which a kernel of "uniep" gives up a wait for a peer; the run then ends and names the peer."""

    timeline_steps: list[int] = field(default_factory=list)
    """Steps in which the kernels of "uniep" record when each of their tasks ran, for `python -m tools.timeline`."""

    tune: Tune = field(default_factory=Tune)


@dataclass
class Throughput:
    token_budget: float | None = None
    """Tokens that the run, or its continuations, shall see in all: the console then says when that will be."""
    time_moe: bool = False
    """Time the MoE blocks of each step on the device, as `tools.bench_train` does: `moe_s` in metrics.jsonl."""


@dataclass
class JobConfig:
    model: Model = field(default_factory=Model)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    uniep: UniEP = field(default_factory=UniEP)
    throughput: Throughput = field(default_factory=Throughput)
