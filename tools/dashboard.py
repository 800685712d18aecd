"""One self-contained page about recorded runs.

    python -m tools.dashboard RUN [RUN ...] -o report.html [--wandb]

The page holds the code of its plots: it opens from a file with the network off. Several runs are compared with the
first. `--wandb` saves the same layout as a workspace of the wandb project.
"""

import argparse
import sys
from collections.abc import Sequence

from tools.command import end_with
from tools.compare_report import label_runs, verdict
from tools.compare_values import compare_pair
from tools.records import RecordError, Run, check_output, read_run

EPILOG = """\
exit status:
  0  the page is written
  2  a run cannot be read, the page cannot be written, or --wandb could not be done
"""


class DashboardError(ValueError):
    """A page that cannot be made or pushed. The text says why in one line."""


def _write(path: str, runs: Sequence[Run]) -> None:
    try:
        from tools.dashboard_page import write_page
    except ImportError as error:
        raise DashboardError(f"plotly must be installed, got {error}; pip install -e .[dashboard]") from None
    try:
        write_page(path, runs)
    except OSError as error:
        raise DashboardError(f"-o must be a file that can be written, got {path}: {error.strerror}") from None


def _push() -> str:
    # Here, because it loads torch and wandb, which no page needs.
    from tools.dashboard_wandb import WorkspaceError, push_workspace

    try:
        return push_workspace()
    except WorkspaceError as error:
        raise DashboardError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.dashboard",
        description="Write one self-contained page about recorded runs; several are compared with the first.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folders with the run.json and metrics.jsonl of a run")
    parser.add_argument("-o", "--output", metavar="FILE.html", required=True, help="the page to write")
    parser.add_argument("--wandb", action="store_true", help="save the layout as a workspace of the wandb project too")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status; `--help` says what each means."""
    arguments = _parser().parse_args(argv)
    try:
        check_output("-o", arguments.output, arguments.runs)
        runs = [read_run(folder, drop_cut_line=True) for folder in arguments.runs]
        _write(arguments.output, runs)
        labels = label_runs(len(runs))
        for label, run in zip(labels, runs, strict=True):
            if run.cut:
                print(f"warning: {label}: {run.cut}", file=sys.stderr)
        for label, run in zip(labels[1:], runs[1:], strict=True):
            print(verdict(labels[0], label, compare_pair(runs[0], run)))
        print(f"page: {arguments.output}")
        if arguments.wandb:
            print(f"wandb workspace: {_push()}")
    except (RecordError, DashboardError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    end_with(main)
