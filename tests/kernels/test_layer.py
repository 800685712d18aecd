"""The layer with autograd on ranks of a gloo group: output and gradients are the reference's; and how heaps meet."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.kernels.oracle import draw_batch
from tests.kernels.ranks import run_ranks
from tests.kernels.test_forward import CONFIG
from uniep.layer import fused_moe
from uniep.numerics import Numerics
from uniep.plan.layout import HeapLayout
from uniep.reference import reference_moe
from uniep.shapes import MoEShape
from uniep.symmetric.heap import HeapError, SymmetricHeap
from uniep.symmetric.rendezvous import meet, say

SHAPE = MoEShape(6, 3, 64, 32, 2)
LAYOUT = HeapLayout(SHAPE, 7, tile_rows=16)


def open_group(tmp_path: Path, rank: int) -> dist.ProcessGroup:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=SHAPE.ep_degree)
    return dist.group.WORLD


@pytest.mark.parametrize(
    "numerics", [Numerics(), Numerics(score_before_experts=True), Numerics(compiled=True)], ids=str
)
def test_gradients_are_the_references(numerics: Numerics, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.rand(num, 6, generator=generator).topk(3).indices for num in (7, 5)]
    batch = draw_batch(SHAPE, ids, seed=1, exact=True)

    def body(heap: SymmetricHeap) -> None:
        rank = heap.rank
        group = open_group(tmp_path, rank)
        results = []
        fills = []
        fused: dict[str, Any] = {"heap": heap, "config": CONFIG}
        deterministic: Any = torch.utils.deterministic
        for moe, more in (
            (reference_moe, {"group": group}),
            (fused_moe, fused),
            (fused_moe, fused | {"on_step": lambda _: fills.append(deterministic.fill_uninitialized_memory)}),
        ):
            torch.use_deterministic_algorithms("on_step" in more)
            inputs = [t.clone().requires_grad_() for t in (batch.x[rank], batch.scores[rank], *batch.weights(rank))]
            x, scores, w1, w2, w3 = inputs
            out = moe(x, scores, ids[rank], w1, w2, w3, numerics=numerics, **more)
            grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
            results.append((out.detach(), *grads))
        # The layer keeps deterministic mode from filling its buffers, and only its own.
        assert set(fills) == {False}
        assert torch.empty(3).isnan().all()
        for results_of_fused in results[1:]:
            for want, got in zip(results[0], results_of_fused, strict=True):
                assert want.dtype == got.dtype
                assert torch.equal(want, got)
        dist.destroy_process_group()

    run_ranks(LAYOUT, body)


def test_rank_that_never_opens_is_named(tmp_path: Path) -> None:
    def body(heap: SymmetricHeap) -> str:
        group = open_group(tmp_path, heap.rank)
        message = ""
        if heap.rank == 0:
            with pytest.raises(HeapError) as caught:
                meet(LAYOUT, group, "here", timeout_s=0.5)
            message = str(caught.value)
        dist.barrier()
        return message

    assert run_ranks(LAYOUT, body)[0].startswith("rank 1 must open its heap within 0.5 s of rank 0")


def test_rank_with_another_layout_is_named(tmp_path: Path) -> None:
    def body(heap: SymmetricHeap) -> str:
        group = open_group(tmp_path, heap.rank)
        # Two heaps that pair are opened first: they must not be mistaken for the third.
        meet(LAYOUT, group, "here", timeout_s=20.0)
        meet(LAYOUT, group, "here", timeout_s=20.0)
        with pytest.raises(HeapError) as caught:
            meet(HeapLayout(SHAPE, 7 + heap.rank), group, "here", timeout_s=20.0)
        return str(caught.value)

    messages = run_ranks(LAYOUT, body)
    assert messages[0].startswith("heap of rank 1 must be here, HeapLayout(")
    assert "max_tokens=8" in messages[0].split("got ")[1]


def test_where_one_rank_cannot_go_on_all_know_and_take_the_other_way_together(tmp_path: Path) -> None:
    def body(heap: SymmetricHeap) -> str:
        group = open_group(tmp_path, heap.rank)
        meet(LAYOUT, group, "one way", timeout_s=20.0)
        message = ""
        if heap.rank == 1:
            say("out of memory", group)
        else:
            with pytest.raises(HeapError) as caught:
                meet(LAYOUT, group, "one way, mapped", timeout_s=20.0)
            message = str(caught.value)
        meet(LAYOUT, group, "the other way", timeout_s=20.0)
        return message

    messages = run_ranks(LAYOUT, body)
    assert messages[0].startswith("heap of rank 1 must be one way, mapped, HeapLayout(")
    assert messages[0].endswith("as on rank 0, got out of memory")
