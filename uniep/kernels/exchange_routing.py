"""Gathers the expert ids and the scores of all ranks through the heap: the first kernel of a forward."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from uniep.kernels.launch import ceil_div, launch, next_power_of_2
from uniep.kernels.memory import region_address
from uniep.kernels.signals import fence_system, signal_all_ranks, wait_all_ranks
from uniep.kernels.tasks import FINISHED, is_last
from uniep.kernels.timeline import ROLE_MEET, ROLE_SEND, Role, Timeline, launch_records, task_begins, task_ends, time_ns
from uniep.symmetric.heap import SymmetricHeap
from uniep.symmetric.returned import ReturnedBuffer
from uniep.symmetric.watch import Kernel, What

_KERNEL = tl.constexpr(int(Kernel.EXCHANGE_ROUTING))
_ROUTING = tl.constexpr(int(What.ROUTING))
_NUM_PROGRAMS = 16
_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["rank", "num_routed", "epoch", "timeout_us", "returned_offset_bytes"])
def _exchange_routing_kernel(
    expert_ids_N,
    scores_N,
    peers_W,
    counters,
    watch,
    records,
    rank,
    num_routed,
    epoch,
    timeout_us,
    returned_offset_bytes: tl.int64,  # one binary for offsets on both sides of 2 GiB
    ids_offset_bytes,
    scores_offset_bytes,
    offsets_offset_bytes,
    flags_offset_bytes,
    NUM_SLOTS: tl.constexpr,
    W: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Every program writes its share of this rank's ids and scores to all ranks (also to itself), slots without a
    token as -1, the first program also where this rank wants its rows back. The program that finishes last signals all
    ranks, then waits for the signals of all. What it waits for is the work of programs that wait for nothing, so one
    program a rank is enough.

    Two ranks: rank 0's last program stores epoch into routing_flags[0] of rank 0 and of rank 1, and leaves once
    routing_flags[0] and [1] of its own heap hold the epoch.
    """
    begun = task_begins(records, LANES)
    block = tl.program_id(0)
    while block * BLOCK < NUM_SLOTS:
        slot = block * BLOCK + tl.arange(0, BLOCK)
        filled = slot < num_routed
        ids = tl.load(expert_ids_N + slot, mask=filled, other=-1).to(tl.int32)
        scores = tl.load(scores_N + slot, mask=filled, other=0.0)
        for step in range(W):
            peer = (rank + step) % W
            target_ids = region_address(peers_W, peer, ids_offset_bytes).to(tl.pointer_type(tl.int32))
            target_scores = region_address(peers_W, peer, scores_offset_bytes).to(tl.pointer_type(tl.float32))
            place = rank.to(tl.int64) * NUM_SLOTS + slot
            tl.store(target_ids + place, ids, mask=slot < NUM_SLOTS)
            tl.store(target_scores + place, scores, mask=slot < NUM_SLOTS)
        block += tl.num_programs(0)
    if tl.program_id(0) == 0:
        ranks = tl.arange(0, RANKS)
        offsets = tl.load(peers_W + ranks, mask=ranks < W, other=0) + offsets_offset_bytes + rank.to(tl.int64) * 8
        wanted = tl.zeros((RANKS,), tl.int64) + returned_offset_bytes
        tl.store(offsets.to(tl.pointer_type(tl.int64)), wanted, mask=ranks < W)
    fence_system()
    task_ends(records, begun, ROLE_SEND, tl.program_id(0), LANES)
    if is_last(counters, FINISHED, tl.num_programs(0)):
        begun = task_begins(records, LANES)
        signal_all_ranks(peers_W, flags_offset_bytes, rank, epoch, watch, W, RANKS)
        wait_all_ranks(peers_W, flags_offset_bytes, rank, epoch, watch, timeout_us, _KERNEL, _ROUTING, W, RANKS)
        task_ends(records, begun, ROLE_MEET, tl.program_id(0), LANES, work_ns=time_ns(records))
        tl.store(counters + FINISHED, 0)


def launch_exchange_routing(
    expert_ids_TK: Tensor,
    scores_TK: Tensor,
    heap: SymmetricHeap,
    *,
    epoch: int,
    returned: ReturnedBuffer,
    timeline: Timeline | None = None,
) -> None:
    """Fills the regions expert_ids and scores of every rank's heap with the routing of all ranks, and returned_offsets
    with where they want their rows back."""
    layout = heap.layout
    num_tokens, top_k = expert_ids_TK.shape
    if top_k != layout.shape.top_k:
        raise ValueError(f"experts a token must be top_k = {layout.shape.top_k}, got {top_k}")
    if expert_ids_TK.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"expert ids must be int32 or int64, got {expert_ids_TK.dtype}")
    if num_tokens > layout.max_tokens:
        raise ValueError(
            f"tokens of rank {heap.rank} must be at most max_tokens = {layout.max_tokens}, got {num_tokens}"
        )
    if scores_TK.shape != expert_ids_TK.shape or scores_TK.dtype != torch.float32:
        raise ValueError(
            f"scores must be float32 {tuple(expert_ids_TK.shape)}, got {scores_TK.dtype} {scores_TK.shape}"
        )
    num_ranks = heap.num_ranks
    link_role = Role.SEND if num_ranks > 1 else None
    num_programs = min(_NUM_PROGRAMS, ceil_div(layout.max_tokens * top_k, _BLOCK))
    launch(
        _exchange_routing_kernel,
        num_programs,
        expert_ids_TK.contiguous(),
        scores_TK.contiguous(),
        heap.peers_W,
        heap.scoreboard.counters,
        heap.scoreboard.watch,
        launch_records(timeline, "exchange", num_programs=num_programs, link_role=link_role),
        heap.rank,
        num_tokens * top_k,
        epoch,
        heap.timeout_us,
        returned.offset_bytes,
        heap.offset_bytes("expert_ids"),
        heap.offset_bytes("scores"),
        heap.offset_bytes("returned_offsets"),
        heap.offset_bytes("routing_flags"),
        NUM_SLOTS=layout.max_tokens * top_k,
        W=num_ranks,
        RANKS=next_power_of_2(num_ranks),
        BLOCK=_BLOCK,
        LANES=32 * _NUM_WARPS,
        num_warps=_NUM_WARPS,
    )
