"""Worker: our MoE block against TorchTitan's own on the same weights and tokens: output and gradients, bit for bit.

torchrun --nproc_per_node=2 tests/gpu/stock_equality.py [--tokens 2048] [--cases shapes,top_k,routing] [--backend uniep]
    [--memory nvshmem torch] [--compiled]
Prints a JSON line a case on rank 0 and exits with 1 if any case is unequal.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.models.moe import MoE, MoEArgs
from torchtitan.models.moe import moe as moe_module

from recipes.backend import open_backend
from recipes.config import Tune, UniEP
from recipes.experts import UniEPMoE
from tools.moe_layers import named_shapes
from uniep.shapes import MoEShape


@dataclass(frozen=True)
class Case:
    name: str
    E: int
    K: int
    D: int
    F: int
    T: int
    score_func: str = "softmax"
    route_norm: bool = True
    score_before_experts: bool = False
    num_shared_experts: int = 0
    favoured: tuple[int, ...] = ()
    """Experts that the bias draws the tokens to; with K of them every other one gets no token."""


def shape_cases(tokens: int) -> Iterator[Case]:
    for name, shape in named_shapes(ep_degree=1).items():
        yield Case(name, shape.num_experts, shape.top_k, shape.dim, shape.hidden_dim, tokens)


def top_k_cases() -> Iterator[Case]:
    for before in (False, True):
        for K in range(1, 17):
            yield Case(f"K={K} before={before}", 32, K, 1000 if K % 2 else 1280, 256, 777, score_before_experts=before)


def routing_cases() -> Iterator[Case]:
    for before in (False, True):
        common = {"E": 16, "D": 512, "F": 256, "score_before_experts": before}
        named = f"before={before}"
        yield Case(
            f"sigmoid, shared experts {named}", K=4, T=1024, score_func="sigmoid", num_shared_experts=2, **common
        )
        yield Case(f"no norm {named}", K=4, T=1024, route_norm=False, **common)
        yield Case(f"all to two experts {named}", K=2, T=1024, favoured=(3, 11), **common)
        yield Case(f"all to one rank {named}", K=4, T=1024, favoured=(0, 1, 2, 3), **common)
        yield Case(f"all to one expert {named}", K=1, T=1024, favoured=(9,), **common)
        for T in (1, 2, 7, 31, 64, 127, 128, 129):
            yield Case(f"T={T} {named}", K=4, T=T, **common)


def run(moe: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and gradients, as local tensors."""
    x = x.clone().requires_grad_()
    moe.zero_grad()
    out = moe(x)
    out.backward(grad)
    results = {"out": out.detach(), "x": x.grad}
    for name, parameter in moe.named_parameters():
        results[name] = parameter.grad
    return {n: (t.to_local() if isinstance(t, DTensor) else t).clone() for n, t in results.items() if t is not None}


def compare(
    case: Case, mesh, device: torch.device, backend_name: str, memories: list[str], compiled: bool
) -> Iterator[dict]:
    """A result for each symmetric memory."""
    args = MoEArgs(
        num_experts=case.E,
        num_shared_experts=case.num_shared_experts,
        top_k=case.K,
        score_func=case.score_func,
        route_norm=case.route_norm,
        score_before_experts=case.score_before_experts,
        load_balance_coeff=1e-3,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        stock = MoE(args, case.D, case.F)
        with torch.no_grad():
            stock.init_weights(0.02, device)
    torch.set_default_dtype(torch.float32)
    for expert in case.favoured:
        stock.expert_bias[expert] = 100.0
    parallelize_module(stock, mesh, {"experts": ExpertParallel()})
    torch.manual_seed(100 + dist.get_rank())
    x = torch.randn(1, case.T, case.D, device=device, dtype=torch.bfloat16)
    grad = torch.randn_like(x)

    want = run(stock, x, grad)
    for memory in memories:
        backend = open_backend(
            backend_name,
            MoEShape(case.E, case.K, case.D, case.F, mesh.size()),
            max_tokens=case.T,
            ep_mesh=mesh,
            options=UniEP(symmetric_memory=memory, tune=Tune(mode="off")),
            score_before_experts=case.score_before_experts,
            compiled=compiled,
        )
        ours = UniEPMoE(stock, backend, ep_mesh=mesh)
        got = run(ours, x, grad)
        backend.close()
        assert want.keys() == got.keys(), (want.keys(), got.keys())
        unequal = {}
        for name in want:
            if not torch.equal(want[name], got[name]):
                differs = want[name] != got[name]
                unequal[name] = [
                    differs.float().mean().item(),
                    (want[name].float() - got[name].float()).abs().max().item(),
                ]
        total = torch.tensor(len(unequal), device=device)
        dist.all_reduce(total)
        yield {
            "case": case.name,
            "memory": memory,
            "equal": total.item() == 0,
            "compared": sorted(want),
            "unequal": unequal,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--cases", default="shapes,top_k,routing")
    parser.add_argument("--backend", default="reference", choices=("reference", "uniep"))
    parser.add_argument("--compiled", action="store_true", help="with the stock experts compiled, as by [compile]")
    parser.add_argument("--memory", nargs="+", default=["auto"], choices=("auto", "nvshmem", "torch"))
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("ep",))
    if options.compiled:
        # What TorchTitan's apply_compile does with them.
        moe_module._run_experts_grouped_mm = torch.compile(moe_module._run_experts_grouped_mm, fullgraph=True)
    groups = {"shapes": lambda: shape_cases(options.tokens), "top_k": top_k_cases, "routing": routing_cases}
    failed = 0
    for group in options.cases.split(","):
        for case in groups[group]():
            for result in compare(case, mesh, device, options.backend, options.memory, options.compiled):
                failed += not result["equal"]
                if dist.get_rank() == 0:
                    print(json.dumps(result), flush=True)
            torch.cuda.empty_cache()
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
