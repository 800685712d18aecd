"""GB/s that some programs reach together when they copy rows as the kernels do: within a GPU, or into a peer's heap."""

import functools
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from recipes.launch_times import start_together
from uniep.autotune.hardware import Bandwidth
from uniep.kernels.copy_shape import copy_shape
from uniep.kernels.memory import copy_rows
from uniep.symmetric.heap import SymmetricHeap

_NUM_CALLS = 7


@triton.jit(do_not_specialize=["target_address", "num_rows"])
def _copy_kernel(
    source_RD, target_address, num_rows, D: tl.constexpr, COPY_ROWS: tl.constexpr, COPY_COLS: tl.constexpr
):
    """Programs copy blocks of rows in turns. Nothing waits."""
    block = tl.program_id(0)
    while block * COPY_ROWS < num_rows:
        rows = block * COPY_ROWS + tl.arange(0, COPY_ROWS)
        place = rows.to(tl.int64) * (D * 2)
        target = target_address.to(tl.int64) + place
        copy_rows(source_RD.to(tl.int64) + place, target, rows < num_rows, D, COPY_COLS)
        block += tl.num_programs(0)


def launch_copy(
    source_RD: Tensor, target_address: int, *, num_programs: int, num_warps: int, elements_of_warp: int = 2048
) -> None:
    """Copies bf16 rows to an address of this GPU or of a peer.

    Args:
        elements_of_warp: elements that a warp copies at once, KernelConfig's.
    """
    num_rows, dim = source_RD.shape
    rows, cols = copy_shape(dim, elements_of_warp * num_warps)
    _copy_kernel[(num_programs,)](
        source_RD, target_address, num_rows, D=dim, COPY_ROWS=rows, COPY_COLS=cols, num_warps=num_warps
    )


def measure_copies(
    heap: SymmetricHeap, *, warps: Sequence[int], programs: Sequence[int]
) -> tuple[Bandwidth, Bandwidth]:
    """Tables of the link and of copies within the GPU (reads and writes together). All ranks call it together; each
    sends into its own part of the next rank's receive buffer, all at once."""
    layout = heap.layout
    num_rows, dim = layout.max_tokens, layout.shape.dim
    source_RD = torch.randn(num_rows, dim, device=heap.device, dtype=torch.bfloat16)
    target_RD = torch.empty_like(source_RD)
    num_bytes = source_RD.nbytes
    peer = (heap.rank + 1) % heap.num_ranks
    remote = int(heap.peers_W[peer]) + heap.offset_bytes("received") + heap.rank * num_bytes

    def table(target_address: int, bytes_of_copy: int) -> Bandwidth:
        rows = []
        for num_warps in warps:
            calls = [
                functools.partial(launch_copy, source_RD, target_address, num_programs=count, num_warps=num_warps)
                for count in programs
            ]
            rows.append(tuple(round(bytes_of_copy / time_us(call, heap.device) / 1e3, 1) for call in calls))
        return Bandwidth(tuple(warps), tuple(programs), tuple(rows))

    return table(remote, num_bytes), table(target_RD.data_ptr(), 2 * num_bytes)


def measure_memory_gbs(device: torch.device) -> float:
    """Of a large copy, reads and writes together, in GB/s."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return round(2 * source.nbytes / time_us(lambda: target.copy_(source), device) / 1e3, 1)


def time_us(call: Callable[[], object], device: torch.device) -> float:
    """The median of some calls, the slowest rank's."""
    times = []
    for index in range(_NUM_CALLS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        start_together(dist.group.WORLD)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if index >= 2:
            times.append(start.elapsed_time(end) * 1e3)
    slowest = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()
