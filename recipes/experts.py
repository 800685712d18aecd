"""The seam in TorchTitan's MoE block: what lies between its router and its output becomes one call."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor
from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.models.moe.moe import GroupedExperts, MoE

from recipes.backend import RoutedBackend


class Routing:
    """The router's choice: fp32 scores_TK and int64 expert_ids_TK.

    Neither two tensors nor a dataclass, because FSDP2 casts every floating-point tensor that it finds among a module's
    arguments to bf16, in containers and dataclasses too, and the scores must stay fp32.
    """

    __slots__ = ("expert_ids_TK", "scores_TK")

    def __init__(self, scores_TK: Tensor, expert_ids_TK: Tensor):
        self.scores_TK = scores_TK
        self.expert_ids_TK = expert_ids_TK


class RoutedExperts(GroupedExperts):
    """TorchTitan's expert weights with our forward: dispatch, both GroupGEMMs and combine.

    It is this module's own forward and no hook around it, because FSDP2 gathers the weights when it is called.
    """

    def __init__(self, stock: GroupedExperts, backend: RoutedBackend, *, ep_mesh: DeviceMesh | None):
        nn.Module.__init__(self)
        self.num_experts = stock.num_experts
        self.w1, self.w2, self.w3 = stock.w1, stock.w2, stock.w3
        self.backend = backend
        if ep_mesh is not None:
            ExpertParallel()._partition_fn("experts", self, ep_mesh)  # w1, w2, w3 as DTensors, Shard(0)

    def forward(self, x_TD: Tensor, routing: Routing) -> Tensor:  # type: ignore[override]
        w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3))
        return self.backend.run(x_TD, routing.scores_TK, routing.expert_ids_TK, w1, w2, w3)


class UniEPMoE(MoE):
    """TorchTitan's MoE block around `RoutedExperts`: its router, buffers and shared experts are the stock ones.

    The order of children and of calls is the stock block's: the first decides in which order gradient norms are
    summed, the second in which order autograd sums the gradient of x.
    """

    def __init__(self, stock: MoE, backend: RoutedBackend, *, ep_mesh: DeviceMesh | None):
        nn.Module.__init__(self)
        self.experts = RoutedExperts(stock.experts, backend, ep_mesh=ep_mesh)
        self.router = stock.router
        self.shared_experts = stock.shared_experts
        self.score_before_experts = stock.score_before_experts
        self.load_balance_coeff = stock.load_balance_coeff
        self.register_buffer("expert_bias", stock.expert_bias, persistent=stock.expert_bias is not None)
        self.register_buffer("tokens_per_expert", stock.tokens_per_expert, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, D] -> [batch, seq, D], as `torchtitan.models.moe.moe.MoE.forward`."""
        x_TD = x.view(-1, x.shape[-1])
        scores_TK, expert_ids_TK, num_tokens_per_expert = self.router(x_TD, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(num_tokens_per_expert)
        out_TD = self.experts(x_TD, Routing(scores_TK, expert_ids_TK))
        if self.shared_experts is not None:
            out_TD = self.shared_experts(x_TD) + out_TD
        return out_TD.reshape(x.shape)
