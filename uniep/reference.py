"""The oracle: TorchTitan's expert-parallel MoE block in plain PyTorch and collectives, forward and backward.

Every line is a rule of docs/numerics.md. On GPUs the results equal TorchTitan 0.2.2's own block (`MoE.forward` under
`ExpertParallel`: NCCL all-to-all, `torch._grouped_mm`, eager) bit for bit; the fused kernels must equal this file.
On CPUs, where the stock block cannot run, it computes in the dtype of its inputs (bf16 products are taken in fp32 and
rounded once, as the tensor cores do).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

from uniep.numerics import STOCK, Numerics

# torch._grouped_mm wants a group's first row at 16 bytes: 8 bf16 rows, TorchTitan's TOKEN_GROUP_ALIGN_SIZE_M.
GROUP_ALIGN_ROWS = 8


@dataclass(frozen=True)
class Routes:
    """Where the rows of one rank go and where those it receives lie.

    Attributes:
        order_N: int64, sorted position -> flat index t*K+k; a stable sort by expert, so by destination rank too.
        send_rows_W, receive_rows_W: rows to and from each rank, on the host.
        place_R: int64, received position (by source rank, expert, flat index) -> row of the expert-ordered buffer, in
            which each expert's rows lie by (source rank, flat index) and start at a multiple of 8.
        ends_L: int32, the first row after each expert's padded group.
    """

    order_N: Tensor
    send_rows_W: list[int]
    receive_rows_W: list[int]
    place_R: Tensor
    ends_L: Tensor

    @property
    def num_padded_rows(self) -> int:
        """P, a bound on the rows of the expert-ordered buffer that needs no read of the device."""
        return len(self.place_R) + GROUP_ALIGN_ROWS * len(self.ends_L)


def route(expert_ids_TK: Tensor, num_local_experts: int, group: dist.ProcessGroup | None) -> Routes:
    """Exchanges the counts and lays out the rows (`TokenReorderer`, `ExpertParallel._token_dispatch`, `_permute`)."""
    num_ranks = 1 if group is None else group.size()
    num_experts = num_local_experts * num_ranks
    device = expert_ids_TK.device

    flat_ids_N = expert_ids_TK.reshape(-1)
    order_N = torch.argsort(flat_ids_N, stable=True)
    # Counted from the sorted ids, not by bincount, which has no deterministic CUDA form.
    first_E1 = torch.searchsorted(flat_ids_N[order_N], torch.arange(num_experts + 1, device=device))
    send_WL = first_E1.diff().view(num_ranks, -1)
    receive_WL = _all_to_all(send_WL, None, None, group)
    send_rows_W, receive_rows_W = torch.stack([send_WL.sum(1), receive_WL.sum(1)]).tolist()

    expert_R = torch.arange(num_local_experts, device=device).repeat(num_ranks)
    expert_R = torch.repeat_interleave(expert_R, receive_WL.reshape(-1), output_size=sum(receive_rows_W))
    by_expert_R = torch.argsort(expert_R, stable=True)
    rows_L = receive_WL.sum(0)
    padded_L = rows_L.clamp_min(1).add(GROUP_ALIGN_ROWS - 1).div(GROUP_ALIGN_ROWS, rounding_mode="floor")
    ends_L = torch.cumsum(padded_L * GROUP_ALIGN_ROWS, 0)
    shift_L = ends_L - padded_L * GROUP_ALIGN_ROWS - (torch.cumsum(rows_L, 0) - rows_L)
    place_R = torch.empty_like(by_expert_R)
    place_R[by_expert_R] = torch.arange(len(by_expert_R), device=device) + shift_L[expert_R[by_expert_R]]
    return Routes(order_N, send_rows_W, receive_rows_W, place_R, ends_L.to(torch.int32))


def dispatch(rows_ND: Tensor, routes: Routes, group: dist.ProcessGroup | None) -> Tensor:
    """Rows in sorted order -> the expert-ordered buffers [P, D] of their experts' ranks, zero between groups."""
    rows_RD = _all_to_all(rows_ND, routes.receive_rows_W, routes.send_rows_W, group)
    rows_PD = rows_RD.new_zeros(routes.num_padded_rows, rows_RD.shape[1])
    rows_PD[routes.place_R] = rows_RD
    return rows_PD


def combine(rows_PD: Tensor, routes: Routes, group: dist.ProcessGroup | None) -> Tensor:
    """The way back: the expert-ordered buffer -> rows [N, D] in flat order t*K+k on the ranks they came from."""
    sorted_ND = _all_to_all(rows_PD[routes.place_R], routes.send_rows_W, routes.receive_rows_W, group)
    rows_ND = torch.empty_like(sorted_ND)
    rows_ND[routes.order_N] = sorted_ND
    return rows_ND


def grouped_mm(a_PX: Tensor, b_LXY: Tensor, ends_L: Tensor) -> Tensor:
    """Rows of each group times that group's matrix -> [P, Y]: fp32 accumulator, X ascending, one rounding."""
    if a_PX.is_cuda:
        return torch._grouped_mm(a_PX, b_LXY, offs=ends_L)
    out_PY = a_PX.new_zeros(len(a_PX), b_LXY.shape[2])
    for expert, (start, end) in enumerate(_spans(ends_L)):
        out_PY[start:end] = _mm(a_PX[start:end], b_LXY[expert])
    return out_PY


def grouped_wgrad(grad_PY: Tensor, a_PX: Tensor, ends_L: Tensor) -> Tensor:
    """Transposed GroupGEMM: grad^T a over each group's rows -> [L, Y, X]; exact zeros for a group without rows."""
    if a_PX.is_cuda:
        return torch._grouped_mm(grad_PY.t(), a_PX, offs=ends_L)
    return torch.stack([_mm(grad_PY[start:end].t(), a_PX[start:end]) for start, end in _spans(ends_L)])


def sum_over_k(rows_TKD: Tensor) -> Tensor:
    """`rows.sum(dim=1)` as CUDA takes it: four interleaved fp32 partial sums, added in order, one rounding."""
    partial = [torch.zeros_like(rows_TKD[:, 0], dtype=torch.float32) for _ in range(4)]
    for k in range(rows_TKD.shape[1]):
        partial[k % 4] = partial[k % 4] + rows_TKD[:, k].float()
    return (((partial[0] + partial[1]) + partial[2]) + partial[3]).to(rows_TKD.dtype)


def sum_by_expert(rows_TKD: Tensor, expert_ids_TK: Tensor) -> Tensor:
    """The backward of `x[order // K]`: a token's K rows in ascending expert order, rounded after every addition."""
    by_expert_TK = torch.argsort(expert_ids_TK, dim=1, stable=True)
    sum_TD = torch.zeros_like(rows_TKD[:, 0])
    for k in range(rows_TKD.shape[1]):
        index_T1D = by_expert_TK[:, k, None, None].expand(-1, 1, rows_TKD.shape[2])
        sum_TD = sum_TD + rows_TKD.gather(1, index_T1D).squeeze(1)
    return sum_TD


def swiglu(gate_PF: Tensor, up_PF: Tensor) -> Tensor:
    """h of both halves."""
    return F.silu(gate_PF) * up_PF


def swiglu_grads(grad_h_PF: Tensor, gate_PF: Tensor, up_PF: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    return torch.ops.aten.silu_backward(grad_h_PF * up_PF, gate_PF), grad_h_PF * F.silu(gate_PF)


def _swiglu_fp32(gate_PF: Tensor, up_PF: Tensor) -> Tensor:
    gate = gate_PF.float()
    return (gate / ((-gate).exp() + 1) * up_PF.float()).to(gate_PF.dtype)


def _swiglu_grads_fp32(grad_h_PF: Tensor, gate_PF: Tensor, up_PF: Tensor) -> tuple[Tensor, Tensor]:
    grad_h, gate, up = grad_h_PF.float(), gate_PF.float(), up_PF.float()
    denominator = (-gate).exp() + 1
    sigmoid = 1 / denominator
    grad_gate = grad_h * up * sigmoid * (gate * (1 - sigmoid) + 1)
    return grad_gate.to(gate_PF.dtype), (grad_h * (gate / denominator)).to(gate_PF.dtype)


@functools.cache
def compiled_swiglu(device_type: str) -> tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]:
    """`swiglu` and `swiglu_grads` as torch.compile rounds them: each result once. On a GPU it is torch.compile, whose
    exp and division are its own; on a CPU, where no stock block can be compiled, the same in fp32."""
    if device_type == "cuda":
        return torch.compile(swiglu, dynamic=True), torch.compile(swiglu_grads, dynamic=True)
    return _swiglu_fp32, _swiglu_grads_fp32


class _ReferenceMoE(torch.autograd.Function):
    # Without FSDP (one GPU) TorchTitan trains under autocast; these two give the backward the forward's.
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
        group: dist.ProcessGroup | None,
        numerics: Numerics,
    ) -> Tensor:
        score_before_experts = numerics.score_before_experts
        (num_tokens, dim), top_k = x_TD.shape, expert_ids_TK.shape[1]
        compute_dtype = _compute_dtype(x_TD)
        w1, w2, w3 = (w.to(compute_dtype) for w in (w1_LFD, w2_LDF, w3_LFD))
        routes = route(expert_ids_TK, len(w1_LFD), group)

        rows_ND = x_TD[routes.order_N // top_k]
        if score_before_experts:
            rows_ND = (rows_ND.float() * scores_TK.reshape(-1)[routes.order_N].reshape(-1, 1)).to(x_TD.dtype)
        a_PD = dispatch(rows_ND, routes, group).to(compute_dtype)
        gate_PF = grouped_mm(a_PD, w1.transpose(1, 2), routes.ends_L)
        up_PF = grouped_mm(a_PD, w3.transpose(1, 2), routes.ends_L)
        h_of, grads_of = compiled_swiglu(x_TD.device.type) if numerics.compiled else (swiglu, swiglu_grads)
        y_PD = grouped_mm(h_of(gate_PF, up_PF), w2.transpose(1, 2), routes.ends_L).to(x_TD.dtype)
        y_TKD = combine(y_PD, routes, group).view(num_tokens, top_k, dim)
        if score_before_experts:
            out_TD = sum_over_k(y_TKD)
        else:
            out_TD = torch.bmm(scores_TK.reshape(-1, 1, top_k), y_TKD.float()).squeeze(1).to(x_TD.dtype, copy=True)

        ctx.routes, ctx.group, ctx.score_before_experts = routes, group, score_before_experts
        ctx.swiglu = h_of, grads_of
        saved_y = None if score_before_experts else y_TKD
        saved_x = x_TD if score_before_experts else None
        ctx.save_for_backward(scores_TK, expert_ids_TK, w1_LFD, w2_LDF, w3_LFD, a_PD, gate_PF, up_PF, saved_y, saved_x)
        return out_TD

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad_TD,) = grads
        scores_TK, expert_ids_TK, w1_LFD, w2_LDF, w3_LFD, a_PD, gate_PF, up_PF, y_TKD, x_TD = ctx.saved_tensors
        routes: Routes = ctx.routes
        (num_tokens, dim), top_k = grad_TD.shape, expert_ids_TK.shape[1]
        dtype, compute_dtype = grad_TD.dtype, a_PD.dtype
        w1, w2, w3 = (w.to(compute_dtype) for w in (w1_LFD, w2_LDF, w3_LFD))

        if ctx.score_before_experts:
            grad_y_ND = grad_TD[:, None, :].expand(-1, top_k, -1).reshape(-1, dim)
        else:
            grad_T1D = grad_TD.float().unsqueeze(1)
            grad_scores_TK = torch.bmm(grad_T1D, y_TKD.float().transpose(1, 2)).view_as(scores_TK)
            grad_y_ND = torch.bmm(scores_TK.unsqueeze(2), grad_T1D).to(dtype).view(-1, dim)

        grad_PD = dispatch(grad_y_ND[routes.order_N], routes, ctx.group).to(compute_dtype)
        h_of, grads_of = ctx.swiglu
        grad_w2 = grouped_wgrad(grad_PD, h_of(gate_PF, up_PF), routes.ends_L)
        grad_h_PF = grouped_mm(grad_PD, w2, routes.ends_L)
        grad_gate_PF, grad_up_PF = grads_of(grad_h_PF, gate_PF, up_PF)
        grad_w1 = grouped_wgrad(grad_gate_PF, a_PD, routes.ends_L)
        grad_w3 = grouped_wgrad(grad_up_PF, a_PD, routes.ends_L)
        grad_a_PD = grouped_mm(grad_gate_PF, w1, routes.ends_L).to(dtype)
        grad_a_PD = grad_a_PD + grouped_mm(grad_up_PF, w3, routes.ends_L).to(dtype)

        grad_rows_ND = combine(grad_a_PD, routes, ctx.group)
        if ctx.score_before_experts:
            grad_rows_NF32 = grad_rows_ND.float()
            x_ND = x_TD.repeat_interleave(top_k, 0)
            grad_scores_TK = (grad_rows_NF32 * x_ND.float()).sum(1, keepdim=True).view_as(scores_TK)
            grad_rows_ND = (grad_rows_NF32 * scores_TK.reshape(-1, 1)).to(dtype)
        grad_x_TD = sum_by_expert(grad_rows_ND.view(num_tokens, top_k, dim), expert_ids_TK)
        grad_w1, grad_w2, grad_w3 = grad_w1.to(w1_LFD.dtype), grad_w2.to(w2_LDF.dtype), grad_w3.to(w3_LFD.dtype)
        return grad_x_TD, grad_scores_TK, None, grad_w1, grad_w2, grad_w3, None, None


def reference_moe(
    x_TD: Tensor,
    scores_TK: Tensor,
    expert_ids_TK: Tensor,
    w1_LFD: Tensor,
    w2_LDF: Tensor,
    w3_LFD: Tensor,
    *,
    group: dist.ProcessGroup | None,
    numerics: Numerics = STOCK,
) -> Tensor:
    """The routed experts of one MoE layer, from the router's choice to the combined output, with autograd.

    Args:
        x_TD: tokens of this rank, bf16 (fp32 on CPUs and where no FSDP casts them).
        scores_TK: fp32 routing scores.
        expert_ids_TK: int64 in [0, E), the experts of each token.
        w1_LFD, w2_LDF, w3_LFD: this rank's experts, out = w2 (silu(w1 x) * w3 x).
        group: the expert-parallel ranks, or None for one rank.
        numerics: as the stock block has them; not fast, which the fused kernels alone can be.

    Returns:
        out_TD in the dtype of x_TD.

    Source: torchtitan.models.moe.moe.MoE.forward, torchtitan.distributed.expert_parallel.ExpertParallel.
    """
    if numerics.fast:
        raise ValueError(f"numerics must be the stock block's, got {numerics}")
    return _ReferenceMoE.apply(x_TD, scores_TK, expert_ids_TK, w1_LFD, w2_LDF, w3_LFD, group, numerics)


def _all_to_all(
    rows: Tensor, receive: list[int] | None, send: list[int] | None, group: dist.ProcessGroup | None
) -> Tensor:
    if group is None:
        return rows
    # The functional collective, as TorchTitan uses: selective checkpointing then saves its result instead of resending.
    out = funcol.all_to_all_single(rows.contiguous(), receive, send, group)
    return funcol.wait_tensor(out)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if x.is_cuda else x.dtype


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() @ b.float()).to(a.dtype)


def _spans(ends_L: Tensor) -> list[tuple[int, int]]:
    ends = ends_L.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))
