"""The dashboard's page: recorded runs in, one HTML file with all that it needs out."""

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.io import to_html
from plotly.offline import get_plotlyjs

from tools.compare_report import label_runs, name_runs, verdict
from tools.compare_settings import config_differences, warnings_of_run
from tools.compare_values import PairComparison, compare_pair
from tools.dashboard_figures import COLORS, MAX_POINTS, Shown, warm
from tools.dashboard_layout import PANELS
from tools.records import MAX_LOADS, Run, flatten

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; background: #f4f6f8; margin: 0; }
main { max-width: 1500px; margin: 0 auto; padding: 16px 24px 48px; }
h1 { font-size: 24px; margin: 8px 0 12px; } h2 { font-size: 17px; margin: 0 0 4px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 560px), 1fr)); gap: 16px; }
section { background: #fff; border: 1px solid #dde3e9; border-radius: 8px; padding: 12px 16px; min-width: 0; }
.wide { grid-column: 1 / -1; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: 4px 14px 4px 0; }
th { color: #5a6775; font-weight: 600; white-space: nowrap; } tr + tr > * { border-top: 1px solid #eef1f4; }
.same { color: #2b8a3e; font-weight: 600; } .other { color: #c92a2a; font-weight: 600; }
.notes { color: #5a6775; margin: 4px 0; padding-left: 20px; }
"""

# The browser itself keeps the page off the network: nothing but what stands in the page is loaded.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write_page(path: str, runs: Sequence[Run]) -> None:
    """Writes the page of some runs, compared with the first of them.

    Raises:
        OSError: the file cannot be written.
    """
    labels = label_runs(len(runs))
    shown = [
        Shown(label, f"{label}: " * (len(runs) > 1) + escape(name), COLORS[index % len(COLORS)], run)
        for index, (label, name, run) in enumerate(zip(labels, name_runs(runs), runs, strict=True))
    ]
    pairs = [compare_pair(runs[0], run) for run in runs[1:]]
    cards = [_section("Runs", _runs_table(shown), wide=True)]
    if pairs:
        cards.append(_section("Compared", _comparison(shown, pairs), wide=True))
    for panel in PANELS:
        if len(shown) < panel.min_runs:
            continue
        groups = [[one] for one in shown] if panel.one_run_each else [shown]
        for group in groups:
            name = f" ({group[0].name})" if panel.one_run_each and len(shown) > 1 else ""
            cards.append(_section(f"{panel.title}{name}", _plot(panel.build(group))))
    cards += [_section(f"Tuner ({one.name})", _tuner_table(one.run.tuner)) for one in shown if one.run.tuner]
    title = ", ".join(one.name for one in shown)
    text = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        # Without an icon of its own a page asks a server for one.
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style>\n<script>{get_plotlyjs()}</script></head>\n'
        f'<body><main><h1>{title}</h1>\n<div class="cards">\n' + "\n".join(cards) + "\n</div></main></body></html>\n"
    )
    Path(path).write_text(text, encoding="utf-8")


def _plot(figure: go.Figure) -> str:
    return to_html(
        figure, full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True}
    )


def _section(title: str, body: str, *, wide: bool = False) -> str:
    kind = ' class="wide"' if wide else ""
    return f"<section{kind}><h2>{title}</h2>\n{body}</section>"


def _runs_table(shown: Sequence[Shown]) -> str:
    """A column a run, a row a fact."""
    facts = [_facts(one.run) for one in shown]
    head = "".join(f'<th style="color:{one.color}">{one.name}</th>' for one in shown)
    body = "".join(
        f"<tr><th>{name}</th>" + "".join(f"<td>{escape(found.get(name, ''))}</td>" for found in facts) + "</tr>"
        for name in dict.fromkeys(name for found in facts for name in found)
    )
    several = len(shown) > 1
    notes = [f"{one.label}: " * several + escape(note) for one in shown for note in _notes(one.run)]
    return f"<table><tr><th></th>{head}</tr>{body}</table>{_list(notes)}"


def _facts(run: Run) -> dict[str, str]:
    facts = {
        "model": f"{run.config.get('model.name')} {run.config.get('model.flavor')}",
        "MoE block": run.backend,
        "on": f"{run.devices.get('world_size')} x {run.devices.get('name', run.devices.get('type'))}",
        "step": f"{run.steps[-1]:,} of {run.config.get('training.steps', run.steps[-1]):,}",
        "tokens": f"{run.tokens_seen[-1]:,}",
        "last loss": f"{run.values['loss'][-1]:.5f}",
    }
    rates = warm(run.series.get("tokens_per_day", np.array([])))
    if len(rates):
        low, median, high = np.quantile(rates, [0.1, 0.5, 0.9]) / 1e9
        facts["tokens/day (10 % to 90 %)"] = f"{median:,.3g} B ({low:,.3g} to {high:,.3g})"
    if len(times := warm(run.series.get("step_time_s", np.array([])))):
        facts["step time"] = f"{np.median(times) * 1e3:,.0f} ms"
    if len(memory := run.series.get("memory_gib", np.array([]))):
        facts["peak memory"] = f"{np.nanmax(memory):.2f} GiB"
    if budget := run.config.get("throughput.token_budget"):
        facts["token budget"] = _budget(run, budget, float(np.median(rates)) if len(rates) else np.nan)
    if run.commit:
        facts["commit"] = run.short_commit
    return facts


def _budget(run: Run, budget: float, tokens_per_day: float) -> str:
    # Here, because it loads torch, which no other page needs.
    from recipes.progress import SECONDS_PER_DAY, end_date

    seen = int(run.tokens_seen[-1])
    share = f"{100 * seen / budget:.3g}% of {budget:,.4g}"
    reached = np.flatnonzero(run.tokens_seen >= budget)
    at, left_s = (reached[0], 0.0) if len(reached) else (-1, (budget - seen) / tokens_per_day * SECONDS_PER_DAY)
    time_s = float(run.series["unix_time_s"][at]) if "unix_time_s" in run.series else np.nan
    date = end_date(datetime.fromtimestamp(time_s, UTC), left_s) if np.isfinite(time_s + left_s) else ""
    if len(reached):
        return f"{share}, reached at step {run.steps[at]:,} {date}".rstrip()
    return f"{share}, ends {date} at the median rate" if date else share


def _notes(run: Run) -> list[str]:
    notes = [run.cut] if run.cut else []
    if len(run.steps) > MAX_POINTS:
        notes.append(
            f"{len(run.steps):,} steps are drawn as about {MAX_POINTS:,} points a curve: "
            "of every stretch the lowest and the highest"
        )
    if run.num_loads > 2 * MAX_LOADS:
        notes.append(f"the expert load is drawn at {len(run.loads):,} of the {run.num_loads:,} steps that recorded it")
    return notes + warnings_of_run(run)


def _comparison(shown: Sequence[Shown], pairs: Sequence[PairComparison]) -> str:
    first, lines = shown[0], []
    for one, pair in zip(shown[1:], pairs, strict=True):
        differs = pair.trends or pair.weights or len(pair.gaps) or not len(pair.common)
        kind = "other" if differs else "same"
        notes = [escape(line) for line in config_differences(first.run, one.run)]
        lines.append(f'<div class="{kind}">{verdict(first.label, one.label, pair)}</div>{_list(notes)}')
    return "\n".join(lines)


def _tuner_table(tuner: Any) -> str:
    choices = flatten(tuner if isinstance(tuner, dict) else {"choices": tuner})
    rows = [f"<tr><td>{escape(key)}</td><td>{escape(str(value))}</td></tr>" for key, value in choices.items()]
    return f"<table><tr><th>choice</th><th>value</th></tr>{''.join(rows)}</table>"


def _list(notes: Sequence[str]) -> str:
    return '<ul class="notes">' + "".join(f"<li>{note}</li>" for note in notes) + "</ul>" if notes else ""
