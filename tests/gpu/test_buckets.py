"""On 2 GPUs: a training run whose sequences cross the tuner's buckets stalls nowhere, and keeps the default's bits."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.bucket_training import SHARES, STEPS_OF_LENGTH
from tests.recipe.runs import read_run, read_steps
from tools import compare_runs

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs")
ROOT = Path(__file__).parents[2]
# All lengths twice: first met by the tuner, then met before.
NUM_STEPS = 2 * len(SHARES) * STEPS_OF_LENGTH


def train(folder: Path, mode: str) -> str:
    """Returns the log of both ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["tests/gpu/bucket_training.py", "--job.config_file", "train_configs/qwen3_debug.toml"]
    command += ["--job.dump_folder", str(folder), "--training.steps", str(NUM_STEPS), "--metrics.no-enable-wandb"]
    command += ["--uniep.backend", "uniep", "--uniep.tune.mode", mode, "--uniep.tune.bucket_tokens", "2048"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_crossing_buckets_compiles_nothing_and_changes_no_bit(tmp_path, capsys):
    folders = {mode: tmp_path / mode for mode in ("off", "model", "again")}
    logs = {name: train(folder, "model" if name == "again" else name) for name, folder in folders.items()}
    status = compare_runs.main([str(folder) for folder in folders.values()])
    said = capsys.readouterr().out
    assert status == 0, said
    assert f"identical: {NUM_STEPS} steps, and the weights behind step {NUM_STEPS}" in said

    # Each bucket was entered, by both ranks, with one choice; a second cold run makes the same ones.
    tuned, again = (read_run(folders[name])["backend"]["tune"] for name in ("model", "again"))
    assert tuned["choices"] == again["choices"]
    entered = [line.split("Tuned for ")[1] for line in logs["model"].splitlines() if "Tuned for " in line]
    assert len(set(entered)) == len(tuned["choices"]) == 4
    assert all(entered.count(choice) == 2 for choice in entered)

    compiled = json.loads((folders["model"] / "compiled.json").read_text())
    assert len(compiled) == NUM_STEPS
    assert len(set(compiled)) == 1, "a step compiled"
    # Where a bucket is met first the step does what the un-tuned run's does there.
    times = {
        name: [step["step_time_s"] for step in read_steps(folder) if "step_time_s" in step]
        for name, folder in folders.items()
    }
    late = [ours - default for ours, default in zip(times["model"], times["off"], strict=True)]
    print(f"tuned less un-tuned step: median {statistics.median(late):.4f} s, largest {max(late[1:]):.4f} s; {tuned}")
    assert max(late[1:]) < 0.3, late
