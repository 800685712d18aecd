"""Lets TorchTitan 0.2.2, which asks for an accelerator, train on CPUs as well. Where a GPU is, it changes nothing."""

import functools
import logging
import os
import platform
import resource
from types import SimpleNamespace
from typing import Any

import torch

logger = logging.getLogger(__name__)


class _CpuDeviceModule:
    """What TorchTitan calls on `torch.cuda`, for CPUs. "Device memory" is the process's resident memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def set_device(self, device: Any) -> None:
        pass

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any = None) -> str:
        return f"CPU {platform.machine()}"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"active_bytes.all.peak": peak_bytes, "reserved_bytes.all.peak": peak_bytes}


@functools.cache
def prepare_platform() -> None:
    """Without a GPU, makes TorchTitan see CPUs as its device. To be called before TorchTitan is imported."""
    if torch.cuda.is_available():
        return
    device_module = _CpuDeviceModule()
    stock_get_device_module = torch._utils._get_device_module
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda device_type="cpu": (  # type: ignore[assignment]
        device_module if device_type == "cpu" else stock_get_device_module(device_type)
    )

    stock_histc = torch.histc

    def histc(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # The router counts int64 expert ids, for which the CPU has no histc. Ids are exact in float64.
        if input.is_cuda or input.is_floating_point():
            return stock_histc(input, *args, **kwargs)
        return stock_histc(input.double(), *args, **kwargs).to(input.dtype)

    torch.histc = histc
    logger.info("No GPU is visible: training runs on CPUs")
