"""tools.bench_train without training: what it refuses, and what it leaves."""

import tempfile
from pathlib import Path

import pytest

from tools import bench_train


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--steps", "3"], "--steps must be more than the 3 of the warm-up, got 3"),
        (["--keep", __file__], f"--keep must be a folder, got {__file__}"),
        (["--keep", f"{__file__}/runs"], f"--keep must be a folder, got {__file__}/runs"),
        *(
            (["--", option], f"what stands behind -- must leave {what} to this tool, got {option}")
            for what, option in (
                ("the steps", "--training.steps=2"),
                ("the folders", "--job.dump-folder=x"),
                ("the folders", "--checkpoint.folder"),
                ("the config", "--job.config_file=x"),
                ("the backends", "--uniep.backend"),
                ("the MoE's time", "--throughput.no-time-moe"),
            )
        ),
        (["--backends", "reference", "fast"], "--backends must be of auto, uniep, reference, torchtitan, got fast"),
        (["--out", "."], "--out must be a file that can be written, in a folder, got ."),
    ],
)
def test_refused_before_any_run(args, expected, capsys, monkeypatch):
    monkeypatch.setattr(bench_train, "train", None)
    assert bench_train.main(["config.toml", *args]) == 2
    assert capsys.readouterr().err == f"error: {expected}\n"


def test_runs_are_not_gone_on_from(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_train, "train", None)
    (tmp_path / "1-reference").mkdir()
    assert bench_train.main(["config.toml", "--keep", str(tmp_path)]) == 2
    assert "--keep must be a folder without earlier runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "began"),
    [(None, "none"), ("", "none"), ('{"step": 5}\n{"step": 6}\n', "step 5")],
)
def test_a_run_that_goes_on_from_another_is_no_measurement(lines, began, capsys, monkeypatch):
    """As where the TOML names a folder of checkpoints that all runs share."""

    def train(config: str, backend: str, folder: Path, overrides: list[str]) -> None:
        folder.mkdir()
        if lines is not None:
            (folder / "metrics.jsonl").write_text(lines)

    monkeypatch.setattr(bench_train, "train", train)
    assert bench_train.main(["config.toml"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: [checkpoint] folder must be empty when a run starts")
    assert said.endswith(f"began with {began}\n")


def test_a_run_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def train(config: str, backend: str, folder: Path, overrides: list[str]) -> None:
        folder.mkdir()
        raise SystemExit(3)

    monkeypatch.setattr(bench_train, "train", train)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit, match="3"):
        bench_train.main(["config.toml"])
    assert not list(tmp_path.iterdir())
