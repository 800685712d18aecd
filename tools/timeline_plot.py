"""Draws a timeline: roles in colour over time, waits hatched, and how busy link and Tensor Cores are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.timeline_records import Launch, RankTimeline
from tools.timeline_shares import integral, link_intervals, phases_of, product_intervals
from uniep.kernels.timeline import Role

_COLORS = {
    Role.SEND: "#d95f02",
    Role.RELAY: "#e6ab02",
    Role.COMP: "#1b7fbd",
    Role.RETURN: "#d95f02",
    Role.MEET: "#999999",
    Role.REDUCE: "#4daf4a",
}
_LABELS = {
    Role.SEND: "send",
    Role.RELAY: "relay",
    Role.COMP: "comp",
    Role.RETURN: "return",
    Role.MEET: "meet",
    Role.REDUCE: "reduce",
}
_BINS = 300
# Shorter than this share of a launch a wait is not to be seen.
_MIN_WAIT = 1 / 1000
# Into a shorter share of a launch the name of a phase does not fit.
_SHORT_PHASE = 1 / 8


def drawn_launches(timeline: RankTimeline) -> list[Launch]:
    """The last launch of each name but the exchange's, which is one moment: in the order in which they ran."""
    last = {launch.name: launch for launch in timeline.launches if launch.name != "exchange"}
    return sorted(last.values(), key=lambda launch: launch.start_ns)


def write_plot(pyplot: Any, path: Path, timelines: Sequence[RankTimeline]) -> None:
    """Two rows a rank, programs and occupancies; a column a launch, whose time starts with the first rank's start."""
    columns = list(dict.fromkeys(launch.name for timeline in timelines for launch in drawn_launches(timeline)))
    figure, axes = pyplot.subplots(
        2 * len(timelines),
        len(columns),
        figsize=(5 * len(columns) + 1, 4.2 * len(timelines) + 0.6),
        sharex="col",
        squeeze=False,
        layout="constrained",
        gridspec_kw={"height_ratios": [3, 1] * len(timelines)},
    )
    drawn = [{launch.name: launch for launch in drawn_launches(timeline)} for timeline in timelines]
    starts = {name: min(launches[name].start_ns for launches in drawn if name in launches) for name in columns}
    ends = {name: max(launches[name].end_ns for launches in drawn if name in launches) for name in columns}
    roles: set[Role] = set()
    for row, (timeline, launches) in enumerate(zip(timelines, drawn, strict=True)):
        for column, name in enumerate(columns):
            top, bottom = axes[2 * row, column], axes[2 * row + 1, column]
            if name not in launches:
                top.set_axis_off()
                bottom.set_axis_off()
                continue
            roles |= _draw_programs(top, launches[name], starts[name])
            _draw_occupancies(bottom, launches[name], starts[name])
            top.set_xlim(0, (ends[name] - starts[name]) / 1000)
            if row == 0:
                top.set_title(name, pad=22)
            if column == 0:
                top.set_ylabel(f"rank {timeline.rank}\nprogram, by multiprocessor")
                bottom.set_ylabel("share")
            if row == len(timelines) - 1:
                bottom.set_xlabel("microseconds")
    figure.legend(handles=_legend(pyplot, roles), loc="outside upper center", ncols=len(roles) + 3, frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_programs(axis: Any, launch: Launch, zero_ns: int) -> set[Role]:
    """A line a program, those of a multiprocessor beside each other. Returns the roles that were drawn."""
    from matplotlib.collections import PolyCollection

    def boxes(tasks: Any, start: str, end: str) -> Any:
        left, right = ((launch[field][tasks] - zero_ns) / 1000 for field in (start, end))
        low, high = lines[tasks], lines[tasks] + 1
        return np.stack([np.stack(c, 1) for c in ((left, low), (left, high), (right, high), (right, low))], 1)

    order = np.unique(np.stack([launch["multiprocessor"], launch["program"]]), axis=1)[1]
    lines = np.empty(launch.num_programs)
    lines[order] = np.arange(len(order))
    lines = lines[launch["program"]]
    drawn = set()
    long_enough = launch["work_ns"] - launch["begin_ns"] > (launch.end_ns - launch.start_ns) * _MIN_WAIT
    for role in Role:
        tasks = launch.of(role)
        if not tasks.any():
            continue
        drawn.add(role)
        color = _COLORS[role]
        axis.add_collection(PolyCollection(boxes(tasks, "work_ns", "end_ns"), facecolors=color, edgecolors="none"))
        axis.add_collection(
            PolyCollection(
                boxes(tasks & long_enough, "begin_ns", "work_ns"),
                facecolors="white",
                edgecolors=color,
                linewidths=0.0,
                hatch="////",
            )
        )
    _mark_phases(axis, launch, zero_ns)
    axis.set_ylim(len(order), 0)
    return drawn


def _mark_phases(axis: Any, launch: Launch, zero_ns: int) -> None:
    """A line where each phase begins, and its name; that of a short one hangs over to where others have room."""
    for phase in phases_of(launch):
        start, end = (phase.start_ns - zero_ns) / 1000, (phase.end_ns - zero_ns) / 1000
        axis.axvline(start, color="black", linestyle=":", linewidth=0.9)
        place, side, height = (start + end) / 2, "center", 1.01
        if end - start < (launch.end_ns - launch.start_ns) / 1000 * _SHORT_PHASE:
            place, side = (start, "left") if phase.start_ns == launch.start_ns else (end, "right")
            height = 1.01 if phase.name == "tail" else 1.06
        axis.text(place, height, phase.name, transform=axis.get_xaxis_transform(), ha=side, fontsize=8)


def _draw_occupancies(axis: Any, launch: Launch, zero_ns: int) -> None:
    edges = np.linspace(launch.start_ns, launch.end_ns, _BINS + 1)
    width = max(edges[1] - edges[0], 1e-9)
    times = (edges - zero_ns) / 1000
    products = np.diff(integral(*product_intervals(launch), edges)) / (width * launch.num_programs)
    link = np.diff(integral(*link_intervals(launch), edges)) / (width * launch.num_programs)
    axis.fill_between(times[:-1], products, step="post", color=_COLORS[Role.COMP], alpha=0.5, linewidth=0)
    axis.stairs(link, times, color=_COLORS[Role.SEND], linewidth=1.2)
    axis.set_ylim(0, 1.02)
    axis.grid(alpha=0.3)


def _legend(pyplot: Any, roles: set[Role]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=_COLORS[role], label=_LABELS[role]) for role in Role if role in roles]
    handles.append(Patch(facecolor="white", edgecolor="black", hatch="////", label="waits"))
    handles.append(Patch(color=_COLORS[Role.COMP], alpha=0.5, label="programs that multiply"))
    handles.append(Line2D([], [], color=_COLORS[Role.SEND], label="programs that write to other ranks"))
    return handles
