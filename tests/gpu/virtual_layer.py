"""One layer over W virtual ranks of one GPU, a stream and a share of the multiprocessors each, on buffers that start as
NaN; and the routings that it is tested with."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from uniep.kernels.config import CombineConfig, KernelConfig, default_config
from uniep.kernels.wgrad import default_wgrad_config
from uniep.layer import Gradients, Saved, backward_steps, forward_steps
from uniep.numerics import Numerics
from uniep.plan.layout import HeapLayout
from uniep.reference import reference_moe
from uniep.shapes import MoEShape
from uniep.symmetric.heap import SymmetricHeap
from uniep.symmetric.virtual_ranks import open_virtual_ranks, run_side_by_side

# x, scores, expert ids of each rank.
Inputs = list[list[Tensor]]


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

    @property
    def numerics(self) -> Numerics:
        return Numerics(self.score_before_experts)

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


class VirtualLayer:
    """A case's layer, open on all ranks. `weights` are those of all experts."""

    def __init__(self, case: Case, num_ranks: int, *, num_kept: int = 0):
        most = max(case.experts or (0,)) + 1
        self.num_local = max(case.num_local, -(-most // num_ranks), -(-case.top_k // num_ranks))
        self.shape = MoEShape(self.num_local * num_ranks, case.top_k, case.dim, case.hidden_dim, num_ranks)
        self.case = case
        self.config = case.config(num_ranks)
        self.tokens = case.tokens(num_ranks)
        torch.manual_seed(num_ranks)
        up_shape, down_shape = (
            (self.shape.num_experts, case.hidden_dim, case.dim),
            (self.shape.num_experts, case.dim, case.hidden_dim),
        )
        self.weights = [torch.randn(s, device="cuda").mul_(0.03).bfloat16() for s in (up_shape, down_shape, up_shape)]
        layout = HeapLayout(self.shape, max(self.tokens), copy_per_expert=case.copy_per_expert, num_kept=num_kept)
        self.heaps = open_virtual_ranks(layout, device="cuda", timeout_s=20.0)
        self._streams = [torch.cuda.Stream() for _ in self.heaps]
        for heap in self.heaps:
            for region in ("received", "returned", "score_grads"):
                heap.region(region).fill_(float("nan"))

    def draws(self, num_calls: int) -> Iterator[tuple[Inputs, list[Tensor]]]:
        """Inputs and gradients of the output, other ones for each call.

        Each kernel first with all ranks alike: its first launch loads its code, which can wait for all kernels that
        run, and one of another rank would wait for this one.
        """
        alike = [[max(num, 1)] * len(self.heaps) for num in sorted(set(self.tokens))]
        for num_tokens in alike + [self.tokens] * num_calls:
            inputs, grads = [], []
            for num in num_tokens:
                x, grad = (torch.randn(num, self.case.dim, device="cuda").bfloat16() for _ in range(2))
                scores = torch.rand(num, self.case.top_k, device="cuda")
                inputs.append([x, scores, draw_ids(num, self.shape, self.case.experts)])
                grads.append(grad)
            yield inputs, grads

    def own(self, heap: SymmetricHeap) -> slice:
        """Of a rank among all experts."""
        return slice(heap.rank * self.num_local, (heap.rank + 1) * self.num_local)

    def forward(self, inputs: Inputs, numerics: Numerics, *, save: bool) -> list[tuple[Tensor, Saved | None]]:
        return self._run([
            forward_steps(*inputs[heap.rank], *self._weights(heap), heap=heap, save=save, **self._more(numerics))
            for heap in self.heaps
        ])  # fmt: skip

    def backward(self, inputs: Inputs, grads: list[Tensor], saved: list[Saved], numerics: Numerics) -> list[Gradients]:
        return self._run([
            backward_steps(
                grads[heap.rank],
                saved[heap.rank],
                *inputs[heap.rank],
                *self._weights(heap),
                heap=heap,
                **self._more(numerics),
            )
            for heap in self.heaps
        ])  # fmt: skip

    def _weights(self, heap: SymmetricHeap) -> list[Tensor]:
        return [weight[self.own(heap)] for weight in self.weights]

    def _more(self, numerics: Numerics) -> dict[str, Any]:
        return {"config": self.config, "numerics": numerics}

    def _run(self, steps: list[Any]) -> list[Any]:
        results = run_side_by_side(steps, streams=self._streams)
        for heap in self.heaps:
            heap.check()
            assert not heap.scoreboard.counters.any()
        return results


def reference_gradients(case: Case, inputs: list[list[Tensor]], weights: list[Tensor], grads: list[Tensor]) -> Any:
    """Gradients of each rank's x and scores, and of all experts' weights, from all ranks' tokens as one rank.

    The sums over the tokens of a weight's gradient go by source rank and token, which this order keeps; sizes of
    torch.bmm choose its kernel, so the scores' gradients are taken for each rank alone.
    """
    more: dict[str, Any] = {"group": None, "numerics": case.numerics}
    joined = [torch.cat(parts) for parts in zip(*inputs, strict=True)]
    leaves = [t.clone().requires_grad_() for t in weights]
    out = reference_moe(*joined, *leaves, **more)
    grad_weights = torch.autograd.grad(out, leaves, torch.cat(grads))
    of_ranks = []
    for (x, scores, ids), grad in zip(inputs, grads, strict=True):
        x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
        if len(x):
            of_ranks.append(torch.autograd.grad(reference_moe(x, scores, ids, *weights, **more), (x, scores), grad))
        else:
            of_ranks.append((x.detach(), scores.detach()))
    return of_ranks, grad_weights
