"""The autotuner's model: counted work, units, what must get slower when, and tables."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from uniep.autotune import cost_model
from uniep.autotune.cost_model import (
    BACKWARD,
    FORWARD,
    Candidates,
    _heat,
    _relayed_at_send,
    _row_parts,
    fixed_us,
    overlap,
    predict,
)
from uniep.autotune.hardware import (
    COMBINES,
    DISPATCHES,
    TILES,
    TUNED,
    Bandwidth,
    Hardware,
    HardwareError,
    constant_names,
    shipped,
)
from uniep.autotune.search import kernel_space, one_candidate, paper_space
from uniep.autotune.workload import TILE_ROWS, Workload, chance_wanted
from uniep.kernels import exchange_routing
from uniep.kernels.config import LAUNCHES
from uniep.kernels.copy_shape import CHUNK_TOKENS, copy_shape
from uniep.kernels.wgrad import WgradConfig
from uniep.plan.layout import HeapLayout
from uniep.plan.token_map import plan_ref
from uniep.shapes import MoEShape

SHAPE = MoEShape(128, 8, 2048, 768, 2)
WORK = Workload.balanced(SHAPE, 8192)


@pytest.fixture(scope="module")
def h200() -> Hardware:
    (hardware,) = [hardware for hardware in shipped() if hardware.name == "NVIDIA H200"]
    return hardware


def total_us(launch: str, work: Workload, hardware: Hardware, **config) -> float:
    row = {"tile": "wide4" if launch in DISPATCHES else "narrow", "num_link": 16, "num_local": 16} | config
    if launch in COMBINES and "num_local" not in config:
        row["num_local"] = 0
    return float(predict(launch, work, hardware, one_candidate(**row)).total_us[0])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_balanced_work_is_what_plans_hold(num_ranks):
    """Against the plans of random routings: one standard deviation of the mean is below 1 %."""
    shape, num_tokens = MoEShape(32, 4, 64, 64, num_ranks), 4096
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(num_ranks, num_tokens, 32, generator=generator).topk(4).indices
    plans = [plan_ref(ids, rank, shape, tile_rows=TILE_ROWS) for rank in range(num_ranks)]
    work = Workload.balanced(shape, num_tokens)

    def mean(values) -> float:
        return sum(map(int, values)) / num_ranks

    assert work.num_rows == mean(plan.expert_offsets[-1] for plan in plans)
    assert work.num_row_tiles == pytest.approx(mean(plan.tile_offsets[-1] for plan in plans), rel=0.02)
    assert work.num_sent == pytest.approx(mean(plan.send_offsets[-1] for plan in plans), rel=0.01)
    away = [
        (plan.row_origin_R[: int(plan.expert_offsets[-1])] // (num_tokens * 4) != rank).sum()
        for rank, plan in enumerate(plans)
    ]
    assert work.num_returned == pytest.approx(mean(away), rel=0.02)


def test_expected_ranks_of_a_token():
    """The paper's 5.25 for top 8 of many experts over 8 ranks is the limit."""
    assert 8 * chance_wanted(MoEShape(256, 8, 8, 8, 8)) == pytest.approx(5.3, abs=0.06)
    assert 8 * chance_wanted(MoEShape(8000, 8, 8, 8, 8)) == pytest.approx(8 * (1 - (7 / 8) ** 8), rel=1e-2)
    assert chance_wanted(MoEShape(8, 3, 8, 8, 1)) == 1.0


@pytest.mark.parametrize("num_tokens", [1, 64, 1000, 8192])
def test_tiles_lie_between_full_and_one_more_each(num_tokens):
    tiles = Workload.balanced(SHAPE, num_tokens).num_row_tiles
    rows = num_tokens * SHAPE.top_k
    assert rows / TILE_ROWS <= tiles * (1 + 1e-9)
    assert tiles <= rows / TILE_ROWS + SHAPE.num_local_experts


@pytest.mark.parametrize("launch", TUNED)
def test_terms_add_up_and_are_positive(launch, h200):
    found = predict(launch, WORK, h200, kernel_space(h200).launches[launch])
    assert np.allclose(found.total_us, sum(found.terms.values()))
    for name, term in found.terms.items():
        assert (term >= 0).all(), name
    # Nothing is faster than its Tensor Cores at the GPU's peak of 989 TFLOP/s.
    products = 2 if launch in ("up", "up_grad") else 1
    flops = 2 * WORK.num_rows * SHAPE.dim * SHAPE.hidden_dim * products
    assert found.total_us.min() > flops / 989e6


def test_the_model_knows_the_kernels():
    """It stands beside them and repeats what it needs of them."""
    assert TUNED == LAUNCHES
    assert HeapLayout(SHAPE, 8).tile_rows == TILE_ROWS
    assert cost_model._CHUNK_TOKENS == CHUNK_TOKENS
    wgrad = WgradConfig(num_programs=1)
    assert (
        wgrad.block_f,
        wgrad.block_d,
        wgrad.block_t,
    ) == (cost_model._WGRAD_F, cost_model._WGRAD_D, cost_model._WGRAD_STEP)
    assert cost_model._EXCHANGE_PROGRAMS == exchange_routing._NUM_PROGRAMS
    assert cost_model._EXCHANGE_WARPS == exchange_routing._NUM_WARPS
    for dim in range(8, 8192, 8):
        assert _row_parts(dim) == -(-dim // copy_shape(dim, 2048)[1]), dim


@pytest.mark.parametrize("launch", TUNED)
def test_more_work_takes_longer(launch, h200):
    for field in ("dim", "hidden_dim"):
        larger = dataclasses.replace(SHAPE, **{field: 2 * getattr(SHAPE, field)})
        assert total_us(launch, Workload.balanced(larger, 8192), h200) > total_us(launch, WORK, h200)
    times = [total_us(launch, Workload.balanced(SHAPE, n), h200) for n in (1, 4, 16, 256, 1024, 4096, 16384, 65536)]
    assert times == sorted(times)
    # Twice the work is about twice the time where the work is large: the units do not depend on size.
    cool = h200.with_constants({"hot_share": 1e-9, "beside_hot_share": 1e-9})
    twice = total_us(launch, Workload.balanced(SHAPE, 1 << 18), cool) / total_us(
        launch, Workload.balanced(SHAPE, 1 << 17), cool
    )
    assert twice == pytest.approx(2.0, rel=0.02)


# What a larger constant does to a time: rates help, costs hurt.
FASTER = ("gbs", "send_share", "relay_share", "reduce_share", "hot_tflop")


def step_times(step: str, work: Workload, hardware: Hardware) -> np.ndarray:
    if step in TUNED:
        candidates = kernel_space(hardware, {launch: tuple(TILES) for launch in TUNED}).launches[step]
        return predict(step, work, hardware, candidates).total_us
    return np.array([sum(fixed_us(step, work, hardware).values())])


@pytest.mark.parametrize("name", [name for name in constant_names() if name != "mark_us"])
def test_every_constant_has_its_direction(name, h200):
    scaled = h200.with_constants({name: 2.0 * h200.constants[name]})
    # More than a GPU computes before it gets hot.
    work = Workload.balanced(SHAPE, 32768)
    differences = [
        step_times(step, work, scaled) - step_times(step, work, h200) for step in (*FORWARD, *BACKWARD, "scores")
    ]
    difference = np.concatenate(differences)
    if name.endswith(FASTER):
        assert (difference <= 1e-9).all()
        assert (difference < 0).any()
    else:
        assert (difference >= -1e-9).all()
        assert (difference > 0).any()


def test_a_hot_gpu_computes_slower_and_a_cool_one_does_not(h200):
    """A few tokens do not lower the clock; many do, more in each later step of the layer."""
    cool = h200.with_constants({"hot_share": 1e-9, "beside_hot_share": 1e-9})

    def ratio(launch: str, num_tokens: int) -> float:
        work = Workload.balanced(SHAPE, num_tokens)
        return total_us(launch, work, h200) / total_us(launch, work, cool)

    assert 1.0 <= ratio("up", 64) <= 1.01
    assert 1.08 <= ratio("up", 1 << 17) < ratio("down", 1 << 17) < ratio("up_grad", 1 << 17) < 2.0


def test_heat_is_the_mean_over_the_step(h200):
    """By small steps of what is computed."""
    work, tflop = Workload.balanced(SHAPE, 8192), h200.constants["hot_tflop"]
    product = 2e-12 * work.num_rows * SHAPE.dim * SHAPE.hidden_dim
    for step, begin, end in (("up", 0, 2), ("wgrad", 4, 7)):
        computed = np.linspace(begin * product, end * product, 10001)
        assert _heat(step, work, h200) == pytest.approx(np.mean(np.log1p(computed / tflop)), rel=1e-3)


def test_tokens_of_later_experts_come_late(h200):
    """A row's token comes with its first expert: with one row a token relays are never held back, with more they are,
    and what they have done by the end lies between what the link and what the copies allow."""
    capacity = np.array([0.05, 0.2, 0.5, 1.0, 3.0])
    assert np.allclose(_relayed_at_send(capacity, 1.0), np.minimum(capacity, 1.0), atol=1e-4)
    for rows_of_token in (2.0, 4.0):
        done = _relayed_at_send(capacity, rows_of_token)
        # By steps of time: what is complete, and what was copied of it.
        shares = np.linspace(0, 1, 20001)
        complete = 1.0 - (1.0 - shares) ** (1.0 / rows_of_token)
        by_hand = [np.min(complete + c * (1.0 - shares)) for c in capacity]
        assert np.allclose(done, np.minimum(by_hand, 1.0), atol=1e-3)


def test_without_peers_nothing_is_sent(h200):
    alone = Workload.balanced(dataclasses.replace(SHAPE, ep_degree=1), 8192)
    assert alone.num_sent == alone.num_returned == 0
    found = predict("up", alone, h200, one_candidate("wide4", 16, 16))
    assert found.alone["send"][0] == 0
    assert predict("down", alone, h200, one_candidate("narrow", 2, 0)).alone["link"][0] == 0


def test_programs_for_nothing_but_copies_cannot_run(h200):
    assert total_us("up", WORK, h200, num_link=66, num_local=66) == np.inf
    assert total_us("down", WORK, h200, num_link=264) == np.inf
    assert np.isfinite(total_us("up", WORK, h200, num_link=66, num_local=65))


def test_a_small_layer_still_takes_a_tile(h200):
    one_token = Workload.balanced(SHAPE, 1)
    constants = h200.constants
    tile_us = SHAPE.dim // 64 * constants["up.wide4.step_us"] + constants["up.epilogue_us"]
    assert total_us("up", one_token, h200) > tile_us


def test_reduce_programs_use_the_bubble(h200):
    """Where the link is the longer one, programs that are set apart reduce meanwhile."""
    slow_link = dataclasses.replace(h200, link=Bandwidth((8,), (132,), ((50.0,),)))
    down = paper_space(h200).launches["down"]

    def time(num_reduce: int) -> float:
        row = Candidates(*(np.array([value]) for value in (0, 8, 16, num_reduce, 8)))
        return float(predict("down", WORK, slow_link, row, staged=True).total_us[0])

    assert time(17) < time(0)
    assert len(down) == 3 * 33 * 8


def test_overlap():
    assert overlap(3.0, 2.0, 0.0) == 3.0
    assert overlap(3.0, 2.0, 1.0) == 5.0


def test_table_between_its_points():
    table = Bandwidth((4, 16), (8, 16), ((100.0, 200.0), (300.0, 250.0)))
    at = table.at(np.array([0, 4, 8, 12, 16, 99, 8, 8]), np.array([4, 4, 4, 4, 4, 4, 8, 64]))
    assert at.tolist() == [0.0, 50.0, 100.0, 150.0, 200.0, 200.0, 200.0, 300.0]


def test_saved_hardware_is_read_back(tmp_path, h200):
    h200.save(tmp_path / "gpu.json")
    again = Hardware.load(tmp_path / "gpu.json")
    assert again == h200
    assert again.fingerprint == h200.fingerprint
    assert again.with_constants({"mark_us": 2.0}).fingerprint != h200.fingerprint


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (
            '"num_multiprocessors": 132',
            '"num_multiprocessors": 0',
            "num_multiprocessors must be a whole number from 1 to 1024, got 0",
        ),
        ('"mark_us"', '"mark_ms"', "missing ['mark_us'], unknown ['mark_ms']"),
        ('"memory_gbs": ', '"memory_gbs": -', "memory_gbs must be a positive number, got -"),
        ('"name"', '"nam"', "nam"),
        ("{", "", "JSONDecodeError"),
    ],
)
def test_a_wrong_file_is_named(old, new, what, tmp_path, h200):
    path = tmp_path / "gpu.json"
    h200.save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(HardwareError, match="must be a hardware file") as caught:
        Hardware.load(path)
    assert str(path) in str(caught.value)
    assert what in str(caught.value)


@pytest.mark.parametrize(
    ("what", "value", "expected"),
    [
        ("num_multiprocessors", 132.5, "num_multiprocessors must be a whole number from 1 to 1024, got 132.5"),
        ("num_multiprocessors", 10**12, "got 1000000000000"),
        ("memory_gbs", True, "memory_gbs must be a positive number, got True"),
        ("memory_gbs", 1e-300, "memory_gbs must be a positive number, got 1e-300"),
        ("assumed", "mark_us", "assumed must be names of constants"),
        ("link", {"gbs": [["12"]]}, "gbs must be 1 x 1 positive numbers"),
        ("link", {"gbs": [[1.0, 2.0]]}, "gbs must be 1 x 1 positive numbers"),
        ("link", {"num_programs": [float("nan")]}, "num_programs must be whole numbers that ascend from 1"),
        ("copy", {"num_warps": [4.5]}, "num_warps must be whole numbers that ascend from 1"),
        ("copy", {"num_warps": [10**30]}, "num_warps must be whole numbers that ascend from 1"),
        ("copy", {"num_warps": []}, "num_warps must be whole numbers that ascend from 1"),
    ],
)
def test_a_damaged_value_is_named(what, value, expected, tmp_path, h200):
    path = tmp_path / "gpu.json"
    h200.save(path)
    values = json.loads(path.read_text())
    if what in ("link", "copy"):
        value = {"num_warps": [4], "num_programs": [16], "gbs": [[300.0]]} | value
    path.write_text(json.dumps(values | {what: value}))
    with pytest.raises(HardwareError) as caught:
        Hardware.load(path)
    assert expected in str(caught.value)


def test_a_tile_that_was_never_timed_is_not_offered(h200):
    measured = dataclasses.replace(h200, assumed=("up.wide3.step_us", "up.narrow.step_us", "mark_us"))
    assert measured.offers("up") == ("wide4",)
    assert measured.offers("down") == tuple(TILES)
