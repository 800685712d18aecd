"""TorchTitan's metrics with tokens/day, progress and expert load: every step into the run's records, every `log_freq`
steps to the console, TensorBoard and wandb."""

import copy
import functools
import os
import statistics
import time
from collections import Counter, deque
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtitan.components.metrics import BaseLogger, MetricsProcessor, _get_metrics_rank
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import NoColor, device_type

from recipes.backend import RoutedBackend
from recipes.data import fingerprint
from recipes.expert_load import ExpertLoad, ExpertLoadCounter
from recipes.parallelize import routed_backends
from recipes.progress import SECONDS_PER_DAY, Progress, humanize
from recipes.records import RunRecords, StepRecord, commit, versions
from recipes.step_timer import StepTimer, time_moe
from recipes.wandb_logger import WandbLogger, heat_maps
from uniep.shapes import MoEShape

# Names for which torchtitan.tools.utils.get_peak_flops has a peak; for any other it assumes an A100's.
_KNOWN_PEAK = ("A100", "H100", "H200", "H20", "B200", "MI355X", "MI300X", "MI325X", "MI250X", "Max 1550", "l40s")

# Steps whose median is logged: the time that it takes does not grow with the run.
_NUM_RATES = 1000


class RecipeMetrics(MetricsProcessor):
    """TorchTitan's processor, with a record of every step and global tokens/day.

    Attributes:
        forward_backward: what the trainer enters around each forward and backward.
    """

    logger: BaseLogger
    time_last_log: float
    ntokens_since_last_log: int

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims, tag: str | None = None):
        stock_config = copy.copy(job_config)
        stock_config.metrics = replace(job_config.metrics, enable_wandb=False)  # ours takes its place
        super().__init__(stock_config, parallel_dims, tag)
        self.job_config = job_config
        if os.environ.get("NO_COLOR"):
            self.color = NoColor()
        self._data_parallel_degree = parallel_dims.dp_replicate * parallel_dims.dp_shard
        device_name = self.device_memory_monitor.device_name
        self._has_known_peak = any(name in device_name for name in _KNOWN_PEAK)
        self.forward_backward = StepTimer()
        self._moe: StepTimer | None = None
        self._expert_load: ExpertLoadCounter | None = None
        self._wandb: WandbLogger | None = None
        # Of the last steps, without the first of this process.
        self._rates: deque[float] = deque(maxlen=_NUM_RATES)
        self._is_first_step = True
        self._started = time.perf_counter()
        self._tokens_since_console = 0
        self._seconds_since_console = 0.0
        self._data_loading_since_console = 0.0
        self._records: RunRecords | None = None
        if torch.distributed.get_rank() == _get_metrics_rank(parallel_dims, job_config):
            self._records = self._open_records(device_name)
            if not self._has_known_peak:
                logger.warning(f"MFU is left out: the peak rate of {device_name} is not known")

    def count_experts(self, model_parts: list[nn.Module], model_args: Any) -> None:
        """Counts the load of the experts from now on, for the steps that are logged."""
        dims = self.parallel_dims
        moe = model_args.moe_args
        meshes = [mesh for name in ("loss", "pp") if (mesh := dims.get_optional_mesh(name)) is not None]
        self._expert_load = ExpertLoadCounter(
            model_parts,
            MoEShape(moe.num_experts, moe.top_k, model_args.dim, model_args.moe_inter_dim, ep_degree=dims.ep),
            num_layers=model_args.n_layers,
            groups=[mesh.get_group() for mesh in meshes],
        )

    def time_moe(self, model_parts: list[nn.Module]) -> None:
        """Times the MoE blocks from now on."""
        self._moe = StepTimer()
        time_moe(model_parts, self._moe)

    def should_log(self, step: int) -> bool:
        # Every step is recorded. The trainer waits for the device every step in any case, to count valid tokens.
        return True

    def _is_logged(self, step: int) -> bool:
        """Whether a step goes to the console and the other logs: also the first one of a process, which compiles and
        warms up and so stands for itself, and the last one."""
        return super().should_log(step) or self._is_first_step or step == self.job_config.training.steps

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Records one step. Losses and norms are of all ranks; `extra_metrics` holds the trainer's n_tokens_seen."""
        now = time.perf_counter()
        step_time_s = now - self.time_last_log
        tokens = self.ntokens_since_last_log * self._data_parallel_degree
        tokens_per_second = tokens / step_time_s
        memory = self.device_memory_monitor.get_peak_stats()
        extra = dict(extra_metrics or {})
        is_logged = self._is_logged(step)
        load = self._expert_load.collect() if self._expert_load is not None and is_logged else None
        record = StepRecord(
            step=step,
            loss=global_avg_loss,
            grad_norm=grad_norm,
            loss_hex=float(global_avg_loss).hex(),
            grad_norm_hex=float(grad_norm).hex(),
            # The trainer sums over context-parallel ranks too, which read the same tokens.
            tokens_seen=int(extra.pop("n_tokens_seen", 0)) // self.parallel_dims.cp,
            step_time_s=step_time_s,
            tokens_per_second=tokens_per_second,
            tokens_per_day=tokens_per_second * SECONDS_PER_DAY,
            memory_gib=memory.max_reserved_gib + self._symmetric_gib(),
            data_loading_s=sum(self.data_loading_times),
            forward_backward_s=self.forward_backward.take_s(),
            unix_time_s=time.time(),
            moe_s=self._moe.take_s() if self._moe is not None else None,
            expert_load=load,
        )
        if self._records is not None:
            if self._is_first_step:
                start_up_s = sum((Counter(backend.start_up) for backend in self._routed), Counter())
                self._records.note(backend=self._backend(), start_up_s=dict(start_up_s))
            self._records.write_step(record)

        self._tokens_since_console += tokens
        self._seconds_since_console += step_time_s
        if not self._is_first_step:
            self._rates.append(tokens_per_second)
        self._data_loading_since_console += record.data_loading_s
        if is_logged:
            self._log_interval(record, global_max_loss, memory, extra)
            self._tokens_since_console = 0
            self._seconds_since_console = self._data_loading_since_console = 0.0
        self._is_first_step = False
        if self._expert_load is not None:
            self._expert_load.enabled = self._is_logged(step + 1)
        self.data_loading_times.clear()
        self.ntokens_since_last_log = 0
        self.time_last_log = now
        self.device_memory_monitor.reset_peak_stats()

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        for backend in self._routed:
            backend.check()  # no loss of rows that never came
        super().log_validation(loss, step, extra_metrics)
        if self._wandb is not None:
            self._wandb.log({"validation_metrics/loss": loss, **(extra_metrics or {})}, step)

    def note_weights(self, step: int, fingerprints: dict[str, str]) -> None:
        """Records the fingerprints of the weights behind a step, which is the last."""
        if self._records is not None:
            self._records.add(weights={"step": step, "fingerprints": fingerprints})

    def add_timeline_files(self, names: list[str]) -> None:
        """Lists what a recorded step wrote in the run's records."""
        if self._records is not None and names:
            self._records.add_timeline_files(names)

    def close(self) -> None:
        super().close()
        if self._wandb is not None:
            self._wandb.close()
        if self._records is not None:
            self._records.close()

    def _log_interval(self, record: StepRecord, global_max_loss: float, memory: Any, extra: dict[str, Any]) -> None:
        tokens_per_second = self._tokens_since_console / self._seconds_since_console
        median_per_second = statistics.median(self._rates or [record.tokens_per_second])
        per_device = tokens_per_second / self.parallel_dims.world_size
        config = self.job_config
        progress = Progress(
            step=record.step,
            num_steps=config.training.steps,
            tokens_seen=record.tokens_seen,
            tokens_per_second=median_per_second,
            elapsed_s=time.perf_counter() - self._started,
            token_budget=config.throughput.token_budget,
        )
        metrics: dict[str, Any] = {
            "loss_metrics/global_avg_loss": record.loss,
            "loss_metrics/global_max_loss": global_max_loss,
            "grad_norm": record.grad_norm,
            "throughput/tokens_seen": record.tokens_seen,
            "throughput/step_time_s": record.step_time_s,
            "throughput/tokens_per_second": tokens_per_second,
            "throughput/tokens_per_day": tokens_per_second * SECONDS_PER_DAY,
            "throughput/tokens_per_day_median": median_per_second * SECONDS_PER_DAY,
            "throughput/tokens_per_second_per_device": per_device,
            "throughput/tflops_per_device": self.num_flops_per_token * per_device / 1e12,
            "time_metrics/data_loading(s)": record.data_loading_s,
            "time_metrics/data_loading(%)": 100 * self._data_loading_since_console / self._seconds_since_console,
            "time_metrics/forward_backward(s)": record.forward_backward_s,
            **{f"memory/{name}": value for name, value in memory._asdict().items()},
            "memory/symmetric_gib": self._symmetric_gib(),
            **progress.metrics(),
            **_load_metrics(record.expert_load),
            **(self._routed[0].metrics() if self._routed else {}),
            **extra,
        }
        color, mfu = self.color, ""
        if self._has_known_peak:
            metrics["throughput/mfu(%)"] = 100 * self.num_flops_per_token * per_device / self.gpu_peak_flops
            mfu = f"{color.magenta}  mfu: {metrics['throughput/mfu(%)']:.2f}%"
        self.logger.log(metrics, record.step)
        if self._wandb is not None:
            self._wandb.log(metrics | (heat_maps(record.expert_load) if record.expert_load else {}), record.step)
        logger.info(
            f"{color.red}step: {record.step:2}/{config.training.steps}  "
            f"{color.green}loss: {record.loss:8.5f}  "
            f"{color.orange}grad_norm: {record.grad_norm:7.4f}  "
            f"{color.turquoise}memory: {record.memory_gib:5.2f}GiB"
            f"({100 * record.memory_gib / self.device_memory_monitor.device_capacity_gib:.2f}%)  "
            f"{color.blue}tps: {round(tokens_per_second):,}  "
            f"{color.cyan}{humanize(tokens_per_second * SECONDS_PER_DAY)} tokens/day "
            f"(median {humanize(median_per_second * SECONDS_PER_DAY)})"
            f"{mfu}{color.reset}  {progress.line()}"
        )

    def _open_records(self, device_name: str) -> RunRecords:
        config = self.job_config
        records = RunRecords(
            config.job.dump_folder,
            {
                "config": config.to_dict(),
                "versions": versions(),
                "commit": commit(),
                "devices": {
                    "type": device_type,
                    "name": device_name,
                    "world_size": self.parallel_dims.world_size,
                    "capacity_gib": self.device_memory_monitor.device_capacity_gib,
                },
                "backend": {"requested": config.uniep.backend, "ran": None},
                "data": asdict(fingerprint(config)),
            },
            may_continue=config.checkpoint.enable and _has_checkpoint(config),
        )
        if config.metrics.enable_wandb:
            try:
                self._wandb = WandbLogger(config.job.dump_folder, config, records.run_id)
            except ImportError:
                logger.warning("wandb is not installed: the run is recorded in its folder only")
        return records

    @functools.cached_property
    def _routed(self) -> list[RoutedBackend]:
        """Of each part of the model on this rank; none for TorchTitan's own block. The trainer hands over its model
        after the processor has been made."""
        return routed_backends(self.model_parts or [])

    def _symmetric_gib(self) -> float:
        return sum(backend.symmetric_gib for backend in self._routed)

    def _backend(self) -> dict[str, Any]:
        # Parts differ in their layers only.
        ran = next(({"ran": backend.name, **backend.facts} for backend in self._routed), {"ran": "torchtitan"})
        return {"requested": self.job_config.uniep.backend, **ran}


def _has_checkpoint(config: JobConfig) -> bool:
    """One that TorchTitan loads: a crash may have left others."""
    steps = Path(config.job.dump_folder, config.checkpoint.folder).glob("step-*")
    return any((step / name).is_file() for step in steps for name in (".metadata", "model.safetensors.index.json"))


def build_metrics_processor(
    job_config: JobConfig, parallel_dims: ParallelDims, model_args: Any = None, tag: str | None = None
) -> RecipeMetrics:
    """The `build_metrics_processor_fn` of our train specs."""
    return RecipeMetrics(job_config, parallel_dims, tag)


def _load_metrics(load: ExpertLoad | None) -> dict[str, float]:
    if load is None:
        return {}
    return {
        "expert_load/imbalance_max": max(load.imbalance),
        "expert_load/imbalance_mean": statistics.fmean(load.imbalance),
        "expert_load/rank_imbalance_max": max(load.rank_imbalance),
        "expert_load/distinct_ranks": statistics.fmean(load.distinct_ranks),
        "expert_load/distinct_ranks_expected": load.distinct_ranks_expected,
    }
