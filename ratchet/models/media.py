"""Media as encoders of transformers' models take them: joined inputs, outputs that several
sequences share, and images to probe a model with."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedModel

from ratchet.errors import ModelError
from ratchet.models.transformers.loading import reading
from ratchet.types import Medium

PROBE_SIDES = ((64, 96), (96, 32))  # pixels of images that a processor scales as it likes


@dataclass(frozen=True)
class Seen:
    """An encoder's output for media of these keys."""

    output: Any
    keys: tuple[str, ...]

    def of(self, media: Sequence[Medium]) -> Any:
        """The output for media among them, in order, with repetitions."""
        uses = [self.keys.index(medium.key) for medium in media]
        if uses == list(range(len(self.keys))):
            return self.output
        return type(self.output)(
            **{name: self._picked(value, uses) for name, value in self.output.items()}
        )

    def _picked(self, value: Any, uses: Sequence[int]) -> Any:
        """A part of the output has an entry for each medium, or for each layer such a part; what
        else there is stays."""
        if isinstance(value, Tensor):
            return (
                value[torch.as_tensor(uses, device=value.device)]
                if len(value) == len(self.keys)
                else value
            )
        if not isinstance(value, list | tuple):
            return value
        if len(value) == len(self.keys) and all(isinstance(part, Tensor) for part in value):
            return type(value)(value[use] for use in uses)
        return type(value)(self._picked(part, uses) for part in value)


def joined(media: Sequence[Medium]) -> dict[str, Tensor]:
    """Their inputs, along the first dimension, on the CPU. Raises ModelError where they don't fit
    together."""
    names = dict.fromkeys(name for medium in media for name in medium.inputs)
    try:
        return {
            name: torch.from_numpy(
                np.concatenate([medium.inputs[name] for medium in media if name in medium.inputs])
            )
            for name in names
        }
    except ValueError as error:
        raise ModelError(
            f"media of one kind have inputs of different shapes, which can't be joined: {error}"
        ) from None


@torch.no_grad()
def probe_images(directory: Path, model: PreTrainedModel) -> list[Medium]:
    """Two images as the processor in a model's directory prepares them; none where it reads
    none."""
    encode = getattr(model.base_model, "get_image_features", None)
    if encode is None or getattr(model.config, "image_token_id", None) is None:
        return []
    with reading(directory, "the image processor"):
        process = AutoImageProcessor.from_pretrained(directory, local_files_only=True)
    media: list[Medium] = []
    for number, (height, width) in enumerate(PROBE_SIDES):
        pixels = (
            np.arange(height * width * 3, dtype=np.int64).reshape(height, width, 3)
            * (number + 7)
            % 251
        )
        found = process([pixels.astype(np.uint8)], return_tensors="np")
        inputs = {name: np.asarray(value) for name, value in found.items()}
        medium = Medium(f"probe {number}", "image", 0, inputs, b"")
        known = inspect.signature(encode).parameters
        given = {name: x.to(model.device) for name, x in joined([medium]).items() if name in known}
        features = encode(**given, return_dict=True).pooler_output
        media.append(replace(medium, span=sum(feature.shape[:-1].numel() for feature in features)))
    return media
