"""The shape of a MoE layer, and THE legend of the letters that names carry.

    T   tokens of a rank                    W   expert-parallel ranks
    D   model dim                           L   local experts, E / W
    F   expert hidden dim                   N   routed rows that a rank sends, T * K
    E   experts                             R   routed rows that a rank's experts receive
    K   experts a token is routed to

A tensor's name ends in its dimensions: x_TD is [tokens, model dim], w1_LFD [local experts, hidden dim, model dim].
"""

from dataclasses import dataclass


class ShapeError(ValueError):
    """A shape that breaks a rule. The text reads "{what} must be {rule}, got {value}"."""


@dataclass(frozen=True)
class MoEShape:
    """One MoE layer over an expert-parallel group.

    Attributes:
        num_experts: E, experts of the whole group.
        top_k: K, experts a token is routed to.
        dim: D, width of the model.
        hidden_dim: F, width of one expert.
        ep_degree: W, ranks that share the experts.

    Raises:
        ShapeError: a count is not positive, K exceeds E, or W does not divide E.
    """

    num_experts: int
    top_k: int
    dim: int
    hidden_dim: int
    ep_degree: int = 1

    def __post_init__(self) -> None:
        for what in ("num_experts", "top_k", "dim", "hidden_dim", "ep_degree"):
            value = getattr(self, what)
            if value < 1:
                raise ShapeError(f"{what} must be at least 1, got {value}")
        if self.top_k > self.num_experts:
            raise ShapeError(f"top_k must be at most num_experts = {self.num_experts}, got {self.top_k}")
        if self.num_experts % self.ep_degree:
            raise ShapeError(f"num_experts must be divisible by ep_degree = {self.ep_degree}, got {self.num_experts}")

    @property
    def num_local_experts(self) -> int:
        """L, experts that one rank owns."""
        return self.num_experts // self.ep_degree
