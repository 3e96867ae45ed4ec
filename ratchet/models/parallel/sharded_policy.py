"""A policy whose decoder is sharded by tensor, context, expert and pipeline parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.models.layers.expert_routing import Routing
from ratchet.models.layers.moe import Experts, SparseMLP
from ratchet.models.layers.packed_inputs import PackedInputs
from ratchet.models.lora import decoder as lora
from ratchet.models.lora.decoder import Adapter
from ratchet.models.parallel.collectives import Group, sum_backward
from ratchet.models.parallel.context_parallel import ContextAttention
from ratchet.models.parallel.expert_parallel import ExpertExchange
from ratchet.models.parallel.sharding import ModelShard, StageIndex
from ratchet.models.parallel.stages import ModelStage
from ratchet.models.parallel.tensor_parallel import TensorParallelComm, VocabParallelLogits
from ratchet.models.policy import DecoderPolicy
from ratchet.models.weights.hf_weights import empty_decoder
from ratchet.models.weights.weight_layout import list_pieces


@dataclass(frozen=True)
class DistributedShard:
    """The shard of a decoder that this rank holds, and the process groups of this rank."""

    model: ModelShard
    # The group of each kind of parallelism; None: not used.
    tensor: Group | None = None
    context: Group | None = None
    experts: Group | None = None
    sequence: bool = False  # sequence parallelism, see `TensorParallelComm`
    # The pipeline stages of this rank; several in an interleaved pipeline.
    stages: Sequence[StageIndex] = (StageIndex(),)


class DecoderStage(ModelStage):
    """Consecutive layers of the built-in decoder."""

    def __init__(
        self,
        config: DecoderConfig,
        shard: DistributedShard,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        parts = shard.tensor.size() if shard.tensor is not None and shard.sequence else 1
        super().__init__(shard.model.pipeline, state_parts=parts)
        self.decoder = empty_decoder(config, shard=shard.model, device=device, dtype=dtype)
        if shard.tensor is not None:
            rows = shard.model.tensor.range(config.vocab_size)
            self.decoder.set_tp_comm(
                TensorParallelComm(shard.tensor, rows, sequence=shard.sequence)
            )
        if shard.experts is not None:
            for module in self.decoder.modules():
                if isinstance(module, SparseMLP):
                    module.exchange = ExpertExchange(shard.experts)

    def layers(self) -> Sequence[nn.Module]:
        return list(self.decoder.layers.values())

    def experts(self) -> Sequence[nn.Module]:
        return [module for module in self.modules() if isinstance(module, Experts)]

    def run(self, packed: PackedInputs, x: Tensor | None) -> Tensor:
        return self.decoder(
            packed.tokens_U, packed.positions_U, packed.attend, x, route=packed.routing
        )


class DistributedPolicy(DecoderPolicy):
    """A policy whose decoder is divided over ranks.

    `hidden` returns only the states of the tokens that `split_context` gives to this rank.
    """

    def __init__(
        self,
        config: DecoderConfig,
        shard: DistributedShard,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        """Allocate this rank's layers. Weights are uninitialised memory."""
        nn.Module.__init__(self)
        stage_shards = [
            replace(shard, model=replace(shard.model, pipeline=stage)) for stage in shard.stages
        ]
        stage_shards[0].model.check(config)
        self.shard = shard
        self.stages = nn.ModuleList(
            DecoderStage(config, stage_shard, device=device, dtype=dtype)
            for stage_shard in stage_shards
        )
        # `decoder` is the decoder of this rank's last stage, which has the head on the last rank of
        # the pipeline. Setting the attribute in this way keeps torch from registering the module a
        # second time.
        object.__setattr__(self, "decoder", self.local_stages[-1].decoder)

    def weights_by_parameter(self) -> Mapping[str, Sequence[str]]:
        return {
            f"stages.{number}.decoder.{name}": list(dict.fromkeys(piece.name for piece in pieces))
            for number, stage in enumerate(self.local_stages)
            for name, pieces in list_pieces(stage.decoder).items()
        }

    @property
    def local_stages(self) -> list[DecoderStage]:
        return [cast(DecoderStage, stage) for stage in self.stages]

    @property
    def checkpointing(self) -> bool:
        return self.decoder.checkpointing

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        for stage in self.local_stages:
            stage.decoder.checkpointing = on

    @property
    def shares_prefixes(self) -> bool:
        """True without context parallelism, which can't divide a shared prefix between ranks."""
        return self.shard.context is None

    @property
    def packs_on_host(self) -> bool:
        return False

    @property
    def vocab_parallel(self) -> VocabParallelLogits | None:
        """The operations on the divided logits; None if this rank computes all logits."""
        return (
            None
            if self.shard.tensor is None
            else VocabParallelLogits(self.shard.tensor, self.vocab_size)
        )

    @property
    def context_group(self) -> Group | None:
        return self.shard.context

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routing: Routing | None = None,
        *,
        output_mask_T: Tensor | None = None,
    ) -> Tensor:
        packed = self.pack_inputs(tokens_T, positions_T, lengths, routing)
        return packed.unfold(self.stages[0](None, packed=packed))

    def pack_inputs(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routing: Routing | None = None,
    ) -> PackedInputs:
        context_split, group = self.split_context(lengths), self.shard.context
        if context_split is None or group is None:
            return super().pack_inputs(tokens_T, positions_T, lengths, routing)
        local_index = torch.from_numpy(context_split.tokens).to(tokens_T.device)
        if routing is not None:
            routing.check(self.shape)
            routing = routing.select(local_index)
        attend = ContextAttention(context_split, group, tokens_T.device)
        return PackedInputs(
            tokens_T[local_index], positions_T[local_index], attend, routing=routing
        )

    def logits(self, hidden_nd: Tensor) -> Tensor:
        """Return the logits of this rank's part of the vocabulary."""
        if self.shard.tensor is not None:
            hidden_nd = sum_backward(hidden_nd, self.shard.tensor)
        return super().logits(hidden_nd)

    def attach(self, adapter: Adapter) -> None:
        for stage in self.local_stages:
            lora.attach(stage.decoder, adapter)
        self.adapter = adapter

    def merge(self) -> None:
        raise AssertionError("the configuration allows no stage after one with an adapter on ranks")

    def canonical_weights(self) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError(
            "a rank has only blocks of weights: see ratchet.models.weights.weight_layout"
        )

    adapter_weights = canonical_weights
