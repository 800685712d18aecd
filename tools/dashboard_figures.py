"""The dashboard's figures: recorded runs in, plotly figures out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from tools.compare_plot import difference_note
from tools.compare_values import difference
from tools.records import Run

# Points of a curve: more are not seen on a screen and make the page slow.
MAX_POINTS = 2000
COLORS = ("#1f5fa8", "#d1690e", "#2b8a3e", "#a61e4d", "#6741d9", "#0b7285", "#5c940d", "#862e9c")
# The parts of a step, by colour; the rest is what the step time has beyond the recorded parts.
STEP_PARTS = (
    ("data_loading_s", "data loading", "#f2c14e"),
    ("forward_backward_s", "forward and backward", "#1f5fa8"),
    ("rest_s", "clipping, optimizer and the rest", "#9aa5b1"),
)


@dataclass(frozen=True)
class Shown:
    """A run on the page: `label` is its letter, `name` the letter with the end of the folder's path."""

    label: str
    name: str
    color: str
    run: Run


def thin(values: NDArray[np.float64], limit: int = MAX_POINTS) -> NDArray[np.int64]:
    """Indices of at most about `limit` points: of every stretch the lowest and the highest, so that no peak is lost."""
    num = len(values)
    if num <= limit:
        return np.arange(num)
    width = -(-2 * num // limit)
    whole = num // width * width
    stretches = values[:whole].reshape(-1, width)
    first = np.arange(0, whole, width)
    lowest = first + np.where(np.isnan(stretches), np.inf, stretches).argmin(1)
    highest = first + np.where(np.isnan(stretches), -np.inf, stretches).argmax(1)
    return np.unique(np.concatenate([[0], lowest, highest, [num - 1]]))


def warm(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Without the first step, which compiles and warms up, and without steps that lack the value."""
    kept = values[1:] if len(values) > 1 else values
    return kept[np.isfinite(kept)]


def loss_figure(runs: Sequence[Shown]) -> go.Figure:
    return _curves(runs, "loss", "loss")


def grad_norm_figure(runs: Sequence[Shown]) -> go.Figure:
    return _curves(runs, "grad_norm", "gradient norm before clipping")


def difference_figure(runs: Sequence[Shown]) -> go.Figure:
    """The loss of every run but the first against the first's; the legend says why a run has no points."""
    figure = _figure("step", f"|loss - loss of {runs[0].label}|")
    figure.update_layout(showlegend=True)  # which plotly leaves out for a single curve
    has_points = False
    for shown in runs[1:]:
        common, in_a, in_b = np.intersect1d(runs[0].run.steps, shown.run.steps, assume_unique=True, return_indices=True)
        apart = np.abs(difference(runs[0].run.values["loss"][in_a], shown.run.values["loss"][in_b]))
        name = shown.name + difference_note(common, apart)
        apart[(apart == 0) | np.isinf(apart)] = np.nan  # no place on a logarithmic axis
        has_points |= not np.isnan(apart).all()
        _add_curve(figure, common, apart, name, shown.color, mode="markers")
    figure.update_yaxes(type="log", exponentformat="power")
    if not has_points:
        figure.update_yaxes(range=[-9, 0])
        _say(figure, "<br>".join(curve.name for curve in figure.data))
    return figure


def tokens_figure(runs: Sequence[Shown]) -> go.Figure:
    """Tokens a day of every step, their median dashed, and the band from the 10th to the 90th percentile."""
    figure = _figure("step", "tokens a day")
    figure.update_yaxes(exponentformat="SI", rangemode="tozero")
    for shown in runs:
        rates = shown.run.series.get("tokens_per_day", np.array([]))
        if not len(warm(rates)):
            continue
        steps = shown.run.steps
        low, median, high = np.quantile(warm(rates), [0.1, 0.5, 0.9])
        ends = [int(steps[0]), int(steps[-1])]
        band = go.Scatter(
            x=[*ends, *ends[::-1]],
            y=[low, low, high, high],
            mode="lines",
            fill="toself",
            fillcolor=_pale(shown.color),
            line={"width": 0},
            hoverinfo="skip",
            name="10 % to 90 %",
            showlegend=len(runs) == 1,
        )
        figure.add_trace(band)
        _add_curve(figure, steps, rates, shown.name, shown.color)
        figure.add_trace(
            go.Scatter(
                x=ends,
                y=[median, median],
                mode="lines",
                line={"color": shown.color, "dash": "dash"},
                name="median" if len(runs) == 1 else f"{shown.label}: median",
                showlegend=len(runs) == 1,
            )
        )
    return _or_nothing(figure, "tokens_per_day")


def step_time_figure(runs: Sequence[Shown]) -> go.Figure:
    """Where a step's time goes: over the steps of one run, or the medians of several beside each other."""
    parts = [_step_parts(shown.run) for shown in runs]
    if len(runs) == 1:
        figure = _figure("step", "seconds")
        kept = thin(runs[0].run.series.get("step_time_s", np.array([])))
        for key, name, color in STEP_PARTS:
            if key in parts[0]:
                figure.add_trace(
                    go.Scatter(
                        x=runs[0].run.steps[kept],
                        y=parts[0][key][kept],
                        name=name,
                        stackgroup="step",
                        mode="lines",
                        line={"width": 0.5, "color": color},
                    )
                )
        # The first step compiles: it must not set the scale.
        times = warm(runs[0].run.series.get("step_time_s", np.array([])))
        if len(times):
            figure.update_yaxes(range=[0, 1.5 * float(np.quantile(times, 0.99))])
        return _or_nothing(figure, "step_time_s")
    figure = _figure("", "median seconds a step")
    for key, name, color in STEP_PARTS:
        steady = [warm(part.get(key, np.array([]))) for part in parts]
        medians = [float(np.median(seconds)) if len(seconds) else None for seconds in steady]
        figure.add_trace(go.Bar(x=[shown.name for shown in runs], y=medians, name=name, marker={"color": color}))
    figure.update_layout(barmode="stack")
    return figure


def memory_figure(runs: Sequence[Shown]) -> go.Figure:
    figure = _curves(runs, "memory_gib", "peak memory of a step, GiB")
    figure.update_yaxes(rangemode="tozero")
    return figure


def imbalance_figure(shown: Shown) -> go.Figure:
    """Heat map over layers and steps: the most loaded expert against the mean."""
    figure = _figure("step", "layer")
    loads = shown.run.loads
    if not loads:
        return _say(figure, "these records hold no expert load")
    figure.add_trace(
        go.Heatmap(
            x=[step for step, _ in loads],
            y=_layer_names(shown),
            z=np.array([load["imbalance"] for _, load in loads]).T,
            zmin=1,
            colorscale="Viridis",
            colorbar={"title": {"text": "max / mean"}},
        )
    )
    figure.update_yaxes(type="category")
    return figure


def experts_figure(shown: Shown) -> go.Figure:
    """Heat map over layers and experts at the last step that recorded them: tokens against the mean."""
    if not shown.run.loads:
        return _say(_figure("expert", "layer"), "these records hold no expert load")
    step, load = shown.run.loads[-1]
    figure = _figure(f"expert (step {step})", "layer")
    tokens = np.array(load["tokens_per_expert"], dtype=np.float64)
    figure.add_trace(
        go.Heatmap(
            y=_layer_names(shown),
            z=tokens / tokens.mean(axis=1, keepdims=True),
            customdata=tokens,
            hovertemplate="layer %{y}, expert %{x}: %{customdata:,} tokens, %{z:.2f} of the mean<extra></extra>",
            zmin=0,
            colorscale="Viridis",
            colorbar={"title": {"text": "of the mean"}},
        )
    )
    figure.update_yaxes(type="category")
    return figure


def ranks_figure(runs: Sequence[Shown]) -> go.Figure:
    """Distinct ranks a token goes to, mean of the layers; dashed what even draws would give."""
    figure = _figure("step", "distinct ranks a token")
    figure.update_yaxes(rangemode="tozero")
    for shown in runs:
        if not shown.run.loads:
            continue
        steps = [step for step, _ in shown.run.loads]
        found = [float(np.mean(load["distinct_ranks"])) for _, load in shown.run.loads]
        figure.add_trace(
            go.Scatter(x=steps, y=found, mode="lines+markers", name=shown.name, line={"color": shown.color})
        )
        expected = shown.run.loads[-1][1]["distinct_ranks_expected"]
        figure.add_trace(
            go.Scatter(
                x=[steps[0], steps[-1]],
                y=[expected, expected],
                mode="lines",
                line={"color": shown.color, "dash": "dash"},
                name="even draws" if len(runs) == 1 else f"{shown.label}: even draws",
            )
        )
    return figure if figure.data else _say(figure, "these records hold no expert load")


def _step_parts(run: Run) -> dict[str, NDArray[np.float64]]:
    total = run.series.get("step_time_s")
    if total is None:
        return {}
    known = {key: run.series[key] for key, _, _ in STEP_PARTS if key in run.series}
    rest = total - np.nansum([*known.values(), np.zeros_like(total)], axis=0)
    return known | {"rest_s": np.maximum(rest, 0)}


def _curves(runs: Sequence[Shown], key: str, title: str) -> go.Figure:
    figure = _figure("step", title)
    for index, shown in enumerate(runs):
        values = shown.run.values.get(key, shown.run.series.get(key))
        if values is not None:
            # Curves that coincide are the usual case: the first is a pale band that shows on both sides of the others.
            is_band = index == 0 and len(runs) > 1
            color = _pale(shown.color, 0.45) if is_band else shown.color
            _add_curve(figure, shown.run.steps, values, shown.name, color, width=7 if is_band else 1.5)
    return _or_nothing(figure, key)


def _add_curve(
    figure: go.Figure,
    steps: NDArray[np.int64],
    values: NDArray[np.float64],
    name: str,
    color: str,
    *,
    width: float = 1.5,
    mode: str | None = None,
) -> None:
    kept = thin(values)
    # A line of one point draws nothing without a marker.
    mode = mode or ("lines+markers" if len(kept) < 3 else "lines")
    finite = np.where(np.isfinite(values[kept]), values[kept], np.nan)
    line = {"color": color, "width": width}
    figure.add_trace(
        go.Scatter(x=steps[kept], y=finite, name=name, mode=mode, line=line, marker={"color": color, "size": 4})
    )


def _figure(x_title: str, y_title: str) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        template="plotly_white",
        margin={"l": 60, "r": 20, "t": 20, "b": 40},
        height=340,
        legend={"orientation": "h", "y": -0.2},
        font={"family": "system-ui, sans-serif", "size": 12},
        hovermode="closest",
    )
    figure.update_xaxes(title_text=x_title)
    figure.update_yaxes(title_text=y_title)
    return figure


def _or_nothing(figure: go.Figure, key: str) -> go.Figure:
    return figure if figure.data else _say(figure, f"these records hold no {key}")


def _say(figure: go.Figure, text: str) -> go.Figure:
    figure.add_annotation(text=text, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font={"size": 14})
    return figure


def _layer_names(shown: Shown) -> list[str]:
    return [str(layer) for layer in shown.run.loads[-1][1]["layers"]]


def _pale(color: str, alpha: float = 0.15) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"
