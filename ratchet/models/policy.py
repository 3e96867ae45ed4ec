"""What a learner needs of a language model, whoever implements it.

T = tokens of packed sequences laid end to end, n = any of them, d = hidden size, V = vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ratchet.config.schema import LoRAConfig
from ratchet.models import lora
from ratchet.models.attention import PackedAttention, TreeAttention
from ratchet.models.by_plan import Divided
from ratchet.models.config import DecoderConfig
from ratchet.models.cost import Cost, Work
from ratchet.models.decoder import Attend, Decoder
from ratchet.models.hf import Savable, canonical_weights, save_decoder
from ratchet.models.layout import pieces
from ratchet.models.lora import Adapter, merged, of_adapter
from ratchet.models.lora_targets import targets_of
from ratchet.models.prefixes import PrefixTree, path_keys
from ratchet.models.routing import Routing
from ratchet.models.tensor_parallel import DividedVocabulary

UNLIMITED = 2**31 - 1  # positions of a model whose configuration names no limit
WORTH = 0.9  # beginnings are shared where at most this part of the tokens is left: a call with a mask costs a little more


class PolicyModel(nn.Module, ABC):
    """divided: by the plan of an architecture; None: it is whole, or a decoder that knows its own part. adapter: what trains in
    place of the model's own weights; None: they do."""

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
        """What layers multiply hidden states by, by the name of the parameter here: the rows of each matrix that lies in it,
        one below the other. Embeddings and the language head are none."""

    @property
    def work(self) -> Work | None:
        """What a token of text takes; None where that can't be told."""
        return None

    @property
    def head_matrix(self) -> Tensor | None:
        """[V, d], where a product with it is all that `logits` does, of whatever dtype; None where there is more to it."""
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
        """Whether `hidden` takes the media of sequences (`ratchet.models.vision`)."""
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
    def hidden(self, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int], routing: Routing | None = None) -> Tensor:
        """Final hidden states [T, d], each a function of its own sequence alone.

        lengths: tokens of each sequence, each at least 1; they sum to T. positions_T restarts at 0 in each. routing: of the T
        tokens, for a model that `routes`.
        """

    def forward(self, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int], routing: Routing | None = None) -> Tensor:
        """As `hidden`, by a call that hooks of torch see: FSDP fetches weights before it."""
        return self.hidden(tokens_T, positions_T, lengths, routing)

    @abstractmethod
    def logits(self, hidden_nd: Tensor) -> Tensor:
        """The model's logits of the next token, [n, V], in float32 (float64 for float64 models) even under autocast: a
        bfloat16 head is off by about 1e-2 nats a token, as much as a whole policy step."""

    @abstractmethod
    def canonical_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, detached tensor that shares the parameter's memory), each weight once; of an adapter nothing."""

    # --- an adapter

    @abstractmethod
    def check_adapter(self, lora: LoRAConfig) -> tuple[str, ...]:
        """The names of the maps that it would be given to. Raises ConfigError where the model has none of that name."""

    @abstractmethod
    def attach(self, adapter: Adapter) -> None:
        """From now on the model computes with it, and nothing else of it trains. At first it changes no output."""

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
        return [(name, p) for name, p in self.named_parameters() if self.adapter is None or of_adapter(name)]

    def resting(self) -> frozenset[str]:
        """Canonical weights that no update changes."""
        return frozenset() if self.adapter is None else frozenset(name for name, _ in self.canonical_weights())

    def merged_weights(self) -> Mapping[str, Savable]:
        """The canonical weights as they are with the adapter in them."""
        weights = dict(self.canonical_weights())
        if self.adapter is None:
            return weights
        return merged(weights, dict(self.adapter_weights()), self.adapter.lora.scale)

    @abstractmethod
    def save(self, directory: Path, weights: Mapping[str, Savable] | None = None) -> None:
        """Writes a Hugging Face directory, every file whole or not at all. weights: all of them by canonical name, where they
        are not the model's own."""


@dataclass(frozen=True)
class Feed:
    """What a decoder computes of packed sequences: distinct tokens, in the order that its attention wants. back_T: int64, where
    each of the T tokens is among them; None: as they are. seed: of what adapters drop, where the feed brings it."""

    tokens_U: Tensor
    positions_U: Tensor
    attend: Attend
    back_T: Tensor | None = None
    routing: Routing | None = None
    seed: int | None = None

    def unfold(self, hidden_Ud: Tensor) -> Tensor:
        """[T, d]"""
        return hidden_Ud if self.back_T is None else hidden_Ud.index_select(0, self.back_T)

    def padded(self, tokens: int) -> Feed:
        """With so many, of which nothing reads the last ones."""
        own = len(self.tokens_U)
        if own == tokens:
            return self
        more = (0, tokens - own)
        routing = None if self.routing is None else self.routing.padded(tokens)
        tokens_U, positions_U = F.pad(self.tokens_U, more), F.pad(self.positions_U, more)
        return replace(self, tokens_U=tokens_U, positions_U=positions_U, attend=Padded(self.attend, own), routing=routing)


@dataclass(frozen=True)
class Padded:
    """`attend` of a feed for hidden states with padding behind them."""

    attend: Attend
    tokens: int

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        out = self.attend(layer, q_THD[: self.tokens], k_TKD[: self.tokens], v_TKD[: self.tokens])
        return F.pad(out, (0, 0, 0, 0, 0, len(q_THD) - self.tokens))


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
        layers = {name: found for name, found in pieces(self.decoder).items() if name.startswith("layers.")}
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

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int], routing: Routing | None = None) -> Tensor:
        feed = self.feed(tokens_T, positions_T, lengths, routing)
        return feed.unfold(self.decoder(feed.tokens_U, feed.positions_U, feed.attend, route=feed.routing))

    def feed(self, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int], routing: Routing | None = None) -> Feed:
        assert sum(lengths) == len(tokens_T), f"{sum(lengths)} tokens in `lengths`, {len(tokens_T)} in `tokens_T`"
        if routing is not None:
            routing.check(self.shape)
        if len(lengths) > 1 and self.shares_prefixes:
            given_TLK = None if routing is None else routing.given_TLK
            tree = PrefixTree.of(path_keys(tokens_T, given_TLK), lengths)
            if len(tree.tokens_U) <= WORTH * len(tokens_T):
                return _shared(tokens_T, positions_T, tree, routing)
        ascending = sorted(lengths)
        attend = PackedAttention(ascending, tokens_T.device)
        if ascending == list(lengths):
            return Feed(tokens_T, positions_T, attend, routing=routing)
        # Sequences of like length share an attention call if they are neighbours: reorder once, not in every layer.
        order_T, inverse_T = (index.to(tokens_T.device) for index in _by_length(lengths))
        return _reordered(tokens_T, positions_T, attend, order_T, inverse_T, routing)

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


def _shared(tokens_T: Tensor, positions_T: Tensor, tree: PrefixTree, routing: Routing | None = None) -> Feed:
    tokens_U, distinct_T = (torch.from_numpy(x).to(tokens_T.device) for x in (tree.tokens_U, tree.distinct_T))
    return _reordered(tokens_T, positions_T, TreeAttention(tree, tokens_T.device), tokens_U, distinct_T, routing)


def _reordered(
    tokens_T: Tensor, positions_T: Tensor, attend: Attend, order_U: Tensor, back_T: Tensor, routing: Routing | None
) -> Feed:
    """Of tokens order_U."""
    if routing is not None:
        routing = routing.rows(order_U)
        if routing.watch is not None:
            routing.watch.back_T = back_T
    return Feed(tokens_T[order_U], positions_T[order_U], attend, back_T, routing)


def _by_length(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(where each token of the sequences in ascending order of length comes from, the inverse), int64 [T]."""
    lengths_S = torch.tensor(lengths)
    starts_S = lengths_S.cumsum(0) - lengths_S
    sorted_S, rows_S = lengths_S.sort(stable=True)
    shift_S = starts_S[rows_S] - (sorted_S.cumsum(0) - sorted_S)
    order_T = torch.arange(int(lengths_S.sum())) + shift_S.repeat_interleave(sorted_S)
    inverse_T = torch.empty_like(order_T)
    inverse_T[order_T] = torch.arange(len(order_T))
    return order_T, inverse_T
