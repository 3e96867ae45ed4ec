"""Expert parallelism for models that transformers runs.

transformers keeps all experts of a layer in one module, whose parameters have the experts in their
first dimension. Each rank keeps the entries of its experts as plain tensors, and runs the module's
own forward on the rows that all ranks send to these, each with one expert and the weight 1. The
ranks exchange rows like those of the built-in decoder.

T = tokens, K = experts per token, M = rows that this rank receives, L = experts of a rank,
d = hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ratchet.errors import ModelError
from ratchet.models.layers.moe import ComputeExperts, mix_experts
from ratchet.models.parallel.collectives import Group
from ratchet.models.parallel.expert_parallel import ExpertExchange
from ratchet.models.parallel.sharding import ShardIndex, check_even_experts
from ratchet.models.transformers_settings import read_setting
from ratchet.models.weights.weight_layout import WeightPiece, make_whole_piece

ROW_BYTES = 16  # rows of a grouped product take a multiple of it
REMEDY = "set learner.expert_parallel to 1, and learner.dp_shard to the number of ranks"
# (hidden states [T, d], expert indices [T, K], their weights [T, K]) -> weighted sum [T, d]
ExpertsForward = Callable[[Tensor, Tensor, Tensor], Tensor]


class LocalExperts:
    """Computes rows sorted by this rank's experts, with the own forward of their module.

    adapt: returns the module with which a forward computes: the same, or one with adapters added.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.adapt: Callable[[nn.Module], nn.Module] = lambda module: module

    def __call__(self, x_Md: Tensor, counts_L: Tensor) -> Tensor:
        if not len(x_Md):
            # The result must have a gradient even without rows, because other ranks wait for this
            # rank's backward, and FSDP for the gradient of each parameter.
            padding = torch.cat([x_Md, x_Md.new_zeros(1, x_Md.shape[1])])
            return self(padding, torch.ones_like(counts_L[:1]))[:0]
        experts = torch.arange(len(counts_L), device=x_Md.device)
        expert_M = experts.repeat_interleave(counts_L, output_size=len(x_Md))
        forward = type(self.module).forward
        weights_M1 = x_Md.new_ones(len(x_Md), 1)
        return forward(self.adapt(self.module), x_Md, expert_M[:, None], weights_M1)


@dataclass(frozen=True)
class ExpertDivision:
    """The division of a model's experts over the ranks of a group.

    experts: this rank's experts of each layer.
    pieces: this rank's pieces of each parameter of these modules, by the parameter's name.
    """

    group: Group
    experts: tuple[LocalExperts, ...]
    pieces: Mapping[str, tuple[WeightPiece, ...]]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that hold this rank's experts."""
        return tuple(experts.module for experts in self.experts)


def find_stacked_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with the stacked experts of a layer, by path."""
    return {path: module for path, module in model.named_modules() if _has_stacked_experts(module)}


def _has_stacked_experts(module: nn.Module) -> bool:
    """True if every parameter has the experts in its first dimension, and routes are arguments."""
    shapes = [parameter.shape for parameter in module.parameters(recurse=False)]
    return (
        any(len(shape) == 3 for shape in shapes)
        and all(shape[:1] == (vars(module).get("num_experts"),) for shape in shapes)
        and len(inspect.signature(module.forward).parameters) == 3
    )


def choose_experts_forward(model: nn.Module) -> None:
    """Let transformers compute experts one after the other where its grouped product can't.

    Rows of a grouped product take a multiple of 16 bytes each. Tiny experts, or the part of them
    that a tensor-parallel rank has, may have other widths.
    """
    for module in find_stacked_experts(model).values():
        config: Any = vars(module).get("config")
        if read_setting(config, "_experts_implementation") != "grouped_mm":
            continue
        parameters = [p for p in module.parameters(recurse=False) if p.dim() == 3]
        # An accelerator may compute in bfloat16.
        n_bytes = 2 if torch.cuda.is_available() else parameters[0].element_size()
        if any(size * n_bytes % ROW_BYTES for p in parameters for size in p.shape[1:]):
            config._experts_implementation = "eager"


def check_experts(model: nn.Module, ranks: int) -> None:
    """Raise ModelError if a model's experts can't be divided over a number of ranks."""
    modules = find_stacked_experts(model)
    if not modules:
        raise ModelError(
            f"{type(model).__name__} has no experts that learner.expert_parallel={ranks} can "
            f"divide (modules whose parameters have the experts in their first dimension): {REMEDY}"
        )
    for module in modules.values():
        check_even_experts(ranks, _count_experts(module))


def divide_experts(
    model: nn.Module, group: Group, divided_pieces: Mapping[str, tuple[WeightPiece, ...]]
) -> ExpertDivision:
    """Replace each layer's experts by this rank's, and make their modules exchange rows.

    divided_pieces: the pieces of the parameters that tensor parallelism has divided, by name.
    """
    shard_index = ShardIndex(group.rank(), group.size())
    division: list[LocalExperts] = []
    pieces: dict[str, tuple[WeightPiece, ...]] = {}
    for path, module in find_stacked_experts(model).items():
        total = _count_experts(module)
        local_experts = shard_index.range(total)
        for name, parameter in list(module.named_parameters(recurse=False)):
            # A copy, so that the whole parameter can be freed.
            block = parameter.detach()[local_experts.start : local_experts.stop].clone()
            setattr(module, name, nn.Parameter(block, requires_grad=parameter.requires_grad))
            weight_name = f"{path}.{name}"
            whole = make_whole_piece(weight_name, parameter)
            cut = [piece.cut(local_experts) for piece in divided_pieces.get(weight_name, (whole,))]
            pieces[weight_name] = tuple(piece for piece in cut if piece is not None)
        experts: Any = module
        experts.num_experts = len(local_experts)
        division.append(LocalExperts(module))
        experts.forward = _mix_rows(partial(ExpertExchange(group), division[-1]), total)
    return ExpertDivision(group, tuple(division), pieces)


def _mix_rows(compute: ComputeExperts, n_experts: int) -> ExpertsForward:
    """Return a module's forward from a function that computes the rows of all experts."""

    def forward(hidden_Td: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return mix_experts(compute, hidden_Td, weights_TK, experts_TK, n_experts)

    return forward


def _count_experts(module: nn.Module) -> int:
    """Return the number of experts in a module with stacked experts."""
    return len(next(module.parameters(recurse=False)))
