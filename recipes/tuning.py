"""The autotuner at step time: which configuration of the kernels a number of tokens runs with, and whether it still
fits.

The first rank of the expert-parallel group chooses for all buckets before the first step, the others take its choice,
and all tiles that any bucket may need are compiled there: no step stalls later. When measured and predicted times part
for long, the first rank searches again, among the compiled tiles. The results' bits never depend on a choice.
"""

import itertools
import pickle
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.tools.logging import logger

from recipes.choices import (
    Buckets,
    candidates_to_measure,
    choice_of,
    choose_by_measuring,
    choose_by_model,
    describe,
    find_hardware,
    fixed_by_hand,
    kernel_config,
    tuned_space,
)
from recipes.config import Tune
from recipes.launch_times import LayerInputs, compile_ahead, measure_layer, warm_up
from recipes.records import commit, versions
from recipes.step_timer import record_event
from uniep.autotune.cache import CacheKey, load_choices, store_choices
from uniep.autotune.fit import RESOURCES, Sample, fit
from uniep.autotune.hardware import TILES, TUNED, Hardware
from uniep.autotune.search import Choice, LaunchChoice, Space, kernel_space, predict_choice, search
from uniep.autotune.watch import Watch
from uniep.autotune.workload import Workload
from uniep.kernels.config import KernelConfig
from uniep.layer import FORWARD_STEPS, fused_moe
from uniep.numerics import STOCK, Numerics
from uniep.shapes import MoEShape
from uniep.symmetric.heap import SymmetricHeap

# How far, in natural logarithms, the link, the memory or the Tensor Cores may be from the calibration when a bucket is
# tuned again.
_DRIFT_PRIOR = 0.4
# Tokens of the calls that only compile: so many that the sums take the kernels that they take from there on. And timed
# calls of a configuration.
_WARM_UP_TOKENS = 1024
_NUM_TIMED = 5


_num_agreements = itertools.count()


def agree_through(group: dist.ProcessGroup | None) -> Callable[[Any], Any]:
    """A function that all ranks of a group call equally often and that returns what its first rank gave. All ranks of
    the group come here equally often too.

    It goes through the group's key-value store: no device waits, and a forward that checkpointing runs again may call
    it, in which a collective's tensors would be taken for the model's.
    """
    if group is None:
        return lambda value: value
    store = dist.distributed_c10d._get_process_group_store(group)
    number, indices = next(_num_agreements), itertools.count()

    def agree(value: Any) -> Any:
        key = f"uniep_tuner/{number}/{next(indices)}"
        if group.rank() != 0:
            try:
                return pickle.loads(bytes.fromhex(store.get(key).decode()))
            except RuntimeError as error:
                raise RuntimeError(
                    f"rank 0 of the expert-parallel ranks must say what the tuner chose, rank {group.rank()} got no "
                    f"word from it: {error}"
                ) from error
        store.set(key, pickle.dumps(value).hex())
        return value

    return agree


class Tuner:
    """The configuration of each bucket, watched."""

    def __init__(
        self,
        shape: MoEShape,
        buckets: Buckets,
        choices: Mapping[int, Choice],
        *,
        hardware: Hardware,
        base: KernelConfig,
        options: Tune,
        agree: Callable[[Any], Any],
        leads: bool,
        record_event: Callable[[], Any] = record_event,
    ):
        """
        Args:
            choices: of every bucket, the same on all ranks.
            base: what is no choice.
            agree: see agree_through.
            leads: whether this rank's word is the one that is taken.
            record_event: an event of the device that is recorded now, as torch.cuda.Event.
        """
        self._shape = shape
        self._buckets = buckets
        self._hardware = hardware
        self._base = base
        self._options = options
        self._agree = agree
        self._leads = leads
        self._record_event = record_event
        self._choices: dict[int, Choice] = {}
        self._configs: dict[int, KernelConfig] = {}
        for bucket, choice in choices.items():
            self._set(bucket, choice)
        used = [choice_of(base), *self._choices.values()]
        self._tiles = {launch: sorted({choice.launches[launch].tile for choice in used}) for launch in TUNED}
        self._entered: set[int] = set()
        self._num_calls = 0
        self._pending: deque[tuple[int, list[Any]]] = deque()
        self._watches = {
            bucket: Watch(share=options.watch_share, num_samples=options.watch_samples) for bucket in choices
        }
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=options.watch_samples)
        self._wish: tuple[int, Choice, Hardware, str] | None = None
        self._metrics: dict[str, float] = {}
        self._num_retuned = 0

    def configs_to_compile(self) -> list[KernelConfig]:
        """Configurations that together have every tile that a step may run with."""
        count = max(len(tiles) for tiles in self._tiles.values())
        configs = []
        for index in range(count):
            launches = {}
            for launch, tiles in self._tiles.items():
                tile = asdict(TILES[tiles[min(index, len(tiles) - 1)]])
                launches[launch] = replace(getattr(self._base, launch), **tile)
            configs.append(replace(self._base, **launches))
        return configs

    def config(self, num_tokens: int) -> KernelConfig:
        """Of a step with so many tokens. Logs a bucket when a step first enters it."""
        bucket = self._buckets.of(num_tokens)
        if bucket not in self._entered:
            self._entered.add(bucket)
            most = self._buckets.most_tokens(bucket)
            logger.info(f"Tuned for up to {most} tokens: {describe(self._choices[bucket])}")
        return self._configs[bucket]

    def facts(self) -> dict[str, Any]:
        """For the record of a run: the choice of each bucket by its largest token count."""
        return {
            "mode": self._options.mode,
            "hardware": self._hardware.name,
            "hardware_fingerprint": self._hardware.fingerprint,
            "choices": {
                str(self._buckets.most_tokens(bucket)): choice.to_json() for bucket, choice in self._choices.items()
            },
        }

    def metrics(self) -> dict[str, float]:
        """Of the last timed forward."""
        return dict(self._metrics)

    def run(self, x_TD: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
        """`uniep.layer.fused_moe` with the bucket's configuration, for any other of its options."""
        num_tokens = len(x_TD)
        on_step = self.before_call(num_tokens)
        return fused_moe(x_TD, *tensors, config=self.config(num_tokens), on_step=on_step, **options)

    def before_call(self, num_tokens: int) -> Callable[[int], None] | None:
        """Counts a forward, reads what has been timed meanwhile, and says how this one is timed, if it is."""
        every = self._options.watch_calls
        if not every:
            return None
        self._num_calls += 1
        self._read()
        if self._num_calls % (every * self._options.watch_samples) == 0:
            # All ranks make the same calls in the same order and so come here together.
            self._follow(self._agree(self._wish))
            self._wish = None
        if self._num_calls % every or not num_tokens:
            return None
        events: list[Any] = []
        self._pending.append((num_tokens, events))

        def on_step(number: int) -> None:
            events.append(self._record_event())

        return on_step

    def _read(self) -> None:
        """The times of forwards whose end the device has passed."""
        while self._pending:
            num_tokens, events = self._pending[0]
            # Fewer: no gradient was wanted. More: the rows had no room at first.
            complete = len(events) == len(FORWARD_STEPS)
            if complete and not events[-1].query():
                return
            self._pending.popleft()
            if complete:
                up, down, rest = events[FORWARD_STEPS.index("up") :]
                self._judge(num_tokens, up.elapsed_time(down) * 1e3, down.elapsed_time(rest) * 1e3)

    def _judge(self, num_tokens: int, up_us: float, down_us: float) -> None:
        bucket = self._buckets.of(num_tokens)
        work = Workload.balanced(self._shape, num_tokens)
        predicted = predict_choice(work, self._hardware, self._choices[bucket]).launches
        predicted_us = predicted["up"].predicted_us + predicted["down"].predicted_us
        self._metrics = {
            "tuner/tokens": num_tokens,
            "tuner/predicted_ms": predicted_us / 1e3,
            "tuner/measured_ms": (up_us + down_us) / 1e3,
            "tuner/times_tuned_again": self._num_retuned,
        }
        self._recent.append((num_tokens, up_us, down_us))
        watch = self._watches[bucket]
        ratio = watch.see(up_us + down_us, predicted_us)
        if ratio is not None and self._leads:
            self._wish = self._search_again(num_tokens, ratio)
        elif not watch.parts and self._wish is not None and self._wish[0] == bucket:
            self._wish = None  # what it was for is over

    def _search_again(self, num_tokens: int, ratio: float) -> tuple[int, Choice, Hardware, str]:
        """What this rank would change: link, memory and Tensor Cores are scaled so that the model says what was
        measured."""
        bucket = self._buckets.of(num_tokens)
        launches = self._choices[bucket].launches
        times = [us for tokens, *us in self._recent if tokens == num_tokens]
        samples = [
            _sample(self._shape, num_tokens, name, launches[name], statistics.median(column))
            for name, column in zip(("up", "down"), zip(*times, strict=True), strict=True)
        ]
        found = fit(self._hardware, samples, groups=RESOURCES, prior=_DRIFT_PRIOR).hardware
        scales = {
            resource: found.constants[names[0]] / self._hardware.constants[names[0]]
            for resource, names in RESOURCES.items()
        }
        scales["compute"] = 1 / scales["compute"]  # a time, where the others are rates
        assumed = ", ".join(f"{resource} x {scale:.2f}" for resource, scale in scales.items())
        why = (
            f"up and down took {ratio:.2f} of their predicted time in {self._options.watch_samples} timed forwards in "
            f"a row (now assumed, in speed: {assumed})"
        )
        return bucket, search(self._work(bucket), found, kernel_space(found, self._tiles)), found, why

    def _follow(self, wish: tuple[int, Choice, Hardware, str] | None) -> None:
        if wish is None:
            return
        bucket, choice, hardware, why = wish
        before = self._choices[bucket]
        self._hardware = hardware
        self._recent.clear()
        self._pending.clear()
        for watch in self._watches.values():
            watch.forget()
        self._num_retuned += 1
        self._set(bucket, choice)
        logger.info(
            f"Tuned again for up to {self._buckets.most_tokens(bucket)} tokens, because {why}: "
            f"{describe(self._choices[bucket])}; before: {describe(before)}"
        )

    def _set(self, bucket: int, choice: Choice) -> None:
        config = fixed_by_hand(kernel_config(choice, self._base), self._options)
        self._configs[bucket] = config
        self._choices[bucket] = predict_choice(self._work(bucket), self._hardware, choice_of(config))

    def _work(self, bucket: int) -> Workload:
        return Workload.balanced(self._shape, self._buckets.most_tokens(bucket))


def open_tuner(
    heap: SymmetricHeap,
    group: dist.ProcessGroup | None,
    *,
    base: KernelConfig,
    options: Tune,
    numerics: Numerics = STOCK,
) -> tuple[Tuner, dict[str, float]]:
    """Chooses for all buckets and compiles what they need. All ranks of the group call it together.

    Returns:
        the tuner, and the seconds that choosing and compiling took.

    Raises:
        TuneError: there is no description of this GPU.
    """
    start = time.perf_counter()
    shape, max_tokens = heap.layout.shape, heap.layout.max_tokens
    gpu = torch.cuda.get_device_properties(heap.device)
    hardware = find_hardware(options.hardware, gpu.name, gpu.multi_processor_count)
    buckets = Buckets(options.bucket_tokens, max_tokens)
    space = tuned_space(hardware, base, fast=numerics.fast)
    agree = agree_through(group)
    if options.mode == "measured":
        choices = _measured(heap, group, buckets, hardware, space, base, options, agree, numerics)
        hardware = as_measured(shape, buckets, choices, hardware)
    else:
        choices = choose_by_model(shape, buckets, hardware, space)
    choices, hardware = agree((choices, hardware))
    chosen = time.perf_counter()
    tuner = Tuner(
        shape, buckets, choices, hardware=hardware, base=base, options=options, agree=agree, leads=heap.rank == 0
    )
    inputs = LayerInputs.draw(heap, min(max_tokens, _WARM_UP_TOKENS))
    configs = tuner.configs_to_compile()
    compile_ahead(inputs, heap, configs, numerics)
    for config in configs:
        warm_up(inputs, heap, config, numerics)
    del inputs
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    choosing_s, compiling_s = chosen - start, time.perf_counter() - chosen
    logger.info(
        f"Tuner: {len(buckets.all())} buckets of {buckets.tokens} tokens chosen in {1e3 * choosing_s:.0f} ms "
        f'(mode = "{options.mode}", {hardware.name}), kernels compiled in {compiling_s:.1f} s'
    )
    return tuner, {"tuner_chose": choosing_s, "tuner_compiled": compiling_s}


def _measured(
    heap: SymmetricHeap,
    group: dist.ProcessGroup | None,
    buckets: Buckets,
    hardware: Hardware,
    space: Space,
    base: KernelConfig,
    options: Tune,
    agree: Callable[[Any], Any],
    numerics: Numerics,
) -> dict[int, Choice]:
    """From the cache of the first rank, else by timing; the first rank then keeps it."""
    shape = heap.layout.shape
    kernels = {"commit": commit(), "num_candidates": options.num_candidates, **asdict(numerics)}
    found = {name: str(value) for name, value in {**versions(), **kernels}.items()}
    key = CacheKey(shape, hardware.fingerprint, found, buckets.tokens, buckets.max_tokens)
    folder = Path(options.cache).expanduser() if options.cache is not None else None
    if folder is not None and found["commit"].endswith("+changes"):
        logger.info("Tuner: measured choices are not kept: the tree differs from its commit, and kernels may with it")
        folder = None
    kept = load_choices(folder, key) if folder is not None and heap.rank == 0 else {}
    choices: dict[int, Choice] = agree(kept)
    missing = [bucket for bucket in buckets.all() if bucket not in choices]
    if not missing:
        return {bucket: choices[bucket] for bucket in buckets.all()}
    for bucket in missing:
        num_tokens = buckets.most_tokens(bucket)
        inputs = LayerInputs.draw(heap, num_tokens)

        def times_us(choice: Choice, inputs: LayerInputs = inputs) -> dict[str, float]:
            config = kernel_config(choice, base)
            warm_up(inputs, heap, config, numerics)
            times, _ = measure_layer(inputs, heap, config, numerics, num_calls=_NUM_TIMED, group=group)
            return times

        work = Workload.balanced(shape, num_tokens)
        candidates = candidates_to_measure(work, hardware, space, options.num_candidates)
        compile_ahead(inputs, heap, [kernel_config(choice, base) for choice in candidates], numerics)
        choices[bucket] = choose_by_measuring(candidates, times_us)
        if folder is not None and heap.rank == 0:
            store_choices(folder, key, choices)
    return {bucket: choices[bucket] for bucket in buckets.all()}


def as_measured(shape: MoEShape, buckets: Buckets, choices: Mapping[int, Choice], hardware: Hardware) -> Hardware:
    """The description that predicts the measured times of the choices, so that watching compares with those."""
    samples = [
        _sample(shape, buckets.most_tokens(bucket), name, launch, launch.predicted_us)
        for bucket, choice in choices.items()
        for name, launch in choice.launches.items()
    ]
    return fit(hardware, samples, groups={name: (name,) for name in hardware.constants}).hardware


def _sample(shape: MoEShape, num_tokens: int, name: str, launch: LaunchChoice, us: float) -> Sample:
    return Sample(shape, num_tokens, name, us, launch.tile, launch.num_link, launch.num_local)
