"""What the dashboard shows, in its order: the same for the page and for wandb."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from tools import dashboard_figures as figures
from tools.dashboard_figures import Shown


@dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
        build: makes the page's figure of some runs.
        metrics: what wandb shows in its place, by the names that recipes/metrics.py logs.
        one_run_each: a figure for every run, not one for all.
        min_runs: runs that it takes.
    """

    title: str
    build: Callable[[Sequence[Shown]], go.Figure]
    metrics: tuple[str, ...] = ()
    one_run_each: bool = False
    min_runs: int = 1


PANELS = (
    Panel("Loss", figures.loss_figure, ("loss_metrics/global_avg_loss", "loss_metrics/global_max_loss")),
    Panel("Difference of the loss", figures.difference_figure, min_runs=2),
    Panel("Gradient norm", figures.grad_norm_figure, ("grad_norm",)),
    Panel(
        "Tokens/day, median and spread",
        figures.tokens_figure,
        ("throughput/tokens_per_day", "throughput/tokens_per_day_median"),
    ),
    Panel(
        "Step time",
        figures.step_time_figure,
        ("throughput/step_time_s", "time_metrics/forward_backward(s)", "time_metrics/data_loading(s)"),
    ),
    Panel("Memory", figures.memory_figure, ("memory/max_reserved_gib", "memory/max_active_gib")),
    Panel(
        "Expert imbalance over layers and steps",
        lambda runs: figures.imbalance_figure(runs[0]),
        ("expert_load/imbalance_max", "expert_load/imbalance_mean", "expert_load/rank_imbalance_max"),
        one_run_each=True,
    ),
    Panel("Tokens per expert", lambda runs: figures.experts_figure(runs[0]), one_run_each=True),
    Panel(
        "Ranks a token goes to",
        figures.ranks_figure,
        ("expert_load/distinct_ranks", "expert_load/distinct_ranks_expected"),
    ),
)
