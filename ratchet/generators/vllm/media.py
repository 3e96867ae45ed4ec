"""Images in requests to vLLM. It takes prompts with one placeholder for each image, and prepares
images by its own processor: so what it made of a prompt is compared with the tokens that the
learner will have.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from ratchet.config.media_limits import PILLOW_PIXELS, MediaLimits
from ratchet.data.formats.media import image_of
from ratchet.errors import ConfigError, ModelError
from ratchet.generators.request import Request

# They were held to the recipe's own limits when they were read.
LIMITS = MediaLimits(max_side=2**20, max_pixels=PILLOW_PIXELS, max_mib=2**12)


def check_installed() -> None:
    """Raises ModelError where vLLM can't load a model that reads images."""
    if find_spec("torchvision") is None:
        raise ModelError(
            "vLLM prepares images by processors of transformers that need the package "
            "'torchvision': install the build that "
            "belongs to this torch, or set generator.kind=hf"
        )


def arguments_of_media() -> dict[str, Any]:
    """Keywords of vLLM's `EngineArgs`, for a model that reads images: its processor needs the
    tokenizer, and hashes them."""
    return {
        "skip_tokenizer_init": False,
        "mm_hasher_algorithm": "sha256",
        "limit_mm_per_prompt": {"video": 0},
    }


def media_of(request: Request, salt: str) -> dict[str, Any]:
    """The part of vLLM's prompt that says what its placeholders stand for; {} without any. Raises
    ConfigError for other media than images. salt: what vLLM remembers of an image belongs to the
    weights that encoded it."""
    if not request.media:
        return {}
    media = [medium for _, medium in request.media]
    other = next((medium.kind for medium in media if medium.kind != "image"), None)
    if other is not None:
        raise ConfigError(
            f"the prompt has a medium of kind {other}, and vLLM is given images alone: set "
            "generator.kind=hf"
        )
    return {
        "multi_modal_data": {
            "image": [
                image_of(medium.source, where="a prompt's image", limits=LIMITS) for medium in media
            ]
        },
        "multi_modal_uuids": {"image": [f"{medium.key} {salt}" for medium in media]},
    }


def collapsed(request: Request) -> list[int]:
    """The prompt with one token in place of all that stand for an image. Raises ModelError where
    these differ."""
    tokens, short, end = request.prompt.tolist(), list[int](), 0
    for start, medium in request.media:
        own = tokens[start : start + medium.span]
        if len(set(own)) != 1:
            raise ModelError(
                "an image's tokens differ from one another, and vLLM is given one of them: set "
                "generator.kind=hf"
            )
        short += [*tokens[end:start], own[0]]
        end = start + medium.span
    return short + tokens[end:]


def check_expanded(request: Request, expanded: Sequence[int] | None) -> None:
    """expanded: the prompt as vLLM computed it. Raises ModelError where it is not the learner's."""
    if request.media and list(expanded or ()) != request.prompt.tolist():
        raise ModelError(
            f"vLLM makes {len(expanded or ())} tokens of a prompt with images that has "
            f"{len(request.prompt)} here, or others: "
            "what it samples is not for the prompt that would be trained on; set generator.kind=hf"
        )
