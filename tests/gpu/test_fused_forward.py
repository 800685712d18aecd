"""The fused forward on one GPU: W virtual ranks, a stream and a share of the multiprocessors each, against the
reference."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from tests.gpu.virtual_layer import CASES, VirtualLayer, draw_ids
from uniep import reference
from uniep.kernels.config import default_config
from uniep.kernels.swiglu import swiglu
from uniep.layer import forward_steps
from uniep.plan.layout import HeapLayout
from uniep.reference import reference_moe
from uniep.shapes import MoEShape
from uniep.symmetric.virtual_ranks import open_virtual_ranks, run_side_by_side

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("num_ranks", [1, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_equals_reference(name: str, num_ranks: int) -> None:
    """Forwards in a row with other data each. A token's result does not depend on its neighbours, so the reference
    computes each rank's tokens alone, with the experts of all ranks."""
    case = CASES[name]
    layer = VirtualLayer(case, num_ranks)
    for inputs, _ in layer.draws(num_calls=3):
        for own, (out, _) in zip(inputs, layer.forward(inputs, case.numerics, save=False), strict=True):
            if not len(own[0]):
                assert out.shape == own[0].shape
                continue
            assert torch.isfinite(out).all()
            assert torch.equal(out, reference_moe(*own, *layer.weights, group=None, numerics=case.numerics))


def test_progress_beside_a_kernel_that_holds_most_multiprocessors() -> None:
    """Programs find room one by one beside long-running kernels. Both ranks together fit the GPU: a rank of which not
    one program is resident could wait for ever."""
    shape = MoEShape(16, 4, 512, 256, 2)
    heaps = open_virtual_ranks(HeapLayout(shape, 300), device="cuda", timeout_s=20.0)
    x = [torch.randn(300, 512, device="cuda").bfloat16() for _ in heaps]
    scores = [torch.rand(300, 4, device="cuda") for _ in heaps]
    ids = [draw_ids(300, shape, None) for _ in heaps]
    up_shape, down_shape = (16, 256, 512), (16, 512, 256)
    w1, w2, w3 = (torch.randn(s, device="cuda").mul_(0.05).bfloat16() for s in (up_shape, down_shape, up_shape))
    config = default_config(torch.device("cuda"))
    config = replace(config, num_programs=config.num_programs // 2)
    busy, streams = torch.cuda.Stream(), [torch.cuda.Stream() for _ in heaps]
    big = torch.randn(8192, 8192, device="cuda").bfloat16()
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        for _ in range(20):
            big @ big
    forwards = [
        forward_steps(
            x[heap.rank],
            scores[heap.rank],
            ids[heap.rank],
            *(w[heap.rank * 8 : heap.rank * 8 + 8] for w in (w1, w2, w3)),
            heap=heap,
            config=config,
        )
        for heap in heaps
    ]
    outs = [out for out, _ in run_side_by_side(forwards, streams=streams)]
    for heap, out in zip(heaps, outs, strict=True):
        heap.check()
        rank = heap.rank
        expected = reference_moe(x[rank], scores[rank], ids[rank], w1, w2, w3, group=None)
        assert torch.equal(out, expected)


@triton.jit
def _swiglu_kernel(gate, up, h, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, _, product = swiglu(tl.load(gate + index).to(tl.float32), tl.load(up + index).to(tl.float32))
    tl.store(h + index, product)


def test_swiglu_of_every_gate() -> None:
    """All 65,536 bf16 values of g, each with several u: no bit may differ from torch."""
    gate = torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16).repeat(4)
    up = torch.randn(len(gate), device="cuda").bfloat16()
    h = torch.empty_like(gate)
    _swiglu_kernel[(len(gate) // 1024,)](gate, up, h, BLOCK=1024)
    want, finite = reference.swiglu(gate, up), torch.isfinite(gate)
    assert torch.equal(h[finite].view(torch.int16), want[finite].view(torch.int16))
