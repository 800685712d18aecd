"""Compiles every kernel for Hopper as its launcher would launch it, without a GPU, and prints what it costs.

    PYTHONPATH=. python tests/kernels/compile_sm90.py

One JSON line a kernel: registers a thread, bytes of spills, bytes of shared memory, whether wgmma and TMA are used.
Run it without TRITON_INTERPRET: tests/kernels/test_compile_sm90.py does so.
"""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from uniep.autotune.hardware import TILES
from uniep.kernels.config import LAUNCHES, KernelConfig
from uniep.kernels.timeline import Timeline
from uniep.kernels.wgrad import WgradConfig
from uniep.layer import backward_steps, forward_steps
from uniep.numerics import Numerics
from uniep.plan.layout import HeapLayout
from uniep.shapes import MoEShape
from uniep.symmetric.heap import SymmetricHeap

_TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}


@dataclass
class Capture:
    """Stands in for a jitted kernel and keeps what it is launched with."""

    kernel: Any
    launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launches.append((args, kwargs))


def compile_launch(capture: Capture, arch: int, index: int = 0) -> dict[str, Any]:
    """Compiles the index-th launch of a kernel with the types and alignments of its arguments."""
    kernel = capture.kernel
    args, kwargs = capture.launches[index]
    names = kernel.arg_names
    options = {name: value for name, value in kwargs.items() if name not in names}
    values = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
    signature, constants, attrs = {}, {}, {}
    for index, name in enumerate(names):
        value = values[name]
        if name in kwargs or value is None:
            signature[name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
            # A plan's tensors are parts of one allocation and so aligned to 4 bytes only.
            if value.dtype == torch.bfloat16:
                attrs[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and name.endswith("_bytes"):
                attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attrs)
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return {"kernel": kernel.__name__, "shared_bytes": binary.metadata.shared} | _resources(binary)


def _resources(binary: Any) -> dict[str, Any]:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp") / f"{binary.metadata.name}.cubin"
    path.write_bytes(binary.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    path.unlink()
    ptx = binary.asm["ptx"]
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spill_bytes": int(re.search(r"STACK:(\d+)", usage)[1]) + int(re.search(r"LOCAL:(\d+)", usage)[1]),
        "wgmma": "wgmma.mma_async" in ptx,
        "tma": "cp.async.bulk.tensor" in ptx,
        "narrow_row_copies": len(re.findall(r"(?:ld|st)\.global\.b16", ptx)),
        # Every record reads it, and nothing else does.
        "reads_multiprocessor": "%smid" in ptx,
    }


def finish(steps: Generator[None, None, Any]) -> Any:
    """What it returns at its end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def capture_launches(
    shape: MoEShape,
    num_tokens: int,
    config: KernelConfig,
    *,
    score_before_experts: bool,
    recorded: bool = False,
    compiled: bool = False,
) -> list[Capture]:
    """A layer's forward and the backwards of both numerics, with tensors that have no memory. recorded: with a
    timeline. compiled: SwiGLU as torch.compile rounds it."""
    captures = []
    for module, kernels in (
        ("exchange_routing", ["_exchange_routing_kernel"]),
        ("build_plan", ["_count_kernel", "_scan_kernel", "_scatter_kernel"]),
        ("dispatch_gemm", ["_dispatch_gemm_kernel"]),
        ("gemm_combine", ["_gemm_combine_kernel"]),
        ("wgrad", ["_wgrad_kernel"]),
    ):
        imported = importlib.import_module(f"uniep.kernels.{module}")
        for name in kernels:
            kernel = getattr(imported, name)
            captures.append(Capture(kernel.kernel if isinstance(kernel, Capture) else kernel))
            setattr(imported, name, captures[-1])

    layout = HeapLayout(shape, num_tokens)
    meta = torch.device("meta")
    base = torch.empty(layout.num_bytes, dtype=torch.uint8, device=meta)
    heap = SymmetricHeap(layout, rank=0, base_U8=base, peer_addresses=[0] * shape.ep_degree, close=lambda: None)
    dim, hidden_dim, num_local = shape.dim, shape.hidden_dim, shape.num_local_experts
    x = torch.empty(num_tokens, dim, dtype=torch.bfloat16, device=meta)
    w1, w3 = (torch.empty(num_local, hidden_dim, dim, dtype=torch.bfloat16, device=meta) for _ in range(2))
    w2 = torch.empty(num_local, dim, hidden_dim, dtype=torch.bfloat16, device=meta)
    ids = torch.empty(num_tokens, shape.top_k, dtype=torch.int64, device=meta)
    scores = torch.empty(num_tokens, shape.top_k, device=meta)
    timeline = Timeline(meta)
    if recorded:
        timeline.start()
    tensors = (scores, ids, w1, w2, w3)
    more: dict[str, Any] = {
        "heap": heap,
        "config": replace(config, wgrad=WgradConfig(config.num_programs, use_tma=config.up.use_tma)),
        "timeline": timeline,
    }
    numerics = Numerics(score_before_experts, compiled)
    with mock.patch("uniep.layer.reduces_in_kernel", return_value=True):
        saved = finish(forward_steps(x, *tensors, save=True, numerics=numerics, **more))[1]
        for fast in (False, True):
            finish(backward_steps(x, saved, x, *tensors, numerics=replace(numerics, fast=fast), **more))
    return captures


# The autotuner's tiles: wide3, wide4 and narrow; and the defaults.
WIDE, DEEP, NARROW = (asdict(TILES[name]) for name in ("wide3", "wide4", "narrow"))
DEFAULTS: dict[str, Any] = {}
POINTERS = {"block_n": 128, "block_k": 32, "num_warps": 8, "occupancy": 1, "use_tma": False}
# (name, shape, tokens, tiles, architecture, scores before experts)
SHAPES = [
    ("qwen3-30b-a3b", MoEShape(128, 8, 2048, 768, 2), 8192, WIDE, 90, False),
    ("deepseek-v3-e64", MoEShape(64, 8, 7168, 2048, 2), 8192, DEEP, 90, False),
    ("kimi-linear-48b-a3b", MoEShape(256, 8, 2304, 1024, 8), 8192, NARROW, 90, True),
    ("qwen3-30b-a3b-defaults", MoEShape(128, 8, 2048, 768, 2), 8192, DEFAULTS, 90, False),
    ("one-rank-512-experts", MoEShape(512, 10, 2304, 128, 1), 100, WIDE, 90, False),
    ("before-hopper", MoEShape(64, 6, 2048, 1408, 2), 8192, POINTERS, 80, False),
]


def _print_rows(entry: tuple[Any, ...], *, with_small: bool, recorded: bool = False, compiled: bool = False) -> None:
    name, shape, num_tokens, tiles, arch, score_before_experts = entry
    config = KernelConfig(num_programs=132)
    config = replace(config, **{name: replace(getattr(config, name), **tiles) for name in LAUNCHES})
    options = {"score_before_experts": score_before_experts, "recorded": recorded, "compiled": compiled}
    for capture in capture_launches(shape, num_tokens, config, **options):
        kernel = capture.kernel.__name__
        if with_small or "gemm" in kernel or ("wgrad" in kernel and arch < 90):
            for launch, (_, kwargs) in enumerate(capture.launches):
                # With numerics = "fast" SwiGLU is its own, and other kernels have none.
                if compiled and (launch == 2 or "COMPILED" not in kwargs):
                    continue
                row = {"shape": name, "arch": arch, "tiles": tiles, "recorded": recorded, "compiled": compiled}
                row |= {"backward": kwargs.get("BACKWARD", False), "fast": launch == 2}
                row |= compile_launch(capture, arch, launch)
                print(json.dumps(row), flush=True)


def main() -> None:
    for index, entry in enumerate(SHAPES):
        # The small kernels hardly depend on the shape; the weight gradients have the same tiles for all of Hopper.
        _print_rows(entry, with_small=index == 0 or entry[1].ep_degree == 1)
    _print_rows(SHAPES[3], with_small=True, recorded=True)
    _print_rows(SHAPES[3], with_small=False, compiled=True)


if __name__ == "__main__":
    main()
