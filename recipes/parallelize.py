"""Parallelisms for both families, from TorchTitan's own pieces, with the routed experts placed by us."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import SAC_IGNORED_OPS
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.distributed.context_parallel import apply_cp_to_attention_module
from torchtitan.models.llama3.infra.parallelize import apply_ddp
from torchtitan.models.llama4.infra.parallelize import apply_compile, apply_fsdp
from torchtitan.tools.logging import logger

from recipes.backend import RoutedBackend, open_backend, refused_tokens, resolve_backend
from recipes.config import Tune
from recipes.experts import UniEPMoE
from uniep.shapes import MoEShape

_PROFILER_MARKS = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}

ParallelizeFn = Callable[[nn.Module, ParallelDims, JobConfig], nn.Module]


def build_parallelize_fn(stock_parallelize: ParallelizeFn, ac_save_ops: set[torch._ops.OpOverload]) -> ParallelizeFn:
    """The parallelize function of a family.

    Args:
        stock_parallelize: TorchTitan's own, which runs untouched for backend = "torchtitan".
        ac_save_ops: the family's list of ops that selective activation checkpointing saves.
    """

    def parallelize(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
        requested, world_size = job_config.uniep.backend, parallel_dims.world_size
        backend = resolve_backend(job_config, world_size)
        logger.info(f'MoE backend: "{backend}" ([uniep] backend = "{requested}")')
        if requested == "auto" and torch.cuda.is_available() and (why := refused_tokens(job_config, world_size)):
            logger.warning(f'The fused kernels are not used, "{backend}" takes their place: {why}')
        if backend != "uniep" and asdict(job_config.uniep.tune) != asdict(Tune()):
            logger.warning('[uniep.tune] has no effect: only backend = "uniep" has kernels to tune')
        # The marks that FSDP2 puts around its hooks are no part of what is recomputed: torch 2.13 counts them, and a
        # recompute of a block with EP, which gathers the experts' weights once more, has others than the forward.
        SAC_IGNORED_OPS.update(_PROFILER_MARKS)
        if backend == "torchtitan":
            return stock_parallelize(model, parallel_dims, job_config)
        ep_mesh = parallel_dims.get_optional_mesh("ep")
        args: Any = model.model_args
        routed = open_backend(
            backend,
            MoEShape(
                args.moe_args.num_experts, args.moe_args.top_k, args.dim, args.moe_inter_dim, ep_degree=parallel_dims.ep
            ),
            max_tokens=_max_tokens(job_config) // parallel_dims.cp,
            ep_mesh=ep_mesh,
            options=job_config.uniep,
            score_before_experts=args.moe_args.score_before_experts,
            num_layers_waiting=_num_layers_waiting(model, job_config),
            compiled=compiles_model(job_config),
        )
        model._routed_backend = routed  # type: ignore[assignment]
        with_experts = [block for block in _blocks(model) if block.moe_enabled]
        for number, block in enumerate(with_experts):
            block.moe = UniEPMoE(block.moe, routed.of_layer(number), ep_mesh=ep_mesh)
        return _parallelize(model, parallel_dims, job_config, ac_save_ops)

    return parallelize


def _give_shards_own_numbers(model: Any, *, num_shards: int) -> None:
    """On a CPU mesh DTensor's random operators draw the same numbers on every rank: the shards of a weight would start
    as copies of each other, and the experts of one rank as those of the next."""
    init_weights = model.init_weights

    def init_with_own_seed(*args: Any, **kwargs: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            # Replicas, the outer dimension of the mesh, must start alike.
            torch.manual_seed(torch.initial_seed() + 1 + dist.get_rank() % num_shards)
            init_weights(*args, **kwargs)

    model.init_weights = init_with_own_seed


def _num_layers_waiting(model: nn.Module, job_config: JobConfig) -> int:
    """MoE layers whose forward has run and whose backward has not, at most: of checkpointed ones that is one, which
    runs again."""
    checkpointing = job_config.activation_checkpoint
    if checkpointing.mode == "full" or (
        checkpointing.mode == "selective" and checkpointing.selective_ac_option == "op"
    ):
        return 1
    return max(sum(bool(block.moe_enabled) for block in _blocks(model)), 1)


def _max_tokens(job_config: JobConfig) -> int:
    """Of a rank in a forward, before the sequence is shared out for context parallelism."""
    training, validation, parallelism = job_config.training, job_config.validation, job_config.parallelism
    num_microbatches = 1
    if parallelism.pipeline_parallel_degree > 1:
        num_microbatches = max(training.local_batch_size // parallelism.pipeline_parallel_microbatch_size, 1)
    num_tokens = -(-training.local_batch_size // num_microbatches) * training.seq_len
    if validation.enable:
        num_tokens = max(num_tokens, -(-validation.local_batch_size // num_microbatches) * validation.seq_len)
    return num_tokens


def compiles_model(job_config: JobConfig) -> bool:
    return job_config.compile.enable and "model" in job_config.compile.components


def _blocks(model: nn.Module) -> list[Any]:
    return list(model.get_submodule("layers").children())


def routed_backends(model_parts: Iterable[nn.Module]) -> list[RoutedBackend]:
    """What `parallelize` opened for these parts of a model, also for one without a MoE layer; nothing for TorchTitan's
    own block."""
    return [part._routed_backend for part in model_parts if hasattr(part, "_routed_backend")]  # type: ignore[misc]


def _parallelize(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig, ac_save_ops: set[torch._ops.OpOverload]
) -> nn.Module:
    """`parallelize_qwen3` and `parallelize_deepseekv3` without tensor parallelism and without placing the experts."""
    model_compile_enabled = compiles_model(job_config)
    if parallel_dims.cp_enabled:
        apply_cp_to_attention_module(
            [block.attention.inner_attention for block in _blocks(model)],
            parallel_dims.get_mesh("cp"),
            "sdpa",
        )
    if job_config.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=model_compile_enabled,
            op_sac_save_list=ac_save_ops,
            base_folder=job_config.job.dump_folder,
        )
    if model_compile_enabled:
        apply_compile(model, job_config.compile, parallel_dims.ep_enabled)

    replicate = ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []
    if parallel_dims.fsdp_enabled or parallel_dims.ep_enabled:
        apply_fsdp(
            model,
            parallel_dims.get_mesh([*replicate, "fsdp"]),
            param_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_reduce],
            pp_enabled=parallel_dims.pp_enabled,
            cpu_offload=job_config.training.enable_cpu_offload,
            reshard_after_forward_policy=job_config.parallelism.fsdp_reshard_after_forward,
            ep_degree=parallel_dims.ep,
            edp_mesh=parallel_dims.get_optional_mesh([*replicate, "efsdp"]),
            gradient_divide_factor=parallel_dims.fsdp_gradient_divide_factor,
        )
        if not torch.cuda.is_available():
            _give_shards_own_numbers(model, num_shards=dist.get_world_size() // parallel_dims.dp_replicate)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    # gloo has no pre-multiplied sum, by which FSDP2 would apply a division factor.
                    module.set_force_sum_reduction_for_comms(True)
    elif replicate:
        apply_ddp(model, parallel_dims.get_mesh("dp_replicate"), enable_compile=model_compile_enabled)
    return model
