"""Writes a timeline as a trace of the format that Chrome and Perfetto (ui.perfetto.dev) open."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.timeline_records import Launch, RankTimeline
from tools.timeline_shares import integral, link_intervals, phases_of, product_intervals
from uniep.kernels.timeline import Role

# Track numbers: the launches, their phases, then the programs of each multiprocessor.
_LAUNCHES, _PHASES, _PROGRAMS = 0, 1, 2
# Room for the programs that a multiprocessor holds at once.
_PLACES = 32
# Points of a launch's counters.
_COUNTER_POINTS = 200

Event = dict[str, Any]


def write_trace(path: Path, timelines: Sequence[RankTimeline]) -> None:
    """One process a rank; in it one track a program, named by its multiprocessor and its place there."""
    events = [event for timeline in timelines for event in _rank_events(timeline)]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}, separators=(",", ":"))
    path.write_text(text, encoding="utf-8")


def places_on_multiprocessors(launch: Launch) -> np.ndarray:
    """For each task, which of the programs of its multiprocessor its own is."""
    pairs = np.unique(np.stack([launch["multiprocessor"], launch["program"]]), axis=1)
    multiprocessors, programs = pairs
    first_of = np.searchsorted(multiprocessors, multiprocessors)
    place_of_program = dict(zip(programs.tolist(), (np.arange(len(programs)) - first_of).tolist(), strict=True))
    return np.array([place_of_program[program] for program in launch["program"].tolist()], dtype=np.int64)


def _rank_events(timeline: RankTimeline) -> Iterator[Event]:
    rank = timeline.rank
    yield _named(rank, None, f"rank {rank}, step {timeline.step}")
    yield _named(rank, _LAUNCHES, "launches")
    yield _named(rank, _PHASES, "phases")
    named = set()
    for launch in timeline.launches:
        yield _span(rank, _LAUNCHES, launch.name, launch.start_ns, launch.end_ns, num_programs=launch.num_programs)
        for phase in phases_of(launch):
            yield _span(rank, _PHASES, phase.name, phase.start_ns, phase.end_ns)
        yield from _counters(rank, launch)
        places, tiles = places_on_multiprocessors(launch), launch.tiles()
        for index, place in enumerate(places.tolist()):
            role, task, program, multiprocessor, begin, work, store, end = (
                int(column[index]) for column in launch.columns.values()
            )
            track = _PROGRAMS + multiprocessor * _PLACES + place
            if track not in named:
                named.add(track)
                yield _named(rank, track, f"multiprocessor {multiprocessor}.{place}")
            name = Role(role).name.lower()
            about = {"launch": launch.name, "task": task, "tile": int(tiles[index]), "program": program}
            if work > begin:
                yield _span(rank, track, f"{name} waits", begin, work, **about)
            if end > work or work == begin:
                stores = {"store_us": (end - store) / 1000} if work < store < end else {}
                yield _span(rank, track, name, work, end, **about, **stores)


def _counters(rank: int, launch: Launch) -> Iterator[Event]:
    """Mean numbers of programs that multiply and of tasks that write to other ranks."""
    edges = np.linspace(launch.start_ns, launch.end_ns, _COUNTER_POINTS + 1)
    width = max(edges[1] - edges[0], 1e-9)
    for name, intervals in (("Tensor Cores", product_intervals(launch)), ("link", link_intervals(launch))):
        counts = np.diff(integral(*intervals, edges)) / width
        for time, count in zip(edges.tolist(), [*counts.tolist(), 0.0], strict=True):
            yield {"ph": "C", "pid": rank, "name": name, "ts": time / 1000, "args": {"programs": round(count, 3)}}


def _span(rank: int, track: int, name: str, start_ns: int, end_ns: int, **about: Any) -> Event:
    times = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
    return {"ph": "X", "pid": rank, "tid": track, "name": name, **times, "args": about}


def _named(rank: int, track: int | None, name: str) -> Event:
    kind = "process_name" if track is None else "thread_name"
    return {"ph": "M", "pid": rank, "tid": track or 0, "name": kind, "args": {"name": name}}
