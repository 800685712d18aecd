"""Which recorded runs can be compared: settings that must be equal, and those that a difference may come from."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tools.compare_values import counted
from tools.records import Run

# Every setting must be equal, except these: a section that a later version adds is then compared, not overlooked.
# Each entry is a key or a section, with why it may differ.
FREE_SETTINGS = (
    "job",  # names, paths and what is printed
    "uniep",  # what is compared
    "experimental",  # which modules are imported
    "metrics",
    "profiling",
    "throughput",
    "checkpoint",  # but see WARNED_SETTINGS
    "comm",
    "memory_estimation",
    "validation",
    "activation_checkpoint",  # recomputing must not change bits
    "compile",
    "model.hf_assets_path",
    "model.tokenizer_path",
    "model.print_after_conversion",
    "training.steps",  # but see _warn_schedule
    "training.dataset_path",  # the data's hash decides
    "training.gc_freq",
    "training.gc_debug",
    "training.dataloader.persistent_workers",
    "training.dataloader.pin_memory",
    "training.dataloader.prefetch_factor",
    "parallelism.fsdp_reshard_after_forward",  # when weights are gathered, not what is computed
    "parallelism.expert_parallel_comm_backend",
    "debug.deterministic",
    "debug.deterministic_warn_only",
)
# Free settings that may well change bits.
WARNED_SETTINGS = (
    "uniep.numerics",
    "compile",
    "model.hf_assets_path",
    "model.tokenizer_path",
    "parallelism.expert_parallel_comm_backend",
    "checkpoint.initial_load_path",
    "checkpoint.initial_load_in_hf",
    "checkpoint.exclude_from_loading",
)
# world_size has its own rule, and the size of a memory changes no number.
QUIET_DEVICES = ("world_size", "capacity_gib")


class ComparisonError(ValueError):
    """Runs that cannot be compared. The text says why in one line."""


def config_differences(a: Run, b: Run) -> list[str]:
    """Settings that determine the numbers and differ, as "key: a's value, b's value"."""
    found = _differences(a.config, b.config, lambda key: not _listed(key, FREE_SETTINGS))
    # The degrees in a config may be -1, "all that are left", which the number of ranks fills in.
    found += [f"devices.{line}" for line in _differences(a.devices, b.devices, lambda key: key == "world_size")]
    # The data's own hash, and the tokenizer's where one is recorded.
    return found + [f"data.{line}" for line in _differences(a.data, b.data, lambda key: key.endswith("sha256"))]


def warnings_of_run(run: Run) -> list[str]:
    """Reasons why a run may not repeat its own bits, or cannot be checked."""
    found = []
    if run.config.get("debug.seed") is None:
        found.append("debug.seed is not set: the run does not repeat its own bits")
    if run.config.get("debug.deterministic") is not True:
        found.append("debug.deterministic is not true: the run may not repeat its own bits")
    if not run.data["sha256"]:
        found.append("the data has no hash: that both runs read the same data is not checked")
    for name, values in run.values.items():
        broken = ~np.isfinite(values)
        if broken.any():
            first = run.steps[int(broken.argmax())]
            found.append(f"{name} is not finite at {counted(int(broken.sum()), 'step')}, first at step {first}")
    return found


def warnings_of_pair(a: Run, b: Run) -> list[str]:
    """Differences that do not forbid a comparison but may explain what it finds."""
    found = _differences(a.config, b.config, lambda key: _listed(key, WARNED_SETTINGS))
    found += [f"versions.{line}" for line in _differences(a.versions, b.versions)]
    found += [f"devices.{line}" for line in _differences(a.devices, b.devices, lambda key: key not in QUIET_DEVICES)]
    found = [f"differs, {line}" for line in found]
    if a.folder.resolve() == b.folder.resolve():
        found.append("is the same folder: it can only be identical")
    return found + _warn_schedule(a, b) + _warn_tokens(a, b)


def _warn_schedule(a: Run, b: Run) -> list[str]:
    steps = [run.config.get("training.steps") for run in (a, b)]
    if steps[0] == steps[1] or a.config.get("lr_scheduler.total_steps") is not None:
        return []
    differing = f"differs, training.steps: {steps[0]}, {steps[1]}"
    return [f"{differing}; lr_scheduler.total_steps is not set, so the decay of the learning rate differs too"]


def _warn_tokens(a: Run, b: Run) -> list[str]:
    common, in_a, in_b = np.intersect1d(a.steps, b.steps, assume_unique=True, return_indices=True)
    differs = a.tokens_seen[in_a] != b.tokens_seen[in_b]
    if not differs.any():
        return []
    at = int(differs.argmax())
    tokens = f"{a.tokens_seen[in_a][at]}, {b.tokens_seen[in_b][at]}"
    return [f"differs, tokens_seen at step {common[at]}: {tokens}; the runs did not train on the same batches"]


def _listed(key: str, settings: Iterable[str]) -> bool:
    return any(key == setting or key.startswith(f"{setting}.") for setting in settings)


def _differences(
    a: Mapping[str, Any], b: Mapping[str, Any], wanted: Callable[[str], bool] = lambda key: True
) -> list[str]:
    """A key that one record lacks counts as None there: an optional setting that a later version adds is no change."""
    return [
        f"{key}: {_shown(a.get(key))}, {_shown(b.get(key))}"
        for key in sorted(a.keys() | b.keys())
        if wanted(key) and a.get(key) != b.get(key)
    ]


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)


def check_comparable(labels: Sequence[str], runs: Sequence[Run], force: bool) -> list[str]:
    """Compares the configs of all runs with the first.

    Returns:
        Warnings; with force also the differences that would have been an error.

    Raises:
        ComparisonError: settings that determine the numbers differ and force is not set, or no step is common.
    """
    first = runs[0]
    warnings = [f"{label}: {line}" for label, run in zip(labels, runs, strict=True) for line in warnings_of_run(run)]
    refused = []
    for label, run in zip(labels[1:], runs[1:], strict=True):
        if not np.isin(run.steps, first.steps).any():
            spans = f"{first.steps[0]} to {first.steps[-1]} and {run.steps[0]} to {run.steps[-1]}"
            raise ComparisonError(f"{labels[0]} and {label} must have a step in common, got steps {spans}")
        differing = config_differences(first, run)
        if differing:
            refused.append(f"{labels[0]} and {label} differ in {'; '.join(differing)}")
        warnings += [f"{label} {line}" for line in warnings_of_pair(first, run)]
    if refused and not force:
        raise ComparisonError(f"runs must have comparable configs, got: {'; '.join(refused)} (--force compares anyway)")
    return [f"compared by force: {line}" for line in refused] + warnings
