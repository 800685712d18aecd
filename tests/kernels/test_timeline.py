"""An interpreted layer of two ranks with its timeline on: every task once, no bit changed, and what the tool makes of
it. The interpreter runs the programs of a launch one after another, so the times say little and are only in order."""

import json
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import uniep.layer
from recipes.timeline import write_timeline
from tests.kernels.ranks import run_ranks
from tests.kernels.test_backward import as_arrays, backward_config, draw_grads, leaves
from tests.kernels.test_forward import TILE_ROWS, Case
from tools import timeline as tool
from tools.timeline_records import read_timelines
from tools.timeline_shares import summarize
from uniep.kernels.timeline import FIELDS, LaunchRecords, Role, Timeline
from uniep.layer import fused_moe
from uniep.symmetric.heap import SymmetricHeap

CASE = Case(2, 2, (24, 17), hidden_dim=64)
LAUNCHES = ["exchange", "up", "down", "down_grad", "wgrad", "up_grad"]
SLEEP_S = 0.3
MAX_RECORDS = 4


@dataclass(frozen=True)
class Recorded:
    """What a rank brings back: with a timeline that is off, on, and too small."""

    results: list[list[Any]]
    whole: list[LaunchRecords]
    bounded: list[LaunchRecords]
    num_unrecorded: int


@pytest.fixture(scope="module")
def recorded() -> list[Recorded]:
    """Both ranks; rank 1 comes late into the dispatch of the recorded forward."""
    batch = CASE.draw(0)
    grads = draw_grads(batch, 0, exact=False)
    config = replace(backward_config(CASE.config), num_programs=5)
    patch = pytest.MonkeyPatch()
    patch.setattr(uniep.layer, "reduces_in_kernel", lambda *_, **__: True)
    build_plan = uniep.layer.launch_build_plan

    def body(heap: SymmetricHeap) -> tuple[Any, ...]:
        def run(timeline: Timeline) -> list[Any]:
            inputs = leaves(batch, heap.rank)
            x, scores, *weights = inputs
            out = fused_moe(
                x,
                scores,
                batch.expert_ids[heap.rank],
                *weights,
                heap=heap,
                config=config,
                timeline=timeline,
            )
            return as_arrays([out, *torch.autograd.grad(out, inputs, grads[heap.rank])])

        def build_late(*args: Any, **kwargs: Any) -> Any:
            time.sleep(SLEEP_S * heap.rank)
            return build_plan(*args, **kwargs)

        whole, bounded = Timeline(heap.device), Timeline(heap.device, max_launches=3, max_records=MAX_RECORDS)
        results = [run(whole)]
        whole.start()
        patch.setattr(uniep.layer, "launch_build_plan", build_late)
        results.append(run(whole))
        found = as_numbers(whole.stop())
        bounded.start()
        results.append(run(bounded))
        return results, found, as_numbers(bounded.stop()), bounded.num_unrecorded_launches

    def as_numbers(launches: list[LaunchRecords]) -> list[LaunchRecords]:
        return [replace(launch, records_RW=launch.records_RW.numpy()) for launch in launches]

    def as_tensors(launches: list[LaunchRecords]) -> list[LaunchRecords]:
        return [replace(launch, records_RW=torch.from_numpy(launch.records_RW)) for launch in launches]

    try:
        ranks = run_ranks(CASE.layout, body)
    finally:
        patch.undo()
    return [Recorded(results, as_tensors(whole), as_tensors(few), left) for results, whole, few, left in ranks]


@pytest.fixture(scope="module")
def run_folder(recorded: list[Recorded], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a training run leaves of a recorded step, as far as the tool reads it. Rank 1's clock is another one."""
    folder = tmp_path_factory.mktemp("run")
    names = [f"timeline/step-7.rank-{rank}.npz" for rank in range(2)]
    for rank, (name, of_rank) in enumerate(zip(names, recorded, strict=True)):
        launches = [replace(launch, records_RW=launch.records_RW.clone()) for launch in of_rank.whole]
        for launch in launches:
            launch.records_RW[:, 4:] += rank * 10**12
        write_timeline(folder / name, launches, step=7, rank=rank, num_unrecorded_launches=0)
    (folder / "run.json").write_text(json.dumps({"timeline": names}))
    return folder


def columns(launch: LaunchRecords) -> dict[str, np.ndarray]:
    return dict(zip(FIELDS, launch.records_RW.numpy().T, strict=True))


def num_send_tasks(rank: int) -> int:
    """By hand: distinct tokens for the other rank, in chunks of 32."""
    other = 1 - rank
    ids = CASE.draw(0).expert_ids[rank]
    return -(-int((ids // CASE.num_local == other).any(1).sum()) // 32)


def expected_tasks(rank: int, name: str) -> Counter:
    """(role, task) of a launch, from the routing."""
    ids = torch.cat([ids.flatten() for ids in CASE.draw(0).expert_ids])
    own = range(rank * CASE.num_local, (rank + 1) * CASE.num_local)
    num_tiles = sum(-(-int((ids == expert).sum()) // TILE_ROWS) for expert in own)
    counts: dict[str, dict[Role, int]] = {
        "exchange": {Role.SEND: 1},
        # F = 64 in columns of 64 / 2 forward and of 32 backward; D = 64 in columns of 64.
        "up": {Role.SEND: num_send_tasks(rank), Role.RELAY: num_tiles, Role.COMP: 2 * num_tiles},
        "down": {Role.COMP: num_tiles, Role.RETURN: num_tiles, Role.REDUCE: -(-CASE.num_tokens[rank] // 8)},
        # Three gradients of 4 experts, 64 x 64 in tiles of 32 x 64.
        "wgrad": {Role.COMP: 3 * 4 * 2},
    }
    counts |= {"down_grad": counts["up"], "up_grad": counts["down"]}
    return Counter((role, task) for role, num in counts[name].items() for task in range(num))


@pytest.mark.parametrize("rank", [0, 1])
def test_every_task_once(recorded: list[Recorded], rank: int) -> None:
    launches = recorded[rank].whole
    assert [launch.name for launch in launches] == LAUNCHES
    for launch in launches:
        words = columns(launch)
        is_meet = words["role"] == Role.MEET
        found = Counter(zip(words["role"][~is_meet].tolist(), words["task"][~is_meet].tolist(), strict=True))
        assert found == expected_tasks(rank, launch.name), launch.name
        # Each program of a combine waits for all ranks once, and of an exchange the last one does.
        meets = {"exchange": 1, "down": launch.num_programs, "up_grad": launch.num_programs}.get(launch.name, 0)
        assert sorted(words["task"][is_meet].tolist()) == list(range(meets))
        assert launch.num_dropped == 0


def test_times_are_in_order(recorded: list[Recorded]) -> None:
    for of_rank in recorded:
        end = 0
        for launch in of_rank.whole:
            words = columns(launch)
            times = [words[name] for name in FIELDS[4:]]
            assert all((earlier <= later).all() for earlier, later in pairwise(times))
            assert words["begin_ns"].min() >= end
            end = words["end_ns"].max()
            assert set(words["program"].tolist()) <= set(range(launch.num_programs))


def test_waits_are_told_from_work(recorded: list[Recorded]) -> None:
    """Rank 0 waits for the tokens of the late rank 1: in the relay."""
    words = columns(recorded[0].whole[LAUNCHES.index("up")])
    waited_s = (words["work_ns"] - words["begin_ns"]) / 1e9
    assert waited_s.max() > SLEEP_S / 2
    assert words["role"][waited_s.argmax()] == Role.RELAY


def test_no_bit_changes(recorded: list[Recorded]) -> None:
    for of_rank in recorded:
        off, *others = of_rank.results
        for on in others:
            for want, got in zip(off, on, strict=True):
                assert np.array_equal(want, got, equal_nan=True)
        assert np.isfinite(off[0]).all()
        assert off[0].any()


def test_buffer_is_bounded(recorded: list[Recorded]) -> None:
    for of_rank in recorded:
        assert of_rank.num_unrecorded == 3
        assert [launch.name for launch in of_rank.bounded] == LAUNCHES[:3]
        for few, whole in zip(of_rank.bounded, of_rank.whole, strict=False):
            assert len(few.records_RW) == min(MAX_RECORDS, len(whole.records_RW))
            assert len(few.records_RW) + few.num_dropped == len(whole.records_RW)
            assert (few.records_RW[:, 7] > 0).all()


def test_clocks_are_laid_on_each_other(run_folder: Path, recorded: list[Recorded]) -> None:
    timelines = read_timelines(run_folder)
    ends = [timeline.launches[0].end_ns for timeline in timelines]
    assert ends[0] == ends[1]
    assert min(launch.start_ns for timeline in timelines for launch in timeline.launches) == 0
    # The true clock of both ranks is one, so the shift is off by no more than the exchange's own skew.
    late = [int(columns(of_rank.whole[0])["end_ns"].max()) for of_rank in recorded]
    for timeline, of_rank, mark in zip(timelines, recorded, late, strict=True):
        for launch, raw in zip(timeline.launches, of_rank.whole, strict=True):
            assert launch.end_ns - ends[0] == int(columns(raw)["end_ns"].max()) - mark


def test_shares_add_up(run_folder: Path) -> None:
    for timeline in read_timelines(run_folder):
        for launch in timeline.launches:
            summary = summarize(launch)
            total = sum(share.busy + share.waiting + share.idle for share in summary.roles)
            assert total == pytest.approx(1.0, abs=1e-9)
            assert all(min(share.busy, share.waiting, share.idle) >= 0 for share in summary.roles)
            assert 0 <= summary.bubble <= 1
            assert 0 <= summary.link <= 1
            assert sum(phase.end_ns - phase.start_ns for phase in summary.phases) == summary.duration_ns


def test_tool(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    assert tool.main([str(run_folder), "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for rank in range(2):
        for name in LAUNCHES:
            assert f"rank {rank}, {name}: " in text
    assert "bubble" in text
    assert "tail" in text

    events = json.loads((tmp_path / "step-7.trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for rank, timeline in enumerate(read_timelines(run_folder)):
        tracks = {name for (process, _), name in named.items() if process == rank}
        programs = {int(p) for launch in timeline.launches for p in launch["program"]}
        assert tracks == {"launches", "phases"} | {f"multiprocessor {program}.0" for program in programs}
        worked = [e for e in spans if e["pid"] == rank and "task" in e["args"] and not e["name"].endswith(" waits")]
        num_meets = sum(int(launch.of(Role.MEET).sum()) for launch in timeline.launches)
        assert len(worked) >= sum(map(len, timeline.launches)) - num_meets
        assert all((event["pid"], event["tid"]) in named for event in worked)

    picture = pyplot.imread(tmp_path / "step-7.png")
    colors = np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)
    assert len(colors) > 20
