"""A description of where a model comes from: random weights, a directory or a Hub id.

Each rank of a learner receives it and loads its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ratchet.config.model_shape.decoder_config import DecoderConfig, unsupported_reason
from ratchet.config.model_shape.megatron_decoder import read_megatron_decoder
from ratchet.models.load import (
    Backend,
    find_model,
    init_policy,
    load_policy,
    read_model_config,
)
from ratchet.models.policy import PolicyModel
from ratchet.models.weights.hf_weights import WeightFiles, empty_decoder, read_config, read_json
from ratchet.models.weights.weight_layout import cut_blocks, list_pieces

# A function that reads a block of a weight to the CPU: (canonical name, offsets, sizes) -> tensor.
ReadBlock = Callable[[str, Sequence[int], Sequence[int]], Tensor]


@dataclass(frozen=True)
class ModelSource:
    """The source of a model: random weights, or a Hugging Face directory or Hub id."""

    shape: DecoderConfig | None = None  # set for random weights
    seed: int = 0  # seed of random weights
    path: str | None = None  # directory or Hub id
    # The options of `load_policy`:
    backend: Backend = "auto"
    trust_remote_code: bool = False
    revision: str | None = None
    train_encoders: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)
    freeze: tuple[str, ...] = ()  # the patterns of `PolicyModel.freeze`

    def directory(self) -> Path:
        """Return the local directory of the model, downloading it if needed."""
        assert self.path is not None, "a model of random weights has no directory"
        return find_model(self.path, revision=self.revision, with_code=self.trust_remote_code)

    def read_decoder_shape(self) -> DecoderConfig | None:
        """Return the model's shape if the built-in decoder runs it; None if transformers does."""
        if self.shape is not None:
            return self.shape
        hf = self.read_config()
        if self.backend == "transformers" or unsupported_reason(hf):
            return None
        return read_config(self.directory(), hf)

    def read_megatron_shape(self) -> DecoderConfig | None:
        """Return the model's shape if Megatron Core has its layers; None if it has not."""
        shape = self.read_decoder_shape()
        if shape is not None:
            return shape
        generation = self.directory() / "generation_config.json"
        return read_megatron_decoder(
            self.read_config(), read_json(generation) if generation.exists() else None
        )

    def read_config(self) -> dict[str, Any]:
        """Return the content of the model's `config.json` with the overrides."""
        return read_model_config(
            self.directory(),
            self.overrides,
            backend=self.backend,
            trust_remote_code=self.trust_remote_code,
        )

    def policy(self, *, device: torch.device | str = "cpu") -> PolicyModel:
        """Return the whole model in float32. Raises ModelError if it can't be loaded."""
        if self.path is None:
            assert self.shape is not None, "a model source has a shape or a path"
            model: PolicyModel = init_policy(self.shape, self.seed, device=device)
        else:
            model = load_policy(
                self.path,
                backend=self.backend,
                device=device,
                trust_remote_code=self.trust_remote_code,
                revision=self.revision,
                train_encoders=self.train_encoders,
                overrides=self.overrides,
            )
        model.freeze(self.freeze)
        return model

    def reader(self) -> ReadBlock:
        """Return a function that reads single blocks of weights without loading the model."""
        if self.shape is None:
            files = WeightFiles.find(self.directory())
            return files.block
        return _RandomWeightReader(self.shape, self.seed).block


class _RandomWeightReader:
    """A reader of blocks of random weights, with the same bits as `Decoder.init_weights`.

    Parameters are drawn in order, and only the latest is kept in memory. So callers should read all
    blocks of one parameter before those of the next. Reading an earlier parameter starts the
    drawing again.
    """

    def __init__(self, shape: DecoderConfig, seed: int) -> None:
        self.decoder = empty_decoder(shape, dtype=torch.float32, device="meta")
        self.layout = list_pieces(self.decoder)
        self.seed = seed
        # canonical name of a weight -> name of the parameter that holds it
        self.parameter_names = {
            piece.name: name
            for name, parameter_pieces in self.layout.items()
            for piece in parameter_pieces
        }
        self._restart()

    def _restart(self) -> None:
        self.drawn_by_name: dict[str, Tensor] = {}
        self.remaining_values = self.decoder.draw_initial_values(self.seed)

    def block(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a block of a weight. Draw parameters until the one that holds it."""
        parameter_name = self.parameter_names[name]
        while parameter_name not in self.drawn_by_name:
            named_values = next(self.remaining_values, None)
            if named_values is None:
                self._restart()
                continue
            self.drawn_by_name = dict([named_values])
        whole = next(
            block.tensor
            for block in cut_blocks(self.layout[parameter_name], self.drawn_by_name[parameter_name])
            if block.name == name
        )
        return whole[
            tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        ]
