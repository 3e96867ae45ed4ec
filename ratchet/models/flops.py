"""Compute a decoder's number of parameters, and its FLOPs and bytes per token, from its shape.

This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.model_shape.lora_targets import (
    ATTENTION,
    FUSED,
    MLP,
    get_expert_matrices,
    list_fused_parameters,
    resolve_decoder_targets,
    resolve_target_modules,
    resolve_target_parameters,
)


@dataclass(frozen=True)
class TokenCost:
    """The cost of one token's forward pass through a model."""

    # Number of entries of the matrices that a token is multiplied with, including the head.
    matrix_entries: int
    # Number of query dimensions over all heads and layers. Each costs two multiply-adds per
    # attended token: one in the score, one in the weighted sum of values.
    query_dims: int

    def forward_flop(self, tokens: float, context: float) -> float:
        """Return the FLOPs of `tokens` tokens that each attend to `context` tokens on average.

        A token also attends to itself, which `context` includes.

        A token takes two FLOPs per matrix entry, and four per query dimension and attended token
        (arXiv:2204.02311, appendix B).
        """
        return tokens * (2 * self.matrix_entries + 4 * self.query_dims * context)


@dataclass(frozen=True)
class StageParameters:
    """The number of parameters that a rank has of a pipeline stage."""

    matrices: int = 0  # without those of experts
    experts: int = 0
    vectors: int = 0  # of norms and biases

    @property
    def total(self) -> int:
        return self.matrices + self.experts + self.vectors

    def __add__(self, other: StageParameters) -> StageParameters:
        return StageParameters(
            self.matrices + other.matrices,
            self.experts + other.experts,
            self.vectors + other.vectors,
        )

    def __sub__(self, other: StageParameters) -> StageParameters:
        return StageParameters(
            self.matrices - other.matrices,
            self.experts - other.experts,
            self.vectors - other.vectors,
        )


@dataclass(frozen=True)
class DecoderCost:
    """The parameters, FLOPs and memory of a decoder, from its shape."""

    shape: DecoderConfig  # of the whole model
    # True if `ratchet.kernels.cpu` runs the decoder. Its backward keeps fewer activations.
    compiled: bool = False
    # True if transformers runs the model. Its plans of tensor parallelism leave an untied embedding
    # whole.
    uses_transformers: bool = False
    # Patterns of the weights that no update changes (`model.freeze`).
    freeze: tuple[str, ...] = ()

    @property
    def has_whole_embedding(self) -> bool:
        """True if tensor parallelism leaves the embedding whole."""
        return self.uses_transformers and not self.shape.tied

    @property
    def parameters(self) -> int:
        """The number of all parameters, biases and norms included."""
        layers = range(self.shape.n_layers)
        return self.count_stage_parameters(layers, is_first=True, is_last=True).total

    def count_stage_parameters(
        self,
        layers: Collection[int],
        *,
        is_first: bool,
        is_last: bool,
        tensor_parallel: int = 1,
        expert_parallel: int = 1,
    ) -> StageParameters:
        """Return the parameters of a pipeline stage with these layers on one rank.

        Args:
            layers: The indices of its layers.
            is_first: True if it has the embedding.
            is_last: True if it has the final norm and the language head. A tied head is a copy of
                the embedding on a stage without the embedding.
            tensor_parallel: The number of ranks that divide heads, MLPs and vocabulary. Routers,
                norms and the biases of outputs are whole on each rank.
            expert_parallel: The number of ranks that divide the experts of each layer.
        """
        shape, n = self.shape, tensor_parallel
        heads = (shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim
        biases = shape.qkv_bias * heads // n + shape.out_bias * shape.hidden_size
        norms = 2 * shape.hidden_size + 2 * shape.head_dim * shape.qk_norm
        matrices = len(layers) * self._attention_parameters // n
        experts = 0
        vectors = len(layers) * (biases + norms) + is_last * shape.hidden_size
        for layer in layers:
            if shape.is_sparse(layer):
                experts += shape.n_experts // expert_parallel * self._expert_parameters // n
                matrices += shape.n_experts * shape.hidden_size
            else:
                matrices += self._dense_mlp_parameters // n
                vectors += shape.mlp_bias * (2 * shape.intermediate_size // n + shape.hidden_size)
        has_head = is_last and not (shape.tied and is_first)
        share = -(-shape.vocab_size // n)
        embedding_rows = shape.vocab_size if self.has_whole_embedding else share
        matrices += (is_first * embedding_rows + has_head * share) * shape.hidden_size
        return StageParameters(matrices, experts, vectors)

    @property
    def matrix_entries(self) -> int:
        """The number of entries of the matrices that one token is multiplied with.

        Only the experts that a token uses count. The embedding does not count, because it is only
        looked up.
        """
        shape = self.shape
        total = shape.vocab_size * shape.hidden_size
        for layer in range(shape.n_layers):
            total += self._attention_parameters
            total += (
                shape.experts_per_token * self._expert_parameters
                + shape.n_experts * shape.hidden_size
                if shape.is_sparse(layer)
                else self._dense_mlp_parameters
            )
        return total

    def count_layer_matrices(self, *, experts: bool = True) -> int:
        """Return the number of entries of all matrices of the layers.

        Args:
            experts: False to leave out the matrices of experts and of the routers to them.
        """
        shape = self.shape
        total = 0
        for layer in range(shape.n_layers):
            total += self._attention_parameters
            if not shape.is_sparse(layer):
                total += self._dense_mlp_parameters
            elif experts:
                total += shape.n_experts * (self._expert_parameters + shape.hidden_size)
        return total

    @property
    def token_cost(self) -> TokenCost:
        """The cost of one token's forward pass."""
        return TokenCost(
            self.matrix_entries, self.shape.n_layers * self.shape.n_heads * self.shape.head_dim
        )

    def forward_flop(self, tokens: float, context: float) -> float:
        """Return the FLOPs of a forward pass, see `TokenCost.forward_flop`."""
        return self.token_cost.forward_flop(tokens, context)

    def kv_bytes(self, size: int) -> int:
        """Return the bytes of a token's KV cache in all layers, at `size` bytes per number."""
        return 2 * self.shape.n_layers * self.shape.n_kv_heads * self.shape.head_dim * size

    def activation_bytes(self, size: int, *, checkpointing: bool = False) -> int:
        """Return the bytes of activations that the backward pass needs per token.

        The backward keeps the inputs of matrix products, the values that norms and the gate need,
        the queries, keys and values, and two copies of the attention's output. With checkpointing
        every layer keeps only its input, and one layer at a time has all of its activations.

        Args:
            size: Bytes per number.
        """
        layers = range(self.shape.n_layers)
        layers_bytes = self.layers_activation_bytes(layers, size, checkpointing=checkpointing)
        return layers_bytes + size * 2 * self.shape.hidden_size

    def layers_activation_bytes(
        self, layers: Collection[int], size: int, *, checkpointing: bool
    ) -> int:
        """Return the part of `activation_bytes` that these layers need, without the head's."""
        if checkpointing:
            return size * len(layers) * self.shape.hidden_size + self.largest_layer_bytes(size)
        return size * sum(self._activations_per_layer[layer] for layer in layers)

    def largest_layer_bytes(self, size: int) -> int:
        """Return the bytes of activations per token in the layer that keeps most of them."""
        return size * max(self._activations_per_layer)

    def count_adapter_parameters(
        self,
        lora: LoRAConfig,
        layers: Collection[int] | None = None,
        *,
        tensor_parallel: int = 1,
        expert_parallel: int = 1,
    ) -> int:
        """Return the number of LoRA parameters of some layers on one rank.

        Args:
            layers: The indices of the layers; None: all.
            tensor_parallel: The number of ranks that divide the adapted matrices. They divide the
                factor on the side of the division, and have the other one whole.
            expert_parallel: The number of ranks that divide the experts of each layer.

        Raises ConfigError for a target that selects nothing.
        """
        shape, n = self.shape, tensor_parallel
        queries = shape.n_heads * shape.head_dim
        keys = shape.n_kv_heads * shape.head_dim
        targets = self._resolve_targets(lora)
        outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}
        # Rows plus columns of each matrix.
        attention = sum(
            shape.hidden_size + size // n for name, size in outputs.items() if name in targets
        )
        dense = sum(name in targets for name in MLP)
        of_expert = sum(name in targets for name in get_expert_matrices(shape))
        expert_size = shape.expert_intermediate_size // n
        n_experts = shape.n_experts // expert_parallel
        fused = self._list_fused_targets(lora)
        sides = 0
        for layer in self._select(layers):
            sides += attention
            if not shape.is_sparse(layer):
                sides += dense * (shape.hidden_size + shape.intermediate_size // n)
                continue
            sides += n_experts * of_expert * (shape.hidden_size + expert_size)
            for parameter in fused.get(layer, ()):
                sides += n_experts * (shape.hidden_size + FUSED[parameter] * expert_size)
        return lora.rank * sides

    def count_adapted_experts(
        self,
        lora: LoRAConfig,
        layers: Collection[int] | None = None,
        *,
        tensor_parallel: int = 1,
        expert_parallel: int = 1,
    ) -> list[int]:
        """Return the entries of the fused parameters of experts with an adapter, by layer.

        A forward computes their sums with the adapter, which wait for the backward.

        Arguments as in `count_adapter_parameters`.
        """
        shape, fused = self.shape, self._list_fused_targets(lora)
        matrix = shape.hidden_size * (shape.expert_intermediate_size // tensor_parallel)
        entries = shape.n_experts // expert_parallel * matrix
        return [
            entries * sum(FUSED[parameter] for parameter in fused.get(layer, ()))
            for layer in self._select(layers)
        ]

    def _select(self, layers: Collection[int] | None) -> Collection[int]:
        return range(self.shape.n_layers) if layers is None else layers

    def _resolve_targets(self, lora: LoRAConfig) -> tuple[str, ...]:
        """Return the names of the linear layers that get an adapter."""
        if not self.uses_transformers:
            return resolve_decoder_targets(self.shape, lora)
        # transformers has no linear layers of routed experts.
        has_dense = len(self.shape.sparse_layers) < self.shape.n_layers
        return resolve_target_modules(lora, (*ATTENTION, *(MLP if has_dense else ())))

    def _list_fused_targets(self, lora: LoRAConfig) -> dict[int, list[str]]:
        """Return the fused parameters of experts that get an adapter, by layer."""
        by_layer: dict[int, list[str]] = {}
        names = list_fused_parameters(self.shape)
        for name in resolve_target_parameters(lora, names):
            layer, parameter = names[name]
            by_layer.setdefault(layer, []).append(parameter)
        return by_layer

    def _count_activations(self, sparse: bool) -> int:
        """Return the number of activations per token that one layer keeps for its backward."""
        shape = self.shape
        queries = shape.n_heads * shape.head_dim
        keys = shape.n_kv_heads * shape.head_dim
        qkv = queries + 2 * keys
        attention = qkv + (1 + shape.qk_norm) * (queries + keys) + 2 * queries
        # The compiled kernel keeps the QKV product only if it is normalised, and copies the values.
        if self.compiled:
            attention = (1 + shape.qk_norm) * qkv + 2 * queries
        # Each expert of a token keeps its own copy of the input.
        if sparse:
            mlp = shape.experts_per_token * (
                shape.hidden_size + 3 * shape.expert_intermediate_size + shape.hidden_size
            )
        else:
            mlp = 3 * shape.intermediate_size
        return 4 * shape.hidden_size + attention + mlp

    @property
    def _activations_per_layer(self) -> list[int]:
        return [
            self._count_activations(self.shape.is_sparse(layer))
            for layer in range(self.shape.n_layers)
        ]

    @property
    def _attention_parameters(self) -> int:
        shape = self.shape
        return shape.hidden_size * shape.head_dim * (2 * shape.n_heads + 2 * shape.n_kv_heads)

    @property
    def _dense_mlp_parameters(self) -> int:
        return 3 * self.shape.hidden_size * self.shape.intermediate_size

    @property
    def _expert_parameters(self) -> int:
        return 3 * self.shape.hidden_size * self.shape.expert_intermediate_size
