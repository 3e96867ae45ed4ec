"""Mixture of experts (MoE): each token passes through the few MLPs that a router picks for it.

Sources: arXiv:1701.06538, arXiv:2401.04088.

T = tokens, K = experts per token, E = experts, n = T * K choices, N = rows (the choices sorted by
expert, with padding), d = hidden size, F = size of an expert's gated layer, O = outputs of a
matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.models.layers.expert_routing import RoutingHook
from ratchet.models.ops import swiglu
from ratchet.models.weight_casts import cast_weight

# A function that computes the experts: (rows [N, d] sorted by expert, number of rows of each expert
# [E]) -> outputs [N, d].
ComputeExperts = Callable[[Tensor, Tensor], Tensor]
# (compute, rows, numbers of rows) -> outputs. It runs `compute` on the ranks that hold the experts.
ExchangeRows = Callable[[ComputeExperts, Tensor, Tensor], Tensor]


class ExpertRouter(nn.Module):
    """A router that picks K experts for each token.

    Its softmax over all experts is computed in float32 or better.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.hidden_size))
        self.experts_per_token = config.experts_per_token
        self.renormalise = config.renormalise

    def forward(
        self, x_Td: Tensor, route: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (differentiable weights [T, K], int64 expert indices [T, K]).

        The router's own choice has the largest weight first.

        Args:
            route: Maps the logits and the chosen experts to the experts to use, see `RoutingHook`.
                The weights of these experts, and so the router's gradient, come from the logits.
        """
        logits_TE = F.linear(x_Td, self.weight)
        logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        probabilities_TE = logits_TE.softmax(-1)
        experts_TK = probabilities_TE.topk(self.experts_per_token).indices
        if route is not None:
            experts_TK = route(logits_TE, experts_TK)
        weights_TK = probabilities_TE.gather(1, experts_TK)
        if self.renormalise:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return weights_TK, experts_TK


class Experts(nn.Module):
    """The SwiGLU layers of all experts: `gate_up_proj` [E, 2F, d] and `down_proj` [E, d, F].

    Their weights are not initialised. `adapters` has the LoRA adapters, by the parameter's name.
    """

    def __init__(self, n_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(n_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(n_experts, hidden_size, intermediate_size))
        self.adapters = nn.ModuleDict()

    @property
    def matrices(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The (name, parameter) pairs of the experts' matrices, without the adapters."""
        return self.named_parameters(recurse=False)

    def forward(self, x_Nd: Tensor, counts_E: Tensor) -> Tensor:
        """Return the experts' outputs [N, d] for rows that are sorted by expert.

        Args:
            counts_E: int64, number of rows of each expert; 0 is allowed.
        """
        multiply = partial(multiply_by_expert, counts_E=counts_E)

        def project(x: Tensor, name: str) -> Tensor:
            out = multiply(x, getattr(self, name))
            return self.adapters[name](x, out, multiply) if name in self.adapters else out

        return project(swiglu(project(x_Nd, "gate_up_proj")), "down_proj")


class SparseMLP(nn.Module):
    """A layer with a router and several experts, of which each token uses a few."""

    def __init__(self, config: DecoderConfig, sparse_index: int, n_local_experts: int) -> None:
        """Allocate the router and the experts that this rank holds.

        Args:
            sparse_index: Index of the layer among the layers with experts.
            n_local_experts: Number of experts on this rank.
        """
        super().__init__()
        self.sparse_index = sparse_index
        self.gate = ExpertRouter(config)
        self.experts = Experts(n_local_experts, config.hidden_size, config.expert_intermediate_size)
        self.n_experts = config.n_experts
        # Runs the experts. Under expert parallelism it sends every row to the rank of its expert.
        self.exchange: ExchangeRows = compute_locally

    def forward(
        self, x_Td: Tensor, row_multiple: int = 1, route: RoutingHook | None = None
    ) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts [T, d].

        Args:
            row_multiple: Each expert's rows are padded to a multiple of it, so that a token's
                result does not depend on the number of tokens with the same expert (batch
                invariance, see `generators.engine.batch_invariance`).
        """
        weights_TK, experts_TK = self.choose(x_Td, route)
        return self.mix(x_Td, weights_TK, experts_TK, row_multiple)

    def choose(self, x_Td: Tensor, route: RoutingHook | None) -> tuple[Tensor, Tensor]:
        """Return the weights and indices of each token's experts, as `ExpertRouter` does."""
        return self.gate(x_Td, None if route is None else partial(route, self.sparse_index))

    def mix(
        self, x_Td: Tensor, weights_TK: Tensor, experts_TK: Tensor, row_multiple: int
    ) -> Tensor:
        """Return the weighted sum of the outputs of the chosen experts [T, d]."""
        compute = partial(self.exchange, self.experts)
        return mix_experts(compute, x_Td, weights_TK, experts_TK, self.n_experts, row_multiple)


def mix_experts(
    compute: ComputeExperts,
    x_Td: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    n_experts: int,
    row_multiple: int = 1,
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts [T, d].

    Args:
        compute: Computes the rows of all experts.
        row_multiple: As in `SparseMLP.forward`.
    """
    tokens_N, row_index_TK, counts_E = sort_by_expert(experts_TK, n_experts, row_multiple)
    y_Nd = compute(x_Td.index_select(0, tokens_N), counts_E)
    # Gather and sum, because index_add on CUDA would add in an undefined order.
    y_TKd = y_Nd.index_select(0, row_index_TK.flatten()).view(*row_index_TK.shape, x_Td.shape[1])
    return (y_TKd * weights_TK[..., None]).sum(1).to(x_Td.dtype)


def compute_locally(compute: ComputeExperts, x_Nd: Tensor, counts_E: Tensor) -> Tensor:
    """Compute all experts on this rank."""
    return compute(x_Nd, counts_E)


def sort_by_expert(
    experts_TK: Tensor, n_experts: int, multiple: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the choices of all tokens by expert, then by token, and pad each expert's rows.

    Returns (token of each row [N], row of each choice [T, K], number of rows of each expert [E]),
    all int64. Each expert's rows are padded to a multiple of `multiple`. Padding rows repeat token
    0.
    """
    sorted_n, order_n = experts_TK.flatten().sort(stable=True)
    chosen_E = sorted_n.new_zeros(n_experts).scatter_add_(0, sorted_n, torch.ones_like(sorted_n))
    counts_E = (chosen_E + multiple - 1) // multiple * multiple
    # Number of padding rows before each expert's rows.
    shift_E = (counts_E - chosen_E).cumsum(0) - (counts_E - chosen_E)
    rows_n = torch.arange(len(order_n), device=order_n.device) + shift_E[sorted_n]
    # Without padding the total is known on the host. Otherwise the host waits for the device's sum.
    total = len(order_n) if multiple == 1 else int(counts_E.sum())
    tokens_N = order_n.new_zeros(total).index_copy_(0, rows_n, order_n // experts_TK.shape[1])
    row_index_TK = torch.empty_like(order_n).index_copy_(0, order_n, rows_n).view(experts_TK.shape)
    return tokens_N, row_index_TK, counts_E


def multiply_by_expert(x_Nd: Tensor, weight_EOd: Tensor, counts_E: Tensor) -> Tensor:
    """Return the products [N, O] of each expert's rows and its matrix."""
    # Autocast does not cover the grouped kernel.
    if x_Nd.is_cuda and torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        x_Nd, weight_EOd = x_Nd.to(dtype), cast_weight(weight_EOd).to(dtype)
    if _has_grouped_kernel(x_Nd, weight_EOd):
        return multiply_grouped(x_Nd, weight_EOd, counts_E)
    parts = x_Nd.split(counts_E.tolist())
    matrices = weight_EOd.unbind()
    outputs = [
        F.linear(part, matrix) for part, matrix in zip(parts, matrices, strict=True) if len(part)
    ]
    # The result must have a gradient even without rows, because other ranks may wait for this
    # rank's backward.
    return torch.cat(outputs or [F.linear(x_Nd, matrices[0])])


def multiply_grouped(x_Nd: Tensor, weight_EOd: Tensor, counts_E: Tensor) -> Tensor:
    """Return the result of `multiply_by_expert` by one kernel, without a copy to the host."""
    return F.grouped_mm(
        x_Nd, weight_EOd.transpose(1, 2), offs=counts_E.cumsum(0, dtype=torch.int32)
    )


def _has_grouped_kernel(x_Nd: Tensor, weight_EOd: Tensor) -> bool:
    return len(x_Nd) > 0 and x_Nd.dtype == torch.bfloat16 and can_group(weight_EOd)


def can_group(weight_EOd: Tensor) -> bool:
    """True if the grouped kernel can multiply rows in bfloat16 by these matrices in bfloat16.

    It needs row sizes that are multiples of 16 bytes, and an Ampere GPU or later.
    """
    if not weight_EOd.is_cuda or any(size % 8 for size in weight_EOd.shape[1:]):
        return False
    return torch.cuda.get_device_capability(weight_EOd.device) >= (8, 0)
