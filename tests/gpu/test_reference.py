"""On 2 GPUs: the reference against TorchTitan's own block."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs")


@pytest.mark.parametrize("cases", ["shapes", "top_k", "routing"])
def test_reference_equals_stock(cases):
    worker = Path(__file__).with_name("stock_equality.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(worker), "--cases", cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=worker.parents[2])
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert '"equal": true' in done.stdout
