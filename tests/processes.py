"""Runs a function as W ranks on CPUs, in processes forked from one that has imported torch and TorchTitan already."""

import io
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

JOIN_TIMEOUT_S = 120.0

# Not "fork": what forks must not have run a kernel yet, or its threads are missing in the ranks.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["recipes.families", "torchtitan.train", "uniep.reference"])


def run_ranks(
    body: Callable[..., Any],
    *args: Any,
    num_ranks: int,
    env: Mapping[str, str] | None = None,
    logs: Path | None = None,
) -> list[Any]:
    """body(*args) on every rank, with torchrun's environment variables. Returns what each returned.

    Args:
        body: a function of a module, so that it can be pickled.
        env: further environment variables of the ranks.
        logs: a folder for the ranks' output, rank0.log and so on.

    Raises:
        AssertionError: a rank failed or hung; the text is the end of its output.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared_env = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        # The ranks meet in this process's store: no port is guessed, and no rank need outlive the others.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        **(env or {}),
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"rank{rank}.log" for rank in range(num_ranks)]
        receivers, ranks = [], []
        for rank, path in enumerate(paths):
            receiver, sender = _context.Pipe(duplex=False)
            rank_env = {**shared_env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(_context.Process(target=_rank, args=(sender, rank_env, str(path), body, args)))
            ranks[-1].start()
            sender.close()
            receivers.append(receiver)
        try:
            results = [_receive(receiver) for receiver in receivers]
            for rank in ranks:
                rank.join(JOIN_TIMEOUT_S)
        finally:
            for rank in ranks:
                if rank.is_alive():
                    rank.kill()
        failed = [f"rank {i}: {paths[i].read_text()[-3000:]}" for i, rank in enumerate(ranks) if rank.exitcode != 0]
    assert not failed, "\n".join(failed)
    return results


def _receive(receiver: Connection) -> Any:
    try:
        if receiver.poll(JOIN_TIMEOUT_S):
            return torch.load(io.BytesIO(receiver.recv_bytes()), weights_only=False)
    except EOFError:
        pass  # The rank failed, which its exit status tells.
    return None


def _rank(sender: Connection, env: dict[str, str], log: str, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(env)
    torch.set_num_threads(1)
    try:
        result = io.BytesIO()
        torch.save(body(*args), result)
        sender.send_bytes(result.getvalue())
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
