"""Which MoE block runs on this machine."""

import torch

from recipes.config import Backend


class BackendError(ValueError):
    """A backend that this machine or version cannot run."""


def resolve_backend(requested: Backend) -> Backend:
    """The backend that runs for a requested one: itself, or for "auto" the best that this machine can run.

    Raises:
        BackendError: the requested one cannot run here, and why.
    """
    has_gpu = torch.cuda.is_available()
    if requested == "auto":
        return "reference"
    if requested == "uniep":
        raise BackendError(
            '[uniep] backend must be "auto", "reference" or "torchtitan" in this version, got "uniep": '
            "the fused kernels are not in it yet"
        )
    if requested == "torchtitan" and not has_gpu:
        raise BackendError(
            '[uniep] backend must be "auto" or "reference" on a machine without a GPU, got "torchtitan": '
            "TorchTitan's own MoE block permutes tokens with a GPU kernel"
        )
    return requested
