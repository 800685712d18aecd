"""The deterministic token map (the paper's Algorithm 1): expert ids of all ranks -> the RoutingPlan of one rank.

Every rank computes its plan alone from the gathered ids, so no position is ever sent and no atomic decides an order.
`plan_ref` is the definition; `uniep.kernels.build_plan` makes the same tensors on the GPU.

Worked example: W=2 ranks, E=4 experts (0, 1 on rank 0; 2, 3 on rank 1), K=2, three tokens a rank, M = max_tokens = 3.

    expert ids, rank 0: t0 (0, 3)  t1 (2, 3)  t2 (2, 1)         rank 1: t0 (1, 3)  t1 (0, 2)  t2 (0, 1)

    origin = (source rank * M + t) * K + k numbers all routed rows: rank 0 has 0..5, rank 1 has 6..11. A token arrives
        in row origin // K of the receive buffer: no position is exchanged.
    Rows of rank 0: expert 0 receives origins 0, 8, 10 and expert 1 origins 5, 6, 11, so
        row_origin = [0, 8, 10, 5, 6, 11], expert_offsets = [0, 3, 6]
    Rank 1 sends each of its tokens once to rank 0, first those that rank 0's expert 0 wants (t1, t2), then t0:
        send_rows = [2, 4, 0] (flat t*K+k of the copy's first expert), send_offsets = [0, 3, 3]
    Rank 0's relay copies the one row of rank 1's t2 to two places: row 2 (expert 0) and row 5 (expert 1).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from uniep.plan.tiles import tile_table_ref
from uniep.shapes import MoEShape

# The expert id of a slot without a token, where a rank has fewer tokens than max_tokens.
NO_EXPERT = -1


@dataclass(frozen=True)
class RoutingPlan:
    """What one rank receives, sends and computes. All tensors are int32; those made on a GPU are longer than their
    content, whose length stands in the offsets, so that no kernel needs a number from the host.

    Attributes:
        expert_offsets: [L + 1], first row of each local expert, R at the end.
        row_origin_R: origin (source * M + t) * K + k of each row, by expert, then source rank, then t * K + k.
        send_offsets: [W + 1], where each destination's part of send_rows starts. A rank sends itself nothing.
        send_rows_N: flat t * K + k of the rows to send, by destination, then first local expert there, then token.
        tile_offsets, tile_expert, tile_first_row, tile_end_row: the tile table (`uniep.plan.tiles`).
    """

    expert_offsets: Tensor
    row_origin_R: Tensor
    send_offsets: Tensor
    send_rows_N: Tensor
    tile_offsets: Tensor
    tile_expert: Tensor
    tile_first_row: Tensor
    tile_end_row: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors in the order of the fields, for autograd to keep."""
        return tuple(vars(self).values())


def max_num_rows(shape: MoEShape, max_tokens: int) -> int:
    """The most rows that the experts of one rank can receive: a token goes to min(K, L) distinct experts there."""
    return shape.ep_degree * max_tokens * min(shape.top_k, shape.num_local_experts)


def plan_ref(
    expert_ids_WMK: Tensor,
    rank: int,
    shape: MoEShape,
    *,
    tile_rows: int,
    copy_per_expert: bool = False,
    by_priority: bool = True,
) -> RoutingPlan:
    """The plan of one rank.

    Args:
        expert_ids_WMK: the experts of every token of every rank; NO_EXPERT in slots without a token. A token's experts
            are distinct.
        rank: whose plan to make.
        shape: the layer.
        tile_rows: rows of a GEMM tile.
        copy_per_expert: send a token once for each expert instead of once for each rank.
        by_priority: order a destination's tokens by the first expert that wants them instead of by token.
    """
    num_local = shape.num_local_experts

    ids = expert_ids_WMK.reshape(-1).long()
    order = torch.argsort(ids, stable=True)
    local = ids[order] - rank * num_local
    mine = (local >= 0) & (local < num_local)
    rows_L = torch.bincount(local[mine], minlength=num_local)
    expert_offsets = _offsets(rows_L)
    tile_offsets, tile_expert, tile_first_row, tile_end_row = tile_table_ref(expert_offsets, tile_rows)

    ids_MK = expert_ids_WMK[rank].long()
    destination_MK = torch.where(ids_MK >= 0, ids_MK // num_local, -1)
    sent_MK = (destination_MK >= 0) & (destination_MK != rank)
    if not copy_per_expert:
        sent_MK &= _is_first_of_destination(ids_MK, destination_MK)
    key = ids_MK if by_priority else destination_MK * num_local
    flat = sent_MK.reshape(-1).nonzero().squeeze(1)
    send_rows = flat[torch.argsort(key.reshape(-1)[flat], stable=True)]
    sent_W = torch.bincount(destination_MK.reshape(-1)[send_rows], minlength=shape.ep_degree)

    return RoutingPlan(
        expert_offsets=expert_offsets,
        row_origin_R=order[mine].to(torch.int32),
        send_offsets=_offsets(sent_W),
        send_rows_N=send_rows.to(torch.int32),
        tile_offsets=tile_offsets,
        tile_expert=tile_expert,
        tile_first_row=tile_first_row,
        tile_end_row=tile_end_row,
    )


def _is_first_of_destination(ids_MK: Tensor, destination_MK: Tensor) -> Tensor:
    """Of a token's experts on one rank, the one with the smallest id: its turn decides when the token is sent."""
    same_rank_MKK = destination_MK[:, :, None] == destination_MK[:, None, :]
    smaller_MKK = ids_MK[:, None, :] < ids_MK[:, :, None]
    return ~(same_rank_MKK & smaller_MKK).any(2)


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
