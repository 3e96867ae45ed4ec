"""What a learner needs of a language model, whoever implements it.

T = tokens of packed sequences laid end to end, n = any of them, d = hidden size, V = vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ratchet.config.schema import LoRAConfig
from ratchet.models.config import DecoderConfig
from ratchet.models.decoder import Decoder
from ratchet.models.flops import Cost, Work
from ratchet.models.layers.expert_routing import Routing
from ratchet.models.layers.packed_inputs import Feed, feed_of, reading_feed
from ratchet.models.lora import decoder as lora
from ratchet.models.lora.decoder import Adapter, merged, of_adapter
from ratchet.models.lora.targets import targets_of
from ratchet.models.parallel.tensor_parallel import DividedVocabulary
from ratchet.models.transformers.tensor_parallel import Divided
from ratchet.models.weights.hf_weights import Savable, canonical_weights, save_decoder
from ratchet.models.weights.weight_layout import pieces

UNLIMITED = 2**31 - 1  # positions of a model whose configuration names no limit


class PolicyModel(nn.Module, ABC):
    """divided: by the plan of an architecture; None: it is whole, or a decoder that knows its own
    part. adapter: what trains in place of the model's own weights; None: they do."""

    divided: Divided | None = None
    adapter: Adapter | None = None

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Rows of the output embedding, on all ranks together: token ids are below it."""

    @property
    @abstractmethod
    def hidden_size(self) -> int: ...

    @property
    @abstractmethod
    def max_positions(self) -> int:
        """Longest sequence, in tokens."""

    @property
    @abstractmethod
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion, as the model's own configuration says."""

    @abstractmethod
    def matrices(self) -> Mapping[str, Sequence[int]]:
        """What layers multiply hidden states by, by the name of the parameter here: the rows of
        each matrix that lies in it, one below the other. Embeddings and the language head are
        none."""

    @property
    def work(self) -> Work | None:
        """What a token of text takes; None where that can't be told."""
        return None

    @property
    def head_matrix(self) -> Tensor | None:
        """[V, d], where a product with it is all that `logits` does, of whatever dtype; None where
        there is more to it."""
        return None

    @property
    def shares_prefixes(self) -> bool:
        """Whether `hidden` computes a beginning that sequences have in common once."""
        return False

    @property
    def routes(self) -> bool:
        """Whether it has routers that `hidden` can replay and watch."""
        return False

    @property
    def reads_media(self) -> bool:
        """Whether `hidden` takes the media of sequences
        (`ratchet.models.transformers.multimodal_policy`)."""
        return False

    @property
    def vocabulary(self) -> DividedVocabulary | None:
        """Over which ranks the logits of each prediction are divided; None: all are here."""
        return None if self.divided is None else self.divided.vocabulary

    @property
    @abstractmethod
    def checkpointing(self) -> bool:
        """Whether each layer's activations are recomputed in the backward pass instead of kept."""

    @checkpointing.setter
    @abstractmethod
    def checkpointing(self, on: bool) -> None: ...

    @abstractmethod
    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routing: Routing | None = None,
        *,
        read_T: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states [T, d], each a function of its own sequence alone.

        lengths: tokens of each sequence, each at least 1; they sum to T. positions_T restarts at 0
        in each. routing: of the T tokens, for a model that `routes`. read_T: bool, whose states are
        read; None: all. What others get is any finite number, and a model need not compute it.
        """

    def forward(self, *given: Any, **options: Any) -> Tensor:
        """`hidden`, by a call that hooks of torch see: FSDP fetches weights before it."""
        return self.hidden(*given, **options)

    @abstractmethod
    def logits(self, hidden_nd: Tensor) -> Tensor:
        """The model's logits of the next token, [n, V], in float32 (float64 for float64 models)
        even under autocast: a bfloat16 head is off by about 1e-2 nats a token, as much as a whole
        policy step."""

    @abstractmethod
    def canonical_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, detached tensor that shares the parameter's memory), each weight
        once; of an adapter nothing."""

    # --- an adapter

    @abstractmethod
    def check_adapter(self, lora: LoRAConfig) -> tuple[str, ...]:
        """The names of the maps that it would be given to. Raises ConfigError where the model has
        none of that name."""

    @abstractmethod
    def attach(self, adapter: Adapter) -> None:
        """From now on the model computes with it, and nothing else of it trains. At first it
        changes no output."""

    @abstractmethod
    def merge(self) -> None:
        """Adds the adapter to the weights, which then train, and takes it away."""

    @abstractmethod
    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(peft's name, detached tensor that shares the parameter's memory), each weight once."""

    @abstractmethod
    def without_adapter(self) -> AbstractContextManager[None]:
        """Meanwhile it computes what it does without."""

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """What an update changes, by name: the adapter where there is one, else all."""
        return [
            (name, p)
            for name, p in self.named_parameters()
            if self.adapter is None or of_adapter(name)
        ]

    def resting(self) -> frozenset[str]:
        """Canonical weights that no update changes."""
        return (
            frozenset()
            if self.adapter is None
            else frozenset(name for name, _ in self.canonical_weights())
        )

    def merged_weights(self) -> Mapping[str, Savable]:
        """The canonical weights as they are with the adapter in them."""
        weights = dict(self.canonical_weights())
        if self.adapter is None:
            return weights
        return merged(weights, dict(self.adapter_weights()), self.adapter.lora.scale)

    @abstractmethod
    def save(self, directory: Path, weights: Mapping[str, Savable] | None = None) -> None:
        """Writes a Hugging Face directory, every file whole or not at all. weights: all of them by
        canonical name, where they are not the model's own."""


class DecoderPolicy(PolicyModel):
    """Around the built-in decoder."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    @property
    def shape(self) -> DecoderConfig:
        """Of the whole model."""
        return self.decoder.config

    @property
    def work(self) -> Work:
        return Cost(self.shape).work

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.shape.hidden_size

    @property
    def max_positions(self) -> int:
        return self.shape.max_positions

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.shape.eos_ids

    def matrices(self) -> Mapping[str, Sequence[int]]:
        layers = {
            name: found
            for name, found in pieces(self.decoder).items()
            if name.startswith("layers.")
        }
        return {
            f"decoder.{name}": [len(piece.rows) for piece in found]
            for name, found in layers.items()
            if len(found[0].shape) == 2
        }

    @property
    def head_matrix(self) -> Tensor | None:
        return self.decoder.head_weight

    @property
    def shares_prefixes(self) -> bool:
        return True

    @property
    def routes(self) -> bool:
        return bool(self.shape.sparse_layers)

    @property
    def checkpointing(self) -> bool:
        return self.decoder.checkpointing

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        self.decoder.checkpointing = on

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routing: Routing | None = None,
        *,
        read_T: Tensor | None = None,
    ) -> Tensor:
        if read_T is None or routing is not None or not read_T.any():
            feed = self.feed(tokens_T, positions_T, lengths, routing)
        else:
            feed = reading_feed(tokens_T, positions_T, lengths, read_T, shares=self.shares_prefixes)
        hidden = self.decoder(
            feed.tokens_U, feed.positions_U, feed.attend, route=feed.routing, read=feed.read_U
        )
        return feed.unfold(hidden)

    def feed(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routing: Routing | None = None,
    ) -> Feed:
        if routing is not None:
            routing.check(self.shape)
        return feed_of(tokens_T, positions_T, lengths, routing, shares=self.shares_prefixes)

    def logits(self, hidden_nd: Tensor) -> Tensor:
        weight_Vd = self.decoder.head_weight
        dtype = torch.promote_types(weight_Vd.dtype, torch.float32)
        with torch.autocast(hidden_nd.device.type, enabled=False):
            return hidden_nd.to(dtype) @ weight_Vd.to(dtype).T

    def canonical_weights(self) -> Iterator[tuple[str, Tensor]]:
        return canonical_weights(self.decoder)

    def check_adapter(self, lora: LoRAConfig) -> tuple[str, ...]:
        return targets_of(self.shape, lora)

    def attach(self, adapter: Adapter) -> None:
        lora.attach(self.decoder, adapter)
        self.adapter = adapter

    def merge(self) -> None:
        lora.merge(self.decoder)
        self.adapter = None

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        return lora.adapter_weights(self.decoder)

    def without_adapter(self) -> AbstractContextManager[None]:
        return lora.switched_off(self)

    def save(self, directory: Path, weights: Mapping[str, Savable] | None = None) -> None:
        save_decoder(self.decoder, directory, weights=weights)
