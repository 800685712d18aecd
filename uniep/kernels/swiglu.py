"""SwiGLU with the roundings of `F.silu(g) * u` in bf16: the epilogue of the up GEMM."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from uniep.kernels.numerics import INTERPRETED, to_bf16


@triton.jit
def swiglu(gate, up):
    """bf16 h of the fp32 accumulators of both halves: (bf16 g, bf16 u, bf16 h). Four roundings, as in eager mode.

    exp and the division are the exact ones that torch uses: Triton's own are approximations.
    """
    gate_bf16 = to_bf16(gate)
    up_bf16 = to_bf16(up)
    x = gate_bf16.to(tl.float32)
    if INTERPRETED:
        silu = x / (1.0 + tl.exp(-x))
    else:
        silu = tl.div_rn(x, 1.0 + libdevice.exp(-x))
    h = to_bf16(to_bf16(silu).to(tl.float32) * up_bf16.to(tl.float32))
    return gate_bf16, up_bf16, h


def swiglu_ref(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up
