"""GPUs of one NVLink domain through NVSHMEM (nvshmem4py)."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from uniep.plan.layout import HeapLayout
from uniep.symmetric.heap import DEFAULT_TIMEOUT_S, HeapError, SymmetricHeap
from uniep.symmetric.rendezvous import meet, say

# The part of NVSHMEM's own heap that its bookkeeping takes.
_OVERHEAD_BYTES = 64 << 20


def open_nvshmem(
    layout: HeapLayout,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> SymmetricHeap:
    """Opens the heap of a group of GPUs, a process each. Starts NVSHMEM on the group if it does not run yet.

    Raises:
        HeapError: nvshmem4py is missing, NVSHMEM does not start or runs on other ranks, the GPUs are not peers, a
            peer did not open its heap in time, or it opened another layout.
    """
    try:
        import nvshmem.core as nvshmem
        from cuda.core import Device
        from nvshmem.core.interop import torch as nvshmem_torch
    except ImportError as error:
        say(f"no nvshmem4py ({error})", group)
        raise HeapError(f"nvshmem4py must be installed (pip install 'uniep-recipe[cuda]'), got: {error}") from error

    meet(layout, group, "nvshmem")
    try:
        _start(nvshmem, Device, layout, group, device)
        base, peers = _map(nvshmem_torch, layout, group)
    except HeapError as error:
        # The others, who may have come further, then go the same way.
        say(str(error), group)
        raise
    base[: layout.num_flag_bytes].zero_()
    torch.cuda.synchronize(device)
    # No rank may signal before every rank's flags are zero.
    meet(layout, group, "nvshmem, mapped")

    def close() -> None:
        torch.cuda.synchronize(device)
        nvshmem_torch.free_tensor(base)

    return SymmetricHeap(
        layout,
        rank=group.rank(),
        base_U8=base,
        peer_addresses=[peer.data_ptr() for peer in peers],
        close=close,
        timeout_s=timeout_s,
    )


def _start(nvshmem: Any, device_class: Any, layout: HeapLayout, group: dist.ProcessGroup, device: torch.device) -> None:
    if _is_running(nvshmem):
        if nvshmem.n_pes() != group.size():
            raise HeapError(f"ranks of NVSHMEM must be the group's {group.size()}, got {nvshmem.n_pes()}")
        return
    # What a single node needs; whoever sets them otherwise keeps them.
    os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(layout.num_bytes + _OVERHEAD_BYTES))
    try:
        current = device_class(device.index)
        current.set_current()
        uid = [nvshmem.get_unique_id(empty=group.rank() != 0)]
        dist.broadcast_object_list(uid, group=group, group_src=0)
        nvshmem.init(device=current, uid=uid[0], rank=group.rank(), nranks=group.size(), initializer_method="uid")
    except Exception as error:
        raise HeapError(
            f"NVSHMEM must start on rank {group.rank()} (its bootstrap looks for a network interface: name one in "
            f"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME and its address family in NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY; a "
            f"container needs pidfd_open or the capability SYS_PTRACE), got: {error}"
        ) from error


def _map(nvshmem_torch: Any, layout: HeapLayout, group: dist.ProcessGroup) -> tuple[Tensor, list[Tensor]]:
    """This rank's memory, and that of all ranks."""
    try:
        base = nvshmem_torch.tensor((layout.num_bytes,), dtype=torch.uint8)
        return base, [
            base if peer == group.rank() else nvshmem_torch.get_peer_tensor(base, peer) for peer in range(group.size())
        ]
    except Exception as error:
        raise HeapError(
            f"NVSHMEM must map {layout.num_bytes} bytes of every GPU (NVSHMEM_SYMMETRIC_SIZE, NVLink between them), "
            f"got: {error}"
        ) from error


def _is_running(nvshmem: Any) -> bool:
    try:
        status = nvshmem.init_status()
    except Exception:
        # Its library is not even loaded before the first init.
        return False
    states = nvshmem.InitStatus
    return status in (states.STATUS_IS_INITIALIZED, states.STATUS_LIMITED_MPG, states.STATUS_FULL_MPG)
