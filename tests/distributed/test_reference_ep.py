"""uniep.reference over W gloo ranks equals one rank that has the tokens of all."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.processes import run_ranks
from uniep.numerics import Numerics
from uniep.reference import reference_moe

NUM_EXPERTS, DIM, HIDDEN_DIM = 8, 16, 24


@dataclass(frozen=True)
class Case:
    """Routed tokens of 4 ranks; rank r of W takes those of 4 / W neighbours.

    Attributes:
        num_tokens: of each of the 4 ranks.
        top_k: K.
        experts: the experts that are chosen from.
    """

    num_tokens: tuple[int, int, int, int]
    top_k: int
    experts: tuple[int, ...] = tuple(range(NUM_EXPERTS))


CASES = {
    "even": Case((32, 32, 32, 32), 2),
    "six experts a token": Case((24, 24, 24, 24), 6),
    "every rank another number of tokens": Case((40, 3, 17, 64), 2),
    "a rank with one token": Case((1, 31, 8, 8), 4),
    "one token each": Case((1, 1, 1, 1), 8),
    "a rank without tokens": Case((0, 16, 5, 11), 2),
    "all to the first rank": Case((24, 24, 24, 24), 2, experts=(0, 1)),
    "all to one expert of the last rank": Case((24, 24, 24, 24), 1, experts=(7,)),
}
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Batch:
    x_TD: Tensor
    scores_TK: Tensor
    expert_ids_TK: Tensor
    grad_TD: Tensor


def draw(case: Case, dtype: torch.dtype) -> tuple[list[Batch], list[Tensor]]:
    """What each of 4 ranks has, and the weights of all experts."""
    generator = torch.Generator().manual_seed(sum(case.num_tokens))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    batches = []
    for num_tokens in case.num_tokens:
        order = torch.rand(num_tokens, len(case.experts), generator=generator).argsort(1)[:, : case.top_k]
        batches.append(
            Batch(
                normal(num_tokens, DIM).to(dtype),
                normal(num_tokens, case.top_k).sigmoid(),
                torch.tensor(case.experts)[order],
                normal(num_tokens, DIM).to(dtype),
            )
        )
    shapes = [(HIDDEN_DIM, DIM), (DIM, HIDDEN_DIM), (HIDDEN_DIM, DIM)]
    return batches, [(normal(NUM_EXPERTS, *shape) / shape[1] ** 0.5).to(dtype) for shape in shapes]


def run_cases(score_before_experts: bool, dtype: torch.dtype) -> dict[str, Results]:
    """On each rank: its outputs and gradients of every case."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD if num_ranks > 1 else None
    results = {}
    for name, case in CASES.items():
        batches, weights = draw(case, dtype)
        mine = batches[rank * 4 // num_ranks : (rank + 1) * 4 // num_ranks]
        x_TD = torch.cat([b.x_TD for b in mine]).requires_grad_()
        scores_TK = torch.cat([b.scores_TK for b in mine]).requires_grad_()
        w1, w2, w3 = (w.chunk(num_ranks)[rank].clone().requires_grad_() for w in weights)
        expert_ids_TK = torch.cat([b.expert_ids_TK for b in mine])
        numerics = Numerics(score_before_experts)
        out_TD = reference_moe(x_TD, scores_TK, expert_ids_TK, w1, w2, w3, group=group, numerics=numerics)
        out_TD.backward(torch.cat([b.grad_TD for b in mine]))
        results[name] = {"out": out_TD.detach()}
        for leaf_name, leaf in {"x": x_TD, "scores": scores_TK, "w1": w1, "w2": w2, "w3": w3}.items():
            assert leaf.grad is not None, leaf_name
            results[name][f"gradient of {leaf_name}"] = leaf.grad
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module", params=["scores on outputs, fp32", "scores on inputs, fp32", "scores on outputs, bf16"])
def results(request) -> dict[int, list[dict[str, Results]]]:
    """For each W, what each rank got."""
    before, dtype = "inputs" in request.param, torch.bfloat16 if "bf16" in request.param else torch.float32
    return {num_ranks: run_ranks(run_cases, before, dtype, num_ranks=num_ranks) for num_ranks in (1, 2, 4)}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_ranks_together_equal_one(results, num_ranks, case):
    (alone,) = results[1]
    for name, expected in alone[case].items():
        # Tokens and experts both lie in the order of ranks, and every expert's rows in the order of tokens.
        together = torch.cat([rank[case][name] for rank in results[num_ranks]])
        assert torch.equal(together, expected), name


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("case", "experts"), [("all to the first rank", (0, 1)), ("all to one expert of the last rank", (7,))]
)
def test_ranks_without_rows_get_exact_zeros(results, num_ranks, case, experts):
    for name in ("gradient of w1", "gradient of w2", "gradient of w3"):
        grad = torch.cat([rank[case][name] for rank in results[num_ranks]])
        for expert in range(NUM_EXPERTS):
            assert grad[expert].any() == (expert in experts), (name, expert)


def test_gradients_of_unlike_experts_differ(results):
    """The comparison above is of real numbers."""
    grads = results[4][0]["even"]["gradient of w1"]
    assert torch.isfinite(grads).all()
    assert not torch.equal(grads[0], grads[1])
