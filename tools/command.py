"""How a tool ends."""

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn


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
