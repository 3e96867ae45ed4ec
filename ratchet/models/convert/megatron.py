"""Map the parameters of one Megatron Core rank to blocks of canonical weights.

    # parameter name -> the pieces of canonical weights in it
    layout = megatron_layout(dimensions, shard)
    # read all weights from files, block by block
    fill_parameters(tensors, layout, read)
    # send or save all weights, one parameter at a time
    list_blocks(tensors, layout)

This needs no communication between ranks, and no rank ever holds a whole model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ratchet.errors import ModelError
from ratchet.models.convert.dimensions import Dimensions
from ratchet.models.convert.tables import (
    DUPLICATED,
    EMBEDDING,
    FINAL_NORM,
    FUSED,
    GROUPED,
    HEAD,
    MTP_LAYER,
    TIED_HEAD,
    Rules,
    find_layer_rules,
)
from ratchet.models.model_source import ReadBlock
from ratchet.models.parallel.sharding import (
    ModelShard,
    ShardIndex,
    check_even,
    find_nearest_divisor,
)
from ratchet.models.weights.weight_layout import WeightPiece, cut_blocks
from ratchet.protocols import Shard
from ratchet.utils.summarize import summarize_names

Layout = Mapping[str, tuple[WeightPiece, ...]]


@dataclass(frozen=True)
class MegatronShard(ModelShard):
    """The shard of a Megatron rank, or of one of its chunks.

    With p pipeline ranks of v chunks each, chunk c of rank r is stage r + p * c of p * v.
    """

    expert_tensor: ShardIndex | None = None  # tensor parallelism in an expert; None: `tensor`
    has_te_layers: bool = False  # True if the layers are Transformer Engine's

    def check_megatron(self, dimensions: Dimensions) -> None:
        """Raise ModelError if Megatron can't divide the model into such shards.

        The message names the nearest divisor.
        """
        n = self.tensor.count
        totals = {
            "query heads": dimensions.heads,
            "KV heads": dimensions.kv_heads,
            "columns of an MLP": dimensions.width,
        }
        # Megatron's own layers also divide the matrices of MLA's latent states.
        if not self.has_te_layers:
            totals |= {
                "rows of latent queries": dimensions.q_rank,
                "rows of latent keys": dimensions.latent_keys,
            }
        if dimensions.mtp_layers:
            totals["rows of eh_proj"] = dimensions.hidden
        check_even(n, totals | {"columns of shared experts": dimensions.shared_width})
        check_even(
            (self.expert_tensor or self.tensor).count,
            {"columns of an expert": dimensions.expert_width},
        )
        if self.experts.count > 1 and (
            not dimensions.experts or dimensions.experts % self.experts.count
        ):
            fix = (
                find_nearest_divisor(dimensions.experts, self.experts.count)
                if dimensions.experts
                else 1
            )
            raise ModelError(
                f"learner.expert_parallel={self.experts.count} doesn't divide the model's "
                f"{dimensions.experts} experts: set it to {fix}"
            )
        if dimensions.layers < self.pipeline.count:
            raise ModelError(
                f"{self.pipeline.count} pipeline stages are more than the model's "
                f"{dimensions.layers} layers: set learner.pipeline_parallel x pipeline_chunks to "
                f"at most {dimensions.layers}"
            )


def megatron_layout(dimensions: Dimensions, shard: MegatronShard) -> Layout:
    """Return the pieces of each parameter, and of the buffer `expert_bias`, in Megatron's order.

    If the embedding is tied, a last pipeline stage without the embedding has a copy as its head,
    with the same pieces. Raises ModelError if the model can't be divided into such shards.
    """
    shard.check_megatron(dimensions)
    n = shard.tensor.count
    if not dimensions.padded_vocabulary:
        dimensions = replace(dimensions, padded_vocabulary=-(-dimensions.vocabulary // n) * n)
    return dict(_list_parameters(dimensions, shard))


def _list_parameters(
    dimensions: Dimensions, shard: MegatronShard
) -> Iterator[tuple[str, tuple[WeightPiece, ...]]]:
    """Yield (name, pieces) of each parameter, in Megatron's order of modules."""

    def apply_rules(rules: Rules) -> Iterator[tuple[str, tuple[WeightPiece, ...]]]:
        for name, rule in rules.items():
            yield name, tuple(rule.pieces("", dimensions, shard.tensor))

    if shard.is_first:
        yield from apply_rules(EMBEDDING)
    for local_layer, layer in enumerate(shard.pipeline.range(dimensions.layers)):
        rules = find_layer_rules(dimensions, layer)
        yield from _list_layer(dimensions, shard, rules, f"decoder.layers.{local_layer}.", layer)
    if shard.is_last:
        yield from apply_rules(FINAL_NORM)
        # Megatron's MTP layers are on the last stage, with a copy of the embedding.
        if dimensions.mtp_layers and not shard.is_first:
            yield from apply_rules(EMBEDDING)
        for mtp_layer in range(dimensions.mtp_layers):
            prefix, layer = f"mtp.layers.{mtp_layer}.", dimensions.layers + mtp_layer
            yield from _list_layer(dimensions, shard, MTP_LAYER, prefix, layer)
            rules, prefix = find_layer_rules(dimensions, layer), f"{prefix}transformer_layer."
            yield from _list_layer(dimensions, shard, rules, prefix, layer)
        if not dimensions.tied:
            yield from apply_rules(HEAD)
        elif not shard.is_first:
            yield from apply_rules(TIED_HEAD)


def _list_layer(
    dimensions: Dimensions, shard: MegatronShard, rules: Rules, module_prefix: str, layer: int
) -> Iterator[tuple[str, tuple[WeightPiece, ...]]]:
    """Yield (name, pieces) of each parameter of a layer.

    Args:
        module_prefix: The layer's prefix in the Megatron model.
        layer: The layer's index in the names of canonical weights.
    """
    for name, rule in rules.items():
        module_name, shard_index = _locate_parameter(name, rules, shard)
        for local_expert, expert in enumerate(
            shard.experts.range(dimensions.experts) if "{expert}" in name else [0]
        ):
            pieces = rule.pieces(f"model.layers.{layer}.", dimensions, shard_index, expert)
            yield f"{module_prefix}{module_name.format(expert=local_expert)}", tuple(pieces)


def _locate_parameter(name: str, rules: Rules, shard: MegatronShard) -> tuple[str, ShardIndex]:
    """Return a parameter's name in the model's layers, and the index of this rank's shard of it.

    The names in Transformer Engine's layers differ from those in Megatron's own.
    """
    shard_index = (shard.expert_tensor or shard.tensor) if "{expert}" in name else shard.tensor
    if not shard.has_te_layers:
        return name, shard_index
    if name in FUSED and f"{FUSED[name]}.weight" in rules:
        return f"{FUSED[name]}.layer_norm_weight", shard_index
    return GROUPED.get(name, name), ShardIndex() if name in DUPLICATED else shard_index


def fill_parameters(tensors: Mapping[str, Tensor], layout: Layout, read: ReadBlock) -> None:
    """Fill the parameters block by block. Rows that pad the vocabulary become 0.

    Args:
        tensors: All parameters and buffers of the rank, of any dtype and device.
        layout: The rank's `megatron_layout`.
        read: Returns a block, given its name, offsets and shape.

    Raises ModelError if the model's parameters are not those of the layout.
    """
    check_names(tensors, layout)
    with torch.no_grad():
        for name, pieces in layout.items():
            for block in cut_blocks(pieces, tensors[name]):
                block.tensor.copy_(read(block.name, block.offsets, block.tensor.shape))
            tensors[name][pieces[-1].rows.stop if pieces else 0 :].zero_()


def list_blocks(tensors: Mapping[str, Tensor], layout: Layout) -> Iterator[Shard]:
    """Yield the blocks of all parameters, as views.

    Several ranks may yield the same block, and the last pipeline stage yields a tied embedding
    again. The receiver uses one of the copies.
    """
    check_names(tensors, layout)
    for name, pieces in layout.items():
        yield from cut_blocks(pieces, tensors[name].detach())


def check_names(names: Collection[str], layout: Layout) -> None:
    """Raise ModelError if the parameters of a rank are not those of the layout."""
    if missing := [name for name in layout if name not in names]:
        raise ModelError(
            f"the Megatron model lacks the parameters {summarize_names(missing)}: build it from "
            "the same config.json"
        )
    if unknown := [name for name in names if name not in layout]:
        raise ModelError(
            f"the Megatron model has the unknown parameters {summarize_names(unknown)}: build it "
            "from the same config.json"
        )
