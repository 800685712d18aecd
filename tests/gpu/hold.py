"""A kernel that holds multiprocessors: nothing else fits beside its programs."""

import torch
import triton
import triton.language as tl

from uniep.kernels.signals import now_ns

# 1,024 threads of 57 to 64 registers are all 65,536 of a multiprocessor.
_NUM_WARPS = 32
_FULL_REGISTERS = range(57, 65)


@triton.jit(do_not_specialize=["num_held", "duration_ns"])
def _hold_kernel(words, num_held, duration_ns, NUM_THREADS: tl.constexpr):
    """The first num_held programs stay for a time, with 48 words a thread in registers; the others leave at once."""
    if tl.program_id(0) < num_held:
        many = words + tl.arange(0, 32 * NUM_THREADS)
        few = words + 32 * NUM_THREADS + tl.arange(0, 16 * NUM_THREADS)
        held, held_too = tl.load(many), tl.load(few)
        end = now_ns() + duration_ns
        while now_ns() < end:
            held ^= 1
            held_too ^= 1
        tl.store(many, held)
        tl.store(few, held_too)


def hold_multiprocessors(num_held: int, duration_s: float) -> torch.cuda.Event:
    """Launches it on the current stream, with one program on each multiprocessor of which num_held stay.

    Returns:
        An event of its end.
    """
    num_threads = 32 * _NUM_WARPS
    words = torch.zeros(48 * num_threads, dtype=torch.int32, device="cuda")
    grid = (torch.cuda.get_device_properties(words.device).multi_processor_count,)
    kernel = _hold_kernel[grid](words, num_held, int(duration_s * 1e9), NUM_THREADS=num_threads, num_warps=_NUM_WARPS)
    if kernel.n_regs not in _FULL_REGISTERS:
        raise RuntimeError(f"a program of the hold must take 57 to 64 registers a thread, got {kernel.n_regs}")
    end = torch.cuda.Event()
    end.record()
    return end
