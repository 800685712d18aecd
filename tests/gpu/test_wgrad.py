"""The weight gradients on one GPU, bit for bit torch._grouped_mm's, over the models' MoE layers with 16 local experts.

python -m pytest tests/gpu/test_wgrad.py        # bits
PYTHONPATH=. python tests/gpu/test_wgrad.py     # bits again, then times; names of layers as arguments choose some
"""

import math
import statistics
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from tests.kernels.oracle import poison_new_tensors
from tools.moe_layers import named_shapes
from uniep.kernels.wgrad import WgradConfig, default_wgrad_config, launch_wgrad
from uniep.reference import GROUP_ALIGN_ROWS, grouped_wgrad
from uniep.shapes import MoEShape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NUM_LOCAL = 16
LAYERS = {
    name: MoEShape(NUM_LOCAL, shape.top_k, shape.dim, shape.hidden_dim)
    for name, shape in named_shapes(ep_degree=1).items()
}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "steps_of_64": {"block_t": 64},
    "pointers": {"block_d": 128, "num_stages": 3, "use_tma": False},
}


@dataclass(frozen=True)
class Operands:
    """Inputs of the launch, with NaN in the rows past R, and the same with groups padded to 8 rows for torch."""

    packed: list[Tensor]
    expert_offsets: Tensor
    padded: list[Tensor]
    padded_ends: Tensor

    @staticmethod
    def draw(shape: MoEShape, rows: list[int], num_spare_rows: int = 77) -> "Operands":
        num_rows = sum(rows)
        expert_offsets = torch.tensor([0, *rows]).cumsum(0)
        padded_rows = [max(-(-count // GROUP_ALIGN_ROWS), 1) * GROUP_ALIGN_ROWS for count in rows]
        padded_offsets = torch.tensor([0, *padded_rows]).cumsum(0)
        shift = torch.repeat_interleave(padded_offsets[:-1] - expert_offsets[:-1], torch.tensor(rows))
        place = (torch.arange(num_rows) + shift).cuda()

        packed, padded = [], []
        for width in (shape.hidden_dim, shape.hidden_dim, shape.dim, shape.dim, shape.hidden_dim):
            values = torch.full((num_rows + num_spare_rows, width), float("nan"), dtype=torch.bfloat16, device="cuda")
            values[:num_rows].normal_()
            packed.append(values)
            padded.append(values.new_zeros(sum(padded_rows), width).index_copy_(0, place, values[:num_rows]))
        return Operands(packed, expert_offsets.int().cuda(), padded, padded_offsets[1:].int().cuda())

    def launch(self, shape: MoEShape, config: WgradConfig) -> tuple[Tensor, Tensor, Tensor]:
        grad_g, grad_u, grad_y, x, h = self.packed
        return launch_wgrad(grad_g, grad_u, grad_y, x, h, self.expert_offsets, shape=shape, config=config)

    def stock(self) -> tuple[Tensor, Tensor, Tensor]:
        grad_g, grad_u, grad_y, x, h = self.padded
        pairs = ((grad_g, x), (grad_y, h), (grad_u, x))
        grad_w1, grad_w2, grad_w3 = (grouped_wgrad(left, right, self.padded_ends) for left, right in pairs)
        return grad_w1, grad_w2, grad_w3


def ragged_rows(mean: int) -> list[int]:
    """Rows of the local experts: from 0.3 to 1.3 parts each, one expert empty and one with a single row."""
    parts = torch.rand(NUM_LOCAL, generator=torch.Generator().manual_seed(0)) + 0.3
    rows = (parts / parts.sum() * mean * NUM_LOCAL).int().tolist()
    return [0, *rows[1:-2], 1, rows[-1]]


def config_of(variant: str) -> WgradConfig:
    config = default_wgrad_config(torch.device("cuda"))
    if not config.use_tma:
        pytest.skip("needs TMA")
    return replace(config, **VARIANTS[variant])


def differing(grads: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> list[int]:
    """Elements of each gradient whose bits differ. Zeros may not differ in sign either."""
    return [
        int((a.view(torch.int16) != b.view(torch.int16)).sum().item()) for a, b in zip(grads, expected, strict=True)
    ]


@pytest.mark.parametrize("variant", ["default", "steps_of_64"])
@pytest.mark.parametrize("name", LAYERS)
def test_bits_of_the_layers(name: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_tensors(monkeypatch)
    config, shape = config_of(variant), LAYERS[name]
    operands = Operands.draw(shape, ragged_rows(400))
    assert differing(operands.launch(shape, config), operands.stock()) == [0, 0, 0]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "rows",
    [[162, 0, 257, 446, 0, 83], [1], [0, 65, 31, 0], [0, 0, 3000, 0], [0, 0], [32, 64, 96], [7] * 70],
    ids=lambda rows: f"{len(rows)}_experts_{sum(rows)}_rows",
)
def test_bits_of_routings(rows: list[int], variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_tensors(monkeypatch)
    config, shape = config_of(variant), MoEShape(len(rows), 1, 1288, 360)
    operands = Operands.draw(shape, rows)
    assert differing(operands.launch(shape, config), operands.stock()) == [0, 0, 0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_infinities_stay_with_their_expert(variant: str) -> None:
    config, shape = config_of(variant), MoEShape(3, 1, 512, 256)
    operands = Operands.draw(shape, [33, 5, 40], num_spare_rows=0)
    clean = operands.launch(shape, config)
    for operand in operands.packed:
        operand[33:38] = float("inf")
    for grad, expected in zip(operands.launch(shape, config), clean, strict=True):
        assert torch.equal(grad[[0, 2]], expected[[0, 2]])
        assert torch.isinf(grad[1]).all()


@pytest.mark.parametrize("num_programs", [1, 5])
def test_few_programs(num_programs: int) -> None:
    config, shape = config_of("default"), MoEShape(3, 1, 1024, 512)
    operands = Operands.draw(shape, [100, 0, 333])
    grads = operands.launch(shape, replace(config, num_programs=num_programs))
    assert differing(grads, operands.stock()) == [0, 0, 0]


def test_repeats_its_bits() -> None:
    config, shape = config_of("default"), LAYERS["qwen3-30b-a3b"]
    operands = Operands.draw(shape, ragged_rows(1000))
    first = operands.launch(shape, config)
    for _ in range(20):
        assert differing(operands.launch(shape, config), first) == [0, 0, 0]


@pytest.mark.parametrize("variant", ["default", "pointers"])
def test_rows_past_2_to_the_31_elements(variant: str) -> None:
    config, shape = config_of(variant), MoEShape(2, 1, 7168, 256)
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB")
    operands = Operands.draw(shape, [300_000, 1003])
    assert differing(operands.launch(shape, config), operands.stock()) == [0, 0, 0]


def main() -> None:
    base = default_wgrad_config(torch.device("cuda"))
    ratios = []
    for name in sys.argv[1:] or LAYERS:
        shape = LAYERS[name]
        for mean_rows in (1024, 4096):
            operands = Operands.draw(shape, ragged_rows(mean_rows))
            num_rows = int(operands.expert_offsets[-1].item())
            num_flop = 3 * 2 * num_rows * shape.dim * shape.hidden_dim
            expected = operands.stock()
            stock_ms = triton.testing.do_bench(operands.stock, warmup=20, rep=100, return_mode="median")
            print(f"{name} D={shape.dim} F={shape.hidden_dim} L={NUM_LOCAL} R={num_rows}, ms (TFLOP/s), bits equal:")
            print(f"    {'torch._grouped_mm, 3 launches':32} {stock_ms:7.3f} ({num_flop / stock_ms / 1e9:3.0f})")
            for variant, switches in VARIANTS.items():
                config = replace(base, **switches)
                equal = differing(operands.launch(shape, config), expected) == [0, 0, 0]
                ms = triton.testing.do_bench(
                    lambda operands=operands, shape=shape, config=config: operands.launch(shape, config),
                    warmup=20,
                    rep=100,
                    return_mode="median",
                )
                print(f"    {variant:32} {ms:7.3f} ({num_flop / ms / 1e9:3.0f}) {equal}", flush=True)
                if variant == "default":
                    ratios.append(stock_ms / ms if equal else math.nan)
    print(f"torch._grouped_mm over default, geometric mean: {statistics.geometric_mean(ratios):.3f}")


if __name__ == "__main__":
    main()
