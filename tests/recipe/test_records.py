"""recipes.records and recipes.metrics: what a run writes down, also when it starts again."""

import json
import math
import multiprocessing
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wandb
from torch import nn
from torchtitan.components import metrics as stock_metrics
from torchtitan.distributed import ParallelDims

from recipes import metrics as recipe_metrics
from recipes import step_timer
from recipes.expert_load import ExpertLoad
from recipes.load import load_config
from recipes.metrics import RecipeMetrics
from recipes.records import FolderInUseError, RunRecords, StepRecord, lock_folder
from recipes.wandb_logger import WandbLogger, heat_maps
from tests.recipe.runs import ROOT, TOKENIZER, read_run, read_steps


def record(step: int, loss: float = 1.5) -> StepRecord:
    return StepRecord(
        step=step,
        loss=loss,
        grad_norm=0.5,
        loss_hex=loss.hex(),
        grad_norm_hex=(0.5).hex(),
        tokens_seen=100 * step,
        step_time_s=0.5,
        tokens_per_second=200.0,
        tokens_per_day=200.0 * 86400,
        memory_gib=1.0,
        data_loading_s=0.125,
        forward_backward_s=0.25,
        unix_time_s=1.8e9,
    )


def write(folder: Path, steps: range, *, may_continue: bool, loss: float = 1.5) -> RunRecords:
    records = RunRecords(str(folder), {"config": {}}, may_continue=may_continue)
    for step in steps:
        records.write_step(record(step, loss))
    records.close()
    return records


def steps_and_losses(folder: Path) -> list[tuple[int, float]]:
    return [(step["step"], step["loss"]) for step in read_steps(folder)]


def test_a_line_a_step(tmp_path):
    write(tmp_path / "new" / "run", range(1, 4), may_continue=False)
    steps = read_steps(tmp_path / "new" / "run")
    assert steps == [{k: v for k, v in vars(record(step)).items() if v is not None} for step in (1, 2, 3)]


def test_lines_are_there_before_the_run_ends(tmp_path):
    records = RunRecords(str(tmp_path), {}, may_continue=False)
    records.write_step(record(1))
    assert steps_and_losses(tmp_path) == [(1, 1.5)]
    records.close()


@pytest.mark.parametrize("loss", [math.nan, math.inf, 0.1, 2.0**-1074])
def test_hex_keeps_every_bit(tmp_path, loss):
    write(tmp_path, range(1, 2), may_continue=False, loss=loss)
    (step,) = read_steps(tmp_path)
    found = float.fromhex(step["loss_hex"])
    assert found == loss or (math.isnan(loss) and math.isnan(found))


def test_run_json_is_written_with_the_first_step(tmp_path):
    write(tmp_path, range(1, 3), may_continue=False, loss=1.0)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    records = RunRecords(str(tmp_path), {"commit": "abc"}, may_continue=False)
    records.note(backend={"ran": "reference"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before, "a start that fails changes nothing"
    records.write_step(record(1))
    run = read_run(tmp_path)
    assert (run["commit"], run["restarts"], run["backend"]) == ("abc", 0, {"ran": "reference"})
    assert run["run_id"] == records.run_id


def test_a_restart_replaces_the_steps_behind_its_checkpoint(tmp_path):
    """Checkpoint at step 3, records to step 5, restart."""
    first = write(tmp_path, range(1, 6), may_continue=True, loss=1.0)
    second = write(tmp_path, range(4, 8), may_continue=True, loss=2.0)
    assert steps_and_losses(tmp_path) == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2), (7, 2)]
    assert second.run_id == first.run_id
    assert read_run(tmp_path)["restarts"] == 1
    third = write(tmp_path, range(8, 9), may_continue=True)
    assert third.run_id == first.run_id
    assert read_run(tmp_path)["restarts"] == 2


@pytest.mark.parametrize("content", ['{"run_id": "ab', "[]", "\x00"])
def test_a_run_json_that_cannot_be_read_is_kept(content, tmp_path):
    first = write(tmp_path, range(1, 3), may_continue=True)
    (tmp_path / "run.json").write_text(content)
    second = write(tmp_path, range(3, 5), may_continue=True)
    assert read_run(tmp_path)["run_id"] == second.run_id != first.run_id
    (kept,) = tmp_path.glob("run.unreadable-*.json")
    assert kept.read_text() == content


def test_a_restart_keeps_what_was_different_before(tmp_path):
    """A run's steps may come of several commits, versions and configs: none is forgotten."""
    config = {"training": {"steps": 3, "seq_len": 64}}
    facts = {"commit": "a", "versions": {"torch": "1", "triton": "2"}, "config": config}
    more = {"config": {"training": {"steps": 9, "seq_len": 64}}}

    def start(steps: range, says: dict[str, Any]) -> Any:
        records = RunRecords(str(tmp_path), says, may_continue=True)
        for step in steps:
            records.write_step(record(step))
        records.close()
        return read_run(tmp_path)["earlier_starts"]

    assert start(range(1, 4), facts) == []
    first = {"last_step": 3, "config": {"training": {"steps": 3}}}
    assert start(range(4, 7), facts | more) == [first]
    changed = facts | more | {"commit": "b", "versions": {"torch": "3", "triton": "2"}}
    old = {"commit": "a", "versions": {"torch": "1"}}
    assert start(range(6, 8), changed) == [first | old, {"last_step": 5} | old]
    # From a checkpoint of the first start: the steps of the later ones are gone.
    assert start(range(3, 5), changed) == [first | old | {"last_step": 2}]
    assert read_run(tmp_path)["commit"] == "b"
    assert start(range(1, 2), changed) == []


def test_a_restart_that_crashes_before_its_first_step_loses_nothing(tmp_path):
    write(tmp_path, range(1, 6), may_continue=True)
    write(tmp_path, range(0), may_continue=True)
    assert [step for step, _ in steps_and_losses(tmp_path)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("cut", ['{"step": 4, "loss": 1.', '{"step": 4}', "\x00\x00"])
def test_a_last_line_that_a_crash_cut_is_dropped(tmp_path, cut):
    write(tmp_path, range(1, 4), may_continue=True, loss=1.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(cut)
    write(tmp_path, range(4, 6), may_continue=True, loss=2.0)
    assert steps_and_losses(tmp_path) == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]


def test_a_fresh_run_keeps_older_records_aside(tmp_path):
    ids = {write(tmp_path, range(1, steps + 1), may_continue=False).run_id for steps in (2, 3, 4)}
    assert len(ids) == 3
    kept = {path.parent.name: len(path.read_text().splitlines()) for path in tmp_path.rglob("metrics.jsonl")}
    assert kept == {"earlier.1": 2, "earlier.2": 3, tmp_path.name: 4}
    assert (tmp_path / "earlier.1" / "run.json").exists()
    assert read_run(tmp_path)["restarts"] == 0


def test_a_fresh_run_keeps_an_older_timeline_aside(tmp_path):
    for text in ("old", "new"):
        records = write(tmp_path, range(1, 2), may_continue=False)
        (tmp_path / "timeline").mkdir()
        (tmp_path / "timeline" / "step-1.rank-0.npz").write_text(text)
        records.add_timeline_files(["timeline/step-1.rank-0.npz"])
    for folder, text in ((tmp_path / "earlier.1", "old"), (tmp_path, "new")):
        (name,) = read_run(folder)["timeline"]
        assert (folder / name).read_text() == text


def test_a_run_from_the_first_step_never_deletes_older_records(tmp_path):
    """Checkpoints are on now but were not in the run whose records lie here, or its checkpoints were removed."""
    write(tmp_path, range(1, 401), may_continue=False, loss=1.0)
    write(tmp_path, range(1, 3), may_continue=True, loss=2.0)
    assert steps_and_losses(tmp_path) == [(1, 2), (2, 2)]
    kept = list(tmp_path.glob("earlier.*/metrics.jsonl"))
    assert [len(path.read_text().splitlines()) for path in kept] == [400]


def test_a_folder_has_one_run_at_a_time(tmp_path):
    first = RunRecords(str(tmp_path), {}, may_continue=False)
    with pytest.raises(FolderInUseError, match=f'dump_folder must be a folder that no other run .* got "{tmp_path}"'):
        RunRecords(str(tmp_path), {}, may_continue=False)
    first.close()
    RunRecords(str(tmp_path), {}, may_continue=False).close()


def test_the_end_of_a_process_frees_its_folder(tmp_path):
    code = f"from recipes.records import lock_folder; file = lock_folder({str(tmp_path)!r}); import os; os._exit(1)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT)
    assert (tmp_path / "run.lock").exists()
    lock_folder(tmp_path).close()


def test_a_worker_does_not_hold_the_folder_of_its_dead_rank(tmp_path):
    file = lock_folder(tmp_path)
    context = multiprocessing.get_context("fork")
    runs = context.Event()
    worker = context.Process(target=lambda: (runs.set(), time.sleep(60)))
    worker.start()
    try:
        assert runs.wait(60)
        file.close()
        lock_folder(tmp_path).close()
    finally:
        worker.kill()
        worker.join()


def test_a_broken_run_json_starts_a_new_run(tmp_path):
    (tmp_path / "run.json").write_text("{")
    records = write(tmp_path, range(1, 3), may_continue=True)
    assert read_run(tmp_path)["restarts"] == 0
    assert read_run(tmp_path)["run_id"] == records.run_id


class Recorded:
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        pass


class Run:
    """A RecipeMetrics on rank 0 of 2 with a clock of its own."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, device_name: str = "CPU x86_64", log_freq: int = 5
    ):
        self.now = 100.0
        clock = SimpleNamespace(perf_counter=lambda: self.now, time=lambda: 1.8e9 + self.now)
        monkeypatch.setattr(recipe_metrics, "time", clock)
        monkeypatch.setattr(stock_metrics, "time", clock)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
        stock_monitor = stock_metrics.build_device_memory_monitor

        def monitor() -> Any:
            built = stock_monitor()
            built.device_name = device_name
            return built

        monkeypatch.setattr(stock_metrics, "build_device_memory_monitor", monitor)
        job = load_config(
            [
                f"--job.config_file={ROOT}/train_configs/qwen3_cpu.toml",
                f"--job.dump_folder={folder}",
                f"--model.hf_assets_path={TOKENIZER}",
                f"--metrics.log_freq={log_freq}",
                "--metrics.no_enable_wandb",
            ]
        )
        dims = ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=2, etp=1, world_size=2)
        self.metrics = RecipeMetrics(job, dims)
        self.metrics.num_flops_per_token = 1000
        self.metrics.gpu_peak_flops = 1e6
        self.metrics.model_parts = [nn.Identity()]
        self.logged = Recorded()
        self.metrics.logger = self.logged  # type: ignore[assignment]
        self.tokens_seen = 0

    def step(self, step: int, seconds: float, microbatches: tuple[int, ...] = (1000,), loss: float = 2.5) -> None:
        """One step of these tokens a microbatch on each of 2 ranks."""
        for tokens in microbatches:
            self.metrics.ntokens_since_last_log += tokens
            self.metrics.data_loading_times.append(0.01)
            self.tokens_seen += 2 * tokens
        self.now += seconds
        assert self.metrics.should_log(step)
        self.metrics.log(step, loss, loss + 1, 0.125, {"n_tokens_seen": self.tokens_seen, "lr": 0.1})


def test_rates_of_a_step_are_global(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch)
    run.step(1, 4.0)
    run.step(2, 0.5, loss=0.1)
    steps = read_steps(tmp_path)
    assert [step["step_time_s"] for step in steps] == [4.0, 0.5]
    assert [step["tokens_per_second"] for step in steps] == [500.0, 4000.0]
    assert [step["tokens_per_day"] for step in steps] == [500.0 * 86400, 4000.0 * 86400]
    assert [step["tokens_seen"] for step in steps] == [2000, 4000]
    assert steps[1]["loss_hex"] == (0.1).hex()
    assert steps[1]["grad_norm_hex"] == "0x1.0000000000000p-3"
    assert read_run(tmp_path)["backend"] == {"requested": "auto", "ran": "torchtitan"}  # no block of ours


def test_every_microbatch_counts(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch)
    run.step(1, 1.0)
    run.step(2, 2.0, microbatches=(1000, 1000, 500, 1500))
    assert read_steps(tmp_path)[1]["tokens_per_second"] == 2 * 4000 / 2.0
    assert read_steps(tmp_path)[1]["tokens_seen"] == 2000 + 8000


def test_the_console_and_loggers_get_the_rate_since_the_last_log(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch)
    run.step(1, 10.0)
    for step, seconds in ((2, 1.0), (3, 1.0), (4, 2.0), (5, 4.0)):
        run.step(step, seconds)
    assert [step for step, _ in run.logged.rows] == [1, 5]
    first, second = (metrics for _, metrics in run.logged.rows)
    assert first["throughput/tokens_per_second"] == 200.0
    assert second["throughput/tokens_per_second"] == 4 * 2000 / 8.0
    assert second["throughput/tokens_per_day"] == 1000.0 * 86400
    assert second["throughput/tokens_per_second_per_device"] == 500.0
    # Of 2000, 2000, 1000 and 500; the first step's 200 is left out.
    assert second["throughput/tokens_per_day_median"] == 1500.0 * 86400
    assert second["throughput/tokens_seen"] == 10000
    assert second["throughput/step_time_s"] == 4.0
    assert second["loss_metrics/global_max_loss"] == 3.5
    assert second["lr"] == 0.1
    run.step(6, 1.0)
    for step in range(7, 11):
        run.step(step, 1.0)
    assert run.logged.rows[-1][1]["throughput/tokens_per_second"] == 2000.0


def test_the_first_step_of_a_restart_does_not_distort_the_rate(tmp_path, monkeypatch):
    """It compiles and warms up as step 1 does."""
    run = Run(tmp_path, monkeypatch)
    run.step(8, 100.0)
    run.step(9, 1.0)
    run.step(10, 1.0)
    step, metrics = run.logged.rows[-1]
    assert step == 10
    assert metrics["throughput/tokens_per_second"] == 2000.0
    assert metrics["throughput/tokens_per_day_median"] == 2000.0 * 86400


def test_the_parts_of_a_step_are_recorded(tmp_path, monkeypatch):
    """Data loading of every microbatch, and what the trainer entered the timer for; each step starts at zero."""
    run = Run(tmp_path, monkeypatch)
    monkeypatch.setattr(step_timer, "time", SimpleNamespace(perf_counter=lambda: run.now))
    for step, microbatches in ((1, (1000,)), (2, (1000, 1000, 1000))):
        for _ in microbatches:
            with run.metrics.forward_backward:
                run.now += 0.25
        run.step(step, 1.0, microbatches)
    first, second = read_steps(tmp_path)
    assert [first["data_loading_s"], second["data_loading_s"]] == pytest.approx([0.01, 0.03])
    assert [first["forward_backward_s"], second["forward_backward_s"]] == pytest.approx([0.25, 0.75])
    assert second["step_time_s"] == pytest.approx(1.75)
    assert second["unix_time_s"] == 1.8e9 + run.now
    assert "expert_load" not in second


def test_the_console_says_how_far_the_run_is(tmp_path, monkeypatch, caplog):
    with caplog.at_level("INFO"):
        run = Run(tmp_path, monkeypatch, log_freq=2)
        run.metrics.job_config.training.steps = 10
        run.metrics.job_config.throughput.token_budget = 1e6
        for step in (1, 2):
            run.step(step, 2.0)
    line = caplog.messages[-1]
    assert re.search(r"step: .*2/10 ", line)
    # 1000 tokens a second.
    assert (
        "0:00:04 elapsed, 0:00:16 left, 4.0 K of 20.0 K tokens, 0.4% of the 1.0 M token budget, which ends on" in line
    )
    metrics = run.logged.rows[-1][1]
    assert metrics["progress/done(%)"] == 20
    assert metrics["progress/budget_left_days"] == pytest.approx(996 / 86400)


def test_the_last_step_is_on_the_console(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch)
    run.metrics.job_config.training.steps = 7
    for step in range(1, 8):
        run.step(step, 1.0)
    assert [step for step, _ in run.logged.rows] == [1, 5, 7]


@pytest.mark.parametrize("no_color", ["", "1"])
def test_colours(tmp_path, monkeypatch, caplog, no_color):
    monkeypatch.setenv("NO_COLOR", no_color)
    with caplog.at_level("INFO"):
        Run(tmp_path, monkeypatch).step(1, 1.0)
    assert ("\x1b" in caplog.messages[-1]) is not bool(no_color)


def test_training_goes_on_where_wandb_does_not_answer(tmp_path, monkeypatch, caplog):
    starts = []

    def init(*, mode, **options):
        starts.append((mode, options["id"]))
        if mode != "offline":
            raise wandb.errors.CommError("timed out")
        return SimpleNamespace(define_metric=lambda *_, **__: None)

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "teardown", lambda: starts.append("teardown"))
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    with caplog.at_level("WARNING"):
        WandbLogger(str(tmp_path), load_config([f"--job.config_file={ROOT}/train_configs/qwen3_cpu.toml"]), "abc")
    assert starts == [(None, "abc"), "teardown", ("offline", "abc")]
    assert "recorded offline; `wandb sync` uploads it: timed out" in caplog.text


def test_wandb_gets_a_heat_map_of_every_layer():
    load = ExpertLoad([0, 3], [[1, 2, 3, 4]] * 2, [1.6] * 2, [1.0] * 2, [1.0] * 2, 1.0)
    maps = heat_maps(load)
    assert list(maps) == ["expert_load/layer_00", "expert_load/layer_03"]
    assert maps["expert_load/layer_03"].histogram == [1, 2, 3, 4]
    assert maps["expert_load/layer_03"].bins == [0, 1, 2, 3, 4]
    # wandb takes 512 bins.
    (wide,) = heat_maps(ExpertLoad([0], [[1] * 1023], [1.0], [1.0], [1.0], 1.0)).values()
    assert wide.histogram == [2] * 511 + [1]


@pytest.mark.parametrize(
    "device_name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA B200"]
)
def test_mfu_of_a_known_device(tmp_path, monkeypatch, device_name):
    run = Run(tmp_path, monkeypatch, device_name)
    run.step(1, 1.0)
    # 2000 tokens/s over 2 devices, 1000 FLOPs each, of a peak of 1e6.
    assert run.logged.rows[0][1]["throughput/mfu(%)"] == pytest.approx(100.0)


@pytest.mark.parametrize(
    "device_name", ["CPU x86_64", "NVIDIA L40S", "NVIDIA GeForce RTX 5090", "NVIDIA B300", "unknown"]
)
def test_mfu_of_an_unknown_device_is_left_out(tmp_path, monkeypatch, device_name, caplog):
    with caplog.at_level("INFO"):
        run = Run(tmp_path, monkeypatch, device_name)
        run.step(1, 1.0)
    assert "throughput/mfu(%)" not in run.logged.rows[0][1]
    assert f"MFU is left out: the peak rate of {device_name} is not known" in caplog.text
    assert "mfu:" not in caplog.text


def test_known_devices_are_those_that_torchtitan_knows(monkeypatch):
    """Every name in our list has a peak of its own there, not the A100's that stands for unknown ones."""
    from torchtitan.tools import utils

    said: list[str] = []
    monkeypatch.setattr(utils.subprocess, "run", lambda *args, **kwargs: SimpleNamespace(stdout=""))
    monkeypatch.setattr(utils.logger, "warning", lambda text, *args: said.append(text))
    for name in recipe_metrics._KNOWN_PEAK:
        if name != "Max 1550":  # whose peak is computed from the device itself
            utils.get_peak_flops(name)
    assert said == []
    utils.get_peak_flops("NVIDIA B300")
    assert len(said) == 1


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    run = Run(tmp_path / "zero", monkeypatch)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    job = run.metrics.job_config
    job.job = replace(job.job, dump_folder=str(tmp_path / "one"))
    other = RecipeMetrics(job, run.metrics.parallel_dims)
    other.num_flops_per_token = 1000
    other.ntokens_since_last_log = 10
    run.now += 1.0
    other.log(1, 1.0, 1.0, 1.0, {"n_tokens_seen": 10})
    other.close()
    assert not (tmp_path / "one").exists()


def test_run_json_holds_what_a_run_depends_on(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch)
    run.step(1, 4.0)
    found = read_run(tmp_path)
    assert found["config"]["model"]["flavor"] == "cpu"
    assert found["config"]["uniep"]["backend"] == "auto"
    assert {"python", "torch", "torchtitan", "triton", "numpy"} <= found["versions"].keys()
    assert found["devices"]["world_size"] == 2
    assert found["data"]["dataset"] == "stdlib"
    assert len(found["data"]["sha256"]) == 64
    assert found["backend"]["requested"] == "auto"
    json.dumps(found, allow_nan=False)
    run.metrics.close()
