"""The configuration of images, audio clips and videos: size limits, and where files may lie."""

from __future__ import annotations

from pydantic import Field

from ratchet.config.base import Section

# Files in a model's directory from which its processor is built.
PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
PILLOW_PIXELS = 178_956_970  # Pillow refuses to open an image with more


class FileLimits(Section):
    """Limits of an image, audio or video file that are checked before it is decoded."""

    max_side: int = Field(default=8192, ge=1, description="Pixels of an image's longer side.")
    max_pixels: int = Field(
        default=64_000_000,
        ge=1,
        le=PILLOW_PIXELS,
        description="Pixels of one image, or frame, as its header declares.",
    )
    max_mib: float = Field(default=64.0, gt=0, description="Size of one encoded file, in MiB.")
    urls: bool = Field(
        default=False,
        description="Fetch http:// and https:// addresses in the data. Only for trusted data, "
        "which then choose what is fetched.",
    )


class MediaLimits(FileLimits):
    """Limits of an image, an audio clip or a video.

    A row or an attempt that exceeds a limit fails with an error. `max_frames` instead shortens a
    video.
    """

    max_frames: int = Field(
        default=64,
        ge=1,
        description="Frames of a video; from a longer one this many are taken, evenly spaced.",
    )
    max_audio_s: float = Field(
        default=600.0, gt=0, description="Length of an audio clip, in seconds."
    )
    timeout_s: float = Field(
        default=20.0, gt=0, description="Timeout of fetching one address, in seconds."
    )


class MediaConfig(MediaLimits):
    """The settings of images, audio clips and videos that messages refer to."""

    root: str | None = Field(
        default=None,
        description="Directory or store that all media paths are relative to, and may not leave; "
        "null: paths are used unchanged.",
    )
    remembered_mib: float = Field(
        default=512.0,
        ge=0,
        description="Size of the cache of preprocessed media, in MiB (least recently used go "
        "first).",
    )
