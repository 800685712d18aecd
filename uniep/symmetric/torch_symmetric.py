"""GPUs of one NVLink domain through torch's own symmetric memory: the fallback where NVSHMEM is missing."""

import torch
import torch.distributed as dist

from uniep.plan.layout import HeapLayout
from uniep.symmetric.heap import DEFAULT_TIMEOUT_S, HeapError, SymmetricHeap
from uniep.symmetric.rendezvous import meet, say


def open_torch_symmetric(
    layout: HeapLayout,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> SymmetricHeap:
    """Opens the heap of a group of GPUs, a process each.

    Raises:
        HeapError: a peer did not open its heap in time or opened another layout, or the GPUs cannot map each other.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    meet(layout, group, "torch")
    try:
        base = symmetric_memory.empty(layout.num_bytes, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(base, group)
    except RuntimeError as error:
        say(str(error), group)
        raise HeapError(
            f"GPUs of the group must be able to map each other's memory (they need NVLink, and in a container a kernel "
            f"with pidfd_open or the capability SYS_PTRACE), got: {error}"
        ) from error
    base[: layout.num_flag_bytes].zero_()
    torch.cuda.synchronize(device)
    # No rank may signal before every rank's flags are zero.
    meet(layout, group, "torch, mapped")
    keep = [base, handle]
    return SymmetricHeap(
        layout,
        rank=group.rank(),
        base_U8=base,
        peer_addresses=list(handle.buffer_ptrs),
        close=keep.clear,
        timeout_s=timeout_s,
    )
