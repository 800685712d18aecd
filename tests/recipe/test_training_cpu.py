"""Real training runs on CPUs, of the small configs with few steps."""

import itertools
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.processes import run_command, run_ranks
from tests.recipe.runs import ROOT, SHRINK, TOKENIZER, bits, read_run, read_steps, train
from tests.recipe.runs import _train as train_rank
from tests.recipe.wandb_file import read_history, read_run_ids
from tools import compare_runs
from uniep.reference import reference_moe

# torch's own settings of threads and a key of wandb must not leak in from outside.
_DROPPED = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_RUN_ID", "CONFIG_FILE", "NNODES", "OMP_NUM_THREADS")


def launch(folder: Path, *overrides: str, num_ranks: int = 2, **env: str) -> subprocess.CompletedProcess[str]:
    """`./run_train.sh` behind its setup."""
    command = [sys.executable, "-m", "recipes.launch", f"--job.dump_folder={folder}", *SHRINK, *overrides]
    kept = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    # No login of this machine's user either.
    kept |= {"NGPU": str(num_ranks), "HOME": str(folder.parent), "NETRC": str(folder.parent / "netrc"), **env}
    return run_command(command, env=kept, timeout_s=240.0)


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> tuple[Path, str]:
    """A run by the launcher with the default config and wandb: its folder and its output."""
    folder = tmp_path_factory.mktemp("launched") / "run"
    done = launch(folder, "--training.steps=5", OMP_NUM_THREADS="1")  # as train()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder, done.stdout


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    """8 steps in one go."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(folder, "--training.steps=8", "--lr_scheduler.total_steps=8")
    return folder


def test_the_same_config_gives_the_same_bits(launched, tmp_path, capsys):
    folder, _ = launched
    again = tmp_path / "again"
    steps = train(again, "--training.steps=5", "--throughput.time_moe")
    assert all(0 < step["moe_s"] < step["forward_backward_s"] for step in steps)
    assert not (again / "wandb").exists()
    assert compare_runs.main([str(folder), str(again)]) == 0
    assert "identical: 5 steps, and the weights behind step 5" in capsys.readouterr().out
    assert {"tok_embeddings.weight", "layers.0.moe.experts.w1"} <= set(read_run(again)["weights"]["fingerprints"])


def test_another_seed_gives_other_bits(uninterrupted, tmp_path, capsys):
    """The comparison can fail."""
    train(tmp_path / "seed", "--training.steps=2", "--lr_scheduler.total_steps=8", "--debug.seed=43")
    assert compare_runs.main([str(uninterrupted), str(tmp_path / "seed"), "--force"]) == 1
    assert "first at step 1" in capsys.readouterr().out


def test_run_json_says_what_ran(launched):
    folder, _ = launched
    run = read_run(folder)
    assert run["backend"] == {"requested": "auto", "ran": "reference", "numerics": "bitwise"}
    assert run["devices"]["world_size"] == 2
    assert run["config"]["training"]["steps"] == 5
    assert run["config"]["uniep"]["backend"] == "auto"
    assert run["versions"]["torch"] == metadata.version("torch")
    assert len(run["data"]["sha256"]) == len(run["data"]["tokenizer_sha256"]) == 64


def test_every_step_is_recorded(launched):
    steps = read_steps(launched[0])
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    for step in steps:
        assert float.fromhex(step["loss_hex"]) == step["loss"]
        assert float.fromhex(step["grad_norm_hex"]) == step["grad_norm"]
        assert step["tokens_seen"] == step["step"] * 2 * 2 * 64
        assert step["tokens_per_second"] * step["step_time_s"] == pytest.approx(2 * 2 * 64)
        assert step["tokens_per_day"] == step["tokens_per_second"] * 86400
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_the_expert_load_of_logged_steps_is_recorded(launched):
    steps = read_steps(launched[0])
    assert [step["step"] for step in steps if "expert_load" in step] == [1, 2, 4, 5]
    for step in steps:
        if load := step.get("expert_load"):
            assert load["layers"] == [0, 1]
            assert [sum(tokens) for tokens in load["tokens_per_expert"]] == [2 * 2 * 64 * 2] * 2
            assert load["distinct_ranks_expected"] == pytest.approx(2 * (1 - 6 / 28), abs=1e-4)
            assert all(1 <= distinct <= 2 for distinct in load["distinct_ranks"])
            # The experts of the ranks are not copies of each other.
            assert all(tokens[:4] != tokens[4:] for tokens in load["tokens_per_expert"])
    for step in steps[1:]:
        assert 0 < step["data_loading_s"] + step["forward_backward_s"] < step["step_time_s"]


def test_the_console_says_tokens_per_day(launched):
    _, output = launched
    lines = [line for line in output.splitlines() if "tokens/day" in line]
    assert len(lines) == 4, output  # steps 1, 2, 4 and the last
    assert "MFU is left out" in output
    assert "mfu:" not in output
    assert 'MoE backend: "reference"' in output


def test_wandb_runs_offline_and_holds_tokens_per_day(launched):
    folder, output = launched
    assert "wandb has no API key: the run is recorded offline" in output
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    history = read_history(file)
    assert [row["step"] for row in history] == [1, 2, 4, 5]
    by_step = {step["step"]: step for step in read_steps(folder)}
    for row in history:
        assert row["throughput/tokens_per_day"] == row["throughput/tokens_per_second"] * 86400
        assert row["loss_metrics/global_avg_loss"] == by_step[row["step"]]["loss"]
        assert row["throughput/tokens_seen"] == by_step[row["step"]]["tokens_seen"]
        assert "throughput/mfu(%)" not in row
        load = by_step[row["step"]]["expert_load"]
        assert row["expert_load/layer_01.values"] == load["tokens_per_expert"][1]
        assert row["expert_load/imbalance_max"] == max(load["imbalance"])
    assert history[0]["throughput/tokens_per_day"] == pytest.approx(by_step[1]["tokens_per_day"])
    assert read_run_ids(file)[0] == read_run(folder)["run_id"]


def test_wandb_gets_the_loss_of_validations(tmp_path):
    args = ["--training.steps=2", "--validation.enable", "--validation.dataset=stdlib", "--validation.freq=2"]
    args += ["--validation.steps=1", "--validation.seq_len=64", "--validation.local_batch_size=4"]
    done = launch(tmp_path / "run", *args, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    name = "validation_metrics/loss"
    losses = {row["step"]: row[name] for row in read_history(file) if name in row}
    assert losses.keys() == {1, 2}
    assert all(6.0 < loss < 9.0 for loss in losses.values())


def test_resumed_equals_uninterrupted(uninterrupted, tmp_path, capsys):
    """Checkpoint at step 3, records to step 5, and then again: as after a crash in step 6."""
    folder = tmp_path / "resumed"
    checkpoints = ("--checkpoint.enable", "--checkpoint.interval=3", "--lr_scheduler.total_steps=8")
    first = train(folder, "--training.steps=5", *checkpoints)
    assert [step["step"] for step in first] == [1, 2, 3, 4, 5]
    run_id = read_run(folder)["run_id"]
    shutil.rmtree(folder / "checkpoint" / "step-5")

    steps = train(folder, "--training.steps=8", *checkpoints)
    assert bits(steps) == bits(read_steps(uninterrupted))
    assert steps[:3] == first[:3]
    assert [step["tokens_seen"] for step in steps] == [256 * step["step"] for step in steps]
    assert compare_runs.main([str(uninterrupted), str(folder)]) == 0, capsys.readouterr().out
    run = read_run(folder)
    assert (run["run_id"], run["restarts"]) == (run_id, 1)


def _train_and_give_up(args: list[str]) -> None:
    """A kernel gives up a wait in step 3, as one does whose peer died in the backward."""
    import recipes.parallelize
    from uniep.symmetric.watch import WaitTimeoutError

    open_backend = recipes.parallelize.open_backend
    steps = itertools.count(1)

    def check() -> None:
        if next(steps) == 3:
            raise WaitTimeoutError("rank 1 sent nothing")

    recipes.parallelize.open_backend = lambda *a, **k: replace(open_backend(*a, **k), check=check)
    with pytest.raises(WaitTimeoutError):
        train_rank(args)


def test_no_checkpoint_is_kept_of_a_step_in_which_a_kernel_gave_up(tmp_path):
    folder = tmp_path / "run"
    args = [f"--job.config_file={ROOT}/train_configs/qwen3_cpu.toml", f"--model.hf_assets_path={TOKENIZER}"]
    args += [f"--job.dump_folder={folder}", "--metrics.no_enable_wandb", *SHRINK, "--training.steps=5"]
    args += ["--checkpoint.enable", "--checkpoint.interval=1"]
    run_ranks(_train_and_give_up, args, num_ranks=2, logs=tmp_path / "logs")
    assert sorted(path.name for path in (folder / "checkpoint").iterdir()) == ["step-1", "step-2"]


def test_pipeline_stages_train(tmp_path):
    """The rank that records has the stage without experts; the records are of the whole model all the same."""
    stages = ["--parallelism.pipeline_parallel_degree=2", "--parallelism.expert_parallel_degree=1"]
    stages += ["--parallelism.pipeline_parallel_last_stage_less_layers=2", "--model.n_layers=2"]
    steps = train(tmp_path / "run", "--training.steps=2", *stages, config="deepseek_v3_cpu")
    run = read_run(tmp_path / "run")
    assert run["backend"]["ran"] == "reference"
    assert {"layers.1.moe.experts.w1", "output.weight"} <= set(run["weights"]["fingerprints"])
    load = steps[1]["expert_load"]
    assert load["layers"] == [1]
    assert [sum(tokens) for tokens in load["tokens_per_expert"]] == [steps[0]["tokens_seen"] * 2]


def test_a_new_run_keeps_older_records_aside(tmp_path):
    first = train(tmp_path / "run", "--training.steps=3")
    train(tmp_path / "run", "--training.steps=2")
    assert [step["step"] for step in read_steps(tmp_path / "run")] == [1, 2]
    kept = (tmp_path / "run" / "earlier.1" / "metrics.jsonl").read_text().splitlines()
    assert len(kept) == len(first)


def test_deepseek_v3_trains(tmp_path):
    steps = train(tmp_path / "run", "--training.steps=6", config="deepseek_v3_cpu")
    assert len(steps) == 6
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert read_run(tmp_path / "run")["backend"]["ran"] == "reference"
    loads = [step["expert_load"] for step in steps if "expert_load" in step]
    assert [load["layers"] for load in loads] == [[1, 2]] * 4  # steps 1, 2, 4 and 6; layer 0 is dense
    assert all([sum(tokens) for tokens in load["tokens_per_expert"]] == [2 * 2 * 64 * 2] * 2 for load in loads)


def test_bf16_trains(tmp_path):
    steps = train(tmp_path / "run", "--training.steps=4", "--training.mixed_precision_param=bfloat16")
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_n_layers_cuts_the_model(tmp_path):
    train(tmp_path / "run", "--training.steps=1", "--model.n_layers=1")
    log = (tmp_path / "run.logs" / "rank0.log").read_text()
    assert '"n_layers": 1' in log


def test_local_text_trains(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for name in ("a.txt", "b.txt"):
        (text / name).write_text("\n".join(f"{name} line {i}: the quick brown fox" for i in range(400)))
    local = ("--training.dataset=local", f"--training.dataset_path={text}")
    train(tmp_path / "run", "--training.steps=3", *local)
    assert read_run(tmp_path / "run")["data"]["sha256_of"] == "contents"
    assert len(read_steps(tmp_path / "run")) == 3


def train_in_bf16(folder: Path, mode: str, option: str) -> list[tuple[Any, ...]]:
    """The bits of every step, and the loads of the experts."""
    steps = train(
        folder,
        "--training.steps=3",
        "--training.mixed_precision_param=bfloat16",
        f"--activation_checkpoint.mode={mode}",
        f"--activation_checkpoint.selective_ac_option={option}",
    )
    loads = [step["expert_load"] for step in steps if "expert_load" in step]
    assert len(loads) == 3
    for load in loads:
        assert [sum(tokens) for tokens in load["tokens_per_expert"]] == [2 * 2 * 64 * 2] * 2
    return [*bits(steps), *((load["layers"], load["tokens_per_expert"]) for load in loads)]


def test_activation_checkpointing_keeps_the_bits_and_the_counts(tmp_path):
    """A whole training; the other modes and DeepSeek-V3 take one step, below."""
    assert train_in_bf16(tmp_path / "op", "selective", "op") == train_in_bf16(tmp_path / "none", "none", "2")


def one_step(config: str, mode: str, option: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """One step of 2 ranks in bf16, with a router between whose logits are ties and near ties.

    Returns the tokens per expert of each MoE layer, halved under recomputation as TorchTitan's balancing hook does it
    (DeepSeek-V3 has the hook, and there they are what the hook takes), and all gradients.
    """
    import recipes  # noqa: F401, I001  prepares the platform
    from torch.distributed.tensor import DTensor
    from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing
    from torchtitan.distributed import ParallelDims

    from recipes.families import FAMILIES
    from recipes.load import load_config

    job = load_config(
        [
            f"--job.config_file={ROOT}/train_configs/{config}.toml",
            f"--model.hf_assets_path={TOKENIZER}",
            "--training.mixed_precision_param=bfloat16",
            f"--activation_checkpoint.mode={mode}",
            f"--activation_checkpoint.selective_ac_option={option}",
        ]
    )
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dims = ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=2, etp=1, world_size=2)
    spec = FAMILIES[job.model.name]
    model_args: Any = spec.model_args["cpu"]
    model_args.update_from_config(job)
    with torch.device("meta"):
        model: Any = spec.model_cls(model_args)
    model = spec.parallelize_fn(model, dims, job)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
        for block in model.layers.values():
            if block.moe_enabled:
                gate = block.moe.router.gate.weight
                rows = gate.full_tensor() if isinstance(gate, DTensor) else gate
                # Experts in pairs, the second of each a bf16 rounding away or equal.
                tied = rows[::2].repeat_interleave(2, 0)
                tied[1::4] *= 1 + 2.0**-9
                shard = tied.chunk(2)[rank] if isinstance(gate, DTensor) else tied
                (gate.to_local() if isinstance(gate, DTensor) else gate).copy_(shard)
    optimizers = spec.build_optimizers_fn([model], job.optimizer, dims)

    torch.manual_seed(1 + rank)
    tokens = torch.randint(0, 2048, (2, 65))
    logits = model(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    loss.backward()
    grads = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grad = parameter.grad
        grads[name.replace("_checkpoint_wrapped_module.", "")] = (
            grad.full_tensor() if isinstance(grad, DTensor) else grad
        )

    blocks = [block for block in model.layers.values() if block.moe_enabled]
    counts = [block.moe.tokens_per_expert // (2 if hasattr(block, "checkpoint_impl") else 1) for block in blocks]
    if spec.build_optimizers_fn is build_optimizers_with_moe_load_balancing:
        hooked: list[Tensor] = []
        stock_vstack = torch.vstack

        def vstack(tensors: list[Tensor]) -> Tensor:
            hooked.extend(tensor.clone() for tensor in tensors)
            return stock_vstack(tensors)

        torch.vstack = vstack  # type: ignore[assignment]
        optimizers.step()
        assert all(torch.equal(a, b) for a, b in zip(counts, hooked, strict=True))
        assert all(not block.moe.tokens_per_expert.any() for block in blocks)
    dist.destroy_process_group()
    return counts, grads


@pytest.fixture(scope="module", params=["qwen3_cpu", "deepseek_v3_cpu"])
def config_and_step(request) -> tuple[str, list[tuple[list[Tensor], dict[str, Tensor]]]]:
    """A config, and each rank's step without activation checkpointing."""
    return request.param, run_ranks(one_step, request.param, "none", "2", num_ranks=2)


def test_counts_are_tokens_times_top_k(config_and_step):
    _, ranks = config_and_step
    for counts, _ in ranks:
        assert len(counts) == 2
        assert all(layer.sum() == 2 * 64 * 2 for layer in counts)


@pytest.mark.parametrize(("mode", "option"), [("selective", "2"), ("selective", "op"), ("full", "2")])
def test_recomputing_counts_and_routes_as_the_first_time(config_and_step, mode, option):
    """The counts after TorchTitan's correction are the same in every mode, and ties go the same way again."""
    config, expected = config_and_step
    found = run_ranks(one_step, config, mode, option, num_ranks=2)
    for (counts, grads), (right_counts, right_grads) in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(counts, right_counts, strict=True))
        assert grads.keys() == right_grads.keys()
        for name, grad in grads.items():
            assert torch.equal(grad, right_grads[name]), name


def test_accumulated_steps_equal_whole_ones(tmp_path):
    whole = train(tmp_path / "whole", "--training.steps=4", "--training.local_batch_size=4")
    accumulated = train(
        tmp_path / "accumulated",
        "--training.steps=4",
        "--training.local_batch_size=1",
        "--training.global_batch_size=8",
    )
    assert "gradient accumulation steps 4" in (tmp_path / "accumulated.logs" / "rank0.log").read_text()
    for step in (whole[1], accumulated[1]):
        assert [sum(tokens) for tokens in step["expert_load"]["tokens_per_expert"]] == [2 * 4 * 64 * 2] * 2
    for a, b in zip(whole, accumulated, strict=True):
        assert b["tokens_seen"] == a["tokens_seen"] == a["step"] * 8 * 64
        assert b["tokens_per_second"] * b["step_time_s"] == pytest.approx(8 * 64)
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("config", ["qwen3_cpu", "deepseek_v3_cpu"])
def test_expert_parallel_degrees_agree(config, tmp_path):
    """EP = 1, 2 and 4 over the same 4 ranks, batches and first weights."""
    train(
        tmp_path / "seed",
        "--checkpoint.enable",
        "--checkpoint.create_seed_checkpoint",
        "--parallelism.expert_parallel_degree=1",
        config=config,
        num_ranks=1,
    )
    runs = {
        degree: train(
            tmp_path / f"ep{degree}",
            "--training.steps=2",
            "--training.local_batch_size=1",
            "--checkpoint.enable",
            "--checkpoint.interval=100",
            "--checkpoint.load_only",
            f"--checkpoint.initial_load_path={tmp_path}/seed/checkpoint/step-0",
            f"--parallelism.expert_parallel_degree={degree}",
            config=config,
            num_ranks=4,
        )
        for degree in (1, 2, 4)
    }
    for degree in (2, 4):
        for a, b in zip(runs[1], runs[degree], strict=True):
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-5), degree
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4), degree


def dtypes_inside_fsdp() -> dict[str, torch.dtype]:
    """What RoutedExperts hands to its backend when FSDP2 casts a module's arguments to bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torchtitan.models.moe.moe import GroupedExperts

    from recipes.backend import RoutedBackend
    from recipes.experts import RoutedExperts, Routing

    dist.init_process_group("gloo")
    seen = {}

    def spy(x_TD: Tensor, scores_TK: Tensor, expert_ids_TK: Tensor, w1: Tensor, *args: Tensor) -> Tensor:
        seen.update(x=x_TD.dtype, scores=scores_TK.dtype, expert_ids=expert_ids_TK.dtype, w1=w1.dtype)
        return reference_moe(x_TD, scores_TK, expert_ids_TK, w1, *args, group=None)

    stock = GroupedExperts(dim=16, hidden_dim=8, num_experts=4, use_grouped_mm=True)
    with torch.no_grad():
        stock.init_weights(0.02)
    module = RoutedExperts(stock, RoutedBackend("spy", spy), ep_mesh=None)
    fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    scores_TK = torch.rand(6, 2, requires_grad=True)
    expert_ids_TK = torch.rand(6, 4).argsort(1)[:, :2]
    out_TD = module(torch.randn(6, 16), Routing(scores_TK, expert_ids_TK))
    out_TD.float().sum().backward()
    assert scores_TK.grad is not None
    seen.update(out=out_TD.dtype, grad_scores=scores_TK.grad.dtype)
    dist.destroy_process_group()
    return seen


def test_fsdp_leaves_the_scores_in_fp32():
    (seen,) = run_ranks(dtypes_inside_fsdp, num_ranks=1)
    assert seen == {
        "x": torch.bfloat16,
        "scores": torch.float32,
        "expert_ids": torch.int64,
        "w1": torch.bfloat16,
        "out": torch.bfloat16,
        "grad_scores": torch.float32,
    }


def test_a_finished_run_goes_on(tmp_path, capsys):
    """Started again it has nothing to do; with more steps it goes on where it ended."""
    options = ("--checkpoint.enable", "--checkpoint.interval=2", "--lr_scheduler.total_steps=6")
    folder = tmp_path / "run"
    train(folder, "--training.steps=4", *options)
    records = [(folder / name).read_text() for name in ("run.json", "metrics.jsonl")]
    train(folder, "--training.steps=4", *options)
    assert [(folder / name).read_text() for name in ("run.json", "metrics.jsonl")] == records
    train(folder, "--training.steps=6", *options)
    train(tmp_path / "whole", "--training.steps=6", "--lr_scheduler.total_steps=6")
    assert compare_runs.main([str(folder), str(tmp_path / "whole")]) == 0, capsys.readouterr().out


def test_fewer_texts_than_ranks_is_refused(tmp_path):
    (tmp_path / "one.jsonl").write_text('{"text": "one"}\n')
    done = launch(tmp_path / "run", "--training.dataset=local", f"--training.dataset_path={tmp_path}/one.jsonl")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "must hold a text for each of 2 data-parallel ranks" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
