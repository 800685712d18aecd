"""The time of each launch of one MoE layer on the GPUs of a group, with any configuration of the kernels."""

import os
import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from uniep.kernels.config import KernelConfig
from uniep.kernels.timeline import Timeline
from uniep.layer import BACKWARD_STEPS, FORWARD_STEPS, backward_steps, compile_layer, forward_steps, fused_moe
from uniep.numerics import STOCK, Numerics
from uniep.symmetric.heap import SymmetricHeap

# About 2.5 ms, and 1 ms: what the host needs to launch a forward, and a backward.
_FORWARD_CYCLES, _BACKWARD_CYCLES = 5_000_000, 2_000_000


def start_together(group: dist.ProcessGroup | None) -> None:
    """Holds the GPU for a moment, in which the host launches what is then timed: the time holds no launch latency.
    Then the ranks meet on their GPUs: clocks differ, so the moment does, by up to a fifth on hot ones."""
    torch.cuda._sleep(_FORWARD_CYCLES)
    if group is not None:
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)


@dataclass(frozen=True)
class LayerInputs:
    """One rank's tokens, routing, weights, and gradients of the output."""

    x_TD: Tensor
    scores_TK: Tensor
    expert_ids_TK: Tensor
    w1_LFD: Tensor
    w2_LDF: Tensor
    w3_LFD: Tensor
    grad_TD: Tensor

    @staticmethod
    def draw(heap: SymmetricHeap, num_tokens: int) -> "LayerInputs":
        """Random, with balanced routing."""
        shape, device = heap.layout.shape, heap.device
        generator = torch.Generator(device).manual_seed(7 + heap.rank)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, device=device, generator=generator, dtype=torch.bfloat16)

        num_local, dim, hidden_dim = shape.num_local_experts, shape.dim, shape.hidden_dim
        logits = torch.rand(num_tokens, shape.num_experts, device=device, generator=generator)
        return LayerInputs(
            normal(num_tokens, dim),
            torch.rand(num_tokens, shape.top_k, device=device, generator=generator),
            logits.topk(shape.top_k).indices,
            normal(num_local, hidden_dim, dim) * 0.02,
            normal(num_local, dim, hidden_dim) * 0.02,
            normal(num_local, hidden_dim, dim) * 0.02,
            normal(num_tokens, dim),
        )


def compile_ahead(
    inputs: LayerInputs, heap: SymmetricHeap, configs: Sequence[KernelConfig], numerics: Numerics = STOCK
) -> None:
    """`uniep.layer.compile_layer` with this rank's share of the processors. All ranks call it together."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    compile_layer(
        inputs.grad_TD,
        inputs.x_TD,
        inputs.scores_TK,
        inputs.expert_ids_TK,
        inputs.w1_LFD,
        inputs.w2_LDF,
        inputs.w3_LFD,
        heap=heap,
        configs=configs,
        numerics=numerics,
        num_threads=max(len(os.sched_getaffinity(0)) // num_ranks, 1),
    )


def warm_up(inputs: LayerInputs, heap: SymmetricHeap, config: KernelConfig, numerics: Numerics = STOCK) -> None:
    """A forward and a backward, which compile what the configuration needs and make room for the rows."""
    x, scores, w1, w2, w3 = leaves = [
        tensor.detach().requires_grad_()
        for tensor in (inputs.x_TD, inputs.scores_TK, inputs.w1_LFD, inputs.w2_LDF, inputs.w3_LFD)
    ]
    ids = inputs.expert_ids_TK
    with torch.enable_grad():
        out_TD = fused_moe(x, scores, ids, w1, w2, w3, heap=heap, config=config, numerics=numerics)
        torch.autograd.grad(out_TD, leaves, inputs.grad_TD)


def run_layer(
    inputs: LayerInputs,
    heap: SymmetricHeap,
    config: KernelConfig,
    numerics: Numerics = STOCK,
    *,
    timeline: Timeline | None = None,
) -> tuple[list[Tensor], dict[str, Any]]:
    """One forward and backward: their results, and pairs of CUDA events around each step."""
    events: dict[str, Any] = {}

    def stepped(steps: Generator[None, None, Any], names: tuple[str, ...]) -> Any:
        for name in names:
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[name] = pair
            pair[0].record()
            try:
                next(steps)
            except StopIteration as end:
                return end.value
            finally:
                pair[1].record()
        raise RuntimeError("the layer must have run before, so that its rows have room, got a step more")

    weights = (inputs.w1_LFD, inputs.w2_LDF, inputs.w3_LFD)
    more: dict[str, Any] = {"heap": heap, "config": config, "numerics": numerics, "timeline": timeline}
    routing = (inputs.scores_TK, inputs.expert_ids_TK)
    forward = forward_steps(inputs.x_TD, *routing, *weights, save=True, **more)
    out_TD, saved = stepped(forward, FORWARD_STEPS)
    saved_x = inputs.x_TD if numerics.score_before_experts else None
    # The host waited for the forward's plan, so it is late: small layers' times would hold the latency of launches.
    torch.cuda._sleep(_BACKWARD_CYCLES)
    grads = stepped(backward_steps(inputs.grad_TD, saved, saved_x, *routing, *weights, **more), BACKWARD_STEPS)
    return [out_TD, grads.x_TD, grads.scores_TK, grads.w1_LFD, grads.w2_LDF, grads.w3_LFD], events


def measure_layer(
    inputs: LayerInputs,
    heap: SymmetricHeap,
    config: KernelConfig,
    numerics: Numerics = STOCK,
    *,
    num_calls: int,
    group: dist.ProcessGroup | None,
    timeline: Timeline | None = None,
) -> tuple[dict[str, float], list[Tensor]]:
    """GPU microseconds of each step: the median of some calls, the slowest rank's; and the last call's results.

    All ranks of the group call it together, after a call that warmed up; group is None for one rank. A timeline
    records each call anew, and still records when the last one is done.
    """
    times: dict[str, list[float]] = {}
    results: list[Tensor] = []
    for _ in range(num_calls):
        torch.cuda.synchronize()
        if timeline is not None:
            timeline.start()
            torch.cuda.synchronize()
        if group is not None:
            dist.barrier(group)
        start_together(group)
        results, events = run_layer(inputs, heap, config, numerics, timeline=timeline)
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            times.setdefault(name, []).append(start.elapsed_time(end) * 1e3)
    slowest = torch.tensor([statistics.median(values) for values in times.values()], device=heap.device)
    if group is not None:
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(times, slowest.tolist(), strict=True)), results
