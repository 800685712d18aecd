"""Which MoE block runs on this machine, and what it needs to run."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DeviceMesh
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger

from recipes.choices import fixed_by_hand, resolve_tune
from recipes.config import Backend, UniEP
from recipes.tuning import open_tuner
from uniep.kernels.config import default_config
from uniep.kernels.timeline import Timeline
from uniep.layer import fused_moe
from uniep.numerics import Numerics
from uniep.plan.layout import HeapLayout
from uniep.plan.room import Room
from uniep.reference import reference_moe
from uniep.shapes import MoEShape
from uniep.symmetric.heap import HeapError, MissingPeerError, SymmetricHeap
from uniep.symmetric.nvshmem import open_nvshmem
from uniep.symmetric.torch_symmetric import open_torch_symmetric
from uniep.symmetric.virtual_ranks import open_virtual_ranks


class BackendError(ValueError):
    """A backend that this machine or version cannot run."""


@dataclass(frozen=True)
class RoutedBackend:
    """The routed experts of all MoE layers of a model.

    Attributes:
        name: the backend that runs.
        run: (x_TD, scores_TK, expert_ids_TK, w1_LFD, w2_LDF, w3_LFD) -> out_TD.
        facts: what the record of a run says about it.
        start_up: what opening it took, in seconds.
        check: raises what a kernel that gave up a wait has left; waits for the device.
        close: gives back what it holds; all ranks call it together, after the last step.
        timeline: where `run` records its kernels while it is recording, or None.
        metrics: numbers of the last steps, for the log.
        layout: of the memory that all layers share, or None.
        symmetric_gib: device memory that it holds outside torch's allocator.
    """

    name: str
    run: Callable[..., Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)
    start_up: Mapping[str, float] = field(default_factory=dict)
    check: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    timeline: Timeline | None = None
    metrics: Callable[[], Mapping[str, float]] = dict
    layout: HeapLayout | None = None
    symmetric_gib: float = 0.0

    def of_layer(self, number: int) -> "RoutedBackend":
        """The same for one layer: with room for its own number of rows, and only the first can be recorded."""
        backend = self
        if self.layout is not None:
            backend = replace(backend, run=functools.partial(backend.run, room=Room(self.layout)))
        if number and self.timeline is not None:
            backend = replace(backend, run=functools.partial(backend.run, timeline=None), timeline=None)
        return backend


def resolve_backend(config: JobConfig, world_size: int) -> Backend:
    """The backend that runs for [uniep] backend: itself, or for "auto" the best that can run this config here.

    Args:
        world_size: ranks of the whole run.

    Raises:
        BackendError: the requested one cannot run here, and why.
    """
    requested: Backend = config.uniep.backend
    has_gpu = torch.cuda.is_available()
    if requested == "auto":
        return "uniep" if has_gpu and refused_tokens(config, world_size) is None else "reference"
    if requested in ("torchtitan", "uniep") and not has_gpu:
        why = {
            "torchtitan": "TorchTitan's MoE block permutes tokens with a GPU kernel",
            "uniep": "its kernels need one",
        }
        raise BackendError(
            '[uniep] backend must be "auto" or "reference" on a machine without a GPU, '
            f'got "{requested}": {why[requested]}'
        )
    return requested


def refused_tokens(config: JobConfig, world_size: int) -> str | None:
    """Why the fused kernels, which take bf16 tokens, cannot run a config; None where they can.

    FSDP casts the tokens of every module. Without it TorchTitan trains under autocast, but in pipeline stages: there
    the tokens may be fp32, and the stock block takes the sum over K with bf16 scores.
    """
    training, parallelism = config.training, config.parallelism
    pipeline, context = parallelism.pipeline_parallel_degree, parallelism.context_parallel_degree
    shard = parallelism.data_parallel_shard_degree
    if shard == -1:
        others = parallelism.data_parallel_replicate_degree * context * parallelism.tensor_parallel_degree * pipeline
        shard = world_size // max(others, 1)
    rule = 'with [uniep] backend = "uniep"'
    if shard > 1 or context > 1:
        if training.mixed_precision_param != "bfloat16":
            return f'[training] mixed_precision_param must be "bfloat16" {rule}, got "{training.mixed_precision_param}"'
        return None
    if pipeline == 1:
        return (
            '[uniep] backend must be "auto", "reference" or "torchtitan" without FSDP (one GPU, or none that shards '
            'with another), where TorchTitan trains under autocast and rounds otherwise, got "uniep"'
        )
    if training.dtype != "bfloat16":
        return f'[training] dtype must be "bfloat16" {rule} in pipeline stages without FSDP, got "{training.dtype}"'
    return None


def open_backend(
    name: Backend,
    shape: MoEShape,
    *,
    max_tokens: int,
    ep_mesh: DeviceMesh | None,
    options: UniEP,
    score_before_experts: bool,
    num_layers_waiting: int = 1,
    compiled: bool = False,
    switches: Mapping[str, Any] | None = None,
) -> RoutedBackend:
    """Opens a backend for all MoE layers of a shape.

    Args:
        max_tokens: the most tokens that a rank brings to a layer.
        ep_mesh: the expert-parallel ranks, or None for one.
        options: the [uniep] section.
        score_before_experts: the model's.
        num_layers_waiting: layers whose forward has run and whose backward has not, at most; their returned rows can
            stay in the symmetric memory, those of any more are copied.
        compiled: the stock block's experts would be compiled, which rounds SwiGLU less often.
        switches: for measuring, fields of KernelConfig and HeapLayout to set.

    Raises:
        HeapError: the fused kernels' symmetric memory could not be opened.
        TuneError: [uniep.tune] names what this GPU cannot run.
    """
    group = None if ep_mesh is None else ep_mesh.get_group()
    logger.info(f'MoE numerics: "{options.numerics}"')
    facts: dict[str, Any] = {"numerics": options.numerics}
    numerics = Numerics(score_before_experts, compiled, fast=options.numerics == "fast")
    if name == "reference":
        return RoutedBackend(name, functools.partial(reference_moe, group=group, numerics=numerics), facts)
    device = torch.device("cuda", torch.cuda.current_device())
    settings = dict(switches or {})
    keeps_rows = not numerics.fast and not score_before_experts
    layout = HeapLayout(
        shape,
        max_tokens,
        copy_per_expert=settings.pop("copy_per_expert", False),
        num_kept=num_layers_waiting if keeps_rows else 0,
    )
    heap, memory = open_heap(layout, group, device, options)
    heap_gib = layout.num_bytes / 2**30
    logger.info(f"Symmetric memory: {memory}, {heap_gib:.2f} GiB a rank for {max_tokens} tokens")
    config = replace(default_config(device), **settings)
    facts |= {"symmetric_memory": memory, "heap_gib": f"{heap_gib:.4f}"}
    timeline = Timeline(device) if options.timeline_steps else None
    more: dict[str, Any] = {"heap": heap, "numerics": numerics, "timeline": timeline}
    backend = RoutedBackend(
        name,
        fused_moe,
        facts,
        check=heap.check,
        close=heap.close,
        timeline=timeline,
        layout=layout,
        symmetric_gib=heap_gib if group is not None else 0.0,  # of one rank it is torch's own
    )
    tune = options.tune
    if tune.mode != "off":
        gpu = torch.cuda.get_device_properties(device)
        tune = resolve_tune(tune, gpu.name, gpu.multi_processor_count)
        if tune.mode == "off":
            logger.info(f'Tuner: [uniep.tune] mode = "auto" is "off" on "{gpu.name}", which no hardware file describes')
    if tune.mode == "off":
        return replace(backend, run=functools.partial(fused_moe, config=fixed_by_hand(config, tune), **more))
    tuner, took_s = open_tuner(heap, group, base=config, options=tune, numerics=numerics)
    return replace(
        backend,
        run=functools.partial(tuner.run, **more),
        facts=facts | {"tune": tuner.facts()},
        start_up=took_s,
        metrics=tuner.metrics,
    )


def open_heap(
    layout: HeapLayout, group: torch.distributed.ProcessGroup | None, device: torch.device, options: UniEP
) -> tuple[SymmetricHeap, str]:
    """Opens the symmetric memory that the [uniep] section asks for. All ranks of the group call it together.

    Args:
        group: the expert-parallel ranks, or None for one.

    Returns:
        the heap, and the name of its memory.
    """
    timeout_s = options.wait_timeout_s
    if group is None:
        return open_virtual_ranks(layout, device=device, timeout_s=timeout_s)[0], "plain (one rank)"
    if options.symmetric_memory in ("auto", "nvshmem"):
        try:
            return open_nvshmem(layout, group=group, device=device, timeout_s=timeout_s), "nvshmem"
        except HeapError as error:
            # A peer that does not come would not come to another memory either.
            if options.symmetric_memory == "nvshmem" or isinstance(error, MissingPeerError):
                raise
            logger.warning(f"NVSHMEM is not used, torch's symmetric memory takes its place: {error}")
    return open_torch_symmetric(layout, group=group, device=device, timeout_s=timeout_s), "torch"
