"""What decides a layer's bits beside its inputs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Numerics:
    """docs/numerics.md is the contract.

    Attributes:
        score_before_experts: scale the experts' inputs instead of their outputs.
        compiled: SwiGLU as torch.compile rounds it, for models whose stock block is compiled.
        fast: let the fused kernels' backward round less often and take the gradients of the scores at the experts:
            other bits than the reference's, the same on every run.
    """

    score_before_experts: bool = False
    compiled: bool = False
    fast: bool = False


STOCK = Numerics()
