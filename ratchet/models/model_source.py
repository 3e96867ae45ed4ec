"""Where a model comes from, in a form that can be sent to the processes which load it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ratchet.models.config import DecoderConfig, unsupported_reason
from ratchet.models.load import Backend, Towers, find_model, init_policy, load_policy
from ratchet.models.policy import PolicyModel
from ratchet.models.weights.hf_weights import WeightFiles, empty_decoder, read_config, read_json
from ratchet.models.weights.weight_layout import pieces, shards

# (name, offsets, sizes) -> the block, on the CPU
Read = Callable[[str, Sequence[int], Sequence[int]], Tensor]


@dataclass(frozen=True)
class Origin:
    """shape, seed: random weights. path: a Hugging Face directory or Hub id, with the options of
    `load_policy`."""

    shape: DecoderConfig | None = None
    seed: int = 0
    path: str | None = None
    backend: Backend = "auto"
    trust_remote_code: bool = False
    revision: str | None = None
    towers: Towers = "frozen"

    def directory(self) -> Path:
        assert self.path is not None, "a model of random weights has no directory"
        return find_model(self.path, revision=self.revision, with_code=self.trust_remote_code)

    def decoder(self) -> DecoderConfig | None:
        """The shape, where it is our decoder that runs it; None where it is transformers."""
        if self.shape is not None:
            return self.shape
        if self.backend == "transformers" or unsupported_reason(
            read_json(self.directory() / "config.json")
        ):
            return None
        return read_config(self.directory())

    def policy(self, *, device: torch.device | str = "cpu") -> PolicyModel:
        """The whole model, in float32. Raises ModelError."""
        if self.path is None:
            assert self.shape is not None, "an origin has a shape or a path"
            return init_policy(self.shape, self.seed, device=device)
        return load_policy(
            self.path,
            backend=self.backend,
            device=device,
            trust_remote_code=self.trust_remote_code,
            revision=self.revision,
            towers=self.towers,
        )

    def reader(self) -> Read:
        """Reads blocks of the weights, and no more of them."""
        if self.shape is None:
            files = WeightFiles.find(self.directory())
            return files.block
        return _Drawn(self.shape, self.seed).block


class _Drawn:
    """Random weights, the same bits as `Decoder.init_weights` draws. They are drawn one after the
    other: who asks for all blocks of one before those of the next holds a single one at a time."""

    def __init__(self, shape: DecoderConfig, seed: int) -> None:
        self.decoder = empty_decoder(shape, dtype=torch.float32, device="meta")
        self.layout, self.seed = pieces(self.decoder), seed
        self.owner = {piece.name: name for name, own in self.layout.items() for piece in own}
        self._restart()

    def _restart(self) -> None:
        self.drawn: dict[str, Tensor] = {}
        self.order = self.decoder.draws(self.seed)

    def block(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        owner = self.owner[name]
        while owner not in self.drawn:
            drawn = next(self.order, None)
            if drawn is None:
                self._restart()
                continue
            self.drawn = {drawn[0]: drawn[1]}
        whole = next(
            block.tensor
            for block in shards(self.layout[owner], self.drawn[owner])
            if block.name == name
        )
        return whole[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
