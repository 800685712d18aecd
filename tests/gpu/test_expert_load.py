"""What counting the experts' load costs, against the step that it belongs to.

python -m pytest tests/gpu/test_expert_load.py
PYTHONPATH=. python tests/gpu/test_expert_load.py    # prints the times
"""

import json
import statistics
from pathlib import Path

import pytest
import torch

from recipes.expert_load import ExpertLoadCounter
from uniep.shapes import MoEShape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPE = MoEShape(num_experts=128, top_k=8, dim=2048, hidden_dim=768, ep_degree=2)
# A step of 8 layers of it with 4 sequences of 4096 tokens a GPU, as measured with TorchTitan's own block.
NUM_LAYERS, NUM_TOKENS = 8, 4 * 4096
STEP = Path(__file__).parents[2] / "benchmarks" / "bench_train_qwen3_30b_a3b_8layers.json"


def time_count_ms() -> float:
    """Median milliseconds of stacking and counting the choices of all layers of one forward."""
    counter = ExpertLoadCounter([], SHAPE, num_layers=NUM_LAYERS)
    ids = [
        torch.rand(NUM_TOKENS, SHAPE.num_experts, device="cuda").topk(SHAPE.top_k).indices for _ in range(NUM_LAYERS)
    ]
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        counts = counter.count(torch.stack(ids))
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    assert (counts[:, :-1].sum(1) == NUM_TOKENS * SHAPE.top_k).all()
    return statistics.median(times)


def test_counting_takes_less_than_half_a_percent_of_a_step():
    assert time_count_ms() < 0.005 * json.loads(STEP.read_text())["rows"][0]["step_time_ms"]


def test_counting_waits_for_nothing():
    """No host synchronisation, also where every algorithm must be deterministic."""
    counter = ExpertLoadCounter([], SHAPE, num_layers=NUM_LAYERS)
    ids_MTK = torch.zeros(NUM_LAYERS, 64, SHAPE.top_k, dtype=torch.int64, device="cuda")
    counter.count(ids_MTK)
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        counter.count(ids_MTK)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)


if __name__ == "__main__":
    step_ms = json.loads(STEP.read_text())["rows"][0]["step_time_ms"]
    count_ms = time_count_ms()
    print(f"{count_ms:.3f} ms of a step of {step_ms:.0f} ms: {100 * count_ms / step_ms:.3f} %")
