"""What goes wrong ends within the bound and says who."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.kernels.oracle import draw_batch
from tests.kernels.ranks import run_ranks
from tests.kernels.test_forward import CONFIG
from uniep.kernels.build_plan import launch_build_plan
from uniep.kernels.config import KernelConfig
from uniep.kernels.dispatch_gemm import launch_dispatch_gemm
from uniep.kernels.exchange_routing import launch_exchange_routing
from uniep.kernels.gemm_combine import launch_gemm_combine
from uniep.layer import fused_forward
from uniep.plan.layout import HeapLayout
from uniep.shapes import MoEShape
from uniep.symmetric.heap import HeapError, SymmetricHeap
from uniep.symmetric.shared_memory import open_shared_memory
from uniep.symmetric.virtual_ranks import open_virtual_ranks
from uniep.symmetric.watch import WaitTimeoutError

SHAPE = MoEShape(4, 2, 64, 32, 2)
LAYOUT = HeapLayout(SHAPE, 6, tile_rows=16)
IDS = [torch.tensor([[0, 2], [1, 3], [2, 3]]), torch.tensor([[0, 1], [1, 2], [0, 3]])]
BATCH = draw_batch(SHAPE, IDS, seed=0, exact=True)


def forward_until(heap: SymmetricHeap, last: str) -> None:
    """The forward's steps up to one of them."""
    rank, epoch = heap.rank, heap.next_epoch()
    w1, w2, w3 = BATCH.weights(rank)
    returned = heap.take_returned(keep=False)
    launch_exchange_routing(IDS[rank], BATCH.scores[rank], heap, epoch=epoch, returned=returned)
    if last == "exchange":
        return
    plan, sizes = launch_build_plan(heap)
    common = {"config": CONFIG, "epoch": epoch, "score_before_experts": False}
    room_rows = sizes.num_rows()
    up = launch_dispatch_gemm(BATCH.x[rank], w1, w3, plan, heap, room_rows=room_rows, save_halves=False, **common)
    if last == "dispatch":
        return
    launch_gemm_combine(up.h_RF, w2, BATCH.scores[rank], plan, heap, reduce_in_kernel=True, returned=returned, **common)


def run_and_check(heap: SymmetricHeap) -> None:
    forward_until(heap, "combine")
    heap.check()


@pytest.mark.parametrize(
    ("last_of_rank_1", "waits_for"),
    [
        ("nothing", r"kernel exchange_routing, task 0, must see the expert ids of rank 1 "),
        ("exchange", r"kernel dispatch_gemm, task 0, must see tokens from rank 1 "),
        ("dispatch", r"kernel gemm_combine, task 0, must see the returned rows of rank 1 "),
    ],
)
def test_missing_peer_is_named(last_of_rank_1: str, waits_for: str) -> None:
    def body(heap: SymmetricHeap) -> str:
        heap.timeout_s = 5.0
        if heap.rank == 1:
            if last_of_rank_1 != "nothing":
                forward_until(heap, last_of_rank_1)
            return ""
        # The plan's read of R, or else the check, raises: a late kernel may fail after the last read.
        with pytest.raises(WaitTimeoutError) as caught:
            run_and_check(heap)
        return str(caught.value)

    message = run_ranks(LAYOUT, body)[0]
    assert message.startswith("rank 0: " + waits_for), message
    assert "within 5 s" in message


def test_failed_forward_is_reported_by_the_next() -> None:
    def body(heap: SymmetricHeap) -> str:
        heap.timeout_s = 1.0
        if heap.rank == 0:
            launch_exchange_routing(
                IDS[0], BATCH.scores[0], heap, epoch=heap.next_epoch(), returned=heap.take_returned(keep=False)
            )
            _, sizes = launch_build_plan(heap)
            with pytest.raises(WaitTimeoutError, match="the expert ids of rank 1"):
                sizes.num_rows()
        return "done"

    assert run_ranks(LAYOUT, body) == ["done", "done"]


def test_peer_that_never_opens_is_named(tmp_path: Path) -> None:
    with pytest.raises(HeapError, match=r"^rank 1 must open its heap within 0\.2 s of rank 0"):
        open_shared_memory(LAYOUT, rank=0, directory=tmp_path, timeout_s=0.2)


def test_peer_with_another_layout_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank1").write_bytes(b"123")
    with pytest.raises(HeapError, match=rf"^heap of rank 1 must be {LAYOUT.num_bytes} bytes as on rank 0, got 3"):
        open_shared_memory(LAYOUT, rank=0, directory=tmp_path, timeout_s=0.2)


def test_part_of_a_rank_that_has_closed_can_still_be_mapped(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        for heap in pool.map(lambda rank: open_shared_memory(LAYOUT, rank=rank, directory=tmp_path), (0, 1)):
            heap.close()
    open_shared_memory(LAYOUT, rank=0, directory=tmp_path, timeout_s=0.2).close()


def test_closed_heap_is_refused() -> None:
    with open_virtual_ranks(LAYOUT, device="cpu")[0] as heap:
        heap.next_epoch()
    with pytest.raises(HeapError, match="heap of rank 0 must be open"):
        heap.next_epoch()


def test_inputs_are_checked() -> None:
    heap = open_virtual_ranks(LAYOUT, device="cpu")[0]
    w1, w2, w3 = BATCH.weights(0)
    good = {"heap": heap, "config": CONFIG}
    ids, scores = IDS[0], BATCH.scores[0]
    with pytest.raises(ValueError, match=r"x must be bfloat16 \[T, 64\], got torch.float32 \[3, 64\]"):
        fused_forward(BATCH.x[0].float(), scores, ids, w1, w2, w3, **good)
    with pytest.raises(ValueError, match=r"w2 must be \[2, 64, 32\], got \[2, 32, 64\]"):
        fused_forward(BATCH.x[0], scores, ids, w1, w1, w3, **good)
    too_many = torch.zeros(7, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="tokens of rank 0 must be at most max_tokens = 6, got 7"):
        fused_forward(too_many, torch.zeros(7, 2), torch.zeros(7, 2, dtype=torch.int64), w1, w2, w3, **good)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_expert_ids_are_whole_numbers(dtype: torch.dtype) -> None:
    heap = open_virtual_ranks(LAYOUT, device="cpu")[0]
    options = {"heap": heap, "config": CONFIG}
    with pytest.raises(ValueError, match=f"expert ids must be int32 or int64, got {dtype}"):
        fused_forward(BATCH.x[0], BATCH.scores[0], IDS[0].to(dtype), *BATCH.weights(0), **options)


def test_static_roles_need_programs_for_each() -> None:
    with pytest.raises(ValueError, match="num_programs must be more than 64 with static roles, got 60"):
        KernelConfig(num_programs=60, dynamic_roles=False)
