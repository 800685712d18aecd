"""The bits never depend on a configuration: output and gradients of many random ones are those of the default."""

import random
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from tests.kernels.oracle import draw_batch
from tests.kernels.ranks import run_ranks
from tests.kernels.test_backward import as_arrays, draw_grads, leaves
from uniep.autotune.hardware import DISPATCHES, TILES, TUNED
from uniep.kernels.config import KernelConfig, default_config
from uniep.kernels.wgrad import WgradConfig
from uniep.layer import FORWARD_STEPS, fused_moe
from uniep.plan.layout import HeapLayout
from uniep.shapes import MoEShape
from uniep.symmetric.heap import SymmetricHeap

SHAPE = MoEShape(4, 2, 40, 24, 2)
LAYOUT = HeapLayout(SHAPE, 12, tile_rows=16)
NUM_TOKENS = (12, 9)
DEFAULT = default_config(torch.device("cpu"))


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


def results(configs: list[KernelConfig], score_before_experts: bool) -> list[list[list]]:
    """[rank][config]: output and gradients as arrays."""
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
            out = fused_moe(
                x,
                scores,
                ids[heap.rank],
                *weights,
                score_before_experts=score_before_experts,
                heap=heap,
                config=config,
            )
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


def test_each_step_of_a_recorded_forward_is_told() -> None:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.rand(num, 4, generator=generator).topk(2).indices for num in NUM_TOKENS]
    batch = draw_batch(SHAPE, ids, seed=3, exact=True)

    def body(heap: SymmetricHeap) -> list[list[int]]:
        told: list[list[int]] = []
        for room in (None, 3):
            if room is not None:
                heap.room_rows = room
            numbers: list[int] = []
            x, scores, *weights = leaves(batch, heap.rank)
            options: dict[str, Any] = {"score_before_experts": False, "heap": heap, "config": DEFAULT}
            fused_moe(x, scores, ids[heap.rank], *weights, **options, on_step=numbers.append)
            told.append(numbers)
        return told

    for with_room, without in run_ranks(LAYOUT, body):
        assert with_room == list(range(len(FORWARD_STEPS)))
        # Both launches once more.
        assert without == list(range(len(FORWARD_STEPS) + 2))
