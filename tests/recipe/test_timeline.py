"""A training run of two ranks on interpreted kernels, one of whose steps records its timeline."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from tests.processes import run_ranks
from tests.recipe.runs import ROOT, TOKENIZER, read_run
from tests.recipe.runs import _train as train_rank
from tools.timeline_records import read_timelines

SMALL = ("--training.seq_len=8", "--training.local_batch_size=1", "--training.steps=1", "--lr_scheduler.warmup_steps=0")


def train_interpreted(args: list[str], shared: str) -> None:
    """A rank whose fused kernels run interpreted, on shared memory: the recipe itself runs them on GPUs only."""
    import recipes.checks
    import recipes.parallelize
    from recipes.backend import RoutedBackend
    from uniep.kernels.config import default_config
    from uniep.kernels.timeline import Timeline
    from uniep.layer import fused_moe
    from uniep.plan.layout import HeapLayout
    from uniep.symmetric.shared_memory import open_shared_memory

    def open_interpreted(
        name: str, shape: Any, *, max_tokens: int, ep_mesh: Any, options: Any, **_: Any
    ) -> RoutedBackend:
        device = torch.device("cpu")
        layout = HeapLayout(shape, max_tokens, tile_rows=16)
        heap = open_shared_memory(layout, rank=ep_mesh.get_local_rank(), directory=Path(shared))
        timeline = Timeline(device) if options.timeline_steps else None
        run = functools.partial(fused_moe, heap=heap, config=default_config(device), timeline=timeline)
        return RoutedBackend("uniep", run, close=heap.close, timeline=timeline)

    for module in (recipes.checks, recipes.parallelize):
        module.resolve_backend = lambda config, world_size: "uniep"  # type: ignore[attr-defined]
    recipes.parallelize.open_backend = open_interpreted  # type: ignore[assignment]
    train_rank(args)


def test_recorded_step(tmp_path: Path) -> None:
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1")
    folder, logs = tmp_path / "run", tmp_path / "logs"
    args = [f"--job.config_file={ROOT}/train_configs/qwen3_cpu.toml", f"--model.hf_assets_path={TOKENIZER}"]
    args += [f"--job.dump_folder={folder}", "--metrics.no_enable_wandb", "--training.mixed_precision_param=bfloat16"]
    args += [*SMALL, "--uniep.timeline_steps", "1", "--uniep.tune.mode", "off"]
    with tempfile.TemporaryDirectory(prefix="uniep-", dir="/dev/shm") as shared:
        run_ranks(train_interpreted, args, shared, num_ranks=2, logs=logs)

    files = [f"timeline/step-1.rank-{rank}.npz" for rank in range(2)]
    assert read_run(folder)["timeline"] == files
    assert sorted(path.name for path in (folder / "timeline").iterdir()) == [Path(file).name for file in files]
    timelines = read_timelines(folder)
    assert [(timeline.step, timeline.rank) for timeline in timelines] == [(1, 0), (1, 1)]
    for timeline in timelines:
        # Of one of the two layers.
        names = [launch.name for launch in timeline.launches]
        assert names == ["exchange", "up", "down", "down_grad", "wgrad", "up_grad"]
        assert timeline.num_unrecorded_launches == 0
    assert "Step 1 records the kernels of its first MoE layer" in (logs / "rank0.log").read_text()
