"""The weight gradients, interpreted, against products of each expert's rows alone."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.kernels.oracle import poison_new_tensors
from uniep.kernels import wgrad
from uniep.kernels.wgrad import WgradConfig, launch_wgrad
from uniep.shapes import MoEShape, ShapeError

POINTERS = WgradConfig(num_programs=3, block_f=64, block_d=128, use_tma=False)
TMA = WgradConfig(num_programs=2, block_f=64, block_d=128, block_t=64)
CONFIGS = {"pointers": POINTERS, "tma": TMA}

# grad_g, grad_u, grad_y, x, h.
Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """Rows of each expert, widths, and rows past R in the buffers."""

    rows: tuple[int, ...]
    dim: int = 128
    hidden_dim: int = 64
    num_spare_rows: int = 40


CASES = {
    "ragged": Case((162, 0, 257, 446, 0, 83)),
    "one_row": Case((1,)),
    "one_row_each": Case((1, 1, 1, 1, 1)),
    "empty_first_and_last": Case((0, 65, 31, 0)),
    "all_in_one": Case((0, 0, 300, 0)),
    "no_rows": Case((0, 0)),
    "whole_steps": Case((32, 64, 96)),
    "no_spare_rows": Case((33, 31, 32), num_spare_rows=0),
    "widths_beside_the_tiles": Case((40, 0, 7), dim=200, hidden_dim=88),
    "widths_below_a_tile": Case((40, 9), dim=40, hidden_dim=24),
}


def offsets_of(rows: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *rows]).cumsum(0).to(torch.int32)


def shape_of(case: Case) -> MoEShape:
    return MoEShape(len(case.rows), 1, case.dim, case.hidden_dim)


def draw_operands(case: Case, *, exact: bool) -> Operands:
    """NaN in the rows past R. exact: no order of the additions changes a bit."""
    generator = torch.Generator().manual_seed(sum(case.rows))

    def draw(width: int) -> Tensor:
        size = (sum(case.rows), width)
        values = torch.randint(-4, 5, size, generator=generator) if exact else torch.randn(size, generator=generator)
        return torch.cat([values, torch.full((case.num_spare_rows, width), float("nan"))]).bfloat16()

    dim, hidden_dim = case.dim, case.hidden_dim
    return draw(hidden_dim), draw(hidden_dim), draw(dim), draw(dim), draw(hidden_dim)


def wgrad_ref(operands: Operands, expert_offsets: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """grad_w1, grad_w2, grad_w3, computed in dtype."""
    grad_g_RF, grad_u_RF, grad_y_RD, x_RD, h_RF = (operand.to(dtype) for operand in operands)
    spans = [slice(*span) for span in pairwise(expert_offsets.tolist())]
    pairs = ((grad_g_RF, x_RD), (grad_y_RD, h_RF), (grad_u_RF, x_RD))
    return [torch.stack([left[span].T @ right[span] for span in spans]) for left, right in pairs]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_exact_sums(case: Case, config: WgradConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_tensors(monkeypatch)
    operands, expert_offsets = draw_operands(case, exact=True), offsets_of(case.rows)
    grads = launch_wgrad(*operands, expert_offsets, shape=shape_of(case), config=config)
    for grad, expected in zip(grads, wgrad_ref(operands, expert_offsets, torch.float32), strict=True):
        assert torch.equal(grad, expected.bfloat16())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_random_sums(config: WgradConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_tensors(monkeypatch)
    case = CASES["ragged"]
    operands, expert_offsets = draw_operands(case, exact=False), offsets_of(case.rows)
    grads = launch_wgrad(*operands, expert_offsets, shape=shape_of(case), config=config)
    for grad, expected in zip(grads, wgrad_ref(operands, expert_offsets, torch.float64), strict=True):
        # One rounding is half of 2^-7 of the value; fp32 sums that cancel add a little.
        assert torch.all((grad.double() - expected).abs() <= 2.0**-8 * expected.abs() + 1e-4)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_infinities_stay_with_their_expert(config: WgradConfig) -> None:
    case = Case((33, 5, 40), num_spare_rows=0)
    operands, expert_offsets = draw_operands(case, exact=True), offsets_of(case.rows)
    clean = launch_wgrad(*operands, expert_offsets, shape=shape_of(case), config=config)
    for operand in operands:
        operand[33:38] = float("inf")
    grads = launch_wgrad(*operands, expert_offsets, shape=shape_of(case), config=config)
    for grad, expected in zip(grads, clean, strict=True):
        assert torch.equal(grad[[0, 2]], expected[[0, 2]])
        assert torch.isinf(grad[1]).all()


@pytest.mark.parametrize(("num_programs", "group_f"), [(1, 16), (7, 1), (2, 3)])
def test_any_order_of_tiles(num_programs: int, group_f: int) -> None:
    case = Case((5, 0, 70), dim=96, hidden_dim=80)
    operands, expert_offsets = draw_operands(case, exact=True), offsets_of(case.rows)
    config = WgradConfig(num_programs, block_f=32, block_d=32, group_f=group_f, use_tma=False)
    grads = launch_wgrad(*operands, expert_offsets, shape=shape_of(case), config=config)
    for grad, expected in zip(grads, wgrad_ref(operands, expert_offsets, torch.float32), strict=True):
        assert torch.equal(grad, expected.bfloat16())


@triton.jit
def _ranks_kernel(expert_offsets, ranks, L: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr):
    tl.store(ranks + tl.arange(0, EXPERTS), wgrad._ranks_by_rows(expert_offsets, L, EXPERTS, STEP))


def test_experts_go_by_falling_rows() -> None:
    rows = torch.tensor([3, 0, 9, 3, 0, 12])
    ranks = torch.empty(8, dtype=torch.int32)
    _ranks_kernel[(1,)](offsets_of(tuple(rows.tolist())), ranks, L=6, EXPERTS=8, STEP=4)
    assert ranks[:6].tolist() == [2, 4, 1, 3, 5, 0]
    assert ranks[6:].min() >= 6


def test_empty_buffers_give_zeros() -> None:
    operands = draw_operands(Case((0, 0), num_spare_rows=0), exact=True)
    grads = launch_wgrad(*operands, offsets_of((0, 0)), shape=MoEShape(2, 1, 128, 64), config=TMA)
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


def test_refuses_what_does_not_fit() -> None:
    operands, expert_offsets = draw_operands(Case((3, 4)), exact=True), offsets_of((3, 4))
    g, u, y, x, h = operands
    shape = MoEShape(2, 1, 128, 64)
    with pytest.raises(ShapeError, match="grad_g_RF must be contiguous bf16"):
        launch_wgrad(y, u, y, x, h, expert_offsets, shape=shape, config=POINTERS)
    with pytest.raises(ShapeError, match="h_RF must be contiguous bf16"):
        launch_wgrad(g, u, y, x, h.float(), expert_offsets, shape=shape, config=POINTERS)
    with pytest.raises(ShapeError, match="expert_offsets must be int32"):
        launch_wgrad(*operands, expert_offsets.long(), shape=shape, config=POINTERS)
    with pytest.raises(ShapeError, match="hidden_dim must be a multiple of 8"):
        launch_wgrad(*operands, expert_offsets, shape=MoEShape(2, 1, 128, 60), config=POINTERS)
    with pytest.raises(ValueError, match="block_t must be a power of two"):
        WgradConfig(1, block_t=48)
