"""The policy over the Megatron stages of a rank.

It computes the hidden states of this rank's tokens, and the logits of its part of the vocabulary.

T = tokens, U = distinct tokens, t = U and padding, n = rows whose logits are computed, d = hidden
size, V = this rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.model_shape.megatron_decoder import MegatronDecoderConfig
from ratchet.models.flops import TokenCost
from ratchet.models.layers.attention import PackedAttention, TreeAttention
from ratchet.models.layers.expert_routing import Routing
from ratchet.models.layers.packed_inputs import PackedInputs
from ratchet.models.layers.sink_attention import SinkAttention
from ratchet.models.lora.decoder import Adapter, Factors
from ratchet.models.lora.experts import locate_decoder_experts
from ratchet.models.megatron.blocks import StageParameter, fill_stages, list_stage_parameters
from ratchet.models.megatron.build import MegatronStage, build_stages
from ratchet.models.megatron.lora import attach
from ratchet.models.megatron.multi_token_prediction import count_built_mtp_layers
from ratchet.models.model_source import ReadBlock
from ratchet.models.parallel.collectives import Group, sum_backward
from ratchet.models.parallel.context_parallel import ContextAttention
from ratchet.models.parallel.megatron_sizes import Fp8Format, MegatronSizes, padded_vocabulary
from ratchet.models.parallel.sharded_policy import DistributedPolicy, DistributedShard
from ratchet.models.parallel.sharding import ModelShard, ShardIndex, StageIndex
from ratchet.models.parallel.tensor_parallel import VocabParallelLogits
from ratchet.models.weights.hf_weights import SavableTensor, save_model_directory


class PaddedVocabulary(VocabParallelLogits):
    """A vocabulary that Megatron shards: all ranks' weights have the same number of rows.

    The last rows are padding, which `rows` leaves out.
    """

    def _get_rows(self, rank: int, size: int) -> range:
        rows_per_rank = padded_vocabulary(self.size, self.group.size()) // self.group.size()
        return range(min(rows_per_rank * rank, size), min(rows_per_rank * (rank + 1), size))


class MegatronPolicy(DistributedPolicy):
    """A policy whose decoder is run by Megatron Core."""

    def __init__(
        self,
        shape: DecoderConfig,
        sizes: MegatronSizes,
        *,
        dtype: torch.dtype = torch.float32,
        recompute: str = "none",
        fp8: Fp8Format | None = None,
    ) -> None:
        """Build the stages, with uninitialised weights. Call `init_process_groups` first.

        Raises ModelError if the shape can't be divided by these sizes.
        """
        nn.Module.__init__(self)
        self._shape = shape
        self.sizes = sizes
        self.fp8 = fp8
        self.shard = _make_distributed_shard(sizes)
        self.stages = nn.ModuleList(
            build_stages(shape, sizes, dtype=dtype, recompute=recompute, fp8=fp8)
        )

    @property
    def shape(self) -> DecoderConfig:
        return self._shape

    @property
    def mtp_layers(self) -> int:
        """The number of layers for multi-token prediction."""
        return count_built_mtp_layers(self._shape)

    @property
    def shares_prefixes(self) -> bool:
        """False with MTP layers: the tokens after a shared prefix differ between its sequences."""
        return super().shares_prefixes and not self.mtp_layers

    @property
    def token_cost(self) -> TokenCost | None:
        is_decoder = not isinstance(self._shape, MegatronDecoderConfig)
        return super().token_cost if is_decoder else None

    @property
    def chunks(self) -> list[MegatronStage]:
        """The stages on this rank: the model chunks of Megatron."""
        return [cast(MegatronStage, stage) for stage in self.stages]

    def stage_parameters(self) -> Iterator[StageParameter]:
        """Yield all parameters of this rank with their blocks."""
        return list_stage_parameters(self.chunks, self.sizes)

    def fill(self, read: ReadBlock) -> None:
        """Load this rank's weights from `read`, which returns one block of a weight."""
        fill_stages(self.chunks, self.sizes, read)

    @property
    def checkpointing(self) -> bool:
        return self.chunks[0].config.recompute_granularity is not None

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        raise AssertionError(
            "activation checkpointing of Megatron's layers is set when they are built"
        )

    @property
    def vocab_parallel(self) -> VocabParallelLogits | None:
        return (
            None
            if self.shard.tensor is None
            else PaddedVocabulary(self.shard.tensor, self.vocab_size)
        )

    def pack_inputs(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routing: Routing | None = None,
    ) -> PackedInputs:
        packed = super().pack_inputs(tokens_T, positions_T, lengths, routing)
        sinks = self._shape.sinks if isinstance(self._shape, MegatronDecoderConfig) else None
        if sinks is None:
            return packed
        assert isinstance(packed.attend, PackedAttention | TreeAttention | ContextAttention)
        return replace(packed, attend=SinkAttention(packed.attend, sinks, tokens_T.device))

    def unpad_hidden(self, packed: PackedInputs, hidden_td: Tensor) -> Tensor:
        """Return the last stage's output in token order [T, d], without padding."""
        return packed.unfold(hidden_td[: len(packed.tokens_U)])

    def pad_inputs(self, packed: PackedInputs, tokens: int = 1) -> PackedInputs:
        """Return the inputs, padded to at least `tokens` tokens.

        Their number of tokens is a multiple of what sequence parallelism and fp8 need.
        """
        multiple = (self.sizes.tensor if self.sizes.sequence else 1) * (
            1 if self.fp8 is None else self.fp8.size_multiple
        )
        minimum = max(tokens, len(packed.tokens_U), 1)
        return packed.pad(-(-minimum // multiple) * multiple)

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routing: Routing | None = None,
        *,
        output_mask_T: Tensor | None = None,
    ) -> Tensor:
        assert len(self.chunks) == self.sizes.pipeline == 1, (
            "`hidden` works only without pipeline parallelism, which Megatron's own schedule runs"
        )
        packed = self.pack_inputs(tokens_T, positions_T, lengths, routing)
        return self.unpad_hidden(packed, self.chunks[0](self.pad_inputs(packed)))

    def logits(self, hidden_nd: Tensor) -> Tensor:
        weight_Vd = self.chunks[-1].head_weight
        if self.shard.tensor is not None:
            hidden_nd = sum_backward(hidden_nd, self.shard.tensor)
            weight_Vd = weight_Vd[: len(PaddedVocabulary(self.shard.tensor, self.vocab_size).rows)]
        dtype = torch.promote_types(weight_Vd.dtype, torch.float32)
        with torch.autocast(hidden_nd.device.type, enabled=False):
            return hidden_nd.to(dtype) @ weight_Vd.to(dtype).T

    def resolve_expert_factors(self, lora: LoRAConfig) -> Mapping[str, Factors]:
        shape = self._shape
        return (
            locate_decoder_experts(shape, lora) if isinstance(shape, MegatronDecoderConfig) else {}
        )

    def attach(self, adapter: Adapter) -> None:
        attach(self.chunks, self.sizes, adapter)
        self.adapter = adapter

    def save(self, directory: Path, weights: Mapping[str, SavableTensor] | None = None) -> None:
        assert weights is not None, (
            "`weights` must be given: a rank holds only blocks of the weights"
        )
        save_model_directory(self.shape, weights.items(), directory, next(self.parameters()).dtype)


def _make_distributed_shard(sizes: MegatronSizes) -> DistributedShard:
    """Return this rank's shard and groups."""
    model = ModelShard(
        ShardIndex(parallel_state.get_tensor_model_parallel_rank(), sizes.tensor),
        StageIndex(parallel_state.get_pipeline_model_parallel_rank(), sizes.pipeline),
        ShardIndex(parallel_state.get_expert_model_parallel_rank(), sizes.experts),
    )

    def group(process_group: Any, size: int) -> Group | None:
        return process_group if size > 1 else None

    return DistributedShard(
        model,
        tensor=group(parallel_state.get_tensor_model_parallel_group(), sizes.tensor),
        context=group(parallel_state.get_context_parallel_group(), sizes.context),
        sequence=sizes.sequence,
    )
