"""Runs a tool once a GPU: it starts itself again under torchrun."""

import os
import subprocess
import sys

import torch
import torch.distributed as dist


def is_rank() -> bool:
    return "LOCAL_RANK" in os.environ


def start_ranks(module: str, num_ranks: int, argv: list[str]) -> int:
    """Returns torchrun's exit status."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={num_ranks}", "-m", module, *argv]
    return subprocess.run(command, env={"OMP_NUM_THREADS": "4", **os.environ}).returncode


def join_ranks() -> torch.device:
    """This rank's GPU, with the group of all ranks open."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device
