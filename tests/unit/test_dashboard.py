"""tools.dashboard: run folders in, a page out, opened in a real browser with the network off."""

import itertools
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.expert_load import ExpertLoad
from recipes.records import StepRecord
from tests.browser import Opened, find_browser, open_page
from tests.unit.test_compare_runs import RECORD, curve
from tools.dashboard import main
from tools.dashboard_figures import MAX_POINTS, Shown, difference_figure, thin
from tools.records import MAX_LOADS, read_run

LOAD = ExpertLoad(
    layers=[1, 3],
    tokens_per_expert=[[100, 50, 25, 25], [50, 50, 50, 50]],
    imbalance=[2.0, 1.0],
    rank_imbalance=[1.5, 1.0],
    distinct_ranks=[1.5, 1.25],
    distinct_ranks_expected=1.6667,
)
Curve = list[tuple[float, float]]


def line(step: int, loss: float, grad_norm: float, load: ExpertLoad | None) -> str:
    return StepRecord(
        step=step,
        loss=loss,
        grad_norm=grad_norm,
        loss_hex=loss.hex(),
        grad_norm_hex=grad_norm.hex(),
        tokens_seen=100 * step,
        step_time_s=0.5,
        tokens_per_second=200.0,
        tokens_per_day=200.0 * 86400 + step % 7,
        memory_gib=1.5,
        data_loading_s=0.05,
        forward_backward_s=0.4,
        unix_time_s=1.8e9 + step,
        expert_load=load,
    ).to_json()


def write_run(folder: Path, values: Curve | None = None, *, load_freq: int = 2, **changes: Any) -> Path:
    """Writes a run folder; `changes` replace keys of run.json."""
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(RECORD | changes))
    lines = [
        line(step, loss, grad_norm, LOAD if step % load_freq == 0 else None)
        for step, (loss, grad_norm) in enumerate(curve() if values is None else values, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{text}\n" for text in lines))
    return folder


def with_seed(seed: int) -> dict[str, Any]:
    return RECORD["config"] | {"debug": {"seed": seed, "deterministic": True}}


def make_page(tmp_path: Path, *runs: Path) -> str:
    """The page's own part, without the code of plotly."""
    page = tmp_path / "report.html"
    assert main([*map(str, runs), "-o", str(page)]) == 0
    text = page.read_text()
    return text[text.rindex("</head>") :]


@pytest.fixture(scope="module")
def browser() -> str:
    found = find_browser()
    if found is None:
        pytest.skip("no browser: apt-get install chromium, or set BROWSER_PATH")
    return found


def figures(opened: Opened) -> list[str]:
    """What the browser made of every plot of the page."""
    parts = re.split(r'<div id="[^"]*" class="(?=plotly-graph-div)', opened.dom[opened.dom.index("<main>") :])
    return parts[1:]


def test_the_page_draws_every_plot_in_a_browser(tmp_path, browser):
    other = [(loss + 0.01, norm) for loss, norm in curve()]
    runs = [
        write_run(tmp_path / "one", tuner={"bucket 4096": {"forward": "N_disp 8"}}),
        write_run(tmp_path / "same"),
        write_run(tmp_path / "seed", other, config=with_seed(43)),
    ]
    make_page(tmp_path, *runs)
    opened = open_page(browser, tmp_path / "report.html", tmp_path / "profile")
    assert opened.console == []
    plots = figures(opened)
    # Loss, its difference, norm, tokens, step time, memory and ranks once; two heat maps for every run.
    assert len(plots) == 7 + 2 * 3
    drawn = re.compile(r'class="(js-line|js-fill|points|hm)"[^>]*><(path|image|g)|class="js-line"|class="point"')
    for plot in plots:
        assert plot.startswith('plotly-graph-div js-plotly-plot"')
        assert 'class="main-svg"' in plot
        assert drawn.search(plot), plot[:2000]
    assert opened.dom.count('class="hm"') == 2 * 3


def test_a_broken_page_is_seen(tmp_path, browser):
    """The browser's console reaches the test above: scripts that fail, and anything loaded from elsewhere."""
    make_page(tmp_path, write_run(tmp_path / "run"))
    page = tmp_path / "report.html"
    page.write_text(page.read_text().replace("<body>", '<body><script src="https://cdn.plot.ly/a.js"></script>'))
    opened = open_page(browser, page, tmp_path / "profile")
    assert len(opened.console) == 1
    assert "Content Security Policy" in opened.console[0]
    page.write_text(page.read_text().replace("Plotly.newPlot(", "Plotly.noSuchFunction("))
    opened = open_page(browser, page, tmp_path / "profile")
    assert any("noSuchFunction is not a function" in text for text in opened.console)
    assert all('class="main-svg"' not in plot for plot in figures(opened))


def test_three_runs_compared(tmp_path, capsys):
    other = [(loss + 0.01, norm) for loss, norm in curve()]
    runs = [
        write_run(tmp_path / "one"),
        write_run(tmp_path / "same"),
        write_run(tmp_path / "seed", other, config=with_seed(43)),
    ]
    page = make_page(tmp_path, *runs)
    same, different = "B is identical to A: all 20 steps", "C is different from A: first differing at step 1, in loss"
    assert f'<div class="same">{same}</div>' in page
    assert f'<div class="other">{different}</div>' in page
    assert "<li>debug.seed: 42, 43</li>" in page
    assert capsys.readouterr().out.splitlines()[:2] == [same, different]


def test_identical_up_to_a_step(tmp_path, capsys):
    values = curve()
    values[6] = (values[6][0], values[6][1] * 2)
    first = write_run(tmp_path / "first")
    make_page(tmp_path, first, write_run(tmp_path / "later", values), write_run(tmp_path / "short", curve()[:8]))
    said = capsys.readouterr().out
    assert "B is different from A: identical up to step 6, first differing at step 7, in grad_norm" in said
    assert "C is identical to A up to step 8, the last that both have" in said


def test_missing_steps_in_between_are_said(tmp_path, capsys):
    first, gap = write_run(tmp_path / "first"), write_run(tmp_path / "gap")
    lines = (gap / "metrics.jsonl").read_text().splitlines(keepends=True)
    (gap / "metrics.jsonl").write_text("".join(lines[:4] + lines[6:10]))
    page = make_page(tmp_path, first, gap)
    said = "B agrees with A at the 8 steps that both have, but 2 steps in between, the first is step 5, are in one of"
    assert f'<div class="other">{said}' in page
    assert said in capsys.readouterr().out


def test_runs_without_a_common_step(tmp_path, capsys):
    late = write_run(tmp_path / "late")
    lines = (late / "metrics.jsonl").read_text().splitlines(keepends=True)
    (late / "metrics.jsonl").write_text("".join(lines[15:]))
    page = make_page(tmp_path, write_run(tmp_path / "early", curve()[:9]), late)
    assert "B has no step in common with A" in capsys.readouterr().out
    assert '"text":"B: late: no common step"' in page
    assert "no difference" not in page


@pytest.mark.parametrize(
    ("change", "note", "has_points"),
    [
        (lambda step, loss: loss, ": no difference", False),
        (lambda step, loss: float("inf") if step >= 10 else loss, ": not finite, first at step 11", False),
        (lambda step, loss: float("nan") if step == 10 else loss + 1, ": not finite, first at step 11", True),
        (lambda step, loss: loss + 1, "", True),
    ],
    ids=["none", "not finite", "some not finite", "finite"],
)
def test_the_difference_says_what_no_point_shows(tmp_path, change, note, has_points):
    values = [(change(step, loss), norm) for step, (loss, norm) in enumerate(curve())]
    runs = [read_run(write_run(tmp_path / "a")), read_run(write_run(tmp_path / "b", values))]
    figure = difference_figure([Shown(label, label, "#000000", run) for label, run in zip("AB", runs, strict=True)])
    assert [points.name for points in figure.data] == [f"B{note}"]
    assert figure.layout.showlegend
    assert np.isfinite(figure.data[0].y).any() == has_points
    assert [text.text for text in figure.layout.annotations] == ([] if has_points else [f"B{note}"])


def test_folders_of_one_name_are_told_apart(tmp_path):
    for parent in "pq":
        (tmp_path / parent).mkdir()
    page = make_page(tmp_path, write_run(tmp_path / "p" / "x"), write_run(tmp_path / "q" / "x"))
    assert "<h1>A: p/x, B: q/x</h1>" in page
    assert "<h1>A: x, B: x</h1>" in make_page(tmp_path, tmp_path / "p" / "x", tmp_path / "p" / "x")


@pytest.mark.parametrize("key", ["tuner", "backend"])
def test_the_facts_of_a_run(tmp_path, key):
    choices = {"bucket 4096": {"chosen": "<N_disp> 8"}}
    recorded = choices if key == "tuner" else {"ran": "uniep", "tune": choices}
    page = make_page(tmp_path, write_run(tmp_path / "run", commit="01917852539cdef0+changes", **{key: recorded}))
    assert "<td>01917852539c+changes</td>" in page
    assert "<td>20 of 20</td>" in page
    assert "<td>500 ms</td>" in page
    assert "0.0173 B (0.0173 to 0.0173)" in page
    assert "<td>1.50 GiB</td>" in page
    assert "<td>bucket 4096.chosen</td><td>&lt;N_disp&gt; 8</td>" in page


def test_the_token_budget_has_an_end(tmp_path):
    # 200 tokens a second, 2,000 tokens seen at 1.8e9 s (2027-01-15 08:00 UTC): 100 days are left.
    budget = 2000 + 100 * 200 * 86400
    config = RECORD["config"] | {"throughput": {"token_budget": budget}}
    page = make_page(tmp_path, write_run(tmp_path / "run", config=config))
    assert "ends on 2027-04-25" in page


@pytest.mark.parametrize("has_time", [True, False])
def test_a_token_budget_that_is_reached(tmp_path, has_time):
    config = RECORD["config"] | {"throughput": {"token_budget": 450}}
    run = write_run(tmp_path / "run", config=config)
    if not has_time:
        text = (run / "metrics.jsonl").read_text()
        (run / "metrics.jsonl").write_text(text.replace("unix_time_s", "other"))
    date = " on 2027-01-15 08:00 UTC" if has_time else ""
    assert f"<td>444% of 450, reached at step 5{date}</td>" in make_page(tmp_path, run)


def test_records_of_an_earlier_version_are_drawn(tmp_path):
    """Without the keys that came later."""
    run = write_run(tmp_path / "run")
    rows = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "loss", "grad_norm", "loss_hex", "grad_norm_hex", "tokens_seen")
    (run / "metrics.jsonl").write_text("".join(json.dumps({key: row[key] for key in kept}) + "\n" for row in rows))
    page = make_page(tmp_path, run)
    for key in ("tokens_per_day", "step_time_s", "memory_gib", "expert load"):
        assert f"these records hold no {key}" in page


def test_a_cut_line_is_left_out_and_said(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    text = (run / "metrics.jsonl").read_text()
    for cut in (text[:-3], text[:-1000], text[: text.rindex('"expert_load"') + 30]):
        (run / "metrics.jsonl").write_text(cut)
        number = cut.count("\n") + 1
        page = make_page(tmp_path, run)
        assert f"metrics.jsonl line {number} was cut in the middle and is left out" in page
        assert f"line {number} was cut in the middle" in capsys.readouterr().err
        assert len(read_run(run, drop_cut_line=True).steps) == number - 1


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "\n", "\n\n \n"])
def test_line_ends(tmp_path, end, last):
    run = write_run(tmp_path / "run")
    text = (run / "metrics.jsonl").read_text()
    expected = read_run(run).loads
    (run / "metrics.jsonl").write_bytes((text.rstrip() + last).replace("\n", end).encode())
    assert read_run(run).steps[-1] == 20
    assert read_run(run).loads == expected


def test_a_line_cut_elsewhere_is_an_error(tmp_path, capsys):
    """A crash cuts the last line only; anything else is a broken file."""
    run = write_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    for index in (6, 7):  # without and with an expert load
        broken = [*lines[:index], lines[index][:-8], *lines[index + 1 :]]
        (run / "metrics.jsonl").write_text("\n".join(broken) + "\n")
        assert main([str(run), "-o", str(tmp_path / "page.html")]) == 2
        assert f"metrics.jsonl line {index + 1}: must be one whole JSON object" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", '{"step": 1, "los'])
def test_an_empty_run_is_named(tmp_path, capsys, text):
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text(text)
    assert main([str(run), "-o", str(tmp_path / "page.html")]) == 2
    assert "metrics.jsonl: must hold at least one step, got" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written(tmp_path, capsys):
    assert main([str(write_run(tmp_path / "run")), "-o", str(tmp_path / "none" / "page.html")]) == 2
    assert "-o must be a file that can be written" in capsys.readouterr().err


@pytest.mark.parametrize("output", ["run/metrics.jsonl", "run/run.json", "elsewhere/run.json", "link", "data.jsonl"])
def test_the_page_replaces_no_record(tmp_path, capsys, output):
    """By whichever path: here metrics.jsonl is itself a link to another file."""
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").rename(tmp_path / "data.jsonl")
    (run / "metrics.jsonl").symlink_to(tmp_path / "data.jsonl")
    (tmp_path / "link").symlink_to(run / "run.json")
    assert main([str(run), "-o", str(tmp_path / output)]) == 2
    expected = f"-o must be a file that is not a run's run.json or metrics.jsonl, got {tmp_path / output}"
    assert capsys.readouterr().err == f"error: {expected}\n"
    assert read_run(run)


def test_100_000_steps_in_seconds(tmp_path):
    rng = np.random.default_rng(0)
    values = [(float(loss), 1.0) for loss in rng.random(100_000)]
    run = write_run(tmp_path / "run", values, load_freq=10)
    begin = time.process_time()
    page = make_page(tmp_path, run)
    seconds = time.process_time() - begin  # of this process: others may be busy
    assert seconds < 10
    assert "100,000 steps are drawn as about 2,000 points a curve" in page
    loads = read_run(run).loads
    assert MAX_LOADS < len(loads) <= 2 * MAX_LOADS
    assert len({later[0] - earlier[0] for earlier, later in itertools.pairwise(loads)}) == 1
    assert f"the expert load is drawn at {len(loads)} of the 10,000 steps that recorded it" in page
    assert len(page) < 2_000_000


def test_thinning_keeps_the_peaks():
    values = np.random.default_rng(1).random(100_003)
    values[[17, 50_000]] = [9.0, -9.0]
    values[99_000] = np.nan
    kept = thin(values)
    assert len(kept) <= MAX_POINTS + 2
    assert {0, 17, 50_000, 100_002} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()
    assert thin(values[:MAX_POINTS]).tolist() == list(range(MAX_POINTS))
    assert thin(np.full(10_000, np.nan)).size


def test_losses_that_are_not_finite_are_drawn_around(tmp_path):
    values = curve()
    values[3], values[4] = (float("nan"), 1.0), (float("inf"), 1.0)
    page = make_page(tmp_path, write_run(tmp_path / "run", values))
    assert "loss is not finite at 2 steps, first at step 4" in page


def test_wandb_without_a_login_says_so(tmp_path, capsys, monkeypatch):
    pytest.importorskip("wandb_workspaces")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    page = tmp_path / "page.html"
    assert main([str(write_run(tmp_path / "run")), "-o", str(page), "--wandb"]) == 2
    assert "--wandb must have a wandb login (`wandb login` or WANDB_API_KEY), got none" in capsys.readouterr().err
    assert page.exists()


def test_the_workspace_shows_what_is_logged():
    pytest.importorskip("wandb_workspaces")
    from tools.dashboard_layout import PANELS
    from tools.dashboard_wandb import build_workspace

    (section,) = build_workspace("team", "project").sections
    assert [panel.title for panel in section.panels] == [panel.title for panel in PANELS if panel.metrics]
    logged = (Path(__file__).parents[2] / "recipes" / "metrics.py").read_text()
    for panel in section.panels:
        assert panel.x == "step"
        for metric in panel.y:
            group = metric.partition("/")[0]
            assert f'"{metric}"' in logged or group == "memory", metric
