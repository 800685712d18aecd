"""The tuner at step time, on a clock of the test: buckets, compiled tiles, watching, agreement of the ranks."""

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from recipes.choices import (
    Buckets,
    TuneError,
    candidates_to_measure,
    choice_of,
    choose_by_measuring,
    choose_by_model,
    find_hardware,
    fixed_by_hand,
    kernel_config,
    resolve_tune,
    tuned_space,
)
from recipes.config import CombineRoles, DispatchRoles, Tune
from recipes.tuning import Tuner, agree_through, as_measured
from tests.processes import run_ranks
from uniep.autotune.fit import RESOURCES
from uniep.autotune.hardware import TILES, TUNED, Hardware, shipped
from uniep.autotune.search import kernel_space, predict_choice, search
from uniep.autotune.workload import Workload
from uniep.kernels.config import KernelConfig
from uniep.layer import FORWARD_STEPS
from uniep.shapes import MoEShape

SHAPE = MoEShape(128, 8, 2048, 768, 2)
BUCKETS = Buckets(4096, 10_000)
BASE = KernelConfig(num_programs=132)
OPTIONS = Tune(mode="model", watch_calls=2, watch_samples=3, watch_share=0.25)


@pytest.fixture(scope="module")
def h200() -> Hardware:
    return next(iter(shipped()))


@dataclass
class Clock:
    """Microseconds on a device that works only when it is told to."""

    now_us: float = 0.0
    done: bool = True


@dataclass
class FakeEvent:
    clock: Clock
    at_us: float = field(init=False)

    def __post_init__(self) -> None:
        self.at_us = self.clock.now_us

    def query(self) -> bool:
        return self.clock.done

    def elapsed_time(self, later: "FakeEvent") -> float:
        """Milliseconds, as of CUDA's events."""
        assert self.clock.done, "asked for a time that is not there yet"
        return (later.at_us - self.at_us) / 1e3


def open_tuner(
    hardware: Hardware, clock: Clock, *, options: Tune = OPTIONS, agree: Any = lambda value: value, leads: bool = True
) -> Tuner:
    return Tuner(
        SHAPE,
        BUCKETS,
        choose_by_model(SHAPE, BUCKETS, hardware, kernel_space(hardware)),
        hardware=hardware,
        base=BASE,
        options=options,
        agree=agree,
        leads=leads,
        record_event=lambda: FakeEvent(clock),
    )


def forward(tuner: Tuner, clock: Clock, num_tokens: int, times_us: dict[str, float], num_steps: int = 5) -> None:
    """A forward whose launches take so long."""
    on_step = tuner.before_call(num_tokens)
    if on_step is not None:
        for number in range(num_steps):
            on_step(number)
            clock.now_us += times_us.get(FORWARD_STEPS[number % len(FORWARD_STEPS)], 10.0)


def times_of(hardware: Hardware, num_tokens: int, config: KernelConfig) -> dict[str, float]:
    """What the launches take on a machine that is just as described."""
    choice = predict_choice(Workload.balanced(SHAPE, num_tokens), hardware, choice_of(config))
    return {launch: found.predicted_us for launch, found in choice.launches.items()}


def scaled(hardware: Hardware, resource: str, factor: float) -> Hardware:
    return hardware.with_constants({name: factor * hardware.constants[name] for name in RESOURCES[resource]})


@pytest.mark.parametrize(
    ("num_tokens", "bucket"), [(0, 1), (1, 1), (4096, 1), (4097, 2), (8192, 2), (8193, 3), (10_000, 3)]
)
def test_bucket_of_a_number_of_tokens(num_tokens, bucket):
    assert BUCKETS.of(num_tokens) == bucket


def test_buckets_end_at_the_most_tokens():
    assert [BUCKETS.most_tokens(bucket) for bucket in BUCKETS.all()] == [4096, 8192, 10_000]
    assert list(Buckets(4096, 100).all()) == [1]
    assert Buckets(4096, 100).most_tokens(1) == 100


def test_each_bucket_has_the_models_choice(h200, caplog):
    tuner = open_tuner(h200, Clock())
    caplog.set_level(logging.INFO)
    for num_tokens, tuned_for in ((5000, 8192), (8192, 8192), (100, 4096), (10_000, 10_000), (7000, 8192)):
        want = search(Workload.balanced(SHAPE, tuned_for), h200, kernel_space(h200))
        assert tuner.config(num_tokens) == kernel_config(want, BASE)
    entered = [record.getMessage() for record in caplog.records if "Tuned for up to" in record.getMessage()]
    assert [text.split()[4] for text in entered] == ["8192", "4096", "10000"]
    choices = tuner.facts()["choices"]
    assert list(choices) == ["4096", "8192", "10000"]
    assert f"({choices['8192']['launches']['up']['predicted_us']:.0f} us)" in entered[0]


def test_all_tiles_of_all_steps_are_compiled_first(h200):
    """Whatever the token count and whatever happens later."""
    everything = replace(h200, assumed=())
    tuner = open_tuner(everything, Clock())

    def tile(config: KernelConfig, launch: str) -> str:
        return choice_of(config).launches[launch].tile

    compiled = {launch: {tile(config, launch) for config in tuner.configs_to_compile()} for launch in TUNED}
    for num_tokens in range(1, 10_001, 500):
        for launch in TUNED:
            assert tile(tuner.config(num_tokens), launch) in compiled[launch]
    for launch in TUNED:
        assert choice_of(BASE).launches[launch].tile in compiled[launch]


def test_times_as_predicted_change_nothing(h200):
    clock = Clock()
    tuner = open_tuner(h200, clock)
    before = tuner.config(8192)
    for index in range(60):
        noise = 1.0 + 0.2 * (-1) ** index
        times = {launch: us * noise for launch, us in times_of(h200, 8192, before).items()}
        forward(tuner, clock, 8192, times)
    assert tuner.config(8192) == before
    assert tuner.metrics()["tuner/times_tuned_again"] == 0
    assert tuner.metrics()["tuner/measured_ms"] == pytest.approx(tuner.metrics()["tuner/predicted_ms"], rel=0.21)


def test_a_slower_link_is_noticed_and_tuned_for(h200, caplog):
    clock = Clock()
    tuner = open_tuner(h200, clock)
    before, other = tuner.config(8192), tuner.config(4096)
    slow = scaled(h200, "link", 0.4)
    caplog.set_level(logging.INFO)
    for _ in range(40):
        forward(tuner, clock, 8192, times_of(slow, 8192, tuner.config(8192)))
    again = [record.getMessage() for record in caplog.records if "Tuned again" in record.getMessage()]
    assert len(again) == 1, again  # the scaled constants then say what is measured
    assert "for up to 8192 tokens, because up and down took 1." in again[0]
    assert "in 3 timed forwards in a row" in again[0]
    after = tuner.config(8192)
    assert after != before
    assert sum(times_of(slow, 8192, after).values()) < sum(times_of(slow, 8192, before).values())
    assert tuner.config(4096) == other
    assert tuner.metrics()["tuner/times_tuned_again"] == 1
    for launch in TUNED:
        tiles = {choice_of(config).launches[launch].tile for config in tuner.configs_to_compile()}
        assert choice_of(after).launches[launch].tile in tiles


def test_samples_of_before_do_not_count_once_it_is_tuned_again(h200):
    """The wish comes long before the ranks follow it; what parted in between parted from other predictions."""
    clock, slow, num_late = Clock(), scaled(h200, "link", 0.4), 0
    tuner = open_tuner(h200, clock, options=replace(OPTIONS, watch_calls=1, watch_samples=20))
    while num_late < 3:
        on_step = tuner.before_call(8192)
        times = times_of(slow, 8192, tuner.config(8192))
        is_late = tuner.facts()["hardware_fingerprint"] != h200.fingerprint
        num_late += is_late
        for number, name in enumerate(FORWARD_STEPS):
            on_step(number)
            clock.now_us += times.get(name, 10.0) * (2 if is_late else 1)
    assert tuner._wish is None


def test_a_wish_ends_with_its_cause(h200):
    clock = Clock()
    tuner = open_tuner(h200, clock, options=replace(OPTIONS, watch_calls=2, watch_samples=20))
    slow = scaled(h200, "link", 0.4)
    for index in range(80):
        machine = slow if index < 42 else h200
        forward(tuner, clock, 8192, times_of(machine, 8192, tuner.config(8192)))
    tuner.before_call(8192)
    assert tuner.metrics()["tuner/times_tuned_again"] == 0


def test_more_tokens_than_the_most_take_the_last_bucket(h200):
    tuner = open_tuner(h200, Clock())
    assert tuner.config(10**6) == tuner.config(10_000)  # and the layer says what is wrong


def test_reading_waits_for_nothing(h200):
    """While the device has not passed the last event, no time is asked for (FakeEvent would fail)."""
    clock = Clock(done=False)
    tuner = open_tuner(h200, clock)
    for _ in range(12):
        forward(tuner, clock, 8192, times_of(h200, 8192, tuner.config(8192)))
    assert tuner.metrics() == {}
    clock.done = True
    tuner.before_call(8192)
    assert tuner.metrics()["tuner/tokens"] == 8192


@pytest.mark.parametrize("num_steps", [0, 7])
def test_forwards_without_gradients_or_room_are_not_judged(num_steps, h200):
    clock = Clock()
    tuner = open_tuner(h200, clock)
    for _ in range(30):
        forward(tuner, clock, 8192, {"up": 1e6, "down": 1e6}, num_steps)
    assert tuner.metrics() == {}


def test_every_so_many_forwards_are_timed(h200):
    tuner = open_tuner(h200, Clock(), options=replace(OPTIONS, watch_calls=7))
    timed = [tuner.before_call(8192) is not None for _ in range(28)]
    assert [index + 1 for index, one in enumerate(timed) if one] == [7, 14, 21, 28]
    off = open_tuner(h200, Clock(), options=replace(OPTIONS, watch_calls=0))
    assert not any(off.before_call(8192) for _ in range(20))


def test_all_ranks_follow_the_first(h200):
    """A rank that sees other times, or none, ends with the same configurations."""
    clocks = [Clock(), Clock()]
    said: list[Any] = []
    replies = iter(said)

    def first(value: Any) -> Any:
        said.append(value)
        return value

    leader = open_tuner(h200, clocks[0], agree=first)
    follower = open_tuner(h200, clocks[1], agree=lambda value: next(replies), leads=False)
    slow, fast = scaled(h200, "link", 0.4), scaled(h200, "compute", 0.5)
    for _ in range(40):
        for tuner, clock, machine in ((leader, clocks[0], slow), (follower, clocks[1], fast)):
            forward(tuner, clock, 8192, times_of(machine, 8192, tuner.config(8192)))
        assert leader.config(8192) == follower.config(8192)
    assert any(said)
    assert leader.config(8192) != open_tuner(h200, Clock()).config(8192)


def broadcast() -> tuple[list[Any], list[int]]:
    dist.init_process_group("gloo")
    agree = agree_through(dist.group.WORLD)
    rank = dist.get_rank()
    heard = [agree(("word of", rank)), agree(None), agree({"choice": rank})]

    def recomputed(x: torch.Tensor) -> torch.Tensor:
        if len(heard) > 3:  # only when it runs again
            heard.append(agree(["again", rank]))
        else:
            heard.append(None)
        return x.exp()

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)

    x = torch.ones(3, requires_grad=True)
    checkpoint(recomputed, x, use_reentrant=False, context_fn=contexts).sum().backward()
    dist.destroy_process_group()
    return heard, [rank]


def test_ranks_of_a_group_agree():
    for heard, _ in run_ranks(broadcast, num_ranks=2):
        assert heard == [("word of", 0), None, {"choice": 0}, None, ["again", 0]]
    assert agree_through(None)(3) == 3


def test_measured_is_the_fastest_of_the_models_best(h200):
    work = Workload.balanced(SHAPE, 8192)
    tried = []

    def times_us(choice: Any) -> dict[str, float]:
        tried.append(choice)
        # The model's third is the fastest here.
        return dict.fromkeys(TUNED, 100.0 if len(tried) == 3 else 200.0 + len(tried))

    candidates = candidates_to_measure(work, h200, kernel_space(h200), 8)
    chosen = choose_by_measuring(candidates, times_us)
    assert tried == candidates
    for launch, found in chosen.launches.items():
        assert found.predicted_us == 100.0
        third = tried[2].launches[launch]
        assert (found.tile, found.num_link, found.num_local) == (third.tile, third.num_link, third.num_local)
    assert len({str(choice.launches["up"]) for choice in tried}) == 8


def test_watching_compares_with_what_was_measured(h200):
    """With mode = "measured" on a GPU that is 30 % slower than its description says."""
    slow = scaled(h200, "compute", 1.3)
    choices = {
        bucket: predict_choice(Workload.balanced(SHAPE, BUCKETS.most_tokens(bucket)), slow, choice)
        for bucket, choice in choose_by_model(SHAPE, BUCKETS, h200, kernel_space(h200)).items()
    }
    adapted = as_measured(SHAPE, BUCKETS, choices, h200)
    for bucket, choice in choices.items():
        again = predict_choice(Workload.balanced(SHAPE, BUCKETS.most_tokens(bucket)), adapted, choice)
        assert again.predicted_us == pytest.approx(choice.predicted_us, rel=0.02)
    assert adapted.assumed == h200.assumed


def test_fast_numerics_keep_the_backwards_tiles(h200):
    """Whose columns decide how the gradient of the scores is summed."""
    everything = replace(h200, assumed=())
    for fast in (False, True):
        space = tuned_space(everything, BASE, fast=fast)
        tiles = {launch: {tuple(TILES)[i] for i in space.launches[launch].tile} for launch in TUNED}
        assert tiles["up"] == tiles["down"] == set(TILES)
        assert tiles["down_grad"] == ({"narrow"} if fast else set(TILES))
        assert tiles["up_grad"] == ({"narrow"} if fast else set(TILES))


def test_a_configuration_is_read_as_a_choice(h200):
    choice = search(Workload.balanced(SHAPE, 8192), h200, kernel_space(h200))
    config = kernel_config(choice, BASE)
    assert predict_choice(Workload.balanced(SHAPE, 8192), h200, choice_of(config)) == choice
    with pytest.raises(ValueError, match="up must have a tile of"):
        choice_of(replace(BASE, up=replace(BASE.up, block_n=64)))


def test_by_hand():
    options = Tune(up=DispatchRoles("narrow", 8, 120), down=CombineRoles(num_combine=1))
    config = fixed_by_hand(BASE, options)
    assert (config.up.num_dispatch, config.up.num_relay, config.up.block_n, config.up.occupancy) == (8, 120, 128, 2)
    assert config.down == replace(BASE.down, num_combine=1)
    assert (config.down_grad, config.up_grad) == (BASE.down_grad, BASE.up_grad)
    assert fixed_by_hand(BASE, Tune()) == BASE


def test_by_hand_wins_over_the_model(h200):
    options = replace(OPTIONS, up=DispatchRoles("wide4", 20, 40))
    tuner = open_tuner(h200, Clock(), options=options)
    for num_tokens in (100, 8192):
        config = tuner.config(num_tokens)
        assert (config.up.num_dispatch, config.up.num_relay) == (20, 40)
        assert config.down != BASE.down or config.down_grad != BASE.down_grad
    predicted = tuner.facts()["choices"]["8192"]["launches"]["up"]["predicted_us"]
    assert predicted == pytest.approx(times_of(h200, 8192, tuner.config(8192))["up"])


def test_hardware_of_this_gpu(tmp_path, h200):
    assert find_hardware(None, "NVIDIA H200", 132) == h200
    with pytest.raises(TuneError, match=r'must name a file of `python -m tools.calibrate`.*got none on "NVIDIA B200"'):
        find_hardware(None, "NVIDIA B200", 132)
    path = tmp_path / "b200.json"
    replace(h200, name="NVIDIA B200").save(path)
    assert find_hardware(str(path), "NVIDIA B200", 132).name == "NVIDIA B200"
    with pytest.raises(TuneError, match=r'must be a file of this GPU, "NVIDIA H200", got .* of "NVIDIA B200"'):
        find_hardware(str(path), "NVIDIA H200", 132)
    with pytest.raises(TuneError, match=r"\[uniep.tune\] hardware: .* must be a hardware file"):
        find_hardware(str(tmp_path / "none.json"), "NVIDIA H200", 132)
    with pytest.raises(TuneError, match="must be of a GPU with this one's 16 multiprocessors, got 132 in NVIDIA H200"):
        find_hardware(None, "NVIDIA H200", 16)
    with pytest.raises(TuneError, match="no-such-user"):
        find_hardware("~no-such-user/gpu.json", "NVIDIA H200", 132)


@pytest.mark.parametrize(
    ("mode", "hardware", "device", "num_multiprocessors", "want"),
    [
        ("auto", None, "NVIDIA H200", 132, "model"),
        ("auto", None, "NVIDIA H200", 66, "off"),
        ("auto", None, "NVIDIA B200", 148, "off"),
        ("auto", "mine.json", "NVIDIA B200", 148, "model"),
        ("measured", None, "NVIDIA B200", 148, "measured"),
        ("off", None, "NVIDIA H200", 132, "off"),
    ],
)
def test_auto_is_the_model_where_there_is_one(mode, hardware, device, num_multiprocessors, want):
    assert resolve_tune(Tune(mode=mode, hardware=hardware), device, num_multiprocessors).mode == want


def test_tiles_by_name_are_those_of_the_model():
    from typing import get_args, get_type_hints

    for roles in (DispatchRoles, CombineRoles):
        (names, _) = get_args(get_type_hints(roles)["tile"])
        assert set(get_args(names)) == set(TILES)
