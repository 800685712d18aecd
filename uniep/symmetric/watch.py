"""Kernels that gave up: the array in which kernels record them, and the error that the host makes of a record."""

from enum import IntEnum

from torch import Tensor

# Words of a record, one record a program: {valid, kernel, task, what, whom}, filled up to 32 bytes.
RECORD_WORDS = 8
MAX_PROGRAMS = 1024
NUM_WATCH_WORDS = 1 + RECORD_WORDS * MAX_PROGRAMS


class Kernel(IntEnum):
    """Which kernel waited."""

    EXCHANGE_ROUTING = 1
    DISPATCH_GEMM = 2
    GEMM_COMBINE = 3
    DISPATCH_GEMM_BACKWARD = 4
    GEMM_COMBINE_BACKWARD = 5


class What(IntEnum):
    """What it waited for."""

    ROUTING = 1
    TOKENS = 2
    INPUT_TILE = 3
    OUTPUT_TILE = 4
    RETURNED_ROWS = 5


_WAITED_FOR = {
    What.ROUTING: "the expert ids of rank {whom}",
    What.TOKENS: "tokens from rank {whom}",
    What.INPUT_TILE: "its own relay to fill tile {whom}",
    What.OUTPUT_TILE: "its own GEMM to finish tile {whom}",
    What.RETURNED_ROWS: "the returned rows of rank {whom}",
}


class WaitTimeoutError(RuntimeError):
    """A kernel gave up a wait: a peer did not launch, died, or is slower than the bound."""


def raise_if_given_up(watch: Tensor, rank: int, timeout_s: float) -> None:
    """Reads the watch array (which waits for the device) and raises what the most telling record says."""
    if not watch[0].item():
        return
    words = watch.tolist()
    records = [words[i + 1 : i + 5] for i in range(1, len(words), RECORD_WORDS) if words[i] == 1]
    # A wait on a peer explains the waits on the rank's own tiles that follow from it.
    own = (What.INPUT_TILE, What.OUTPUT_TILE)
    kernel, task, what, whom = min(records, key=lambda record: record[2] in own)
    waited_for = _WAITED_FOR[What(what)].format(whom=whom)
    raise WaitTimeoutError(
        f"rank {rank}: kernel {Kernel(kernel).name.lower()}, task {task}, must see {waited_for} within "
        f"{timeout_s:g} s, got nothing (did every rank launch this layer, and is each alive?)"
    )
