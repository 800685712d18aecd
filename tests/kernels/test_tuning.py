"""The bits never depend on a configuration: output and gradients of many random ones are those of the default."""

import random
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes.backend import open_backend
from recipes.config import Tune, UniEP
from recipes.launch_times import LayerInputs, compile_ahead
from recipes.tuning import open_tuner
from tests.kernels.oracle import draw_batch
from tests.kernels.ranks import run_ranks
from tests.kernels.test_backward import as_arrays, draw_grads, leaves
from uniep.autotune.hardware import DISPATCHES, TILES, TUNED
from uniep.kernels.config import KernelConfig, default_config
from uniep.kernels.wgrad import WgradConfig
from uniep.layer import FORWARD_STEPS, compile_layer, fused_moe
from uniep.numerics import Numerics
from uniep.plan.layout import HeapLayout
from uniep.shapes import MoEShape
from uniep.symmetric.heap import SymmetricHeap
from uniep.symmetric.virtual_ranks import open_virtual_ranks

SHAPE = MoEShape(4, 2, 40, 24, 2)
LAYOUT = HeapLayout(SHAPE, 12, tile_rows=16)
NUM_TOKENS = (12, 9)
DEFAULT = default_config(torch.device("cpu"))
H200 = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)


def random_config(generator: random.Random) -> KernelConfig:
    """Roles and programs beyond what is sensible, and narrow tiles, so that every role has work in every order."""
    config = replace(
        DEFAULT,
        num_programs=generator.choice((1, 2, 3, 5, 8)),
        wgrad=WgradConfig(num_programs=generator.choice((1, 3)), block_f=32, block_d=64, use_tma=False),
    )
    for launch in TUNED:
        roles: dict[str, Any] = (
            {"num_dispatch": generator.randint(1, 9), "num_relay": generator.randint(1, 9)}
            if launch in DISPATCHES
            else {"num_combine": generator.randint(1, 9)}
        )
        tile = {
            "block_n": generator.choice((32, 64)),
            "num_warps": generator.choice((4, 8)),
            "num_stages": generator.choice((2, 3, 4)),
            "occupancy": generator.choice((1, 2)),
        }
        config = replace(config, **{launch: replace(getattr(config, launch), **tile, **roles)})
    return config


def of_tile(name: str) -> KernelConfig:
    """Every launch with a tile that the tuner may choose."""
    tile = asdict(TILES[name])
    return replace(DEFAULT, **{launch: replace(getattr(DEFAULT, launch), **tile) for launch in TUNED})


def results(configs: list[KernelConfig], score_before_experts: bool, *, compiles: bool = False) -> list[list[list]]:
    """[rank][config]: output and gradients as arrays. compiles: before each, kernels are compiled."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.rand(num, 4, generator=generator).topk(2).indices for num in NUM_TOKENS]
    # Ordinary data: a sum in another order would show.
    batch = draw_batch(SHAPE, ids, seed=3, exact=False)
    grads = draw_grads(batch, 3, exact=False)

    def body(heap: SymmetricHeap) -> list[list]:
        found = []
        for config in configs:
            inputs = leaves(batch, heap.rank)
            x, scores, *weights = inputs
            tensors = (x, scores, ids[heap.rank], *weights)
            more: dict[str, Any] = {"heap": heap, "numerics": Numerics(score_before_experts)}
            if compiles:
                compile_layer(grads[heap.rank], *tensors, configs=[config, DEFAULT], **more)
            out = fused_moe(*tensors, config=config, **more)
            found.append(as_arrays([out, *torch.autograd.grad(out, inputs, grads[heap.rank])]))
        heap.check()
        return found

    return run_ranks(LAYOUT, body)


@pytest.mark.parametrize(("score_before_experts", "num_configs"), [(False, 6), (True, 3)])
def test_bits_do_not_depend_on_the_configuration(
    score_before_experts: bool, num_configs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uniep.layer.reduces_in_kernel", lambda *_, **__: True)
    generator = random.Random(num_configs)
    configs = [DEFAULT, *(random_config(generator) for _ in range(num_configs))]
    for want, *others in results(configs, score_before_experts):
        for config, got in zip(configs[1:], others, strict=True):
            for name, one, other in zip(("out", "x", "scores", "w1", "w2", "w3"), want, got, strict=True):
                assert torch.equal(torch.from_numpy(one), torch.from_numpy(other)), (name, config)


def test_bits_do_not_depend_on_the_tile() -> None:
    configs = [of_tile(name) for name in TILES]
    for want, *others in results(configs, False):
        for got in others:
            for one, other in zip(want, got, strict=True):
                assert torch.equal(torch.from_numpy(one), torch.from_numpy(other))


@pytest.mark.parametrize("score_before_experts", [False, True])
def test_compiling_changes_no_bit(score_before_experts: bool) -> None:
    configs = [DEFAULT, of_tile("narrow")]
    for want, got in zip(
        results(configs, score_before_experts), results(configs, score_before_experts, compiles=True), strict=True
    ):
        for of_config, other in zip(want, got, strict=True):
            for one, again in zip(of_config, other, strict=True):
                assert torch.equal(torch.from_numpy(one), torch.from_numpy(again))


def test_compiling_runs_nothing() -> None:
    (heap,) = open_virtual_ranks(HeapLayout(MoEShape(4, 2, 40, 24), 12, tile_rows=16), device="cpu")
    inputs = LayerInputs.draw(heap, 12)
    written = [heap.region(name) for name in heap.layout.regions]
    written += [getattr(heap.scoreboard, name) for name in ("input_ready", "output_ready", "counters", "watch")]
    for tensor in written:
        tensor.view(torch.uint8).fill_(0x5A)
    compile_ahead(inputs, heap, [DEFAULT, of_tile("wide3")])
    for tensor in written:
        assert (tensor.view(torch.uint8) == 0x5A).all()


def test_each_step_of_a_recorded_forward_is_told() -> None:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.rand(num, 4, generator=generator).topk(2).indices for num in NUM_TOKENS]
    batch = draw_batch(SHAPE, ids, seed=3, exact=True)

    def body(heap: SymmetricHeap) -> list[list[int]]:
        told: list[list[int]] = []
        for room in (heap.layout.max_rows, 3):
            heap.room.num_rows = room
            numbers: list[int] = []
            x, scores, *weights = leaves(batch, heap.rank)
            options: dict[str, Any] = {"heap": heap, "config": DEFAULT}
            fused_moe(x, scores, ids[heap.rank], *weights, **options, on_step=numbers.append)
            told.append(numbers)
        return told

    for with_room, without in run_ranks(LAYOUT, body):
        assert with_room == list(range(len(FORWARD_STEPS)))
        # Both launches once more.
        assert without == list(range(len(FORWARD_STEPS) + 2))


@pytest.mark.parametrize("mode", ["model", "measured"])
def test_a_tuner_is_opened_and_runs(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does on a GPU, with the times made up and the forward interpreted; the second start finds the choices."""
    shape = MoEShape(4, 2, 40, 24)
    (heap,) = open_virtual_ranks(HeapLayout(shape, 12, tile_rows=16), device="cpu")
    warmed: list[KernelConfig] = []
    measured: list[int] = []

    def measure(inputs: LayerInputs, *args: Any, **kwargs: Any) -> tuple[dict[str, float], list]:
        measured.append(len(inputs.x_TD))
        return dict.fromkeys(TUNED, 1000.0 - len(measured)), []

    monkeypatch.setattr("recipes.tuning.warm_up", lambda inputs, heap, config, *_: warmed.append(config))
    monkeypatch.setattr("recipes.tuning.measure_layer", measure)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: H200)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("uniep.layer.reduces_in_kernel", lambda *_, **__: True)
    monkeypatch.setenv("RECIPE_COMMIT", "0123abc")
    options = Tune(mode=mode, bucket_tokens=8, num_candidates=2, cache=str(tmp_path), watch_calls=0)  # type: ignore[arg-type]
    base = of_tile("narrow")
    starts = []
    for _ in range(2):
        tuner, _ = open_tuner(heap, None, base=base, options=options)
        starts.append([tuner.config(num_tokens) for num_tokens in (5, 12)])
    assert starts[0] == starts[1]
    # Two configurations for each of two buckets, once.
    assert measured == ([8, 8, 12, 12] if mode == "measured" else [])
    # Of a tree that differs from its commit nothing is kept or found.
    monkeypatch.setenv("RECIPE_COMMIT", "0123abc+changes")
    open_tuner(heap, None, base=base, options=options)
    assert measured == ([8, 8, 12, 12] * 2 if mode == "measured" else [])
    for config in starts[0]:
        for launch in TUNED:
            assert any(_same_tile(getattr(config, launch), getattr(one, launch)) for one in warmed)

    batch = draw_batch(shape, [torch.rand(12, 4).topk(2).indices], seed=1, exact=False)
    inputs = (batch.x[0], batch.scores[0], batch.expert_ids[0], *batch.weights(0))
    assert torch.equal(tuner.run(*inputs, heap=heap), fused_moe(*inputs, heap=heap, config=DEFAULT))


@pytest.mark.parametrize("mode", ["off", "model"])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_layers_of_an_opened_backend_run(mode: str, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that a backend hands to a layer, tuned or not; each layer follows its own rows."""
    shape = MoEShape(4, 2, 40, 24)
    heaps: list[SymmetricHeap] = []

    def open_heap(layout: HeapLayout, *_: Any) -> tuple[SymmetricHeap, str]:
        heaps.extend(open_virtual_ranks(layout, device="cpu"))
        return heaps[-1], "virtual"

    monkeypatch.setattr("recipes.backend.open_heap", open_heap)
    monkeypatch.setattr("recipes.backend.default_config", lambda device: of_tile("narrow"))
    monkeypatch.setattr("recipes.tuning.warm_up", lambda *_, **__: None)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: H200)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("uniep.layer.reduces_in_kernel", lambda *_, **__: True)
    options = UniEP(tune=Tune(mode=mode, watch_calls=0))  # type: ignore[arg-type]
    opened = open_backend("uniep", shape, max_tokens=12, ep_mesh=None, options=options, score_before_experts=False)
    backend = opened.of_layer(layer)

    batch = draw_batch(shape, [torch.rand(12, 4).topk(2).indices], seed=1, exact=False)
    inputs = (batch.x[0], batch.scores[0], batch.expert_ids[0], *batch.weights(0))
    assert torch.equal(backend.run(*inputs), fused_moe(*inputs, heap=heaps[0], config=DEFAULT))
    # Autograd does not record it: the layer's own room is as it was.
    assert backend.run.keywords["room"].num_rows == 0  # type: ignore[attr-defined]
    assert opened.layout == heaps[0].layout
    assert opened.symmetric_gib == 0.0, "one rank's is torch's own memory, which is counted already"
    assert opened.start_up.keys() == ({"tuner_chose", "tuner_compiled"} if mode == "model" else set())
    rooms = [opened.of_layer(layer).run.keywords["room"] for _ in range(2)]  # type: ignore[attr-defined]
    assert rooms[0] is not rooms[1]


def _same_tile(one: Any, other: Any) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in asdict(TILES["narrow"]))
