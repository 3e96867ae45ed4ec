"""Tensor parallelism for models that transformers runs, by the plan of their architecture.

Each rank keeps its block of a weight as a plain tensor, like in the built-in decoder, so FSDP and
checkpoints need no special case. Of stacked experts it keeps the same columns of every expert, and
the routers whole. If the plan divides the language head in any style, each rank has the logits of
some tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ratchet.errors import ModelError
from ratchet.models.lora.transformers import ADAPTER_NAME, get_canonical_name
from ratchet.models.parallel.collectives import (
    Group,
    gather_columns,
    sum_backward,
    sum_forward,
    take_own_columns,
)
from ratchet.models.parallel.sharding import ShardIndex
from ratchet.models.parallel.tensor_parallel import VocabParallelLogits
from ratchet.models.transformers.sequence_parallel import TokenShards
from ratchet.models.transformers.tp_plan import (
    BY_COLUMNS,
    EXPERTS,
    GATHERED_OUTPUTS,
    OUTPUTS,
    PARTIAL,
    REMEDY,
    SHARED_ROPE,
    SPLIT_INPUTS,
    Cut,
    TPPlan,
)
from ratchet.models.weights.weight_layout import PEFT_PREFIX, WeightPiece

WeightPieces = tuple[WeightPiece, ...]


@dataclass(frozen=True)
class TPDivision:
    """The division of a model's parameters, by name.

    The names are canonical (`ratchet.models.lora.transformers.get_canonical_name`).

    group: the ranks over which the model is divided.
    plan: the plan by which the model is divided.
    divided_pieces: this rank's pieces of each divided parameter, in the order of its entries.
    partial_gradients: names of the parameters that each rank has as a whole, but whose gradient
      must be summed over ranks.
    vocab_parallel: the operations on the divided logits; None if each rank has all logits.
    tokens: the division of hidden states between blocks (sequence parallelism); None: not divided.
    """

    group: Group
    plan: TPPlan
    divided_pieces: Mapping[str, WeightPieces]
    partial_gradients: frozenset[str]
    vocab_parallel: VocabParallelLogits | None
    tokens: TokenShards | None = None


def divide_model(
    model: nn.Module, plan: TPPlan, group: Group, tokens: TokenShards | None = None
) -> TPDivision:
    """Replace a model's weights by this rank's blocks, and make its modules communicate.

    tokens: see `TPDivision`.

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
        if path in plan.expert_cuts:
            continue
        module: Any = model.get_submodule(path)
        if style in PARTIAL:
            partially_used.update(module.parameters(recurse=False))
        elif style in EXPERTS:
            pieces |= _divide_experts(module, path, plan.expert_cuts, shard_index, group, tokens)
        elif style in SHARED_ROPE:
            if tokens is None:
                module.forward = _sum_last_gradients(module.forward, plan.rope_columns, group)
        elif isinstance(module, nn.Embedding) and module.weight not in pieces:
            pieces |= _divide_embedding(module, shard_index, group)
        elif isinstance(module, nn.Linear) and path != plan.head:
            pieces |= _divide_linear(module, style, shard_index, group, tokens)
            if style in BY_COLUMNS and tokens is not None and module.bias is not None:
                partially_used.add(module.bias)  # added to this rank's tokens
    parameters = dict(model.named_parameters())
    if len(parameters) != n_parameters:
        raise ModelError(
            f"the plan of {type(model).__name__} divides weights that other modules share: {REMEDY}"
        )
    divided_pieces = {name: _name(pieces[p], name) for name, p in parameters.items() if p in pieces}
    partial_names = {name for name, p in parameters.items() if p in partially_used}
    if tokens is not None:
        tokens.install(model)
        partial_names |= tokens.list_partial(model) - divided_pieces.keys()
    return TPDivision(
        group,
        plan,
        divided_pieces,
        frozenset(partial_names),
        vocab_parallel,
        tokens,
    )


def divide_adapters(model: nn.Module, division: TPDivision) -> TPDivision:
    """Divide the adapters of a divided model like their linear layers; return the new division.

    With W divided by outputs, B is too; with W divided by inputs, A is too, and its outputs are
    summed. Of the other factor each rank has the whole. Where every rank gathers all outputs, both
    factors are whole, and so are their gradients, and where the outputs end in the rotary part of
    all heads' keys.
    """
    group, tokens = division.group, division.tokens
    shard_index = ShardIndex(group.rank(), group.size())
    pieces = dict(division.divided_pieces)
    partial_names = set(division.partial_gradients)
    modules = dict(model.named_modules())
    for path, style in division.plan.styles.items():
        layer: Any = modules.get(path)
        if style in EXPERTS or not hasattr(layer, "lora_A"):
            continue  # `divide_expert_adapters` divides those of experts
        a, b = layer.lora_A[ADAPTER_NAME], layer.lora_B[ADAPTER_NAME]
        if style in SHARED_ROPE:
            if tokens is None:
                b.forward = _sum_last_gradients(b.forward, division.plan.rope_columns, group)
            continue
        a_name, b_name = (f"{PEFT_PREFIX}{path}.lora_{factor}.weight" for factor in "AB")
        if style in BY_COLUMNS:
            a.weight, cut_pieces = _cut_block(a.weight, Cut(1), shard_index)
            pieces[a_name] = _name(cut_pieces, a_name)
            a.forward = _sum_outputs(
                a.forward, group, _make_sum(group, tokens), split_input=style in SPLIT_INPUTS
            )
            if tokens is not None:
                partial_names.add(b_name)
        elif style in GATHERED_OUTPUTS:
            if tokens is not None and group.rank() > 0:
                # All ranks have the same gradient of the block's input, of which they have the sum.
                a.forward = _drop_input_gradient(a.forward)
        else:
            if tokens is None:
                a.forward = _sum_input_gradient(a.forward, group)
            partial_names.add(a_name)
            if style in OUTPUTS:
                b.weight, cut_pieces = _cut_block(b.weight, Cut(0), shard_index)
                pieces[b_name] = _name(cut_pieces, b_name)
            else:
                partial_names.add(b_name)
    if tokens is not None:
        outside = tokens.list_partial(model)
        partial_names |= {get_canonical_name(name) for name in outside} - pieces.keys()
    return replace(division, divided_pieces=pieces, partial_gradients=frozenset(partial_names))


Forward = Callable[[Tensor], Tensor]


def _make_sum(group: Group, tokens: TokenShards | None) -> Forward:
    """Return the sum over ranks, of all tokens or of this rank's."""
    return partial(sum_forward, group=group) if tokens is None else tokens.leave


def _sum_outputs(forward: Forward, group: Group, add: Forward, *, split_input: bool) -> Forward:
    """Return a forward that sums its outputs over ranks, each of which has a part of the input.

    add: the sum.
    split_input: True to take this rank's part of an input that all ranks have whole.
    """

    def sum_outputs(input: Tensor) -> Tensor:
        return add(forward(take_own_columns(input, group) if split_input else input))

    return sum_outputs


def _sum_input_gradient(forward: Forward, group: Group) -> Forward:
    """Return a forward that sums the gradients of its input, which ranks have parts of."""

    def sum_input_gradient(input: Tensor) -> Tensor:
        return forward(sum_backward(input, group))

    return sum_input_gradient


def _drop_input_gradient(forward: Forward) -> Forward:
    """Return a forward without a gradient of its input."""

    def drop_input_gradient(input: Tensor) -> Tensor:
        return forward(input.detach())

    return drop_input_gradient


def _sum_last_gradients(forward: Forward, n: int, group: Group) -> Forward:
    """Return a forward that sums the gradients of its last n outputs, which ranks have parts of."""

    def sum_last_gradients(input: Tensor) -> Tensor:
        out = forward(input)
        return torch.cat([out[..., :-n], sum_backward(out[..., -n:], group)], dim=-1)

    return sum_last_gradients


# New parameter -> pieces of the parameter that the new one replaces. The pieces have no name yet.
CutPieces = dict[Tensor, WeightPieces]


def _name(pieces: WeightPieces, name: str) -> WeightPieces:
    """Return the pieces under the name of their weight."""
    return tuple(replace(piece, name=name) for piece in pieces)


def _cut_block(
    weight: Tensor, cut: Cut, shard_index: ShardIndex
) -> tuple[nn.Parameter, WeightPieces]:
    """Return a rank's block of a weight, or of each of its packed matrices, and the pieces.

    The block is a copy, so that the whole weight can be freed.
    """
    total = weight.shape[cut.dim] // cut.packed
    entries = shard_index.range(total)
    n = len(entries)
    starts = [matrix * total + entries.start for matrix in range(cut.packed)]
    parts = [weight.detach().narrow(cut.dim, start, n) for start in starts]
    block = nn.Parameter(torch.cat(parts, cut.dim), requires_grad=weight.requires_grad)
    pieces: list[WeightPiece] = []
    for matrix, start in enumerate(starts):
        offsets = tuple(start if i == cut.dim else 0 for i in range(weight.dim()))
        local = range(matrix * n, (matrix + 1) * n)  # the matrix's entries of the block
        rows = local if cut.dim == 0 else range(len(block))
        columns = local if cut.packed > 1 else None
        pieces.append(WeightPiece("", tuple(weight.shape), offsets, rows, columns))
    return block, tuple(pieces)


def _divide_experts(
    module: nn.Module,
    path: str,
    cuts: Mapping[str, Cut],
    shard_index: ShardIndex,
    group: Group,
    tokens: TokenShards | None,
) -> CutPieces:
    """Divide the matrices of every expert in a module, at a path, by their intermediate size.

    Hooks communicate, so that they stay around whatever computes the rows of the experts. Divided
    `tokens` are gathered with their routes, and each rank gets the outputs of its own.
    """
    add = _make_sum(group, tokens)
    pieces: CutPieces = {}
    for name, parameter in list(module.named_parameters(recurse=False)):
        if (cut := cuts.get(f"{path}.{name}")) is not None:
            block, cut_pieces = _cut_block(parameter, cut, shard_index)
            setattr(module, name, block)
            pieces[block] = cut_pieces

    def enter(x: Any) -> Any:
        if tokens is not None:
            return tokens.enter(x)
        # Hidden states and the weights of the chosen experts, but not their indices.
        is_number = isinstance(x, Tensor) and x.is_floating_point()
        return sum_backward(x, group) if is_number else x

    def sum_gradients(_: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        return tuple(enter(x) for x in args), {key: enter(x) for key, x in named.items()}

    def sum_outputs(_: nn.Module, __: object, output: Tensor) -> Tensor:
        return add(output)

    module.register_forward_pre_hook(sum_gradients, with_kwargs=True)
    module.register_forward_hook(sum_outputs)
    return pieces


def _divide_linear(
    linear: nn.Linear,
    style: str,
    shard_index: ShardIndex,
    group: Group,
    tokens: TokenShards | None,
) -> CutPieces:
    """Divide a linear layer in the style of the plan."""
    if style in BY_COLUMNS:
        add = _make_sum(group, tokens)
        return _divide_inputs(linear, shard_index, group, add, split_input=style in SPLIT_INPUTS)
    return _divide_outputs(
        linear,
        shard_index,
        group,
        gather_outputs=style in GATHERED_OUTPUTS,
        sum_gradient=tokens is None,
    )


def _divide_outputs(
    linear: nn.Linear,
    shard_index: ShardIndex,
    group: Group,
    *,
    gather_outputs: bool = False,
    sum_gradient: bool = True,
) -> CutPieces:
    """Divide a linear layer by its outputs (column parallelism).

    sum_gradient: True to sum the ranks' gradients of the input.
    """
    linear.weight, cut_pieces = _cut_block(linear.weight, Cut(0), shard_index)
    pieces: CutPieces = {linear.weight: cut_pieces}
    if linear.bias is not None:
        linear.bias, cut_pieces = _cut_block(linear.bias, Cut(0), shard_index)
        pieces[linear.bias] = cut_pieces
    plain_forward = linear.forward

    def forward(input: Tensor) -> Tensor:
        out = plain_forward(sum_backward(input, group) if sum_gradient else input)
        return gather_columns(out, group) if gather_outputs else out

    linear.forward = forward
    return pieces


def _divide_inputs(
    linear: nn.Linear, shard_index: ShardIndex, group: Group, add: Forward, *, split_input: bool
) -> CutPieces:
    """Divide a linear layer by its inputs (row parallelism); `add` sums the ranks' outputs."""
    linear.weight, cut_pieces = _cut_block(linear.weight, Cut(1), shard_index)

    def forward(input: Tensor) -> Tensor:
        local_input = take_own_columns(input, group) if split_input else input
        out = add(F.linear(local_input, linear.weight))
        return out if linear.bias is None else out + linear.bias

    linear.forward = forward
    return {linear.weight: cut_pieces}


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
    embedding.weight, cut_pieces = _cut_block(embedding.weight, Cut(0), shard_index)
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
    return {embedding.weight: cut_pieces}
