"""plan_ref against a plan written with loops, over routings that hypothesis draws."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from uniep.plan.layout import HeapLayout
from uniep.plan.room import FORWARDS_BEFORE_SHRINKING, Room
from uniep.plan.token_map import NO_EXPERT, plan_ref
from uniep.shapes import MoEShape, ShapeError

WORKED_EXAMPLE = torch.tensor([[[0, 3], [2, 3], [2, 1]], [[1, 3], [0, 2], [0, 1]]])


@st.composite
def routings(draw: st.DrawFn) -> tuple[MoEShape, torch.Tensor]:
    num_ranks = draw(st.sampled_from([1, 2, 3, 4]))
    num_experts = num_ranks * draw(st.integers(1, 5))
    top_k = draw(st.integers(1, min(num_experts, 6)))
    max_tokens = draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ids = torch.rand(num_ranks, max_tokens, num_experts, generator=generator)
    ids[..., : draw(st.integers(0, num_experts))] += draw(st.sampled_from([0.0, 1.0]))
    ids = ids.topk(top_k, dim=2).indices
    for rank in range(num_ranks):
        ids[rank, draw(st.integers(0, max_tokens)) :] = NO_EXPERT
    return MoEShape(num_experts, top_k, 8, 8, num_ranks), ids


@settings(max_examples=200)
@given(routings(), st.booleans(), st.booleans(), st.sampled_from([1, 2, 4]))
def test_equals_loops(
    routing: tuple[MoEShape, torch.Tensor], copy_per_expert: bool, by_priority: bool, tile_rows: int
) -> None:
    shape, ids = routing
    num_ranks, max_tokens, top_k = ids.shape
    for rank in range(num_ranks):
        plan = plan_ref(ids, rank, shape, tile_rows=tile_rows, copy_per_expert=copy_per_expert, by_priority=by_priority)
        first_expert = rank * shape.num_local_experts
        rows, offsets, tiles = [], [0], []
        for expert in range(shape.num_local_experts):
            for source in range(num_ranks):
                for token in range(max_tokens):
                    for k in range(top_k):
                        if ids[source, token, k] == first_expert + expert:
                            rows.append((source * max_tokens + token) * top_k + k)
            tiles += [
                (expert, row, min(row + tile_rows, len(rows))) for row in range(offsets[-1], len(rows), tile_rows)
            ]
            offsets.append(len(rows))
        assert plan.row_origin_R.tolist() == rows
        assert plan.expert_offsets.tolist() == offsets
        table = zip(plan.tile_expert.tolist(), plan.tile_first_row.tolist(), plan.tile_end_row.tolist(), strict=True)
        assert list(table) == tiles
        assert plan.tile_offsets[-1] == len(tiles)

        sends, send_offsets = [], [0]
        for destination in range(num_ranks):
            wanted = []
            for token in range(max_tokens):
                there = [
                    (int(ids[rank, token, k]), k)
                    for k in range(top_k)
                    if ids[rank, token, k] >= 0 and ids[rank, token, k] // shape.num_local_experts == destination
                ]
                if destination != rank and there:
                    copies = there if copy_per_expert else [min(there)]
                    wanted += [(expert if by_priority else 0, token * top_k + k) for expert, k in copies]
            sends += [flat for _, flat in sorted(wanted)]
            send_offsets.append(len(sends))
        assert plan.send_rows_N.tolist() == sends
        assert plan.send_offsets.tolist() == send_offsets


def test_worked_example() -> None:
    shape = MoEShape(4, 2, 8, 8, 2)
    plan = plan_ref(WORKED_EXAMPLE, 0, shape, tile_rows=2)
    assert plan.row_origin_R.tolist() == [0, 8, 10, 5, 6, 11]
    assert plan.expert_offsets.tolist() == [0, 3, 6]
    assert plan_ref(WORKED_EXAMPLE, 1, shape, tile_rows=2).send_rows_N.tolist() == [2, 4, 0]


def test_every_row_finds_its_token_at_the_receiver() -> None:
    """What one rank sends and what another expects are made from the same ids: the slots must be the same set."""
    shape = MoEShape(8, 3, 8, 8, 4)
    ids = torch.rand(4, 5, 8, generator=torch.Generator().manual_seed(0)).topk(3, dim=2).indices
    plans = [plan_ref(ids, rank, shape, tile_rows=4) for rank in range(4)]
    for rank, receiver in enumerate(plans):
        slots = receiver.row_origin_R // 3
        expected = set(slots[slots // 5 != rank].tolist())
        arriving: list[int] = []
        for source, sender in enumerate(plans):
            start, end = sender.send_offsets[rank : rank + 2].tolist()
            arriving += ((source * 5 * 3 + sender.send_rows_N[start:end]) // 3).tolist()
        assert len(arriving) == len(set(arriving))
        assert set(arriving) == expected


def test_layout_regions_do_not_overlap_and_are_aligned() -> None:
    layout = HeapLayout(MoEShape(12, 5, 24, 40, 3), max_tokens=7)
    end = 0
    for region in layout.regions.values():
        assert region.offset_bytes >= end
        assert region.offset_bytes % 256 == 0
        end = region.offset_bytes + region.num_bytes
    assert layout.num_bytes >= end


def test_layout_offsets_pass_32_bits() -> None:
    layout = HeapLayout(MoEShape(256, 8, 7168, 2048, 8), max_tokens=65536)
    assert layout.num_bytes > 2**33


@pytest.mark.parametrize(("dim", "hidden_dim", "what"), [(20, 16, "dim"), (16, 20, "hidden_dim")])
def test_layout_refuses_unaligned_rows(dim: int, hidden_dim: int, what: str) -> None:
    with pytest.raises(ShapeError, match=f"^{what} must be a multiple of 8, got 20"):
        HeapLayout(MoEShape(4, 2, dim, hidden_dim), max_tokens=4)


def test_room_grows_at_once_and_shrinks_late() -> None:
    room = Room(HeapLayout(MoEShape(8, 2, 64, 64, 2), max_tokens=4096))
    assert room.begin(4096) == 68 * 128  # 8192 rows and a sixteenth
    room.follow(8704)
    assert room.begin(100) == room.num_rows == 68 * 128
    room.follow(12000)
    assert room.num_rows == 100 * 128
    # Fewer rows now and then change nothing, only if no forward of many needed them.
    for _ in range(FORWARDS_BEFORE_SHRINKING - 2):
        room.follow(1000)
    assert room.num_rows == 100 * 128
    for _ in range(FORWARDS_BEFORE_SHRINKING - 1):
        room.follow(1000)
    assert room.num_rows == 100 * 128
    room.follow(1200)
    assert room.num_rows == 10 * 128


def test_room_is_no_larger_than_the_layout() -> None:
    layout = HeapLayout(MoEShape(8, 2, 64, 64, 2), max_tokens=4096)
    room = Room(layout)
    room.follow(layout.max_rows)
    assert room.num_rows == layout.max_rows == 2 * 8192
    empty = Room(layout)
    assert empty.begin(0) == 1
    for _ in range(FORWARDS_BEFORE_SHRINKING):
        empty.follow(0)
    assert empty.num_rows == 1
