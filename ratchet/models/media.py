"""Prepare images, audio and video for the encoders of transformers models."""

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
from ratchet.models.transformers.loading import translate_errors
from ratchet.models.transformers_settings import read_setting
from ratchet.types import Medium

PROBE_SIDES = ((64, 96), (96, 32))  # (height, width) of the probe images, before any scaling


@dataclass(frozen=True)
class EncodedMedia:
    """The output of an encoder for several media."""

    output: Any  # a transformers `ModelOutput`
    keys: tuple[str, ...]  # the key of each medium, in the order of the output

    def select(self, media: Sequence[Medium]) -> Any:
        """Return the output for these media in order. A medium may occur more than once."""
        indices = [self.keys.index(medium.key) for medium in media]
        if indices == list(range(len(self.keys))):
            return self.output
        return type(self.output)(
            **{name: self._select_entries(value, indices) for name, value in self.output.items()}
        )

    def _select_entries(self, value: Any, indices: Sequence[int]) -> Any:
        """Select entries of one field of the output.

        The field has one entry per medium, or is a list of such fields, one per layer. Other fields
        are returned unchanged.
        """
        if isinstance(value, Tensor):
            return (
                value[torch.as_tensor(indices, device=value.device)]
                if len(value) == len(self.keys)
                else value
            )
        if not isinstance(value, list | tuple):
            return value
        if len(value) == len(self.keys) and all(isinstance(part, Tensor) for part in value):
            return type(value)(value[index] for index in indices)
        return type(value)(self._select_entries(part, indices) for part in value)


def join_media_inputs(media: Sequence[Medium]) -> dict[str, Tensor]:
    """Return the inputs of all media, concatenated along the first dimension, on the CPU.

    Raises ModelError if their shapes differ in another dimension.
    """
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
def make_probe_images(directory: Path, model: PreTrainedModel) -> list[Medium]:
    """Return two probe images, prepared by the processor from a model's directory.

    The list is empty if the model reads no images.
    """
    # Only models that read images have this method.
    encode = getattr(model.base_model, "get_image_features", None)
    if encode is None or read_setting(model.config, "image_token_id") is None:
        return []
    with translate_errors(directory, "the image processor"):
        process = AutoImageProcessor.from_pretrained(directory, local_files_only=True)
    media: list[Medium] = []
    for number, (height, width) in enumerate(PROBE_SIDES):
        pixels = (
            np.arange(height * width * 3, dtype=np.int64).reshape(height, width, 3)
            * (number + 7)
            % 251
        )
        processed = process([pixels.astype(np.uint8)], return_tensors="np")
        inputs = {name: np.asarray(value) for name, value in processed.items()}
        medium = Medium(f"probe {number}", "image", 0, inputs, b"")
        parameters = inspect.signature(encode).parameters
        arguments = {
            name: x.to(model.device)
            for name, x in join_media_inputs([medium]).items()
            if name in parameters
        }
        features = encode(**arguments, return_dict=True).pooler_output
        media.append(replace(medium, span=sum(feature.shape[:-1].numel() for feature in features)))
    return media
