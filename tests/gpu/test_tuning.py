"""The tuner on one GPU: nothing compiles after the start, bits are the default's, and times come in."""

from typing import Any

import pytest
import torch

from recipes.config import Tune
from recipes.launch_times import LayerInputs, compile_ahead, warm_up
from recipes.tuning import open_tuner
from tests.gpu.bucket_training import num_compiled
from uniep.autotune.hardware import shipped
from uniep.kernels.config import default_config
from uniep.layer import fused_moe
from uniep.numerics import Numerics
from uniep.plan.layout import HeapLayout
from uniep.shapes import MoEShape
from uniep.symmetric.virtual_ranks import open_virtual_ranks

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_name() not in {hardware.name for hardware in shipped()},
    reason="needs a GPU that the package describes",
)

SHAPE = MoEShape(32, 4, 1024, 512)


@pytest.mark.parametrize("score_before_experts", [False, True])
@pytest.mark.parametrize("mode", ["model", "measured"])
def test_steps_of_all_buckets(mode: Any, score_before_experts: bool, tmp_path) -> None:
    (heap,) = open_virtual_ranks(HeapLayout(SHAPE, 4096), device="cuda")
    numerics = Numerics(score_before_experts)
    base = default_config(heap.device)
    options = Tune(
        mode=mode, bucket_tokens=1024, cache=str(tmp_path), num_candidates=3, watch_calls=1, watch_samples=1000
    )
    tuner, _ = open_tuner(heap, None, base=base, options=options, numerics=numerics)
    before = num_compiled()
    for num_tokens in (200, 1024, 1025, 2500, 4096):
        inputs = LayerInputs.draw(heap, num_tokens)
        x, scores, *weights = leaves = [
            tensor.requires_grad_()
            for tensor in (inputs.x_TD, inputs.scores_TK, inputs.w1_LFD, inputs.w2_LDF, inputs.w3_LFD)
        ]
        more: dict[str, Any] = {"heap": heap, "numerics": numerics}
        out = tuner.run(x, scores, inputs.expert_ids_TK, *weights, **more)
        got = [out, *torch.autograd.grad(out, leaves, inputs.grad_TD)]
        assert num_compiled() == before, "a step compiled"
        out = fused_moe(x, scores, inputs.expert_ids_TK, *weights, **more, config=base)
        want = [out, *torch.autograd.grad(out, leaves, inputs.grad_TD)]
        assert num_compiled() == before
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    torch.cuda.synchronize()
    tuner.before_call(0)
    assert tuner.metrics()["tuner/tokens"] == 4096
    assert tuner.metrics()["tuner/measured_ms"] > 0


def test_what_was_compiled_ahead_runs() -> None:
    (heap,) = open_virtual_ranks(HeapLayout(SHAPE, 2048, num_kept=1), device="cuda")
    inputs, config = LayerInputs.draw(heap, 2048), default_config(heap.device)
    compile_ahead(inputs, heap, [config])
    before = num_compiled()
    assert before
    warm_up(inputs, heap, config)
    torch.cuda.synchronize()
    heap.check()
    assert num_compiled() == before
