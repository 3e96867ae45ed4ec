"""Pass the images of a request to vLLM.

vLLM takes prompts with one placeholder token per image, and expands them with its own processor.
So the expanded prompt is compared with the tokens that the learner trains on.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from ratchet.config.media_limits import PILLOW_PIXELS, MediaLimits
from ratchet.data.formats.media import decode_image
from ratchet.errors import ConfigError, ModelError
from ratchet.generators.request import GenerationRequest

# The widest limits, because images were checked against the recipe's limits when they were read.
LIMITS = MediaLimits(max_side=2**20, max_pixels=PILLOW_PIXELS, max_mib=2**12)


def check_installed() -> None:
    """Raise ModelError if vLLM can't load a model that reads images."""
    if find_spec("torchvision") is None:
        raise ModelError(
            "vLLM prepares images by processors of transformers that need the package "
            "'torchvision': install the build that belongs to this torch, or set "
            "generator.kind=hf"
        )


def make_media_arguments() -> dict[str, Any]:
    """Return keywords of vLLM's `EngineArgs` for a model that reads images.

    vLLM's processor of images needs the tokenizer, and hashes the images.
    """
    return {
        "skip_tokenizer_init": False,
        "mm_hasher_algorithm": "sha256",
        "limit_mm_per_prompt": {"video": 0},
    }


def make_media_prompt(request: GenerationRequest, salt: str) -> dict[str, Any]:
    """Return the image fields of vLLM's prompt, in placeholder order; {} without media.

    Raises ConfigError for media other than images.

    salt: part of each image's cache key, because a cached encoding is valid only for the weights
      that computed it.
    """
    if not request.media:
        return {}
    media = [medium for _, medium in request.media]
    other_kind = next((medium.kind for medium in media if medium.kind != "image"), None)
    if other_kind is not None:
        raise ConfigError(
            f"the prompt has a medium of kind {other_kind}, but the vLLM generator takes only "
            "images: set generator.kind=hf"
        )
    return {
        "multi_modal_data": {
            "image": [
                decode_image(medium.source, where="a prompt's image", limits=LIMITS)
                for medium in media
            ]
        },
        "multi_modal_uuids": {"image": [f"{medium.key} {salt}" for medium in media]},
    }


def collapse_placeholders(request: GenerationRequest) -> list[int]:
    """Return the prompt with a single placeholder token per image.

    Raises ModelError if the tokens of an image differ from one another.
    """
    tokens = request.prompt.tolist()
    collapsed: list[int] = []
    end = 0
    for start, medium in request.media:
        placeholders = tokens[start : start + medium.span]
        if len(set(placeholders)) != 1:
            raise ModelError(
                "the placeholder tokens of an image differ from one another, but vLLM takes a "
                "single one: set generator.kind=hf"
            )
        collapsed += [*tokens[end:start], placeholders[0]]
        end = start + medium.span
    return collapsed + tokens[end:]


def check_expanded(request: GenerationRequest, expanded: Sequence[int] | None) -> None:
    """Raise ModelError if vLLM's expanded prompt is not the learner's prompt.

    expanded: the prompt tokens that vLLM computed.
    """
    if request.media and list(expanded or ()) != request.prompt.tolist():
        raise ModelError(
            f"vLLM expands a prompt with images to {len(expanded or ())} tokens that differ from "
            f"the {len(request.prompt)} tokens that the learner would train on: set "
            "generator.kind=hf"
        )
