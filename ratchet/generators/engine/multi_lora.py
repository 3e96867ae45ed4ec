"""Several adapters over one base, chosen by request: rows of a forward that have the same one share
its products.

A request's bits depend on its own adapter alone: the rows of each are padded to the multiple that
keeps products stable.

T = rows of a forward, n = those of one adapter.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ratchet.errors import ModelError
from ratchet.models.decoder import Decoder, Linear
from ratchet.models.lora.decoder import adapter_weights, fit
from ratchet.models.lora.files import Stored
from ratchet.models.lora.layers import LowRank

BASE = "base"  # as the name of an adapter: none

Name = str | None  # None: the adapter that the decoder itself has, where it has one
Rows = tuple[Tensor, int] | None  # int64, padded; how many are no padding. None: all rows


class Choice:
    """Which rows of the forward in progress have which adapter."""

    def __init__(self) -> None:
        self.rows: dict[Name, Rows] = {}


class Served(LowRank):
    """Stands where an adapter does. own: the decoder's."""

    def __init__(self, choice: Choice, own: LowRank | None, named: Mapping[str, LowRank]) -> None:
        nn.Module.__init__(self)
        self.choice = choice
        self.by_name: dict[Name, LowRank] = {**named, **({} if own is None else {None: own})}

    def forward(self, x_Ti: Tensor, out_To: Tensor) -> Tensor:
        for name, rows in self.choice.rows.items():
            adapter = self.by_name.get(name)
            if adapter is None:
                continue
            if rows is None:
                return adapter(x_Ti, out_To)
            padded_n, count = rows
            out_To = out_To.index_add(
                0, padded_n[:count], adapter.delta(x_Ti.index_select(0, padded_n))[:count]
            )
        return out_To


class Bank:
    """row_multiple: see `engine.rows`."""

    def __init__(self, decoder: Decoder, row_multiple: int) -> None:
        self.source, self.row_multiple = decoder, row_multiple
        self._choice = Choice()
        self._added: dict[str, dict[str, LowRank]] = {}  # by name, by path of the map
        self._view: Decoder | None = None
        self._seen: tuple[int, ...] = ()  # the adapters that the source had when the view was made

    @property
    def names(self) -> list[str]:
        return [BASE, *self._added]

    def add(self, name: str, stored: Stored) -> None:
        """Raises ModelError for a name that is taken, and for an adapter of another base."""
        if name in self.names:
            raise ModelError(f"an adapter '{name}' is served already: give this one another name")
        fresh = self._copy()
        fit(fresh, stored.adapter)
        places = dict(adapter_weights(fresh))
        for key, weight in stored.weights.items():
            if key not in places or places[key].shape != weight.shape:
                raise ModelError(
                    f"adapter '{name}': its weight '{key}' {tuple(weight.shape)} doesn't fit the "
                    "model"
                )
            if not bool(weight.isfinite().all()):
                raise ModelError(
                    f"adapter '{name}': its weight '{key}' isn't finite. Export the adapter again."
                )
            places[key].copy_(weight)
        self._added[name] = {
            path: linear.adapter
            for path, linear in _maps(fresh).items()
            if linear.adapter is not None
        }
        self._view = None

    def decoder(self, names: Sequence[Name]) -> Decoder:
        """What computes a forward whose first rows have these adapters; the others are padding."""
        seen = tuple(id(linear.adapter) for linear in _maps(self.source).values())
        if self._view is None or seen != self._seen:
            self._view, self._seen = self._made(), seen
        self._choice.rows = self._chosen(names)
        return self._view

    def _chosen(self, names: Sequence[Name]) -> dict[Name, Rows]:
        distinct = list(dict.fromkeys(names))
        if len(distinct) == 1:
            return {distinct[0]: None}
        device = self.source.head_weight.device
        found: dict[Name, Rows] = {}
        for name in distinct:
            rows_n = torch.tensor(
                [row for row, own in enumerate(names) if own == name], device=device
            )
            found[name] = (F.pad(rows_n, (0, -len(rows_n) % self.row_multiple)), len(rows_n))
        return found

    def _made(self) -> Decoder:
        made, own = self._copy(), _maps(self.source)
        for path, linear in _maps(made).items():
            named = {
                name: adapters[path] for name, adapters in self._added.items() if path in adapters
            }
            linear.adapter = Served(self._choice, own[path].adapter, named)
        return made

    def _copy(self) -> Decoder:
        """Modules of their own around the same tensors, without an adapter."""
        shared = {
            id(tensor): tensor for tensor in (*self.source.parameters(), *self.source.buffers())
        }
        made = copy.deepcopy(self.source, shared)
        for linear in _maps(made).values():
            linear.adapter = None
        return made


def _maps(decoder: Decoder) -> dict[str, Linear]:
    return {path: module for path, module in decoder.named_modules() if isinstance(module, Linear)}
