"""The fused MoE layer: the only caller of the kernels."""

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.utils.deterministic
from torch import Tensor

from uniep.kernels.build_plan import launch_build_plan
from uniep.kernels.config import KernelConfig
from uniep.kernels.dispatch_gemm import launch_dispatch_gemm, launch_dispatch_gemm_backward
from uniep.kernels.exchange_routing import launch_exchange_routing
from uniep.kernels.gemm_combine import (
    launch_gemm_combine,
    launch_gemm_combine_backward,
    reduce_by_torch,
    reduces_in_kernel,
    returned_score_grads,
)
from uniep.kernels.launch import only_compiling
from uniep.kernels.score_grad import dots_in_kernel, launch_score_grad
from uniep.kernels.timeline import Timeline
from uniep.kernels.wgrad import default_wgrad_config, launch_wgrad
from uniep.numerics import STOCK, Numerics
from uniep.plan.room import Room
from uniep.plan.token_map import RoutingPlan
from uniep.symmetric.heap import SymmetricHeap

_Result = TypeVar("_Result")

# What the steps of forward_steps and backward_steps launch, in their order.
FORWARD_STEPS = ("exchange", "plan", "up", "down", "rest")
BACKWARD_STEPS = ("down_grad", "wgrad", "up_grad", "rest_grad")


@dataclass(frozen=True)
class Saved:
    """What a forward leaves for its backward, beside its inputs. R rows, the plan's order.

    Attributes:
        plan: the routing plan.
        x_RD: the experts' inputs, scaled if scores go before the experts.
        g_RF, u_RF: x w1^T and x w3^T.
        scores_WMK: the scores of all ranks, or None if they go before the experts.
        y_TKD: the rows that came back for this rank's tokens, or None if scores go before the experts or numerics are
            fast.
    """

    plan: RoutingPlan
    x_RD: Tensor
    g_RF: Tensor
    u_RF: Tensor
    scores_WMK: Tensor | None
    y_TKD: Tensor | None


@dataclass(frozen=True)
class Gradients:
    """Of the inputs of a layer, in their order: of the weights in bf16, of the scores in fp32."""

    x_TD: Tensor
    scores_TK: Tensor
    w1_LFD: Tensor
    w2_LDF: Tensor
    w3_LFD: Tensor


def forward_steps(
    x_TD: Tensor,
    scores_TK: Tensor,
    expert_ids_TK: Tensor,
    w1_LFD: Tensor,
    w2_LDF: Tensor,
    w3_LFD: Tensor,
    *,
    heap: SymmetricHeap,
    config: KernelConfig,
    numerics: Numerics = STOCK,
    save: bool = False,
    room: Room | None = None,
    timeline: Timeline | None = None,
) -> Generator[None, None, tuple[Tensor, Saved | None]]:
    """One forward without autograd, in steps: exchange, plan, dispatch + up GEMM, down GEMM + combine, the rest.
    Returns the output, which fast numerics do not change, and what `backward_steps` needs if save. A timeline that is
    recording gets every task.

    It stops between launches, so that one host thread can drive the virtual ranks of a GPU side by side: a kernel waits
    for those of the other ranks, which must then be launched before the host waits for anything. Also torch's own
    kernels count as waiting, for each loads its code at its first launch.

    Raises:
        ValueError: an input does not fit the heap's layout, or CUDA_DEVICE_MAX_CONNECTIONS is 1.
        WaitTimeoutError: this forward's exchange or a kernel of an earlier forward or backward gave up a wait.
    """
    _check_inputs(x_TD, w1_LFD, w2_LDF, w3_LFD, heap)
    (num_tokens, dim), top_k = x_TD.shape, expert_ids_TK.shape[1]
    x_TD, scores_TK = x_TD.contiguous(), scores_TK.contiguous()
    w1_LFD, w2_LDF, w3_LFD = (_for_kernels(weight) for weight in (w1_LFD, w2_LDF, w3_LFD))
    score_before_experts = numerics.score_before_experts
    in_kernel = reduces_in_kernel(num_tokens, dim, score_before_experts=score_before_experts)
    room = room or heap.room
    epoch = heap.next_epoch()
    keeps_rows = save and not score_before_experts and not numerics.fast
    returned = heap.take_returned(keep=keeps_rows)
    launch_exchange_routing(expert_ids_TK, scores_TK, heap, epoch=epoch, returned=returned, timeline=timeline)
    yield
    plan, sizes = launch_build_plan(heap, by_priority=config.by_priority)
    # Before the combine: after it, peers may already write those of the next forward.
    scores_WMK = heap.region("scores").clone() if save and not score_before_experts else None
    yield
    while True:
        room_rows = room.begin(num_tokens)
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
            save_halves=save,
            compiled=numerics.compiled,
            timeline=timeline,
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
            reduce_in_kernel=in_kernel,
            returned=returned,
            timeline=timeline,
        )
        yield
        # The device knew R before the dispatch began, so this waits for no kernel of this forward that takes long.
        num_rows = sizes.num_rows()
        room.follow(num_rows)
        if num_rows <= room_rows:
            break
        # Otherwise neither kernel did more than send tokens: both once more, with the room that there is now.
    if not in_kernel:
        out_TD = reduce_by_torch(scores_TK, returned)
    if up.g_RF is None or up.u_RF is None:
        return out_TD, None
    y_TKD = None
    if keeps_rows:
        y_TKD = returned.of_tokens(num_tokens, top_k)
        y_TKD = y_TKD if returned.kept else y_TKD.clone()
    # A tensor without rows has no address, which a TMA descriptor needs.
    kept = slice(max(num_rows, 1))
    return out_TD, Saved(plan, up.x_RD[kept], up.g_RF[kept], up.u_RF[kept], scores_WMK, y_TKD)


def backward_steps(
    grad_TD: Tensor,
    saved: Saved,
    x_TD: Tensor | None,
    scores_TK: Tensor,
    expert_ids_TK: Tensor,
    w1_LFD: Tensor,
    w2_LDF: Tensor,
    w3_LFD: Tensor,
    *,
    heap: SymmetricHeap,
    config: KernelConfig,
    numerics: Numerics = STOCK,
    timeline: Timeline | None = None,
) -> Generator[None, None, Gradients]:
    """One backward, one launch that waits for peers a step: dispatch + GEMM through w2, gradients of the weights, GEMM
    through w1 and w3 + combine, the rest. It never waits for the device: a kernel that gave up a wait is reported by
    the next forward, or by `SymmetricHeap.check`.

    Args:
        grad_TD: gradients of the output.
        saved: what the forward left.
        x_TD: the forward's tokens if scores go before the experts, else None.
        scores_TK, expert_ids_TK, w1_LFD, w2_LDF, w3_LFD, heap, config, numerics, timeline: the forward's.
    """
    score_before_experts = numerics.score_before_experts
    scores_at_experts = numerics.fast and not score_before_experts
    grad_TD, scores_TK = grad_TD.contiguous(), scores_TK.contiguous()
    expert_ids_TK = expert_ids_TK.contiguous()
    w1_LFD, w2_LDF, w3_LFD = (_for_kernels(weight) for weight in (w1_LFD, w2_LDF, w3_LFD))
    epoch, returned = heap.next_epoch(), heap.take_returned(keep=False)
    grad_scores_TK = torch.empty_like(scores_TK)
    rows = launch_dispatch_gemm_backward(
        grad_TD,
        w2_LDF,
        saved.g_RF,
        saved.u_RF,
        saved.scores_WMK,
        saved.plan,
        heap,
        config=config,
        epoch=epoch,
        scores_at_experts=scores_at_experts,
        compiled=numerics.compiled,
        timeline=timeline,
    )
    dispatched = torch.cuda.current_stream().record_event() if grad_TD.is_cuda else None
    yield
    wgrad_config = config.wgrad or replace(default_wgrad_config(heap.device), num_programs=config.num_programs)
    # Work that waits for no peer, between two kernels that do: it takes up what one rank is ahead of another.
    grad_w1_LFD, grad_w2_LDF, grad_w3_LFD = launch_wgrad(
        rows.grad_g_RF,
        rows.grad_u_RF,
        rows.grad_y_RD,
        saved.x_RD,
        rows.h_RF,
        saved.plan.expert_offsets,
        shape=heap.layout.shape,
        config=wgrad_config,
        timeline=timeline,
    )
    if saved.y_TKD is not None:
        _grad_scores(grad_TD, saved.y_TKD, grad_scores_TK, beside=dispatched)
    yield
    grad_x_TD = launch_gemm_combine_backward(
        rows.grad_g_RF,
        rows.grad_u_RF,
        w1_LFD,
        w3_LFD,
        scores_TK,
        expert_ids_TK,
        saved.plan,
        heap,
        config=config,
        epoch=epoch,
        score_before_experts=score_before_experts,
        returned=returned,
        round_all=not numerics.fast,
        score_parts_RP=rows.score_parts_RP,
        timeline=timeline,
    )
    yield
    if scores_at_experts:
        grad_scores_TK = returned_score_grads(len(scores_TK), heap).clone()
    elif score_before_experts:
        assert x_TD is not None
        grad_scores_TK = _grad_scores_before(returned.of_tokens(*scores_TK.shape), x_TD, scores_TK)
    return Gradients(grad_x_TD, grad_scores_TK, grad_w1_LFD, grad_w2_LDF, grad_w3_LFD)


def _grad_scores(grad_TD: Tensor, y_TKD: Tensor, grad_scores_TK: Tensor, *, beside: torch.cuda.Event | None) -> None:
    """Fills grad_scores_TK by the stock block's own operation, or where its order is known by a kernel with the same
    bits.

    That kernel only reads memory while the products of the weights' gradients hardly do: it starts with the event
    `beside` them, on a stream of its own, and the current stream waits for it. What it writes must have been allocated
    before that event: memory that is given out later may still be in use by what runs beside.
    """
    if beside is None or not dots_in_kernel(*y_TKD.shape):
        dots = torch.bmm(grad_TD.float().unsqueeze(1), y_TKD.float().transpose(1, 2))
        grad_scores_TK.copy_(dots.view_as(grad_scores_TK))
        return
    side, current = _side_stream(grad_TD.device), torch.cuda.current_stream()
    side.wait_event(beside)
    with torch.cuda.stream(side):
        launch_score_grad(grad_TD, y_TKD, grad_scores_TK)
    current.wait_stream(side)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for good: torch hands out the same few streams in turn, also to those who wait on theirs for long."""
    return torch.cuda.Stream(device)


def _grad_scores_before(grad_rows_TKD: Tensor, x_TD: Tensor, scores_TK: Tensor) -> Tensor:
    """The same for scores that go before the experts: a row's fp32 products summed over D by Tensor.sum."""
    _, top_k, dim = grad_rows_TKD.shape
    x_ND = x_TD.repeat_interleave(top_k, 0)
    return (grad_rows_TKD.view(-1, dim).float() * x_ND.float()).sum(1, keepdim=True).view_as(scores_TK)


def fused_forward(*tensors: Tensor, **options: Any) -> Tensor:
    """`forward_steps` in one go. All ranks call it together, with any number of tokens up to the heap's max_tokens."""
    out_TD, _ = _finish(forward_steps(*tensors, **options))
    return out_TD


@torch.no_grad()
def compile_layer(
    grad_TD: Tensor,
    x_TD: Tensor,
    *tensors: Tensor,
    heap: SymmetricHeap,
    configs: Sequence[KernelConfig],
    numerics: Numerics = STOCK,
    num_threads: int = 8,
) -> None:
    """Compiles what forwards and backwards with any of these configurations launch, num_threads kernels at once. None
    of them runs and no rank waits for another, but all ranks of the heap must call it together: epochs are counted.

    Args:
        grad_TD: as `backward_steps` takes it. The values of all tensors are of no account.
        x_TD, tensors, heap, numerics: as `fused_moe` takes them.
    """
    more: dict[str, Any] = {"heap": heap, "numerics": numerics}
    with only_compiling(num_threads):
        for config in configs:
            steps = forward_steps(x_TD, *tensors, config=config, save=True, room=Room(heap.layout), **more)
            _, saved = _finish(steps)
            assert saved is not None
            _finish(backward_steps(grad_TD, saved, x_TD, *tensors, config=config, **more))


def _finish(steps: Generator[None, None, _Result], on_step: Callable[[int], None] | None = None) -> _Result:
    with _unfilled():
        for number in itertools.count():
            if on_step is not None:
                on_step(number)
            try:
                next(steps)
            except StopIteration as end:
                return end.value
    raise AssertionError("unreachable")


@contextlib.contextmanager
def _unfilled() -> Iterator[None]:
    """Deterministic mode fills new tensors with NaN, which takes as long as writing a layer's rows once more. Here all
    that is read has been written before, as tests with poisoned buffers show."""
    mode: Any = torch.utils.deterministic  # a module with a property, which type checkers do not see
    fills = mode.fill_uninitialized_memory
    mode.fill_uninitialized_memory = False
    try:
        yield
    finally:
        mode.fill_uninitialized_memory = fills


class _FusedMoE(torch.autograd.Function):
    """Everything that a backward needs goes through save_for_backward, also the plan: what a checkpointed forward
    saves is freed after it, and comes from the forward that is run again."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(
        ctx: Any,
        x_TD: Tensor,
        scores_TK: Tensor,
        expert_ids_TK: Tensor,
        w1_LFD: Tensor,
        w2_LDF: Tensor,
        w3_LFD: Tensor,
        room: Room | None,
        on_step: Callable[[int], None] | None,
        options: Mapping[str, Any],
    ) -> Tensor:
        """options: what `forward_steps` and `backward_steps` both take."""
        inputs = (scores_TK, expert_ids_TK, w1_LFD, w2_LDF, w3_LFD)
        out_TD, saved = _finish(forward_steps(x_TD, *inputs, save=True, room=room, **options), on_step)
        assert saved is not None
        saved_x = x_TD if options["numerics"].score_before_experts else None
        rows = (saved.x_RD, saved.g_RF, saved.u_RF, saved.scores_WMK, saved.y_TKD)
        ctx.save_for_backward(saved_x, *inputs, *rows, *saved.plan.tensors)
        ctx.options = options
        return out_TD

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        inputs, rows, plan_tensors = tensors[:6], tensors[6:11], tensors[11:]
        x_RD, g_RF, u_RF, scores_WMK, y_TKD = rows
        saved = Saved(RoutingPlan(*plan_tensors), x_RD, g_RF, u_RF, scores_WMK, y_TKD)
        got = _finish(backward_steps(grads[0], saved, *inputs, **ctx.options))
        weights = zip((got.w1_LFD, got.w2_LDF, got.w3_LFD), inputs[3:], strict=True)
        grad_weights = (grad.to(weight.dtype) for grad, weight in weights)
        return got.x_TD, got.scores_TK, None, *grad_weights, None, None, None


def fused_moe(
    x_TD: Tensor,
    scores_TK: Tensor,
    expert_ids_TK: Tensor,
    w1_LFD: Tensor,
    w2_LDF: Tensor,
    w3_LFD: Tensor,
    *,
    heap: SymmetricHeap,
    config: KernelConfig,
    numerics: Numerics = STOCK,
    room: Room | None = None,
    timeline: Timeline | None = None,
    on_step: Callable[[int], None] | None = None,
) -> Tensor:
    """The routed experts of one MoE layer, bit for bit `uniep.reference.reference_moe`, forward and backward.

    All ranks of the heap make the same forwards and backwards in the same order, each on one stream.

    Args:
        x_TD: bf16 tokens of this rank, at most the heap's max_tokens.
        scores_TK: fp32 routing scores.
        expert_ids_TK: distinct experts of each token, in [0, E).
        w1_LFD, w2_LDF, w3_LFD: this rank's experts; taken in bf16.
        heap: open, of the layer's shape; shared by all layers of that shape.
        config: how the kernels share the GPU.
        numerics: as the model's stock block has them; or fast.
        room: the layer's, which follows its routing from forward to forward; the heap's if it has none, and for
            forwards that autograd does not record: they keep no rows, and validation's may be many more.
        timeline: records every task of this layer while it is recording, and changes no bit.
        on_step: for timing, called with a number of FORWARD_STEPS before each step of a forward that autograd records.
            Where rows had no room, there are more steps.
    """
    tensors = (x_TD, scores_TK, expert_ids_TK, w1_LFD, w2_LDF, w3_LFD)
    options = {"heap": heap, "config": config, "numerics": numerics, "timeline": timeline}
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _FusedMoE.apply(*tensors, room, on_step, options)
    return fused_forward(*tensors, **options)


def _for_kernels(weight: Tensor) -> Tensor:
    return weight.to(torch.bfloat16).contiguous()


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
