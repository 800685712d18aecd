"""The RoutingPlan on the device: three kernels, a stable counting sort by expert over the gathered ids.

1. count: how many ids of each expert a block of BLOCK ids holds. Blocks never straddle two ranks.
2. scan: for each expert, the running sum over blocks; the last program makes offsets of experts and tiles of it.
3. scatter: each id's place is its expert's offset + its block's running sum + its rank within the block.

The rows that a rank receives are sorted among the ids of all ranks, for its own L experts; the rows that it sends
among its own ids, for the E experts. Both sorts share the kernels. The host reads R alone.

Worked example (that of uniep.plan.token_map, rank 0, BLOCK=2): the ids lie in blocks (0 3)(2 3)(2 1) | (1 3)(0 2)(0 1).
Expert 0 counts 1 0 0 0 1 1 and its running sum is 0 1 1 1 1 2; expert 1 counts 0 0 1 1 0 1. The totals 3 and 3 give
expert_offsets 0 3 6. The id 1 in the last block is its first of expert 1, whose running sum there is 2: row 3+2+0.
"""

import torch
import triton
import triton.language as tl

from uniep.kernels.launch import ceil_div, launch, next_power_of_2
from uniep.kernels.memory import region_address
from uniep.kernels.tasks import FINISHED, is_last
from uniep.plan.token_map import RoutingPlan
from uniep.symmetric.heap import SymmetricHeap

# Ids of a program, and those that each of them is compared with at once: the comparison lives in registers.
_BLOCK = 256
_COMPARED = 32


@triton.jit
def _ids_of_rank(peers_W, rank, ids_offset_bytes, source, NUM_SLOTS: tl.constexpr):
    """Where this rank's heap holds the ids of a source rank."""
    ids = region_address(peers_W, rank, ids_offset_bytes).to(tl.pointer_type(tl.int32))
    return ids + source.to(tl.int64) * NUM_SLOTS


@triton.jit
def _sent_key(
    own_ids,
    rank,
    slot,
    ids,
    NUM_SLOTS: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    COPY_PER_EXPERT: tl.constexpr,
    BY_PRIORITY: tl.constexpr,
):
    """The bin under which a row of this rank is sent, or -1: its expert, if it is its token's first expert there."""
    destination = ids // L
    sent = (ids >= 0) & (destination != rank)
    if not COPY_PER_EXPERT:
        token = slot // K
        for k in tl.static_range(K):
            other = tl.load(own_ids + token * K + k, mask=slot < NUM_SLOTS, other=-1)
            sent = sent & ((other < 0) | (other // L != destination) | (other >= ids))
    key = ids if BY_PRIORITY else destination * L
    return tl.where(sent, key, -1)


@triton.jit(do_not_specialize=["rank"])
def _count_kernel(
    peers_W,
    ids_offset_bytes,
    received_counts_LB,
    sent_counts_EB,
    sent_keys_N,
    rank,
    NUM_SLOTS: tl.constexpr,
    BLOCKS_OF_RANK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    BINS_L: tl.constexpr,
    BINS_E: tl.constexpr,
    COPY_PER_EXPERT: tl.constexpr,
    BY_PRIORITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a block. Ids that do not count fall into a bin of their own, past the experts."""
    block = tl.program_id(0)
    slot = (block % BLOCKS_OF_RANK) * BLOCK + tl.arange(0, BLOCK)
    source = block // BLOCKS_OF_RANK
    source_ids = _ids_of_rank(peers_W, rank, ids_offset_bytes, source, NUM_SLOTS)
    ids = tl.load(source_ids + slot, mask=slot < NUM_SLOTS, other=-1)

    local = ids - rank * L
    local = tl.where((local >= 0) & (local < L), local, L)
    bins = tl.arange(0, BINS_L)
    tl.store(received_counts_LB + bins * NUM_BLOCKS + block, tl.histogram(local, BINS_L), mask=bins < L)
    if source == rank:
        key = _sent_key(source_ids, rank, slot, ids, NUM_SLOTS, K, L, COPY_PER_EXPERT, BY_PRIORITY)
        tl.store(sent_keys_N + slot, key, mask=slot < NUM_SLOTS)
        bins_e = tl.arange(0, BINS_E)
        counts = tl.histogram(tl.where(key >= 0, key, E), BINS_E)
        tl.store(sent_counts_EB + bins_e * BLOCKS_OF_RANK + block % BLOCKS_OF_RANK, counts, mask=bins_e < E)


@triton.jit
def _scan_kernel(
    received_counts_LB,
    sent_counts_EB,
    totals,
    counters,
    expert_offsets,
    tile_offsets,
    sent_key_offsets,
    send_offsets,
    sizes,
    watch,
    TILE_ROWS: tl.constexpr,
    BLOCKS_OF_RANK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    E: tl.constexpr,
    L: tl.constexpr,
    BINS_L: tl.constexpr,
    BINS_E: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program an expert: the L counted ones of the received rows, then the E of the sent ones."""
    program = tl.program_id(0)
    if program < L:
        row = received_counts_LB + program * NUM_BLOCKS
        num_blocks = tl.full((), NUM_BLOCKS, tl.int32)
    else:
        row = sent_counts_EB + (program - L) * BLOCKS_OF_RANK
        num_blocks = tl.full((), BLOCKS_OF_RANK, tl.int32)
    total = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    while start < num_blocks:
        blocks = start + tl.arange(0, STEP)
        counts = tl.load(row + blocks, mask=blocks < num_blocks, other=0)
        tl.store(row + blocks, total + tl.cumsum(counts, 0) - counts, mask=blocks < num_blocks)
        total += tl.sum(counts, 0)
        start += STEP
    tl.store(totals + program, total)

    if is_last(counters, FINISHED, tl.num_programs(0)):
        bins = tl.arange(0, BINS_L)
        num_rows = tl.load(totals + bins, mask=bins < L, other=0, volatile=True)
        tl.store(expert_offsets + bins, tl.cumsum(num_rows, 0) - num_rows, mask=bins <= L)
        num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
        tl.store(tile_offsets + bins, tl.cumsum(num_tiles, 0) - num_tiles, mask=bins <= L)
        bins_e = tl.arange(0, BINS_E)
        num_sent = tl.load(totals + L + bins_e, mask=bins_e < E, other=0, volatile=True)
        key_offsets = tl.cumsum(num_sent, 0) - num_sent
        tl.store(sent_key_offsets + bins_e, key_offsets, mask=bins_e <= E)
        tl.store(send_offsets + bins_e // L, key_offsets, mask=(bins_e <= E) & (bins_e % L == 0))
        tl.store(sizes, tl.sum(num_rows, 0))
        tl.store(sizes + 1, tl.load(watch, volatile=True))
        tl.store(counters + FINISHED, 0)


@triton.jit
def _rank_in_block(keys, key, block_start, NUM_SLOTS: tl.constexpr, BLOCK: tl.constexpr, COMPARED: tl.constexpr):
    """How many earlier elements of the block have the same key."""
    index = tl.arange(0, BLOCK)
    rank = tl.zeros((BLOCK,), tl.int32)
    # Unrolled: the loads of all steps wait for memory together.
    for start in tl.static_range(0, BLOCK, COMPARED):
        other_index = start + tl.arange(0, COMPARED)
        other = tl.load(keys + block_start + other_index, mask=block_start + other_index < NUM_SLOTS, other=-2)
        earlier = (key[:, None] == other[None, :]) & (other_index[None, :] < index[:, None])
        rank += tl.sum(earlier.to(tl.int32), 1)
    return rank


@triton.jit(do_not_specialize=["rank"])
def _scatter_kernel(
    peers_W,
    ids_offset_bytes,
    received_counts_LB,
    sent_counts_EB,
    sent_keys_N,
    sent_key_offsets,
    expert_offsets,
    tile_offsets,
    row_origin_R,
    send_rows_N,
    tile_expert,
    tile_first_row,
    tile_end_row,
    rank,
    TILE_ROWS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCKS_OF_RANK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    L: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """One program a block, then one a local expert, which writes its part of the tile table."""
    block = tl.program_id(0)
    if block < NUM_BLOCKS:
        block_start = (block % BLOCKS_OF_RANK) * BLOCK
        slot = block_start + tl.arange(0, BLOCK)
        source = block // BLOCKS_OF_RANK
        source_ids = _ids_of_rank(peers_W, rank, ids_offset_bytes, source, NUM_SLOTS)
        ids = tl.load(source_ids + slot, mask=slot < NUM_SLOTS, other=-1)

        local = ids - rank * L
        mine = (local >= 0) & (local < L)
        row = _rank_in_block(source_ids, ids, block_start, NUM_SLOTS, BLOCK, COMPARED)
        row += tl.load(expert_offsets + local, mask=mine, other=0)
        row += tl.load(received_counts_LB + local * NUM_BLOCKS + block, mask=mine, other=0)
        tl.store(row_origin_R + row, source * NUM_SLOTS + slot, mask=mine)
        if source == rank:
            key = tl.load(sent_keys_N + slot, mask=slot < NUM_SLOTS, other=-1)
            sent = key >= 0
            place = _rank_in_block(sent_keys_N, key, block_start, NUM_SLOTS, BLOCK, COMPARED)
            place += tl.load(sent_key_offsets + key, mask=sent, other=0)
            place += tl.load(sent_counts_EB + key * BLOCKS_OF_RANK + block % BLOCKS_OF_RANK, mask=sent, other=0)
            tl.store(send_rows_N + place, slot, mask=sent)
    else:
        expert = block - NUM_BLOCKS
        first_row = tl.load(expert_offsets + expert)
        end_row = tl.load(expert_offsets + expert + 1)
        first_tile = tl.load(tile_offsets + expert)
        index = tl.arange(0, BLOCK)
        while first_row < end_row:
            row = first_row + index * TILE_ROWS
            exists = row < end_row
            tl.store(tile_expert + first_tile + index, tl.zeros((BLOCK,), tl.int32) + expert, mask=exists)
            tl.store(tile_first_row + first_tile + index, row, mask=exists)
            tl.store(tile_end_row + first_tile + index, tl.minimum(row + TILE_ROWS, end_row), mask=exists)
            first_row += BLOCK * TILE_ROWS
            first_tile += BLOCK


class PendingSizes:
    """The one number that the host needs of a plan. The device writes it into pinned memory: a copy behind the kernel
    would hold back the next one for 15 us (measured)."""

    def __init__(self, heap: SymmetricHeap) -> None:
        on_gpu = heap.device.type == "cuda"
        self._heap = heap
        self._event = torch.cuda.Event() if on_gpu else None
        # Zeros: where kernels are only compiled, nothing is written.
        self.target = torch.zeros(2, dtype=torch.int32, pin_memory=on_gpu)

    def written(self) -> None:
        """To be called behind the launch that writes the target."""
        if self._event is not None:
            self._event.record()

    def num_rows(self) -> int:
        """R. Waits for the device, and raises what `SymmetricHeap.check` does if a kernel so far has given up."""
        if self._event is not None:
            self._event.synchronize()
        num_rows, given_up = self.target.tolist()
        if given_up:
            self._heap.check()
        return num_rows


def launch_build_plan(heap: SymmetricHeap, *, by_priority: bool = True) -> tuple[RoutingPlan, PendingSizes]:
    """The plan of the heap's rank from the region expert_ids, which launch_exchange_routing has filled."""
    layout, shape = heap.layout, heap.layout.shape
    num_experts, num_local, num_ranks = shape.num_experts, shape.num_local_experts, shape.ep_degree
    num_slots = layout.max_tokens * shape.top_k
    blocks_of_rank = ceil_div(num_slots, _BLOCK)
    num_blocks = num_ranks * blocks_of_rank

    lengths = {
        "expert_offsets": num_local + 1,
        "row_origin_R": layout.max_rows,
        "send_offsets": num_ranks + 1,
        "send_rows_N": num_slots,
        "tile_offsets": num_local + 1,
        "tile_expert": layout.max_tiles,
        "tile_first_row": layout.max_tiles,
        "tile_end_row": layout.max_tiles,
    }
    parts = torch.empty(sum(lengths.values()), dtype=torch.int32, device=heap.device).split(list(lengths.values()))
    plan = RoutingPlan(*parts)
    scratch_lengths = {
        "received_counts": num_local * num_blocks,
        "sent_counts": num_experts * blocks_of_rank,
        "sent_keys": num_slots,
        "totals": num_local + num_experts,
        "sent_key_offsets": num_experts + 1,
    }
    scratch = torch.empty(sum(scratch_lengths.values()), dtype=torch.int32, device=heap.device)
    parts = scratch.split(list(scratch_lengths.values()))
    received_counts, sent_counts, sent_keys, totals, sent_key_offsets = parts
    pending = PendingSizes(heap)

    ids_offset_bytes = heap.offset_bytes("expert_ids")
    blocks = {"NUM_SLOTS": num_slots, "BLOCKS_OF_RANK": blocks_of_rank, "NUM_BLOCKS": num_blocks}
    # One bin more than experts, for ids that do not count, and no fewer than the lanes of a warp.
    bins = {
        "BINS_L": max(next_power_of_2(num_local + 1), 32),
        "BINS_E": max(next_power_of_2(num_experts + 1), 32),
    }
    launch(
        _count_kernel,
        num_blocks,
        heap.peers_W,
        ids_offset_bytes,
        received_counts,
        sent_counts,
        sent_keys,
        heap.rank,
        E=num_experts,
        K=shape.top_k,
        L=num_local,
        COPY_PER_EXPERT=layout.copy_per_expert,
        BY_PRIORITY=by_priority,
        BLOCK=_BLOCK,
        **blocks,
        **bins,
        num_warps=4,
    )
    launch(
        _scan_kernel,
        num_local + num_experts,
        received_counts,
        sent_counts,
        totals,
        heap.scoreboard.counters,
        plan.expert_offsets,
        plan.tile_offsets,
        sent_key_offsets,
        plan.send_offsets,
        pending.target,
        heap.scoreboard.watch,
        TILE_ROWS=layout.tile_rows,
        BLOCKS_OF_RANK=blocks_of_rank,
        NUM_BLOCKS=num_blocks,
        E=num_experts,
        L=num_local,
        STEP=1024,
        **bins,
        num_warps=4,
    )
    pending.written()
    launch(
        _scatter_kernel,
        num_blocks + num_local,
        heap.peers_W,
        ids_offset_bytes,
        received_counts,
        sent_counts,
        sent_keys,
        sent_key_offsets,
        plan.expert_offsets,
        plan.tile_offsets,
        plan.row_origin_R,
        plan.send_rows_N,
        plan.tile_expert,
        plan.tile_first_row,
        plan.tile_end_row,
        heap.rank,
        TILE_ROWS=layout.tile_rows,
        L=num_local,
        BLOCK=_BLOCK,
        COMPARED=_COMPARED,
        **blocks,
        num_warps=8,
    )
    return plan, pending
