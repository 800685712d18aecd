"""tools.ep_scaling: the table and the plot, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools.ep_scaling import main


def row(ep: int, shape: str = "small", **changes: Any) -> dict[str, Any]:
    sizes = {"E": 8, "K": 2, "D": 64, "F": 32}
    times = {"stock_ms": 4.0 * ep, "uniep_ms": 1.0 + ep, "gemm_ms": 1.0}
    facts = {"shape": shape, "ep": ep, "pass": "both", "tokens": 64, "bits_equal": True}
    return {**facts, **sizes, **times, **changes}


def write(folder: Path, name: str, *rows: dict[str, Any], gpu: str = "NVIDIA H200") -> str:
    path = folder / name
    path.write_text(json.dumps({"rows": rows, "gpu": gpu, "versions": {"torch": "2.11.0"}, "commit": "abc"}))
    return str(path)


def test_growth_is_against_the_smallest_degree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [write(tmp_path, f"ep{ep}.json", row(ep), row(ep, "large")) for ep in (4, 1)]
    assert main([*files, "--plot", str(tmp_path / "new" / "growth.png")]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in table[:4]] == [[n, "EP", d] for n in ("small", "large") for d in ("1", "4")]
    assert "stock   16.000 ms (x4.00)  uniep    5.000 ms (x2.50)" in table[1]
    assert table[1].endswith("3.20x stock")
    assert (tmp_path / "new" / "growth.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bits_equal": False}, "bits must equal TorchTitan's"),
        ({"tokens": 128}, "tokens must be 64"),
        ({"pass": "forward"}, "pass must be both"),
        ({"E": 4}, "E must be 8"),
        ({"ep": 1}, "a second ep = 1"),
        ({"shape": "large", "ep": 1}, "two EP degrees at least, got [1]"),
    ],
)
def test_rows_of_another_benchmark_are_refused(
    changes: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [write(tmp_path, "a.json", row(1)), write(tmp_path, "b.json", {**row(2), **changes})]
    assert main(files) == 2
    assert says in capsys.readouterr().err


def test_files_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path, "a.json", row(1))
    (tmp_path / "text.json").write_text("[]")
    for files, says in (
        ([good, write(tmp_path, "b.json", row(2), gpu="NVIDIA H100 80GB HBM3")], "gpu must be NVIDIA H200"),
        ([good, str(tmp_path / "text.json")], "text.json must be a file of tools.bench_moe --out"),
        ([good, str(tmp_path / "missing.json")], "missing.json must be a file of tools.bench_moe --out"),
        ([good, write(tmp_path, "c.json", row(2)), "--plot", good], "--plot must be another file"),
        ([good, str(tmp_path / "c.json"), "--plot", str(tmp_path)], "--plot must be a file that can be written"),
    ):
        assert main(files) == 2
        assert says in capsys.readouterr().err
