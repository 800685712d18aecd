"""Shows what the kernels of a recorded step did: a trace, a picture, and the shares of each launch.

    python -m tools.timeline RUN [--step N] [--rank R ...] [--out FOLDER] [--no-png]

The run recorded steps with [uniep] timeline_steps = [10, 20].
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tools.command import end_with
from tools.pyplot import PlotError, load_pyplot
from tools.records import RecordError
from tools.timeline_plot import write_plot
from tools.timeline_records import FIELDS, Launch, RankTimeline, read_timelines
from tools.timeline_shares import summarize
from tools.timeline_trace import write_trace


def report(timelines: Sequence[RankTimeline]) -> str:
    """The shares of every launch of every rank."""
    lines = [f"step {timelines[0].step}; the clock goes in steps of {_tick_ns(timelines)} ns"]
    for timeline in timelines:
        forward: set[str] = set()
        for launch in timeline.launches:
            # A forward that comes once more before its backward is the one of activation checkpointing.
            again = " (again)" if launch.name in forward else ""
            forward = set() if launch.name.endswith("grad") else forward | {launch.name}
            lines += ["", *_report_launch(f"rank {timeline.rank}, {launch.name}{again}", launch)]
        if timeline.num_unrecorded_launches:
            lines += ["", f"rank {timeline.rank}: {timeline.num_unrecorded_launches} later launches had no buffer left"]
    return "\n".join(lines)


def _report_launch(title: str, launch: Launch) -> list[str]:
    summary = summarize(launch)
    lines = [
        f"{title}: {summary.duration_ns / 1000:.1f} us, {launch.num_programs} programs",
        f"  {'role':<8}{'tasks':>8}{'busy':>9}{'waiting':>9}{'idle':>9}",
    ]
    for share in summary.roles:
        name = share.role.name.lower() if share.role else "none"
        parts = "".join(f"{part:>8.1%} " for part in (share.busy, share.waiting, share.idle))
        lines.append(f"  {name:<8}{share.num_tasks:>8}{parts.rstrip()}")
    busy, waiting, idle = (sum(getattr(share, part) for share in summary.roles) for part in ("busy", "waiting", "idle"))
    lines.append(f"  {'all':<8}{len(launch):>8}{busy:>8.1%} {waiting:>8.1%} {idle:>8.1%}")
    tail = summary.tail_ns / max(summary.duration_ns, 1)
    lines.append(
        f"  link {summary.link:.1%} of the time, Tensor Cores {summary.tensor_cores:.1%}, bubble {summary.bubble:.1%}, "
        f"tail {summary.tail_ns / 1000:.1f} us ({tail:.1%})"
    )
    phases = (f"{phase.name} {(phase.end_ns - phase.start_ns) / 1000:.1f}" for phase in summary.phases)
    lines.append(f"  phases, us: {', '.join(phases) or 'none longer than a step of the clock'}")
    if launch.num_dropped:
        lines.append(f"  {launch.num_dropped} tasks had no room in the buffer: the shares are of the others")
    return lines


def _tick_ns(timelines: Sequence[RankTimeline]) -> int:
    """The smallest step that was seen."""
    fields = [field for field in FIELDS if field.endswith("_ns")]
    times = [launch[field] for timeline in timelines for launch in timeline.launches for field in fields]
    steps = np.diff(np.unique(np.concatenate(times)))
    return int(steps.min()) if len(steps) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.timeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder, with its run.json")
    parser.add_argument("--step", type=int, metavar="N", help="a recorded step (the last one)")
    parser.add_argument("--rank", type=int, nargs="+", default=[], metavar="R", help="some of the ranks (all)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the files go (RUN/timeline)")
    parser.add_argument("--no-png", action="store_true", help="write no picture, which needs matplotlib")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    out = arguments.out or arguments.run / "timeline"
    try:
        pyplot = None if arguments.no_png else load_pyplot("a picture (--no-png writes none)")
        timelines = read_timelines(arguments.run, arguments.step, arguments.rank)
        out.mkdir(parents=True, exist_ok=True)
        paths = [out / f"step-{timelines[0].step}.{ending}" for ending in ("trace.json", "png")]
        write_trace(paths[0], timelines)
        if pyplot is not None:
            write_plot(pyplot, paths[1], timelines)
    except (RecordError, PlotError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --out must be a folder that can be written, got {out}: {error.strerror}", file=sys.stderr)
        return 2
    print(report(timelines))
    print(f"\ntrace: {paths[0]} (open it in https://ui.perfetto.dev or chrome://tracing)")
    if pyplot is not None:
        print(f"picture: {paths[1]}")
    return 0


if __name__ == "__main__":
    end_with(main)
