"""All ranks in one process on one device: plain tensors. For EP = 2..8 on a single GPU, and for W = 1 anywhere."""

from collections.abc import Generator, Sequence
from typing import Any

import torch

from uniep.plan.layout import HeapLayout
from uniep.symmetric.heap import DEFAULT_TIMEOUT_S, SymmetricHeap


def open_virtual_ranks(
    layout: HeapLayout, *, device: torch.device | str, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[SymmetricHeap]:
    """Opens the heaps of all W ranks. On a GPU each rank then launches on a stream of its own."""
    parts = [torch.empty(layout.num_bytes, dtype=torch.uint8, device=device) for _ in range(layout.shape.ep_degree)]
    for part in parts:
        part[: layout.num_flag_bytes].zero_()
    if parts[0].is_cuda:
        torch.cuda.synchronize(parts[0].device)
    return [
        SymmetricHeap(
            layout,
            rank=rank,
            base_U8=part,
            peer_addresses=[peer.data_ptr() for peer in parts],
            close=lambda: None,
            timeout_s=timeout_s,
        )
        for rank, part in enumerate(parts)
    ]


def run_side_by_side(
    forwards: Sequence[Generator[None, None, Any]], *, streams: Sequence[torch.cuda.Stream]
) -> list[Any]:
    """Drives one generator a rank, each on its stream, step by step, and returns what they return.

    Each step launches at most one kernel that waits for peers: so all ranks' kernels are launched before the host waits
    for any of them. A rank may take more steps than the others.
    """
    torch.cuda.synchronize()
    results: dict[int, Any] = {}
    while len(results) < len(forwards):
        for rank, (forward, stream) in enumerate(zip(forwards, streams, strict=True)):
            if rank in results:
                continue
            with torch.cuda.stream(stream):
                try:
                    next(forward)
                except StopIteration as end:
                    results[rank] = end.value
    torch.cuda.synchronize()
    return [results[rank] for rank in range(len(forwards))]
