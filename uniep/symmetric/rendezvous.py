"""The first step of opening a heap between processes: everyone is there, and with the same layout."""

from datetime import timedelta
from itertools import count

import torch.distributed as dist

from uniep.plan.layout import HeapLayout
from uniep.symmetric.heap import HeapError, MissingPeerError

# As long as torch's own start: the first rank may still be reading its data or reaching for wandb.
OPEN_TIMEOUT_S = 300.0


def meet(layout: HeapLayout, group: dist.ProcessGroup, state: str, *, timeout_s: float = OPEN_TIMEOUT_S) -> None:
    """Returns once every rank of the group opens a heap of this layout and has come as far as this one.

    It goes through the group's key-value store and not through a collective: a collective that one rank enters alone
    hangs, or pairs with another of a peer, and names nobody.

    Raises:
        MissingPeerError: names the rank that did not come.
        HeapError: names the rank whose layout or state differs.
    """
    if group.size() != layout.shape.ep_degree:
        raise HeapError(f"ranks of the group must be ep_degree = {layout.shape.ep_degree}, got {group.size()}")
    rank = group.rank()
    mine = f"{state}, {layout}"
    number = say(mine, group)
    store = dist.distributed_c10d._get_process_group_store(group)
    for peer in range(group.size()):
        key = f"uniep_heap/{number}/{peer}"
        try:
            store.wait([key], timedelta(seconds=timeout_s))
        except (RuntimeError, dist.DistStoreError) as error:
            raise MissingPeerError(
                f"rank {peer} must open its heap within {timeout_s:g} s of rank {rank}, got no word from it"
            ) from error
        theirs = store.get(key).decode()
        if theirs != mine:
            raise HeapError(f"heap of rank {peer} must be {mine} as on rank {rank}, got {theirs}")


def say(what: str, group: dist.ProcessGroup) -> int:
    """What the others read of this rank where they meet next, without waiting for them: where it goes no further.

    Returns:
        the number of the meeting.
    """
    store, rank = dist.distributed_c10d._get_process_group_store(group), group.rank()
    # A rank's own keys tell how often it has met the others of this group before.
    number = next(number for number in count() if not store.check([f"uniep_heap/{number}/{rank}"]))
    store.set(f"uniep_heap/{number}/{rank}", what)
    return number
