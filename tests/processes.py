"""Runs a function as W ranks on CPUs, in processes forked from one that has imported torch and TorchTitan already; and
commands that start ranks of their own."""

import contextlib
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

ROOT = Path(__file__).parents[1]
# Of all ranks together, and before pytest's own: else what they have said is lost.
TIMEOUT_S = 200.0

# Not "fork": what forks must not have run a kernel yet, or its threads are missing in the ranks.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["recipes.families", "torchtitan.train", "uniep.reference"])


def run_ranks(body: Callable[..., Any], *args: Any, num_ranks: int, logs: Path | None = None) -> list[Any]:
    """body(*args) on every rank, with torchrun's environment variables. Returns what each returned.

    Args:
        body: a function of a module, so that it can be pickled.
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
        deadline = time.monotonic() + TIMEOUT_S
        try:
            results = [_receive(receiver, deadline) for receiver in receivers]
            for rank in ranks:
                rank.join(max(deadline - time.monotonic(), 0.0))
        finally:
            hung = [rank for rank in ranks if rank.is_alive()]
            for rank in hung:
                rank.kill()
        failed = [
            f"rank {i} {'hung' if rank in hung else 'failed'}: {path.read_text()[-3000:]}"
            for i, (rank, path) in enumerate(zip(ranks, paths, strict=True))
            if rank in hung or rank.exitcode != 0
        ]
    assert not failed, "\n".join(failed)
    return results


def run_command(
    command: list[str], *, timeout_s: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run in the repository, with the output kept; of torchrun no rank is left either, if it hangs."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as late:
            for said in (late.stdout, late.stderr):
                late.add_note((said or b"").decode(errors="replace")[-3000:])
            raise
        finally:
            # torchrun's ranks have sessions of their own: it ends them itself, which may take it 30 s.
            process.terminate()
            try:
                process.wait(40.0)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def run_on_two_gpus(script: str, *args: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """A script of tests/gpu under torchrun; it must succeed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = run_command([*command, f"tests/gpu/{script}", *args], timeout_s=timeout_s, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def _receive(receiver: Connection, deadline: float) -> Any:
    try:
        if receiver.poll(max(deadline - time.monotonic(), 0.0)):
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
