"""The plan kernels against plan_ref, and the exchange that feeds them."""

from dataclasses import fields

import pytest
import torch

from tests.kernels.ranks import run_ranks
from uniep.kernels.build_plan import launch_build_plan
from uniep.kernels.exchange_routing import launch_exchange_routing
from uniep.plan.layout import HeapLayout
from uniep.plan.token_map import NO_EXPERT, plan_ref
from uniep.shapes import MoEShape
from uniep.symmetric.heap import SymmetricHeap
from uniep.symmetric.virtual_ranks import open_virtual_ranks


def draw_ids(shape: MoEShape, max_tokens: int, seed: int, hot: int = 0) -> torch.Tensor:
    scores = torch.rand(shape.ep_degree, max_tokens, shape.num_experts, generator=torch.Generator().manual_seed(seed))
    scores[..., :hot] += 1
    return scores.topk(shape.top_k, dim=2).indices


def assert_plans_equal(plan: object, expected: object) -> None:
    for field in fields(expected):
        want, got = getattr(expected, field.name), getattr(plan, field.name)
        if isinstance(want, torch.Tensor):
            assert got[: len(want)].tolist() == want.tolist(), field.name
        else:
            assert got == want, field.name


@pytest.mark.parametrize(("copy_per_expert", "by_priority"), [(False, True), (True, False)])
@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "top_k", "max_tokens", "hot"),
    [(1, 5, 2, 300, 0), (2, 8, 3, 200, 0), (4, 12, 5, 70, 4), (4, 40, 6, 50, 0), (8, 8, 1, 1, 0), (2, 24, 10, 60, 12)],
)
def test_equals_ref(
    num_ranks: int,
    num_experts: int,
    top_k: int,
    max_tokens: int,
    hot: int,
    copy_per_expert: bool,
    by_priority: bool,
) -> None:
    shape = MoEShape(num_experts, top_k, 8, 8, num_ranks)
    ids = draw_ids(shape, max_tokens, seed=num_ranks, hot=hot)
    ids[-1, max_tokens // 2 :] = NO_EXPERT
    layout = HeapLayout(shape, max_tokens, tile_rows=16, copy_per_expert=copy_per_expert)
    heaps = open_virtual_ranks(layout, device="cpu")
    for heap in {heaps[0], heaps[-1]}:
        heap.region("expert_ids").copy_(ids)
        plan, sizes = launch_build_plan(heap, by_priority=by_priority)
        expected = plan_ref(
            ids, heap.rank, shape, tile_rows=16, copy_per_expert=copy_per_expert, by_priority=by_priority
        )
        assert_plans_equal(plan, expected)
        assert sizes.num_rows() == len(expected.row_origin_R)
        assert not heap.scoreboard.counters.any()


@pytest.mark.parametrize("num_tokens", [[5, 5], [1, 6, 0, 4]])
def test_exchange(num_tokens: list[int]) -> None:
    num_ranks, max_tokens = len(num_tokens), max(num_tokens)
    shape = MoEShape(4 * num_ranks, 3, 8, 8, num_ranks)
    ids = draw_ids(shape, max_tokens, seed=0)
    scores = torch.rand(num_ranks, max_tokens, 3)

    def body(heap: SymmetricHeap) -> tuple[list, list]:
        own = slice(0, num_tokens[heap.rank])
        launch_exchange_routing(
            ids[heap.rank, own],
            scores[heap.rank, own],
            heap,
            epoch=heap.next_epoch(),
            returned=heap.take_returned(keep=False),
        )
        heap.check()
        return heap.region("expert_ids").tolist(), heap.region("scores").tolist()

    want_ids, want_scores = ids.clone(), scores.clone()
    for rank, count in enumerate(num_tokens):
        want_ids[rank, count:] = NO_EXPERT
        want_scores[rank, count:] = 0.0
    for got_ids, got_scores in run_ranks(HeapLayout(shape, max_tokens), body):
        assert got_ids == want_ids.tolist()
        assert got_scores == want_scores.tolist()
