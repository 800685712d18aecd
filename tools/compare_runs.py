"""Compares recorded runs bit for bit, each with the first.

    python -m tools.compare_runs RUN_A RUN_B [RUN_C ...] [--plot FILE.png]

Two runs of one config are identical when the loss and the gradient norm have the same bits at every step. Runs whose
configs would give other numbers anyway are refused: a difference between them says nothing.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.command import end_with
from tools.compare_plot import write_plot
from tools.compare_report import label_runs, report
from tools.compare_settings import ComparisonError, check_comparable
from tools.compare_values import compare_pair
from tools.pyplot import PlotError, load_pyplot
from tools.records import RecordError, check_output, read_run

IDENTICAL, DIFFERENT, UNCOMPARABLE = 0, 1, 2

EPILOG = """\
exit status:
  0  identical: loss and grad_norm have the same bits at the same steps in all runs, and so have the weights at the
     end, where both runs fingerprinted them
  1  different: a value differs, or the runs do not have the same steps
  2  not compared: a run cannot be read, the configs are not comparable (see --force), or the plot cannot be written

must be equal: model, training (not its steps), parallelism, optimizer, lr_scheduler, quantize, debug.seed, every other
section that is not listed here, and the hash of the data.
may differ: uniep, job, experimental, metrics, profiling, throughput, checkpoint, comm, validation,
activation_checkpoint, and compile (with a warning).
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.compare_runs",
        description="Compare the loss and the gradient norm of recorded runs bit for bit, each run with the first.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("first", metavar="RUN_A", help="folder with the run.json and metrics.jsonl to compare with")
    parser.add_argument("others", metavar="RUN_B", nargs="+", help="one or more folders of runs to compare")
    parser.add_argument("--plot", metavar="FILE.png", help="write the loss curves and their difference to a PNG")
    parser.add_argument("--force", action="store_true", help="compare runs whose configs are not comparable")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status; `--help` says what each means."""
    arguments = _parser().parse_args(argv)
    folders = [arguments.first, *arguments.others]
    labels = label_runs(len(folders))
    try:
        if arguments.plot:
            check_output("--plot", arguments.plot, folders)
        pyplot = load_pyplot("--plot") if arguments.plot else None
        runs = [read_run(folder) for folder in folders]
        for warning in check_comparable(labels, runs, arguments.force):
            print(f"warning: {warning}", file=sys.stderr)
        pairs = [compare_pair(runs[0], run) for run in runs[1:]]
        print(report(labels, runs, pairs))
        if pyplot:
            write_plot(pyplot, arguments.plot, labels, runs)
            print(f"\nplot: {Path(arguments.plot)}")
    except (RecordError, ComparisonError, PlotError) as error:
        print(f"error: {error}", file=sys.stderr)
        return UNCOMPARABLE
    return IDENTICAL if all(pair.identical for pair in pairs) else DIFFERENT


if __name__ == "__main__":
    end_with(main)
