"""SwiGLU with the roundings of `F.silu(g) * u` in bf16: the epilogue of the up GEMM."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from uniep.kernels.numerics import to_bf16


@triton.jit
def swiglu(gate, up):
    """bf16 h of the fp32 accumulators of both halves: (bf16 g, bf16 u, bf16 h). Four roundings, as in eager mode.

    exp and the division are the fast approximations. g has only 65,536 values, and a test on the GPU goes
    through all of them: after its rounding to bf16 none differs from torch.
    """
    gate_bf16 = to_bf16(gate)
    up_bf16 = to_bf16(up)
    x = gate_bf16.to(tl.float32)
    silu = x / (1.0 + tl.exp(-x))
    h = to_bf16(to_bf16(silu).to(tl.float32) * up_bf16.to(tl.float32))
    return gate_bf16, up_bf16, h


def swiglu_ref(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up
