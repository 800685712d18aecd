"""Buffers of the heap into which peers return rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class ReturnedBuffer:
    """One of a rank's buffers for the rows that come back to its tokens.

    Attributes:
        offset_bytes: where it lies in the rank's heap.
        rows_ND: bf16 [M * K, D], the buffer as a tensor.
        kept: whether the rows stay as long as any tensor of this memory lives; else only until this rank enters its
            next combine.
    """

    offset_bytes: int
    rows_ND: Tensor
    kept: bool

    def of_tokens(self, num_tokens: int, top_k: int) -> Tensor:
        return self.rows_ND[: num_tokens * top_k].view(num_tokens, top_k, self.rows_ND.shape[1])


class _Lent:
    """An array interface to memory. It dies with the last tensor made of it, also with one that autograd holds."""

    def __init__(self, memory_U8: Tensor, give_back: Callable[[], None]) -> None:
        self._give_back = give_back
        interface: dict[str, Any] = {
            "shape": tuple(memory_U8.shape),
            "typestr": "|u1",
            "data": (memory_U8.data_ptr(), False),
            "version": 3,
        }
        if memory_U8.is_cuda:
            self.__cuda_array_interface__ = interface
        else:
            self.__array_interface__ = interface

    def __del__(self) -> None:
        self._give_back()


def lend(memory_U8: Tensor, give_back: Callable[[], None]) -> Tensor:
    """The same memory as a tensor with a storage of its own, and give_back called when nothing refers to that."""
    lent = _Lent(memory_U8, give_back)
    if memory_U8.is_cuda:
        return torch.as_tensor(lent, device=memory_U8.device)
    return torch.from_numpy(np.asarray(lent))
