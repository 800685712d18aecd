"""What the dispatch leaves for the backward, row by row, and what the combine leaves in the returned region."""

import pytest
import torch

from tests.kernels.oracle import draw_batch, mm
from tests.kernels.ranks import run_ranks
from tests.kernels.test_forward import CONFIG, poison
from uniep.kernels.build_plan import launch_build_plan
from uniep.kernels.dispatch_gemm import launch_dispatch_gemm
from uniep.kernels.exchange_routing import launch_exchange_routing
from uniep.kernels.gemm_combine import launch_gemm_combine, reduces_in_kernel
from uniep.plan.layout import HeapLayout
from uniep.plan.token_map import plan_ref
from uniep.shapes import MoEShape
from uniep.symmetric.heap import SymmetricHeap

NUM_TOKENS = 10


@pytest.mark.parametrize(("scores_first", "copy_per_expert"), [(False, False), (True, False), (True, True)])
def test_rows(scores_first: bool, copy_per_expert: bool) -> None:
    shape = MoEShape(6, 3, 64, 40, 2)
    layout = HeapLayout(shape, NUM_TOKENS, tile_rows=16, copy_per_expert=copy_per_expert)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.rand(NUM_TOKENS, 6, generator=generator).topk(3).indices for _ in range(2)]
    batch = draw_batch(shape, ids, seed=0, exact=True)

    def body(heap: SymmetricHeap) -> list:
        poison(heap)
        rank, epoch = heap.rank, heap.next_epoch()
        w1, w2, w3 = batch.weights(rank)
        returned = heap.take_returned(keep=False)
        launch_exchange_routing(ids[rank], batch.scores[rank], heap, epoch=epoch, returned=returned)
        plan, sizes = launch_build_plan(heap)
        common = {"config": CONFIG, "epoch": epoch, "score_before_experts": scores_first}
        up = launch_dispatch_gemm(
            batch.x[rank], w1, w3, plan, heap, room_rows=sizes.num_rows(), save_halves=True, **common
        )
        launch_gemm_combine(
            up.h_RF, w2, batch.scores[rank], plan, heap, reduce_in_kernel=False, returned=returned, **common
        )
        heap.check()
        tensors = (up.x_RD, up.g_RF, up.u_RF, up.h_RF, returned.rows_ND)
        return [tensor.float().numpy() for tensor in tensors]

    x_MD, scores_MK = torch.cat(batch.x), torch.cat(batch.scores)
    y_ND = torch.empty(2 * NUM_TOKENS * 3, 64, dtype=torch.bfloat16)
    results = run_ranks(layout, body)
    for rank, (x, g, u, h, _) in enumerate(results):
        plan = plan_ref(torch.stack(ids), rank, shape, tile_rows=16)
        w1, w2, w3 = batch.weights(rank)
        origin = plan.row_origin_R.long()
        expected_x = x_MD[origin // 3]
        if scores_first:
            expected_x = (expected_x.float() * scores_MK.flatten()[origin, None]).bfloat16()
        assert torch.equal(torch.from_numpy(x), expected_x.float())
        for expert, (start, end) in enumerate(zip(plan.expert_offsets, plan.expert_offsets[1:], strict=False)):
            rows = slice(int(start), int(end))
            gate, up = mm(expected_x[rows], w1[expert]), mm(expected_x[rows], w3[expert])
            hidden = torch.nn.functional.silu(gate) * up
            for got, want in ((g, gate), (u, up), (h, hidden)):
                assert torch.equal(torch.from_numpy(got[rows]), want.float())
            y_ND[origin[rows]] = mm(hidden, w2[expert])
    returned = torch.cat([torch.from_numpy(result[-1]) for result in results])
    assert torch.equal(returned, y_ND.float())


def test_small_reduces_are_torchs() -> None:
    """Where torch.bmm was measured to take another order, and everywhere below 128 tokens."""
    assert not reduces_in_kernel(64, 1280, score_before_experts=False)
    assert not reduces_in_kernel(16, 5120, score_before_experts=False)
    assert not reduces_in_kernel(127, 7168, score_before_experts=False)
    assert reduces_in_kernel(128, 1000, score_before_experts=False)
    assert reduces_in_kernel(1, 64, score_before_experts=True)
