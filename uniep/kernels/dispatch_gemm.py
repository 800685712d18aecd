"""Dispatch + up GEMM: tokens go to their experts' ranks while g, u = x w1^T, x w3^T and h = silu(g) u already run."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from uniep.kernels.config import KernelConfig
from uniep.kernels.copy_shape import CHUNK_TOKENS, copy_shape
from uniep.kernels.gemm_tile import gemm_tile_pair
from uniep.kernels.relay import relay_tile
from uniep.kernels.send_tokens import num_send_tasks, send_tokens
from uniep.kernels.signals import fence_async_proxy, wait_flag
from uniep.kernels.swiglu import swiglu
from uniep.kernels.tasks import ARRIVALS, FIRST_ROLE, SECOND_ROLE, THIRD_ROLE, claim, claimed, leave, take
from uniep.plan.token_map import RoutingPlan
from uniep.symmetric.heap import SymmetricHeap
from uniep.symmetric.watch import Kernel, What

_KERNEL = tl.constexpr(int(Kernel.DISPATCH_GEMM))
_TOKENS = tl.constexpr(int(What.TOKENS))
_INPUT_TILE = tl.constexpr(int(What.INPUT_TILE))


@triton.jit(do_not_specialize=["rank", "epoch", "timeout_us", "room_rows", "num_dispatch", "num_relay"])
def _dispatch_gemm_kernel(
    x_TD,
    rows_RD,
    a,
    w1,
    w3,
    g_RF,
    u_RF,
    h_RF,
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
    rank,
    epoch,
    timeout_us,
    room_rows,
    num_dispatch,
    num_relay,
    received_offset_bytes,
    scores_offset_bytes,
    flags_offset_bytes,
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
    SAVE_HALVES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
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
    - comp waits for a tile's mark, that is for relay of this rank, and computes one tile of g, u and h.

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
            send_tokens(
                task,
                x_TD,
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
            task = take(counters, FIRST_ROLE)

    relays = role < num_dispatch + num_relay if DYNAMIC else (role >= num_dispatch) & (role < num_dispatch + num_relay)
    if relays:
        task = take(counters, SECOND_ROLE)
        while task < num_tiles:
            relay_tile(
                task,
                x_TD,
                rows_RD,
                row_origin_R,
                tile_first_row,
                tile_end_row,
                peers_W,
                input_ready,
                watch,
                rank,
                epoch,
                timeout_us,
                received_offset_bytes,
                scores_offset_bytes,
                flags_offset_bytes,
                _KERNEL,
                _TOKENS,
                NUM_SLOTS,
                D,
                K,
                SCALE_ROWS,
                COPY_PER_EXPERT,
                TILE_ROWS,
                COPY_ROWS,
                COPY_COLS,
            )
            task = take(counters, SECOND_ROLE)

    if DYNAMIC or role >= num_dispatch + num_relay:
        num_col_tiles: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
        task = take(counters, THIRD_ROLE)
        while task < num_tiles * num_col_tiles:
            tile = task // num_col_tiles
            col = (task % num_col_tiles) * BLOCK_N
            expert = tl.load(tile_expert + tile)
            first_row = tl.load(tile_first_row + tile)
            end_row = tl.load(tile_end_row + tile)
            wait_flag(input_ready + tile, epoch, watch, timeout_us, _KERNEL, task, _INPUT_TILE, tile, SYSTEM=False)
            if TMA:
                fence_async_proxy()
            b_row = expert * F + col
            gate, up = gemm_tile_pair(
                a, w1, w3, first_row, end_row, b_row, (expert + 1) * F, D, TILE_ROWS, BLOCK_N, BLOCK_K, TMA
            )
            next_task = claim(counters, THIRD_ROLE, LANES)
            gate, up, h = swiglu(gate, up)
            rows = first_row + tl.arange(0, TILE_ROWS)
            cols = col + tl.arange(0, BLOCK_N)
            place = rows[:, None].to(tl.int64) * F + cols[None, :]
            inside = (rows < end_row)[:, None] & (cols < F)[None, :]
            if SAVE_HALVES:
                tl.store(g_RF + place, gate, mask=inside)
                tl.store(u_RF + place, up, mask=inside)
            tl.store(h_RF + place, h, mask=inside)
            task = claimed(next_task, LANES)
    leave(counters)


@dataclass(frozen=True)
class UpRows:
    """What the kernel leaves for the down GEMM and the backward: one row for each routed row of this rank's experts.

    Attributes:
        x_RD: the experts' inputs, scaled if scores go before the experts.
        g_RF, u_RF: x w1^T and x w3^T, or None where only h is wanted.
        h_RF: silu(g) * u.
    """

    x_RD: Tensor
    g_RF: Tensor | None
    u_RF: Tensor | None
    h_RF: Tensor


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
) -> UpRows:
    """Runs the kernel with outputs of room_rows rows. If R is more, its tokens are sent and nothing else is done."""
    layout, shape = heap.layout, heap.layout.shape
    dim, hidden_dim = shape.dim, shape.hidden_dim
    tiles = config.up
    block_n = tiles.block_n // 2
    x_RD = torch.empty(room_rows, dim, dtype=torch.bfloat16, device=x_TD.device)
    num_outputs = 3 if save_halves else 1
    outputs = [torch.empty(room_rows, hidden_dim, dtype=torch.bfloat16, device=x_TD.device) for _ in range(num_outputs)]
    h_RF, *halves = outputs
    g_RF, u_RF = halves if halves else (None, None)
    w1, w3 = w1_LFD.view(-1, dim), w3_LFD.view(-1, dim)
    a = x_RD
    if tiles.use_tma:
        a = TensorDescriptor.from_tensor(x_RD, [layout.tile_rows, tiles.block_k])
        w1 = TensorDescriptor.from_tensor(w1, [block_n, tiles.block_k])
        w3 = TensorDescriptor.from_tensor(w3, [block_n, tiles.block_k])
    copy_rows, copy_cols = copy_shape(dim, config.copy_step_elements)
    _dispatch_gemm_kernel[(config.num_programs,)](
        x_TD,
        x_RD,
        a,
        w1,
        w3,
        g_RF,
        u_RF,
        h_RF,
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
        heap.rank,
        epoch,
        heap.timeout_us,
        room_rows,
        config.num_dispatch,
        config.num_relay,
        heap.offset_bytes("received"),
        heap.offset_bytes("scores"),
        heap.offset_bytes("token_flags"),
        NUM_SLOTS=layout.max_tokens * shape.top_k,
        D=dim,
        F=hidden_dim,
        K=shape.top_k,
        L=shape.num_local_experts,
        W=shape.ep_degree,
        RANKS=triton.next_power_of_2(shape.ep_degree),
        TILE_ROWS=layout.tile_rows,
        BLOCK_N=block_n,
        BLOCK_K=tiles.block_k,
        TMA=tiles.use_tma,
        SAVE_HALVES=save_halves,
        SCALE_ROWS=score_before_experts,
        COPY_PER_EXPERT=layout.copy_per_expert,
        DYNAMIC=config.dynamic_roles,
        CHUNK=CHUNK_TOKENS,
        COPY_ROWS=copy_rows,
        COPY_COLS=copy_cols,
        LANES=32 * tiles.num_warps,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return UpRows(x_RD, g_RF, u_RF, h_RF)
