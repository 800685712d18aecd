"""Runs a function as W ranks: forked processes, each with its part of a heap in shared memory."""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from uniep.plan.layout import HeapLayout
from uniep.symmetric.heap import SymmetricHeap
from uniep.symmetric.shared_memory import open_shared_memory

JOIN_TIMEOUT_S = 120.0


def run_ranks(
    layout: HeapLayout, body: Callable[[SymmetricHeap], Any], *, timeout_s: float = 60.0, start: set[int] | None = None
) -> list[Any]:
    """body(heap) on every rank of start (all if None), in processes of their own. Returns what each returned.

    What a body returns travels through a pipe: tensors as numpy arrays or lists. An exception in a rank is raised here.
    """
    num_ranks = layout.shape.ep_degree
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="uniep-", dir="/dev/shm") as directory:

        def work(rank: int, pipe: Any) -> None:
            torch.set_num_threads(1)
            try:
                with open_shared_memory(layout, rank=rank, directory=Path(directory), timeout_s=timeout_s) as heap:
                    if start is None or rank in start:
                        pipe.send(("ok", body(heap)))
                    else:
                        pipe.send(("ok", None))
            except BaseException as error:
                pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))

        pipes, processes = [], []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(rank, sender))
            process.start()
            pipes.append(receiver)
            processes.append(process)
        try:
            results = []
            for rank, pipe in enumerate(pipes):
                if not pipe.poll(JOIN_TIMEOUT_S):
                    raise TimeoutError(f"rank {rank} must finish within {JOIN_TIMEOUT_S} s, got nothing")
                results.append(pipe.recv())
        finally:
            for process in processes:
                process.join(5.0)
                if process.is_alive():
                    process.kill()
    errors = [f"rank {rank}: {value}" for rank, (kind, value) in enumerate(results) if kind == "error"]
    if errors:
        raise RuntimeError("\n".join(errors))
    return [value for _, value in results]
