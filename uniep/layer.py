"""The fused MoE layer: the only caller of the kernels."""

import os
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from uniep.kernels.build_plan import launch_build_plan
from uniep.kernels.config import KernelConfig
from uniep.kernels.dispatch_gemm import launch_dispatch_gemm
from uniep.kernels.exchange_routing import launch_exchange_routing
from uniep.kernels.gemm_combine import launch_gemm_combine, reduces_in_kernel
from uniep.reference import reference_moe
from uniep.symmetric.heap import SymmetricHeap


def forward_steps(
    x_TD: Tensor,
    scores_TK: Tensor,
    expert_ids_TK: Tensor,
    w1_LFD: Tensor,
    w2_LDF: Tensor,
    w3_LFD: Tensor,
    *,
    score_before_experts: bool,
    heap: SymmetricHeap,
    config: KernelConfig,
) -> Generator[None, None, Tensor]:
    """One forward without autograd, one launch a step: exchange, plan, dispatch + up GEMM, down GEMM + combine.

    It stops between launches, so that one host thread can drive the virtual ranks of a GPU side by side: a kernel waits
    for those of the other ranks, which must then be launched before the host waits for anything.

    Raises:
        ValueError: an input does not fit the heap's layout, or CUDA_DEVICE_MAX_CONNECTIONS is 1.
        WaitTimeoutError: this forward's exchange or a kernel of an earlier forward gave up a wait.
    """
    _check_inputs(x_TD, w1_LFD, w2_LDF, w3_LFD, heap)
    x_TD, scores_TK = x_TD.contiguous(), scores_TK.contiguous()
    w1_LFD, w2_LDF, w3_LFD = (w.to(torch.bfloat16).contiguous() for w in (w1_LFD, w2_LDF, w3_LFD))
    epoch = heap.next_epoch()
    launch_exchange_routing(expert_ids_TK, scores_TK, heap, epoch=epoch)
    yield
    plan, sizes = launch_build_plan(heap, by_priority=config.by_priority)
    yield
    while True:
        room_rows = heap.room_rows
        up = launch_dispatch_gemm(
            x_TD,
            w1_LFD,
            w3_LFD,
            plan,
            heap,
            config=config,
            room_rows=room_rows,
            epoch=epoch,
            score_before_experts=score_before_experts,
            save_halves=False,
        )
        yield
        out_TD = launch_gemm_combine(
            up.h_RF,
            w2_LDF,
            scores_TK,
            plan,
            heap,
            config=config,
            epoch=epoch,
            score_before_experts=score_before_experts,
            reduce_in_kernel=reduces_in_kernel(*x_TD.shape, score_before_experts=score_before_experts),
        )
        # The device knew R before the dispatch began, so this waits for no kernel of this forward that takes long.
        num_rows = sizes.num_rows()
        if num_rows <= room_rows:
            return out_TD
        # The rows had no room and neither kernel did more than send tokens: both once more, with room.
        heap.make_room(num_rows)


def fused_forward(*tensors: Tensor, score_before_experts: bool, heap: SymmetricHeap, config: KernelConfig) -> Tensor:
    """`forward_steps` in one go. All ranks call it together, with any number of tokens up to the heap's max_tokens."""
    steps = forward_steps(*tensors, score_before_experts=score_before_experts, heap=heap, config=config)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


class _FusedMoE(torch.autograd.Function):
    """The fused forward, and the reference's backward. The reference recomputes its own forward, whose bits are the
    same, so nothing but the inputs is saved."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        scores_TK: Tensor,
        expert_ids_TK: Tensor,
        w1_LFD: Tensor,
        w2_LDF: Tensor,
        w3_LFD: Tensor,
        score_before_experts: bool,
        heap: SymmetricHeap,
        config: KernelConfig,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.save_for_backward(x_TD, scores_TK, expert_ids_TK, w1_LFD, w2_LDF, w3_LFD)
        ctx.score_before_experts, ctx.group = score_before_experts, group
        return fused_forward(
            x_TD,
            scores_TK,
            expert_ids_TK,
            w1_LFD,
            w2_LDF,
            w3_LFD,
            score_before_experts=score_before_experts,
            heap=heap,
            config=config,
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x_TD, scores_TK, expert_ids_TK, *weights = ctx.saved_tensors
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in (x_TD, scores_TK, *weights)]
            x_TD, scores_TK, w1_LFD, w2_LDF, w3_LFD = inputs
            out_TD = reference_moe(
                x_TD,
                scores_TK,
                expert_ids_TK,
                w1_LFD,
                w2_LDF,
                w3_LFD,
                score_before_experts=ctx.score_before_experts,
                group=ctx.group,
            )
        grad_x, grad_scores, *grad_weights = torch.autograd.grad(out_TD, inputs, grads[0])
        return grad_x, grad_scores, None, *grad_weights, None, None, None, None


def fused_moe(
    x_TD: Tensor,
    scores_TK: Tensor,
    expert_ids_TK: Tensor,
    w1_LFD: Tensor,
    w2_LDF: Tensor,
    w3_LFD: Tensor,
    *,
    score_before_experts: bool,
    heap: SymmetricHeap,
    config: KernelConfig,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """The routed experts of one MoE layer, as `uniep.reference.reference_moe`, with the fused forward.

    Args:
        x_TD: bf16 tokens of this rank, at most the heap's max_tokens.
        scores_TK: fp32 routing scores.
        expert_ids_TK: distinct experts of each token, in [0, E).
        w1_LFD, w2_LDF, w3_LFD: this rank's experts; taken in bf16.
        score_before_experts: scale the experts' inputs instead of their outputs.
        heap: open, of the layer's shape; shared by all layers of that shape.
        config: how the kernels share the GPU.
        group: the expert-parallel ranks, for the backward; None for one rank.
    """
    return _FusedMoE.apply(
        x_TD, scores_TK, expert_ids_TK, w1_LFD, w2_LDF, w3_LFD, score_before_experts, heap, config, group
    )


def _check_inputs(x_TD: Tensor, w1_LFD: Tensor, w2_LDF: Tensor, w3_LFD: Tensor, heap: SymmetricHeap) -> None:
    shape = heap.layout.shape
    num_local, dim, hidden_dim = shape.num_local_experts, shape.dim, shape.hidden_dim
    if x_TD.dtype != torch.bfloat16 or x_TD.shape[1:] != (dim,):
        raise ValueError(f"x must be bfloat16 [T, {dim}], got {x_TD.dtype} {list(x_TD.shape)}")
    up_shape, down_shape = (num_local, hidden_dim, dim), (num_local, dim, hidden_dim)
    for what, weight, want in (("w1", w1_LFD, up_shape), ("w2", w2_LDF, down_shape), ("w3", w3_LFD, up_shape)):
        if weight.shape != want:
            raise ValueError(f"{what} must be {list(want)}, got {list(weight.shape)}")
    if x_TD.is_cuda and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        # With one hardware queue a collective that waits for a peer holds back our kernel, which that peer waits for.
        raise ValueError("CUDA_DEVICE_MAX_CONNECTIONS must be unset or at least 2, got 1")
