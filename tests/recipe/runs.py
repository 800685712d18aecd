"""Small training runs on CPUs as a test's function calls, and what they left in their folders."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.processes import ROOT, run_ranks

TOKENIZER = ROOT / "train_configs" / "tokenizer"
# A step takes a tenth of a second, and every expert of every rank has rows.
SHRINK = (
    "--training.seq_len=64",
    "--training.local_batch_size=2",
    "--lr_scheduler.warmup_steps=2",
    "--metrics.log_freq=2",
)

Step = dict[str, Any]


def train(folder: Path, *overrides: str, config: str = "qwen3_cpu", num_ranks: int = 2) -> list[Step]:
    """Runs recipes.train on every rank, records in `folder`, output in `folder`.logs. Returns the recorded steps."""
    args = [f"--job.config_file={ROOT}/train_configs/{config}.toml", f"--model.hf_assets_path={TOKENIZER}"]
    args += [f"--job.dump_folder={folder}", "--metrics.no_enable_wandb", *SHRINK, *overrides]
    run_ranks(_train, args, num_ranks=num_ranks, logs=folder.with_name(f"{folder.name}.logs"))
    return read_steps(folder)


def read_steps(folder: Path) -> list[Step]:
    """The lines of metrics.jsonl; none where there is no such file."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_run(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


def bits(steps: list[Step]) -> list[tuple[int, str, str]]:
    """What two runs that are the same agree on."""
    return [(step["step"], step["loss_hex"], step["grad_norm_hex"]) for step in steps]


def _train(args: list[str]) -> None:
    import torchtitan.train

    import recipes.train

    # The trainer sleeps 2 s so that the rank with the store leaves last; here the store is the test's.
    clock: Any = SimpleNamespace(perf_counter=torchtitan.train.time.perf_counter, sleep=lambda seconds: None)
    torchtitan.train.time = clock
    status = recipes.train.main(args)
    assert status == 0, status
