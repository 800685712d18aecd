"""How evenly the routers load experts and ranks, counted on the device and summed over all ranks when asked."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.tools.utils import device_type

from uniep.autotune.workload import chance_wanted
from uniep.shapes import MoEShape


@dataclass(frozen=True)
class ExpertLoad:
    """The load of one step, of all ranks. Every list has an entry a MoE layer.

    Attributes:
        layers: numbers of the MoE layers.
        tokens_per_expert: tokens routed to each of the E experts; a layer's sum is the step's tokens * K.
        imbalance: the most loaded expert over the mean; rank_imbalance: the same of the EP ranks.
        distinct_ranks: mean number of distinct EP ranks that a token goes to, which is what it is copied for.
        distinct_ranks_expected: the same if a token's K experts were drawn evenly.
    """

    layers: list[int]
    tokens_per_expert: list[list[int]]
    imbalance: list[float]
    rank_imbalance: list[float]
    distinct_ranks: list[float]
    distinct_ranks_expected: float


def summarize_load(counts: Tensor, shape: MoEShape) -> ExpertLoad:
    """Args: counts: [layers, E + 1] int64 on the host, the last column the distinct ranks; zeros for a dense layer."""
    routed = counts[:, :-1].sum(1)
    layers = routed.nonzero().flatten()
    tokens_per_expert, distinct = counts[layers].split([shape.num_experts, 1], dim=1)
    tokens_per_rank = tokens_per_expert.unflatten(1, (shape.ep_degree, -1)).sum(2)
    return ExpertLoad(
        layers=layers.tolist(),
        tokens_per_expert=tokens_per_expert.tolist(),
        imbalance=_max_over_mean(tokens_per_expert),
        rank_imbalance=_max_over_mean(tokens_per_rank),
        distinct_ranks=_rounded(distinct[:, 0] * shape.top_k / routed[layers]),
        distinct_ranks_expected=round(shape.ep_degree * chance_wanted(shape), 4),
    )


class ExpertLoadCounter:
    """Counts what the routers of a model choose while it trains; all backends call the same routers.

    TorchTitan's own `tokens_per_expert` counts a token again when a checkpointed block is recomputed. Here a hook on
    each router only keeps its choice, and only inside the model's forward, where no block is recomputed. The model's
    own hook counts all layers at once behind it, outside of every checkpointed region: selective checkpointing
    expects the recompute to run the same operations as the forward.

    Attributes:
        enabled: whether the next forwards count.
    """

    def __init__(
        self,
        model_parts: Iterable[nn.Module],
        shape: MoEShape,
        *,
        num_layers: int,
        groups: Sequence[dist.ProcessGroup] = (),
    ):
        """
        Args:
            model_parts: this rank's parts of the model, parallelised, checkpointed and compiled.
            num_layers: layers of the whole model.
            groups: the process groups over which counts are summed, one after the other.
        """
        self.enabled = True
        self._shape = shape
        self._num_layers = num_layers
        self._groups = groups
        self._parts = [_PartCounter(self, part) for part in model_parts]

    def collect(self) -> ExpertLoad:
        """The load since the last call, summed over all ranks; every rank calls it. Waits for the device."""
        counts = torch.zeros(self._num_layers, self._shape.num_experts + 1, dtype=torch.int64, device=device_type)
        for part in self._parts:
            if part.counts is not None:
                counts[part.layers] = part.counts
                part.counts = None
        for group in self._groups:
            dist.all_reduce(counts, group=group)
        return summarize_load(counts.cpu(), self._shape)

    def count(self, ids_MTK: Tensor) -> Tensor:
        """Args: ids_MTK: the choices of M layers. Returns: [M, E + 1] int64 as `summarize_load` takes them."""
        shape, (num_layers, num_tokens, _) = self._shape, ids_MTK.shape
        num_bins = num_layers * shape.num_experts
        # One histogram of all layers: those of layer m are the bins from m * E on.
        first_bin_M = torch.arange(num_layers, device=ids_MTK.device) * shape.num_experts
        bins_MTK = ids_MTK + first_bin_M[:, None, None]
        per_expert_ME = torch.histc(bins_MTK, bins=num_bins, min=0, max=num_bins).view(num_layers, -1)
        is_sent_MTW = ids_MTK.new_zeros(num_layers, num_tokens, shape.ep_degree, dtype=torch.uint8)
        is_sent_MTW.scatter_(2, ids_MTK // shape.num_local_experts, 1)
        distinct_M = is_sent_MTW.sum((1, 2), dtype=torch.int64)
        return torch.cat([per_expert_ME.to(torch.int64), distinct_M[:, None]], dim=1)


class _PartCounter:
    """The hooks on one part of a model, and what they counted.

    Attributes:
        layers: numbers of its MoE layers.
        counts: [layers, E + 1] int64 on the device; None where nothing was counted.
    """

    def __init__(self, counter: ExpertLoadCounter, part: nn.Module):
        self._counter = counter
        self._kept: list[Tensor] | None = None  # None outside of the part's forward
        self.counts: Tensor | None = None
        blocks: Any = part.get_submodule("layers").named_children()
        routers = {int(name): block.moe.router for name, block in blocks if block.moe_enabled}
        self.layers = list(routers)
        for router in routers.values():
            router.register_forward_hook(self._keep)
        part.register_forward_pre_hook(self._begin)
        part.register_forward_hook(self._end)

    def _begin(self, part: nn.Module, args: Any) -> None:
        # Without gradients a pipeline only asks for shapes (with torch 2.11; what 2.13 asks counts in the first step).
        counts = part.training and torch.is_grad_enabled() and self._counter.enabled
        self._kept = [] if counts else None

    def _keep(self, router: nn.Module, args: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
        if self._kept is not None:
            self._kept.append(out[1])

    def _end(self, part: nn.Module, args: Any, out: Any) -> None:
        kept, self._kept = self._kept, None
        if kept:
            with torch.no_grad():
                ids = [ids_TK.to_local() if isinstance(ids_TK, DTensor) else ids_TK for ids_TK in kept]
                counts = self._counter.count(torch.stack(ids))
                self.counts = counts if self.counts is None else self.counts + counts


def _max_over_mean(tokens: Tensor) -> list[float]:
    return _rounded(tokens.amax(1) / tokens.double().mean(1))


def _rounded(values: Tensor) -> list[float]:
    # Four decimals: an entry a layer goes into every line of a long run's records.
    return [round(value, 4) for value in values.tolist()]
