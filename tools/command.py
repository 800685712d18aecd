"""How a tool ends, and what it refuses before it begins."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def check_writable(option: str, path: Path) -> None:
    """Raises ArgumentTypeError before minutes of measuring, not after them."""
    written = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(written, os.W_OK):
        raise argparse.ArgumentTypeError(f"{option} must be a file that can be written, in a folder, got {path}")


def check_counts(**counts: list[int]) -> None:
    """Raises ArgumentTypeError where a count is not positive, or as large as no layer's."""
    for option, values in counts.items():
        if wrong := [value for value in values if not 1 <= value <= 1 << 24]:
            raise argparse.ArgumentTypeError(f"--{option} must be 1 to 2^24, got {wrong[0]}")


def end_with(main: Callable[[list[str]], int]) -> NoReturn:
    """Exits with main's status; without a word where the reader of its output, such as head, has left.

    By hand: a process that lets SIGPIPE end it also dies of a connection that its other end has closed, as wandb's.
    """
    try:
        try:
            status = main(sys.argv[1:])
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        # What is left in the buffer would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
    sys.exit(status)
