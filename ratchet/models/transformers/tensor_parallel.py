"""Divide models that transformers runs by tensor parallelism, with the plan of their architecture.

A plan maps module paths, with * for numbers, to styles of dividing a module. Each rank keeps its
block of a weight as a plain tensor, as for the built-in decoder, so FSDP and checkpoints treat both
alike. If the plan divides the language head, in any style, each rank has the logits of some tokens.
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

# Each rank has some rows of the matrix, and computes the outputs of these.
OUTPUTS = ("colwise",)
# Like OUTPUTS, but every rank then gathers all outputs.
GATHERED = ("colwise_gather_output", "colwise_rep")
# Each rank has some columns of the matrix; the ranks' outputs are summed.
INPUTS = ("rowwise",)
# Like INPUTS, but each rank first takes its part of an input that all ranks have whole.
SPLIT = ("rowwise_split_input", "rowwise_rep")
# Each rank has the rows of some tokens.
EMBEDDING = ("embedding_rowwise",)
# Each rank has the whole parameter but uses it for some heads only, so gradients are summed.
PARTIAL = ("replicated_with_grad_allreduce",)
BY_ROWS, BY_COLUMNS = OUTPUTS + GATHERED, INPUTS + SPLIT
REMEDY = "set learner.tensor_parallel to 1, and learner.dp_shard to the number of ranks"


@dataclass(frozen=True)
class TPPlan:
    """A plan of tensor parallelism for one model.

    styles: the style of each module that the plan names, by the module's path.
    head: path of the output embedding.
    """

    styles: Mapping[str, str]
    head: str

    @classmethod
    def of(cls, model: nn.Module, rules: Mapping[str, str], head: str) -> TPPlan:
        """Return the plan that an architecture's rules give for a model.

        Raises ModelError if they name no module but the head, or ask for an unsupported division.
        """
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
        """Raise ModelError if n ranks can't have equal parts.

        heads: numbers of attention heads, by the name for an error message.
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
        check_even(n, totals)


@dataclass(frozen=True)
class TPDivision:
    """The division of a model's parameters, by name.

    blocks: this rank's block of each divided parameter.
    partial: parameters that each rank has whole, with a gradient to be summed over the ranks.
    vocabulary: reads the divided logits; None if each rank has all logits.
    """

    blocks: Mapping[str, WeightPiece]
    partial: frozenset[str]
    vocabulary: VocabParallelLogits | None


def divide_model(model: nn.Module, plan: TPPlan, group: Group) -> TPDivision:
    """Replace a model's weights by this rank's blocks, and let its modules communicate with the
    other ranks.

    Raises ModelError if modules share a weight and the plan divides it in only some of them.
    """
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


Cut = dict[Tensor, WeightPiece]  # new parameter -> its piece of the old one, not named yet


def _is_linear(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _block(weight: Tensor, dim: int, share: ShardIndex) -> tuple[nn.Parameter, WeightPiece]:
    """Return a copy of a rank's block, so that the whole weight can be freed."""
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
    """Divide the head, and the embedding that is tied to it."""
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
    if embedding.padding_idx is not None:  # the token without a gradient
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
