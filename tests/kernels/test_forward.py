"""The fused forward that saves nothing, over interpreted ranks, against an oracle that sees the global batch."""

import time
from dataclasses import dataclass, replace

import pytest
import torch

from tests.kernels.oracle import Batch, draw_batch, moe_ref, poison_new_tensors
from tests.kernels.ranks import run_ranks
from uniep.kernels.config import KernelConfig, default_config
from uniep.layer import fused_forward
from uniep.numerics import Numerics
from uniep.plan.layout import HeapLayout
from uniep.shapes import MoEShape
from uniep.symmetric.heap import SymmetricHeap

TILE_ROWS = 16
CONFIG = default_config(torch.device("cpu"))
WITH_TMA = replace(CONFIG, up=replace(CONFIG.up, use_tma=True), down=replace(CONFIG.down, use_tma=True))
MANY_ROLES = replace(
    CONFIG,
    num_programs=7,
    up=replace(CONFIG.up, num_dispatch=2, num_relay=2),
    down=replace(CONFIG.down, num_combine=3),
)


@dataclass(frozen=True)
class Case:
    """A routing: which experts tokens may choose, and how many tokens each rank has."""

    num_ranks: int
    top_k: int
    num_tokens: tuple[int, ...]
    num_local: int = 4
    experts: tuple[int, ...] | None = None
    dim: int = 64
    hidden_dim: int = 32
    score_before_experts: bool = False
    exact: bool = True
    config: KernelConfig = CONFIG
    copy_per_expert: bool = False
    reduce_in_kernel: bool = True
    num_calls: int = 1
    room_rows: int | None = None
    num_kept: int = 0

    @property
    def shape(self) -> MoEShape:
        return MoEShape(self.num_local * self.num_ranks, self.top_k, self.dim, self.hidden_dim, self.num_ranks)

    @property
    def numerics(self) -> Numerics:
        return Numerics(self.score_before_experts)

    @property
    def layout(self) -> HeapLayout:
        return HeapLayout(
            self.shape,
            max(self.num_tokens),
            tile_rows=TILE_ROWS,
            copy_per_expert=self.copy_per_expert,
            num_kept=self.num_kept,
        )

    def draw(self, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        allowed = torch.tensor(self.experts or range(self.shape.num_experts))
        ids = [
            allowed[torch.rand(num, len(allowed), generator=generator).topk(self.top_k).indices]
            for num in self.num_tokens
        ]
        return draw_batch(self.shape, ids, seed, exact=self.exact)


CASES = {
    "one_rank": Case(1, 2, (20,), num_calls=3),
    "two_ranks": Case(2, 2, (17, 17), num_calls=3),
    "four_ranks": Case(4, 2, (6, 6, 6, 6), num_local=2, num_calls=3),
    "top_1": Case(2, 1, (9, 9)),
    "top_6": Case(2, 6, (9, 9)),
    "top_8": Case(2, 8, (8, 8)),
    "top_10": Case(2, 10, (7, 7), num_local=6),
    "all_to_one_expert": Case(2, 1, (20, 20), experts=(5,)),
    "all_to_one_rank": Case(2, 3, (11, 11), experts=(0, 1, 2, 3)),
    "expert_without_tokens": Case(2, 2, (13, 13), experts=(0, 2, 3, 4, 5, 7)),
    "rank_without_tokens": Case(4, 2, (5, 5, 5, 5), num_local=2, experts=(0, 1, 2, 6, 7)),
    "one_token": Case(2, 8, (1, 1), num_local=8),
    "different_tokens": Case(4, 2, (1, 9, 0, 4), num_local=2, num_calls=3),
    "odd_dims": Case(2, 2, (12, 12), dim=72, hidden_dim=40),
    "odd_dims_tma": Case(2, 2, (12, 12), dim=72, hidden_dim=40, config=WITH_TMA),
    "scores_first": Case(2, 6, (9, 9), score_before_experts=True),
    "scores_first_top_2": Case(2, 2, (9, 9), score_before_experts=True),
    "normal_data": Case(2, 4, (12, 12), dim=72, hidden_dim=40, exact=False),
    "normal_data_scores_first": Case(2, 4, (12, 12), exact=False, score_before_experts=True),
    "torch_reduces": Case(2, 4, (12, 12), reduce_in_kernel=False),
    "torch_reduces_no_tokens": Case(2, 2, (0, 5), reduce_in_kernel=False),
    "one_program": Case(2, 4, (12, 12), config=replace(CONFIG, num_programs=1), num_calls=3),
    "many_programs": Case(2, 4, (12, 12), config=MANY_ROLES),
    "no_room_at_first": Case(2, 4, (9, 9), room_rows=3, num_calls=2),
    "copy_per_expert": Case(2, 4, (9, 9), copy_per_expert=True),
    "by_token": Case(2, 4, (9, 9), config=replace(CONFIG, by_priority=False)),
    "staged_combine": Case(2, 4, (9, 9), config=replace(CONFIG, staged_combine=True)),
}
# The others run in test_backward.py, whose forwards differ in nothing but what they save.
FORWARD_ALONE = ("one_rank", "two_ranks", "different_tokens", "scores_first", "torch_reduces", "no_room_at_first")


def poison(heap: SymmetricHeap) -> None:
    for name in ("received", "returned"):
        heap.region(name).fill_(float("nan"))


@pytest.mark.parametrize("name", FORWARD_ALONE)
def test_equals_oracle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards in a row with other data each, on buffers that start as NaN."""
    case = CASES[name]
    batches = [case.draw(seed) for seed in range(case.num_calls)]
    monkeypatch.setattr("uniep.layer.reduces_in_kernel", lambda *_, **__: case.reduce_in_kernel)
    poison_new_tensors(monkeypatch)

    def body(heap: SymmetricHeap) -> list:
        poison(heap)
        if case.room_rows is not None:
            heap.room.num_rows = case.room_rows
        outs = []
        for batch in batches:
            rank = heap.rank
            w1, w2, w3 = batch.weights(rank)
            out = fused_forward(
                batch.x[rank],
                batch.scores[rank],
                batch.expert_ids[rank],
                w1,
                w2,
                w3,
                heap=heap,
                config=case.config,
                numerics=case.numerics,
            )
            heap.check()
            assert not heap.scoreboard.counters.any()
            outs.append(out.float().numpy())
        return outs

    for rank, outs in enumerate(run_ranks(case.layout, body)):
        for batch, out in zip(batches, outs, strict=True):
            expected = moe_ref(batch, score_before_experts=case.score_before_experts)[rank].float()
            assert torch.isfinite(expected).all()
            if case.exact:
                assert torch.equal(torch.from_numpy(out), expected)
            else:
                torch.testing.assert_close(torch.from_numpy(out), expected, rtol=2**-7, atol=2**-7)


def test_rank_that_comes_late() -> None:
    """Other data in each call, and in each another rank that comes late: no flag of an earlier call may count."""
    case = CASES["two_ranks"]
    batches = [case.draw(seed) for seed in range(4)]

    def body(heap: SymmetricHeap) -> list:
        outs = []
        for call, batch in enumerate(batches):
            if call % 2 == heap.rank:
                time.sleep(1.0)
            inputs = (batch.x[heap.rank], batch.scores[heap.rank], batch.expert_ids[heap.rank])
            out = fused_forward(*inputs, *batch.weights(heap.rank), heap=heap, config=CONFIG)
            outs.append(out.float().numpy())
        return outs

    for rank, outs in enumerate(run_ranks(case.layout, body)):
        for batch, out in zip(batches, outs, strict=True):
            assert torch.equal(torch.from_numpy(out), moe_ref(batch, score_before_experts=False)[rank].float())
