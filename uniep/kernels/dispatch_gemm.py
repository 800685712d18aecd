"""Dispatch + GEMM: tokens go to their experts' ranks while the first grouped GEMM on them already runs.

Forward: g = x w1^T, u = x w3^T, h = silu(g) u. Backward, of the gradients of the output: grad_h = grad_y w2 and through
SwiGLU to grad_g and grad_u. Both send the same tokens to the same places: one kernel, with another Comp role.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from uniep.kernels.config import DispatchConfig, KernelConfig
from uniep.kernels.copy_shape import CHUNK_TOKENS, copy_shape
from uniep.kernels.hidden_tile import hidden_grad_tile, up_tile
from uniep.kernels.launch import ceil_div, launch, next_power_of_2
from uniep.kernels.relay import relay_tile
from uniep.kernels.send_tokens import num_send_tasks, send_tokens
from uniep.kernels.signals import fence_async_proxy, wait_flag
from uniep.kernels.tasks import ARRIVALS, FIRST_ROLE, SECOND_ROLE, THIRD_ROLE, claimed, leave, take
from uniep.kernels.timeline import (
    ROLE_COMP,
    ROLE_RELAY,
    ROLE_SEND,
    Role,
    Timeline,
    launch_records,
    task_begins,
    task_ends,
    time_ns,
)
from uniep.plan.token_map import RoutingPlan
from uniep.symmetric.heap import SymmetricHeap
from uniep.symmetric.watch import Kernel, What

_TOKENS = tl.constexpr(int(What.TOKENS))
_INPUT_TILE = tl.constexpr(int(What.INPUT_TILE))


# Steps of a relay's copy in flight.
_COPY_STAGES = tl.constexpr(3)
# Columns a warp that an epilogue with two inputs and three outputs takes at once: more of them spill. For compiled
# models, because of their divisions, half as many, and of wide tiles that sum the scores' gradients too.
_PART_COLS_OF_WARP = 4

_CHANGING = ["scores_address", "rank", "epoch", "timeout_us", "room_rows", "num_dispatch", "num_relay"]


@triton.jit(do_not_specialize=_CHANGING)
def _dispatch_gemm_kernel(
    tokens_TD,
    rows_RD,
    a,
    w1,
    w2,
    w3,
    g_RF,
    u_RF,
    h_RF,
    grad_g_RF,
    grad_u_RF,
    score_parts_RP,
    scores_address,
    send_rows_N,
    send_offsets,
    row_origin_R,
    expert_offsets,
    tile_offsets,
    tile_expert,
    tile_first_row,
    tile_end_row,
    peers_W,
    input_ready,
    counters,
    watch,
    records,
    rank,
    epoch,
    timeout_us,
    room_rows,
    num_dispatch,
    num_relay,
    received_offset_bytes,
    flags_offset_bytes,
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
    TMA: tl.constexpr,
    BACKWARD: tl.constexpr,
    SAVE_HALVES: tl.constexpr,
    PARTS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCORED: tl.constexpr,
    COMPILED: tl.constexpr,
    COPY_PER_EXPERT: tl.constexpr,
    DYNAMIC: tl.constexpr,
    CHUNK: tl.constexpr,
    COPY_ROWS: tl.constexpr,
    COPY_COLS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Roles, in the order in which they wait: comm < relay < comp.

    - comm sends chunks of tokens to their destinations and flags them. It waits for nothing.
    - relay waits for the flags of a tile's rows, that is for comm of the peers, copies them, and marks the tile ready.
    - comp waits for a tile's mark, that is for relay of this rank, and computes one tile of g, u and h,
      BACKWARD of grad_g, grad_u and h.

    The rows of a backward are multiplied by their scores by relay (SCALE_ROWS), or by comp once they are through w2
    (SCORED), which then also has the gradients of the scores.

    The first num_dispatch programs to arrive begin with comm, the next num_relay with relay, the others with comp,
    and each goes on to the later roles when its own has no task left. So the tasks before any wait are held by
    programs that arrived earlier: one resident program a rank is enough.

    Where more rows come than the buffers have room for, only comm runs: the host sees it and launches again with room.

    Two ranks, one tile each, three programs: on rank 0 the first arrival sends t1, t2, t0 to rank 1 and sets their
    flags there; the second waits for the flags of rank 1's t0, t1, t2, fills rows 0..5 of rows_RD, sets input_ready[0];
    the third waits for input_ready[0] and computes. Rank 1 does the same at its own pace: only flags connect them.
    """
    role = take(counters, ARRIVALS) if DYNAMIC else tl.program_id(0)
    fits = tl.load(expert_offsets + L) <= room_rows
    num_tiles = tl.where(fits, tl.load(tile_offsets + L), 0)

    if W > 1 and role < num_dispatch:
        num_tasks = num_send_tasks(send_offsets, W, RANKS, CHUNK)
        task = take(counters, FIRST_ROLE)
        while task < num_tasks:
            begun = task_begins(records, LANES)
            send_tokens(
                task,
                tokens_TD,
                send_rows_N,
                send_offsets,
                peers_W,
                watch,
                rank,
                epoch,
                received_offset_bytes,
                flags_offset_bytes,
                NUM_SLOTS,
                D,
                K,
                W,
                COPY_PER_EXPERT,
                CHUNK,
                COPY_ROWS,
                COPY_COLS,
                LANES,
            )
            task_ends(records, begun, ROLE_SEND, task, LANES)
            task = take(counters, FIRST_ROLE)

    relays = role < num_dispatch + num_relay if DYNAMIC else (role >= num_dispatch) & (role < num_dispatch + num_relay)
    if relays:
        task = take(counters, SECOND_ROLE)
        while task < num_tiles:
            begun = task_begins(records, LANES)
            work_ns = relay_tile(
                task,
                tokens_TD,
                rows_RD,
                row_origin_R,
                tile_first_row,
                tile_end_row,
                scores_address,
                peers_W,
                input_ready,
                watch,
                records,
                rank,
                epoch,
                timeout_us,
                received_offset_bytes,
                flags_offset_bytes,
                KERNEL,
                _TOKENS,
                NUM_SLOTS,
                D,
                K,
                SCALE_ROWS,
                COPY_PER_EXPERT,
                TILE_ROWS,
                COPY_ROWS,
                COPY_COLS,
                _COPY_STAGES,
            )
            task_ends(records, begun, ROLE_RELAY, task, LANES, work_ns=work_ns)
            task = take(counters, SECOND_ROLE)

    if DYNAMIC or role >= num_dispatch + num_relay:
        num_col_tiles: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
        task = take(counters, THIRD_ROLE)
        while task < num_tiles * num_col_tiles:
            begun = task_begins(records, LANES)
            tile = task // num_col_tiles
            col = (task % num_col_tiles) * BLOCK_N
            expert = tl.load(tile_expert + tile)
            first_row = tl.load(tile_first_row + tile)
            end_row = tl.load(tile_end_row + tile)
            wait_flag(input_ready + tile, epoch, watch, timeout_us, KERNEL, task, _INPUT_TILE, tile, SYSTEM=False)
            if TMA:
                fence_async_proxy()
            work_ns = time_ns(records)
            if BACKWARD:
                next_task = hidden_grad_tile(
                    a,
                    w2,
                    g_RF,
                    u_RF,
                    grad_g_RF,
                    grad_u_RF,
                    h_RF,
                    score_parts_RP,
                    scores_address,
                    row_origin_R,
                    counters,
                    expert,
                    first_row,
                    end_row,
                    col,
                    D,
                    F,
                    TILE_ROWS,
                    BLOCK_N,
                    BLOCK_K,
                    TMA,
                    PARTS,
                    SCORED,
                    COMPILED,
                    LANES,
                )
            else:
                next_task = up_tile(
                    a,
                    w1,
                    w3,
                    g_RF,
                    u_RF,
                    h_RF,
                    counters,
                    expert,
                    first_row,
                    end_row,
                    col,
                    D,
                    F,
                    TILE_ROWS,
                    BLOCK_N,
                    BLOCK_K,
                    TMA,
                    SAVE_HALVES,
                    COMPILED,
                    LANES,
                )
            task_ends(records, begun, ROLE_COMP, task, LANES, work_ns=work_ns)
            task = claimed(next_task, LANES)
    leave(counters)


@dataclass(frozen=True)
class UpRows:
    """What the forward leaves for the down GEMM and the backward: one row for each routed row of this rank's experts.

    Attributes:
        x_RD: the experts' inputs, scaled if scores go before the experts.
        g_RF, u_RF: x w1^T and x w3^T, or None where only h is wanted.
        h_RF: silu(g) * u.
    """

    x_RD: Tensor
    g_RF: Tensor | None
    u_RF: Tensor | None
    h_RF: Tensor


@dataclass(frozen=True)
class GradRows:
    """What the backward leaves for the gradients of the weights and of the tokens, rows as in UpRows.

    Attributes:
        grad_y_RD: gradients of the experts' outputs, scaled if scores come after the experts.
        grad_g_RF, grad_u_RF: gradients of g and u.
        h_RF: silu(g) * u once more.
        score_parts_RP: None, or where scores are applied at the experts, and so not to grad_y_RD but to h_RF, the
            gradients of the rows' scores in fp32, a part from each of P column tiles.
    """

    grad_y_RD: Tensor
    grad_g_RF: Tensor
    grad_u_RF: Tensor
    h_RF: Tensor
    score_parts_RP: Tensor | None


def launch_dispatch_gemm(
    x_TD: Tensor,
    w1_LFD: Tensor,
    w3_LFD: Tensor,
    plan: RoutingPlan,
    heap: SymmetricHeap,
    *,
    config: KernelConfig,
    room_rows: int,
    epoch: int,
    score_before_experts: bool,
    save_halves: bool,
    compiled: bool = False,
    timeline: Timeline | None = None,
) -> UpRows:
    """The forward, with outputs of room_rows rows. If R is more, its tokens are sent and nothing else is done.
    compiled: SwiGLU as torch.compile rounds it."""
    dim, hidden_dim = heap.layout.shape.dim, heap.layout.shape.hidden_dim
    tiles = config.up
    block_n = tiles.block_n // 2
    x_RD = _empty_rows(x_TD, room_rows, dim)
    h_RF, *halves = (_empty_rows(x_TD, room_rows, hidden_dim) for _ in range(3 if save_halves else 1))
    g_RF, u_RF = halves if halves else (None, None)
    a, w1, w3 = x_RD, w1_LFD.view(-1, dim), w3_LFD.view(-1, dim)
    if tiles.use_tma:
        a = TensorDescriptor.from_tensor(x_RD, [heap.layout.tile_rows, tiles.block_k])
        w1 = TensorDescriptor.from_tensor(w1, [block_n, tiles.block_k])
        w3 = TensorDescriptor.from_tensor(w3, [block_n, tiles.block_k])
    _launch(
        x_TD,
        x_RD,
        (a, w1, None, w3, g_RF, u_RF, h_RF, None, None, None),
        heap.region("scores") if score_before_experts else None,
        plan,
        heap,
        config=config,
        tiles=tiles,
        block_n=block_n,
        epoch=epoch,
        backward=False,
        save_halves=save_halves,
        compiled=compiled,
        timeline=timeline,
    )
    return UpRows(x_RD, g_RF, u_RF, h_RF)


def launch_dispatch_gemm_backward(
    grad_TD: Tensor,
    w2_LDF: Tensor,
    g_RF: Tensor,
    u_RF: Tensor,
    scores_WMK: Tensor | None,
    plan: RoutingPlan,
    heap: SymmetricHeap,
    *,
    config: KernelConfig,
    epoch: int,
    scores_at_experts: bool = False,
    compiled: bool = False,
    timeline: Timeline | None = None,
) -> GradRows:
    """The backward, with as many rows as the forward left: they are all that come.

    Args:
        grad_TD: gradients of the output.
        w2_LDF: weights of the down GEMM.
        g_RF, u_RF: the forward's.
        scores_WMK: the scores of all ranks at the forward, or None where they go before the experts.
        plan: the forward's.
        heap, config: as in the forward.
        epoch: a new one.
        scores_at_experts: apply the scores behind w2 instead of to the rows that come, and take their gradients there.
        compiled: the forward's.
        timeline: records the launch, if it is recording.
    """
    dim, hidden_dim = heap.layout.shape.dim, heap.layout.shape.hidden_dim
    tiles = config.down_grad
    num_rows = len(g_RF)
    grad_y_RD = _empty_rows(grad_TD, num_rows, dim)
    grad_g_RF, grad_u_RF, h_RF = (_empty_rows(grad_TD, num_rows, hidden_dim) for _ in range(3))
    score_parts_RP = None
    if scores_at_experts:
        num_parts = ceil_div(hidden_dim, tiles.block_n)
        score_parts_RP = torch.empty(num_rows, num_parts, dtype=torch.float32, device=grad_TD.device)
    a, w2 = grad_y_RD, w2_LDF
    if tiles.use_tma:
        a = TensorDescriptor.from_tensor(grad_y_RD, [heap.layout.tile_rows, tiles.block_k])
        w2 = TensorDescriptor.from_tensor(w2_LDF, [1, tiles.block_k, tiles.block_n])
    _launch(
        grad_TD,
        grad_y_RD,
        (a, None, w2, None, g_RF, u_RF, h_RF, grad_g_RF, grad_u_RF, score_parts_RP),
        scores_WMK,
        plan,
        heap,
        config=config,
        tiles=tiles,
        block_n=tiles.block_n,
        epoch=epoch,
        backward=True,
        save_halves=False,
        scores_at_experts=scores_at_experts,
        compiled=compiled,
        timeline=timeline,
    )
    return GradRows(grad_y_RD, grad_g_RF, grad_u_RF, h_RF, score_parts_RP)


def _empty_rows(like: Tensor, num_rows: int, num_cols: int) -> Tensor:
    return torch.empty(num_rows, num_cols, dtype=torch.bfloat16, device=like.device)


def _launch(
    tokens_TD: Tensor,
    rows_RD: Tensor,
    operands: tuple[Tensor | TensorDescriptor | None, ...],
    scores_WMK: Tensor | None,
    plan: RoutingPlan,
    heap: SymmetricHeap,
    *,
    config: KernelConfig,
    tiles: DispatchConfig,
    block_n: int,
    epoch: int,
    backward: bool,
    save_halves: bool,
    compiled: bool,
    timeline: Timeline | None,
    scores_at_experts: bool = False,
) -> None:
    layout, shape = heap.layout, heap.layout.shape
    copy_rows, copy_cols = copy_shape(shape.dim, config.copy_elements_of_warp * tiles.num_warps)
    # An address, not a tensor: the interpreter writes a tensor's whole memory back, and the heap belongs to peers too.
    scores_address = (heap.region("scores") if scores_WMK is None else scores_WMK).data_ptr()
    num_programs = config.num_programs * tiles.occupancy
    halved = compiled or (scores_at_experts and tiles.num_warps > 4)
    part_cols_of_warp = _PART_COLS_OF_WARP // 2 if halved else _PART_COLS_OF_WARP
    records = launch_records(
        timeline,
        "down_grad" if backward else "up",
        num_programs=num_programs,
        tasks_per_tile=ceil_div(shape.hidden_dim, block_n),
        link_role=Role.SEND if shape.ep_degree > 1 else None,
    )
    launch(
        _dispatch_gemm_kernel,
        num_programs,
        tokens_TD,
        rows_RD,
        *operands,
        scores_address,
        plan.send_rows_N,
        plan.send_offsets,
        plan.row_origin_R,
        plan.expert_offsets,
        plan.tile_offsets,
        plan.tile_expert,
        plan.tile_first_row,
        plan.tile_end_row,
        heap.peers_W,
        heap.scoreboard.input_ready,
        heap.scoreboard.counters,
        heap.scoreboard.watch,
        records,
        heap.rank,
        epoch,
        heap.timeout_us,
        len(rows_RD),
        tiles.num_dispatch,
        tiles.num_relay,
        heap.offset_bytes("received"),
        heap.offset_bytes("token_flags"),
        KERNEL=int(Kernel.DISPATCH_GEMM_BACKWARD if backward else Kernel.DISPATCH_GEMM),
        NUM_SLOTS=layout.max_tokens * shape.top_k,
        D=shape.dim,
        F=shape.hidden_dim,
        K=shape.top_k,
        L=shape.num_local_experts,
        W=shape.ep_degree,
        RANKS=next_power_of_2(shape.ep_degree),
        TILE_ROWS=layout.tile_rows,
        BLOCK_N=block_n,
        BLOCK_K=tiles.block_k,
        TMA=tiles.use_tma,
        BACKWARD=backward,
        SAVE_HALVES=save_halves,
        PARTS=max(block_n // (part_cols_of_warp * tiles.num_warps), 1),
        SCALE_ROWS=scores_WMK is not None and not scores_at_experts,
        SCORED=scores_at_experts,
        COMPILED=compiled,
        COPY_PER_EXPERT=layout.copy_per_expert,
        DYNAMIC=config.dynamic_roles,
        CHUNK=CHUNK_TOKENS,
        COPY_ROWS=copy_rows,
        COPY_COLS=copy_cols,
        LANES=32 * tiles.num_warps,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
