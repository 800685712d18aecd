"""On 2 GPUs: a training run whose sequences cross the tuner's buckets compiles nothing and keeps the default's bits."""

import json
import statistics
from pathlib import Path

import pytest
import torch

from tests.gpu.bucket_training import SHARES, STEPS_OF_LENGTH
from tests.processes import run_on_two_gpus
from tests.recipe.runs import read_run, read_steps
from tools import compare_runs

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs")
# All lengths twice: first met by the tuner, then met before.
NUM_STEPS = 2 * len(SHARES) * STEPS_OF_LENGTH


def train(folder: Path, mode: str) -> str:
    """Returns the log of both ranks."""
    args = ["--job.config_file", "train_configs/qwen3_debug.toml", "--job.dump_folder", str(folder)]
    args += ["--training.steps", str(NUM_STEPS), "--metrics.no-enable-wandb"]
    args += ["--uniep.backend", "uniep", "--uniep.tune.mode", mode, "--uniep.tune.bucket_tokens", "2048"]
    done = run_on_two_gpus("bucket_training.py", *args, timeout_s=200.0)
    return done.stdout + done.stderr


@pytest.mark.timeout(700)  # for three runs
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
    # Where a bucket is met first the step should do what the un-tuned run's does there; clocks assert nothing.
    times = {
        name: [step["step_time_s"] for step in read_steps(folder) if "step_time_s" in step]
        for name, folder in folders.items()
    }
    late = [ours - default for ours, default in zip(times["model"], times["off"], strict=True)]
    print(f"tuned less un-tuned step: median {statistics.median(late):.4f} s, largest {max(late[1:]):.4f} s; {tuned}")
