"""Multi-LoRA serving: several adapters over one base model; each request selects an adapter.

Rows of a forward with the same adapter share its matrix products. A request's bits depend only on
its own adapter: the rows of each adapter are padded to the multiple at which products are
batch-invariant.

T = rows of a forward, n = rows of one adapter.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ratchet.errors import ModelError
from ratchet.models.decoder import Decoder, Linear
from ratchet.models.layers.expert_routing import RoutingHook
from ratchet.models.layers.moe import SparseMLP
from ratchet.models.lora.decoder import adapter_weights, add_adapters
from ratchet.models.lora.files import StoredAdapter
from ratchet.models.lora.layers import FusedLoRA, Multiply

BASE = "base"  # adapter name that selects the base model without an adapter

AdapterName = str | None  # None: the decoder's own adapter, if it has one
# (int64 row indices with padding, number of rows without padding). None: all rows.
Rows = tuple[Tensor, int] | None


class AdapterRows:
    """The rows of each adapter in the forward in progress."""

    def __init__(self) -> None:
        self.rows: dict[AdapterName, Rows] = {}


class MultiAdapter(FusedLoRA):
    """A linear layer's adapter that applies several adapters, each to its own rows.

    Args:
        default: the decoder's own adapter, if it has one.
        named: the added adapters.
    """

    def __init__(
        self, adapter_rows: AdapterRows, default: FusedLoRA | None, named: Mapping[str, FusedLoRA]
    ) -> None:
        nn.Module.__init__(self)
        self.adapter_rows = adapter_rows
        self.adapter_by_name: dict[AdapterName, FusedLoRA] = {**named}
        if default is not None:
            self.adapter_by_name[None] = default

    def forward(self, x_Ti: Tensor, out_To: Tensor, multiply: Multiply = F.linear) -> Tensor:
        for name, rows in self.adapter_rows.rows.items():
            adapter = self.adapter_by_name.get(name)
            if adapter is None:
                continue
            if rows is None:
                return adapter(x_Ti, out_To, multiply)
            padded_n, count = rows
            out_To = out_To.index_add(
                0, padded_n[:count], adapter.delta(x_Ti.index_select(0, padded_n))[:count]
            )
        return out_To


class MultiSparseMLP(nn.Module):
    """A layer with experts that computes the rows of each adapter apart.

    The experts sort their rows, so their adapters can't select rows of the forward.
    """

    def __init__(self, adapter_rows: AdapterRows, mlp: SparseMLP) -> None:
        super().__init__()
        self.adapter_rows = adapter_rows
        self.mlp = mlp

    def forward(
        self, x_Td: Tensor, row_multiple: int = 1, route: RoutingHook | None = None
    ) -> Tensor:
        weights_TK, experts_TK = self.mlp.choose(x_Td, route)
        rows_by_name = self.adapter_rows.rows
        out_Td = torch.zeros_like(x_Td)
        for name, rows in rows_by_name.items():
            if rows is None:
                return self.mlp.mix(x_Td, weights_TK, experts_TK, row_multiple)
            padded_n, count = rows
            rows_n = padded_n[:count]
            self.adapter_rows.rows = {name: None}
            out_Td[rows_n] = self.mlp.mix(
                x_Td[rows_n], weights_TK[rows_n], experts_TK[rows_n], row_multiple
            )
        self.adapter_rows.rows = rows_by_name
        return out_Td


class MultiLoRA:
    """The adapters that one decoder serves. row_multiple: see `engine.batch_invariance`."""

    def __init__(self, decoder: Decoder, row_multiple: int) -> None:
        self.source_decoder = decoder
        self.row_multiple = row_multiple
        self._adapter_rows = AdapterRows()
        # Adapters by their name, then by the path of the linear layer or of the experts' matrix.
        self._adapters_by_name: dict[str, dict[str, FusedLoRA]] = {}
        # A decoder with the source's tensors and a `MultiAdapter` at each linear layer, if built.
        self._view: Decoder | None = None
        # The `id`s of the source's adapters when the view was built.
        self._view_adapters: tuple[int, ...] = ()

    @property
    def names(self) -> list[str]:
        """Return the adapter names that requests may use."""
        return [BASE, *self._adapters_by_name]

    def add(self, name: str, stored: StoredAdapter) -> None:
        """Add an adapter. Raises ModelError for a name in use or an adapter that doesn't fit."""
        if name in self.names:
            raise ModelError(f"the name '{name}' is taken by another adapter: choose another name")
        stored.check_served(name)
        adapted_decoder = self._copy_decoder()
        add_adapters(adapted_decoder, stored.adapter)
        target_weights = dict(adapter_weights(adapted_decoder))
        for key, weight in stored.weights.items():
            if key not in target_weights or target_weights[key].shape != weight.shape:
                raise ModelError(
                    f"adapter '{name}': its weight '{key}' {tuple(weight.shape)} doesn't fit the "
                    "model"
                )
            if not bool(weight.isfinite().all()):
                raise ModelError(
                    f"adapter '{name}': its weight '{key}' isn't finite. Export the adapter again."
                )
            target_weights[key].copy_(weight)
        self._adapters_by_name[name] = _get_adapters(adapted_decoder)
        self._view = None

    def select_decoder(self, names: Sequence[AdapterName]) -> Decoder:
        """Return the decoder for a forward whose first rows have these adapters.

        Further rows are padding. The decoder is valid for the next forward only.
        """
        adapters = tuple(map(id, _get_adapters(self.source_decoder).values()))
        if self._view is None or adapters != self._view_adapters:
            self._view = self._build_view()
            self._view_adapters = adapters
        self._adapter_rows.rows = self._group_rows(names)
        return self._view

    def _group_rows(self, names: Sequence[AdapterName]) -> dict[AdapterName, Rows]:
        distinct_names = list(dict.fromkeys(names))
        if len(distinct_names) == 1:
            return {distinct_names[0]: None}
        device = self.source_decoder.head_weight.device
        rows_by_name: dict[AdapterName, Rows] = {}
        for name in distinct_names:
            rows = [row for row, row_name in enumerate(names) if row_name == name]
            rows_n = torch.tensor(rows, device=device)
            padded_n = F.pad(rows_n, (0, -len(rows_n) % self.row_multiple))
            rows_by_name[name] = padded_n, len(rows_n)
        return rows_by_name

    def _build_view(self) -> Decoder:
        view = self._copy_decoder()
        source_adapters = _get_adapters(self.source_decoder)
        adapted_paths = set(source_adapters).union(*self._adapters_by_name.values())

        def combine(path: str) -> MultiAdapter:
            named = {
                name: adapters[path]
                for name, adapters in self._adapters_by_name.items()
                if path in adapters
            }
            return MultiAdapter(self._adapter_rows, source_adapters.get(path), named)

        for path, linear in _get_linear_layers(view).items():
            linear.adapter = combine(path)
        for path, experts in list(view.layer_experts):
            paths = {name: f"{path}.{name}" for name, _ in experts.matrices}
            if adapted_paths.isdisjoint(paths.values()):
                continue
            experts.adapters.update({name: combine(matrix) for name, matrix in paths.items()})
            layer = view.get_submodule(path.removesuffix(".mlp.experts"))
            layer.mlp = MultiSparseMLP(self._adapter_rows, cast(SparseMLP, layer.mlp))
        return view

    def _copy_decoder(self) -> Decoder:
        """Return a copy of the decoder that shares its tensors and has no adapter."""
        shared = {
            id(tensor): tensor
            for tensor in (*self.source_decoder.parameters(), *self.source_decoder.buffers())
        }
        decoder = copy.deepcopy(self.source_decoder, shared)
        for linear in _get_linear_layers(decoder).values():
            linear.adapter = None
        for _, experts in decoder.layer_experts:
            experts.adapters.clear()
        return decoder


def _get_linear_layers(decoder: Decoder) -> dict[str, Linear]:
    return {path: module for path, module in decoder.named_modules() if isinstance(module, Linear)}


def _get_adapters(decoder: Decoder) -> dict[str, FusedLoRA]:
    """Return the adapters of a decoder, by the path of the linear layer or experts' matrix."""
    linears = _get_linear_layers(decoder).items()
    adapters = {path: linear.adapter for path, linear in linears if linear.adapter is not None}
    return adapters | {
        f"{path}.{name}": cast(FusedLoRA, adapter)
        for path, experts in decoder.layer_experts
        for name, adapter in experts.adapters.items()
    }
