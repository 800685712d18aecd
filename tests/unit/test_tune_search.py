"""The autotuner's search: the same optimum as brute force over every combination."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tools.moe_layers import named_shapes
from uniep.autotune.cost_model import Candidates, predict
from uniep.autotune.hardware import TILES, TUNED, Hardware, HardwareError, shipped
from uniep.autotune.search import (
    Choice,
    Space,
    best_of_launch,
    explain,
    kernel_space,
    paper_space,
    predict_choice,
    search,
)
from uniep.autotune.workload import Workload
from uniep.shapes import MoEShape


@pytest.fixture(scope="module")
def h200() -> Hardware:
    return next(iter(shipped()))


def shape_of(name: str, ep_degree: int) -> MoEShape:
    return named_shapes([name], ep_degree=ep_degree)[name]


def all_combinations(space: Space) -> dict[str, np.ndarray]:
    """Rows of each launch's candidates: every combination with one shared number."""
    up, down = space.launches["up"], space.launches["down"]
    rows = np.array([
        (i, j)
        for w in np.unique(up.shared)
        for i, j in product(np.flatnonzero(up.shared == w), np.flatnonzero(down.shared == w))
    ])  # fmt: skip
    return {"up": rows[:, 0], "down": rows[:, 1]}


def test_the_papers_space_is_searched_exactly(h200):
    """12 shapes, three lengths: the model is asked for all 209,088 combinations, one by one as it were."""
    space = paper_space(h200)
    rows = all_combinations(space)
    assert len(rows["up"]) == 209_088 == 33 * 33 * 8 * 8 * 3
    combined = {launch: space.launches[launch].take(rows[launch]) for launch in rows}
    seen = set()
    for shape, num_tokens in product(named_shapes(ep_degree=8).values(), (8192, 32_768, 131_072)):
        work = Workload.balanced(shape, num_tokens)
        total_us = sum(predict(launch, work, h200, combined[launch], staged=True).total_us for launch in rows)
        best = int(np.argmin(total_us))
        choice = search(work, h200, space)
        assert choice.predicted_us == pytest.approx(total_us[best], rel=1e-12)
        for launch, found in choice.launches.items():
            assert (found.num_link, found.num_local) == (
                combined[launch].num_link[best],
                combined[launch].num_local[best],
            )
        assert choice.shared == combined["up"].shared[best]
        seen.add(str(choice))
        assert np.isfinite(choice.predicted_us)
    assert len(seen) > 10


def test_launches_that_share_a_number_take_the_best_common_one(h200):
    """On random times: brute force over pairs with an equal shared number."""
    work = Workload.balanced(shape_of("qwen3-30b-a3b", 2), 4096)
    generator = np.random.default_rng(0)

    def some(launch: str) -> Candidates:
        candidates = kernel_space(h200).launches[launch]
        rows = generator.choice(len(candidates), 20)
        return replace(candidates.take(rows), shared=generator.integers(0, 5, 20))

    for _ in range(20):
        space = Space({launch: some(launch) for launch in ("up", "down_grad")})
        times = {launch: predict(launch, work, h200, found).total_us for launch, found in space.launches.items()}
        pairs = [
            times["up"][i] + times["down_grad"][j]
            for i, j in product(range(20), repeat=2)
            if space.launches["up"].shared[i] == space.launches["down_grad"].shared[j]
        ]
        assert search(work, h200, space).predicted_us == pytest.approx(min(pairs))


@pytest.mark.parametrize("ep_degree", [1, 2, 8])
def test_our_launches_are_minimised_alone(ep_degree, h200):
    space = kernel_space(h200, {launch: tuple(TILES) for launch in TUNED})
    for shape in named_shapes(ep_degree=ep_degree).values():
        work = Workload.balanced(shape, 8192)
        choice = search(work, h200, space)
        for launch, found in choice.launches.items():
            times = predict(launch, work, h200, space.launches[launch]).total_us
            assert found.predicted_us == times.min()
            assert best_of_launch(launch, work, h200, space, 3)[0] == found
        assert predict_choice(work, h200, choice) == choice


def test_no_configuration_takes_all_programs(h200):
    for launch, candidates in kernel_space(h200).launches.items():
        programs = np.array([132 * tile.occupancy for tile in TILES.values()])[candidates.tile]
        assert (candidates.num_link + candidates.num_local < programs).all(), launch


def test_a_launch_without_a_timed_tile_is_refused(h200):
    nothing_timed = replace(h200, assumed=tuple(f"down.{tile}.step_us" for tile in TILES))
    with pytest.raises(HardwareError, match="down must have a tile that was timed on NVIDIA H200, got none"):
        kernel_space(nothing_timed)


def test_a_choice_is_read_back(h200):
    choice = search(Workload.balanced(shape_of("deepseek-ocr", 2), 100), h200, kernel_space(h200))
    assert Choice.from_json(choice.to_json()) == choice
    wrong = choice.to_json()
    wrong["launches"]["up"]["tile"] = "huge"
    with pytest.raises(ValueError, match="huge"):
        Choice.from_json(wrong)


def test_every_term_is_printed(h200):
    work = Workload.balanced(shape_of("qwen3-30b-a3b", 2), 8192)
    lines = explain(work, h200, search(work, h200, kernel_space(h200)))
    assert [line.split()[0] for line in lines] == ["exchange", "plan", "up", "down", "down_grad", "wgrad", "up_grad"]
    for line in lines:
        total, _, terms = line.partition(" us = ")
        found = [float(term.rsplit(" ", 1)[1]) for term in terms.split("  (alone")[0].split(" + ")]
        assert sum(found) == pytest.approx(float(total.split()[-1]), abs=0.06 * len(found))
