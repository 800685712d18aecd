"""Trains: `torchrun ... -m recipes.train --job.config_file FILE [--section.key value ...]`, as run_train.sh does."""

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import Tensor
from torchtitan import train
from torchtitan.config import JobConfig

from recipes.backend import RoutedBackend
from recipes.checks import ConfigError, check_config
from recipes.load import load_config
from recipes.metrics import RecipeMetrics
from recipes.parallelize import routed_backends
from recipes.timeline import StepTimeline
from recipes.weights import fingerprints


class RecipeTrainer(train.Trainer):
    """TorchTitan's Trainer, which also measures for our metrics, records the steps of the kernel timeline and the
    fingerprint of the last weights, and gives back what the MoE backend holds."""

    metrics_processor: RecipeMetrics

    def __init__(self, job_config: JobConfig):
        super().__init__(job_config)
        self.metrics_processor.count_experts(self.model_parts, self.model_args)
        if job_config.throughput.time_moe:
            self.metrics_processor.time_moe(self.model_parts)
        timeline = next((backend.timeline for backend in self._backends() if backend.timeline), None)
        self._timeline = StepTimeline(timeline, job_config.uniep.timeline_steps, job_config.job.dump_folder)

    def forward_backward_step(self, **inputs: Any) -> Tensor:
        with self.metrics_processor.forward_backward:
            return super().forward_backward_step(**inputs)

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        self._timeline.begin(self.step)
        super().train_step(data_iterator)
        # Before a checkpoint could keep what a launch that gave up has left.
        for backend in self._backends():
            backend.check()
        self.metrics_processor.add_timeline_files(self._timeline.end(self.step))
        if self.step == self.job_config.training.steps:
            self.metrics_processor.note_weights(self.step, fingerprints(self.model_parts))

    def close(self) -> None:
        super().close()
        if sys.exc_info()[0] is not None:
            return  # A failed rank comes alone, and giving back symmetric memory waits for all.
        for backend in self._backends():
            backend.close()

    def _backends(self) -> list[RoutedBackend]:
        return routed_backends(getattr(self, "model_parts", []))  # missing where the start failed


class _Parsed:
    """Hands TorchTitan's main the config that was checked instead of having it parsed again."""

    def __init__(self, config: JobConfig):
        self._config = config

    def parse_args(self) -> JobConfig:
        return self._config


def main(args: list[str]) -> int:
    """Runs TorchTitan's own training loop on a checked config. Returns the exit status."""
    try:
        config = load_config(args)
        check_config(config, int(os.environ["WORLD_SIZE"]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    train.ConfigManager = lambda: _Parsed(config)  # type: ignore[assignment,misc]
    train.main(RecipeTrainer)
    return 0


def leave(status: int) -> NoReturn:
    """Ends the process as multiprocessing ends its children: threads and exit functions, but no finalization of the
    interpreter. In that, a worker thread of Gloo that only then lets go of its last tensor aborts the rank (seen with
    torch 2.13 in one of ten short runs on CPUs)."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
