"""recipes.expert_load: every token counts once, whatever is recomputed, and counting changes no bit."""

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.qwen3.infra.parallelize import _op_sac_save_list

from recipes.expert_load import ExpertLoad, ExpertLoadCounter, summarize_load
from recipes.families import FAMILIES
from uniep.shapes import MoEShape

SHAPE = MoEShape(num_experts=8, top_k=2, dim=128, hidden_dim=96, ep_degree=4)
MODES = [("none", "2"), ("selective", "2"), ("selective", "op"), ("full", "2")]


def build_model(mode: str = "none", option: str = "2") -> Any:
    """TorchTitan's small Qwen3 with its own MoE block, whose experts run as a loop on CPUs."""
    spec = FAMILIES["qwen3"]
    args = copy.deepcopy(spec.model_args["cpu"])
    args.moe_args.use_grouped_mm = False
    torch.manual_seed(0)
    model: Any = spec.model_cls(args)
    with torch.no_grad():
        model.init_weights()
    if mode != "none":
        config = SimpleNamespace(
            mode=mode,
            selective_ac_option=option,
            preserve_rng_state=True,
            determinism_check="default",
            early_stop=True,
            debug=False,
            per_op_sac_force_recompute_mm_shapes_by_fqns=[],
        )
        apply_ac(model, config, op_sac_save_list=_op_sac_save_list)  # type: ignore[arg-type]
    return model


def step(model: Any, num_microbatches: int = 1) -> dict[str, Tensor]:
    """Forward and backward of 2 x 64 tokens a microbatch. Returns the gradients."""
    torch.manual_seed(1)
    for _ in range(num_microbatches):
        model(torch.randint(0, 2048, (2, 64))).square().mean().backward()
    found = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in found.items()}


def count(model: Any) -> ExpertLoadCounter:
    return ExpertLoadCounter([model], SHAPE, num_layers=2)


@pytest.mark.parametrize("ep_degree", [1, 2, 4, 8])
def test_counts_are_those_of_a_loop(ep_degree):
    shape = MoEShape(num_experts=8, top_k=3, dim=1, hidden_dim=1, ep_degree=ep_degree)
    torch.manual_seed(ep_degree)
    ids_MTK = torch.rand(3, 50, 8).topk(3).indices
    counter = ExpertLoadCounter([], shape, num_layers=5)
    counts = torch.zeros(5, 9, dtype=torch.int64)
    counts[[0, 2, 4]] = counter.count(ids_MTK)
    load = summarize_load(counts, shape)
    assert load.layers == [0, 2, 4]
    for layer, ids_TK in enumerate(ids_MTK.tolist()):
        experts = [sum(row.count(expert) for row in ids_TK) for expert in range(8)]
        local = 8 // ep_degree
        ranks = [sum(experts[rank * local : (rank + 1) * local]) for rank in range(ep_degree)]
        distinct = sum(len({expert // local for expert in row}) for row in ids_TK)
        assert load.tokens_per_expert[layer] == experts
        assert load.imbalance[layer] == pytest.approx(max(experts) / (150 / 8), abs=1e-4)
        assert load.rank_imbalance[layer] == pytest.approx(max(ranks) / (150 / ep_degree), abs=1e-4)
        assert load.distinct_ranks[layer] == pytest.approx(distinct / 50, abs=1e-4)


@pytest.mark.parametrize(("num_experts", "top_k", "ep_degree"), [(8, 2, 4), (8, 3, 2), (6, 6, 3), (6, 1, 6), (4, 2, 1)])
def test_the_expectation_is_the_mean_of_all_choices(num_experts, top_k, ep_degree):
    shape = MoEShape(num_experts, top_k, 1, 1, ep_degree)
    local = num_experts // ep_degree
    choices = list(itertools.combinations(range(num_experts), top_k))
    mean = sum(len({expert // local for expert in choice}) for choice in choices) / len(choices)
    assert summarize_load(torch.ones(1, num_experts + 1), shape).distinct_ranks_expected == pytest.approx(
        mean, abs=1e-4
    )


@pytest.fixture(scope="module")
def expected() -> tuple[ExpertLoad, dict[str, Tensor]]:
    """Without recomputation; the gradients without counting."""
    model = build_model()
    counter = count(model)
    step(model)
    return counter.collect(), step(build_model())


@pytest.mark.parametrize(("mode", "option"), MODES)
def test_stock_blocks_count_once_and_keep_their_bits(mode, option, expected):
    """TorchTitan's own counter, which its balancing reads, goes on counting as it does."""
    load, right_grads = expected
    model, uncounted = build_model(mode, option), build_model(mode, option)
    counter = count(model)
    grads = step(model)
    step(uncounted)
    assert counter.collect() == load
    assert [sum(tokens) for tokens in load.tokens_per_expert] == [2 * 64 * 2] * 2
    assert grads.keys() == right_grads.keys()
    assert all(torch.equal(grad, right_grads[name]) for name, grad in grads.items())
    for block, plain in zip(model.layers.values(), uncounted.layers.values(), strict=True):
        assert torch.equal(block.moe.tokens_per_expert, plain.moe.tokens_per_expert)
    is_recomputed = [hasattr(block, "checkpoint_impl") for block in model.layers.values()]
    stock = [block.moe.tokens_per_expert.sum().item() for block in model.layers.values()]
    assert stock == [2 * 64 * 2 * (2 if recomputed else 1) for recomputed in is_recomputed]


def test_microbatches_add_up_until_they_are_collected():
    model = build_model("full")
    counter = count(model)
    step(model, num_microbatches=3)
    assert [sum(tokens) for tokens in counter.collect().tokens_per_expert] == [3 * 2 * 64 * 2] * 2
    step(model)
    assert [sum(tokens) for tokens in counter.collect().tokens_per_expert] == [2 * 64 * 2] * 2


def test_only_enabled_training_counts():
    model = build_model()
    counter = count(model)
    counter.enabled = False
    step(model)
    counter.enabled = True
    model.eval()
    step(model)
    assert counter.collect().layers == []
    model.train()
    step(model)
    assert [sum(tokens) for tokens in counter.collect().tokens_per_expert] == [2 * 64 * 2] * 2


def test_a_compiled_router_counts(expected):
    """As TorchTitan compiles it: a module of its own, without its hooks."""
    model = build_model("full")
    for block in model.layers.values():
        block.moe.router = torch.compile(block.moe.router, backend="eager", fullgraph=True)
    counter = count(model)
    step(model)
    assert counter.collect() == expected[0]
