"""The operations whose bits the interpreter does not give by itself."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def to_bf16(x):
    """Rounds fp32 to the nearest bf16, ties to even. The interpreter's own cast truncates."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def round_to_bf16(x):
    """fp32 to the fp32 of the nearest bf16. One instruction: packed beside a zero the bf16 is the upper half already,
    where a conversion of its own runs at a quarter of the rate and needs a shift."""
    if INTERPRETED:
        return to_bf16(x).to(tl.float32)
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;", "=r,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def dot_bf16(a, b, acc):
    """acc + a @ b for bf16 tiles and an fp32 accumulator. The interpreter would multiply the bit patterns."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc)


@triton.jit
def multiply_bf16(a, b):
    """The product of bf16, rounded once: two at a time, where fp32 takes six instructions, to bf16 and all."""
    if INTERPRETED:
        return to_bf16(a.to(tl.float32) * b.to(tl.float32))
    return tl.inline_asm_elementwise(
        "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
        "=r,r,r",
        [a, b],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )
