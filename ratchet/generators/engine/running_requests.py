"""What the engine knows of its running requests, in arrays: settings and lengths on the host,
tokens on the device.

Running requests fill the slots 0 .. n-1, in any order. The host knows every length without asking
the device, as each running request gets one token a step; so a step waits for the device only where
a stop id or a stop string may end one.

R = slots, C = capacity in tokens, N = slots of a range, S = stop ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratchet.generators.engine.sampling import SETTING, Draw, Settings, setting
from ratchet.generators.request import Request
from ratchet.models.layers.expert_routing import UNKNOWN

NO_STOP = -1
# logits that are sampled from at a time: 128 MiB in float32, of which a few copies exist
CHUNK_ELEMENTS = 2**25


@dataclass(frozen=True)
class Chunk:
    """Rows whose logits exist at the same time."""

    rows: slice
    settings: Settings


@dataclass(frozen=True)
class Active:
    """A range of slots as a step sees them; valid until requests come or go.

    `feed` and `positions`: the last token of each and where it stands; they end with padding rows
    up to a multiple that keeps products stable.
    """

    first: int
    count: int
    feed: Tensor
    positions: Tensor
    prompts_N: Tensor
    base_N: Tensor  # index of the slot's first token in the flat [R * C] histories
    stops_NS: Tensor | None
    chunks: tuple[Chunk, ...]


class Slots:
    """routes: numbers of experts that a token has in all, by layer and by choice."""

    def __init__(
        self,
        *,
        vocab_size: int,
        row_multiple: int,
        device: torch.device,
        routes: tuple[int, int] = (0, 0),
    ) -> None:
        self.vocab_size, self.row_multiple, self.device, self.routes = (
            vocab_size,
            row_multiple,
            device,
            routes,
        )
        self.clear()

    def clear(self) -> None:
        self.rows = self.capacity = 0
        self.settings = np.zeros(0, dtype=SETTING)
        self.prompts = np.zeros(0, dtype=np.int64)  # tokens of the prompt
        self.lengths = np.zeros(0, dtype=np.int64)  # tokens so far
        self.limits = np.zeros(0, dtype=np.int64)
        self.stops = np.zeros((0, 0), dtype=np.int64)
        self.tokens_RC = torch.zeros(0, 0, dtype=torch.int64, device=self.device)
        self.logprobs_RC = torch.zeros(0, 0, device=self.device)
        self.log_kept_RC = torch.zeros(0, 0, device=self.device)
        self.routes_RCLK = torch.zeros(0, 0, *self.routes, dtype=torch.int16, device=self.device)

    def reserve(self, rows: int, capacity: int) -> None:
        """Grows to exactly this size; what is stored stays."""
        if (rows, capacity) == (self.rows, self.capacity):
            return
        for name in ("settings", "prompts", "lengths", "limits", "stops"):
            setattr(self, name, _grown(getattr(self, name), rows))
        for name in ("tokens_RC", "logprobs_RC", "log_kept_RC", "routes_RCLK"):
            old = getattr(self, name)
            new = torch.zeros(rows, capacity, *old.shape[2:], dtype=old.dtype, device=self.device)
            new[: self.rows, : self.capacity] = old
            setattr(self, name, new)
        self.rows, self.capacity = rows, capacity

    def enter(self, requests: Sequence[Request], first: int) -> None:
        """Host side of new requests, in the slots from `first` on. Their prompts' tokens are stored
        apart."""
        rows = slice(first, first + len(requests))
        self.settings[rows] = np.array(
            [setting(r.sampling, self.vocab_size) for r in requests], dtype=SETTING
        )
        self.prompts[rows] = self.lengths[rows] = [len(r.prompt) for r in requests]
        self.limits[rows] = [r.limit for r in requests]
        most = max(len(r.sampling.stop_ids) for r in requests)
        if most > self.stops.shape[1]:
            self.stops = np.pad(
                self.stops, ((0, 0), (0, most - self.stops.shape[1])), constant_values=NO_STOP
            )
        self.stops[rows] = NO_STOP
        for row, request in enumerate(requests, first):
            self.stops[row, : len(request.sampling.stop_ids)] = request.sampling.stop_ids

    def store(self, rows_n: Tensor, positions_n: Tensor, tokens_n: Tensor) -> None:
        self.tokens_RC.view(-1).index_copy_(0, rows_n * self.capacity + positions_n, tokens_n)

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copies some slots, of at most `length` tokens, over others."""
        for table in (self.settings, self.prompts, self.lengths, self.limits, self.stops):
            table[targets] = table[sources]
        source, target = (torch.tensor(rows, device=self.device) for rows in (sources, targets))
        for history in (self.tokens_RC, self.logprobs_RC, self.log_kept_RC, self.routes_RCLK):
            used = history[:, :length]
            used.index_copy_(0, target, used.index_select(0, source))

    def read(
        self, rows: list[int]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32] | None]]:
        """(tokens, logprobs, log of the kept mass or None where no filter was on) of each slot's
        completion."""
        picked = torch.tensor(rows, device=self.device)
        longest = int(self.lengths[rows].max())
        histories = [
            self.tokens_RC,
            self.logprobs_RC,
            *([self.log_kept_RC] if self.settings["filtered"][rows].any() else []),
        ]
        tokens, logprobs, *kept = (
            h[:, :longest].index_select(0, picked).cpu().numpy() for h in histories
        )
        results = []
        for i, row in enumerate(rows):
            new = slice(self.prompts[row], self.lengths[row])
            own_kept = kept[0][i, new].copy() if self.settings["filtered"][row] else None
            results.append((tokens[i, new].copy(), logprobs[i, new].copy(), own_kept))
        return results

    def broken(self, rows: list[int]) -> list[int]:
        """Those of some slots whose newest logprob isn't finite."""
        newest = self.lengths[rows] - 1
        # by numpy, in a tenth of the time that PyTorch takes to index
        if self.device.type == "cpu":
            logprobs = self.logprobs_RC.numpy()[rows, newest]
        else:
            logprobs = (
                self.logprobs_RC[torch.tensor(rows, device=self.device), self._upload(newest)]
                .cpu()
                .numpy()
            )
        finite = np.isfinite(logprobs)
        return (
            []
            if finite.all()
            else [row for row, fine in zip(rows, finite, strict=True) if not fine]
        )

    def read_routes(self, row: int) -> NDArray[np.int16]:
        """Of prompt and completion, whose last token has not been computed."""
        routes = self.routes_RCLK[row, : self.lengths[row]].cpu().numpy().copy()
        routes[-1] = UNKNOWN
        return routes

    def active(self, first: int, end: int) -> Active:
        """Uploads what a step needs to know of slots first .. end-1."""
        padding = -(end - first) % self.row_multiple
        rows = torch.arange(first, end, device=self.device)
        positions_N = self._upload(self.lengths[first:end]) - 1
        feed_N = self.tokens_RC[rows, positions_N]
        stops_NS = self.stops[first:end]
        some = bool((stops_NS != NO_STOP).any())
        return Active(
            first=first,
            count=end - first,
            feed=torch.cat([feed_N, feed_N.new_zeros(padding)]),
            positions=torch.cat([positions_N, positions_N.new_zeros(padding)]),
            prompts_N=self._upload(self.prompts[first:end]),
            base_N=rows * self.capacity,
            stops_NS=self._upload(stops_NS) if some else None,
            chunks=tuple(self._chunks(first, end)),
        )

    def _chunks(self, first: int, end: int) -> list[Chunk]:
        step = max(CHUNK_ELEMENTS // self.vocab_size // self.row_multiple, 1) * self.row_multiple
        bounds = [
            slice(start, min(start + step, end - first)) for start in range(0, end - first, step)
        ]
        return [
            Chunk(rows, Settings.of(self.settings[first:end][rows], self.device)) for rows in bounds
        ]

    def _upload(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.device, copy=True)

    def record(self, active: Active, draws: Sequence[Draw]) -> Tensor:
        """Appends a token to each slot of the range: int64 [N]."""
        count = active.count
        index_N = active.base_N + active.positions[:count] + 1
        tokens_N = torch.cat([d.tokens_N for d in draws])
        self.tokens_RC.view(-1).index_copy_(0, index_N, tokens_N)
        self.logprobs_RC.view(-1).index_copy_(0, index_N, torch.cat([d.logprobs_N for d in draws]))
        for chunk, drawn in zip(active.chunks, draws, strict=True):
            filters = chunk.settings.filters
            if filters is not None and drawn.log_kept_F is not None:
                kept_F = drawn.log_kept_F.to(torch.float32)
                self.log_kept_RC.view(-1).index_copy_(
                    0, index_N[chunk.rows][filters.rows_F], kept_F
                )
        active.feed[:count] = tokens_N
        active.positions[:count] += 1
        self.lengths[active.first : active.first + count] += 1
        return tokens_N


def _grown(table: NDArray, rows: int) -> NDArray:
    grown = np.zeros((rows, *table.shape[1:]), dtype=table.dtype)
    grown[: len(table)] = table
    return grown
