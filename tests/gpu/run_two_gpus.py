"""The fused forward on the GPUs of one node, a process each: bits against the reference, then times.

    PYTHONPATH=. torchrun --nproc_per_node=2 tests/gpu/run_two_gpus.py --heap nvshmem --calls 20
    PYTHONPATH=. torchrun --nproc_per_node=2 tests/gpu/run_two_gpus.py --heap torch --experts 64 --dim 7168
    --hidden-dim 2048

Every call has other data and another routing, and is compared bit for bit. One JSON line at the end: medians in ms of
the whole forward, of its parts, and of the grouped GEMMs alone. It refuses to time what is not equal.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from uniep.kernels.build_plan import launch_build_plan
from uniep.kernels.config import KernelConfig, default_config
from uniep.kernels.dispatch_gemm import launch_dispatch_gemm
from uniep.kernels.exchange_routing import launch_exchange_routing
from uniep.kernels.gemm_combine import launch_gemm_combine, reduces_in_kernel
from uniep.layer import fused_forward
from uniep.plan.layout import HeapLayout
from uniep.reference import reference_moe
from uniep.shapes import MoEShape
from uniep.symmetric.heap import SymmetricHeap
from uniep.symmetric.nvshmem import open_nvshmem
from uniep.symmetric.torch_symmetric import open_torch_symmetric


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heap", choices=["nvshmem", "torch"], default="nvshmem")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--hidden-dim", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--timed-calls", type=int, default=20)
    parser.add_argument("--score-before-experts", action="store_true")
    parser.add_argument("--copy-per-expert", action="store_true")
    parser.add_argument("--timeout-s", type=float, default=20.0)
    parser.add_argument("--absent-rank", type=int, help="a rank that stays away from the last forward")
    parser.add_argument("--num-programs", type=int, help="programs of a launch; all multiprocessors without it")
    return parser.parse_args()


def median_ms(run: Callable[[], object], num_samples: int) -> float:
    """Median of samples of five calls in a row, as the layers of a model follow each other."""
    for _ in range(3):
        run()
    times = []
    for _ in range(num_samples):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(5):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 5)
    return round(statistics.median(times), 4)


def time_parts(inputs: list[Tensor], heap: SymmetricHeap, config: KernelConfig, calls: int) -> dict[str, float]:
    """Median ms of each launch of a forward on the GPU alone: a pause lets the host run ahead, the buffers have room
    for all rows that can come."""
    x, scores, ids, w1, w2, w3 = inputs
    names = ("exchange", "plan", "dispatch_gemm", "gemm_combine")
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(calls + 3):
        dist.barrier()
        torch.cuda.synchronize()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
        epoch = heap.next_epoch()
        torch.cuda._sleep(PAUSE_CYCLES)
        marks[0].record()
        launch_exchange_routing(ids, scores, heap, epoch=epoch)
        marks[1].record()
        plan, _ = launch_build_plan(heap, by_priority=config.by_priority)
        marks[2].record()
        up = launch_dispatch_gemm(
            x,
            w1,
            w3,
            plan,
            heap,
            config=config,
            room_rows=heap.layout.max_rows,
            epoch=epoch,
            score_before_experts=False,
            save_halves=False,
        )
        marks[3].record()
        in_kernel = reduces_in_kernel(*x.shape, score_before_experts=False)
        launch_gemm_combine(
            up.h_RF,
            w2,
            scores,
            plan,
            heap,
            config=config,
            epoch=epoch,
            score_before_experts=False,
            reduce_in_kernel=in_kernel,
        )
        marks[4].record()
        torch.cuda.synchronize()
        for name, start, end in zip(names, marks, marks[1:], strict=False):
            times[name].append(start.elapsed_time(end))
    return {f"{name}_ms": round(statistics.median(values[3:]), 4) for name, values in times.items()}


def gemms_alone(num_rows_L: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Callable[[], object]:
    """The three grouped GEMMs on as many rows as this rank received."""
    ends = num_rows_L.cumsum(0).to(torch.int32)
    rows = torch.randn(int(ends[-1]), w1.shape[2], device=w1.device).bfloat16()
    hidden = torch.randn(int(ends[-1]), w1.shape[1], device=w1.device).bfloat16()

    def run() -> None:
        torch._grouped_mm(rows, w1.transpose(1, 2), offs=ends)
        torch._grouped_mm(rows, w3.transpose(1, 2), offs=ends)
        torch._grouped_mm(hidden, w2.transpose(1, 2), offs=ends)

    return run


# About 1.5 ms.
PAUSE_CYCLES = 3_000_000


def beside_all_gather(inputs: list[Tensor], heap: SymmetricHeap, config: KernelConfig, score: dict[str, bool]) -> int:
    """Elements that differ when an NCCL all-gather on another stream is enqueued before the forward on even ranks
    and after it on odd ones: neither may hold the other back."""
    side = torch.cuda.Stream()
    part = torch.randn(32 << 20, device=inputs[0].device)
    whole = part.new_empty(len(part) * heap.num_ranks)
    expected = fused_forward(*inputs, heap=heap, config=config, **score)
    num_unequal = 0
    for _ in range(20):
        torch.cuda.synchronize()
        for step in ("gather", "forward") if heap.rank % 2 == 0 else ("forward", "gather"):
            if step == "forward":
                out = fused_forward(*inputs, heap=heap, config=config, **score)
            else:
                with torch.cuda.stream(side):
                    dist.all_gather_into_tensor(whole, part)
        torch.cuda.synchronize()
        num_unequal += int((out != expected).sum())
    heap.check()
    return num_unequal


def main() -> None:
    arguments = parse()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    shape = MoEShape(arguments.experts, arguments.top_k, arguments.dim, arguments.hidden_dim, group.size())
    layout = HeapLayout(shape, arguments.tokens, copy_per_expert=arguments.copy_per_expert)
    open_heap = open_nvshmem if arguments.heap == "nvshmem" else open_torch_symmetric
    config = default_config(device)
    config = replace(config, num_programs=arguments.num_programs or config.num_programs)
    num_local, num_tokens = shape.num_local_experts, arguments.tokens
    torch.manual_seed(1 + rank)
    up_shape, down_shape = (num_local, shape.hidden_dim, shape.dim), (num_local, shape.dim, shape.hidden_dim)
    w1, w2, w3 = (torch.randn(s, device=device).mul_(0.02).bfloat16() for s in (up_shape, down_shape, up_shape))
    score = {"score_before_experts": arguments.score_before_experts}

    with open_heap(layout, group=group, device=device, timeout_s=arguments.timeout_s) as heap:
        for region in ("received", "returned"):
            heap.region(region).fill_(float("nan"))
        num_unequal = 0
        for call in range(arguments.calls):
            x = torch.randn(num_tokens, shape.dim, device=device).bfloat16()
            scores = torch.rand(num_tokens, shape.top_k, device=device)
            logits = torch.rand(num_tokens, shape.num_experts, device=device)
            # Every third routing is ragged: low experts are preferred.
            logits += torch.linspace(0.5 if call % 3 == 2 else 0.0, 0.0, shape.num_experts, device=device)
            ids = logits.topk(shape.top_k).indices
            out = fused_forward(x, scores, ids, w1, w2, w3, heap=heap, config=config, **score)
            expected = reference_moe(x, scores, ids, w1, w2, w3, group=group, **score)
            num_unequal += int((out != expected).sum())
            heap.check()
        totals = torch.tensor([num_unequal], device=device)
        dist.all_reduce(totals)
        line = {"shape": repr(shape), "heap": arguments.heap, "calls": arguments.calls, "unequal": int(totals)}
        if int(totals) == 0 and arguments.calls:
            inputs = [x, scores, ids, w1, w2, w3]
            num_rows_E = torch.bincount(ids.flatten(), minlength=shape.num_experts)
            dist.all_reduce(num_rows_E)
            own = num_rows_E[rank * num_local : (rank + 1) * num_local]
            line["forward_ms"] = median_ms(
                lambda: fused_forward(*inputs, heap=heap, config=config, **score), arguments.timed_calls
            )
            line["reference_ms"] = median_ms(lambda: reference_moe(*inputs, group=group, **score), 5)
            line["gemms_alone_ms"] = median_ms(gemms_alone(own, w1, w2, w3), arguments.timed_calls)
            line |= time_parts(inputs, heap, config, arguments.timed_calls)
            line["unequal_beside_all_gather"] = beside_all_gather(inputs, heap, config, score)
        if rank == 0:
            print(json.dumps(line), flush=True)
        if arguments.absent_rank is not None:
            dist.barrier()
            if rank != arguments.absent_rank:
                try:
                    fused_forward(*inputs, heap=heap, config=config, **score)
                    heap.check()
                except RuntimeError as error:
                    print(f"{type(error).__name__}: {error}", flush=True)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
