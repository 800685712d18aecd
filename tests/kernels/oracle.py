"""The routed experts of all ranks at once, with the numerics contract's roundings, in plain torch on one process."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from uniep.reference import sum_by_expert
from uniep.shapes import MoEShape


def poison_new_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.empty gives is read by nobody before it is written, or the test fails."""
    empty = torch.empty

    def poisoned(*size: int, **kind: object) -> Tensor:
        tensor = empty(*size, **kind)
        tensor.detach().fill_(float("nan") if tensor.is_floating_point() else -(2**30))
        return tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@dataclass(frozen=True)
class Batch:
    """Inputs of all ranks. Ranks may have different numbers of tokens."""

    shape: MoEShape
    x: list[Tensor]
    scores: list[Tensor]
    expert_ids: list[Tensor]
    w1_EFD: Tensor
    w2_EDF: Tensor
    w3_EFD: Tensor

    def weights(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """w1, w2, w3 of a rank's experts."""
        local = self.shape.num_local_experts
        own = slice(rank * local, (rank + 1) * local)
        return self.w1_EFD[own], self.w2_EDF[own], self.w3_EFD[own]


def draw_batch(shape: MoEShape, expert_ids: list[Tensor], seed: int, *, exact: bool) -> Batch:
    """exact: every sum of the block is exact in fp32, so that no order of additions can change a bit."""
    generator = torch.Generator().manual_seed(seed)
    num_experts, dim, hidden_dim = shape.num_experts, shape.dim, shape.hidden_dim

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    def signs(*size: int, density: float = 1.0) -> Tensor:
        kept = torch.rand(*size, generator=generator) < density
        return torch.where(kept, torch.randint(0, 2, size, generator=generator) * 2.0 - 1.0, 0.0)

    if exact:
        x = [signs(len(ids), dim) for ids in expert_ids]
        w1, w3 = (signs(num_experts, hidden_dim, dim, density=2.0 / dim) for _ in range(2))
        w2 = signs(num_experts, dim, hidden_dim, density=4.0 / hidden_dim)
        # Powers of two: a product with a bf16 number stays one.
        scores = [2.0 ** -torch.randint(0, 4, ids.shape, generator=generator).float() for ids in expert_ids]
    else:
        x = [normal(len(ids), dim) for ids in expert_ids]
        w1, w3 = (normal(num_experts, hidden_dim, dim) / dim**0.5 for _ in range(2))
        w2 = normal(num_experts, dim, hidden_dim) / hidden_dim**0.5
        scores = [torch.rand(ids.shape, generator=generator) for ids in expert_ids]
    return Batch(shape, [t.bfloat16() for t in x], scores, expert_ids, w1.bfloat16(), w2.bfloat16(), w3.bfloat16())


def moe_ref(batch: Batch, *, score_before_experts: bool) -> list[Tensor]:
    """out_TD of every rank."""
    outs = []
    for rank, y_TKD in enumerate(_outputs_of_experts(batch, score_before_experts)):
        outs.append(combine_ref(y_TKD, None if score_before_experts else batch.scores[rank]))
    return outs


@dataclass(frozen=True)
class BatchGradients:
    """Gradients of all ranks' inputs, and of all experts' weights."""

    x: list[Tensor]
    scores: list[Tensor]
    w1_EFD: Tensor
    w2_EDF: Tensor
    w3_EFD: Tensor

    def of_rank(self, rank: int, num_local: int) -> tuple[Tensor, ...]:
        """x, scores, w1, w2, w3."""
        own = slice(rank * num_local, (rank + 1) * num_local)
        return self.x[rank], self.scores[rank], self.w1_EFD[own], self.w2_EDF[own], self.w3_EFD[own]


def moe_backward_ref(batch: Batch, grads: list[Tensor], *, score_before_experts: bool) -> BatchGradients:
    """The gradients for grads, one [T, D] a rank."""
    y = _outputs_of_experts(batch, score_before_experts)
    grad_rows = [torch.empty_like(y_TKD) for y_TKD in y]
    grad_w1, grad_w2, grad_w3 = (torch.empty_like(w) for w in (batch.w1_EFD, batch.w2_EDF, batch.w3_EFD))
    for expert in range(batch.shape.num_experts):
        w1, w2, w3 = batch.w1_EFD[expert], batch.w2_EDF[expert], batch.w3_EFD[expert]
        routed = [(ids_TK == expert).nonzero(as_tuple=True) for ids_TK in batch.expert_ids]
        rows, grad_y = [], []
        for (token, k), x_TD, scores_TK, grad_TD in zip(routed, batch.x, batch.scores, grads, strict=True):
            scale = scores_TK[token, k, None]
            rows.append(_scaled(x_TD[token], scale) if score_before_experts else x_TD[token])
            grad_y.append(grad_TD[token] if score_before_experts else _scaled(grad_TD[token], scale))
        rows_RD, grad_y_RD = torch.cat(rows), torch.cat(grad_y)
        gate, up = mm(rows_RD, w1), mm(rows_RD, w3)
        silu = torch.nn.functional.silu(gate)
        grad_h = mm(grad_y_RD, w2.T)
        grad_up, grad_gate = grad_h * silu, torch.ops.aten.silu_backward(grad_h * up, gate)
        grad_w1[expert], grad_w3[expert] = mm(grad_gate.T, rows_RD.T), mm(grad_up.T, rows_RD.T)
        grad_w2[expert] = mm(grad_y_RD.T, (silu * up).T)
        grad_rows_RD = mm(grad_gate, w1.T) + mm(grad_up, w3.T)
        parts = grad_rows_RD.split([len(token) for token, _ in routed])
        for (token, k), part, grad_rows_TKD in zip(routed, parts, grad_rows, strict=True):
            grad_rows_TKD[token, k] = part

    grad_x, grad_scores = [], []
    for rank, (grad_TD, grad_rows_TKD) in enumerate(zip(grads, grad_rows, strict=True)):
        scores_TK, (num_tokens, top_k, dim) = batch.scores[rank], grad_rows_TKD.shape
        if score_before_experts:
            x_ND = batch.x[rank].repeat_interleave(top_k, 0)
            products_ND = grad_rows_TKD.view(-1, dim).float() * x_ND.float()
            grad_scores.append(products_ND.sum(1).view(num_tokens, top_k))
            grad_rows_TKD = _scaled(grad_rows_TKD, scores_TK[:, :, None])
        else:
            y_TDK = y[rank].float().transpose(1, 2)
            grad_scores.append(torch.bmm(grad_TD.float().unsqueeze(1), y_TDK).squeeze(1))
        grad_x.append(sum_by_expert(grad_rows_TKD, batch.expert_ids[rank]))
    return BatchGradients(grad_x, grad_scores, grad_w1, grad_w2, grad_w3)


def _outputs_of_experts(batch: Batch, score_before_experts: bool) -> list[Tensor]:
    """y_TKD of every rank: the experts' outputs for its tokens."""
    outputs = []
    for x_TD, scores_TK, ids_TK in zip(batch.x, batch.scores, batch.expert_ids, strict=True):
        y_TKD = torch.empty(*ids_TK.shape, x_TD.shape[1], dtype=torch.bfloat16)
        for expert in range(batch.shape.num_experts):
            token, k = (ids_TK == expert).nonzero(as_tuple=True)
            rows = x_TD[token]
            if score_before_experts:
                rows = _scaled(rows, scores_TK[token, k, None])
            gate = mm(rows, batch.w1_EFD[expert])
            up = mm(rows, batch.w3_EFD[expert])
            y_TKD[token, k] = mm(torch.nn.functional.silu(gate) * up, batch.w2_EDF[expert])
        outputs.append(y_TKD)
    return outputs


def _scaled(rows: Tensor, scale: Tensor) -> Tensor:
    return (rows.float() * scale).bfloat16()


def mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b^T in fp32, rounded once."""
    return (a.float() @ b.float().T).bfloat16()


def combine_ref(y_TKD: Tensor, scores_TK: Tensor | None) -> Tensor:
    """Weighted: multiply and add in fp32, k ascending (the interpreter has no fused form). Else four parts."""
    part = [torch.zeros(y_TKD.shape[0], y_TKD.shape[2]) for _ in range(4)]
    for k in range(y_TKD.shape[1]):
        if scores_TK is None:
            part[k % 4] = part[k % 4] + y_TKD[:, k].float()
        else:
            part[0] = scores_TK[:, k, None] * y_TKD[:, k].float() + part[0]
    return (part[0] if scores_TK is not None else ((part[0] + part[1]) + part[2]) + part[3]).bfloat16()


def moe_gradients_fp64(batch: Batch, grads: list[Tensor], *, score_before_experts: bool) -> BatchGradients:
    """The gradients without any rounding of bf16: the block in fp64, differentiated by autograd."""
    weights = [w.double().requires_grad_() for w in (batch.w1_EFD, batch.w2_EDF, batch.w3_EFD)]
    x = [x_TD.double().requires_grad_() for x_TD in batch.x]
    scores = [scores_TK.double().requires_grad_() for scores_TK in batch.scores]
    total = torch.zeros((), dtype=torch.float64, device=batch.w1_EFD.device)
    for x_TD, scores_TK, ids_TK, grad_TD in zip(x, scores, batch.expert_ids, grads, strict=True):
        for expert, (w1, w2, w3) in enumerate(zip(*weights, strict=True)):
            token, k = (ids_TK == expert).nonzero(as_tuple=True)
            rows, score = x_TD[token], scores_TK[token, k, None]
            rows = rows * score if score_before_experts else rows
            y = (torch.nn.functional.silu(rows @ w1.T) * (rows @ w3.T)) @ w2.T
            y = y if score_before_experts else y * score
            total = total + (y * grad_TD[token].double()).sum()
    got = torch.autograd.grad(total, (*x, *scores, *weights))
    num_ranks = len(x)
    return BatchGradients(list(got[:num_ranks]), list(got[num_ranks : 2 * num_ranks]), *got[2 * num_ranks :])
