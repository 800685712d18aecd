"""Long runs whose routing drifts from balance to all tokens on one rank: of the recipe on 2 GPUs, and of one layer by
virtual ranks of one GPU."""

import math
import os

import pytest
import torch

from tests.gpu.virtual_layer import Case
from tests.processes import run_on_two_gpus
from tests.recipe.runs import read_run, read_steps
from uniep.layer import backward_steps, forward_steps
from uniep.plan.layout import HeapLayout
from uniep.plan.room import Room
from uniep.shapes import MoEShape
from uniep.symmetric.virtual_ranks import open_virtual_ranks, run_side_by_side

STEPS = int(os.environ.get("DRIFT_STEPS", "5000"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs")
@pytest.mark.timeout(700)  # for so many steps
def test_no_hang_no_growth_of_memory_and_every_loss_finite(tmp_path):
    folder = tmp_path / "run"
    args = ["--job.config_file", "train_configs/deepseek_v3_debug.toml", "--job.dump_folder", str(folder)]
    args += ["--training.steps", str(STEPS), "--metrics.no-enable-wandb"]
    args += ["--model.n_layers", "3", "--training.seq_len", "512", "--uniep.backend", "uniep"]
    run_on_two_gpus("drift_training.py", *args, timeout_s=600.0)
    assert read_run(folder)["backend"]["ran"] == "uniep"
    steps = read_steps(folder)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"]) for step in steps)
    loads = [step["expert_load"]["tokens_per_expert"] for step in steps if "expert_load" in step]
    # Of 8 experts a token takes 3: at the end always the same ones.
    assert all(min(tokens) > 0 for tokens in loads[0])
    assert all(sum(tokens[:3]) == sum(tokens) for tokens in loads[-1])
    # All rows on one rank are the most that there can be: from then on nothing grows.
    memory = [step["memory_gib"] for step in steps]
    assert max(memory[STEPS * 3 // 4 :]) <= max(memory[: STEPS * 3 // 4])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_layer_learns_while_its_routing_drifts():
    """4 virtual ranks; all experts are trained to halve their tokens. From three quarters of the steps on, every token
    goes to the first experts, all of the first rank."""
    num_ranks, num_tokens, lr = 4, 256, 0.3
    case = Case(top_k=4, dim=256, hidden_dim=128)
    shape = MoEShape(case.num_local * num_ranks, case.top_k, case.dim, case.hidden_dim, num_ranks)
    config = case.config(num_ranks)
    heaps = open_virtual_ranks(HeapLayout(shape, num_tokens, num_kept=1), device="cuda", timeout_s=20.0)
    rooms = [Room(heap.layout) for heap in heaps]
    streams = [torch.cuda.Stream() for _ in heaps]
    generator = torch.Generator("cuda").manual_seed(11)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda", generator=generator)

    up_shape = (case.num_local, case.hidden_dim, case.dim)
    down_shape = (case.num_local, case.dim, case.hidden_dim)
    weights = [[normal(*s) * 0.05 for s in (up_shape, down_shape, up_shape)] for _ in heaps]
    gate = normal(case.dim, shape.num_experts) * 0.05
    losses = torch.zeros(STEPS, num_ranks, device="cuda")
    rows = torch.zeros(STEPS, num_ranks, device="cuda", dtype=torch.int64)
    reserved = []
    for step in range(STEPS):
        bias = torch.zeros(shape.num_experts, device="cuda")
        bias[: case.top_k] = 12 * min(step / (0.75 * STEPS), 1.0) ** 3
        inputs, own = [], [[weight.bfloat16() for weight in of_rank] for of_rank in weights]
        for _ in heaps:
            x_TD = normal(num_tokens, case.dim).bfloat16()
            logits = x_TD.float() @ gate
            ids = (logits + bias).topk(case.top_k).indices
            inputs.append([x_TD, logits.gather(1, ids).softmax(1), ids])
        forwards = [
            forward_steps(
                *inputs[heap.rank], *own[heap.rank], heap=heap, save=True, room=rooms[heap.rank], config=config
            )
            for heap in heaps
        ]
        saved, grads = [], []
        for rank, (out_TD, kept) in enumerate(run_side_by_side(forwards, streams=streams)):
            error = out_TD.float() - 0.5 * inputs[rank][0].float()
            losses[step, rank] = error.square().mean()
            grads.append((error / num_tokens).bfloat16())
            saved.append(kept)
            rows[step, rank] = len(kept.x_RD)
        backwards = [
            backward_steps(
                grads[heap.rank],
                saved[heap.rank],
                *[None, *inputs[heap.rank][1:]],
                *own[heap.rank],
                heap=heap,
                config=config,
            )
            for heap in heaps
        ]
        for of_rank, got in zip(weights, run_side_by_side(backwards, streams=streams), strict=True):
            for weight, grad in zip(of_rank, (got.w1_LFD, got.w2_LDF, got.w3_LFD), strict=True):
                weight.sub_(grad, alpha=lr)
        del saved, forwards, backwards, kept, got
        reserved.append(torch.cuda.memory_reserved())
    for heap in heaps:
        heap.check()
    assert losses.isfinite().all()
    assert losses[-1].mean() < 0.7 * losses[0].mean()
    # All rows of all ranks at the first one; a rank without any keeps a row for its tensors' address.
    assert rows[-1].tolist() == [num_ranks * num_tokens * case.top_k, 1, 1, 1]
    assert rows[0].max() < 2 * rows[0].min()
    assert reserved[-1] <= max(reserved[: STEPS * 3 // 4])
