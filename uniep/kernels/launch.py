"""Launches of Triton kernels that cost the host little.

Triton looks at every argument of every launch for the binary that was compiled for its type and alignment, and asks the
driver about every pointer. For ten kernels with up to seventy arguments, that costs the host so much that the GPU waits
for it in a layer of small experts. Here a launch is known again by what Triton specializes on, and goes straight to its
binary with addresses instead of tensors.
"""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_binaries: dict[tuple[Any, ...], Any] = {}
_only_compiles = False


@contextlib.contextmanager
def only_compiling(num_threads: int) -> Iterator[None]:
    """Launches inside compile, num_threads at once, and run nothing: what they would write stays as it was. At the end
    all are compiled; interpreted kernels need nothing."""
    global _only_compiles
    with ThreadPoolExecutor(num_threads) as executor, triton.AsyncCompileMode(executor):
        _only_compiles = True
        try:
            yield
        finally:
            _only_compiles = False


def launch(
    kernel: Any, num_programs: int, *args: Any, num_warps: int = 4, num_stages: int | None = None, **constexprs: Any
) -> None:
    """`kernel[(num_programs,)](*args, **constexprs, num_warps=..., num_stages=...)`, quicker from the second time on.

    Args:
        kernel: a function of triton.jit whose last parameters are the constexprs. Interpreted ones run as ever.
        args: its other arguments, in order: tensors, tensor descriptors, ints and None.
    """
    options = {"num_warps": num_warps} if num_stages is None else {"num_warps": num_warps, "num_stages": num_stages}
    if not isinstance(kernel, JITFunction):
        if not _only_compiles:
            kernel[(num_programs,)](*args, **constexprs, **options)
        return
    if _only_compiles:
        kernel.warmup(*args, grid=(num_programs,), **constexprs, **options)
        return
    values: list[Any] = []
    key: list[Any] = [kernel, torch.cuda.current_device(), num_warps, num_stages]
    for arg in args:
        if isinstance(arg, Tensor):
            address = arg.data_ptr()
            values.append(address)
            key.append(arg.dtype)
            key.append(address % 16 == 0)
        else:
            values.append(arg)
            if isinstance(arg, TensorDescriptor):
                key.append(arg.base.dtype)
                key.append(tuple(arg.block_shape))
            elif arg is None:
                key.append(None)
            else:
                # As Triton tells ints apart, whether or not it does so for this one.
                key.append((arg == 1, arg % 16 == 0, -(2**31) <= arg < 2**31))
    last = [constexprs[name] for name in kernel.arg_names[len(args) :]]
    key += last
    binary = _binaries.get(found := tuple(key))
    if binary is None:
        _binaries[found] = kernel[(num_programs,)](*args, **constexprs, **options)
    else:
        binary[num_programs, 1, 1](*values, *last)


def ceil_div(a: int, b: int) -> int:
    """As triton.cdiv, which kernels can call too, and which is slow on the host for that."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """As triton.next_power_of_2, for n from 1."""
    return 1 << (n - 1).bit_length()
