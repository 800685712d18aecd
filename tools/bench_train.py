"""Trains one config with several MoE backends in turn and compares speed, memory and bits.

python -m tools.bench_train CONFIG.toml [--backends torchtitan reference] [--steps 20] [--out FILE.json] [-- OVERRIDES]

The first backend is the baseline. What stands behind `--` overrides the TOML for every run. Ranks come from NGPU, as
for run_train.sh. The JSON names the GPU, versions, command and commit; a speed-up stands in it only beside whether the
runs' losses and gradient norms are identical (for that a run needs `--debug.deterministic`). Where they are not, the
exit status is 1.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

from recipes.config import Backend
from tools.command import check_writable, end_with
from tools.compare_settings import ComparisonError, check_comparable
from tools.compare_values import compare_pair
from tools.records import RecordError, read_run
from uniep.files import replace_text

# Compilation, first allocations and the autotuner's first look lie in the first steps.
WARMUP_STEPS = 3
BACKENDS = get_args(Backend)
# What each run gets from this tool, by the beginning of its option.
OWN = {
    "__training.steps": "the steps",
    "__job.dump_folder": "the folders",
    "__checkpoint.folder": "the folders",
    "__job.config_file": "the config",
    "__uniep.backend": "the backends",
    "__throughput.no_time_moe": "the MoE's time",
}


class WentOnError(RuntimeError):
    """A run went on from an earlier one, instead of training all steps."""


def train(config: str, backend: str, folder: Path, overrides: list[str]) -> None:
    """Trains in processes of its own. Ends this one with its status, and the end of its log, if it fails."""
    command = [sys.executable, "-m", "recipes.launch", "--job.config_file", config, "--job.dump_folder", str(folder)]
    command += ["--uniep.backend", backend, "--metrics.no-enable-wandb", "--throughput.time_moe", *overrides]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (folder.parent / f"{folder.name}.log").write_text(done.stdout)
    if done.returncode:
        sys.stderr.write(done.stdout[-6000:])
        raise SystemExit(done.returncode)


def summarize(folder: Path) -> dict[str, Any]:
    """Medians over the steps behind the warm-up.

    Raises:
        WentOnError: there are steps that this run did not train.
    """
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not lines or lines[0]["step"] != 1:
        begins = f"step {lines[0]['step']}" if lines else "none"
        raise WentOnError(
            "[checkpoint] folder must be empty when a run starts, so that it begins with step 1, got a run that began "
            f"with {begins}"
        )
    warm = lines[WARMUP_STEPS:]
    step_time_s = statistics.median(line["step_time_s"] for line in warm)
    moe_s = statistics.median(line["moe_s"] for line in warm)
    tokens = (lines[-1]["tokens_seen"] - lines[0]["tokens_seen"]) / max(len(lines) - 1, 1)
    start_up_s = json.loads((folder / "run.json").read_text()).get("start_up_s")
    return {
        "step_time_ms": step_time_s * 1e3,
        "moe_ms": moe_s * 1e3,
        "moe_share": moe_s / step_time_s,
        "tokens_per_second": tokens / step_time_s,
        "tokens_per_day": tokens / step_time_s * 86400,
        "peak_memory_gib": max(line["memory_gib"] for line in lines),
        "last_loss": lines[-1]["loss"],
        # Where nothing is cached, most of it is the compilation of the kernels.
        "first_step_s": lines[0]["step_time_s"],
        # Of the autotuner.
        **({"start_up_s": start_up_s} if start_up_s else {}),
    }


def identical(first: Path, other: Path) -> bool:
    """As tools.compare_runs finds it.

    Raises:
        RecordError, ComparisonError: the two runs cannot be compared.
    """
    runs = read_run(first), read_run(other)
    check_comparable("AB", runs, force=False)
    return compare_pair(*runs).identical


def _verdict(row: dict[str, Any]) -> str:
    if "identical" not in row:
        return "  (baseline)"
    if row["identical"]:
        return f"  {row['speedup']:.2f}x, identical"
    return "  not identical: no speed-up is reported (--keep FOLDER keeps the runs for tools.compare_runs)"


def _start_up(row: dict[str, Any]) -> str:
    took_s = {"first step": row["first_step_s"], **row.get("start_up_s", {})}
    return "".join(f", {what} {seconds:.2f} s" for what, seconds in took_s.items())


def _check(options: argparse.Namespace, overrides: list[str]) -> None:
    refused = argparse.ArgumentTypeError
    if options.steps <= WARMUP_STEPS:
        raise refused(f"--steps must be more than the {WARMUP_STEPS} of the warm-up, got {options.steps}")
    for override in overrides:
        if what := OWN.get(override.partition("=")[0].replace("-", "_")):
            raise refused(f"what stands behind -- must leave {what} to this tool, got {override}")
    if unknown := set(options.backends) - set(BACKENDS):
        raise refused(f"--backends must be of {', '.join(BACKENDS)}, got {', '.join(sorted(unknown))}")
    if options.keep and any(path.is_file() for path in (options.keep, *options.keep.parents)):
        raise refused(f"--keep must be a folder, got {options.keep}")
    if options.keep and any(folder.exists() for folder in _folders(options)):
        raise refused(f"--keep must be a folder without earlier runs, which these would go on from, got {options.keep}")


def _folders(options: argparse.Namespace) -> list[Path]:
    """Of the runs: one backend may stand there twice."""
    return [options.keep / f"{index}-{backend}" for index, backend in enumerate(options.backends)]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--backends", nargs="+", default=["torchtitan", "reference"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--keep", type=Path, help="folder to keep the runs in")
    own, overrides = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    options = parser.parse_args(own)
    try:
        if options.out:
            check_writable("--out", options.out)
        _check(options, overrides)
    except argparse.ArgumentTypeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    overrides = ["--training.steps", str(options.steps), *overrides]

    with contextlib.ExitStack() as stack:
        if not options.keep:
            options.keep = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_train_")))
        options.keep.mkdir(parents=True, exist_ok=True)
        try:
            rows = compare(options, argv, overrides)
        except (WentOnError, RecordError, ComparisonError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0 if all(row.get("identical", True) for row in rows) else 1


def compare(options: argparse.Namespace, argv: list[str], overrides: list[str]) -> list[dict[str, Any]]:
    """Trains with each backend, says how it went and writes options.out."""
    rows: list[dict[str, Any]] = []
    baseline = None
    folders = _folders(options)
    for backend, folder in zip(options.backends, folders, strict=True):
        train(options.config, backend, folder, overrides)
        row = {"backend": backend, **summarize(folder)}
        if baseline is not None:
            row["identical"] = identical(folders[0], folder)
            row["speedup"] = baseline["step_time_ms"] / row["step_time_ms"] if row["identical"] else None
        baseline = baseline or row
        rows.append(row)
        print(
            f"{backend:12} {row['step_time_ms']:9.1f} ms/step, MoE {row['moe_share']:4.0%}  "
            f"{row['tokens_per_day'] / 1e9:8.3f} B tokens/day "
            f"{row['peak_memory_gib']:6.1f} GiB" + _verdict(row) + _start_up(row),
            flush=True,
        )
    run = json.loads((folders[0] / "run.json").read_text())
    result = {
        "config": options.config,
        "steps": options.steps,
        "overrides": overrides,
        "rows": rows,
        "devices": run["devices"],
        "versions": run["versions"],
        "commit": run["commit"],
        "command": "python -m tools.bench_train " + " ".join(argv),
        "ngpu": os.environ.get("NGPU"),
        "date": time.strftime("%Y-%m-%d"),
    }
    if options.out:
        replace_text(options.out, json.dumps(result, indent=2) + "\n")
    return rows


if __name__ == "__main__":
    end_with(main)
