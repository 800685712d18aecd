"""Checks a config against the models, the ranks and the machine, before any mesh or GPU memory exists."""

import importlib
import importlib.util
import math
import operator
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torchtitan.config import JobConfig
from torchtitan.protocols.model_converter import _registry_model_converter_cls

from recipes.backend import BackendError, refused_tokens, resolve_backend
from recipes.choices import TuneError, find_hardware, fixed_by_hand, resolve_tune
from recipes.config import Tune
from recipes.data import DataError, check_data
from recipes.families import FAMILIES
from recipes.load import ConfigError, did_you_mean
from recipes.parallelize import compiles_model
from uniep.autotune.hardware import TUNED
from uniep.kernels.config import default_config
from uniep.shapes import MoEShape, ShapeError


def check_config(config: JobConfig, world_size: int) -> None:
    """Raises ConfigError with one line that names the TOML key, the rule and the value.

    Args:
        world_size: ranks of the whole run.
    """
    _check_ranges(config)
    _check_modules(config)
    _check_model(config)
    batch_ranks = _check_parallelism(config, world_size)
    _check_training(config, world_size)
    try:
        backend = resolve_backend(config, world_size)
    except BackendError as error:
        raise ConfigError(str(error)) from None
    if config.uniep.numerics != "bitwise" and backend != "uniep":
        raise ConfigError(
            f'[uniep] numerics must be "bitwise" where backend "{backend}" runs, got "{config.uniep.numerics}": only '
            'backend = "uniep" has other numerics'
        )
    if backend != "uniep" and config.uniep.timeline_steps:
        raise ConfigError(
            f'[uniep] timeline_steps must be empty with [uniep] backend = "{backend}", whose kernels record nothing, '
            f"got {config.uniep.timeline_steps}"
        )
    if backend != "torchtitan":
        _check_ours(config, backend)
    if backend == "uniep":
        _check_uniep(config, world_size)
    try:
        check_data(config, batch_ranks)
    except DataError as error:
        raise ConfigError(str(error)) from None


# (section, key, rule in words, rule). None is left to the default.
_RANGES: list[tuple[str, str, str, Callable[[Any], bool]]] = [
    ("training", "seq_len", "1 to 2^24", lambda value: 1 <= value <= 1 << 24),
    ("training", "local_batch_size", "1 to 2^24", lambda value: 1 <= value <= 1 << 24),
    ("training", "steps", "1 to 2^31", lambda value: 1 <= value <= 1 << 31),
    ("training", "max_norm", "greater than 0", lambda value: value > 0),
    ("training", "gc_freq", "at least 1", lambda value: value >= 1),
    ("metrics", "log_freq", "at least 1", lambda value: value >= 1),
    ("optimizer", "name", '"Adam" or "AdamW"', lambda value: value in ("Adam", "AdamW")),
    ("optimizer", "lr", "a finite number of at least 0", lambda value: 0 <= value < math.inf),
    ("optimizer", "weight_decay", "a finite number of at least 0", lambda value: 0 <= value < math.inf),
    ("optimizer", "beta1", "at least 0 and less than 1", lambda value: 0 <= value < 1),
    ("optimizer", "beta2", "at least 0 and less than 1", lambda value: 0 <= value < 1),
    ("optimizer", "eps", "a finite number greater than 0", lambda value: 0 < value < math.inf),
    ("lr_scheduler", "warmup_steps", "at least 0", lambda value: value >= 0),
    ("lr_scheduler", "decay_ratio", "0 to 1", lambda value: 0 <= value <= 1),
    ("lr_scheduler", "min_lr_factor", "0 to 1", lambda value: 0 <= value <= 1),
    ("lr_scheduler", "total_steps", "at least 1", lambda value: value >= 1),
    ("validation", "freq", "at least 1", lambda value: value >= 1),
    ("validation", "local_batch_size", "1 to 2^24", lambda value: 1 <= value <= 1 << 24),
    ("activation_checkpoint", "memory_budget", "0 to 1", lambda value: 0 <= value <= 1),
    ("checkpoint", "interval", "at least 1", lambda value: value >= 1),
    ("checkpoint", "keep_latest_k", "0, for all, or at least 2", lambda value: value == 0 or value >= 2),
    ("comm", "init_timeout_seconds", "at least 1", lambda value: value >= 1),
    ("comm", "train_timeout_seconds", "at least 1", lambda value: value >= 1),
    ("debug", "seed", "0 to 2^63 - 1", lambda value: 0 <= value < 1 << 63),
    ("uniep", "wait_timeout_s", "0.001 to 1e6", lambda value: 1e-3 <= value <= 1e6),
    ("uniep.tune", "bucket_tokens", "1 to 2^24", lambda value: 1 <= value <= 1 << 24),
    ("uniep.tune", "num_candidates", "at least 1", lambda value: value >= 1),
    ("uniep.tune", "watch_calls", "at least 0", lambda value: value >= 0),
    ("uniep.tune", "watch_share", "greater than 0", lambda value: 0 < value < math.inf),
    ("uniep.tune", "watch_samples", "1 to 1e6", lambda value: 1 <= value <= 10**6),
    ("throughput", "token_budget", "1 to 1e18", lambda value: 1 <= value <= 1e18),
    ("uniep", "timeline_steps", "steps from 1 on", lambda value: all(step >= 1 for step in value)),
    ("job", "dump_folder", "a folder's name", lambda value: bool(value) and not Path(value).is_file()),
    *(
        (f"uniep.tune.{launch}", key, "at least 1", lambda value: value >= 1)
        for launch in TUNED
        for key in vars(getattr(Tune(), launch))
        if key != "tile"
    ),
]


def _check_ranges(config: JobConfig) -> None:
    for section, key, words, fits in _RANGES:
        value = getattr(operator.attrgetter(section)(config), key)
        if value is not None and not fits(value):
            raise ConfigError(f"[{section}] {key} must be {words}, got {value!r}")


def _check_model(config: JobConfig) -> None:
    model = config.model
    if model.name not in FAMILIES:
        default = ", TorchTitan's default" if model.name == JobConfig().model.name else ""
        raise ConfigError(
            f'[model] name must be one of {", ".join(FAMILIES)}, got "{model.name}"{default}'
            f"{did_you_mean(model.name, FAMILIES)}"
        )
    flavors = FAMILIES[model.name].model_args
    if model.flavor not in flavors:
        raise ConfigError(
            f'[model] flavor must be one of {", ".join(flavors)} for name = "{model.name}", '
            f'got "{model.flavor}"{did_you_mean(model.flavor, flavors)}'
        )
    args = flavors[model.flavor]
    num_dense = getattr(args, "n_dense_layers", 0)
    if model.n_layers is not None and not num_dense < model.n_layers <= args.n_layers:
        why = f", whose first {num_dense} are dense" if num_dense else ""
        raise ConfigError(
            f'[model] n_layers must be {num_dense + 1} to {args.n_layers} for flavor "{model.flavor}"{why}, '
            f"got {model.n_layers}"
        )
    tokenizer = Path(model.hf_assets_path)
    if not tokenizer.is_dir() or not any(
        (tokenizer / f).exists() for f in ("tokenizer.json", "vocab.json", "vocab.txt")
    ):
        raise ConfigError(
            f'[model] hf_assets_path must be a folder with a tokenizer, got "{model.hf_assets_path}"; '
            "the recipe's own is ./train_configs/tokenizer"
        )


def _check_training(config: JobConfig, world_size: int) -> None:
    training, parallelism = config.training, config.parallelism
    ac = config.activation_checkpoint
    if ac.selective_ac_option != "op" and not (ac.selective_ac_option.isascii() and ac.selective_ac_option.isdecimal()):
        raise ConfigError(
            '[activation_checkpoint] selective_ac_option must be "op" or a whole number, '
            f'got "{ac.selective_ac_option}"'
        )
    if ac.mode == "memory_budget" and not compiles_model(config):
        raise ConfigError(
            '[activation_checkpoint] mode must not be "memory_budget" without [compile] enable = true and "model" in '
            f'its components, got "{ac.mode}"'
        )
    if training.dataloader.num_workers not in (0, 1):
        raise ConfigError(
            "[training.dataloader] num_workers must be 0 or 1, because each worker of TorchTitan's data loader reads "
            f"all texts, got {training.dataloader.num_workers}"
        )
    if config.optimizer.early_step_in_backward and parallelism.expert_parallel_degree > 1:
        raise ConfigError(
            "[optimizer] early_step_in_backward must be false with [parallelism] expert_parallel_degree > 1, got true"
        )
    _check_checkpoint(config, world_size)
    _check_compile(config)
    _check_profiling(config)
    _check_validation(config)
    if late := [step for step in config.uniep.timeline_steps if step > training.steps]:
        raise ConfigError(
            f"[uniep] timeline_steps must be steps up to [training] steps = {training.steps}, got {late[0]}"
        )
    divisor = _seq_len_divisor(config)
    if training.seq_len % divisor:
        raise ConfigError(
            "[training] seq_len must be divisible by 2 * tensor_parallel_degree * context_parallel_degree = "
            f"{divisor}, got {training.seq_len}"
        )
    if parallelism.context_parallel_degree > 1 and not torch.cuda.is_available():
        raise ConfigError(
            "[parallelism] context_parallel_degree must be 1 on CPUs, whose attention has no ring, "
            f"got {parallelism.context_parallel_degree}"
        )
    args = FAMILIES[config.model.name].model_args[config.model.flavor]
    if parallelism.context_parallel_degree > 1 and args.attn_type != "sdpa":
        raise ConfigError(
            f"[parallelism] context_parallel_degree must be 1 for the {args.attn_type} attention of "
            f'[model] flavor = "{config.model.flavor}", got {parallelism.context_parallel_degree}'
        )


def _check_checkpoint(config: JobConfig, world_size: int) -> None:
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        return
    if checkpoint.create_seed_checkpoint and world_size > 1:
        raise ConfigError(
            f"[checkpoint] create_seed_checkpoint must be false with more ranks than one, got true with {world_size} "
            "(NNODES * NGPU)"
        )
    loaded = checkpoint.initial_load_path
    if loaded and "://" not in loaded:
        if not Path(loaded).is_dir():
            raise ConfigError(f'[checkpoint] initial_load_path must be a folder, got "{loaded}"')
        if not checkpoint.initial_load_in_hf and not Path(loaded, ".metadata").is_file():
            raise ConfigError(f'[checkpoint] initial_load_path must be a checkpoint\'s step-N, got "{loaded}"')
    folder = Path(config.job.dump_folder, checkpoint.folder)
    # Without a folder TorchTitan would train from the start.
    if checkpoint.load_step != -1 and not (folder / f"step-{checkpoint.load_step}").is_dir():
        raise ConfigError(
            f'[checkpoint] load_step must be -1, for the last, or a step of "{folder}", got {checkpoint.load_step}'
        )


def _check_profiling(config: JobConfig) -> None:
    profiling = config.profiling
    counts = {"profile_freq": 1, "profiler_active": 1, "profiler_warmup": 0}
    for key, least in counts.items() if profiling.enable_profiling or profiling.enable_memory_snapshot else ():
        if getattr(profiling, key) < least:
            raise ConfigError(f"[profiling] {key} must be at least {least}, got {getattr(profiling, key)}")
    cycle = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < cycle:
        raise ConfigError(
            f"[profiling] profile_freq must be at least profiler_warmup + profiler_active = {cycle}, "
            f"got {profiling.profile_freq}"
        )


def _check_compile(config: JobConfig) -> None:
    if not config.compile.enable:
        return
    if unknown := [name for name in config.compile.components if name not in ("model", "loss")]:
        raise ConfigError(f'[compile] components must be of "model", "loss", got "{unknown[0]}"')
    backend = config.compile.backend
    if backend not in torch._dynamo.list_backends(exclude_tags=None):
        usual = torch._dynamo.list_backends()
        raise ConfigError(
            f'[compile] backend must be one of {", ".join(usual)}, got "{backend}"{did_you_mean(backend, usual)}'
        )


def _seq_len_divisor(config: JobConfig) -> int:
    return 2 * config.parallelism.tensor_parallel_degree * config.parallelism.context_parallel_degree


def _check_validation(config: JobConfig) -> None:
    validation, training = config.validation, config.training
    if not validation.enable:
        return
    if FAMILIES[config.model.name].build_validator_fn is None:
        raise ConfigError(
            f'[validation] enable must be false for [model] name = "{config.model.name}", which TorchTitan cannot '
            "validate, got true"
        )
    divisor = _seq_len_divisor(config)
    if not 1 <= validation.seq_len <= training.seq_len or validation.seq_len % divisor:
        raise ConfigError(
            f"[validation] seq_len must be up to [training] seq_len = {training.seq_len} and divisible by 2 * "
            f"tensor_parallel_degree * context_parallel_degree = {divisor}, got {validation.seq_len}"
        )


def _check_modules(config: JobConfig) -> None:
    if name := config.experimental.custom_import:
        try:
            importlib.import_module(name)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f'[experimental] custom_import must be a module that can be imported, got "{name}": {reason}'
            ) from error
    for name in config.model.converters:
        if name not in _registry_model_converter_cls:
            raise ConfigError(
                f"[model] converters must be of {', '.join(_registry_model_converter_cls)}, "
                f'got "{name}"{did_you_mean(name, _registry_model_converter_cls)}'
            )
        if name.startswith("quantize.") and importlib.util.find_spec("torchao") is None:
            raise ConfigError(f'[model] converters must be empty where torchao is not installed, got "{name}"')


def _check_parallelism(config: JobConfig, world_size: int) -> int:
    """Returns the data-parallel ranks, each of which reads text of its own."""
    parallelism = config.parallelism
    degrees = {
        key: getattr(parallelism, key)
        for key in (
            "data_parallel_replicate_degree",
            "data_parallel_shard_degree",
            "context_parallel_degree",
            "tensor_parallel_degree",
            "pipeline_parallel_degree",
            "expert_parallel_degree",
            "expert_tensor_parallel_degree",
        )
    }
    for key, degree in degrees.items():
        if degree < 1 and not (key == "data_parallel_shard_degree" and degree == -1):
            raise ConfigError(f"[parallelism] {key} must be at least 1, got {degree}")
    if degrees["pipeline_parallel_degree"] > 1 and FAMILIES[config.model.name].pipelining_fn is None:
        raise ConfigError(
            f'[parallelism] pipeline_parallel_degree must be 1 for [model] name = "{config.model.name}", '
            f"got {degrees['pipeline_parallel_degree']}"
        )
    ep, etp = degrees["expert_parallel_degree"], degrees["expert_tensor_parallel_degree"]
    if etp not in (1, degrees["tensor_parallel_degree"]):
        raise ConfigError(
            "[parallelism] expert_tensor_parallel_degree must be 1 or tensor_parallel_degree = "
            f"{degrees['tensor_parallel_degree']}, got {etp}"
        )
    shard = degrees["data_parallel_shard_degree"]
    others = math.prod(
        degrees[f"{name}_degree"]
        for name in ("data_parallel_replicate", "context_parallel", "tensor_parallel", "pipeline_parallel")
    )
    if shard == -1:
        shard = max(world_size // others, 1)
    if shard * others != world_size:
        raise ConfigError(
            "[parallelism] the degrees (data_parallel_replicate * data_parallel_shard * context * tensor * pipeline) "
            f"must multiply to the number of ranks = {world_size} (NNODES * NGPU), got {shard * others}"
        )
    args = FAMILIES[config.model.name].model_args[config.model.flavor]
    try:
        MoEShape(args.moe_args.num_experts, args.moe_args.top_k, args.dim, args.moe_inter_dim, ep)
    except ShapeError:
        raise ConfigError(
            f"[parallelism] expert_parallel_degree must divide the {args.moe_args.num_experts} experts of "
            f'[model] flavor = "{config.model.flavor}", got {ep}'
        ) from None
    ranks = shard * degrees["context_parallel_degree"] * degrees["tensor_parallel_degree"]
    if ranks % (ep * etp):
        raise ConfigError(
            "[parallelism] expert_parallel_degree must divide the ranks that share a replica = "
            f"{ranks} (of {world_size}, NNODES * NGPU), got {ep}"
        )
    batch_ranks = shard * degrees["data_parallel_replicate_degree"]
    training = config.training
    if training.global_batch_size != -1 and (
        training.global_batch_size < 1 or training.global_batch_size % (training.local_batch_size * batch_ranks)
    ):
        raise ConfigError(
            f"[training] global_batch_size must be -1 or a multiple of local_batch_size * data-parallel ranks = "
            f"{training.local_batch_size} * {batch_ranks}, got {training.global_batch_size}"
        )
    return batch_ranks


def _check_ours(config: JobConfig, backend: str) -> None:
    parallelism = config.parallelism
    if parallelism.tensor_parallel_degree > 1:
        raise ConfigError(
            f'[parallelism] tensor_parallel_degree must be 1 with [uniep] backend = "{backend}", '
            f'got {parallelism.tensor_parallel_degree}; only backend = "torchtitan" combines it with expert parallelism'
        )
    if parallelism.expert_parallel_comm_backend != "standard":
        raise ConfigError(
            f'[parallelism] expert_parallel_comm_backend must be "standard" with [uniep] backend = "{backend}", '
            f'got "{parallelism.expert_parallel_comm_backend}"'
        )
    schedule = parallelism.pipeline_parallel_schedule
    pipelined = parallelism.pipeline_parallel_degree > 1 and parallelism.expert_parallel_degree > 1
    if pipelined and schedule.lower() == "dualpipev" and parallelism.pipeline_parallel_expert_parallel_overlap:
        raise ConfigError(
            "[parallelism] pipeline_parallel_expert_parallel_overlap must be false with pipeline_parallel_schedule = "
            f'"{schedule}" and [uniep] backend = "{backend}", whose blocks come in one order on all ranks, got true'
        )
    if quantized := [name for name in config.model.converters if name.startswith("quantize.grouped_mm")]:
        raise ConfigError(
            f'[model] converters must not quantize grouped_mm with [uniep] backend = "{backend}", got "{quantized[0]}"'
        )


def _check_uniep(config: JobConfig, world_size: int) -> None:
    """What the fused kernels need beyond the reference."""
    if why := refused_tokens(config, world_size):
        raise ConfigError(why)
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ConfigError(
            'CUDA_DEVICE_MAX_CONNECTIONS must be unset or at least 2 with [uniep] backend = "uniep", got 1: in one '
            "hardware queue a collective that waits for a peer holds back the kernel that the peer waits for"
        )
    _check_tune(config.uniep.tune)


def _check_tune(options: Tune) -> None:
    """What [uniep.tune] asks of this GPU."""
    by_hand = {launch: vars(getattr(options, launch)) for launch in TUNED}
    if options.mode == "off" and not any(value is not None for keys in by_hand.values() for value in keys.values()):
        return
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    properties = torch.cuda.get_device_properties(device)
    asked, options = options.mode, resolve_tune(options, properties.name, properties.multi_processor_count)
    for launch, values in by_hand.items() if options.mode != "off" else ():
        given = [key for key, value in values.items() if value is not None]
        if missing := [key for key in values if given and key not in given]:
            raise ConfigError(
                f"[uniep.tune.{launch}] {missing[0]} must be given with {given[0]}, or neither, unless [uniep.tune] "
                f'mode is "off", got none with mode = "{asked}"'
            )
    tiles = {launch: values["tile"] for launch, values in by_hand.items() if values["tile"] is not None}
    if tiles and properties.major < 9:
        launch, tile = next(iter(tiles.items()))
        raise ConfigError(
            f"[uniep.tune.{launch}] tile must be left out on a GPU before compute capability 9, "
            f'got "{tile}" on "{properties.name}"'
        )
    if options.mode != "off" and properties.major < 9:
        raise ConfigError(
            '[uniep.tune] mode must be "off" on a GPU before compute capability 9, '
            f'got "{options.mode}" on "{properties.name}"'
        )
    try:
        if options.mode != "off":
            find_hardware(options.hardware, properties.name, properties.multi_processor_count)
        if options.mode == "measured" and options.cache is not None:
            _check_cache(options.cache)
        fixed_by_hand(default_config(device), options)
    except TuneError as error:
        raise ConfigError(str(error)) from None


def _check_cache(cache: str) -> None:
    try:
        folder = Path(cache).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError, ValueError) as error:  # an unknown home, a NUL
        raise ConfigError(f'[uniep.tune] cache must be a folder that can be written, got "{cache}": {error}') from None
