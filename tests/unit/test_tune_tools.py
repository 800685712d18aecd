"""tools.calibrate and tools.tune without a GPU: what they make of times, and what they refuse."""

import dataclasses
import json
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.choices import choice_of
from tools import bench_moe, calibrate, tune, tune_report
from tools.tune_report import Config, Survey, Tuned
from uniep.autotune.calibration import Calibration
from uniep.autotune.cost_model import fixed_us, predict
from uniep.autotune.fit import Sample
from uniep.autotune.hardware import TILES, TUNED, Hardware, shipped
from uniep.autotune.search import Choice, LaunchChoice, kernel_space, predict_choice, search
from uniep.autotune.workload import Workload
from uniep.kernels.config import KernelConfig
from uniep.shapes import MoEShape

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "benchmarks/calibration_h200.samples.json"
SHAPE = MoEShape(128, 8, 2048, 768, 2)
DEFAULT = Choice({
    launch: LaunchChoice("wide4", 16, 16, 0.0) if launch in ("up", "down_grad") else LaunchChoice("narrow", 2, 0, 0.0)
    for launch in TUNED
})  # fmt: skip


@pytest.fixture(scope="module")
def h200() -> Hardware:
    return next(iter(shipped()))


def test_tools_say_that_they_need_gpus(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert calibrate.main([]) == 2
    assert "a calibration needs GPUs" in capsys.readouterr().err
    assert tune.main([]) == 2
    assert "measuring needs GPUs, --search-only does not" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "args", "expected"),
    [
        (bench_moe.main, ("--tokens", "0"), "--tokens must be 1 to 2^24, got 0"),
        (bench_moe.main, ("--out", "no/such/a.json"), "--out must be a file that can be written, in a folder"),
        (calibrate.main, ("--left-out",), "--more and --left-out must come with --fit, got none"),
        (calibrate.main, ("--more", "a.json"), "--more and --left-out must come with --fit, got none"),
        (
            calibrate.main,
            ("--fit", "a.json", "--shape", "x"),
            "--shape must come without --fit, which measures nothing",
        ),
        (calibrate.main, ("--fit", "a.json", "--ep", "2"), "--ep must come without --fit, which measures nothing"),
        (tune.main, ("--search-only", "--out", "a"), "--out must come without --search-only, which measures nothing"),
        (tune.main, ("--search-only", "--samples", "a"), "--samples must come without --search-only, which measures"),
    ],
)
def test_what_would_be_refused_late_is_refused_first(main, args, expected, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert main([*args]) == 2
    assert capsys.readouterr().err.startswith(f"error: {expected}")


def test_a_calibration_times_the_defaults_tiles():
    """Each launch's, with many roles: the model is asked about their neighbours."""
    for launch, found in choice_of(KernelConfig(num_programs=132)).launches.items():
        roles = {
            (one.num_link, one.num_local)
            for choice in calibrate.configurations(132)
            if (one := choice.launches[launch]).tile == found.tile
        }
        assert len(roles) > 4, launch


@pytest.mark.parametrize("main", [calibrate.main, tune.main, bench_moe.main])
def test_unknown_shapes_are_named(main, capsys):
    assert main(["--shape", "qwen4"]) == 2
    assert re.search(r"error: --shape must be of .*qwen3-30b-a3b.*, got qwen4\n", capsys.readouterr().err)


def test_fit_again_from_kept_samples(tmp_path, capsys, h200):
    assert calibrate.main(["--fit", str(SAMPLES), "--out", str(tmp_path / "gpu.json")]) == 0
    text = capsys.readouterr().out
    assert "up " in text
    assert "mean error" in text
    assert "not decided by these times, as assumed: " not in text
    assert Hardware.load(tmp_path / "gpu.json").name == h200.name
    kept = Calibration.load(SAMPLES)
    only_up = dataclasses.replace(kept, samples=tuple(one for one in kept.samples if one.step == "up"))
    only_up.save(tmp_path / "up.json")
    assert calibrate.main(["--fit", str(tmp_path / "up.json"), "--out", str(tmp_path / "gpu.json")]) == 0
    assert "not decided by these times, as assumed: " in capsys.readouterr().out
    assert calibrate.main(["--fit", str(tmp_path / "none.json")]) == 2
    assert "none.json must be the samples of tools.calibrate" in capsys.readouterr().err


def edited(path: Path, **changes: Any) -> str:
    path.write_text(json.dumps(json.loads(SAMPLES.read_text()) | changes))
    return str(path)


def test_samples_of_another_gpu_are_not_mixed_in(tmp_path, capsys):
    other = edited(tmp_path / "other.json", name="NVIDIA B200")
    assert calibrate.main(["--fit", str(SAMPLES), "--more", other, "--out", str(tmp_path / "out.json")]) == 2
    said = capsys.readouterr().err
    assert "--more must be of the GPU of --fit, ('NVIDIA H200', 132), got ('NVIDIA B200', 132)" in said


def test_one_layer_cannot_be_predicted_by_others(tmp_path, capsys):
    samples = json.loads(SAMPLES.read_text())["samples"]
    one = edited(tmp_path / "one.json", samples=[s for s in samples if s["shape"] == samples[0]["shape"]])
    out = tmp_path / "out.json"
    assert calibrate.main(["--fit", one, "--left-out", "--out", str(out)]) == 2
    assert "--left-out must have samples of two layers or more, got 1" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("option", ["--fit", "--more"])
def test_samples_are_not_written_over(option, tmp_path, capsys):
    kept = tmp_path / "kept.json"
    kept.write_text(SAMPLES.read_text())
    files = {"--fit": str(SAMPLES), "--more": str(SAMPLES)} | {option: str(kept)}
    args = [part for pair in files.items() for part in pair]
    assert calibrate.main([*args, "--out", str(tmp_path / "." / "kept.json")]) == 2
    assert "--out must be another file than those of --fit and --more" in capsys.readouterr().err
    assert kept.read_text() == SAMPLES.read_text()


@pytest.mark.parametrize("more", [["--fit", str(SAMPLES)], []])
@pytest.mark.parametrize("out", ["none/gpu.json", "."])
def test_a_file_that_cannot_be_written_is_refused_first(more, out, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert calibrate.main([*more, "--out", str(tmp_path / out)]) == 2
    assert "error: --out must be a file that can be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "args"),
    [
        *product([calibrate.main, bench_moe.main, tune.main], [["--ep", "3"], ["--ep", "0"]]),
        *product([bench_moe.main, tune.main], [["--experts", "3"], ["--experts", "0"]]),
    ],
)
def test_degrees_and_experts_that_no_layer_has(main, args, capsys):
    assert main(args) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: --ep")
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_multiprocessors": 4}, "num_multiprocessors must be more than the"),
        ({"assumed": tuple(f"up.{tile}.step_us" for tile in TILES)}, "up must have a tile that was timed"),
    ],
)
def test_hardware_that_leaves_no_choice(change, expected, h200, tmp_path, capsys):
    dataclasses.replace(h200, **change).save(tmp_path / "gpu.json")
    assert tune.main(["--search-only", "--hardware", str(tmp_path / "gpu.json")]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"error: {tmp_path / 'gpu.json'}: {expected}")
    assert text.count("\n") == 1


def test_a_calibration_times_every_tile_of_every_launch():
    seen = {(name, one.tile) for choice in calibrate.configurations(132) for name, one in choice.launches.items()}
    assert seen == {(launch, tile) for launch in TUNED for tile in TILES}


def test_a_calibration_fits_a_small_gpu():
    """Of 78 multiprocessors, as many as the smallest of the Hopper line."""
    for choice in calibrate.configurations(78):
        for name, launch in choice.launches.items():
            assert launch.num_link + launch.num_local < 78 * TILES[launch.tile].occupancy, (name, launch)


def test_samples_of_a_measured_layer():
    times = {"exchange": 50.0, "plan": 51.0, "up": 840.123, "down": 660.0, "rest": 1.0}
    times |= {"down_grad": 744.0, "wgrad": 1000.0, "up_grad": 887.0, "rest_grad": 1.0}
    found = calibrate.samples_of(SHAPE, 8192, DEFAULT, times)
    assert Sample(SHAPE, 8192, "up", 840.12, "wide4", 16, 16) in found
    assert Sample(SHAPE, 8192, "down", 660.0, "narrow", 2, 0) in found
    assert Sample(SHAPE, 8192, "wgrad", 1000.0) in found
    assert len(found) == 7


def test_drawn_configurations_are_those_of_the_space(h200):
    drawn = tune.draw(h200, 120)
    assert drawn == tune.draw(h200, 120)
    space = kernel_space(h200)
    for launch in TUNED:
        configs = [tune.config_of(choice.launches[launch]) for choice in drawn]
        size = len(space.launches[launch])
        assert len(set(configs)) == min(120, size)
        assert {tile for tile, _, _ in configs} == set(h200.offers(launch))


def machine(truth: Hardware, work: Workload):
    """Times of a machine that is as described."""

    def times_us(choice: Choice, num_calls: int) -> dict[str, float]:
        found = predict_choice(work, truth, choice)
        times = {launch: one.predicted_us for launch, one in found.launches.items()}
        return times | {step: sum(fixed_us(step, work, truth).values()) for step in tune.FIXED_STEPS}

    return times_us


LAYERS = {"small": Workload.balanced(SHAPE, 8192), "large": Workload.balanced(MoEShape(64, 8, 7168, 2048, 2), 8192)}


@pytest.fixture(scope="module")
def truth(h200) -> Hardware:
    """A machine whose forward is slower than the description's."""
    names = [f"{launch}.{tile}.step_us" for launch in ("up", "down") for tile in TILES]
    return h200.with_constants({name: 1.2 * h200.constants[name] for name in names})


@pytest.fixture(scope="module")
def surveys(h200, truth) -> list[Survey]:
    found = []
    for name, work in LAYERS.items():
        choices = (DEFAULT, search(work, h200, kernel_space(h200)), *tune.draw(h200, 60))
        found.append(tune.survey(name, work, choices, 5, machine(truth, work)))
    return found


@pytest.fixture(scope="module")
def fixed(surveys) -> dict[str, Config]:
    return tune_report.best_fixed(surveys)


@pytest.fixture(scope="module")
def tuned(h200, truth, surveys, fixed) -> list[Tuned]:
    return [
        tune.final(work, h200, surveyed, fixed, machine(truth, work))
        for work, surveyed in zip(LAYERS.values(), surveys, strict=True)
    ]


def test_the_report_is_what_was_measured(tuned, fixed):
    for one in tuned:
        for launch in TUNED:
            measured_us, final_us = one.survey.measured_us[launch], tune_report.medians(one.final_us[launch])
            assert {len(times) for times in one.final_us[launch].values()} <= {tune.ROUNDS, 2 * tune.ROUNDS}
            assert {one.survey.chosen[launch], one.survey.default[launch], fixed[launch]} <= final_us.keys()
            assert final_us.keys() <= measured_us.keys() == one.predicted_us[launch].keys()
            # The machine says the same each time.
            assert {config: measured_us[config] for config in final_us} == final_us
            fastest = sorted(measured_us.values())[: tune.FINALISTS]
            assert set(fastest) <= set(final_us.values())
    rows = tune_report.rows(tuned, fixed)
    assert [(row["shape"], row["pass"]) for row in rows] == [
        ("small", "forward"),
        ("small", "backward"),
        ("large", "forward"),
        ("large", "backward"),
    ]
    for row in rows:
        assert row["best_us"] <= row["measured_us"] + 0.1
        assert row["best_us"] <= row["best_fixed_us"] + 0.1
        assert row["error"] == pytest.approx(row["predicted_us"] / row["measured_us"] - 1, abs=1e-3)
        assert row["gain_over_default"] == pytest.approx(row["default_us"] / row["measured_us"], rel=1e-3)
    forward, backward = rows[0], rows[1]
    assert forward["error"] < -0.01  # it is slower than the model knows
    assert abs(backward["error"]) < 1e-3
    assert backward["over_best"] == 0.0
    assert backward["launches"]["down_grad"]["rank"] == 1
    first = tuned[0]
    by_hand = first.fixed_us["exchange"] + first.fixed_us["plan"]
    by_hand += sum(first.final_us[launch][first.survey.chosen[launch]][0] for launch in ("up", "down"))
    assert forward["measured_us"] == pytest.approx(by_hand, abs=0.1)
    summary = tune_report.summary(rows)
    assert summary["max_abs_error"] == max(abs(row["error"]) for row in rows)
    assert summary["gain_over_default"] > 1
    for row in rows:
        assert row["shape"] in tune_report.line(row)


def test_best_fixed_is_the_best_over_all_layers(surveys, fixed):
    for launch in TUNED:
        first, second = (one.measured_us[launch] for one in surveys)
        products = {config: first[config] * second[config] for config in first.keys() & second.keys()}
        assert products[fixed[launch]] == min(products.values())


def test_times_by_chance_do_not_make_a_best_configuration(h200, truth):
    """Of many noisy times the least is far too small; what half of the rounds finds best the other half times."""
    work = LAYERS["small"]
    generator = np.random.default_rng(3)

    def noisy(choice: Choice, num_calls: int) -> dict[str, float]:
        return {step: us * generator.normal(1.0, 0.04) for step, us in machine(truth, work)(choice, num_calls).items()}

    choices = (DEFAULT, search(work, h200, kernel_space(h200)), *tune.draw(h200, 200))
    surveyed = tune.survey("small", work, choices, 1, noisy)
    found = tune.final(work, h200, surveyed, surveyed.default, noisy)
    for launch in TUNED:
        least = min(predict(launch, work, truth, kernel_space(h200).launches[launch]).total_us)
        assert tune_report.best_us(found.final_us[launch]) > 0.98 * least
    assert min(surveyed.measured_us["up"].values()) < 0.95 * min(
        predict("up", work, truth, kernel_space(h200).launches["up"]).total_us
    )


def test_rank_of_a_configuration():
    times = {("a", 1, 1): 3.0, ("a", 2, 1): 1.0, ("a", 3, 1): 2.0}
    assert [tune_report.rank_of(times, config) for config in times] == [3, 1, 2]


def test_plot(tuned, tmp_path):
    tune_report.plot(tuned, tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_needs_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert tune.main(["--plot", "a.png"]) == 2
    assert "--plot must have matplotlib installed" in capsys.readouterr().err


def test_unequal_bits_are_an_error():
    import torch

    want = [torch.ones(3) for _ in range(6)]
    tune.check_bits(want, [one.clone() for one in want], DEFAULT, None)
    got = [one.clone() for one in want]
    got[2][1] += 1e-7
    with pytest.raises(tune.UnequalBitsError, match="grad_scores must be those of the default configuration"):
        tune.check_bits(want, got, DEFAULT, None)


def test_search_only(capsys, h200, tmp_path):
    assert tune.main(["--search-only", "--explain", "--shape", "qwen3-30b-a3b", "--tokens", "4096", "8192"]) == 0
    text = capsys.readouterr().out
    assert "search over the paper's space: median" in text
    assert "T4096" in text
    for term in ("until all rows lie", "compute and link", "weights"):
        assert term in text
    slow = dataclasses.replace(h200, name="slow").with_constants({"launch_us": 1000.0})
    slow.save(tmp_path / "slow.json")
    assert tune.main(["--search-only", "--shape", "qwen3-30b-a3b", "--hardware", str(tmp_path / "slow.json")]) == 0
    chosen = search(Workload.balanced(SHAPE, 8192), slow, kernel_space(slow))
    assert f"{chosen.predicted_us:9.0f} us" in capsys.readouterr().out
    json.loads((tmp_path / "slow.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--calls", "0"), "--calls must be 1 to 2^24, got 0"),
        (("--tokens", "8192", "0"), "--tokens must be 1 to 2^24, got 0"),
        (("--configs", "0"), "--configs must be 1 to 2^24, got 0"),
        (("--samples", "no/such/a.json"), "--samples must be a file that can be written, in a folder"),
        (("--out", "no/such/a.json"), "--out must be a file that can be written, in a folder"),
        (("--out", "a.json", "--samples", "a.json"), "--out, --samples must be different files"),
    ],
)
def test_tune_refuses_before_it_measures(arguments, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").mkdir()
    assert tune.main(["--ep", "2", "--shape", "qwen3-30b-a3b", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {expected}")


def test_bench_moe_counts_a_copy_for_each_rank_that_a_token_needs(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    ids = torch.tensor([[0, 1], [0, 2], [3, 5], [4, 5]])
    assert bench_moe.copies_of_tokens(ids, MoEShape(6, 2, 8, 8, 1)) == 1.0
    assert bench_moe.copies_of_tokens(ids, MoEShape(6, 2, 8, 8, 3)) == 1.5
    assert bench_moe.copies_of_tokens(ids, MoEShape(6, 2, 8, 8, 6)) == 2.0
    block = bench_moe.Block(Routed(), bench_moe.Layer("", MoEShape(6, 2, 8, 8), 4), torch.device("cpu"), False)
    assert torch.equal(bench_moe.routed(block, 2), ids)


class Routed(torch.nn.Module):
    """A layer of which only the choice of the experts matters."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.router((None, torch.tensor([[0, 1], [0, 2], [3, 5], [4, 5]]), None))
        return x


def test_bench_moe_prints_no_time_of_other_bits():
    row = {"shape": "a", "E": 8, "tokens": 8, "stock_ms": 2.0, "reference_ms": 3.0, "gemm_ms": 0.5, "uniep_ms": 1.0}
    row |= {"peak_gib_stock": 1.0, "peak_gib_uniep": 1.0, "bits_equal": True, "reference_bits_equal": True}
    name = next(iter(bench_moe.SWITCHES))
    row |= {f"{name.replace(' ', '_')}_ms": 0.7, "unequal_shares": {}}
    assert f"{name} 0.700" in bench_moe.report(row)
    said = bench_moe.report(row | {"unequal_shares": {name: {"out": 0.5}}})
    assert f"{name} UNEQUAL BITS" in said
    assert "0.700" not in said
    shares = {"reference": {"out": 0.5}}
    assert "reference UNEQUAL BITS" in bench_moe.report(row | {"reference_bits_equal": False, "unequal_shares": shares})


def test_bench_moe_finds_each_other_bit_and_how_far_fast_is(monkeypatch):
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *args, **more: None)
    generator = torch.Generator().manual_seed(0)
    want = {"out": torch.randn(1, 8, 4, generator=generator).bfloat16(), "w1": torch.ones(2, 4, 4).bfloat16()}
    got = {name: tensor.clone() for name, tensor in want.items()}
    assert bench_moe.unequal_results(want, got) == {}
    assert bench_moe.relative_errors(want, got) == {"out": 0.0, "w1": 0.0}
    got["w1"][1, 2, 3], got["out"][0, 0, 0] = 3.0, float("nan")
    assert bench_moe.unequal_results(want, got) == {"out": 1 / 32, "w1": 1 / 32}
    assert bench_moe.relative_errors(want, got)["w1"] == pytest.approx(2 / 32**0.5)
