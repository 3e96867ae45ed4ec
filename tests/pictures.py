"""Conversations with pictures, for tests of models that read them: a tiny model with every weight
random, and what it sees."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.transformers_version import NEEDS_TORCHVISION, READS_IMAGES

from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.data.formats.media import embed
from ratchet.data.processor import Processor, load_processor
from ratchet.testing.tiny_vlm import Family, TinyVLM, write_tiny_vlm
from ratchet.types import Message, Part
from ratchet.utils.temp_dirs import TemporaryFolder

FAMILIES: tuple[Family, ...] = ("qwen2_5_vl", "qwen3_vl")
FOLDERS: list[TemporaryFolder] = []  # removed when this process ends


@functools.cache
def model_directory(family: Family = "qwen2_5_vl", layers: int = 2) -> Path:
    """Its norms and biases are random too: at 1 and 0 they would hide a weight in the wrong
    place. Of Qwen3, features of images are added after the first half of the layers."""
    from transformers import AutoModelForImageTextToText

    if not READS_IMAGES:
        pytest.skip(NEEDS_TORCHVISION, allow_module_level=True)
    folder = TemporaryFolder("vlm")
    FOLDERS.append(folder)
    sizes = TinyVLM(family=family, hidden=32, layers=layers, std=0.15, deepstack=layers // 2)
    directory = write_tiny_vlm(folder.path / family, sizes)
    model = AutoModelForImageTextToText.from_pretrained(directory, local_files_only=True)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.2, generator=generator))
    model.save_pretrained(directory)
    # The grouped matrix products of experts have no float64.
    config = json.loads((directory / "config.json").read_text())
    config["experts_implementation"] = "eager"
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def picture(seed: int, width: int = 32, height: int = 32) -> Part:
    """Noise, (width / 16) x (height / 16) tokens of the tiny model."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return embed(Image.fromarray(pixels))


def asked(*content: Part | str) -> Message:
    return Message(
        "user", tuple(Part("text", piece) if isinstance(piece, str) else piece for piece in content)
    )


@functools.cache
def processor(family: Family = "qwen2_5_vl") -> Processor:
    found = load_processor(model_directory(family))
    assert found is not None
    return found


@functools.cache
def renderer(family: Family = "qwen2_5_vl") -> Renderer:
    return Renderer(load_tokenizer(model_directory(family)), processor=processor(family))


def dialogues() -> list[list[Message]]:
    """Three pictures of two sizes, one twice; none at all; one of them again, in a later turn."""
    answer = lambda text: Message("assistant", text)  # noqa: E731
    return [
        [asked(picture(1), "and", picture(2, 48), "or", picture(1), "?"), answer("first")],
        [Message("user", "no picture"), answer("none")],
        [
            asked("look:", picture(3, 64, 32)),
            answer("yes"),
            asked(picture(1), "now?"),
            answer("no"),
        ],
    ]
