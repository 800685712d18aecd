"""tools.compare_runs: run folders in, exit status and text out."""

import copy
import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.compare_runs import IDENTICAL, main
from tools.compare_values import UlpDistance, compare_pair, ulp_distance
from tools.records import read_run

REPOSITORY = Path(__file__).parents[2]

RECORD: dict[str, Any] = {
    "config": {
        "job": {"dump_folder": "outputs", "description": "a run", "config_file": "a.toml"},
        "model": {"name": "qwen3", "flavor": "debugmodel_moe", "hf_assets_path": "assets"},
        "training": {
            "dataset": "stdlib",
            "dataset_path": None,
            "seq_len": 256,
            "local_batch_size": 4,
            "global_batch_size": -1,
            "steps": 20,
            "dtype": "float32",
            "mixed_precision_param": "bfloat16",
            "max_norm": 1.0,
            "gc_freq": 50,
            "dataloader": {"num_workers": 0, "pin_memory": False},
        },
        "parallelism": {"data_parallel_shard_degree": -1, "expert_parallel_degree": 2},
        "optimizer": {"name": "AdamW", "lr": 8e-4},
        "lr_scheduler": {"warmup_steps": 2, "total_steps": None},
        "debug": {"seed": 42, "deterministic": True},
        "metrics": {"log_freq": 1},
        "profiling": {"enable_profiling": False},
        "checkpoint": {"enable": False, "initial_load_path": None},
        "comm": {"init_timeout_seconds": 300},
        "activation_checkpoint": {"mode": "none"},
        "compile": {"enable": False},
        "uniep": {"backend": "torchtitan"},
        "cut": {"num_layers": 2},
    },
    "versions": {"torch": "2.13.0", "torchtitan": "0.2.2"},
    "commit": "0123456789abcdef",
    "devices": {"type": "cpu", "world_size": 2, "capacity_gib": 64.0},
    "backend": {"requested": "torchtitan", "ran": "torchtitan"},
    "data": {"dataset": "stdlib", "sha256": "ab" * 32, "tokenizer_sha256": "ef"},
}


def curve(num_steps: int = 20) -> list[tuple[float, float]]:
    """(loss, grad_norm) of each step, all fp32 values."""
    return [(float(np.float32(8 - 0.1 * i)), float(np.float32(1 + 0.01 * i))) for i in range(num_steps)]


def write_run(folder: Path, values=None, changes=None, steps=None, tokens_per_step=2048) -> str:
    """Writes a run folder. `changes` maps dotted paths in RECORD to new values."""
    values = curve() if values is None else values
    record = copy.deepcopy(RECORD)
    for path, value in (changes or {}).items():
        *parents, last = path.split(".")
        tree = record
        for parent in parents:
            tree = tree.setdefault(parent, {})
        tree[last] = value
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(record))
    with open(folder / "metrics.jsonl", "w") as file:
        for step, (loss, grad_norm) in zip(steps or range(1, len(values) + 1), values, strict=True):
            row = {
                "step": step,
                "loss": loss,
                "grad_norm": grad_norm,
                "loss_hex": loss.hex(),
                "grad_norm_hex": grad_norm.hex(),
                "tokens_seen": step * tokens_per_step,
                "step_time_s": 0.1,
                "tokens_per_second": 20480.0,
                "tokens_per_day": 20480.0 * 86400,
                "memory_gib": 1.0,
            }
            file.write(json.dumps(row) + "\n")
    return str(folder)


def changed(values, index: int, loss: float | None = None, grad_norm: float | None = None):
    """`values` with one step (an index from 0) replaced."""
    values = list(values)
    old_loss, old_grad_norm = values[index]
    values[index] = (old_loss if loss is None else loss, old_grad_norm if grad_norm is None else grad_norm)
    return values


def next_float32(value: float, num_floats: int = 1) -> float:
    for _ in range(num_floats):
        value = float(np.nextafter(np.float32(value), np.float32(np.inf)))
    return value


# Identical runs


def test_identical_runs(tmp_path, capsys):
    a, b, c = (write_run(tmp_path / name) for name in "abc")
    assert main([a, b, c]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("identical: 20 steps\n")
    assert output.err == ""


WEIGHTS = {"w1": "0123456789abcdef", "w2": "fedcba9876543210"}


def test_weights_at_the_end_are_compared(tmp_path, capsys):
    ends = {
        "a": {"step": 20, "fingerprints": WEIGHTS},
        "same": {"step": 20, "fingerprints": WEIGHTS},
        "other": {"step": 20, "fingerprints": WEIGHTS | {"w2": "fedcba9876543211"}},
        "fewer": {"step": 20, "fingerprints": {"w1": WEIGHTS["w1"]}},
        "earlier": {"step": 10, "fingerprints": {}},
    }
    runs = {name: write_run(tmp_path / name, changes={"weights": end}) for name, end in ends.items()}
    assert main([runs["a"], runs["same"]]) == 0
    assert capsys.readouterr().out.startswith("identical: 20 steps, and the weights behind step 20\n")
    for name in ("other", "fewer"):
        assert main([runs["a"], runs[name]]) == 1
        assert "weights that differ behind step 20: 1, the first is w2" in capsys.readouterr().out
    # Nothing to compare with: the steps decide.
    assert main([runs["a"], runs["earlier"], write_run(tmp_path / "none")]) == 0
    assert capsys.readouterr().out.startswith("identical: 20 steps\n")


def test_equal_nan_and_infinities_are_identical_and_warned_of(tmp_path, capsys):
    values = changed(changed(curve(), 4, loss=math.nan), 7, grad_norm=-math.inf)
    assert main([write_run(tmp_path / "a", values), write_run(tmp_path / "b", values)]) == 0
    output = capsys.readouterr()
    assert "identical: 20 steps" in output.out
    assert "warning: A: loss is not finite at 1 step, first at step 5" in output.err
    assert "warning: B: grad_norm is not finite at 1 step, first at step 8" in output.err


def test_same_folder_is_warned_of(tmp_path, capsys):
    a = write_run(tmp_path / "a")
    assert main([a, a + "/../a"]) == 0
    assert "same folder" in capsys.readouterr().err


# Different runs


def test_one_bit_of_the_loss(tmp_path, capsys):
    old = curve()[6][0]
    new = next_float32(old)
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", changed(curve(), 6, loss=new))
    assert main([a, b]) == 1
    text = capsys.readouterr().out
    assert "identical" not in text
    assert "B differs from A: first at step 7, in loss; 1 of 20 common steps differ" in text
    assert "loss at step 7: 1 fp32 ULP apart" in text
    for value in (old, new):
        assert repr(value) in text
        assert value.hex() in text
    assert "grad_norm" not in text


def test_one_bit_of_the_grad_norm(tmp_path, capsys):
    values = changed(curve(), 19, grad_norm=next_float32(curve()[19][1], 3))
    assert main([write_run(tmp_path / "a"), write_run(tmp_path / "b", values)]) == 1
    text = capsys.readouterr().out
    assert "first at step 20, in grad_norm;" in text
    assert "grad_norm at step 20: 3 fp32 ULPs apart" in text
    assert "cannot be told from one step" in text


def test_both_values_and_the_total_of_differing_steps(tmp_path, capsys):
    values = changed(curve(), 2, loss=9.0, grad_norm=9.0)
    values = changed(values, 5, loss=9.0)
    values = changed(values, 6, grad_norm=9.0)
    assert main([write_run(tmp_path / "a"), write_run(tmp_path / "b", values)]) == 1
    text = capsys.readouterr().out
    assert "first at step 3, in loss and grad_norm; 3 of 20 common steps differ" in text
    assert text.count("(2 steps differ)") == 2


def test_a_value_that_differs_later_has_its_own_first_step(tmp_path, capsys):
    values = changed(changed(curve(), 2, grad_norm=9.0), 5, loss=9.0)
    main([write_run(tmp_path / "a"), write_run(tmp_path / "b", values)])
    text = capsys.readouterr().out
    assert "first at step 3, in grad_norm;" in text
    assert "loss at step 6:" in text


def test_fp64_values_are_counted_in_fp64(tmp_path, capsys):
    values = changed(curve(), 0, loss=math.nextafter(8.0, 9.0))
    main([write_run(tmp_path / "a"), write_run(tmp_path / "b", values)])
    assert "loss at step 1: 1 fp64 ULP apart" in capsys.readouterr().out


def test_nan_against_a_number(tmp_path, capsys):
    values = changed(curve(), 3, loss=math.nan)
    assert main([write_run(tmp_path / "a"), write_run(tmp_path / "b", values)]) == 1
    text = capsys.readouterr().out
    assert "loss at step 4: no ULP distance" in text
    assert "absolute inf" in text


def test_zeros_of_different_sign_differ(tmp_path, capsys):
    a = write_run(tmp_path / "a", changed(curve(), 3, loss=0.0))
    b = write_run(tmp_path / "b", changed(curve(), 3, loss=-0.0))
    assert main([a, b]) == 1
    assert "0 fp32 ULPs apart (zeros of different sign)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.3, "grows"), (1.0, "stays"), (0.7, "shrinks")], ids=["grows", "stays", "shrinks"]
)
def test_trend(tmp_path, capsys, factor, verdict):
    values = [(8.0, 1.0)] * 40
    drifted = [(8.0 + (1e-3 * factor ** (i - 5) if i >= 5 else 0.0), 1.0) for i in range(40)]
    assert main([write_run(tmp_path / "a", values), write_run(tmp_path / "b", drifted)]) == 1
    text = capsys.readouterr().out
    assert f"difference of loss from there on: {verdict} (35 steps differ)" in text
    largest = max(drifted)[0] - 8
    median = np.median([loss - 8 for loss, _ in drifted[6:16]])
    rows = {row.split("  ")[2]: row for row in text.splitlines() if row.startswith("    ") and "absolute" in row}
    assert f"absolute {1e-3:<9.3g}" in rows["at step 6"]
    assert f"absolute {median:<9.3g}" in rows["median of the next 10 steps"]
    assert f"absolute {drifted[-1][0] - 8:<9.3g}" in rows["at step 40, the last common one"]
    assert any("the largest" in what and f"absolute {largest:<9.3g}" in row for what, row in rows.items())


def test_trend_is_relative_to_a_falling_value(tmp_path):
    """A loss that falls a thousandfold with its difference has not drawn nearer."""
    values = [(1000.0 * 0.8**i, 1.0) for i in range(40)]
    scaled = [(loss * 1.001, 1.0) for loss, _ in values]
    a, b = (read_run(write_run(tmp_path / name, rows)) for name, rows in (("a", values), ("b", scaled)))
    trend = compare_pair(a, b).trends["loss"]
    assert trend.verdict == "stays"
    assert trend.absolute[-1] < trend.absolute[0] / 1000


@pytest.mark.parametrize("swap", [False, True])
def test_a_longer_run_is_not_identical(tmp_path, capsys, swap):
    runs = [write_run(tmp_path / "short", curve(20)), write_run(tmp_path / "long", curve(23))]
    assert main(runs[::-1] if swap else runs) == 1
    text = capsys.readouterr().out
    assert "identical" not in text
    assert "B agrees with A on the common steps, up to step 20" in text
    assert f"{'A' if swap else 'B'} has 3 steps more, from step 21 to 23" in text


def test_a_longer_run_that_also_differs(tmp_path, capsys):
    longer = changed(curve(23), 9, loss=1.0)
    assert main([write_run(tmp_path / "a"), write_run(tmp_path / "b", longer)]) == 1
    text = capsys.readouterr().out
    assert "first at step 10" in text
    assert "1 of 20 common steps differ" in text
    assert "B has 3 steps more" in text


def test_a_gap_in_the_steps(tmp_path, capsys):
    values = curve()
    steps = [step for step in range(1, 21) if step not in (5, 6)]
    b = write_run(tmp_path / "b", [values[step - 1] for step in steps], steps=steps)
    assert main([write_run(tmp_path / "a"), b]) == 1
    assert "A has 2 steps that B lacks, the first is step 5" in capsys.readouterr().out


def test_values_are_paired_by_step_not_by_line(tmp_path, capsys):
    values = curve()
    late = changed(values, 14, loss=1.0)[10:]
    assert main([write_run(tmp_path / "a"), write_run(tmp_path / "b", late, steps=range(11, 21))]) == 1
    assert "first at step 15, in loss; 1 of 10 common steps differ" in capsys.readouterr().out


def test_each_run_is_compared_with_the_first(tmp_path, capsys):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    c = write_run(tmp_path / "c", changed(curve(), 11, loss=1.0))
    assert main([a, b, c]) == 1
    text = capsys.readouterr().out
    assert "different from A: C\n" in text
    assert "B agrees with A on all 20 steps" in text
    assert "C differs from A: first at step 12" in text
    assert main([c, a, b]) == 1
    assert "different from A: B, C\n" in capsys.readouterr().out


# Runs that cannot be read


def drop_key(folder: Path, file: str, line: int, key: str) -> None:
    lines = (folder / file).read_text().splitlines()
    row = json.loads(lines[line])
    del row[key]
    lines[line] = json.dumps(row)
    (folder / file).write_text("\n".join(lines) + "\n")


def set_key(folder: Path, line: int, **values) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[line] = json.dumps({**json.loads(lines[line]), **values})
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def cut_line(folder: Path, line: int) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[line] = lines[line][: len(lines[line]) // 2]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def cut_file(folder: Path) -> None:
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text[:-30])


def set_blank(folder: Path) -> None:
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text.replace("\n", "\n\n", 1))


def set_record(folder: Path, **values) -> None:
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, **values}))


BROKEN: dict[str, tuple[Any, list[str]]] = {
    "no run.json": (lambda run: (run / "run.json").unlink(), ["run.json", "nothing there"]),
    "no metrics": (lambda run: (run / "metrics.jsonl").unlink(), ["metrics.jsonl", "nothing there"]),
    "metrics is a folder": (
        lambda run: ((run / "metrics.jsonl").unlink(), (run / "metrics.jsonl").mkdir()),
        ["metrics.jsonl", "readable"],
    ),
    "empty metrics": (lambda run: (run / "metrics.jsonl").write_text(""), ["metrics.jsonl", "at least one step"]),
    "cut run.json": (lambda run: (run / "run.json").write_text('{"config": {"mod'), ["run.json", "whole JSON"]),
    "run.json is a list": (lambda run: (run / "run.json").write_text("[]"), ["run.json", "a list"]),
    "line cut in the middle": (lambda run: cut_line(run, 6), ["metrics.jsonl line 7:", "whole JSON"]),
    "last line cut": (
        cut_file,
        ["metrics.jsonl line 20:", "whole JSON", "cut in the middle, as by a crash: delete it, or", "tools.dashboard"],
    ),
    "empty line": (set_blank, ["metrics.jsonl line 2:", "whole JSON"]),
    "not UTF-8": (lambda run: (run / "metrics.jsonl").write_bytes(b'{"step": "\xff"}\n'), ["line 1:", "whole JSON"]),
    "line is a number": (lambda run: (run / "metrics.jsonl").write_text("7\n"), ["line 1:", "a int"]),
    "duplicate step": (lambda run: set_key(run, 3, step=3), ["line 4:", "step must be greater", "3, got 3"]),
    "step goes back": (lambda run: set_key(run, 9, step=2), ["line 10:", "step must be greater", "9, got 2"]),
    "step is a float": (lambda run: set_key(run, 2, step=3.0), ["line 3:", "step must be an integer"]),
    "step is true": (lambda run: set_key(run, 0, step=True), ["line 1:", "step must be an integer"]),
    "step too large": (lambda run: set_key(run, 19, step=2**70), ["line 20:", "step must be an integer"]),
    "hex is a decimal": (lambda run: set_key(run, 1, loss_hex="7.9"), ["line 2:", "loss_hex", "'7.9'"]),
    "hex is a number": (lambda run: set_key(run, 1, grad_norm_hex=1.5), ["line 2:", "grad_norm_hex", "1.5"]),
    "hex out of range": (lambda run: set_key(run, 1, loss_hex="0x1p+9999"), ["line 2:", "loss_hex"]),
    "config is text": (lambda run: set_record(run, config="x"), ["run.json", "'config' must be a dict"]),
    "backend is text": (lambda run: set_record(run, backend="x"), ["run.json", "'backend' must be a dict"]),
    "no backend.ran": (lambda run: set_record(run, backend={}), ["run.json: backend", "'ran'"]),
    "no data.sha256": (lambda run: set_record(run, data={}), ["run.json: data", "'sha256'"]),
}
for key in ("step", "loss", "grad_norm", "loss_hex", "grad_norm_hex", "tokens_seen"):
    BROKEN[f"line without {key}"] = (
        lambda run, key=key: drop_key(run, "metrics.jsonl", 4, key),
        ["metrics.jsonl line 5:", f"'{key}'"],
    )
for key in ("config", "versions", "commit", "devices", "backend", "data"):
    BROKEN[f"run.json without {key}"] = (
        lambda run, key=key: drop_key(run, "run.json", 0, key),
        ["run.json", f"'{key}'"],
    )


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("force", [[], ["--force"]], ids=["", "force"])
def test_a_run_that_cannot_be_read(tmp_path, capsys, name, force):
    break_run, expected = BROKEN[name]
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    break_run(tmp_path / "b")
    assert main([a, b, *force]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    for text in [str(tmp_path / "b"), *expected]:
        assert text in output.err


def test_missing_folder(tmp_path, capsys):
    assert main([str(tmp_path / "none"), write_run(tmp_path / "a")]) == 2
    assert capsys.readouterr().err == f"error: a run must be a folder, got {tmp_path}/none, which does not exist\n"


def test_the_last_line_needs_no_newline(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    path = tmp_path / "b" / "metrics.jsonl"
    path.write_text(path.read_text().removesuffix("\n"))
    assert main([a, b]) == 0


# Configs

NOT_COMPARABLE = {
    "model.name": "deepseek_v3",
    "model.flavor": "other",
    "cut.num_layers": 3,
    "training.seq_len": 512,
    "training.local_batch_size": 8,
    "training.global_batch_size": 16,
    "training.dataset": "c4",
    "training.dtype": "bfloat16",
    "training.mixed_precision_param": "float32",
    "training.max_norm": 2.0,
    "training.dataloader.num_workers": 2,
    "training.added_later": 1,
    "training.steps_added_later": 1,
    "communication.added_later": 1,
    "parallelism.expert_parallel_degree": 1,
    "parallelism.data_parallel_shard_degree": 2,
    "optimizer.lr": 1e-3,
    "optimizer.name": "Adam",
    "lr_scheduler.warmup_steps": 3,
    "lr_scheduler.total_steps": 100,
    "debug.seed": 43,
    "debug.moe_force_load_balance": True,
    "section_added_later.key": 1,
}


@pytest.mark.parametrize("key", NOT_COMPARABLE)
def test_settings_that_determine_the_numbers(tmp_path, capsys, key):
    value = NOT_COMPARABLE[key]
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", changes={f"config.{key}": value})
    old = read_run(a).config.get(key)
    assert main([a, b]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    shown = "not set" if old is None else repr(old)
    assert f"A and B differ in {key}: {shown}, {value!r} (--force" in output.err
    assert main([a, b, "--force"]) == 0
    output = capsys.readouterr()
    assert "identical: 20 steps" in output.out
    assert f"warning: compared by force: A and B differ in {key}:" in output.err


def test_all_differing_keys_are_listed(tmp_path, capsys):
    changes = {"config.debug.seed": 43, "config.parallelism.expert_parallel_degree": 4, "data.sha256": "cd"}
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", changes=changes)
    c = write_run(tmp_path / "c", changes={"config.training.seq_len": 1})
    assert main([a, b, c]) == 2
    error = capsys.readouterr().err
    assert "A and B differ in debug.seed: 42, 43; parallelism.expert_parallel_degree: 2, 4; data.sha256: 'abab" in error
    assert "A and C differ in training.seq_len: 256, 1" in error


def test_another_tokenizer(tmp_path, capsys):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", changes={"data.tokenizer_sha256": "01"})
    assert main([a, b]) == 2
    assert "data.tokenizer_sha256: 'ef', '01'" in capsys.readouterr().err


def test_number_of_ranks_must_be_equal(tmp_path, capsys):
    """A degree of -1 is filled in by it."""
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", changes={"devices.world_size": 4})
    assert main([a, b]) == 2
    assert "devices.world_size: 2, 4" in capsys.readouterr().err


def test_force_still_finds_the_difference(tmp_path, capsys):
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", changed(curve(), 1, loss=1.0), changes={"config.debug.seed": 43})
    assert main([a, b, "--force"]) == 1
    assert "first at step 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("uniep.backend", "reference"),
        ("training.dataset_path", "elsewhere"),
        ("uniep.added_later", 1),
        ("job.dump_folder", "elsewhere"),
        ("job.description", "b"),
        ("job.config_file", "b.toml"),
        ("metrics.log_freq", 10),
        ("profiling.enable_profiling", True),
        ("checkpoint.enable", True),
        ("comm.init_timeout_seconds", 1),
        ("activation_checkpoint.mode", "full"),
        ("training.gc_freq", 1),
        ("training.absent_is_not_set", None),
    ],
)
def test_settings_that_may_differ(tmp_path, capsys, key, value):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", changes={f"config.{key}": value})
    assert main([a, b]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("key", "value", "warning"),
    [
        ("config.uniep.numerics", "fast", "warning: B differs, uniep.numerics: not set, 'fast'"),
        ("config.compile.enable", True, "warning: B differs, compile.enable: False, True"),
        ("config.checkpoint.initial_load_path", "x", "warning: B differs, checkpoint.initial_load_path: not set, 'x'"),
        ("config.model.hf_assets_path", "x", "warning: B differs, model.hf_assets_path: 'assets', 'x'"),
        ("config.training.steps", 30, "warning: B differs, training.steps: 20, 30; lr_scheduler.total_steps"),
        ("config.debug.deterministic", False, "warning: B: debug.deterministic is not true"),
        ("config.debug.deterministic", None, "warning: B: debug.deterministic is not true"),
        ("versions.torch", "2.11.0", "warning: B differs, versions.torch: '2.13.0', '2.11.0'"),
        ("devices.type", "cuda", "warning: B differs, devices.type: 'cpu', 'cuda'"),
    ],
)
def test_warnings(tmp_path, capsys, key, value, warning):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", changes={key: value})
    assert main([a, b]) == 0
    error = capsys.readouterr().err
    assert error.startswith(warning)
    assert error.count("\n") == 1


def test_steps_may_differ_under_a_fixed_schedule(tmp_path, capsys):
    fixed = {"config.lr_scheduler.total_steps": 100}
    a = write_run(tmp_path / "a", changes=fixed)
    b = write_run(tmp_path / "b", changes={**fixed, "config.training.steps": 30})
    assert main([a, b]) == 0
    assert capsys.readouterr().err == ""


def test_an_unset_seed_is_warned_of(tmp_path, capsys):
    a, b = (write_run(tmp_path / name, changes={"config.debug.seed": None}) for name in "ab")
    assert main([a, b]) == 0
    error = capsys.readouterr().err
    assert "warning: A: debug.seed is not set" in error
    assert "warning: B: debug.seed is not set" in error


def test_data_without_a_hash_is_warned_of(tmp_path, capsys):
    a, b = (write_run(tmp_path / name, changes={"data.sha256": None}) for name in "ab")
    assert main([a, b]) == 0
    assert "warning: A: the data has no hash" in capsys.readouterr().err


def test_different_batches_are_warned_of(tmp_path, capsys):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", tokens_per_step=4096)
    assert main([a, b]) == 0
    assert "warning: B differs, tokens_seen at step 1: 2048, 4096" in capsys.readouterr().err


@pytest.mark.parametrize("force", [[], ["--force"]], ids=["", "force"])
def test_no_common_step(tmp_path, capsys, force):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=range(21, 41))
    assert main([a, b, *force]) == 2
    assert "A and B must have a step in common, got steps 1 to 20 and 21 to 40" in capsys.readouterr().err


# The command line


@pytest.mark.parametrize("arguments", [[], ["a"], ["a", "b", "--unknown"]])
def test_wrong_arguments_exit_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


def test_help_says_what_the_exit_codes_mean(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for line in ("0  identical", "1  different", "2  not compared"):
        assert line in text


def test_as_a_command_without_matplotlib(tmp_path):
    """The status reaches the shell, and only --plot needs matplotlib."""
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", changed(curve(), 0, loss=1.0))
    (tmp_path / "matplotlib.py").write_text("raise ImportError('No module named matplotlib')")
    command = "import sys; sys.path.insert(0, sys.argv.pop(1)); from tools.compare_runs import main; sys.exit(main())"

    def run(*arguments):
        line = [sys.executable, "-c", command, str(tmp_path), *arguments]
        return subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=False)

    assert run(a, a).returncode == 0
    assert run(a, b).returncode == 1
    stopped = run(a, a, "--plot", str(tmp_path / "plot.png"))
    assert stopped.returncode == 2
    assert stopped.stderr.startswith("error: --plot must have matplotlib installed")
    assert stopped.stderr.count("\n") == 1
    assert stopped.stdout == ""


def test_python_dash_m(tmp_path):
    a = write_run(tmp_path / "a")
    command = [sys.executable, "-m", "tools.compare_runs", a, str(tmp_path / "none")]
    assert subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False).returncode == 2


def test_what_was_different_before_a_restart_is_said(tmp_path, capsys):
    starts = [{"last_step": 2, "commit": "abc", "versions": {"torch": "1.0"}}, {"last_step": 4}]
    a = write_run(tmp_path / "a", changes={"earlier_starts": starts})
    assert main([a, write_run(tmp_path / "b")]) == 0
    said = capsys.readouterr().out
    assert "up to step 2: commit abc, versions.torch 1.0\n" in said
    assert "up to step 4" not in said


@pytest.mark.parametrize("starts", [3, [3], [{"commit": "abc"}], [{"last_step": "x"}]])
def test_broken_earlier_starts(tmp_path, capsys, starts):
    a = write_run(tmp_path / "a", changes={"earlier_starts": starts})
    assert main([a, a]) == 2
    assert "earlier_starts" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["a", "a"], ["--help"]])
def test_a_reader_that_has_left(tmp_path, arguments):
    write_run(tmp_path / "a")
    command = [sys.executable, "-m", "tools.compare_runs", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": ""}
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as left:
        pipes = {"stdout": left, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, **pipes)
    assert [line for line in done.stderr.splitlines() if not line.startswith("warning: ")] == []
    assert done.returncode == 128 + signal.SIGPIPE


def test_every_tool_ends_so():
    texts = [path.read_text() for path in (REPOSITORY / "tools").glob("*.py")]
    mains = [text for text in texts if "__main__" in text]
    assert len(mains) >= 7
    assert all(text.endswith('\nif __name__ == "__main__":\n    end_with(main)\n') for text in mains)


@pytest.mark.parametrize(
    ("commit", "shown"), [("01917852539cdef0+changes", "01917852539c+changes"), ("01917852539cdef0", "01917852539c")]
)
def test_the_commit_keeps_its_mark(tmp_path, capsys, commit, shown):
    main([write_run(tmp_path / "a"), write_run(tmp_path / "b", changes={"commit": commit})])
    assert f"(ran torchtitan, commit {shown}, 20 steps)" in capsys.readouterr().out


def test_long_runs_in_seconds(tmp_path, capsys):
    num_steps = 100_000
    values = curve(num_steps)
    a = write_run(tmp_path / "a", values)
    b = write_run(tmp_path / "b", changed(values, num_steps - 1, grad_norm=0.5))
    start = time.process_time()
    assert main([a, b]) == 1
    # 2 s where this was written; the rest is for slow machines.
    assert time.process_time() - start < 20
    assert "first at step 100000, in grad_norm; 1 of 100000 common steps differ" in capsys.readouterr().out


# The plot


@pytest.mark.parametrize(
    "others",
    [
        [curve()],
        [changed(curve(), 3, loss=7.0), curve(30)],
        [changed(curve(), 3, loss=math.nan), changed(curve(), 4, loss=math.inf)],
        [changed(curve(), 3, loss=5e-324), changed(curve(), 3, loss=1e300)],
        [[(curve()[0][0] + 1, 1.0)]],
    ],
    ids=["identical", "different", "not finite", "extreme", "one step"],
)
def test_plot(tmp_path, capsys, others):
    pytest.importorskip("matplotlib")
    runs = [write_run(tmp_path / "a", changed(curve(), 3, loss=0.0))]
    runs += [write_run(tmp_path / f"b{i}", values) for i, values in enumerate(others)]
    path = tmp_path / "plot.of.runs"
    assert main([*runs, "--plot", str(path)]) == 1
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 1000
    assert height >= 800
    assert f"plot: {path}" in capsys.readouterr().out


def test_plot_draws_the_curves_and_their_difference(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    values = changed(curve(), 3, loss=curve()[3][0] + 0.5)
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", values)
    assert main([a, b, "--plot", str(tmp_path / "plot.png")]) == 1
    top, bottom = figures[0].axes
    monkeypatch.undo()
    pyplot.close(figures[0])
    for line, rows in zip(top.lines, (curve(), values), strict=True):
        np.testing.assert_array_equal(line.get_ydata(), [loss for loss, _ in rows])
    difference = bottom.lines[0].get_ydata()
    assert np.flatnonzero(difference).tolist() == [3]
    assert difference[3] == values[3][0] - curve()[3][0]
    assert bottom.get_yscale() == "symlog"
    for axes in (top, bottom):
        assert axes.get_title()
        assert axes.get_ylabel()
        assert axes.get_legend()


def test_identical_runs_can_be_plotted(tmp_path):
    pytest.importorskip("matplotlib")
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    assert main([a, b, "--plot", str(tmp_path / "plot.png")]) == IDENTICAL
    assert (tmp_path / "plot.png").stat().st_size


def test_the_plot_needs_no_display(tmp_path):
    pytest.importorskip("matplotlib")
    a, path = write_run(tmp_path / "a"), tmp_path / "plot.png"
    command = [sys.executable, "-m", "tools.compare_runs", a, a, "--plot", str(path)]
    # A backend that cannot be loaded: only one that is chosen over it draws.
    environment = {**os.environ, "MPLBACKEND": "module://none_of_this_name"}
    ended = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert path.stat().st_size


def test_a_plot_that_cannot_be_written(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    assert main([a, b, "--plot", str(tmp_path / "none" / "plot.png")]) == 2
    assert "--plot must be a file that can be written" in capsys.readouterr().err


def test_the_plot_of_a_loss_that_breaks_says_where(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    (tmp_path / "p").mkdir()
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "p" / "a", changed(curve(), 10, loss=math.nan))
    main([a, b, "--plot", str(tmp_path / "plot.png")])
    top, bottom = pyplot.gcf().axes
    monkeypatch.undo()
    pyplot.close()
    assert [text.get_text() for text in bottom.get_legend().get_texts()] == ["B - A: not finite, first at step 11"]
    assert [text.get_text() for text in top.get_legend().get_texts()] == [
        f"A: {tmp_path.name}/a (torchtitan)",
        "B: p/a (torchtitan)",
    ]


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl"])
def test_the_plot_replaces_no_record(tmp_path, capsys, name):
    a = write_run(tmp_path / "a")
    for path in (tmp_path / "a" / name, tmp_path / "elsewhere" / name):
        assert main([a, a, "--plot", str(path)]) == 2
        expected = f"error: --plot must be a file that is not a run's run.json or metrics.jsonl, got {path}\n"
        assert capsys.readouterr().err == expected
    assert read_run(a)


# ULPs

FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
FLOAT64 = st.floats(allow_nan=False, allow_infinity=False)


def is_float32(value: float) -> bool:
    with np.errstate(over="ignore"):
        return float(np.float32(value)) == value


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (1.0, 1.0, UlpDistance(0, "fp32")),
        (1.0, 1.0 + 2**-23, UlpDistance(1, "fp32")),
        (1.0, 1.0 - 2**-24, UlpDistance(1, "fp32")),
        (1.0, 2.0, UlpDistance(2**23, "fp32")),
        (1.0, 1.0 + 2**-52, UlpDistance(1, "fp64")),
        (1.0, 1.0 + 2**-24, UlpDistance(2**28, "fp64")),
        (0.0, -0.0, UlpDistance(0, "fp32")),
        (-(2.0**-149), 2.0**-149, UlpDistance(2, "fp32")),
        (0.0, 5e-324, UlpDistance(1, "fp64")),
        (-5e-324, 5e-324, UlpDistance(2, "fp64")),
        (1e300, math.nextafter(1e300, math.inf), UlpDistance(1, "fp64")),
        (-sys.float_info.max, sys.float_info.max, UlpDistance(2 * 0x7FEFFFFFFFFFFFFF, "fp64")),
        (math.nan, 1.0, None),
        (math.inf, 1.0, None),
        (math.inf, -math.inf, None),
    ],
)
def test_ulp_distance(a, b, expected):
    assert ulp_distance(a, b) == expected
    assert ulp_distance(b, a) == expected


@given(FLOAT32, st.integers(0, 40))
def test_ulp_distance_counts_fp32_neighbours(start, num_steps):
    end = np.float32(start)
    for _ in range(num_steps):
        end = np.nextafter(end, np.float32(-np.inf) if start > 0 else np.float32(np.inf))
    assert ulp_distance(start, float(end)) == UlpDistance(num_steps, "fp32")


@given(FLOAT64.filter(lambda value: not is_float32(value)), st.integers(0, 40))
def test_ulp_distance_counts_fp64_neighbours(start, num_steps):
    end = start
    for _ in range(num_steps):
        end = math.nextafter(end, -math.inf if start > 0 else math.inf)
    assert ulp_distance(start, end) == UlpDistance(num_steps, "fp64")


@given(FLOAT32, FLOAT32, FLOAT32)
def test_ulp_distances_add_up(a, b, c):
    a, b, c = sorted((a, b, c))
    distances = [ulp_distance(a, b), ulp_distance(b, c), ulp_distance(a, c)]
    first, second, both = [distance.count for distance in distances if distance]
    assert first + second == both


@given(FLOAT64, FLOAT64)
def test_ulp_distance_is_symmetric_and_zero_only_between_equals(a, b):
    distance = ulp_distance(a, b)
    assert distance == ulp_distance(b, a) == ulp_distance(-a, -b)
    assert distance
    assert (distance.count == 0) == (a == b)
    assert distance.unit == ("fp32" if is_float32(a) and is_float32(b) else "fp64")
