"""Tensor parallelism of a model that transformers runs, by the plan that comes with its
architecture: a style for each linear map, by the path of the module with * for numbers.

Each rank keeps its block of a weight as a plain tensor, as it does of our own decoder: FSDP then
divides, and checkpoints name, what is left in the same way. Whatever the plan says of the language
head, each rank has the logits of some tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor, nn

from ratchet.errors import ModelError
from ratchet.models.parallel.collectives import (
    Group,
    gather_columns,
    sum_backward,
    sum_forward,
    take_own_columns,
)
from ratchet.models.parallel.sharding import ShardIndex, check_even
from ratchet.models.parallel.tensor_parallel import VocabParallelLogits
from ratchet.models.weights.weight_layout import WeightPiece

OUTPUTS = ("colwise",)  # each rank has some rows of the matrix, and computes some of its outputs
GATHERED = ("colwise_gather_output", "colwise_rep")  # ... which all ranks need
INPUTS = ("rowwise",)  # each rank has some columns, and a summand of all outputs
SPLIT = ("rowwise_split_input", "rowwise_rep")  # ... from an input that all ranks have whole
EMBEDDING = ("embedding_rowwise",)  # each rank has some tokens
PARTIAL = ("replicated_with_grad_allreduce",)  # whole on each rank, which sees some of the heads
BY_ROWS, BY_COLUMNS = OUTPUTS + GATHERED, INPUTS + SPLIT
REMEDY = "set learner.tensor_parallel to 1, and learner.dp_shard to the number of ranks"


@dataclass(frozen=True)
class TPPlan:
    """styles: by the path of each module that has one. head: path of the output embedding."""

    styles: Mapping[str, str]
    head: str

    @classmethod
    def of(cls, model: nn.Module, rules: Mapping[str, str], head: str) -> TPPlan:
        """Raises ModelError where there is none, or it asks for what isn't here."""
        what = type(model).__name__
        paths = [path for path, _ in model.named_modules()] + [
            name for name, _ in model.named_parameters()
        ]
        styles = {
            path: rules[rule]
            for path in paths
            if (rule := re.sub(r"\.\d+(?=\.|$)", ".*", path)) in rules
        }
        if styles.keys() <= {head}:
            raise ModelError(f"{what} comes without a plan for tensor parallelism: {REMEDY}")
        modules = dict(model.named_modules())
        for path, style in styles.items():
            module = modules.get(path)
            if style not in BY_ROWS + BY_COLUMNS + EMBEDDING + PARTIAL:
                raise ModelError(
                    f"the plan of {what} divides {path} as '{style}', which Ratchet can't: {REMEDY}"
                )
            if style in BY_ROWS + BY_COLUMNS and not _is_linear(module):
                raise ModelError(
                    f"the plan of {what} divides {path}, which is no plain linear map: {REMEDY}"
                )
            if style in EMBEDDING and not isinstance(module, nn.Embedding):
                raise ModelError(
                    f"the plan of {what} divides {path}, which is no embedding: {REMEDY}"
                )
        return cls(styles, head)

    def check(self, model: nn.Module, n: int, heads: Mapping[str, int]) -> None:
        """Raises ModelError where n ranks can't have equal parts. heads: how many there are, by
        what they are called."""
        totals = dict(heads)
        for path, style in self.styles.items():
            if path != self.head and style in BY_ROWS + BY_COLUMNS:
                rows, columns = model.get_parameter(f"{path}.weight").shape
                totals |= (
                    {f"outputs of {path}": rows}
                    if style in BY_ROWS
                    else {f"inputs of {path}": columns}
                )
        check_even(n, totals)


@dataclass(frozen=True)
class TPDivision:
    """The division of a model's parameters, by name.

    blocks: what a rank has of the divided ones. partial: those that each rank has whole, with a
    summand of the gradient. vocabulary: how logits are read; None: each rank has all.
    """

    blocks: Mapping[str, WeightPiece]
    partial: frozenset[str]
    vocabulary: VocabParallelLogits | None


def divide_model(model: nn.Module, plan: TPPlan, group: Group) -> TPDivision:
    """Leaves this rank's blocks in the model, whose modules then exchange numbers with those of the
    other ranks. Raises ModelError where the plan divides a weight in some of the modules that share
    it only."""
    distinct = len(list(model.parameters()))
    share = ShardIndex(group.rank(), group.size())
    cut: Cut = {}
    partial: set[Tensor] = set()
    vocabulary = None
    if plan.head in plan.styles:
        head = model.get_submodule(plan.head)
        assert isinstance(head, nn.Linear), "plans of another head are refused"
        vocabulary = VocabParallelLogits(group, len(head.weight))
        cut |= _divide_vocabulary(model, head, share, group)
    for path, style in plan.styles.items():
        module = model.get_submodule(path)
        if style in PARTIAL:
            partial.update(module.parameters(recurse=False))
        elif isinstance(module, nn.Embedding) and module.weight not in cut:
            cut |= _divide_embedding(module, share, group)
        elif isinstance(module, nn.Linear) and path != plan.head:
            if style in BY_ROWS:
                cut |= _divide_outputs(module, share, group, gathered=style in GATHERED)
            else:
                cut |= _divide_inputs(module, share, group, split=style in SPLIT)
    named = dict(model.named_parameters())
    if len(named) != distinct:
        raise ModelError(
            f"the plan of {type(model).__name__} divides weights that other modules share: {REMEDY}"
        )
    blocks = {name: replace(cut[p], name=name) for name, p in named.items() if p in cut}
    return TPDivision(
        blocks, frozenset(name for name, p in named.items() if p in partial), vocabulary
    )


Cut = dict[Tensor, WeightPiece]  # what each new parameter is of the old one; names come later


def _is_linear(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _block(weight: Tensor, dim: int, share: ShardIndex) -> tuple[nn.Parameter, WeightPiece]:
    """Return a rank's block in memory of its own, so that the whole weight can be freed."""
    rows = share.range(weight.shape[dim])
    block = weight.detach().narrow(dim, rows.start, len(rows)).clone()
    offsets = tuple(rows.start if i == dim else 0 for i in range(weight.dim()))
    return nn.Parameter(block), WeightPiece("", tuple(weight.shape), offsets, range(len(block)))


def _divide_outputs(
    linear: nn.Linear, share: ShardIndex, group: Group, *, gathered: bool = False
) -> Cut:
    linear.weight, rows = _block(linear.weight, 0, share)
    cut: Cut = {linear.weight: rows}
    if linear.bias is not None:
        linear.bias, rows = _block(linear.bias, 0, share)
        cut[linear.bias] = rows
    whole_forward = linear.forward

    def forward(input: Tensor) -> Tensor:
        out = whole_forward(sum_backward(input, group))
        return gather_columns(out, group) if gathered else out

    linear.forward = forward
    return cut


def _divide_inputs(linear: nn.Linear, share: ShardIndex, group: Group, *, split: bool) -> Cut:
    linear.weight, columns = _block(linear.weight, 1, share)

    def forward(input: Tensor) -> Tensor:
        out = sum_forward(
            F.linear(take_own_columns(input, group) if split else input, linear.weight), group
        )
        return out if linear.bias is None else out + linear.bias

    linear.forward = forward
    return {linear.weight: columns}


def _divide_vocabulary(model: nn.Module, head: nn.Linear, share: ShardIndex, group: Group) -> Cut:
    """The head, and the embedding that is tied to it."""
    whole = head.weight
    cut = _divide_outputs(head, share, group)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight is whole:
            _divide_embedding(module, share, group)
            module.weight = head.weight
    return cut


def _divide_embedding(embedding: nn.Embedding, share: ShardIndex, group: Group) -> Cut:
    rows = share.range(len(embedding.weight))
    embedding.weight, block = _block(embedding.weight, 0, share)
    if embedding.padding_idx is not None:  # the token that gives no gradient
        embedding.padding_idx = (
            embedding.padding_idx - rows.start if embedding.padding_idx in rows else None
        )
    whole_forward = embedding.forward

    def forward(input: Tensor) -> Tensor:
        is_local = (input >= rows.start) & (input < rows.stop)
        return sum_forward(
            whole_forward((input - rows.start).where(is_local, 0)) * is_local[..., None], group
        )

    embedding.forward = forward
    return {embedding.weight: block}
