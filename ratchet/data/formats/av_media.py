"""Decode video files, and the sound of any media file, with PyAV (FFmpeg's libraries).

Frames and samples are decoded by one thread on the CPU, so that a file always gives the same
values. This module does not import torch.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ratchet.config.media_limits import MediaLimits
from ratchet.data.formats.media_checks import check_duration, check_size, choose_evenly_spaced
from ratchet.errors import DataError, MissingDependency

if TYPE_CHECKING:
    from PIL.Image import Image

# FFmpeg's names of the containers that are read. Playlists make FFmpeg open further files and
# addresses, so no other is.
CONTAINERS = "mov,mp4,m4a,matroska,webm,avi"
MAX_CHANNELS = 8
MATROSKA = b"\x1aE\xdf\xa3"


def is_container(source: bytes) -> bool:
    """True if the first bytes are those of an MP4, QuickTime, Matroska, WebM or AVI file."""
    return (
        source[4:8] == b"ftyp"
        or source[:4] == MATROSKA
        or (source[:4] == b"RIFF" and source[8:12] == b"AVI ")
    )


def decode_video_file(source: bytes, *, where: str, limits: MediaLimits) -> list[Image]:
    """Decode a video file to RGB frames, turned as the file says.

    At most `limits.max_frames` evenly spaced frames are kept. The file is decoded once to count its
    frames and once to keep some, because the number in a header may be missing or wrong.

    Args:
        where: Row and file, for errors.

    Raises DataError if the file can't be decoded, has no frames or exceeds the limits, and
    MissingDependency without av.
    """
    n_frames = 0
    with _decode(source, "video", where, limits) as frames:
        for _ in frames:
            n_frames += 1
    if not n_frames:
        raise DataError(f"{where}: the video has no frames: copy it again, or drop the row")
    kept = set(choose_evenly_spaced(n_frames, limits.max_frames))
    with _decode(source, "video", where, limits) as frames:
        return [_convert_frame(frame) for index, frame in enumerate(frames) if index in kept]


def decode_sound(
    source: bytes, *, where: str, limits: MediaLimits
) -> tuple[NDArray[np.float64], int]:
    """Decode the first audio track of a media file.

    Args:
        where: Row and file, for errors.

    Returns:
        Samples in [-1, 1] of shape [samples, channels], and the sampling rate in Hz.

    Raises DataError if the file has no sound, can't be decoded or exceeds the limits, and
    MissingDependency without av.
    """
    av = import_av()
    blocks: list[NDArray[np.float64]] = []
    rate, n_samples = 0, 0
    with _decode(source, "audio", where, limits) as frames:
        for frame in frames:
            n_channels = frame.layout.nb_channels
            if not 1 <= n_channels <= MAX_CHANNELS:  # PyAV reads beyond the buffers of more
                raise DataError(f"{where}: has {n_channels} channels, at most 8: convert it to WAV")
            # Interleaved: one buffer for all channels.
            resampler = av.AudioResampler(format="flt", layout=frame.layout, rate=frame.rate)
            for block in resampler.resample(frame):
                samples = np.asarray(block.to_ndarray(), np.float64).reshape(-1, n_channels)
                if blocks and (frame.rate != rate or samples.shape[1] != blocks[0].shape[1]):
                    raise DataError(
                        f"{where}: its sound changes its rate or channels: convert it to WAV"
                    )
                rate = frame.rate
                n_samples += len(samples)
                check_duration(n_samples, rate, where, limits)
                blocks.append(samples)
    if not blocks:
        raise DataError(f"{where}: the clip holds no samples: copy it again, or drop the row")
    return np.concatenate(blocks), rate


def import_av() -> Any:
    """Import and return the package av. Raises MissingDependency without it."""
    try:
        import av
    except ImportError as error:
        raise MissingDependency(
            "av", extra="video", needed_for="reading video files and their sound"
        ) from error
    return av


@contextmanager
def _decode(source: bytes, kind: str, where: str, limits: MediaLimits) -> Iterator[Iterator[Any]]:
    """Yield the frames of the first track of a kind, each checked against the limits."""
    av = import_av()
    if _is_cut_off(source):
        raise DataError(f"{where}: the {kind} is cut off: copy it again, or drop the row")
    try:
        options = {"format_whitelist": CONTAINERS, "protocol_whitelist": ""}
        with av.open(io.BytesIO(source), container_options=options) as container:
            tracks = getattr(container.streams, kind)
            if not tracks:
                raise DataError(f"{where}: the file has no {kind}: give another, or drop the row")
            context = tracks[0].codec_context
            if context is None:
                raise ValueError("FFmpeg has no decoder for its codec")
            tracks[0].thread_type, context.thread_count = "NONE", 1
            if kind == "video":
                check_size(context.width, context.height, where, limits)
            yield _iter_frames(container, tracks[0], kind, where, limits)
    except (av.FFmpegError, ValueError, MemoryError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0][:200]
        raise DataError(
            f"{where}: the {kind} is damaged or cut off, or of a form that is not read ({reason}): "
            "copy it again, or drop the row"
        ) from error


def _iter_frames(
    container: Any, track: Any, kind: str, where: str, limits: MediaLimits
) -> Iterator[Any]:
    for frame in container.decode(track):
        if kind == "video":
            check_size(frame.width, frame.height, where, limits)
        yield frame


def _is_cut_off(source: bytes) -> bool:
    """True if the file is shorter than the sizes in it say: FFmpeg decodes what is left of it."""
    if source[:4] == b"RIFF":
        return len(source) < 8 + int.from_bytes(source[4:8], "little")
    if source[:4] == MATROSKA:
        header_bytes, start = _read_ebml_size(source, 4)
        segment_bytes, start = _read_ebml_size(source, start + (header_bytes or 0) + 4)
        return segment_bytes is not None and len(source) < start + segment_bytes
    position = 0
    while position < len(source):  # MP4: boxes, each with its size of 4 bytes and its type
        size = int.from_bytes(source[position : position + 4])
        if size == 1:  # the size follows in 8 bytes
            size = int.from_bytes(source[position + 8 : position + 16])
        if size == 0:  # the last box
            return False
        position += max(size, 8)
    return position > len(source)


def _read_ebml_size(source: bytes, start: int) -> tuple[int | None, int]:
    """Return the size at a position of a Matroska file and where it ends; None: it is not known.

    The leading zero bits of its first byte are the number of further bytes.
    """
    first = source[start] if start < len(source) else 0
    n_bytes = 9 - first.bit_length()
    mask = (1 << 7 * n_bytes) - 1
    value = int.from_bytes(source[start : start + n_bytes]) & mask
    return (None if value == mask else value), start + n_bytes


def _convert_frame(frame: Any) -> Image:
    image = frame.to_image()
    # The rotation is counter-clockwise, in degrees, as that of Pillow.
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image
