"""Pass the images, videos and audio clips of a request to vLLM.

vLLM takes prompts with one placeholder token per medium, and expands them with its own processor.
So the expanded prompt is compared with the tokens that the learner trains on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ratchet.config.media_limits import PILLOW_PIXELS, MediaLimits
from ratchet.data.formats.media import decode_audio, decode_image, decode_video
from ratchet.data.processor import load_processor
from ratchet.errors import ConfigError, ModelError
from ratchet.generators.request import GenerationRequest
from ratchet.types import MediaKind, Medium

# The widest limits, because media were checked against the recipe's limits when they were read.
LIMITS = MediaLimits(max_side=2**20, max_pixels=PILLOW_PIXELS, max_mib=2**12, max_audio_s=2**31)
LIMIT = "limit_mm_per_prompt"
HASHER = "mm_hasher_algorithm"
FRAME_RATE_HZ = 24  # what processors of transformers assume of frames without times


@dataclass(frozen=True)
class MediaSettings:
    """The settings by which vLLM reads media."""

    audio_rate_hz: int | None = None
    """Sampling rate of the model's audio clips; None if it reads none."""
    takes_videos: bool = False
    """True if vLLM was started for prompts with videos."""
    samples_frames: bool = False
    """True if the model's processor chooses among a video's frames."""
    placeholders: Mapping[MediaKind, int] = field(default_factory=dict)
    """The token that stands for a medium in the chat template, by kind."""


def load_media_settings(directory: Path, arguments: Mapping[str, Any]) -> MediaSettings:
    """Return the settings for the model in a directory, which has its processor and tokenizer.

    Raises ModelError if vLLM can't load the model's processor.

    arguments: keywords of vLLM's `EngineArgs`, among them `make_media_arguments`.
    """
    processor = load_processor(directory)
    if processor is None:
        check_torchvision()
        return MediaSettings()
    settings = processor.settings
    # The processor of a model that reads only audio has no image processor.
    if "image_processor" in settings:
        check_torchvision()
    extractor = settings.get("feature_extractor")
    return MediaSettings(
        audio_rate_hz=None if extractor is None else int(extractor["sampling_rate"]),
        takes_videos=arguments[LIMIT]["video"] != 0,
        samples_frames=bool(settings.get("video_processor", {}).get("do_sample_frames")),
        placeholders={kind: token for token, kind in processor.kind_by_placeholder.items()},
    )


def check_torchvision() -> None:
    """Raise ModelError if vLLM can't load a model that reads images."""
    if find_spec("torchvision") is None:
        raise ModelError(
            "vLLM prepares images by processors of transformers that need the package "
            "'torchvision': install the build that belongs to this torch, or set "
            "generator.kind=hf"
        )


def make_media_arguments(recipe_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords of vLLM's `EngineArgs` for a model that reads media.

    vLLM's processor needs the tokenizer, and hashes the media. vLLM reserves memory for the longest
    video that it may get, so videos are taken only if a recipe asks for it.

    recipe_arguments: the keywords that the recipe sets.
    """
    return {
        "skip_tokenizer_init": False,
        # vLLM's default, blake3, is in a package that need not be installed.
        HASHER: recipe_arguments.get(HASHER, "sha256"),
        LIMIT: {"video": 0, **(recipe_arguments.get(LIMIT) or {})},
    }


def make_media_prompt(
    request: GenerationRequest, salt: str, settings: MediaSettings
) -> dict[str, Any]:
    """Return the fields of media of vLLM's prompt, in placeholder order; {} without media.

    Raises ConfigError for a video if vLLM takes none.

    salt: part of each medium's cache key, because a cached encoding is valid only for the weights
      that computed it.
    """
    data: dict[str, list[Any]] = {}
    uuids: dict[str, list[str]] = {}
    for _, medium in request.media:
        data.setdefault(medium.kind, []).append(_decode(medium, settings))
        uuids.setdefault(medium.kind, []).append(f"{medium.key} {salt}")
    return {"multi_modal_data": data, "multi_modal_uuids": uuids} if data else {}


def _decode(medium: Medium, settings: MediaSettings) -> Any:
    """Return a medium as vLLM's processor takes it."""
    where = f"a prompt's {medium.kind}"
    if medium.kind == "image":
        return decode_image(medium.source, where=where, limits=LIMITS)
    if medium.kind == "audio":
        rate = settings.audio_rate_hz
        clip = decode_audio(medium.source, where=where, limits=LIMITS, rate_hz=rate)
        return clip.samples_N, clip.rate_hz
    if not settings.takes_videos:
        raise ConfigError(
            "the prompt has a video, but vLLM was started without. Set "
            f"generator.arguments.{LIMIT}={{video: 1}}, or generator.kind=hf"
        )
    limits = LIMITS.model_copy(update={"max_frames": medium.n_frames or LIMITS.max_frames})
    frames = decode_video(medium.source, where=where, limits=limits)
    # The learner's processor gets frames without times too, and then assumes this rate.
    count = len(frames)
    return np.stack([np.asarray(frame) for frame in frames]), {
        "fps": FRAME_RATE_HZ,
        "total_num_frames": count,
        "duration": count / FRAME_RATE_HZ,
        "frames_indices": list(range(count)),
        "do_sample_frames": settings.samples_frames,
    }


def collapse_placeholders(request: GenerationRequest, settings: MediaSettings) -> list[int]:
    """Return the prompt with a single placeholder token per medium.

    Raises ModelError if the tokens of a medium differ from one another (the frames of Qwen3-VL's
    videos have their times between them), and the model's placeholder is unknown.
    """
    tokens = request.prompt.tolist()
    collapsed: list[int] = []
    end = 0
    for start, medium in request.media:
        expanded = set(tokens[start : start + medium.span])
        placeholder = (
            expanded.pop() if len(expanded) == 1 else settings.placeholders.get(medium.kind)
        )
        if placeholder is None:
            raise ModelError(
                f"the placeholder tokens of the prompt's {medium.kind} differ from one another, "
                "but vLLM takes a single one: set generator.kind=hf"
            )
        collapsed += [*tokens[end:start], placeholder]
        end = start + medium.span
    return collapsed + tokens[end:]


def check_expanded(request: GenerationRequest, expanded: Sequence[int] | None) -> None:
    """Raise ModelError if vLLM's expanded prompt is not the learner's prompt.

    expanded: the prompt tokens that vLLM computed.
    """
    if request.media and list(expanded or ()) != request.prompt.tolist():
        raise ModelError(
            f"vLLM expands a prompt with media to {len(expanded or ())} tokens that differ from "
            f"the {len(request.prompt)} tokens that the learner would train on: set "
            "generator.kind=hf"
        )
