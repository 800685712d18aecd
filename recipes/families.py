"""The model families: TorchTitan's MoE models with our parallelize function, data and metrics.

Importing this module registers them under TorchTitan's own names (`[experimental] custom_import = "recipes.families"`).
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torchtitan.models.deepseek_v3.infra.parallelize as deepseek_v3_infra
import torchtitan.models.qwen3.infra.parallelize as qwen3_infra
from torchtitan.config import JobConfig
from torchtitan.models import deepseek_v3, qwen3
from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

from recipes.data import DataError  # the import registers the data sets
from recipes.metrics import build_metrics_processor
from recipes.parallelize import build_parallelize_fn
from recipes.records import FolderInUseError


@dataclass
class Qwen3Args(Qwen3ModelArgs):
    def update_from_config(self, job_config: JobConfig, **kwargs) -> None:
        _cut_layers(self, job_config)
        super().update_from_config(job_config, **kwargs)


@dataclass
class DeepSeekV3Args(DeepSeekV3ModelArgs):
    def update_from_config(self, job_config: JobConfig, **kwargs) -> None:
        _cut_layers(self, job_config)
        super().update_from_config(job_config, **kwargs)


def _cut_layers(model_args: Qwen3Args | DeepSeekV3Args, job_config: JobConfig) -> None:
    if job_config.model.n_layers is not None:
        model_args.n_layers = job_config.model.n_layers


# Small enough for two CPU cores, with every part of the real models: grouped query attention, top-k routing, ...
_QWEN3_CPU = Qwen3Args(
    vocab_size=2048,
    max_seq_len=4096,
    head_dim=32,
    dim=128,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    qk_norm=True,
    hidden_dim=384,
    rope_theta=1000000,
    moe_enabled=True,
    moe_inter_dim=96,
    moe_args=MoEArgs(
        num_experts=8, num_shared_experts=0, top_k=2, score_func="softmax", route_norm=True, score_before_experts=False
    ),
)
# ... and here multi-head latent attention, a dense first layer, shared experts, sigmoid routing with a bias.
_DEEPSEEK_V3_CPU = DeepSeekV3Args(
    vocab_size=2048,
    dim=128,
    inter_dim=384,
    moe_inter_dim=96,
    n_layers=3,
    n_dense_layers=1,
    n_heads=4,
    moe_args=MoEArgs(
        num_experts=8, num_shared_experts=1, top_k=2, score_func="sigmoid", route_norm=True, score_before_experts=False
    ),
    q_lora_rank=0,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    mscale=0.70,
)
# https://huggingface.co/moonshotai/Kimi-K2-Base, config.json
_KIMI_K2 = DeepSeekV3Args(
    vocab_size=163840,
    dim=7168,
    inter_dim=18432,
    moe_inter_dim=2048,
    n_layers=61,
    n_dense_layers=1,
    n_heads=64,
    norm_eps=1e-6,
    moe_args=MoEArgs(
        num_experts=384,
        num_shared_experts=1,
        top_k=8,
        score_func="sigmoid",
        route_norm=True,
        route_scale=2.827,
        score_before_experts=False,
    ),
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope_theta=50000.0,
    rope_factor=32,
    beta_fast=1,
    beta_slow=1,
    attn_type="flex",
    attn_mask_type="block_causal",
)


def _moe_flavors(args_cls: type, stock: dict[str, BaseModelArgs]) -> dict[str, BaseModelArgs]:
    """The stock flavors that have a MoE, as our class."""
    return {name: args_cls(**vars(args)) for name, args in stock.items() if getattr(args, "moe_enabled", True)}


def _ending_in_one_line(build: Callable[..., Any]) -> Callable[..., Any]:
    """Errors of the user that only a rank can see, such as a record late in the data, end it with one line. SystemExit,
    because torchrun's and TorchTitan's handlers print a traceback of any other exception."""

    @functools.wraps(build)
    def build_or_exit(*args: Any, **kwargs: Any) -> Any:
        try:
            return build(*args, **kwargs)
        except (DataError, FolderInUseError) as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            raise SystemExit(2) from None

    return build_or_exit


def _build_spec(stock: TrainSpec, infra, stock_parallelize, model_args: dict[str, BaseModelArgs]) -> TrainSpec:
    return replace(
        stock,
        model_args=model_args,
        parallelize_fn=build_parallelize_fn(stock_parallelize, infra._op_sac_save_list),
        build_dataloader_fn=_ending_in_one_line(stock.build_dataloader_fn),
        build_metrics_processor_fn=_ending_in_one_line(build_metrics_processor),
    )


FAMILIES: dict[str, TrainSpec] = {
    "qwen3": _build_spec(
        qwen3.get_train_spec(),
        qwen3_infra,
        qwen3_infra.parallelize_qwen3,
        _moe_flavors(Qwen3Args, qwen3.qwen3_args) | {"cpu": _QWEN3_CPU},
    ),
    "deepseek_v3": _build_spec(
        deepseek_v3.get_train_spec(),
        deepseek_v3_infra,
        deepseek_v3_infra.parallelize_deepseekv3,
        _moe_flavors(DeepSeekV3Args, deepseek_v3.deepseekv3_args) | {"cpu": _DEEPSEEK_V3_CPU, "kimi-k2": _KIMI_K2},
    ),
}

for _name, _spec in FAMILIES.items():
    register_train_spec(_name, _spec)
