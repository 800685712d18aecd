"""SwiGLU with the roundings of `F.silu(g) * u` in bf16, and its backward: epilogues of GEMMs."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from uniep.kernels.numerics import INTERPRETED, multiply_bf16, round_to_bf16, to_bf16


@triton.jit
def swiglu(gate, up):
    """bf16 h of the fp32 accumulators of both halves: (bf16 g, bf16 u, bf16 h). Four roundings, as in eager mode.

    exp and the division are the fast approximations. g has only 65,536 values, and a test on the GPU goes
    through all of them: after its rounding to bf16 none differs from torch.
    """
    x = round_to_bf16(gate)
    silu = to_bf16(x / (1.0 + tl.exp(-x)))
    up = to_bf16(up)
    return to_bf16(gate), up, multiply_bf16(silu, up)


@triton.jit
def swiglu_compiled(gate, up):
    """As torch.compile makes it of `F.silu(g) * u`, operation by operation what Inductor's kernel does: silu is
    not rounded before the product."""
    x = round_to_bf16(gate)
    return to_bf16(gate), to_bf16(up), to_bf16(_divide(x, _exp(-x) + 1.0) * round_to_bf16(up))


@triton.jit
def swiglu_backward(grad_h, gate, up):
    """(bf16 grad_g, bf16 grad_u, bf16 h) of the fp32 accumulator of grad_h and of the bf16 halves, as autograd does it.

    silu'(x) is s * (1 + x * (1 - s)) in fp32 behind the incoming gradient, as torch.ops.aten.silu_backward computes
    it, with one fused multiply-add; the operations before it are each rounded to bf16. Its sigmoid is exact: unlike in
    the forward any gradient may come behind it, and an approximation shows after the rounding. silu is x times that
    sigmoid here: a test on the GPU goes through all values of g, and none differs from torch after its rounding.
    """
    grad_h = to_bf16(grad_h)
    x = gate.to(tl.float32)
    sigmoid = reciprocal(1.0 + _exp(-x))
    silu = to_bf16(x * sigmoid)
    grad_silu = multiply_bf16(grad_h, up).to(tl.float32)
    slope = tl.fma(x, 1.0 - sigmoid, tl.full(x.shape, 1.0, tl.float32))
    grad_gate = to_bf16(grad_silu * sigmoid * slope)
    return grad_gate, multiply_bf16(grad_h, silu), multiply_bf16(silu, up)


@triton.jit
def swiglu_backward_compiled(grad_h, gate, up):
    """The same as torch.compile makes it, operation by operation what Inductor's kernel does."""
    grad_h = round_to_bf16(grad_h)
    x = gate.to(tl.float32)
    up = up.to(tl.float32)
    denominator = _exp(-x) + 1.0
    silu = _divide(x, denominator)
    h = to_bf16(silu * up)
    grad_up = to_bf16(grad_h * silu)
    sigmoid = _divide(tl.full(x.shape, 1.0, tl.float32), denominator)
    grad_gate = to_bf16(grad_h * up * sigmoid * (x * (1.0 - sigmoid) + 1.0))
    return grad_gate, grad_up, h


@triton.jit
def swiglu_backward_scored(grad_h, gate, up, score):
    """The backward of score * h: (bf16 grad_g, bf16 grad_u, bf16 score * h, fp32 grad_h * h).

    grad_h is the fp32 gradient of score * h, gate and up are bf16, score is fp32 and broadcasts. grad_h is rounded to
    bf16, so that it moves to its place in the epilogue as such, then the first three results; nothing else is. The sum
    of the last one over the hidden dimension is the gradient of the score.
    """
    grad_h = round_to_bf16(grad_h)
    x = gate.to(tl.float32)
    up = up.to(tl.float32)
    # Exact as above, because the approximation spills: nothing then keeps the parts of a tile apart.
    sigmoid = reciprocal(1.0 + _exp(-x))
    silu = x * sigmoid
    slope = sigmoid + silu * (1.0 - sigmoid)
    grad_up = grad_h * silu
    grad_gate = grad_h * up * slope
    return to_bf16(grad_gate * score), to_bf16(grad_up * score), to_bf16(silu * up * score), grad_up * up


@triton.jit
def _exp(x):
    """As CUDA's expf."""
    return tl.exp(x) if INTERPRETED else libdevice.exp(x)


@triton.jit
def _divide(x, y):
    """As `/` of Triton, and so of Inductor's kernels: not rounded to the nearest. An instruction of its own, because
    the compiler spills what it moves around."""
    if INTERPRETED:
        return x / y
    return tl.inline_asm_elementwise(
        "div.full.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
    )


# rcp.rn.f32 is a branch and a call beside the usual case, element by element: nothing runs beside it. This is its usual
# case, Newton's step from the approximation, at a quarter of x, where neither is too small or too large.
_RECIPROCAL = tl.constexpr("""
{
    .reg .f32 quarter, near, error;
    mul.rn.f32 quarter, $1, 0f3E800000;
    rcp.approx.ftz.f32 near, quarter;
    mul.rn.f32 near, near, 0f3E800000;
    min.f32 error, $1, 0f7F7FFFFF;
    neg.f32 error, error;
    fma.rn.f32 error, error, near, 0f3F800000;
    fma.rn.f32 $0, near, error, near;
}
""")


@triton.jit
def reciprocal(x):
    """Rounded to the nearest, of x from 1 to 2^126, and of every 1 + exp(-g) above."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise(_RECIPROCAL, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
