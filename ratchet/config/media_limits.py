"""The configuration of images, audio clips and videos: size limits, and the directory of files."""

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

    max_side: int = Field(default=8192, ge=1)
    """Maximum number of pixels along an image's longer side."""
    max_pixels: int = Field(default=64_000_000, ge=1, le=PILLOW_PIXELS)
    """Maximum number of pixels of an image or video frame, as its header declares."""
    max_mib: float = Field(default=64.0, gt=0)
    """Maximum size of one encoded file, in MiB."""
    urls: bool = False
    """Fetch http:// and https:// addresses in the data. Set it for trusted data only, because the
    data choose what is fetched."""


class MediaLimits(FileLimits):
    """Limits of an image, an audio clip or a video.

    A row or an attempt that exceeds a limit fails with an error. `max_frames` instead shortens a
    video.
    """

    max_frames: int = Field(default=64, ge=1)
    """Maximum number of frames of a video. A longer video is reduced to this many evenly spaced
    frames."""
    max_audio_s: float = Field(default=600.0, gt=0)
    """Maximum length of an audio clip, in seconds."""
    timeout_s: float = Field(default=20.0, gt=0)
    """Time limit of an address, in seconds: of each wait for its server, and of the whole body."""


class MediaConfig(MediaLimits):
    """The settings of images, audio clips and videos that messages refer to."""

    root: str | None = None
    """Directory or store of all media. Their paths are relative to it and may not leave it. null:
    paths are used unchanged."""
    remembered_mib: float = Field(default=512.0, ge=0)
    """Maximum size of the cache of preprocessed media, in MiB. The least recently used media are
    dropped first."""
