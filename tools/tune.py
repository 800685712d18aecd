"""Predicted against measured: the autotuner's choice among the best of many measured configurations.

python -m tools.tune --shape NAME ... --ep 2 --tokens 8192 [--configs 200] [--hardware FILE] [--plot FILE.png]
python -m tools.tune --search-only [--explain]     # without a GPU: what the model chooses, and how long it takes

Starts a process a GPU. A call of the layer measures one configuration of each of its four launches at once, because
they share nothing. First a survey of all layers: configurations drawn from the whole space, the same for all layers,
with the model's choice and the default among them. Then a final: these two, the best few of the layer's survey and the
best that is one for all layers are measured in turn, round by round, so that all meet the same clocks; the medians
are compared, and the best is chosen by one half of the rounds and timed by the other. Outputs and gradients of every
configuration must equal the default's bit for bit. --samples keeps all times for `tools.calibrate --fit ... --more`.
"""

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import recipes  # noqa: F401  prepares the platform
from recipes.backend import open_heap
from recipes.choices import TuneError, choice_of, find_hardware, kernel_config
from recipes.config import UniEP
from recipes.launch_times import LayerInputs, compile_ahead, measure_layer, warm_up
from tools import tune_report
from tools.benchmark_file import write_benchmark
from tools.calibrate import heat, samples_of
from tools.command import check_counts, check_writable, end_with
from tools.moe_layers import Layer, named_shapes
from tools.pyplot import PlotError, load_pyplot
from tools.start_ranks import is_rank, join_ranks, start_ranks
from tools.tune_report import Config, Survey, Tuned, best_fixed
from uniep.autotune.calibration import Calibration
from uniep.autotune.cost_model import fixed_us, predict
from uniep.autotune.fit import Sample
from uniep.autotune.hardware import TILES, TUNED, Hardware, HardwareError, shipped
from uniep.autotune.search import Choice, LaunchChoice, explain, kernel_space, one_candidate, paper_space, search
from uniep.autotune.workload import Workload
from uniep.kernels.config import default_config
from uniep.plan.layout import HeapLayout

# Of each launch, and times that each is measured.
FINALISTS, ROUNDS = 5, 20
FIXED_STEPS = ("exchange", "plan", "wgrad")


class UnequalBitsError(RuntimeError):
    """A configuration changed a result: that must not be."""


def draw(hardware: Hardware, count: int, seed: int = 0) -> list[Choice]:
    """Configurations from the whole space of each launch, each of them once; all of it where it has no more."""
    space = kernel_space(hardware)
    generator = np.random.default_rng(seed)
    columns = {}
    for launch, candidates in space.launches.items():
        order = generator.permutation(len(candidates))
        columns[launch] = [order[index % len(order)] for index in range(count)]
    names = tuple(TILES)
    return [
        Choice(
            {
                launch: LaunchChoice(
                    names[space.launches[launch].tile[rows[index]]],
                    int(space.launches[launch].num_link[rows[index]]),
                    int(space.launches[launch].num_local[rows[index]]),
                    predicted_us=0.0,
                )
                for launch, rows in columns.items()
            }
        )
        for index in range(count)
    ]


def config_of(launch: LaunchChoice) -> Config:
    return launch.tile, launch.num_link, launch.num_local


def configs_of(choice: Choice) -> dict[str, Config]:
    return {launch: config_of(one) for launch, one in choice.launches.items()}


def choice_from(configs: Mapping[str, Config]) -> Choice:
    return Choice({launch: LaunchChoice(*config, predicted_us=0.0) for launch, config in configs.items()})


Found = TypeVar("Found")
# Measures a configuration with a number of calls: step -> microseconds.
TimesUs = Callable[[Choice, int], dict[str, float]]


def survey(name: str, work: Workload, configurations: Sequence[Choice], num_calls: int, times_us: TimesUs) -> Survey:
    """Measures all configurations, of which the first is the default and the second the model's choice."""
    found: dict[str, dict[Config, list[float]]] = {launch: defaultdict(list) for launch in TUNED}
    for choice in configurations:
        times = times_us(choice, num_calls)
        for launch, config in configs_of(choice).items():
            found[launch][config].append(times[launch])
    measured_us = {launch: tune_report.medians(times) for launch, times in found.items()}
    return Survey(name, work.num_tokens, measured_us, configs_of(configurations[1]), configs_of(configurations[0]))


def final(
    work: Workload, hardware: Hardware, surveyed: Survey, fixed: Mapping[str, Config], times_us: TimesUs
) -> Tuned:
    """Measures those that matter in turn. The survey's times take no part in this: the least of many is too small.

    Args:
        fixed: launch -> the configuration that is best where one must do for all layers.
    """
    contenders: dict[str, list[Config]] = {}
    for launch, measured in surveyed.measured_us.items():
        fastest = sorted(measured, key=measured.__getitem__)[:FINALISTS]
        contenders[launch] = list(
            dict.fromkeys((surveyed.default[launch], surveyed.chosen[launch], fixed[launch], *fastest))
        )
    generator = np.random.default_rng(0)
    measured_us: dict[str, dict[Config, list[float]]] = {launch: defaultdict(list) for launch in TUNED}
    fixed_times: dict[str, list[float]] = {step: [] for step in FIXED_STEPS}
    most = max(map(len, contenders.values()))
    for _ in range(ROUNDS):
        # Each launch in an order of its own: what runs before it decides how hot it begins.
        orders = {launch: generator.permutation(most) % len(configs) for launch, configs in contenders.items()}
        for turn in range(most):
            now = {launch: configs[orders[launch][turn]] for launch, configs in contenders.items()}
            times = times_us(choice_from(now), 1)
            for launch, config in now.items():
                measured_us[launch][config].append(times[launch])
            for step in FIXED_STEPS:
                fixed_times[step].append(times[step])
    predicted_us = {
        launch: {
            config: float(predict(launch, work, hardware, one_candidate(*config)).total_us[0])
            for config in surveyed.measured_us[launch]
        }
        for launch in TUNED
    }
    return Tuned(
        surveyed,
        measured_us,
        predicted_us,
        {step: statistics.median(us) for step, us in fixed_times.items()},
        {step: sum(fixed_us(step, work, hardware).values()) for step in FIXED_STEPS},
    )


def check_bits(want: list[Tensor], got: list[Tensor], choice: Choice, group: dist.ProcessGroup | None) -> None:
    """Raises UnequalBitsError on every rank of the group where one has other bits: a rank that went on would wait."""
    names = ("out", "grad_x", "grad_scores", "grad_w1", "grad_w2", "grad_w3")
    unequal = [name for name, one, other in zip(names, want, got, strict=True) if not torch.equal(one, other)]
    anywhere = torch.tensor(len(unequal), device=got[0].device)
    if group is not None:
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=group)
    if anywhere:
        what = ", ".join(unequal) or "results of another rank"
        raise UnequalBitsError(f"{what} must be those of the default configuration, got others with {choice}")


class Bench:
    """All layers of a run on this rank, each measured twice; all ranks make the same calls."""

    def __init__(self, options: argparse.Namespace, device: torch.device):
        self._options = options
        self._device = device
        self.samples: list[Sample] = []

    def run(self, layer: Layer, measure: Callable[[TimesUs], Found]) -> Found:
        """What measure finds on GPUs that are warm already."""
        uniep = replace(UniEP(), symmetric_memory=self._options.memory)
        layout = HeapLayout(layer.shape, layer.num_tokens, num_kept=1)
        heap, _ = open_heap(layout, dist.group.WORLD, self._device, uniep)
        base = default_config(self._device)
        compiled: set[tuple[str, str]] = set()
        with heap:
            inputs = LayerInputs.draw(heap, layer.num_tokens)
            of_tiles = [kernel_config(choice_from({launch: (tile, 1, 1) for launch in TUNED}), base) for tile in TILES]
            compile_ahead(inputs, heap, [base, *of_tiles])
            want = heat(inputs, heap, base)

            def times_us(choice: Choice, num_calls: int) -> dict[str, float]:
                config = kernel_config(choice, base)
                tiles = {(launch, tile) for launch, (tile, *_) in configs_of(choice).items()}
                if not tiles <= compiled:
                    compiled.update(tiles)
                    warm_up(inputs, heap, config)
                times, results = measure_layer(inputs, heap, config, num_calls=num_calls, group=dist.group.WORLD)
                check_bits(want, results, choice, dist.group.WORLD)
                self.samples += samples_of(layer.shape, layer.num_tokens, choice, times)
                return times

            found = measure(times_us)
            torch.cuda.synchronize()
            dist.barrier()
        return found


def work_on_rank(options: argparse.Namespace, argv: list[str]) -> int:
    device = join_ranks()
    try:
        hardware = find_hardware(
            options.hardware,
            torch.cuda.get_device_name(device),
            torch.cuda.get_device_properties(device).multi_processor_count,
        )
    except TuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bench = Bench(options, device)
    default = choice_of(default_config(device))
    drawn = draw(hardware, options.configs)
    start = time.perf_counter()

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            print(f"{time.perf_counter() - start:4.0f} s  {text}", flush=True)

    surveys: list[Survey] = []
    works = [(layer, Workload.balanced(layer.shape, layer.num_tokens)) for layer in layers(options)]
    for layer, work in works:
        chosen = search(work, hardware, kernel_space(hardware))
        configurations = (default, chosen, *drawn)
        surveys.append(bench.run(layer, partial(survey, layer.name, work, configurations, options.calls)))
        torch.cuda.empty_cache()
        say(f"surveyed {layer.name}, {layer.num_tokens} tokens")
    keep(options, argv, hardware, bench.samples)
    fixed = best_fixed(surveys)
    tuned: list[Tuned] = []
    for (layer, work), surveyed in zip(works, surveys, strict=True):
        tuned.append(bench.run(layer, partial(final, work, hardware, surveyed, fixed)))
        torch.cuda.empty_cache()
        for row in tune_report.rows(tuned[-1:], fixed):
            say(tune_report.line(row))
        if dist.get_rank() == 0:
            write(options, argv, hardware, tuned, fixed)
    keep(options, argv, hardware, bench.samples)
    if dist.get_rank() == 0:
        if options.plot:
            tune_report.plot(tuned, options.plot)
        print(json.dumps(tune_report.summary(tune_report.rows(tuned, fixed))))
    dist.destroy_process_group()
    return 0


def keep(options: argparse.Namespace, argv: list[str], hardware: Hardware, samples: list[Sample]) -> None:
    if options.samples and dist.get_rank() == 0:
        Calibration(
            hardware.name,
            hardware.num_multiprocessors,
            hardware.memory_gbs,
            hardware.link,
            hardware.copy,
            tuple(samples),
            "python -m tools.tune " + " ".join(argv),
        ).save(options.samples)


def write(
    options: argparse.Namespace, argv: list[str], hardware: Hardware, tuned: list[Tuned], fixed: Mapping[str, Config]
) -> None:
    rows = tune_report.rows(tuned, fixed)
    figures = {
        "summary": tune_report.summary(rows),
        "best_fixed": {launch: list(config) for launch, config in fixed.items()},
        "rows": rows,
        "hardware": {"source": hardware.source, "fingerprint": hardware.fingerprint},
    }
    write_benchmark(options.out, "tools.tune", argv, figures)


def layers(options: argparse.Namespace) -> list[Layer]:
    """The chosen layers with each number of tokens. Raises ShapeError."""
    shapes = named_shapes(options.shape, ep_degree=options.ep, num_experts=options.experts)
    return [Layer(name, shape, num_tokens) for num_tokens in options.tokens for name, shape in shapes.items()]


def check_space(path: Path) -> None:
    """Raises HardwareError where there is nothing to choose among."""
    hardware = Hardware.load(path)
    try:
        kernel_space(hardware)
    except HardwareError as error:
        raise HardwareError(f"{path}: {error}") from None


def search_only(options: argparse.Namespace) -> int:
    """What the model chooses, and the time of a search on this CPU."""
    hardware = Hardware.load(Path(options.hardware)) if options.hardware is not None else next(iter(shipped()))
    print(f"{hardware.name}: {hardware.source}")
    spaces = {"our kernels": kernel_space(hardware), "the paper's space": paper_space(hardware)}
    times: dict[str, list[float]] = {name: [] for name in spaces}
    for layer in layers(options):
        work = Workload.balanced(layer.shape, layer.num_tokens)
        for name, space in spaces.items():
            for _ in range(5):
                start = time.perf_counter()
                search(work, hardware, space)
                times[name].append(1e3 * (time.perf_counter() - start))
        choice = search(work, hardware, spaces["our kernels"])
        chosen = ", ".join(f"{name} {'+'.join(map(str, config_of(one)))}" for name, one in choice.launches.items())
        print(f"{layer.name:22} T{layer.num_tokens:<6} {choice.predicted_us:9.0f} us  {chosen}")
        if options.explain:
            print("\n".join("    " + text for text in explain(work, hardware, choice)))
    for name, found in times.items():
        print(f"search over {name}: median {statistics.median(found):.2f} ms, largest {max(found):.2f} ms")
    return 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep", type=int, default=2, help="expert-parallel ranks, a GPU each (2)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192], help="tokens of a rank (8192)")
    parser.add_argument("--shape", nargs="+", help="names of benchmarks/moe_shapes.toml; without it all")
    parser.add_argument("--experts", type=int, help="cut the shapes to this many experts")
    parser.add_argument("--configs", type=int, default=200, help="configurations to draw for a launch (200)")
    parser.add_argument("--calls", type=int, default=3, help="timed calls of a configuration (3)")
    parser.add_argument("--hardware", help="a file of tools.calibrate; without it the package's own")
    parser.add_argument("--memory", choices=("auto", "nvshmem", "torch"), default="auto", help="symmetric memory")
    parser.add_argument("--out", type=Path, help="JSON file to write (benchmarks/tune_epW.json)")
    parser.add_argument("--plot", type=Path, help="PNG of predicted against measured to write")
    parser.add_argument("--samples", type=Path, help="keep all times for tools.calibrate --fit FILE --more")
    parser.add_argument("--search-only", action="store_true", help="ask the model only; needs no GPU")
    parser.add_argument("--explain", action="store_true", help="with --search-only: every term")
    options = parser.parse_args(argv)
    try:
        given = [name for name in ("out", "plot", "samples") if getattr(options, name) is not None]
        if options.search_only and given:
            raise argparse.ArgumentTypeError(f"--{given[0]} must come without --search-only, which measures nothing")
        if options.explain and not options.search_only:
            raise argparse.ArgumentTypeError("--explain must come with --search-only, got none")
        options.out = options.out or Path(f"benchmarks/tune_ep{options.ep}.json")
        check_counts(tokens=options.tokens, configs=[options.configs], calls=[options.calls])
        outputs = {name: path for name in ("out", "plot", "samples") if (path := getattr(options, name)) is not None}
        if len({path.resolve() for path in outputs.values()}) < len(outputs):
            raise argparse.ArgumentTypeError(f"--{', --'.join(outputs)} must be different files")
        for name, path in outputs.items() if not options.search_only else ():
            check_writable(f"--{name}", path)
        if options.plot:
            load_pyplot("--plot")
        for layer in layers(options):
            Workload.balanced(layer.shape, layer.num_tokens)
        if options.hardware is not None:
            check_space(Path(options.hardware))
    except (ValueError, argparse.ArgumentTypeError, PlotError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.search_only:
        return search_only(options)
    if torch.cuda.device_count() < options.ep:
        print(f"error: --ep must be at most the GPUs of this machine = {torch.cuda.device_count()}, got {options.ep}: "
              "measuring needs GPUs, --search-only does not", file=sys.stderr)  # fmt: skip
        return 2
    return work_on_rank(options, argv) if is_rank() else start_ranks("tools.tune", options.ep, argv)


if __name__ == "__main__":
    end_with(main)
