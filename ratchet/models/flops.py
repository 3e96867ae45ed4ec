"""Compute a decoder's parameters, and its FLOPs and bytes per token, from its shape. No torch.

d = hidden size, H = query heads, K = key/value heads, D = head_dim, F = size of the gated layer, V
= vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ratchet.config.model_shape.decoder_config import DecoderConfig


@dataclass(frozen=True)
class TokenCost:
    """The operations of one token's forward pass through any model."""

    # Number of entries of the matrices that a token is multiplied with, the head included.
    multiplied: int
    # Query dimensions of all heads and layers. Each costs two multiply-adds per attended token: one
    # in the score, one in the weighted sum of values.
    attended: int

    def forward_flop(self, tokens: float, context: float) -> float:
        """Return the FLOPs of `tokens` tokens that each attend to `context` others on average.

        They are two per matrix entry, and four per query dimension and attended token
        (arXiv:2204.02311, appendix B).
        """
        return tokens * (2 * self.multiplied + 4 * self.attended * context)


@dataclass(frozen=True)
class DecoderCost:
    """The parameters, FLOPs and memory of a decoder, from its shape."""

    shape: DecoderConfig  # of the whole model
    compiled: bool = False  # True: run by `ratchet.kernels.cpu`, whose backward keeps less

    @property
    def parameters(self) -> int:
        """The number of all parameters, biases and norms included."""
        s = self.shape
        heads = (s.n_heads + 2 * s.n_kv_heads) * s.head_dim
        biases = s.qkv_bias * heads + s.out_bias * s.hidden_size
        norms = 2 * s.hidden_size + 2 * s.head_dim * s.qk_norm
        layers = s.n_layers * (self._attention + biases + norms)
        for layer in range(s.n_layers):
            if s.is_sparse(layer):
                layers += s.n_experts * (self._expert + s.hidden_size)
            else:
                layers += self._dense + s.mlp_bias * (2 * s.intermediate_size + s.hidden_size)
        return layers + s.hidden_size + s.vocab_size * s.hidden_size * (1 if s.tied else 2)

    @property
    def multiplied(self) -> int:
        """Entries of the matrices that one token is multiplied with.

        Only the experts that a token uses count. The embedding doesn't: it is looked up.
        """
        s = self.shape
        total = s.vocab_size * s.hidden_size
        for layer in range(s.n_layers):
            total += self._attention
            total += (
                s.experts_per_token * self._expert + s.n_experts * s.hidden_size
                if s.is_sparse(layer)
                else self._dense
            )
        return total

    @property
    def work(self) -> TokenCost:
        """The operations of one token."""
        return TokenCost(
            self.multiplied, self.shape.n_layers * self.shape.n_heads * self.shape.head_dim
        )

    def forward_flop(self, tokens: float, context: float) -> float:
        """Return the FLOPs of a forward pass, see `TokenCost.forward_flop`."""
        return self.work.forward_flop(tokens, context)

    def kv_bytes(self, size: int) -> int:
        """Return the bytes of a token's KV cache in all layers, at `size` bytes per number."""
        return 2 * self.shape.n_layers * self.shape.n_kv_heads * self.shape.head_dim * size

    def activation_bytes(self, size: int, *, checkpointing: bool = False) -> int:
        """Return the bytes of activations that the backward pass needs per token.

        They are the inputs of matrix products, the values that norms and the gate keep, the
        queries, keys and values, and the output of attention twice (the next product keeps a copy).
        With checkpointing every layer keeps only its input, and one layer at a time keeps all.

        Args:
            size: bytes per number.
        """
        s = self.shape
        last = 2 * s.hidden_size
        if checkpointing:
            return size * (s.n_layers * s.hidden_size + last) + self.largest_layer_bytes(size)
        return size * (sum(self._layers) + last)

    def largest_layer_bytes(self, size: int) -> int:
        """Return the bytes of activations per token in the layer that keeps most of them."""
        return size * max(self._layers)

    def adapter(self, targets: Collection[str], rank: int) -> int:
        """Return the number of parameters of a LoRA adapter on these linear maps of every layer."""
        s = self.shape
        queries = s.n_heads * s.head_dim
        keys = s.n_kv_heads * s.head_dim
        outputs = {
            "q_proj": queries,
            "k_proj": keys,
            "v_proj": keys,
            "gate_proj": s.intermediate_size,
            "up_proj": s.intermediate_size,
        }
        sides = {name: s.hidden_size + size for name, size in outputs.items()}
        sides |= {
            "o_proj": queries + s.hidden_size,
            "down_proj": s.intermediate_size + s.hidden_size,
        }
        return s.n_layers * rank * sum(sides[name] for name in targets)

    def _kept(self, sparse: bool) -> int:
        """Return how many numbers one layer keeps per token for its backward pass."""
        s = self.shape
        queries = s.n_heads * s.head_dim
        keys = s.n_kv_heads * s.head_dim
        product = queries + 2 * keys
        attention = product + (1 + s.qk_norm) * (queries + keys) + 2 * queries
        # The compiled kernel keeps the QKV product only if it is normalised, and copies the values.
        if self.compiled:
            attention = (1 + s.qk_norm) * product + 2 * queries
        # Each of a token's experts keeps its own copy of the input.
        if sparse:
            mlp = s.experts_per_token * (
                s.hidden_size + 3 * s.expert_intermediate_size + s.hidden_size
            )
        else:
            mlp = 3 * s.intermediate_size
        return 4 * s.hidden_size + attention + mlp

    @property
    def _layers(self) -> list[int]:
        return [self._kept(self.shape.is_sparse(layer)) for layer in range(self.shape.n_layers)]

    @property
    def _attention(self) -> int:
        s = self.shape
        return s.hidden_size * s.head_dim * (2 * s.n_heads + 2 * s.n_kv_heads)

    @property
    def _dense(self) -> int:
        return 3 * self.shape.hidden_size * self.shape.intermediate_size

    @property
    def _expert(self) -> int:
        return 3 * self.shape.hidden_size * self.shape.expert_intermediate_size
