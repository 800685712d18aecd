"""Every kernel compiles for Hopper with the tiles of training, without a GPU, and stays within its registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

SCRIPT = Path(__file__).with_name("compile_sm90.py")
# Of 227 KiB that a program of a Hopper multiprocessor may take.
MAX_SHARED_BYTES = 227 * 1024
# Two registers of the backward's dispatch with a tile twice as wide as the layer, which nobody has, with triton 3.6.
SPILLS = {"one-rank-512-experts": 8} if triton.__version__.startswith("3.6.") else {}


@pytest.mark.timeout(900)  # 111 s on two cores where Triton's cache is empty
def test_compiles_for_hopper(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = SCRIPT.parents[2]
    run = subprocess.run(
        [sys.executable, SCRIPT, tmp_path],
        env=environment | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert {row["kernel"] for row in rows} >= {"_scatter_kernel", "_dispatch_gemm_kernel", "_gemm_combine_kernel"}
    # Each with both numerics.
    eager = [row for row in rows if not row["compiled"]]
    assert sum(row["backward"] for row in eager) == 4 * len({(row["shape"], row["recorded"]) for row in eager})
    assert {row["backward"] for row in rows if row["compiled"]} == {False, True}
    assert {row["arch"] for row in rows if "wgrad" in row["kernel"]} == {80, 90}
    for row in rows:
        assert row["shared_bytes"] <= MAX_SHARED_BYTES, row
        assert row["spill_bytes"] <= SPILLS.get(row["shape"], 0), row
        # A copy that lost its alignment moves 2 bytes at a time.
        assert row["narrow_row_copies"] == 0, row
        multiplies = "gemm" in row["kernel"] or "wgrad" in row["kernel"]
        assert row["wgmma"] == row["tma"] == (multiplies and row["arch"] >= 90), row
        # Off, the timeline is compiled out.
        records = row["recorded"] and (multiplies or "exchange" in row["kernel"])
        assert row["reads_multiprocessor"] == records, row
