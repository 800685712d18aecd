"""Logs a run to wandb."""

import functools
import os
from typing import Any

import numpy as np
from torchtitan.components.metrics import BaseLogger
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger

from recipes.expert_load import ExpertLoad

PROJECT = "uniep-recipe"
# The most bins that wandb takes.
_MAX_BINS = 512


class WandbLogger(BaseLogger):
    """Logs to wandb; into an offline run where there is no API key or wandb does not take the run.

    A restarted run goes on in the same wandb run.
    """

    def __init__(self, folder: str, job_config: JobConfig, run_id: str):
        import wandb

        mode: Any = os.environ.get("WANDB_MODE")
        if mode is None and not has_wandb_login():
            mode = "offline"
            logger.info("wandb has no API key: the run is recorded offline; `wandb sync` uploads it later")
        os.makedirs(folder, exist_ok=True)
        start = functools.partial(
            wandb.init,
            entity=os.environ.get("WANDB_TEAM"),
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_RUN_NAME"),
            id=os.environ.get("WANDB_RUN_ID", run_id),
            group=os.environ.get("WANDB_RUN_GROUP"),
            resume="allow",
            dir=folder,
            config=job_config.to_dict(),
        )
        try:
            self._run = start(mode=mode)
        except wandb.Error as error:
            # Training goes on while wandb's server does not answer.
            logger.warning(f"wandb does not take the run, which is recorded offline; `wandb sync` uploads it: {error}")
            wandb.teardown()  # its service holds the run's id
            self._run = start(mode="offline")
        # Steps as an ordinary metric: wandb's own step counter drops the steps that a restart runs again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self._run.log(metrics | {"step": step})

    def close(self) -> None:
        self._run.finish()


def heat_maps(load: ExpertLoad) -> dict[str, Any]:
    """A histogram a layer with the experts as bins: over the steps wandb draws it as a heat map."""
    import wandb

    num_experts = len(load.tokens_per_expert[0])
    # Experts share a bin where there are more of them than bins.
    edges = np.arange(0, num_experts, -(-num_experts // _MAX_BINS))
    return {
        f"expert_load/layer_{layer:02}": wandb.Histogram(
            np_histogram=(np.add.reduceat(tokens, edges), np.append(edges, num_experts))
        )
        for layer, tokens in zip(load.layers, load.tokens_per_expert, strict=True)
    }


def has_wandb_login() -> bool:
    """Whether wandb finds an API key, without asking for one."""
    import wandb

    return bool(os.environ.get("WANDB_API_KEY")) or wandb.login(prompt=False)
