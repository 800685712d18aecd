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
class UniEP:
    backend: Backend = "auto"
    """
    Which MoE block runs.
    - "torchtitan": TorchTitan's own block, untouched.
    - "reference": ours in plain PyTorch and collectives, on GPUs and CPUs. The same bits as "torchtitan" on GPUs.
    - "uniep": the fused kernels. The same bits as "torchtitan".
    - "auto": the best of these that this machine runs; the log and run.json say which.
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


@dataclass
class Throughput:
    token_budget: float | None = None
    """Tokens that the run, or its continuations, shall see in all: the console then says when that will be."""


@dataclass
class JobConfig:
    model: Model = field(default_factory=Model)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    uniep: UniEP = field(default_factory=UniEP)
    throughput: Throughput = field(default_factory=Throughput)
