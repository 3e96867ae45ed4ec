"""Tensor parallelism for models that transformers runs, by the plan of their architecture.

A plan maps module paths, with * for numbers, to styles of dividing a module. Each rank keeps its
block of a weight as a plain tensor, like in the built-in decoder, so FSDP and checkpoints need no
special case. If the plan divides the language head in any style, each rank has the logits of some
tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ratchet.errors import ModelError
from ratchet.models.lora.transformers import ADAPTER_NAME
from ratchet.models.parallel.collectives import (
    Group,
    gather_columns,
    sum_backward,
    sum_forward,
    take_own_columns,
)
from ratchet.models.parallel.sharding import ShardIndex, check_even
from ratchet.models.parallel.tensor_parallel import VocabParallelLogits
from ratchet.models.weights.weight_layout import PEFT_PREFIX, WeightPiece

# Each rank has some rows of the matrix, and computes the outputs of these.
OUTPUTS = ("colwise",)
# Like OUTPUTS, but every rank then gathers all outputs.
GATHERED_OUTPUTS = ("colwise_gather_output", "colwise_rep")
# Each rank has some columns of the matrix; the ranks' outputs are summed.
INPUTS = ("rowwise",)
# Like INPUTS, but each rank first takes its part of an input that all ranks have whole.
SPLIT_INPUTS = ("rowwise_split_input", "rowwise_rep")
# Each rank has the rows of some tokens.
EMBEDDING = ("embedding_rowwise",)
# Each rank has the whole parameter but uses it only for some heads, so gradients are summed.
PARTIAL = ("replicated_with_grad_allreduce",)
BY_ROWS, BY_COLUMNS = OUTPUTS + GATHERED_OUTPUTS, INPUTS + SPLIT_INPUTS
REMEDY = "set learner.tensor_parallel to 1, and learner.dp_shard to the number of ranks"


@dataclass(frozen=True)
class TPPlan:
    """A plan of tensor parallelism for one model.

    styles: the style of each module or parameter that the plan names, by its path.
    head: path of the output embedding.
    """

    styles: Mapping[str, str]
    head: str

    @classmethod
    def from_rules(cls, model: nn.Module, rules: Mapping[str, str], head: str) -> TPPlan:
        """Return the plan for a model from its architecture's rules (path pattern -> style).

        Raises ModelError if the rules divide no module but the head, or use an unsupported style.
        """
        model_name = type(model).__name__
        paths = [path for path, _ in model.named_modules()] + [
            name for name, _ in model.named_parameters()
        ]
        styles = {
            path: rules[rule]
            for path in paths
            if (rule := re.sub(r"\.\d+(?=\.|$)", ".*", path)) in rules
        }
        if styles.keys() <= {head}:
            raise ModelError(f"{model_name} has no plan for tensor parallelism: {REMEDY}")
        modules = dict(model.named_modules())
        for path, style in styles.items():
            module = modules.get(path)
            if style not in BY_ROWS + BY_COLUMNS + EMBEDDING + PARTIAL:
                raise ModelError(
                    f"the plan of {model_name} divides {path} in the style '{style}', which is not "
                    f"supported: {REMEDY}"
                )
            if style in BY_ROWS + BY_COLUMNS and not _is_linear(module):
                raise ModelError(
                    f"the plan of {model_name} divides {path}, which is not a plain linear layer: "
                    f"{REMEDY}"
                )
            if style in EMBEDDING and not isinstance(module, nn.Embedding):
                raise ModelError(
                    f"the plan of {model_name} divides {path}, which is not an embedding: {REMEDY}"
                )
        return cls(styles, head)

    def check(self, model: nn.Module, ranks: int, heads: Mapping[str, int]) -> None:
        """Raise ModelError if the number of ranks does not divide the model evenly.

        heads: numbers of attention heads, by their name for an error message.
        """
        totals = dict(heads)
        for path, style in self.styles.items():
            if path != self.head and style in BY_ROWS + BY_COLUMNS:
                rows, columns = model.get_parameter(f"{path}.weight").shape
                totals |= (
                    {f"outputs of {path}": rows}
                    if style in BY_ROWS
                    else {f"inputs of {path}": columns}
                )
        check_even(ranks, totals)


@dataclass(frozen=True)
class TPDivision:
    """The division of a model's parameters, by name.

    The names are canonical (`ratchet.models.lora.transformers.get_canonical_name`).

    group: the ranks over which the model is divided.
    styles: the style of each module or parameter that the plan names, by its path.
    divided_pieces: this rank's piece of each divided parameter.
    partial_gradients: names of the parameters that each rank has as a whole, but whose gradient
      must be summed over ranks.
    vocab_parallel: the operations on the divided logits; None if each rank has all logits.
    """

    group: Group
    styles: Mapping[str, str]
    divided_pieces: Mapping[str, WeightPiece]
    partial_gradients: frozenset[str]
    vocab_parallel: VocabParallelLogits | None


def divide_model(model: nn.Module, plan: TPPlan, group: Group) -> TPDivision:
    """Replace a model's weights by this rank's blocks, and make its modules communicate.

    Raises ModelError if modules share a weight, but the plan divides only some of these modules.
    """
    n_parameters = len(list(model.parameters()))
    shard_index = ShardIndex(group.rank(), group.size())
    pieces: CutPieces = {}
    partially_used: set[Tensor] = set()
    vocab_parallel = None
    if plan.head in plan.styles:
        head = model.get_submodule(plan.head)
        assert isinstance(head, nn.Linear), "`TPPlan.from_rules` accepts only linear heads"
        vocab_parallel = VocabParallelLogits(group, len(head.weight))
        pieces |= _divide_vocabulary(model, head, shard_index, group)
    for path, style in plan.styles.items():
        module = model.get_submodule(path)
        if style in PARTIAL:
            partially_used.update(module.parameters(recurse=False))
        elif isinstance(module, nn.Embedding) and module.weight not in pieces:
            pieces |= _divide_embedding(module, shard_index, group)
        elif isinstance(module, nn.Linear) and path != plan.head:
            if style in BY_ROWS:
                pieces |= _divide_outputs(
                    module, shard_index, group, gather_outputs=style in GATHERED_OUTPUTS
                )
            else:
                pieces |= _divide_inputs(
                    module, shard_index, group, split_input=style in SPLIT_INPUTS
                )
    parameters = dict(model.named_parameters())
    if len(parameters) != n_parameters:
        raise ModelError(
            f"the plan of {type(model).__name__} divides weights that other modules share: {REMEDY}"
        )
    return TPDivision(
        group,
        plan.styles,
        {name: replace(pieces[p], name=name) for name, p in parameters.items() if p in pieces},
        frozenset(name for name, p in parameters.items() if p in partially_used),
        vocab_parallel,
    )


def divide_adapters(model: nn.Module, division: TPDivision) -> TPDivision:
    """Divide the adapters of a divided model like their linear layers; return the new division.

    With W divided by outputs, B is too; with W divided by inputs, A is too, and its outputs are
    summed. Of the other factor each rank has the whole. Where every rank gathers all outputs, both
    factors are whole, and so are their gradients.
    """
    group = division.group
    shard_index = ShardIndex(group.rank(), group.size())
    pieces = dict(division.divided_pieces)
    partial = set(division.partial_gradients)
    modules = dict(model.named_modules())
    for path, style in division.styles.items():
        layer: Any = modules.get(path)
        if not hasattr(layer, "lora_A"):
            continue
        a, b = layer.lora_A[ADAPTER_NAME], layer.lora_B[ADAPTER_NAME]
        a_name, b_name = (f"{PEFT_PREFIX}{path}.lora_{factor}.weight" for factor in "AB")
        if style in BY_COLUMNS:
            a.weight, piece = _cut_block(a.weight, 1, shard_index)
            pieces[a_name] = replace(piece, name=a_name)
            a.forward = _sum_outputs(a.forward, group, split_input=style in SPLIT_INPUTS)
        elif style not in GATHERED_OUTPUTS:
            a.forward = _sum_input_gradient(a.forward, group)
            partial.add(a_name)
            if style in OUTPUTS:
                b.weight, piece = _cut_block(b.weight, 0, shard_index)
                pieces[b_name] = replace(piece, name=b_name)
            else:
                partial.add(b_name)
    return replace(division, divided_pieces=pieces, partial_gradients=frozenset(partial))


Forward = Callable[[Tensor], Tensor]


def _sum_outputs(forward: Forward, group: Group, *, split_input: bool) -> Forward:
    """Return a forward that sums its outputs over ranks, each of which has a part of the input.

    split_input: True to take this rank's part of an input that all ranks have whole.
    """

    def sum_outputs(input: Tensor) -> Tensor:
        return sum_forward(forward(take_own_columns(input, group) if split_input else input), group)

    return sum_outputs


def _sum_input_gradient(forward: Forward, group: Group) -> Forward:
    """Return a forward that sums the gradients of its input, which ranks have parts of."""

    def sum_input_gradient(input: Tensor) -> Tensor:
        return forward(sum_backward(input, group))

    return sum_input_gradient


# New parameter -> piece of the parameter that the new one replaces. The piece has no name yet.
CutPieces = dict[Tensor, WeightPiece]


def _is_linear(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _cut_block(
    weight: Tensor, dim: int, shard_index: ShardIndex
) -> tuple[nn.Parameter, WeightPiece]:
    """Return a rank's block of a weight and its piece.

    The block is a copy, so that the whole weight can be freed.
    """
    rows = shard_index.range(weight.shape[dim])
    block = weight.detach().narrow(dim, rows.start, len(rows)).clone()
    offsets = tuple(rows.start if i == dim else 0 for i in range(weight.dim()))
    return nn.Parameter(block), WeightPiece("", tuple(weight.shape), offsets, range(len(block)))


def _divide_outputs(
    linear: nn.Linear, shard_index: ShardIndex, group: Group, *, gather_outputs: bool = False
) -> CutPieces:
    """Divide a linear layer by its outputs (column parallelism)."""
    linear.weight, piece = _cut_block(linear.weight, 0, shard_index)
    pieces: CutPieces = {linear.weight: piece}
    if linear.bias is not None:
        linear.bias, piece = _cut_block(linear.bias, 0, shard_index)
        pieces[linear.bias] = piece
    plain_forward = linear.forward

    def forward(input: Tensor) -> Tensor:
        out = plain_forward(sum_backward(input, group))
        return gather_columns(out, group) if gather_outputs else out

    linear.forward = forward
    return pieces


def _divide_inputs(
    linear: nn.Linear, shard_index: ShardIndex, group: Group, *, split_input: bool
) -> CutPieces:
    """Divide a linear layer by its inputs (row parallelism)."""
    linear.weight, piece = _cut_block(linear.weight, 1, shard_index)

    def forward(input: Tensor) -> Tensor:
        local_input = take_own_columns(input, group) if split_input else input
        out = sum_forward(F.linear(local_input, linear.weight), group)
        return out if linear.bias is None else out + linear.bias

    linear.forward = forward
    return {linear.weight: piece}


def _divide_vocabulary(
    model: nn.Module, head: nn.Linear, shard_index: ShardIndex, group: Group
) -> CutPieces:
    """Divide the head, and the embeddings that are tied to it."""
    whole_weight = head.weight
    pieces = _divide_outputs(head, shard_index, group)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight is whole_weight:
            _divide_embedding(module, shard_index, group)
            module.weight = head.weight
    return pieces


def _divide_embedding(embedding: nn.Embedding, shard_index: ShardIndex, group: Group) -> CutPieces:
    """Divide an embedding by its rows."""
    rows = shard_index.range(len(embedding.weight))
    embedding.weight, piece = _cut_block(embedding.weight, 0, shard_index)
    if embedding.padding_idx is not None:  # the token without a gradient
        embedding.padding_idx = (
            embedding.padding_idx - rows.start if embedding.padding_idx in rows else None
        )
    plain_forward = embedding.forward

    def forward(input: Tensor) -> Tensor:
        is_local = (input >= rows.start) & (input < rows.stop)
        return sum_forward(
            plain_forward((input - rows.start).where(is_local, 0)) * is_local[..., None], group
        )

    embedding.forward = forward
    return {embedding.weight: piece}
