"""The gradients of the scores of one GEMM tile's rows, back to the ranks that the rows came from."""

import triton
import triton.language as tl

from uniep.kernels.memory import region_address


@triton.jit
def return_score_grads(
    score_parts_RP, rows, exists, source, slot, peers_W, offset_bytes, P: tl.constexpr, PS: tl.constexpr
):
    """Sums each row's fp32 parts, one from each of the P column tiles of its hidden layer, in an order that is fixed,
    and stores the sum in the slot of its token and k on its own rank. PS is the power of two from P on."""
    parts = tl.arange(0, PS)
    place = rows[:, None].to(tl.int64) * P + parts[None, :]
    score_grad_parts = tl.load(score_parts_RP + place, mask=exists[:, None] & (parts < P)[None, :], other=0.0)
    address = region_address(peers_W, source, offset_bytes) + slot.to(tl.int64) * 4
    tl.store(address.to(tl.pointer_type(tl.float32)), tl.sum(score_grad_parts, 1), mask=exists)
