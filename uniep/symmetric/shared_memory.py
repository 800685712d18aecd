"""Shared memory of CPU processes, for the kernels under TRITON_INTERPRET=1."""

import os
import time
from pathlib import Path

import torch

from uniep.plan.layout import HeapLayout
from uniep.symmetric.heap import DEFAULT_TIMEOUT_S, HeapError, MissingPeerError, SymmetricHeap


def open_shared_memory(
    layout: HeapLayout,
    *,
    rank: int,
    directory: Path,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> SymmetricHeap:
    """Opens the heap of CPU ranks.

    Args:
        layout: the same on every rank.
        rank: this process.
        directory: a new, empty directory that all ranks see, best under /dev/shm; each puts one file there, which stays
            until the caller removes the directory: a rank may close its heap before a slower one has mapped its part.
        timeout_s: how long to wait for the peers to open theirs, and the bound of every wait in a kernel.

    Raises:
        MissingPeerError: a peer did not open its part in time.
        HeapError: a peer opened one of another size.
    """
    num_ranks, num_bytes = layout.shape.ep_degree, layout.num_bytes
    paths = [directory / f"rank{peer}" for peer in range(num_ranks)]
    fresh = directory / f"rank{rank}.new"
    with open(fresh, "wb") as file:
        file.truncate(num_bytes)
    # A peer that sees the name sees the whole, zeroed file.
    os.rename(fresh, paths[rank])

    end_s = time.monotonic() + timeout_s
    for peer, path in enumerate(paths):
        while not path.exists():
            if time.monotonic() > end_s:
                raise MissingPeerError(
                    f"rank {peer} must open its heap within {timeout_s:g} s of rank {rank}, got no part of it"
                )
            time.sleep(0.001)
        if path.stat().st_size != num_bytes:
            raise HeapError(
                f"heap of rank {peer} must be {num_bytes} bytes as on rank {rank}, got {path.stat().st_size}"
            )
    parts = [torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8) for path in paths]

    return SymmetricHeap(
        layout,
        rank=rank,
        base_U8=parts[rank],
        peer_addresses=[part.data_ptr() for part in parts],
        close=parts.clear,
        timeout_s=timeout_s,
    )
