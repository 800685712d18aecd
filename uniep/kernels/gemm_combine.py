"""GEMM + combine: the second grouped GEMM's rows go back to their tokens' ranks while it runs and are then summed.

Forward: y = h w2^T. Backward, for the gradients of the tokens: grad_x = grad_g w1 + grad_u w3. Both return the same
rows to the same places: one kernel, with another Comp role and another order of the sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from uniep.kernels.config import CombineConfig, KernelConfig
from uniep.kernels.copy_shape import copy_shape
from uniep.kernels.gemm_tile import column_parts, gemm_tile, gemm_tile_joined, gemm_tile_two, sum_of_two
from uniep.kernels.launch import ceil_div, launch, next_power_of_2
from uniep.kernels.memory import returned_address, row_ptrs
from uniep.kernels.numerics import to_bf16
from uniep.kernels.reduce import reduce_tokens, reduce_tokens_by_expert
from uniep.kernels.return_rows import return_tile
from uniep.kernels.return_scores import return_score_grads
from uniep.kernels.signals import signal_all_ranks, signal_tile, wait_all_ranks
from uniep.kernels.tasks import (
    ARRIVALS,
    FINISHED,
    FIRST_ROLE,
    SECOND_ROLE,
    THIRD_ROLE,
    claim,
    claimed,
    is_last,
    leave,
    take,
)
from uniep.kernels.timeline import (
    ROLE_COMP,
    ROLE_MEET,
    ROLE_REDUCE,
    ROLE_RETURN,
    Role,
    Timeline,
    launch_records,
    task_begins,
    task_ends,
    time_ns,
)
from uniep.plan.token_map import RoutingPlan
from uniep.symmetric.heap import SymmetricHeap
from uniep.symmetric.returned import ReturnedBuffer
from uniep.symmetric.watch import Kernel, What

_OUTPUT_TILE = tl.constexpr(int(What.OUTPUT_TILE))
_RETURNED_ROWS = tl.constexpr(int(What.RETURNED_ROWS))

# Columns of the sum of two products that the epilogue takes at once: more of them spill.
_PART_COLS = 64
# torch.bmm takes another kernel, with another order of its sums, for small T*D (measured up to T*D = 82,000 and never
# from T = 128 on): there the reduce is torch.bmm itself.
_MIN_REDUCE_TOKENS = 128
_MIN_REDUCE_ELEMENTS = 82_000
_REDUCE_TASK_TOKENS = 8
# 8 elements, 16 bytes, a thread and row at 8 warps.
_REDUCE_STEP_ELEMENTS = 2048


@triton.jit(
    do_not_specialize=["rank", "num_tokens", "epoch", "timeout_us", "room_rows", "num_combine", "returned_offset_bytes"]
)
def _gemm_combine_kernel(
    h,
    w2,
    grad_g,
    w1,
    grad_u,
    w3,
    rows_RD,
    scores_TK,
    expert_ids_TK,
    out_TD,
    score_parts_RP,
    row_origin_R,
    expert_offsets,
    tile_offsets,
    tile_expert,
    tile_first_row,
    tile_end_row,
    peers_W,
    output_ready,
    counters,
    watch,
    records,
    rank,
    num_tokens,
    epoch,
    timeout_us,
    room_rows,
    num_combine,
    returned_offset_bytes: tl.int64,  # one binary for offsets on both sides of 2 GiB
    offsets_offset_bytes,
    flags_offset_bytes,
    score_grads_offset_bytes,
    KERNEL: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    W: tl.constexpr,
    RANKS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COL_TILES: tl.constexpr,
    TMA: tl.constexpr,
    STAGED: tl.constexpr,
    BACKWARD: tl.constexpr,
    ROUND_ALL: tl.constexpr,
    P: tl.constexpr,
    PS: tl.constexpr,
    PARTS: tl.constexpr,
    REDUCE: tl.constexpr,
    SCORED: tl.constexpr,
    KS: tl.constexpr,
    DYNAMIC: tl.constexpr,
    TASK_TOKENS: tl.constexpr,
    COPY_ROWS: tl.constexpr,
    COPY_COLS: tl.constexpr,
    REDUCE_ROWS: tl.constexpr,
    REDUCE_COLS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Roles, in the order in which they wait: comp < comm < reduce.

    - comp computes one tile, stores the rows of this rank's tokens where reduce reads them and the others into rows_RD,
      and marks the tile. It waits for nothing.
    - comm waits for the marks of a row tile, that is for comp of this rank, and returns its rows. The last of these
      tasks (there is one even without rows) tells every rank, also this one, that its rows are there.
    - reduce waits once for all ranks, that is for comm of every rank, and sums. SCORED: the forward weighs the rows by
      their scores, BACKWARD scales them by those first.

    BACKWARD rounds what the contract rounds (ROUND_ALL), or each row and each sum once. Where the dispatch left the
    rows' score gradients in P parts, comp stores their sums beside the rows.

    All programs but the last num_combine to arrive (and always the first) begin with comp, those with comm, and each
    goes on to the later roles when its own has no task left: one resident program a rank is enough.

    Where the rows had no room in the dispatch, nothing runs and no rank is told anything: the host launches both again.

    Two ranks, one tile each, three programs, num_combine = 1: on rank 0 the first arrival computes rows 0..5 of y:
    rows 0, 3 (its own t0, t2) into its returned buffer, the others into rows_RD; the third waits for that tile, copies
    rows 1, 2, 4, 5 into rank 1's returned buffer, and sets returned_flags[0] on both ranks; then all three wait for
    returned_flags[0] and [1] and share the tokens of rank 0.
    """
    num_programs = tl.num_programs(0)
    role = take(counters, ARRIVALS) if DYNAMIC else tl.program_id(0)
    fits = tl.load(expert_offsets + L) <= room_rows
    num_tiles = tl.where(fits, tl.load(tile_offsets + L), 0)
    num_col_tiles: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    computes = role < tl.maximum(num_programs - num_combine, 1)

    if computes:
        task = take(counters, FIRST_ROLE)
        while task < num_tiles * num_col_tiles:
            begun = task_begins(records, LANES)
            tile = task // num_col_tiles
            col = (task % num_col_tiles) * BLOCK_N
            expert = tl.load(tile_expert + tile)
            first_row = tl.load(tile_first_row + tile)
            end_row = tl.load(tile_end_row + tile)
            if ROUND_ALL:
                first, acc = gemm_tile_two(
                    grad_g, w1, grad_u, w3, first_row, end_row, expert, col, F, D, TILE_ROWS, BLOCK_N, BLOCK_K, TMA
                )
                first_parts = column_parts((first,), PARTS)
            elif BACKWARD:
                acc = gemm_tile_joined(
                    grad_g, w1, grad_u, w3, first_row, end_row, expert, col, F, D, TILE_ROWS, BLOCK_N, BLOCK_K, TMA
                )
            else:
                acc = gemm_tile(
                    h, w2, first_row, end_row, expert * D + col, (expert + 1) * D, F, TILE_ROWS, BLOCK_N, BLOCK_K, TMA
                )
            next_task = claim(counters, FIRST_ROLE, LANES)
            store_ns = time_ns(records)
            rows = first_row + tl.arange(0, TILE_ROWS)
            origin = tl.load(row_origin_R + rows, mask=rows < end_row, other=0)
            source = origin // NUM_SLOTS
            address = returned_address(peers_W, rank, source, returned_offset_bytes, offsets_offset_bytes, BACKWARD)
            address += (origin % NUM_SLOTS).to(tl.int64) * (D * 2)
            if STAGED:
                address = tl.where(source == rank, address, rows_RD.to(tl.int64) + rows.to(tl.int64) * (D * 2))
            parts = column_parts((acc,), PARTS)
            for part in tl.static_range(PARTS):
                cols = col + part * (BLOCK_N // PARTS) + tl.arange(0, BLOCK_N // PARTS)
                tile_part = sum_of_two(first_parts[part], parts[part]) if ROUND_ALL else parts[part]
                inside = (rows < end_row)[:, None] & (cols < D)[None, :]
                tl.store(row_ptrs(address, cols), to_bf16(tile_part), mask=inside)
            if P > 0 and col == 0:
                return_score_grads(
                    score_parts_RP,
                    rows,
                    rows < end_row,
                    source,
                    origin % NUM_SLOTS,
                    peers_W,
                    score_grads_offset_bytes,
                    P,
                    PS,
                )
            signal_tile(output_ready + task, epoch)
            task_ends(records, begun, ROLE_COMP, task, LANES, store_ns=store_ns)
            task = claimed(next_task, LANES)

    if DYNAMIC or not computes:
        # A rank without rows still has one task, so that its peers hear from it.
        num_tasks = tl.where(fits, tl.maximum(num_tiles, 1), 0)
        task = take(counters, SECOND_ROLE)
        while task < num_tasks:
            begun = task_begins(records, LANES)
            work_ns = begun[0]
            if task < num_tiles:
                work_ns = return_tile(
                    task,
                    rows_RD,
                    row_origin_R,
                    tile_first_row,
                    tile_end_row,
                    peers_W,
                    output_ready,
                    watch,
                    records,
                    rank,
                    epoch,
                    timeout_us,
                    returned_offset_bytes,
                    offsets_offset_bytes,
                    KERNEL,
                    _OUTPUT_TILE,
                    NUM_SLOTS,
                    D,
                    num_col_tiles,
                    COL_TILES,
                    STAGED,
                    BACKWARD,
                    TILE_ROWS,
                    COPY_ROWS,
                    COPY_COLS,
                )
            if is_last(counters, FINISHED, num_tasks):
                signal_all_ranks(peers_W, flags_offset_bytes, rank, epoch, watch, W, RANKS)
            task_ends(records, begun, ROLE_RETURN, task, LANES, work_ns=work_ns)
            task = take(counters, SECOND_ROLE)

    if fits:
        begun = task_begins(records, LANES)
        wait_all_ranks(peers_W, flags_offset_bytes, rank, epoch, watch, timeout_us, KERNEL, _RETURNED_ROWS, W, RANKS)
        task_ends(records, begun, ROLE_MEET, tl.program_id(0), LANES, work_ns=time_ns(records))
    if REDUCE and fits:
        task = take(counters, THIRD_ROLE)
        while task * TASK_TOKENS < num_tokens:
            begun = task_begins(records, LANES)
            if ROUND_ALL:
                reduce_tokens_by_expert(
                    task,
                    expert_ids_TK,
                    scores_TK,
                    out_TD,
                    peers_W,
                    rank,
                    num_tokens,
                    returned_offset_bytes,
                    D,
                    K,
                    KS,
                    SCORED,
                    TASK_TOKENS,
                    REDUCE_ROWS,
                    REDUCE_COLS,
                )
            else:
                reduce_tokens(
                    task,
                    scores_TK,
                    out_TD,
                    peers_W,
                    rank,
                    num_tokens,
                    returned_offset_bytes,
                    D,
                    K,
                    SCORED,
                    TASK_TOKENS,
                    REDUCE_ROWS,
                    REDUCE_COLS,
                )
            task_ends(records, begun, ROLE_REDUCE, task, LANES)
            task = take(counters, THIRD_ROLE)
    leave(counters)


def reduces_in_kernel(num_tokens: int, dim: int, *, score_before_experts: bool) -> bool:
    """Whether the kernel's own reduce has the contract's bits; else torch.bmm does it."""
    return score_before_experts or (num_tokens >= _MIN_REDUCE_TOKENS and num_tokens * dim > _MIN_REDUCE_ELEMENTS)


def returned_score_grads(num_tokens: int, heap: SymmetricHeap) -> Tensor:
    """The gradients of the scores [T, K] that came back in the last combine, in fp32; they stay as long as its rows."""
    return heap.region("score_grads")[:num_tokens]


def reduce_by_torch(scores_TK: Tensor, returned: ReturnedBuffer) -> Tensor:
    """The combine's sum where only torch.bmm has its own bits, after a launch with reduce_in_kernel=False."""
    rows_TKD = returned.of_tokens(*scores_TK.shape)
    return torch.bmm(scores_TK.unsqueeze(1), rows_TKD.float()).to(torch.bfloat16).squeeze(1)


def launch_gemm_combine(
    h_RF: Tensor,
    w2_LDF: Tensor,
    scores_TK: Tensor,
    plan: RoutingPlan,
    heap: SymmetricHeap,
    *,
    config: KernelConfig,
    epoch: int,
    score_before_experts: bool,
    reduce_in_kernel: bool,
    returned: ReturnedBuffer,
    timeline: Timeline | None = None,
) -> Tensor:
    """The forward. Returns out_TD, which without reduce_in_kernel is for reduce_by_torch to make.

    Args:
        returned: what the exchange told the peers.
        timeline: records the launch, if it is recording.
    """
    hidden_dim = heap.layout.shape.hidden_dim
    tiles = config.down
    h, w2 = h_RF, w2_LDF.view(-1, hidden_dim)
    if tiles.use_tma:
        h = TensorDescriptor.from_tensor(h_RF, [heap.layout.tile_rows, tiles.block_k])
        w2 = TensorDescriptor.from_tensor(w2, [tiles.block_n, tiles.block_k])
    return _launch(
        (h, w2, None, None, None, None),
        scores_TK,
        None,
        None,
        plan,
        heap,
        config=config,
        tiles=tiles,
        room_rows=len(h_RF),
        epoch=epoch,
        backward=False,
        round_all=False,
        reduce=reduce_in_kernel,
        scored=not score_before_experts,
        returned=returned,
        timeline=timeline,
    )


def launch_gemm_combine_backward(
    grad_g_RF: Tensor,
    grad_u_RF: Tensor,
    w1_LFD: Tensor,
    w3_LFD: Tensor,
    scores_TK: Tensor,
    expert_ids_TK: Tensor,
    plan: RoutingPlan,
    heap: SymmetricHeap,
    *,
    config: KernelConfig,
    epoch: int,
    score_before_experts: bool,
    returned: ReturnedBuffer,
    round_all: bool = True,
    score_parts_RP: Tensor | None = None,
    timeline: Timeline | None = None,
) -> Tensor:
    """The backward. Returns the gradients of the tokens [T, D].

    Args:
        returned: the working buffer.
        round_all: the contract's roundings, instead of one a row and one a sum.
        score_parts_RP: gradients of the rows' scores in parts, whose sums are then `returned_score_grads`.
    """
    tiles = config.up_grad
    grad_g, grad_u, w1, w3 = grad_g_RF, grad_u_RF, w1_LFD, w3_LFD
    if tiles.use_tma:
        row_block, weight_block = [heap.layout.tile_rows, tiles.block_k], [1, tiles.block_k, tiles.block_n]
        grad_g, grad_u = (TensorDescriptor.from_tensor(grad, row_block) for grad in (grad_g_RF, grad_u_RF))
        w1, w3 = (TensorDescriptor.from_tensor(weight, weight_block) for weight in (w1_LFD, w3_LFD))
    return _launch(
        (None, None, grad_g, w1, grad_u, w3),
        scores_TK,
        expert_ids_TK,
        score_parts_RP,
        plan,
        heap,
        config=config,
        tiles=tiles,
        room_rows=len(grad_g_RF),
        epoch=epoch,
        backward=True,
        round_all=round_all,
        reduce=True,
        scored=score_before_experts,
        returned=returned,
        timeline=timeline,
    )


def _launch(
    operands: tuple[Tensor | TensorDescriptor | None, ...],
    scores_TK: Tensor,
    expert_ids_TK: Tensor | None,
    score_parts_RP: Tensor | None,
    plan: RoutingPlan,
    heap: SymmetricHeap,
    *,
    config: KernelConfig,
    tiles: CombineConfig,
    room_rows: int,
    epoch: int,
    backward: bool,
    round_all: bool,
    reduce: bool,
    scored: bool,
    returned: ReturnedBuffer,
    timeline: Timeline | None,
) -> Tensor:
    layout, shape = heap.layout, heap.layout.shape
    dim, num_tokens = shape.dim, len(scores_TK)
    out_TD = torch.empty(num_tokens, dim, dtype=torch.bfloat16, device=scores_TK.device)
    staged = config.staged_combine and shape.ep_degree > 1
    rows_RD = torch.empty(room_rows, dim, dtype=torch.bfloat16, device=scores_TK.device) if staged else out_TD
    copy_rows, copy_cols = copy_shape(dim, config.copy_elements_of_warp * tiles.num_warps)
    num_parts = 0 if score_parts_RP is None else score_parts_RP.shape[1]
    reduce_rows, reduce_cols = copy_shape(dim, _REDUCE_STEP_ELEMENTS)
    num_programs = config.num_programs * tiles.occupancy
    link_role = Role.RETURN if staged else Role.COMP
    records = launch_records(
        timeline,
        "up_grad" if backward else "down",
        num_programs=num_programs,
        tasks_per_tile=ceil_div(dim, tiles.block_n),
        link_role=link_role if shape.ep_degree > 1 else None,
    )
    launch(
        _gemm_combine_kernel,
        num_programs,
        *operands,
        rows_RD,
        scores_TK,
        expert_ids_TK,
        out_TD,
        score_parts_RP,
        plan.row_origin_R,
        plan.expert_offsets,
        plan.tile_offsets,
        plan.tile_expert,
        plan.tile_first_row,
        plan.tile_end_row,
        heap.peers_W,
        heap.scoreboard.output_ready,
        heap.scoreboard.counters,
        heap.scoreboard.watch,
        records,
        heap.rank,
        num_tokens,
        epoch,
        heap.timeout_us,
        room_rows,
        tiles.num_combine,
        returned.offset_bytes,
        heap.offset_bytes("returned_offsets"),
        heap.offset_bytes("returned_flags"),
        heap.offset_bytes("score_grads") if num_parts else None,
        KERNEL=int(Kernel.GEMM_COMBINE_BACKWARD if backward else Kernel.GEMM_COMBINE),
        NUM_SLOTS=layout.max_tokens * shape.top_k,
        D=dim,
        F=shape.hidden_dim,
        K=shape.top_k,
        L=shape.num_local_experts,
        W=shape.ep_degree,
        RANKS=next_power_of_2(shape.ep_degree),
        TILE_ROWS=layout.tile_rows,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        COL_TILES=next_power_of_2(ceil_div(dim, tiles.block_n)),
        TMA=tiles.use_tma,
        STAGED=staged,
        BACKWARD=backward,
        ROUND_ALL=round_all,
        P=num_parts,
        PS=next_power_of_2(max(num_parts, 1)),
        PARTS=max(tiles.block_n // _PART_COLS, 1) if round_all else 1,
        REDUCE=reduce,
        SCORED=scored,
        KS=next_power_of_2(shape.top_k),
        DYNAMIC=config.dynamic_roles,
        TASK_TOKENS=_REDUCE_TASK_TOKENS,
        COPY_ROWS=copy_rows,
        COPY_COLS=copy_cols,
        REDUCE_ROWS=min(reduce_rows, _REDUCE_TASK_TOKENS),
        REDUCE_COLS=reduce_cols,
        LANES=32 * tiles.num_warps,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out_TD
