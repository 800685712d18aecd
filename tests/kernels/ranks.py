"""Runs a function as W ranks: forked processes, each with its part of a heap in shared memory."""

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from uniep.plan.layout import HeapLayout
from uniep.symmetric.heap import SymmetricHeap
from uniep.symmetric.shared_memory import open_shared_memory

# Of all ranks together.
TIMEOUT_S = 120.0


def run_ranks(layout: HeapLayout, body: Callable[[SymmetricHeap], Any]) -> list[Any]:
    """body(heap) on every rank, in processes of their own. Returns what each returned.

    What a body returns travels through a pipe: tensors as numpy arrays or lists.

    Raises:
        RuntimeError: ranks failed, died or hung; the text says of each what went wrong.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="uniep-", dir="/dev/shm") as directory:

        def work(rank: int, sender: Connection) -> None:
            torch.set_num_threads(1)
            try:
                with open_shared_memory(layout, rank=rank, directory=Path(directory)) as heap:
                    sender.send(("ok", body(heap)))
            except BaseException as error:
                sender.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))

        receivers, processes = [], []
        for rank in range(layout.shape.ep_degree):
            receiver, sender = context.Pipe(duplex=False)
            processes.append(context.Process(target=work, args=(rank, sender)))
            processes[-1].start()
            sender.close()  # else the pipe of a rank that died would not end
            receivers.append(receiver)
        deadline = time.monotonic() + TIMEOUT_S
        try:
            results = [_receive(*ends, deadline) for ends in zip(receivers, processes, strict=True)]
        finally:
            for process in processes:
                process.join(5.0)
                if process.is_alive():
                    process.kill()
    errors = [f"rank {rank}: {value}" for rank, (kind, value) in enumerate(results) if kind == "error"]
    if errors:
        raise RuntimeError("\n".join(errors))
    return [value for _, value in results]


def _receive(receiver: Connection, process: BaseProcess, deadline: float) -> tuple[str, Any]:
    try:
        if receiver.poll(max(deadline - time.monotonic(), 0.0)):
            return receiver.recv()
    except EOFError:
        process.join(5.0)
        return "error", f"died with exit code {process.exitcode}"
    return "error", f"must finish within {TIMEOUT_S:.0f} s, got nothing"
