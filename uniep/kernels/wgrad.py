"""Weight gradients of the backward: a Transposed GroupGEMM for each of w1, w3 and w2, in one launch.

    grad_w1_LFD[l] = grad_g_RF[rows]^T x_RD[rows]        rows = expert_offsets[l] .. expert_offsets[l + 1]
    grad_w3_LFD[l] = grad_u_RF[rows]^T x_RD[rows]
    grad_w2_LDF[l] = grad_y_RD[rows]^T h_RF[rows]

A tile of a gradient is one fp32 accumulator over its expert's rows, ascending from the expert's own first row, rounded
once: no split over the rows, no atomics on results. Rows past the expert's end count as zero in both operands (not in
one of them: zero times an infinity of the next expert is no zero). An expert without rows gets exact zeros.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged
from triton.tools.tensor_descriptor import TensorDescriptor

from uniep.kernels.launch import ceil_div, launch, next_power_of_2
from uniep.kernels.numerics import dot_bf16, to_bf16
from uniep.kernels.tasks import FIRST_ROLE, claim, claimed, take
from uniep.kernels.timeline import ROLE_COMP, Timeline, launch_records, task_begins, task_ends, time_ns
from uniep.plan.layout import ROW_ALIGN_ELEMENTS
from uniep.shapes import MoEShape, ShapeError
from uniep.symmetric.heap import NUM_COUNTERS

_W1 = tl.constexpr(1)
_W2 = tl.constexpr(2)
_W3 = tl.constexpr(3)

# Experts that one step of the ranking compares with all others.
_RANK_STEP = 32


@dataclass(frozen=True)
class WgradConfig:
    """Tiles and programs of the launch.

    Attributes:
        num_programs: programs of the launch, one a multiprocessor. Any number from 1 makes progress.
        block_f, block_d: a tile of a gradient, along F and D.
        block_t: routed rows a step.
        group_f: tiles along F that are computed before the next one along D, so that tiles that run at the same time
            share operands: 16 x 128 along F and 132 / 16 x 256 along D are nearly a square.
        num_warps: warps of a program.
        num_stages: steps in flight.
        use_tma: operands and results through TMA descriptors (Hopper) instead of pointers.
    """

    num_programs: int
    block_f: int = 128
    block_d: int = 256
    block_t: int = 32
    group_f: int = 16
    num_warps: int = 8
    num_stages: int = 4
    use_tma: bool = True

    def __post_init__(self) -> None:
        for what in ("num_programs", "group_f", "num_warps", "num_stages"):
            if getattr(self, what) < 1:
                raise ValueError(f"{what} must be at least 1, got {getattr(self, what)}")
        for what in ("block_f", "block_d", "block_t"):
            value = getattr(self, what)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{what} must be a power of two from 16, got {value}")


def default_wgrad_config(device: torch.device) -> WgradConfig:
    """A configuration that fits the device: all multiprocessors and TMA where there is one, small tiles on a CPU."""
    if device.type != "cuda":
        return WgradConfig(num_programs=3, block_f=64, block_d=64, use_tma=False)
    properties = torch.cuda.get_device_properties(device)
    return WgradConfig(num_programs=properties.multi_processor_count, use_tma=properties.major >= 9)


@triton.jit
def _load_rows(source, row, end_row, col, COLS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """[BLOCK_T, BLOCK_C] of a matrix with COLS columns; zeros from end_row on and past the last column."""
    rows = row + tl.arange(0, BLOCK_T)
    cols = col + tl.arange(0, BLOCK_C)
    ptrs = source + rows[:, None].to(tl.int64) * COLS + cols[None, :]
    return tl.load(ptrs, mask=(rows < end_row)[:, None] & (cols < COLS)[None, :], other=0.0)


@triton.jit
def wgrad_tile(
    left,
    right,
    left_tma,
    right_tma,
    first_row,
    end_row,
    m,
    n,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TMA: tl.constexpr,
):
    """left[first_row:end_row, m:]^T @ right[first_row:end_row, n:], fp32 [BLOCK_M, BLOCK_N].

    In both operands the reduction dimension is the slow one. wgmma reads them so from shared memory: the transposition
    is a bit of the instruction and moves nothing.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    num_rows = end_row - first_row
    if TMA:
        # The TMA unit cuts an expert's last, partial step too, so it stays in the pipeline.
        for row in range(0, num_rows, BLOCK_T):
            left_tile = load_ragged(left_tma, first_row, num_rows, [row, m])
            right_tile = load_ragged(right_tma, first_row, num_rows, [row, n])
            acc = dot_bf16(left_tile.T, right_tile, acc)
    else:
        for row in range(first_row, end_row, BLOCK_T):
            left_tile = _load_rows(left, row, end_row, m, M, BLOCK_T, BLOCK_M)
            right_tile = _load_rows(right, row, end_row, n, N, BLOCK_T, BLOCK_N)
            acc = dot_bf16(left_tile.T, right_tile, acc)
    return acc


@triton.jit
def _store_tile(out_LMN, tile, expert, m, n, M: tl.constexpr, N: tl.constexpr, TMA: tl.constexpr):
    """Stores what of a bf16 tile lies inside the expert's [M, N] (with TMA, the descriptor's bounds say what)."""
    if TMA:
        out_LMN.store([expert, m, n], tile.reshape(1, tile.shape[0], tile.shape[1]))
    else:
        rows = m + tl.arange(0, tile.shape[0])
        cols = n + tl.arange(0, tile.shape[1])
        ptrs = out_LMN + expert.to(tl.int64) * (M * N) + rows[:, None].to(tl.int64) * N + cols[None, :]
        tl.store(ptrs, tile, mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit
def _choose(gradient, of_w1, of_w2, of_w3):
    """A pointer or a TMA descriptor by the number of the gradient: one loop for three gradients, because Triton gives
    each loop of a branch its own shared memory, and two would not fit."""
    if gradient == _W1:
        chosen = of_w1
    elif gradient == _W2:
        chosen = of_w2
    else:
        chosen = of_w3
    return chosen


@triton.jit
def _tile_of(index, NUM_M: tl.constexpr, NUM_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(row tile, column tile) of the index-th tile: GROUP_M row tiles a column, all columns, then the next group."""
    group = index // (GROUP_M * NUM_N)
    in_group = index % (GROUP_M * NUM_N)
    num_rows = tl.minimum(NUM_M - group * GROUP_M, GROUP_M)
    return group * GROUP_M + in_group % num_rows, in_group // num_rows


@triton.jit
def _ranks_by_rows(expert_offsets, L: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr):
    """int32 [EXPERTS]: how many experts have more rows than this one, or as many and a smaller number."""
    experts = tl.arange(0, EXPERTS)
    first_row = tl.load(expert_offsets + experts, mask=experts < L, other=0)
    num_rows = tl.load(expert_offsets + experts + 1, mask=experts < L, other=-1) - first_row
    rank = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, EXPERTS, STEP):
        others = start + tl.arange(0, STEP)
        other_first_row = tl.load(expert_offsets + others, mask=others < L, other=0)
        other_rows = tl.load(expert_offsets + others + 1, mask=others < L, other=-1) - other_first_row
        more = other_rows[None, :] > num_rows[:, None]
        as_many = (other_rows[None, :] == num_rows[:, None]) & (others[None, :] < experts[:, None])
        rank += tl.sum((more | as_many).to(tl.int32), 1)
    return rank


@triton.jit
def _wgrad_kernel(
    grad_g_RF,
    grad_u_RF,
    grad_y_RD,
    x_RD,
    h_RF,
    grad_g_tma,
    grad_u_tma,
    grad_y_tma,
    x_tma,
    h_tma,
    grad_w1_LFD,
    grad_w2_LDF,
    grad_w3_LFD,
    expert_offsets,
    counters,
    records,
    D: tl.constexpr,
    F: tl.constexpr,
    L: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP_F: tl.constexpr,
    RANK_STEP: tl.constexpr,
    TMA: tl.constexpr,
    LANES: tl.constexpr,
):
    """One queue of tiles: the experts by falling number of rows, of each first w1 and w3 in turns, then w2.

    A tile's time goes by its expert's rows, so the last tiles to start are the shortest. Tiles that run at the same
    time are of one or few experts and share operands in the second-level cache: a tile of w1 and the same of w3 read
    the same x and follow each other. w2 is computed as h^T grad_y and turned as it is stored (stmatrix does that), so
    all tiles are BLOCK_F x BLOCK_D: 1408 columns are 11 tiles of 128, but 5.5 of 256.

    Programs take tiles from a counter as they get free. A fixed stride would save that atomic (whose way the epilogue
    hides), but beside a collective that holds multiprocessors some programs start only when others end, and all their
    tiles would come late. Nothing waits, so any number of resident programs will do.

    Two experts with 3 and 257 rows, one tile a gradient: the queue is w1[1], w3[1], w2[1], w1[0], w3[0], w2[0].
    """
    num_f: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    num_d: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    tiles_of_expert: tl.constexpr = 3 * num_f * num_d

    experts = tl.arange(0, EXPERTS)
    ranks = _ranks_by_rows(expert_offsets, L, EXPERTS, RANK_STEP)
    task = take(counters, FIRST_ROLE)
    while task < L * tiles_of_expert:
        begun = task_begins(records, LANES)
        expert = tl.sum(tl.where(ranks == task // tiles_of_expert, experts, 0), 0)
        first_row = tl.load(expert_offsets + expert)
        end_row = tl.load(expert_offsets + expert + 1)
        index = task % tiles_of_expert
        if index < 2 * num_f * num_d:
            pair, tile_d = _tile_of(index, 2 * num_f, num_d, GROUP_F)
            tile_f = pair // 2
            gradient = tl.where(pair % 2 == 0, _W1, _W3)
        else:
            tile_f, tile_d = _tile_of(index - 2 * num_f * num_d, num_f, num_d, GROUP_F)
            gradient = tl.full((), _W2, tl.int32)
        f = tile_f * BLOCK_F
        d = tile_d * BLOCK_D

        left = _choose(gradient, grad_g_RF, h_RF, grad_u_RF)
        right = _choose(gradient, x_RD, grad_y_RD, x_RD)
        if TMA:
            left_tma = _choose(gradient, grad_g_tma, h_tma, grad_u_tma)
            right_tma = _choose(gradient, x_tma, grad_y_tma, x_tma)
        else:
            left_tma, right_tma = None, None
        acc = wgrad_tile(
            left, right, left_tma, right_tma, first_row, end_row, f, d, F, D, BLOCK_F, BLOCK_D, BLOCK_T, TMA
        )
        next_task = claim(counters, FIRST_ROLE, LANES)
        store_ns = time_ns(records)
        tile = to_bf16(acc)
        if gradient == _W1:
            _store_tile(grad_w1_LFD, tile, expert, f, d, F, D, TMA)
        elif gradient == _W2:
            _store_tile(grad_w2_LDF, tile.T, expert, d, f, D, F, TMA)
        else:
            _store_tile(grad_w3_LFD, tile, expert, f, d, F, D, TMA)
        task_ends(records, begun, ROLE_COMP, task, LANES, store_ns=store_ns)
        task = claimed(next_task, LANES)


def launch_wgrad(
    grad_g_RF: Tensor,
    grad_u_RF: Tensor,
    grad_y_RD: Tensor,
    x_RD: Tensor,
    h_RF: Tensor,
    expert_offsets: Tensor,
    *,
    shape: MoEShape,
    config: WgradConfig,
    timeline: Timeline | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the kernel.

    Args:
        grad_g_RF, grad_u_RF, grad_y_RD: gradients of x w1^T, x w3^T and of the experts' outputs.
        x_RD, h_RF: the experts' inputs and silu(g) * u. All five are bf16, contiguous and of one length, R or any
            bound on it: rows from R on are not read into any sum.
        expert_offsets: int32 [L + 1] on the device, first row of each local expert, R at the end.
        shape: the layer.
        config: tiles and programs.
        timeline: records the launch, if it is recording.

    Returns:
        grad_w1_LFD, grad_w2_LDF, grad_w3_LFD in bf16.
    """
    dim, hidden_dim, num_local = shape.dim, shape.hidden_dim, shape.num_local_experts
    for what, value in (("dim", dim), ("hidden_dim", hidden_dim)):
        if value % ROW_ALIGN_ELEMENTS:
            raise ShapeError(f"{what} must be a multiple of {ROW_ALIGN_ELEMENTS}, got {value}")
    inputs = {
        "grad_g_RF": (grad_g_RF, hidden_dim),
        "grad_u_RF": (grad_u_RF, hidden_dim),
        "grad_y_RD": (grad_y_RD, dim),
        "x_RD": (x_RD, dim),
        "h_RF": (h_RF, hidden_dim),
    }
    for what, (tensor, num_cols) in inputs.items():
        expected = (len(x_RD), num_cols)
        if tensor.shape != expected or tensor.dtype != torch.bfloat16 or not tensor.is_contiguous():
            got = f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
            raise ShapeError(f"{what} must be contiguous bf16 {expected}, got {got}")
    if expert_offsets.dtype != torch.int32 or expert_offsets.shape != (num_local + 1,):
        got = f"{expert_offsets.dtype} {tuple(expert_offsets.shape)}"
        raise ShapeError(f"expert_offsets must be int32 ({num_local + 1},), got {got}")

    def empty(*size: int) -> Tensor:
        return torch.empty(*size, dtype=torch.bfloat16, device=x_RD.device)

    grad_w1_LFD, grad_w3_LFD = (empty(num_local, hidden_dim, dim) for _ in range(2))
    grad_w2_LDF = empty(num_local, dim, hidden_dim)
    if len(x_RD) == 0:
        return grad_w1_LFD.zero_(), grad_w2_LDF.zero_(), grad_w3_LFD.zero_()

    operands: list[Any] = [None] * 5
    outputs: list[Any] = [grad_w1_LFD, grad_w2_LDF, grad_w3_LFD]
    if config.use_tma:
        block_f, block_d = config.block_f, config.block_d
        blocks = (block_f, block_f, block_d, block_d, block_f)
        tensors = (grad_g_RF, grad_u_RF, grad_y_RD, x_RD, h_RF)
        operands = [
            create_ragged_descriptor(tensor, [config.block_t, block])
            for tensor, block in zip(tensors, blocks, strict=True)
        ]
        blocks_of_outputs = ([1, block_f, block_d], [1, block_d, block_f], [1, block_f, block_d])
        outputs = [TensorDescriptor.from_tensor(*pair) for pair in zip(outputs, blocks_of_outputs, strict=True)]
    records = launch_records(
        timeline,
        "wgrad",
        num_programs=config.num_programs,
        tasks_per_tile=3 * ceil_div(hidden_dim, config.block_f) * ceil_div(dim, config.block_d),
    )
    launch(
        _wgrad_kernel,
        config.num_programs,
        grad_g_RF,
        grad_u_RF,
        grad_y_RD,
        x_RD,
        h_RF,
        *operands,
        *outputs,
        expert_offsets,
        torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=x_RD.device),
        records,
        D=dim,
        F=hidden_dim,
        L=num_local,
        EXPERTS=max(next_power_of_2(num_local), _RANK_STEP),
        BLOCK_F=config.block_f,
        BLOCK_D=config.block_d,
        BLOCK_T=config.block_t,
        GROUP_F=config.group_f,
        RANK_STEP=_RANK_STEP,
        TMA=config.use_tma,
        LANES=32 * config.num_warps,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return grad_w1_LFD, grad_w2_LDF, grad_w3_LFD
