"""The gradient of the scores, where they come after the experts: score_grad[t, k] = grad[t] . y[t, k].

The stock block computes it as torch.bmm of fp32 copies of both. For the sizes that `dots_in_kernel` allows, cuBLAS sums
in one order (its gemv2T kernel), which this kernel repeats on the bf16 rows themselves: so the copies, twice as large
as the rows, are neither made nor read.
"""

import triton
import triton.language as tl
from torch import Tensor

from uniep.kernels.launch import ceil_div, launch

_LANES = tl.constexpr(16)
_CHUNK = tl.constexpr(512)

# Below, and for odd widths, cuBLAS takes other kernels with other orders.
_MIN_TOKENS = 1024
_MIN_DIM = 1024
_MAX_TOP_K = 16
_ROWS = 32
_NUM_WARPS = 2


@triton.jit(do_not_specialize=["num_rows"])
def _score_grad_kernel(grad_TD, y_ND, score_grad_N, num_rows, D: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    """ROWS dot products. Lane r of 16 sums the elements d = r (mod 16) of 512 columns, d ascending; then such chunks
    in order; then the lanes in order. A product of two bf16 is exact in fp32, so nothing else is rounded."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    y_row = y_ND + rows[:, None].to(tl.int64) * D
    grad_row = grad_TD + (rows // K)[:, None].to(tl.int64) * D
    lanes = tl.arange(0, _LANES)
    total = tl.zeros((ROWS, _LANES), tl.float32)
    for chunk in range(0, D, _CHUNK):
        acc = tl.zeros((ROWS, _LANES), tl.float32)
        for step in tl.static_range(0, _CHUNK, _LANES):
            cols = chunk + step + lanes
            mask = inside[:, None] & (cols < D)[None, :]
            y = tl.load(y_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            acc += y * tl.load(grad_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        total += acc
    dots = tl.zeros((ROWS,), tl.float32)
    for lane in tl.static_range(_LANES):
        # The sum of one number and zeros: itself, in whatever order.
        dots += tl.sum(tl.where((lanes == lane)[None, :], total, 0.0), 1)
    tl.store(score_grad_N + rows, dots, mask=inside)


def dots_in_kernel(num_tokens: int, top_k: int, dim: int) -> bool:
    """Whether the kernel's order is that of torch.bmm."""
    return num_tokens >= _MIN_TOKENS and dim >= _MIN_DIM and dim % 8 == 0 and top_k <= _MAX_TOP_K


def launch_score_grad(grad_TD: Tensor, y_TKD: Tensor, score_grad_TK: Tensor) -> None:
    """Runs the kernel.

    Args:
        grad_TD: bf16 gradients of the layer's output.
        y_TKD: bf16 rows that came back from the experts.
        score_grad_TK: where it writes them, fp32.
    """
    num_tokens, top_k, dim = y_TKD.shape
    num_rows = num_tokens * top_k
    if num_rows:
        launch(
            _score_grad_kernel,
            ceil_div(num_rows, _ROWS),
            grad_TD,
            y_TKD,
            score_grad_TK,
            num_rows,
            D=dim,
            K=top_k,
            ROWS=_ROWS,
            num_warps=_NUM_WARPS,
        )
