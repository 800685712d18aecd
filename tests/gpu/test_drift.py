"""On 2 GPUs: a long run whose routing drifts from balance to all tokens on one rank."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.recipe.runs import read_run, read_steps

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs")
ROOT = Path(__file__).parents[2]
STEPS = int(os.environ.get("DRIFT_STEPS", "5000"))


def test_no_hang_no_growth_of_memory_and_every_loss_finite(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["tests/gpu/drift_training.py", "--job.config_file", "train_configs/deepseek_v3_debug.toml"]
    command += ["--job.dump_folder", str(folder), "--training.steps", str(STEPS), "--metrics.no-enable-wandb"]
    command += ["--model.n_layers", "3", "--training.seq_len", "512", "--uniep.backend", "uniep"]
    with open(tmp_path / "log", "w") as log:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, env=environment, timeout=600)
    assert done.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    assert read_run(folder)["backend"]["ran"] == "uniep"
    steps = read_steps(folder)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"]) for step in steps)
    loads = [step["expert_load"]["tokens_per_expert"] for step in steps if "expert_load" in step]
    # Of 8 experts a token takes 3: at the end always the same ones.
    assert all(min(tokens) > 0 for tokens in loads[0])
    assert all(sum(tokens[:3]) == sum(tokens) for tokens in loads[-1])
    # All rows on one rank are the most that there can be: from then on nothing grows.
    memory = [step["memory_gib"] for step in steps]
    assert max(memory[STEPS * 3 // 4 :]) <= max(memory[: STEPS * 3 // 4])
