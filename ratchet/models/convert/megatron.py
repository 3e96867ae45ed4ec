"""The parameters of one rank of Megatron-core as blocks of canonical weights.

    layout = megatron_layout(dimensions, place)          # parameter -> the pieces of weights that lie in it
    fill(dict(model.named_parameters()), layout, read)   # from files, block by block
    blocks(dict(model.named_parameters()), layout)       # to a weight link or files, one parameter at a time

No rank needs another for this, and none ever holds a whole model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ratchet.errors import ModelError
from ratchet.models.convert.dimensions import Dimensions
from ratchet.models.convert.rules import Rule
from ratchet.models.convert.tables import (
    DUPLICATED,
    EMBEDDING,
    FINAL_NORM,
    FUSED,
    GROUPED,
    HEAD,
    TIED_HEAD,
    Rules,
    table_of,
)
from ratchet.models.model_source import Read
from ratchet.models.parallel.sharding import Part, Share, check_even, nearest
from ratchet.models.weights.hf_weights import some
from ratchet.models.weights.weight_layout import Piece, shards
from ratchet.protocols import Shard

Layout = Mapping[str, tuple[Piece, ...]]


@dataclass(frozen=True)
class Place(Part):
    """A rank of Megatron, or one of its chunks: chunk c of pipeline rank r of p, with v chunks
    each, is stage r + p * c of p * v. expert_tensor: of the columns of each expert; None: as
    `tensor`. engine: its layers are Transformer Engine's."""

    expert_tensor: Share | None = None
    engine: bool = False

    def check_megatron(self, dimensions: Dimensions) -> None:
        """Raises ModelError where Megatron can't divide the model so, with the nearest number that
        divides it."""
        n = self.tensor.of
        totals = {
            "query heads": dimensions.heads,
            "KV heads": dimensions.kv_heads,
            "columns of an MLP": dimensions.width,
        }
        if not self.engine:  # Megatron's own layers divide these too
            totals |= {
                "rows of latent queries": dimensions.q_rank,
                "rows of latent keys": dimensions.latent_keys,
            }
        check_even(n, totals | {"columns of shared experts": dimensions.shared_width})
        check_even(
            (self.expert_tensor or self.tensor).of,
            {"columns of an expert": dimensions.expert_width},
        )
        if self.experts.of > 1 and (not dimensions.experts or dimensions.experts % self.experts.of):
            fix = nearest(dimensions.experts, self.experts.of) if dimensions.experts else 1
            raise ModelError(
                f"learner.expert_parallel={self.experts.of} doesn't divide the model's "
                f"{dimensions.experts} experts: "
                f"set it to {fix}"
            )
        if dimensions.layers % self.pipeline.of:
            raise ModelError(
                f"{self.pipeline.of} pipeline stages can't have equally many of "
                f"{dimensions.layers} layers: set "
                "learner.pipeline_parallel x pipeline_chunks to "
                f"{nearest(dimensions.layers, self.pipeline.of)}"
            )


def megatron_layout(dimensions: Dimensions, place: Place) -> Layout:
    """By the name of the parameter (or buffer: `expert_bias`), in Megatron's order of modules. A
    tied head on a last stage that has no embedding is a second copy, with the embedding's pieces.
    Raises ModelError where the model can't be divided so."""
    place.check_megatron(dimensions)
    n = place.tensor.of
    if not dimensions.padded:
        dimensions = replace(dimensions, padded=-(-dimensions.vocabulary // n) * n)
    return dict(_parameters(dimensions, place))


def _parameters(dimensions: Dimensions, place: Place) -> Iterator[tuple[str, tuple[Piece, ...]]]:
    def ends(rules: Rules) -> Iterator[tuple[str, tuple[Piece, ...]]]:
        for name, rule in rules.items():
            yield name, tuple(rule.pieces("", dimensions, place.tensor))

    if place.first:
        yield from ends(EMBEDDING)
    table = table_of(dimensions)
    for local, layer in enumerate(place.pipeline.range(dimensions.layers)):
        rules = table.layer(dimensions.sparse(layer))
        for name, rule in rules.items():
            spelled, share = _as_built(name, rule, rules, place)
            for own, expert in enumerate(
                place.experts.range(dimensions.experts) if "{expert}" in name else [0]
            ):
                pieces = rule.pieces(f"model.layers.{layer}.", dimensions, share, expert)
                yield f"decoder.layers.{local}.{spelled.format(expert=own)}", tuple(pieces)
    if place.last:
        yield from ends(FINAL_NORM)
        if not dimensions.tied:
            yield from ends(HEAD)
        elif not place.first:
            yield from ends(TIED_HEAD)


def _as_built(name: str, rule: Rule, rules: Rules, place: Place) -> tuple[str, Share]:
    """What it is called in the layers that this model has, and what of it is here."""
    share = (place.expert_tensor or place.tensor) if "{expert}" in name else place.tensor
    if not place.engine:
        return name, share
    if name in FUSED and f"{FUSED[name]}.weight" in rules:
        return f"{FUSED[name]}.layer_norm_weight", share
    return GROUPED.get(name, name), Share() if name in DUPLICATED else share


def fill(tensors: Mapping[str, Tensor], layout: Layout, read: Read) -> None:
    """Copies every block from where `read` finds it by its name, offsets and size; rows that pad
    the vocabulary become 0. tensors: all parameters and buffers of the rank, whatever their dtype
    and device. Raises ModelError where the model has others than the map."""
    check_names(tensors, layout)
    with torch.no_grad():
        for name, pieces in layout.items():
            for block in shards(pieces, tensors[name]):
                block.tensor.copy_(read(block.name, block.offsets, block.tensor.shape))
            tensors[name][pieces[-1].rows.stop if pieces else 0 :].zero_()


def blocks(tensors: Mapping[str, Tensor], layout: Layout) -> Iterator[Shard]:
    """What `fill` filled, as views, parameter by parameter. Ranks that hold the same block all give
    it, as does a last stage the tied embedding: whoever collects takes one."""
    check_names(tensors, layout)
    for name, pieces in layout.items():
        yield from shards(pieces, tensors[name].detach())


def check_names(names: Collection[str], layout: Layout) -> None:
    """Raises ModelError where the parameters of a rank are not those of the map."""
    if lacking := [name for name in layout if name not in names]:
        raise ModelError(
            f"the Megatron model lacks {some(lacking)}, which the map has: build it from the same "
            "config.json"
        )
    if unknown := [name for name in names if name not in layout]:
        raise ModelError(
            f"the Megatron model has {some(unknown)}, for which there is no map: build it from the "
            "same config.json"
        )
