"""The fused forward on one GPU: W virtual ranks, a stream and a share of the multiprocessors each, against the
reference."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from uniep import reference
from uniep.kernels.config import CombineConfig, KernelConfig, default_config
from uniep.kernels.swiglu import swiglu
from uniep.kernels.wgrad import default_wgrad_config
from uniep.layer import forward_steps
from uniep.plan.layout import HeapLayout
from uniep.reference import reference_moe
from uniep.shapes import MoEShape
from uniep.symmetric.virtual_ranks import open_virtual_ranks, run_side_by_side

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@dataclass(frozen=True)
class Case:
    """A routing: which experts tokens may choose, how many tokens each rank has (the last entry repeats), what to
    switch."""

    top_k: int = 8
    num_tokens: tuple[int, ...] = (1000,)
    num_local: int = 8
    experts: tuple[int, ...] | None = None
    dim: int = 1024
    hidden_dim: int = 512
    score_before_experts: bool = False
    copy_per_expert: bool = False
    switches: dict[str, Any] = field(default_factory=dict)
    tiles: dict[str, Any] = field(default_factory=dict)

    def tokens(self, num_ranks: int) -> list[int]:
        return [self.num_tokens[min(rank, len(self.num_tokens) - 1)] for rank in range(num_ranks)]

    def config(self, num_ranks: int) -> KernelConfig:
        """Every launch with this case's tiles, one program a multiprocessor: the kernels of all ranks, of which some
        wait for others, have room together."""
        config = default_config(torch.device("cuda"))
        share = config.num_programs // num_ranks
        dispatch_roles = {"num_dispatch": max(share // 6, 1), "num_relay": max(share // 4, 1)}
        combine_roles = {"num_combine": max(share // 6, 1)}
        return replace(
            config,
            **{"num_programs": share} | self.switches,
            up=replace(config.up, **dispatch_roles | self.tiles),
            down=CombineConfig(**combine_roles | self.tiles),
            down_grad=replace(config.down_grad, occupancy=1, **dispatch_roles | self.tiles),
            up_grad=replace(config.up_grad, occupancy=1, **combine_roles | self.tiles),
            wgrad=replace(default_wgrad_config(torch.device("cuda")), num_programs=share),
        )


CASES = {
    "balanced": Case(),
    "top_1": Case(top_k=1),
    "top_2": Case(top_k=2),
    "top_6": Case(top_k=6),
    "top_10": Case(top_k=10, num_local=16),
    "ragged": Case(num_tokens=(1000, 3, 517, 129)),
    "rank_without_own_tokens": Case(num_tokens=(300, 0, 300)),
    "all_to_one_expert": Case(top_k=1, experts=(11,)),
    "all_to_one_rank": Case(top_k=4, experts=tuple(range(8))),
    "expert_without_tokens": Case(top_k=4, experts=(0, 1, 3, 4, 5, 6, 8, 9, 13)),
    "one_token": Case(num_tokens=(1,)),
    "odd_dims": Case(dim=1288, hidden_dim=360),
    "dims_of_kimi_linear": Case(dim=2304, hidden_dim=1024),
    "dims_of_deepseek_v2_lite": Case(dim=2048, hidden_dim=1408, top_k=6),
    "scores_first": Case(score_before_experts=True),
    "scores_first_top_6": Case(score_before_experts=True, top_k=6),
    "one_program": Case(num_tokens=(150,), switches={"num_programs": 1}),
    "pointers": Case(tiles={"use_tma": False}),
    "four_stages": Case(tiles={"num_stages": 4}),
    "copy_per_expert": Case(copy_per_expert=True),
    "by_token": Case(switches={"by_priority": False}),
    "static_roles": Case(switches={"dynamic_roles": False}),
    "staged_combine": Case(switches={"staged_combine": True}),
}


def draw_ids(num_tokens: int, shape: MoEShape, experts: tuple[int, ...] | None) -> Tensor:
    allowed = torch.tensor(experts or range(shape.num_experts), device="cuda")
    return allowed[torch.rand(num_tokens, len(allowed), device="cuda").topk(shape.top_k).indices]


@pytest.mark.parametrize("num_ranks", [1, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_equals_reference(name: str, num_ranks: int) -> None:
    """Forwards in a row with other data each, on buffers that start as NaN. A token's result does not depend on
    its neighbours, so the reference computes each rank's tokens alone, with the experts of all ranks."""
    case = CASES[name]
    num_local = max(case.num_local, -(-(max(case.experts or (0,)) + 1) // num_ranks), -(-case.top_k // num_ranks))
    shape = MoEShape(num_local * num_ranks, case.top_k, case.dim, case.hidden_dim, num_ranks)
    tokens = case.tokens(num_ranks)
    layout = HeapLayout(shape, max(tokens), copy_per_expert=case.copy_per_expert)
    torch.manual_seed(num_ranks)
    up_shape, down_shape = (
        (shape.num_experts, case.hidden_dim, case.dim),
        (shape.num_experts, case.dim, case.hidden_dim),
    )
    w1, w2, w3 = (torch.randn(s, device="cuda").mul_(0.03).bfloat16() for s in (up_shape, down_shape, up_shape))
    config = case.config(num_ranks)
    heaps = open_virtual_ranks(layout, device="cuda", timeout_s=20.0)
    streams = [torch.cuda.Stream() for _ in heaps]
    for heap in heaps:
        for region in ("received", "returned"):
            heap.region(region).fill_(float("nan"))

    # Each kernel first with all ranks alike: its first launch loads its code, which can wait for all kernels that run,
    # and one of another rank would wait for this one.
    for num_tokens in [[max(num, 1)] * num_ranks for num in sorted(set(tokens))] + [tokens] * 3:
        x = [torch.randn(num, case.dim, device="cuda").bfloat16() for num in num_tokens]
        scores = [torch.rand(num, case.top_k, device="cuda") for num in num_tokens]
        ids = [draw_ids(num, shape, case.experts) for num in num_tokens]
        forwards = []
        for heap in heaps:
            rank = heap.rank
            own = slice(rank * num_local, (rank + 1) * num_local)
            forwards.append(
                forward_steps(
                    x[rank],
                    scores[rank],
                    ids[rank],
                    w1[own],
                    w2[own],
                    w3[own],
                    score_before_experts=case.score_before_experts,
                    heap=heap,
                    config=config,
                )
            )
        outs = [out for out, _ in run_side_by_side(forwards, streams=streams)]
        for heap, out in zip(heaps, outs, strict=True):
            heap.check()
            assert not heap.scoreboard.counters.any()
            rank = heap.rank
            if not num_tokens[rank]:
                assert out.shape == x[rank].shape
                continue
            expected = reference_moe(
                x[rank], scores[rank], ids[rank], w1, w2, w3, score_before_experts=case.score_before_experts, group=None
            )
            assert torch.isfinite(out).all()
            assert torch.equal(out, expected)


def test_progress_beside_a_kernel_that_holds_most_multiprocessors() -> None:
    """Programs find room one by one beside long-running kernels. Both ranks together fit the GPU: a rank of which not
    one program is resident could wait for ever."""
    shape = MoEShape(16, 4, 512, 256, 2)
    heaps = open_virtual_ranks(HeapLayout(shape, 300), device="cuda", timeout_s=20.0)
    x = [torch.randn(300, 512, device="cuda").bfloat16() for _ in heaps]
    scores = [torch.rand(300, 4, device="cuda") for _ in heaps]
    ids = [draw_ids(300, shape, None) for _ in heaps]
    up_shape, down_shape = (16, 256, 512), (16, 512, 256)
    w1, w2, w3 = (torch.randn(s, device="cuda").mul_(0.05).bfloat16() for s in (up_shape, down_shape, up_shape))
    config = default_config(torch.device("cuda"))
    config = replace(config, num_programs=config.num_programs // 2)
    busy, streams = torch.cuda.Stream(), [torch.cuda.Stream() for _ in heaps]
    big = torch.randn(8192, 8192, device="cuda").bfloat16()
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        for _ in range(20):
            big @ big
    forwards = [
        forward_steps(
            x[heap.rank],
            scores[heap.rank],
            ids[heap.rank],
            *(w[heap.rank * 8 : heap.rank * 8 + 8] for w in (w1, w2, w3)),
            score_before_experts=False,
            heap=heap,
            config=config,
        )
        for heap in heaps
    ]
    outs = [out for out, _ in run_side_by_side(forwards, streams=streams)]
    for heap, out in zip(heaps, outs, strict=True):
        heap.check()
        rank = heap.rank
        expected = reference_moe(x[rank], scores[rank], ids[rank], w1, w2, w3, score_before_experts=False, group=None)
        assert torch.equal(out, expected)


@triton.jit
def _swiglu_kernel(gate, up, h, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, _, product = swiglu(tl.load(gate + index).to(tl.float32), tl.load(up + index).to(tl.float32))
    tl.store(h + index, product)


def test_swiglu_of_every_gate() -> None:
    """All 65,536 bf16 values of g, each with several u: no bit may differ from torch."""
    gate = torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16).repeat(4)
    up = torch.randn(len(gate), device="cuda").bfloat16()
    h = torch.empty_like(gate)
    _swiglu_kernel[(len(gate) // 1024,)](gate, up, h, BLOCK=1024)
    want, finite = reference.swiglu(gate, up), torch.isfinite(gate)
    assert torch.equal(h[finite].view(torch.int16), want[finite].view(torch.int16))
