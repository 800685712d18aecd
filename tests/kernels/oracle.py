"""The routed experts of all ranks at once, with the numerics contract's roundings, in plain torch on one process."""

from dataclasses import dataclass

import torch
from torch import Tensor

from uniep.shapes import MoEShape


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
    for x_TD, scores_TK, ids_TK in zip(batch.x, batch.scores, batch.expert_ids, strict=True):
        y_TKD = torch.empty(*ids_TK.shape, x_TD.shape[1], dtype=torch.bfloat16)
        for expert in range(batch.shape.num_experts):
            token, k = (ids_TK == expert).nonzero(as_tuple=True)
            rows = x_TD[token]
            if score_before_experts:
                rows = (rows.float() * scores_TK[token, k, None]).bfloat16()
            gate = mm(rows, batch.w1_EFD[expert])
            up = mm(rows, batch.w3_EFD[expert])
            y_TKD[token, k] = mm(torch.nn.functional.silu(gate) * up, batch.w2_EDF[expert])
        outs.append(combine_ref(y_TKD, None if score_before_experts else scores_TK))
    return outs


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
