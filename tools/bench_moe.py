"""Times one MoE layer: TorchTitan's block, the reference, the grouped GEMMs alone, and the fused kernels, in one run.

python -m tools.bench_moe --ep 2 --tokens 8192 --pass forward [--shape NAME ...] [--experts E] [--out FILE.json]

Starts a process a GPU. All variants hold the same weights and tokens and are timed in turn, each figure the median of
means over a few calls in a row, the slowest rank's. Before each, the variant runs as long untimed, and the order
changes from turn to turn: what always followed a variant that heats the GPUs would always be late. Bits are compared
first, output and gradients, ours with TorchTitan's: a row with unequal bits prints no speed-up. `gemm` is the layer's
grouped GEMMs through torch._grouped_mm on rows that lie in place already: a floor that no block reaches. The JSON
counts to how many ranks a token is copied, beside what even routing would give. `--switches` times the fused kernels
once more with each measuring switch set, `--numerics-fast` with `[uniep] numerics = "fast"`: its time stands beside the
bitwise one, and how far its gradients are from those in relative L2, the largest of any rank. `--tune model` times them
with the configuration that the autotuner chooses too, as `[uniep.tune] mode` sets it.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import recipes  # noqa: F401  prepares the platform
from recipes.backend import RoutedBackend, open_backend
from recipes.choices import TuneError, find_hardware
from recipes.config import Tune, UniEP
from recipes.experts import UniEPMoE
from tools.benchmark_file import write_benchmark
from tools.command import check_counts, check_writable, end_with
from tools.moe_layers import Layer, named_shapes
from tools.start_ranks import is_rank, join_ranks, start_ranks
from uniep.autotune.workload import chance_wanted
from uniep.kernels.config import CombineConfig
from uniep.shapes import MoEShape, ShapeError

SAMPLES, CALLS = 5, 20
# The variants of --numerics-fast and --tune.
FAST, TUNED_VARIANT = "uniep fast", "uniep tuned"
# What each switch of the fused kernels is set to when it is measured.
SWITCHES: dict[str, dict[str, Any]] = {
    "relay off": {"copy_per_expert": True},
    "priority off": {"by_priority": False},
    "static roles": {"dynamic_roles": False},
    "staged combine": {"staged_combine": True, "down": CombineConfig(num_combine=20)},
}


def layers(options: argparse.Namespace) -> list[Layer]:
    """The chosen layers. Raises ShapeError."""
    shapes = named_shapes(options.shape, ep_degree=options.ep, num_experts=options.experts)
    return [Layer(name, shape, options.tokens) for name, shape in shapes.items()]


class Block:
    """One variant of the layer on this rank."""

    def __init__(self, moe: torch.nn.Module, layer: Layer, device: torch.device, with_backward: bool):
        self.moe = moe
        self.with_backward = with_backward
        generator = torch.Generator(device).manual_seed(100 + dist.get_rank())
        size = (1, layer.num_tokens, layer.shape.dim)
        self.x = torch.randn(size, device=device, generator=generator).bfloat16().requires_grad_(with_backward)
        self.grad = torch.randn(size, device=device, generator=generator).bfloat16()

    def __call__(self) -> Tensor:
        if not self.with_backward:
            with torch.no_grad():
                return self.moe(self.x)
        self.forget()
        out = self.moe(self.x)
        out.backward(self.grad)
        return out

    def forget(self) -> None:
        """Frees the gradients of the last call."""
        self.x.grad = None
        self.moe.zero_grad()

    def results(self) -> dict[str, Tensor]:
        """Output and gradients of one call, as local tensors that nothing else holds: large layers have no room for
        copies."""
        found = {"out": self().detach()}
        if self.with_backward:
            assert self.x.grad is not None
            found["x"] = self.x.grad
            found |= {name: p.grad for name, p in self.moe.named_parameters() if p.grad is not None}
            self.forget()
        return {n: (t.to_local() if isinstance(t, DTensor) else t) for n, t in found.items()}


def build_stock(layer: Layer, ep_mesh: DeviceMesh | None, device: torch.device) -> torch.nn.Module:
    """TorchTitan's block, and as TorchTitan has it for one rank without expert parallelism."""
    from torchtitan.distributed.expert_parallel import ExpertParallel
    from torchtitan.models.moe import MoE, MoEArgs

    shape = layer.shape
    args = MoEArgs(
        num_experts=shape.num_experts,
        num_shared_experts=0,
        top_k=shape.top_k,
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
        load_balance_coeff=None,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device, torch.no_grad():
        moe = MoE(args, shape.dim, shape.hidden_dim)
        moe.init_weights(0.02, device)
    torch.set_default_dtype(torch.float32)
    return moe if ep_mesh is None else parallelize_module(moe, ep_mesh, {"experts": ExpertParallel()})


def grouped_gemms(moe: Any, layer: Layer, with_backward: bool) -> Callable[[], None]:
    """The layer's GEMMs alone, on as many rows as a rank receives with balanced routing, in groups of equal size."""
    shape = layer.shape
    weights = (moe.experts.w1, moe.experts.w2, moe.experts.w3)
    w1, w2, w3 = ((w.to_local() if isinstance(w, DTensor) else w).detach() for w in weights)
    rows = layer.num_tokens * shape.top_k // shape.num_local_experts // 8 * 8 or 8
    ends = torch.arange(1, len(w1) + 1, device=w1.device, dtype=torch.int32) * rows
    x_RD = torch.randn(rows * len(w1), shape.dim, device=w1.device).bfloat16()
    h_RF = torch.randn(rows * len(w1), shape.hidden_dim, device=w1.device).bfloat16()

    def run() -> None:
        torch._grouped_mm(x_RD, w1.transpose(1, 2), offs=ends)
        torch._grouped_mm(x_RD, w3.transpose(1, 2), offs=ends)
        torch._grouped_mm(h_RF, w2.transpose(1, 2), offs=ends)
        if with_backward:
            torch._grouped_mm(x_RD, w2, offs=ends)
            torch._grouped_mm(h_RF, w1, offs=ends)
            torch._grouped_mm(h_RF, w3, offs=ends)
            torch._grouped_mm(h_RF.t(), x_RD, offs=ends)
            torch._grouped_mm(h_RF.t(), x_RD, offs=ends)
            torch._grouped_mm(x_RD.t(), h_RF, offs=ends)

    return run


def time_interleaved(variants: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds a call. All ranks take the samples in one order, which changes from turn to turn."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    shuffled = random.Random(0)
    for _ in range(SAMPLES):
        for name, call in shuffled.sample(list(variants.items()), len(variants)):
            # What ran before it has left the GPUs hotter or cooler than it makes them itself.
            for _ in range(CALLS):
                call()
            torch.cuda.synchronize()
            dist.barrier()
            start.record()
            for _ in range(CALLS):
                call()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(start.elapsed_time(end) / CALLS)
    slowest = torch.tensor([statistics.median(s) for s in samples.values()], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(samples, slowest.tolist(), strict=True))


def peak_gib(name: str, blocks: dict[str, Block]) -> float:
    """Of a call of one block, its weights included: no other block's gradients are alive."""
    for block in blocks.values():
        block.forget()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    blocks[name]()
    torch.cuda.synchronize()
    weights = (p.to_local() if isinstance(p, DTensor) else p for p in blocks[name].moe.parameters())
    return (torch.cuda.max_memory_allocated() - before + sum(w.numel() * w.element_size() for w in weights)) / 2**30


def unequal_results(want: dict[str, Tensor], got: dict[str, Tensor]) -> dict[str, float]:
    """The share of elements that differ, of each result that is not equal on every rank."""
    assert want.keys() == got.keys(), (want.keys(), got.keys())
    shares = torch.stack([(want[name] != got[name]).count_nonzero() / want[name].numel() for name in want])
    dist.all_reduce(shares, op=dist.ReduceOp.MAX)
    # A NaN differs from itself, as torch.equal has it.
    return {name: share for name, share in zip(want, shares.tolist(), strict=True) if share}


def copies_of_tokens(expert_ids_TK: Tensor, shape: MoEShape) -> float:
    """Mean number of ranks that hold an expert of a token: copies of it that a dispatch makes, this rank's own too.
    One copy for each of its experts would be K."""
    wanted_TW = torch.zeros(len(expert_ids_TK), shape.ep_degree, device=expert_ids_TK.device)
    wanted_TW.scatter_(1, expert_ids_TK // shape.num_local_experts, 1.0)
    return wanted_TW.sum(1).mean().item()


def routed(block: Block, top_k: int) -> Tensor:
    """The experts that this rank's tokens choose, [T, K]."""
    found: list[Tensor] = []
    hook = block.moe.get_submodule("router").register_forward_hook(lambda _, args, out: found.append(out[1]))
    block()
    hook.remove()
    return found[0].reshape(-1, top_k)


def relative_errors(want: dict[str, Tensor], got: dict[str, Tensor]) -> dict[str, float]:
    """L2 of the difference by that of want, of each result, the largest of any rank."""

    def norm(tensors: Iterator[Tensor]) -> Tensor:
        # An expert after the other: all at once would be twice the weights in fp32.
        return torch.stack([tensor.norm() for tensor in tensors]).norm()

    errors = torch.stack([
        norm(one.float() - other.float() for one, other in zip(got[name], want[name], strict=True))
        / norm(other.float() for other in want[name])
        for name in want
    ])  # fmt: skip
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    return dict(zip(want, errors.tolist(), strict=True))


def measure(
    layer: Layer, options: argparse.Namespace, ep_mesh: DeviceMesh | None, device: torch.device
) -> dict[str, Any]:
    with_backward = options.passes == "both"

    def opened(
        name: Any, switch: dict[str, Any] | None = None, numerics: Any = "bitwise", mode: Any = "off"
    ) -> RoutedBackend:
        tune = replace(Tune(), mode=mode, hardware=options.hardware)
        section = replace(UniEP(), symmetric_memory=options.memory, numerics=numerics, tune=tune)
        return open_backend(
            name,
            layer.shape,
            max_tokens=layer.num_tokens,
            ep_mesh=ep_mesh,
            options=section,
            score_before_experts=False,
            num_layers_waiting=int(with_backward),
            switches=switch or {},
        )

    def block(moe: torch.nn.Module) -> Block:
        return Block(moe, layer, device, with_backward)

    stock = build_stock(layer, ep_mesh, device)
    backends = {
        "reference": opened("reference"),
        "uniep": opened("uniep"),
    }
    if options.switches:
        backends |= {switch: opened("uniep", settings) for switch, settings in SWITCHES.items()}
    if options.numerics_fast:
        backends[FAST] = opened("uniep", numerics="fast")
    if options.tune != "off":
        backends[TUNED_VARIANT] = opened("uniep", mode=options.tune)
    blocks = {"stock": block(stock)} | {n: block(UniEPMoE(stock, b, ep_mesh=ep_mesh)) for n, b in backends.items()}
    want = blocks["stock"].results()
    unequal = {name: unequal_results(want, blocks[name].results()) for name in backends if name != FAST}
    # Where ours has the stock block's bits, they are the bitwise gradients; where not, the row counts for nothing.
    errors = relative_errors(want, blocks[FAST].results()) if options.numerics_fast else {}
    del want
    copies = torch.tensor(copies_of_tokens(routed(blocks["stock"], layer.shape.top_k), layer.shape), device=device)
    dist.all_reduce(copies)
    peaks = {name: peak_gib(name, blocks) for name in ("stock", "uniep", FAST) if name in blocks}
    times = time_interleaved({**blocks, "gemm": grouped_gemms(stock, layer, with_backward)})
    layout = backends["uniep"].layout
    assert layout is not None
    heap_gib = layout.num_bytes / 2**30
    for backend in backends.values():
        backend.close()
    shape = layer.shape
    return {
        "shape": layer.name,
        "E": shape.num_experts,
        "K": shape.top_k,
        "D": shape.dim,
        "F": shape.hidden_dim,
        "ep": shape.ep_degree,
        "tokens": layer.num_tokens,
        "pass": options.passes,
        "memory": backends["uniep"].facts["symmetric_memory"],
        "copies_of_tokens": round(copies.item() / shape.ep_degree, 4),
        "copies_expected": round(shape.ep_degree * chance_wanted(shape), 4),
        **{f"{name.replace(' ', '_')}_ms": round(ms, 4) for name, ms in times.items()},
        "bits_equal": not unequal["uniep"],
        "reference_bits_equal": not unequal["reference"],
        "unequal_shares": {name: shares for name, shares in unequal.items() if shares},
        "peak_gib_stock": round(peaks["stock"], 3),
        "peak_gib_uniep": round(peaks["uniep"] + heap_gib, 3),
        **({"peak_gib_uniep_fast": round(peaks[FAST] + heap_gib, 3), "fast_relative_errors": errors} if errors else {}),
    }


def report(row: dict[str, Any]) -> str:
    line = (
        f"{row['shape']:22} E{row['E']:<4} T{row['tokens']:<6} stock {row['stock_ms']:8.3f}  "
        f"reference {row['reference_ms']:8.3f}  gemm {row['gemm_ms']:8.3f}  uniep {row['uniep_ms']:8.3f} ms  "
        f"{row['peak_gib_stock']:6.2f} / {row['peak_gib_uniep']:6.2f} GiB  "
    )
    if not row["bits_equal"]:
        return line + f"UNEQUAL BITS, no speed-up: {row['unequal_shares']['uniep']}"
    unequal, extra = row["unequal_shares"], ""
    for name in SWITCHES:
        if (ms := row.get(f"{name.replace(' ', '_')}_ms")) is not None:
            extra += f"  {name} {'UNEQUAL BITS' if name in unequal else f'{ms:.3f}'}"
    if not row["reference_bits_equal"]:
        extra += f"  reference UNEQUAL BITS: {unequal['reference']}"
    if (ms := row.get("uniep_tuned_ms")) is not None:
        gain = f"{ms:.3f} ms, {row['stock_ms'] / ms:.2f}x stock"
        extra += f"  tuned {'UNEQUAL BITS' if TUNED_VARIANT in unequal else gain}"
    if "uniep_fast_ms" in row:
        worst = max(row["fast_relative_errors"], key=row["fast_relative_errors"].get)
        extra += (
            f"  fast {row['uniep_fast_ms']:.3f} ms, {row['uniep_ms'] / row['uniep_fast_ms']:.3f}x bitwise, "
            f"{row['peak_gib_uniep_fast']:.2f} GiB, {worst} off by {row['fast_relative_errors'][worst]:.1e}"
        )
    ratio = row["stock_ms"] / row["uniep_ms"]
    return line + f"{ratio:5.2f}x stock, {row['uniep_ms'] / row['gemm_ms']:4.2f}x gemm, equal{extra}"


def work(options: argparse.Namespace, argv: list[str]) -> int:
    """One rank."""
    device = join_ranks()
    ep_mesh = init_device_mesh("cuda", (options.ep,), mesh_dim_names=("ep",)) if options.ep > 1 else None
    rows: list[dict[str, Any]] = []
    figures: dict[str, Any] = {"rows": rows}
    if options.tune != "off":
        properties = torch.cuda.get_device_properties(device)
        hardware = find_hardware(options.hardware, properties.name, properties.multi_processor_count)
        figures["hardware"] = {"source": hardware.source, "fingerprint": hardware.fingerprint}
    for layer in layers(options):
        row = measure(layer, options, ep_mesh, device)
        rows.append(row)
        torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            print(report(row), flush=True)
            if options.out:
                write_benchmark(options.out, "tools.bench_moe", argv, figures)
    if dist.get_rank() == 0 and len(rows) > 1 and all(row["bits_equal"] for row in rows):
        ours = statistics.geometric_mean(row["uniep_ms"] / row["gemm_ms"] for row in rows)
        stock = statistics.geometric_mean(row["stock_ms"] / row["uniep_ms"] for row in rows)
        print(f"geometric mean: {stock:.2f}x stock, {ours:.2f}x the grouped GEMMs alone")
    dist.destroy_process_group()
    return 1 if any(row["unequal_shares"] for row in rows) else 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep", type=int, default=2, help="expert-parallel ranks, a GPU each (2)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a rank (8192)")
    parser.add_argument("--pass", dest="passes", choices=("forward", "both"), default="forward")
    parser.add_argument("--shape", nargs="+", help="names of benchmarks/moe_shapes.toml; without it all")
    parser.add_argument("--experts", type=int, help="cut the shapes to this many experts")
    parser.add_argument("--memory", choices=("auto", "nvshmem", "torch"), default="auto", help="symmetric memory")
    parser.add_argument("--switches", action="store_true", help="also time each measuring switch")
    parser.add_argument("--numerics-fast", action="store_true", help='also time numerics = "fast" (with --pass both)')
    parser.add_argument(
        "--tune", choices=("off", "model", "measured"), default="off", help="also time the tuned kernels"
    )
    parser.add_argument("--hardware", help="for --tune: a file of tools.calibrate; without it the package's own")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    if options.numerics_fast and options.passes != "both":
        parser.error("--pass must be both with --numerics-fast, got forward: only the backward differs")
    if options.hardware is not None and options.tune == "off":
        parser.error("--hardware must come with --tune model or measured, got none: nothing else asks it")
    try:
        check_counts(tokens=[options.tokens])
        if options.out:
            check_writable("--out", options.out)
        chosen = layers(options)
    except (ShapeError, argparse.ArgumentTypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if torch.cuda.device_count() < options.ep:
        print(f"error: --ep must be at most the GPUs of this machine = {torch.cuda.device_count()}, got {options.ep}: "
              "the benchmark needs GPUs", file=sys.stderr)  # fmt: skip
        return 2
    try:
        if options.tune != "off":
            properties = torch.cuda.get_device_properties()
            find_hardware(options.hardware, properties.name, properties.multi_processor_count)
    except TuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if is_rank():
        return work(options, argv)
    print(f"{len(chosen)} layers on {options.ep} x {torch.cuda.get_device_name()}", flush=True)
    return start_ranks("tools.bench_moe", options.ep, argv)


if __name__ == "__main__":
    end_with(main)
