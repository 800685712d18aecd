"""On 2 GPUs: our MoE blocks against TorchTitan's own, and the fused layer against the reference beside other work."""

import json

import pytest
import torch

from tests.processes import run_on_two_gpus

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs")


@pytest.mark.parametrize(
    ("backend", "cases"),
    [("reference", "shapes"), ("reference", "top_k"), ("reference", "routing"), ("uniep", "routing")],
)
def test_equals_stock(backend, cases):
    done = run_on_two_gpus("stock_equality.py", "--backend", backend, "--cases", cases, timeout_s=280.0)
    assert '"equal": true' in done.stdout


@pytest.mark.parametrize("heap", ["nvshmem", "torch"])
def test_fused_equals_reference(heap):
    """Also beside an all-gather, and while another kernel holds most multiprocessors."""
    args = ("--heap", heap, "--calls", "20", "--tokens", "1000", "--hold", "100")
    done = run_on_two_gpus("run_two_gpus.py", *args, timeout_s=280.0)
    line = json.loads(done.stdout.splitlines()[-1])
    unequal = {name: value for name, value in line.items() if name.startswith("unequal")}
    assert unequal == {"unequal": 0, "unequal_beside_all_gather": 0, "unequal_beside_held": 0}
