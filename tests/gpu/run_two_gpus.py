"""The fused layer on the GPUs of one node, a process each: bits against the reference, undisturbed and disturbed.

    PYTHONPATH=. torchrun --nproc_per_node=2 tests/gpu/run_two_gpus.py --heap nvshmem --calls 20
    PYTHONPATH=. torchrun --nproc_per_node=2 tests/gpu/run_two_gpus.py --heap torch --experts 64 --dim 7168
    --hidden-dim 2048

Every call has other data and another routing; output and all gradients are compared bit for bit. One JSON line at the
end.
"""

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.hold import hold_multiprocessors
from uniep.kernels.config import default_config
from uniep.layer import fused_forward, fused_moe
from uniep.numerics import Numerics
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
    parser.add_argument("--score-before-experts", action="store_true")
    parser.add_argument("--copy-per-expert", action="store_true")
    parser.add_argument("--timeout-s", type=float, default=20.0)
    parser.add_argument("--hold", type=int, help="multiprocessors that another kernel holds during one more call")
    parser.add_argument("--absent-rank", type=int, help="a rank that stays away from the last forward")
    parser.add_argument("--num-programs", type=int, help="programs of a launch; all multiprocessors without it")
    return parser.parse_args()


def run_layer(moe: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Output and gradients of x, the scores and the weights."""
    x, scores, ids, *weights = inputs
    leaves = [t.detach().requires_grad_() for t in (x, scores, *weights)]
    out = moe(leaves[0], leaves[1], ids, *leaves[2:])
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def num_unequal(results: list[Tensor], expected: list[Tensor]) -> int:
    return sum(int((got != want).sum()) for got, want in zip(results, expected, strict=True))


def beside_all_gather(layer: Callable[[], list[Tensor]], expected: list[Tensor], heap: SymmetricHeap) -> int:
    """Elements that differ when an NCCL all-gather on another stream is enqueued before the layer on even ranks and
    after it on odd ones: neither may hold the other back."""
    side = torch.cuda.Stream()
    part = torch.randn(32 << 20, device=heap.device)
    whole = part.new_empty(len(part) * heap.num_ranks)
    unequal = 0
    for _ in range(20):
        torch.cuda.synchronize()
        for step in ("gather", "layer") if heap.rank % 2 == 0 else ("layer", "gather"):
            if step == "layer":
                results = layer()
            else:
                with torch.cuda.stream(side):
                    dist.all_gather_into_tensor(whole, part)
        torch.cuda.synchronize()
        unequal += num_unequal(results, expected)
    heap.check()
    return unequal


def beside_held_multiprocessors(
    layer: Callable[[], list[Tensor]], expected: list[Tensor], heap: SymmetricHeap, num_held: int
) -> int:
    """Elements that differ when another kernel holds most multiprocessors of each GPU from before the layer to its
    end."""
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.stream(side):
        hold_multiprocessors(num_held, duration_s=0.0)
        side.synchronize()
        held = hold_multiprocessors(num_held, duration_s=1.0)
    results = layer()
    torch.cuda.current_stream().synchronize()
    assert not held.query(), "the layer must end while the multiprocessors are held"
    heap.check()
    return num_unequal(results, expected)


def main() -> None:
    arguments = parse()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    shape = MoEShape(arguments.experts, arguments.top_k, arguments.dim, arguments.hidden_dim, group.size())
    layout = HeapLayout(shape, arguments.tokens, copy_per_expert=arguments.copy_per_expert, num_kept=1)
    open_heap = open_nvshmem if arguments.heap == "nvshmem" else open_torch_symmetric
    config = default_config(device)
    config = replace(config, num_programs=arguments.num_programs or config.num_programs)
    num_local, num_tokens = shape.num_local_experts, arguments.tokens
    torch.manual_seed(1 + rank)
    up_shape, down_shape = (num_local, shape.hidden_dim, shape.dim), (num_local, shape.dim, shape.hidden_dim)
    w1, w2, w3 = (torch.randn(s, device=device).mul_(0.02).bfloat16() for s in (up_shape, down_shape, up_shape))
    numerics = Numerics(arguments.score_before_experts)

    with open_heap(layout, group=group, device=device, timeout_s=arguments.timeout_s) as heap:
        fused = partial(fused_moe, heap=heap, config=config, numerics=numerics)
        for region in ("received", "returned"):
            heap.region(region).fill_(float("nan"))
        unequal = 0
        for call in range(arguments.calls):
            x = torch.randn(num_tokens, shape.dim, device=device).bfloat16()
            scores = torch.rand(num_tokens, shape.top_k, device=device)
            logits = torch.rand(num_tokens, shape.num_experts, device=device)
            # Every third routing is ragged: low experts are preferred.
            logits += torch.linspace(0.5 if call % 3 == 2 else 0.0, 0.0, shape.num_experts, device=device)
            ids = logits.topk(shape.top_k).indices
            inputs = [x, scores, ids, w1, w2, w3]
            grad = torch.randn(num_tokens, shape.dim, device=device).bfloat16()
            expected = run_layer(partial(reference_moe, group=group, numerics=numerics), inputs, grad)
            unequal += num_unequal(run_layer(fused, inputs, grad), expected)
            heap.check()
        totals = torch.tensor([unequal], device=device)
        dist.all_reduce(totals)
        line = {"shape": repr(shape), "heap": arguments.heap, "calls": arguments.calls, "unequal": int(totals)}
        if int(totals) == 0 and arguments.calls:
            layer = partial(run_layer, fused, inputs, grad)
            line["unequal_beside_all_gather"] = beside_all_gather(layer, expected, heap)
            if arguments.hold:
                line["unequal_beside_held"] = beside_held_multiprocessors(layer, expected, heap, arguments.hold)
        if rank == 0:
            print(json.dumps(line), flush=True)
        if arguments.absent_rank is not None:
            dist.barrier()
            if rank != arguments.absent_rank:
                try:
                    fused_forward(*inputs, heap=heap, config=config, numerics=numerics)
                    heap.check()
                except RuntimeError as error:
                    print(f"{type(error).__name__}: {error}", flush=True)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
