"""Sequence parallelism for models that transformers runs (arXiv:2205.05198).

Each tensor-parallel rank keeps its share of the tokens between the modules that the plan divides:
norms, residual sums and routers. A block is a module with divided linear layers, such as an
attention or an MLP. It gets all tokens, and its row-parallel layer returns this rank's. So do
divided experts. An attention that the plan leaves whole also gets all tokens, and every rank then
keeps its own outputs. The first decoder layer gets this rank's tokens, and after the last one every
rank has all tokens again. So it is in each stage of a pipeline.

T = tokens, t = tokens of a rank, d = hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ratchet.models.parallel.collectives import (
    Group,
    gather,
    gather_columns,
    scatter_sum,
    take_own_columns,
)
from ratchet.models.transformers.tp_plan import BY_COLUMNS, BY_ROWS, SHARED_ROPE, TPPlan

REMEDY = "remove learner.sequence_parallel"


class TokenShards:
    """The division of hidden states over tensor-parallel ranks between the blocks of a model.

    blocks: paths of the modules with divided linear layers, which get all tokens.
    """

    def __init__(self, group: Group, plan: TPPlan, stages: Sequence[Sequence[nn.Module]]) -> None:
        """Describe a division.

        stages: the decoder layers of each pipeline stage on this rank; all layers if there is none.
        """
        self.group = group
        self._stages = stages
        linear = BY_ROWS + BY_COLUMNS
        self.blocks = frozenset(
            path.rpartition(".")[0]
            for path, style in plan.styles.items()
            if style in linear and path != plan.head and path not in plan.expert_cuts
        )
        # The undivided layers of such a block compute all tokens for some heads.
        self._latent_blocks = {
            path.rpartition(".")[0] for path, style in plan.styles.items() if style in SHARED_ROPE
        }
        # Number of tokens of the last forward. The backward of activation checkpointing uses it.
        self._tokens = 0

    def install(self, model: nn.Module) -> None:
        """Let the decoder layers of a model exchange hidden states.

        Row-parallel layers must call `leave`.
        """

        def take_own(_: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
            return _change_hidden(args, named, self.take_own)

        def enter(_: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
            return _change_hidden(args, named, self.enter)

        def change_output(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
            def hook(_: nn.Module, __: object, output: Any) -> Any:
                if isinstance(output, tuple):
                    return change(output[0]), *output[1:]
                return change(output)

            return hook

        blocks = {model.get_submodule(path) for path in self.blocks}
        # Attentions without divided layers, which get all tokens too.
        whole_attentions = [
            module
            for layers in self._stages
            for layer in layers
            for module in layer.children()
            if _takes_mask(module) and blocks.isdisjoint(module.modules())
        ]
        for attention in whole_attentions:
            attention.register_forward_hook(change_output(self.drop_others))
        for module in (*blocks, *whole_attentions):
            module.register_forward_pre_hook(enter, with_kwargs=True)
        for layers in self._stages:
            layers[0].register_forward_pre_hook(take_own, with_kwargs=True)
            layers[-1].register_forward_hook(change_output(self._finish))

    def list_partial(self, model: nn.Module) -> set[str]:
        """Return the names of undivided parameters of which a rank has a part of the gradient.

        It is that of its tokens, or of all tokens and some heads.
        """
        in_layers = {p for layers in self._stages for layer in layers for p in layer.parameters()}
        return {
            name
            for name, parameter in model.named_parameters()
            if parameter in in_layers
            and not any(name.startswith(f"{block}.") for block in self.blocks - self._latent_blocks)
        }

    def leave(self, x_1Td: Tensor) -> Tensor:
        """Return this rank's tokens of the sum of all ranks' x."""
        return scatter_sum(self._pad(x_1Td).movedim(-2, 0), self.group).movedim(0, -2)

    def enter(self, x_1td: Tensor) -> Tensor:
        """Return all tokens. The backward sums the ranks' gradients."""
        return gather(x_1td.movedim(-2, 0), self.group)[: self._tokens].movedim(0, -2)

    def take_own(self, x_1Td: Tensor) -> Tensor:
        """Return this rank's tokens of hidden states that all ranks have."""
        self._tokens = x_1Td.shape[-2]
        return take_own_columns(self._pad(x_1Td).transpose(-2, -1), self.group).transpose(-2, -1)

    def drop_others(self, x_1Td: Tensor) -> Tensor:
        """Return this rank's tokens. The backward gives the other tokens no gradient."""
        return self._pad(x_1Td).tensor_split(self.group.size(), dim=-2)[self.group.rank()]

    def _finish(self, x_1td: Tensor) -> Tensor:
        """Return all tokens, from which every rank computes the same."""
        x_1Td = gather_columns(x_1td.transpose(-2, -1), self.group).transpose(-2, -1)
        return x_1Td[..., : self._tokens, :].contiguous()

    def _pad(self, x_1Td: Tensor) -> Tensor:
        return F.pad(x_1Td, (0, 0, 0, -x_1Td.shape[-2] % self.group.size()))


def _takes_mask(module: nn.Module) -> bool:
    """True if a module is an attention, by its argument `attention_mask`."""
    return "attention_mask" in inspect.signature(module.forward).parameters


def _change_hidden(args: tuple[Any, ...], named: Mapping[str, Any], change: Any) -> Any:
    """Return a module's arguments with its hidden states changed."""
    if args:
        return (change(args[0]), *args[1:]), dict(named)
    return args, {**named, "hidden_states": change(named["hidden_states"])}
