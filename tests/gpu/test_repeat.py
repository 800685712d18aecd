"""One rank, the same inputs many times: kernels on two streams and reused memory change nothing."""

import pytest
import torch

from recipes.launch_times import LayerInputs, run_layer, warm_up
from uniep.kernels.config import default_config
from uniep.plan.layout import HeapLayout
from uniep.shapes import MoEShape
from uniep.symmetric.virtual_ranks import open_virtual_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("num_tokens", [1024, 8192])
def test_same_bits_every_time(num_tokens: int) -> None:
    """The gradient of the scores runs beside those of the weights: it must not get memory that those still use."""
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    heap = open_virtual_ranks(HeapLayout(MoEShape(32, 8, 1024, 256), num_tokens, num_kept=1), device=device)[0]
    inputs, config = LayerInputs.draw(heap, num_tokens), default_config(device)
    warm_up(inputs, heap, config)
    expected, _ = run_layer(inputs, heap, config)
    for call in range(300):
        results, _ = run_layer(inputs, heap, config)
        if call % 10 == 9:  # in between, the host runs ahead
            for want, got in zip(expected, results, strict=True):
                assert torch.equal(want, got)
    heap.check()
