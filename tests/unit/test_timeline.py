"""Shares, phases and files of the kernel timeline, on launches small enough to count by hand."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.timeline import StepTimeline, write_timeline
from tools import timeline as tool
from tools.timeline_records import Launch, RankTimeline, RecordError, read_timelines
from tools.timeline_shares import covered_ns, integral, phases_of, summarize
from uniep.kernels.timeline import FIELDS, LaunchRecords, Role, Timeline

ROOT = Path(__file__).parents[2]
# role, task, program, multiprocessor, begin, work, store, end. Program 2 has no task.
DISPATCH = [
    (Role.SEND, 0, 0, 5, 0, 0, 20, 20),
    (Role.RELAY, 0, 1, 6, 0, 30, 40, 40),
    (Role.COMP, 0, 0, 5, 25, 45, 95, 95),
    (Role.COMP, 1, 1, 6, 40, 45, 80, 80),
]


def launch_of(records: list[tuple[int, ...]], num_programs: int, link_role: Role | None = Role.SEND) -> Launch:
    words = np.array(records, dtype=np.int64).T
    words = words[:, np.lexsort((words[4], words[2]))]
    return Launch("up", num_programs, 1, link_role, 0, dict(zip(FIELDS, words, strict=True)))


def test_shares_by_hand() -> None:
    summary = summarize(launch_of(DISPATCH, num_programs=3))
    assert summary.duration_ns == 95
    shares = {
        share.role: (share.num_tasks, *(round(part * 3 * 95) for part in (share.busy, share.waiting, share.idle)))
        for share in summary.roles
    }
    assert shares == {
        Role.SEND: (1, 20, 0, 5),
        Role.RELAY: (1, 10, 30, 0),
        Role.COMP: (2, 50 + 35, 20 + 5, 15),
        None: (0, 0, 0, 95),
    }
    assert summary.link == pytest.approx(20 / 95)
    assert summary.tensor_cores == pytest.approx(85 / (3 * 95))
    assert summary.tail_ns == 15
    # Before 80: 3 programs, of which SEND 20, RELAY 10, COMP 35 + 35 work.
    assert summary.bubble == pytest.approx((3 * 80 - 100) / (3 * 95))


def test_phases_by_hand() -> None:
    phases = [(phase.name, phase.start_ns, phase.end_ns) for phase in phases_of(launch_of(DISPATCH, 3))]
    assert phases == [("overlapped", 0, 45), ("compute", 45, 80), ("tail", 80, 95)]
    later = [*DISPATCH, (Role.SEND, 1, 2, 7, 0, 0, 60, 60), (Role.COMP, 2, 2, 7, 60, 60, 90, 90)]
    phases = [(phase.name, phase.start_ns, phase.end_ns) for phase in phases_of(launch_of(later, 3))]
    assert phases == [("overlapped", 0, 45), ("mixed", 45, 60), ("compute", 60, 80), ("tail", 80, 95)]
    only_products = [record for record in DISPATCH if record[0] == Role.COMP]
    phases = [(phase.name, phase.start_ns, phase.end_ns) for phase in phases_of(launch_of(only_products, 2))]
    assert phases == [("compute", 25, 80), ("tail", 80, 95)]


def test_link_of_a_combine_is_its_stores() -> None:
    records = [(Role.COMP, 0, 0, 0, 0, 0, 10, 16), (Role.COMP, 1, 1, 0, 0, 0, 12, 20)]
    summary = summarize(launch_of(records, 2, Role.COMP))
    assert summary.link == pytest.approx((20 - 10) / 20)
    assert summary.tensor_cores == pytest.approx(22 / 40)
    assert summarize(launch_of(records, 2, None)).link == 0


def test_launch_within_a_tick() -> None:
    summary = summarize(launch_of([(Role.COMP, 0, 0, 0, 7, 7, 7, 7)], 2, None))
    assert summary.duration_ns == 0
    assert sum(share.busy + share.waiting + share.idle for share in summary.roles) == 1
    assert summary.phases == ()


intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


@given(intervals)
def test_intervals_against_counting(pairs: list[tuple[int, int]]) -> None:
    starts = np.array([start for start, _ in pairs], dtype=np.int64)
    ends = np.array([start + length for start, length in pairs], dtype=np.int64)
    counts = np.zeros(81)
    for start, end in zip(starts, ends, strict=True):
        counts[start:end] += 1
    assert covered_ns(starts, ends) == (counts > 0).sum()
    edges = np.arange(0, 81, 4.0)
    np.testing.assert_allclose(np.diff(integral(starts, ends, edges)), counts[:80].reshape(-1, 4).sum(1), atol=1e-6)


def test_only_listed_steps_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)

    def gather(names: list[str | None], own: str | None) -> None:
        """Rank 0 has no MoE layer."""
        names[1] = own

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    timeline = Timeline(torch.device("cpu"), max_records=2)
    steps = StepTimeline(timeline, [2], str(tmp_path))
    without = StepTimeline(None, [2], str(tmp_path))
    for step in (1, 2, 3):
        steps.begin(step)
        without.begin(step)
        assert (timeline.launch("up", num_programs=1) is not None) == (step == 2)
        assert steps.end(step) == (["timeline/step-2.rank-1.npz"] if step == 2 else [])
        assert without.end(step) == []
    assert [path.name for path in (tmp_path / "timeline").iterdir()] == ["step-2.rank-1.npz"]


def write_run(folder: Path, num_ranks: int = 1, step: int = 3) -> Path:
    names = [f"timeline/step-{step}.rank-{rank}.npz" for rank in range(num_ranks)]
    exchange = torch.tensor([[Role.MEET, 0, 0, 5, 100, 200, 200, 200]])
    up = torch.tensor(DISPATCH) + torch.tensor([0, 0, 0, 0, 300, 300, 300, 300])
    for rank, name in enumerate(names):
        launches = [LaunchRecords("exchange", 1, 1, None, exchange, 0), LaunchRecords("up", 3, 1, Role.SEND, up, 2)]
        write_timeline(folder / name, launches, step=step, rank=rank, num_unrecorded_launches=4)
    (folder / "run.json").write_text(json.dumps({"timeline": names}))
    return folder


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([str(write_run(tmp_path)), "--no-png"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 3; the clock goes in steps of 5 ns"
    assert "rank 0, up: 0.1 us, 3 programs" in lines
    assert "  relay          1    3.5%    10.5%     0.0%" in lines
    assert "  none           0    0.0%     0.0%    33.3%" in lines
    assert "  2 tasks had no room in the buffer: the shares are of the others" in lines
    assert "rank 0: 4 later launches had no buffer left" in lines
    assert (tmp_path / "timeline" / "step-3.trace.json").is_file()
    assert not (tmp_path / "timeline" / "step-3.png").exists()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--step", "4"], "step must be a recorded one, 3, got 4"),
        (["--rank", "0", "7"], "rank must be one of 0, 1, got 7"),
    ],
)
def test_wrong_step_or_rank(
    arguments: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([str(write_run(tmp_path, 2)), "--no-png", *arguments]) == 2
    assert capsys.readouterr().err == f"error: {error}\n"


def test_run_without_or_with_broken_records(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"run\.json: must be readable"):
        read_timelines(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RecordError, match=r"must list recorded steps, got none; \[uniep\] timeline_steps names them"):
        read_timelines(tmp_path)
    (tmp_path / "run.json").write_text('{"timeline": ["a"]}')
    with pytest.raises(RecordError, match="must be one JSON object whose timeline lists files"):
        read_timelines(tmp_path)
    file = write_run(tmp_path) / "timeline" / "step-3.rank-0.npz"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(RecordError, match="must be a whole file of a recorded step, got BadZipFile"):
        read_timelines(tmp_path)
    file.unlink()
    with pytest.raises(RecordError, match="must be a file of a recorded step"):
        read_timelines(tmp_path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("records", lambda records: np.add(records, [9, 0, 0, 0, 0, 0, 0, 0])),
        ("records", lambda records: np.add(records, [0, 0, 3, 0, 0, 0, 0, 0])),
        ("records", lambda records: records - [0, 0, 1, 0, 0, 0, 0, 0]),
        ("records", lambda records: records[:-1]),
        ("records", lambda records: records[:, :-1]),
        ("records", lambda records: records.astype(float)),
        ("num_records", lambda counts: counts[:-1]),
        ("num_records", lambda counts: -counts),
        ("names", lambda names: names[:-1]),
        ("link_role", lambda roles: roles + 7),
        ("tasks_per_tile", lambda tasks: tasks * 0),
    ],
)
def test_a_file_whose_parts_do_not_fit(name, change, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_run(tmp_path) / "timeline" / "step-3.rank-0.npz"
    arrays = dict(np.load(file))
    np.savez_compressed(file, **(arrays | {name: change(arrays[name])}))
    assert tool.main([str(tmp_path), "--no-png"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {file}: must be a whole file of a recorded step, got ")


@pytest.mark.parametrize("change", [{"rank": 0}, {"step": 4}])
def test_a_file_of_another_name(change: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_run(tmp_path, 2) / "timeline" / "step-3.rank-1.npz"
    np.savez_compressed(file, **(dict(np.load(file)) | change))
    assert tool.main([str(tmp_path), "--no-png"]) == 2
    got = {"step": 3, "rank": 1} | change
    rule = f"must hold step 3 of rank 1, got step {got['step']} of rank {got['rank']}"
    assert capsys.readouterr().err == f"error: {file}: {rule}\n"


@pytest.mark.parametrize(("out", "reason"), [("file", "File exists"), ("file/x", "Not a directory")])
def test_out_that_cannot_be_written(out: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert tool.main([str(write_run(tmp_path)), "--no-png", "--out", str(tmp_path / out)]) == 2
    rule = f"--out must be a folder that can be written, got {tmp_path / out}: {reason}"
    assert capsys.readouterr().err == f"error: {rule}\n"


def test_forwards_of_the_recomputation_are_marked() -> None:
    """Not those of the next batch, with gradient accumulation."""
    forward, backward = ["exchange", "up", "down"], ["down_grad", "wgrad", "up_grad"]
    names = 2 * (2 * forward + backward)
    launches = tuple(replace(launch_of(DISPATCH, 3), name=name) for name in names)
    lines = tool.report([RankTimeline(3, 0, launches, 0)]).splitlines()
    titles = [line.split(":")[0].removeprefix("rank 0, ") for line in lines if line.startswith("rank 0, ")]
    assert titles == 2 * [*forward, *(f"{name} (again)" for name in forward), *backward]


def test_without_matplotlib(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('No module named matplotlib')")
    command = [sys.executable, "-m", "tools.timeline", str(write_run(tmp_path))]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: a picture (--no-png writes none) must have matplotlib installed")


def test_timeline_hands_out_buffers_only_while_it_records() -> None:
    timeline = Timeline(torch.device("cpu"), max_launches=1, max_records=2)
    assert timeline.launch("up", num_programs=1) is None
    timeline.start()
    buffer = timeline.launch("up", num_programs=1)
    assert buffer is not None
    assert buffer[0, :2].tolist() == [0, 2]
    assert timeline.launch("down", num_programs=1) is None
    buffer[0, 0] = 5  # what three tasks too many leave
    (launch,) = timeline.stop()
    assert (len(launch.records_RW), launch.num_dropped, timeline.num_unrecorded_launches) == (2, 3, 1)
    assert timeline.launch("up", num_programs=1) is None
    with pytest.raises(ValueError, match="max_records must be at least 1, got 0"):
        Timeline(torch.device("cpu"), max_records=0)
