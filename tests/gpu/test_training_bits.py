"""On 2 GPUs: whole runs of the recipe with TorchTitan's own MoE block and with ours are the same, bit for bit."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from recipes.families import FAMILIES
from tests.processes import run_command
from tests.recipe.runs import read_run, read_steps
from tools import compare_runs

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs")
# Of each run; the environment's for longer ones.
STEPS = int(os.environ.get("STEPS", "50"))


def train(config: str, folder: Path, *overrides: str) -> CompletedProcess[str]:
    command = [sys.executable, "-m", "recipes.launch", "--job.config_file", f"train_configs/{config}.toml"]
    command += ["--job.dump_folder", str(folder), "--training.steps", str(STEPS), "--metrics.no-enable-wandb"]
    return run_command([*command, *overrides], env={**os.environ, "NGPU": "2"}, timeout_s=280.0)


# Four microbatches of 4 sequences on each of 2 data-parallel ranks.
ACCUMULATE = ("--training.global_batch_size", "32")


@pytest.mark.parametrize(
    ("ac_mode", "more"),
    [("none", ()), ("selective", ()), ("full", ()), ("none", ACCUMULATE), ("none", ("--uniep.tune.mode", "off"))],
    ids=["none", "selective", "full", "accumulate", "not tuned"],
)
@pytest.mark.parametrize("config", ["qwen3_debug", "deepseek_v3_debug"])
def test_all_backends_train_the_stock_bits(config, ac_mode, more, tmp_path, capsys):
    """Losses, gradient norms and the last weights; ours twice."""
    names = {"torchtitan": "torchtitan", "reference": "reference", "uniep": "uniep", "again": "uniep"}
    folders = {name: tmp_path / name for name in names}

    def run(name: str) -> CompletedProcess[str]:
        overrides = ("--uniep.backend", names[name], "--activation_checkpoint.mode", ac_mode, *more)
        return train(config, folders[name], *overrides)

    with ThreadPoolExecutor(len(names)) as side_by_side:
        for done in side_by_side.map(run, names):
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    status = compare_runs.main([str(folder) for folder in folders.values()])
    said = capsys.readouterr().out
    assert status == 0, said
    assert f"identical: {STEPS} steps, and the weights behind step {STEPS}" in said
    # The blocks of all call the same routers: each token is counted once, whatever is recomputed.
    stock, *others = ([step for step in read_steps(folder) if "expert_load" in step] for folder in folders.values())
    for ours in others:
        assert [step["expert_load"] for step in stock] == [step["expert_load"] for step in ours]
    model = read_run(folders["reference"])["config"]["model"]
    top_k = FAMILIES[model["name"]].model_args[model["flavor"]].moe_args.top_k
    for step in ours:
        routed = step["tokens_seen"] // step["step"] * top_k
        assert all(sum(tokens) == routed for tokens in step["expert_load"]["tokens_per_expert"])
