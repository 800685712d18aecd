"""Measures what the autotuner's model needs to know about these GPUs, and fits its constants.

python -m tools.calibrate --out my_gpu.json [--ep 2] [--shape NAME ...] [--tokens T ...]
python -m tools.calibrate --fit my_gpu.samples.json [--more FILE ...] [--left-out] --out my_gpu.json     # anywhere

Starts a process a GPU. First it times copies by numbers of programs and warps, within a GPU and across the link, then
the launches of some layers with some configurations, with balanced routing. All of it goes to OUT with the ending
.samples.json, the fitted description to OUT, for `[uniep.tune] hardware`. It prints how far the fitted model is from
each time.
"""

import argparse
import functools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import recipes  # noqa: F401  prepares the platform
from recipes.backend import open_heap
from recipes.choices import kernel_config
from recipes.config import UniEP
from recipes.launch_times import LayerInputs, compile_ahead, measure_layer, warm_up
from tools.command import check_counts, check_writable, end_with
from tools.copy_bandwidth import measure_copies, measure_memory_gbs, time_us
from tools.moe_layers import named_shapes
from tools.start_ranks import is_rank, join_ranks, start_ranks
from uniep.autotune.calibration import Calibration
from uniep.autotune.fit import Fit, Sample
from uniep.autotune.hardware import DISPATCHES, TILES, TUNED, Floats, HardwareError
from uniep.autotune.search import Choice, LaunchChoice
from uniep.kernels.config import KernelConfig, default_config
from uniep.kernels.score_grad import dots_in_kernel, launch_score_grad
from uniep.plan.layout import HeapLayout
from uniep.shapes import MoEShape, ShapeError
from uniep.symmetric.heap import SymmetricHeap

# Small and large experts, narrow and wide models: what decides a GEMM's speed, what is sent and copied, and how hot the
# GPU gets. docs/autotuner.md says how well these three predict other layers.
SHAPES = ("deepseek-ocr", "qwen3-30b-a3b", "qwen3-235b-a22b")
TOKENS = (2048, 8192, 32768)
# A call of a launch that comes late in a large layer varies by 5 to 7 % (standard deviation), with the clock.
NUM_CALLS = 9
# Options that say what is measured, and what they are when they are not given.
MEASURING = {"ep": 2, "shape": list(SHAPES), "tokens": list(TOKENS), "memory": "auto"}
# Tokens that a GPU computes before its first time is taken: it would be cool, and so clock higher.
HEATING_TOKENS = 100_000
# Programs of the tables, and (num_dispatch, num_relay, num_combine) that are timed.
PROGRAMS = (4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 132)
ROLES = (
    (16, 16, 2),
    (4, 16, 1),
    (8, 16, 2),
    (16, 8, 4),
    (16, 32, 8),
    (16, 64, 2),
    (32, 16, 2),
    (32, 48, 2),
    (24, 24, 1),
    (24, 40, 3),
)


def configurations(num_multiprocessors: int) -> Iterator[Choice]:
    """Every tile with few and with many programs that copy, and the default's tiles with all roles; only what leaves
    programs to multiply."""
    fitting = [roles for roles in ROLES if sum(roles[:2]) < num_multiprocessors]
    for tile, roles in product(TILES, (fitting[0], fitting[-2])):
        yield _choice({launch: tile for launch in TUNED}, *roles)
    default = {launch: "wide4" if launch == "up" else "narrow" for launch in TUNED}
    for roles in fitting:
        yield _choice(default, *roles)


def _choice(tiles: dict[str, str], num_dispatch: int, num_relay: int, num_combine: int) -> Choice:
    dispatch, combine = (num_dispatch, num_relay), (num_combine, 0)
    return Choice(
        {
            launch: LaunchChoice(tile, *(dispatch if launch in DISPATCHES else combine), predicted_us=0.0)
            for launch, tile in tiles.items()
        }
    )


def samples_of(shape: MoEShape, num_tokens: int, choice: Choice, times_us: dict[str, float]) -> list[Sample]:
    """What one measured layer says: its launches, and the steps without a configuration."""
    found = []
    for step in ("exchange", "plan", "wgrad"):
        found.append(Sample(shape, num_tokens, step, round(times_us[step], 2)))
    for name, launch in choice.launches.items():
        us = round(times_us[name], 2)
        found.append(Sample(shape, num_tokens, name, us, launch.tile, launch.num_link, launch.num_local))
    return found


def measure(shape: MoEShape, num_tokens: int, heap: SymmetricHeap) -> list[Sample]:
    base = default_config(heap.device)
    inputs = LayerInputs.draw(heap, num_tokens)
    found = []
    choices = list(configurations(base.num_programs))
    configs = [kernel_config(choice, base) for choice in choices]
    compile_ahead(inputs, heap, [base, *configs])
    heat(inputs, heap, base)
    for choice, config in zip(choices, configs, strict=True):
        warm_up(inputs, heap, config)
        times_us, _ = measure_layer(inputs, heap, config, num_calls=NUM_CALLS, group=dist.group.WORLD)
        found += samples_of(shape, num_tokens, choice, times_us)
    if dots_in_kernel(num_tokens, shape.top_k, shape.dim):
        found.append(Sample(shape, num_tokens, "scores", _score_grad_us(inputs, shape)))
    return found


def heat(inputs: LayerInputs, heap: SymmetricHeap, config: KernelConfig) -> list[Tensor]:
    """Calls until the GPUs are warm. Returns the results of one."""
    warm_up(inputs, heap, config)
    num_calls = -(-HEATING_TOKENS // len(inputs.x_TD))
    return measure_layer(inputs, heap, config, num_calls=num_calls, group=dist.group.WORLD)[1]


def _score_grad_us(inputs: LayerInputs, shape: MoEShape) -> float:
    num_tokens, dim = inputs.grad_TD.shape
    y_TKD = torch.randn(num_tokens, shape.top_k, dim, device=inputs.grad_TD.device, dtype=torch.bfloat16)
    grad_scores_TK = torch.empty_like(inputs.scores_TK)
    call = functools.partial(launch_score_grad, inputs.grad_TD, y_TKD, grad_scores_TK)
    return round(time_us(call, inputs.grad_TD.device), 2)


def work(options: argparse.Namespace) -> int:
    """One rank."""
    start = time.perf_counter()
    device = join_ranks()
    uniep = replace(UniEP(), symmetric_memory=options.memory)
    shapes = named_shapes(options.shape, ep_degree=options.ep).values()
    properties = torch.cuda.get_device_properties(device)
    memory_gbs = measure_memory_gbs(device)
    samples: list[Sample] = []
    tables = None
    for shape in shapes:
        heap, _ = open_heap(HeapLayout(shape, max(options.tokens), num_kept=1), dist.group.WORLD, device, uniep)
        with heap:
            if tables is None:
                programs = [n for n in PROGRAMS if n <= properties.multi_processor_count]
                tables = measure_copies(heap, warps=(4, 8), programs=programs)
            for num_tokens in options.tokens:
                samples += measure(shape, num_tokens, heap)
            torch.cuda.synchronize()
            dist.barrier()
        torch.cuda.empty_cache()
        measured = Calibration(
            properties.name,
            properties.multi_processor_count,
            memory_gbs,
            *tables,
            tuple(samples),
            source=f"python -m tools.calibrate on {options.ep} GPUs, {time.strftime('%Y-%m-%d')}",
        )
        if dist.get_rank() == 0:
            # After each, so that --fit can go on from what a stopped calibration has measured.
            measured.save(samples_path(options.out))
            print(f"measured {shape} at {options.tokens} tokens, {time.perf_counter() - start:.0f} s", flush=True)
    if dist.get_rank() == 0:
        finish(measured, options.out)
    dist.destroy_process_group()
    return 0


def samples_path(out: Path) -> Path:
    return out.with_suffix(".samples.json")


def finish(measured: Calibration, out: Path) -> None:
    fitted = measured.fitted()
    fitted.hardware.save(out)
    for line in report(measured, fitted):
        print(line)
    print(f"{out}: for [uniep.tune] hardware")


def report(measured: Calibration, fitted: Fit) -> list[str]:
    """Errors of the fitted model, a line a step, and the samples that it misses by the most microseconds."""
    lines = errors_by_step(measured, fitted.errors)
    pairs = zip(fitted.errors, measured.samples, strict=True)
    worst = sorted(pairs, key=lambda pair: -abs(pair[0]) * pair[1].us)[:5]
    for error, s in worst:
        what = f"{s.step} {s.tile} {s.num_link}+{s.num_local}, {s.us:.0f} us, T = {s.num_tokens}, {s.shape}"
        lines.append(f"  {100 * error:+6.1f} %: {what}")
    if fitted.hardware.assumed:
        lines.append(f"not decided by these times, as assumed: {', '.join(fitted.hardware.assumed)}")
    return lines


def errors_by_step(measured: Calibration, errors: Floats) -> list[str]:
    of_step: dict[str, list[float]] = defaultdict(list)
    for sample, error in zip(measured.samples, errors, strict=True):
        of_step[sample.step].append(abs(error))
    return [
        f"{step:10} {len(errors):4} times, mean error {100 * statistics.fmean(errors):5.2f} %, "
        f"largest {100 * max(errors):5.2f} %"
        for step, errors in of_step.items()
    ]


def _check(options: argparse.Namespace) -> None:
    if not options.fit and (options.more or options.left_out):
        raise argparse.ArgumentTypeError("--more and --left-out must come with --fit, got none")
    if options.fit and (given := [name for name in MEASURING if getattr(options, name) is not None]):
        raise argparse.ArgumentTypeError(f"--{given[0]} must come without --fit, which measures nothing")
    for path in (options.fit, *options.more) if options.fit else ():
        if options.out.resolve() == path.resolve():
            raise argparse.ArgumentTypeError(
                f"--out must be another file than those of --fit and --more, got {options.out}"
            )
    check_writable("--out", options.out)
    if not options.fit:
        check_writable("--out with the ending .samples.json", samples_path(options.out))
    check_counts(tokens=options.tokens or [])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("hardware.json"), help="file to write (hardware.json)")
    parser.add_argument("--ep", type=int, help="GPUs of a group (2)")
    parser.add_argument("--shape", nargs="+", help="names of benchmarks/moe_shapes.toml; without it three")
    parser.add_argument("--tokens", type=int, nargs="+", help="of a rank (2048 8192 32768)")
    parser.add_argument("--memory", choices=("auto", "nvshmem", "torch"), help="symmetric memory")
    parser.add_argument("--fit", type=Path, help="samples of an earlier calibration: fit again, measure nothing")
    parser.add_argument(
        "--more", type=Path, nargs="+", default=[], help="with --fit: further samples, as of tools.tune"
    )
    parser.add_argument("--left-out", action="store_true", help="with --fit: predict each layer by the others' fit too")
    options = parser.parse_args(argv)
    try:
        _check(options)
        for name, value in MEASURING.items():
            if getattr(options, name) is None:
                setattr(options, name, value)
        if options.fit:
            measured = Calibration.load(options.fit)
            others = [Calibration.load(path) for path in options.more]
            gpu = (measured.name, measured.num_multiprocessors)
            if wrong := [found for one in others if (found := (one.name, one.num_multiprocessors)) != gpu]:
                raise HardwareError(f"--more must be of the GPU of --fit, {gpu}, got {wrong[0]}")
            measured = replace(measured, samples=tuple(s for one in (measured, *others) for s in one.samples))
            num_layers = len({sample.shape for sample in measured.samples})
            if options.left_out and num_layers < 2:
                raise HardwareError(f"--left-out must have samples of two layers or more, got {num_layers}")
        else:
            named_shapes(options.shape, ep_degree=options.ep)
    except (ShapeError, HardwareError, argparse.ArgumentTypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.fit:
        finish(measured, options.out)
        if options.left_out:
            print("each layer by the fit of the others:")
            print("\n".join(errors_by_step(measured, measured.left_out_errors())))
        return 0
    if not 2 <= options.ep <= torch.cuda.device_count():
        print(f"error: --ep must be 2 to the GPUs of this machine = {torch.cuda.device_count()}, got {options.ep}: "
              "a calibration needs GPUs and the link between them", file=sys.stderr)  # fmt: skip
        return 2
    return work(options) if is_rank() else start_ranks("tools.calibrate", options.ep, argv)


if __name__ == "__main__":
    end_with(main)
