"""SwiGLU as torch.compile rounds it: our epilogues against Inductor's own kernels, for every value of the gate."""

import pytest
import torch
import triton
import triton.language as tl

from uniep.kernels.swiglu import swiglu_backward_compiled, swiglu_compiled
from uniep.reference import compiled_swiglu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@triton.jit
def _kernel(grad_h, gate, up, h, grad_gate, grad_up, h_again, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g, u = tl.load(gate + index), tl.load(up + index)
    _, _, product = swiglu_compiled(g.to(tl.float32), u.to(tl.float32))
    tl.store(h + index, product)
    results = swiglu_backward_compiled(tl.load(grad_h + index).to(tl.float32), g, u)
    tl.store(grad_gate + index, results[0])
    tl.store(grad_up + index, results[1])
    tl.store(h_again + index, results[2])


def test_every_gate() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16)
    gate = every[torch.isfinite(every)]
    gate = gate[: len(gate) // 1024 * 1024].repeat(16)
    generator = torch.Generator("cuda").manual_seed(0)
    up, grad_h = (torch.randn(gate.shape, device="cuda", generator=generator).bfloat16() for _ in range(2))
    outputs = [torch.empty_like(gate) for _ in range(4)]
    _kernel[(len(gate) // 1024,)](grad_h, gate, up, *outputs, BLOCK=1024)
    h_of, grads_of = compiled_swiglu("cuda")
    h = h_of(gate, up)
    wanted = (h, *grads_of(grad_h, gate, up), h)
    for what, got, want in zip(("h", "grad_g", "grad_u", "h again"), outputs, wanted, strict=True):
        assert torch.equal(got.view(torch.int16), want.view(torch.int16)), what
