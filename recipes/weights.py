"""A fingerprint of a model's weights, so that two runs can be shown to end with the same bits."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements at once: their mixed words are 8 bytes each.
_CHUNK = 1 << 24
# Odd constants of splitmix64; products wrap.
_STEP, _MIX = -7046029254386353131, -4658895280553007687
_RANK_STRIDE = 1 << 40


def fingerprints(model_parts: Sequence[nn.Module]) -> dict[str, str]:
    """A 64-bit fingerprint of the bits of each parameter and kept buffer, by its name. All ranks call it together.

    Runs can be compared by it if they have the same ranks, each with the same shard.
    """
    tensors: dict[str, Tensor] = {}
    for part in model_parts:
        tensors |= {_plain(name): value for name, value in part.state_dict().items()}
    rank = dist.get_rank() if dist.is_initialized() else 0
    of_ranks: list[Any] = [{name: int(_sum_of(value, rank * _RANK_STRIDE)) for name, value in tensors.items()}]
    if dist.is_initialized():
        # Not all_reduce: stages of a pipeline have other names.
        (own,) = of_ranks
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
    sums: Counter[str] = Counter()
    for of_rank in of_ranks:
        sums.update(of_rank)
    return {name: f"{value & (2**64 - 1):016x}" for name, value in sums.items()}


def _plain(name: str) -> str:
    """The name without the wrappers of activation checkpointing and of torch.compile."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def _sum_of(value: Tensor, offset: int) -> Tensor:
    """int64: the sum of the elements' words, each mixed with its place, which no order of summation changes."""
    local = value.to_local() if isinstance(value, DTensor) else value
    words = local.detach().contiguous().view(-1).view(_WORDS[local.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(offset + start + 1, offset + start + 1 + len(chunk), device=words.device)
        mixed = chunk + places * _STEP
        mixed = (mixed ^ (mixed >> 31)) * _MIX
        total += (mixed ^ (mixed >> 29)).sum()
    return total
