"""uniep.reference on one rank: against an fp64 oracle, and its sums against their orders spelled out."""

from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor

from uniep.numerics import Numerics
from uniep.reference import reference_moe, sum_by_expert, sum_over_k

D, F = 12, 20
# The largest relative error of one rounding to bf16.
ROUNDING_BF16 = 2.0**-8


@dataclass
class Inputs:
    x_TD: Tensor
    scores_TK: Tensor
    w1_EFD: Tensor
    w2_EDF: Tensor
    w3_EFD: Tensor


@dataclass
class Results:
    """The output, and the gradient of every input for one gradient of the output."""

    out_TD: Tensor
    x_TD: Tensor
    scores_TK: Tensor
    w1_EFD: Tensor
    w2_EDF: Tensor
    w3_EFD: Tensor


def draw(num_tokens: int, top_k: int, num_experts: int, dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(num_tokens * 1000 + top_k * 10 + num_experts)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return Inputs(
        normal(num_tokens, D).to(dtype),
        normal(num_tokens, top_k).sigmoid(),
        normal(num_experts, F, D).div(D**0.5).to(dtype),
        normal(num_experts, D, F).div(F**0.5).to(dtype),
        normal(num_experts, F, D).div(D**0.5).to(dtype),
    )


def draw_ids(num_tokens: int, top_k: int, num_experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens + top_k)
    return torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k].contiguous()


def grad_of_out(inputs: Inputs) -> Tensor:
    return torch.randn(inputs.x_TD.shape, generator=torch.Generator().manual_seed(7)).to(inputs.x_TD.dtype)


def run_reference(inputs: Inputs, expert_ids_TK: Tensor, score_before_experts: bool) -> Results:
    leaves = Inputs(*(getattr(inputs, f.name).clone().requires_grad_() for f in fields(Inputs)))
    out_TD = reference_moe(
        leaves.x_TD,
        leaves.scores_TK,
        expert_ids_TK,
        leaves.w1_EFD,
        leaves.w2_EDF,
        leaves.w3_EFD,
        group=None,
        numerics=Numerics(score_before_experts),
    )
    out_TD.backward(grad_of_out(inputs))
    return _results(out_TD, leaves)


def run_oracle(inputs: Inputs, expert_ids_TK: Tensor, score_before_experts: bool) -> Results:
    """A loop over tokens in fp64, with torch's own autograd."""
    leaves = Inputs(*(getattr(inputs, f.name).double().requires_grad_() for f in fields(Inputs)))
    x, scores = leaves.x_TD.unbind(0), leaves.scores_TK.unbind(0)
    w1, w2, w3 = (w.unbind(0) for w in (leaves.w1_EFD, leaves.w2_EDF, leaves.w3_EFD))
    rows = []
    for token, experts in enumerate(expert_ids_TK.tolist()):
        total = torch.zeros(D, dtype=torch.float64)
        for k, expert in enumerate(experts):
            row = x[token] * scores[token][k] if score_before_experts else x[token]
            gate = w1[expert] @ row
            y = w2[expert] @ (gate / (1 + torch.exp(-gate)) * (w3[expert] @ row))
            total = total + (y if score_before_experts else y * scores[token][k])
        rows.append(total)
    out_TD = torch.stack(rows)
    out_TD.backward(grad_of_out(inputs).double())
    return _results(out_TD, leaves)


def _results(out_TD: Tensor, leaves: Inputs) -> Results:
    grads = []
    for f in fields(Inputs):
        leaf = getattr(leaves, f.name)
        grads.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
    return Results(out_TD.detach(), *grads)


def assert_close(ours: Results, oracle: Results, *, relative: float) -> None:
    """Every tensor within `relative` of the oracle's, both in norm and, against its largest element, elementwise."""
    for f in fields(Results):
        mine, right = getattr(ours, f.name).double(), getattr(oracle, f.name)
        error = mine - right
        assert error.norm() <= relative * right.norm(), f.name
        assert error.abs().max() <= 4 * relative * right.abs().max(), f.name


@pytest.mark.parametrize("score_before_experts", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 6, 8, 10])
def test_fp32_equals_the_oracle(top_k, score_before_experts):
    inputs, expert_ids_TK = draw(19, top_k, 12), draw_ids(19, top_k, 12)
    ours = run_reference(inputs, expert_ids_TK, score_before_experts)
    assert_close(ours, run_oracle(inputs, expert_ids_TK, score_before_experts), relative=1e-6)


@pytest.mark.parametrize("score_before_experts", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 6, 8, 10])
def test_bf16_is_within_its_rounding(top_k, score_before_experts):
    inputs, expert_ids_TK = draw(24, top_k, 12, torch.bfloat16), draw_ids(24, top_k, 12)
    ours = run_reference(inputs, expert_ids_TK, score_before_experts)
    for f in fields(Results):
        expected = torch.float32 if f.name == "scores_TK" else torch.bfloat16
        assert getattr(ours, f.name).dtype == expected, f.name
    # A rounding after every GEMM, product and addition; a gradient of x has K additions.
    assert_close(ours, run_oracle(inputs, expert_ids_TK, score_before_experts), relative=2.5 * ROUNDING_BF16)


@pytest.mark.parametrize("score_before_experts", [False, True])
@pytest.mark.parametrize("top_k", [1, 8])
def test_one_token(top_k, score_before_experts):
    inputs, expert_ids_TK = draw(1, top_k, 16), draw_ids(1, top_k, 16)
    ours = run_reference(inputs, expert_ids_TK, score_before_experts)
    assert_close(ours, run_oracle(inputs, expert_ids_TK, score_before_experts), relative=1e-6)


@pytest.mark.parametrize("score_before_experts", [False, True])
def test_no_token(score_before_experts):
    ours = run_reference(draw(0, 2, 4), torch.empty(0, 2, dtype=torch.int64), score_before_experts)
    assert ours.out_TD.shape == (0, D)
    assert not ours.w1_EFD.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("score_before_experts", [False, True])
def test_experts_without_rows_get_exact_zeros(score_before_experts, dtype):
    rows_E = torch.tensor([162, 0, 2577, 446, 0, 83])
    expert_ids = torch.repeat_interleave(torch.arange(6), rows_E)
    expert_ids = expert_ids[torch.randperm(len(expert_ids), generator=torch.Generator().manual_seed(0))]
    inputs, expert_ids_TK = draw(len(expert_ids), 1, 6, dtype), expert_ids[:, None]
    ours = run_reference(inputs, expert_ids_TK, score_before_experts)
    if dtype == torch.float32:
        assert_close(ours, run_oracle(inputs, expert_ids_TK, score_before_experts), relative=1e-6)
    for name in ("w1_EFD", "w2_EDF", "w3_EFD"):
        grad = getattr(ours, name)
        for expert, num_rows in enumerate(rows_E.tolist()):
            assert grad[expert].any() == (num_rows > 0), (name, expert)


def test_fp32_weights_with_bf16_tokens():
    """FSDP's master weights without mixed precision: products in bf16, gradients in the weights' dtype."""
    inputs, expert_ids_TK = draw(24, 2, 4), draw_ids(24, 2, 4)
    inputs.x_TD = inputs.x_TD.bfloat16()
    ours = run_reference(inputs, expert_ids_TK, False)
    assert ours.out_TD.dtype == torch.bfloat16
    assert ours.w1_EFD.dtype == ours.w2_EDF.dtype == ours.w3_EFD.dtype == torch.float32
    assert_close(ours, run_oracle(inputs, expert_ids_TK, False), relative=2.5 * ROUNDING_BF16)


def uneven_rows(top_k: int) -> Tensor:
    """bf16 rows [T, K, D] over seven binary orders, so that bf16 sums in another order round to other bits."""
    generator = torch.Generator().manual_seed(top_k)
    rows_TKD = torch.randn(64, top_k, 8, generator=generator)
    return (rows_TKD * torch.randint(0, 7, rows_TKD.shape, generator=generator).exp2()).bfloat16()


def cancelling_rows(top_k: int) -> Tensor:
    """bf16 rows [T, K, D] with a huge value and its negative at any two k: what is added between them is lost."""
    generator = torch.Generator().manual_seed(top_k)
    rows_TKD = torch.randn(64, top_k, 8, generator=generator)
    if top_k > 1:
        rows_TKD[:, 0], rows_TKD[:, 1] = 2.0**26, -(2.0**26)
    return rows_TKD.gather(1, torch.rand(rows_TKD.shape, generator=generator).argsort(1)).bfloat16()


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5, 6, 8, 10, 16])
def test_sum_over_k_is_four_interleaved_partial_sums(top_k):
    rows_TKD = cancelling_rows(top_k)
    expected_TD = torch.empty(64, 8, dtype=torch.bfloat16)
    for t in range(64):
        for d in range(8):
            partial = [torch.tensor(0.0) for _ in range(4)]
            for k in range(top_k):
                partial[k % 4] = partial[k % 4] + rows_TKD[t, k, d].float()
            expected_TD[t, d] = ((partial[0] + partial[1]) + partial[2]) + partial[3]
    assert torch.equal(sum_over_k(rows_TKD), expected_TD)
    if top_k > 4:  # where it is not a running sum
        running_TD = torch.zeros(64, 8)
        for k in range(top_k):
            running_TD = running_TD + rows_TKD[:, k].float()
        assert not torch.equal(running_TD.bfloat16(), expected_TD)


@pytest.mark.parametrize("top_k", [1, 2, 6, 8, 10])
def test_sum_by_expert_rounds_after_every_addition(top_k):
    rows_TKD, expert_ids_TK = uneven_rows(top_k), draw_ids(64, top_k, 16)
    expected_TD = torch.empty(64, 8, dtype=torch.bfloat16)
    for t in range(64):
        ascending = sorted(range(top_k), key=lambda k: expert_ids_TK[t, k].item())
        for d in range(8):
            total = torch.tensor(0.0)
            for k in ascending:
                total = (total + rows_TKD[t, k, d].float()).bfloat16().float()
            expected_TD[t, d] = total
    assert torch.equal(sum_by_expert(rows_TKD, expert_ids_TK), expected_TD)
    if top_k > 2:
        by_k = sum_by_expert(rows_TKD, torch.arange(top_k).expand(64, -1))
        assert not torch.equal(by_k, expected_TD)
