"""Fetch and decode the images, audio clips and videos that messages and rows refer to.

Media are untrusted: sizes are checked before decoding, URLs are fetched only if the limits allow
it, and paths can't leave their root. Every problem is a DataError that names the row and the file.
This module does not import torch.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import struct
import sys
import urllib.parse
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from ratchet.config.media_limits import MediaLimits
from ratchet.data.files import convert_read_errors, open_binary
from ratchet.data.formats.av_media import decode_sound, decode_video_file, is_container
from ratchet.data.formats.media_checks import check_duration, check_size, choose_evenly_spaced
from ratchet.errors import DataError, MissingDependency
from ratchet.types import MediaKind, Part
from ratchet.utils.object_store import PACKAGE_BY_SCHEME
from ratchet.web.client import AnswerTooLong, NoAnswer, WholeAnswer, send_request

if TYPE_CHECKING:
    from PIL.Image import Image

# The image formats that Pillow may read. EPS is left out because it runs Ghostscript.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
OBJECT_STORES = (*PACKAGE_BY_SCHEME, "hf", "memory")
SHOWN_CHARS = 80
# Media types by the first bytes of a file. A `data:` URL needs the media type.
SIGNATURES = (
    (b"\x89PNG\r\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"OggS", "audio/ogg"),
    (b"fLaC", "audio/flac"),
    (b"ID3", "audio/mpeg"),
)
# Exceptions that decoders raise on malformed bytes.
DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    ArithmeticError,
    LookupError,
    TypeError,
    RuntimeError,
    MemoryError,
    EOFError,
)
DECODE_ERRORS += (AttributeError, AssertionError, struct.error, zlib.error)
BLOCK_SAMPLES = 1 << 16  # samples that are decoded at once


class Audio(NamedTuple):
    """A decoded audio clip with one channel."""

    samples_N: NDArray[np.float32]  # N samples in [-1, 1]
    rate_hz: int


def shorten_reference(reference: str) -> str:
    """Return a reference in short form for errors.

    It is the end of a long reference, or the head of a `data:` URL.
    """
    if reference.startswith("data:"):
        return f"{reference.partition(',')[0][:SHOWN_CHARS]},..."
    return reference if len(reference) <= SHOWN_CHARS else f"...{reference[-SHOWN_CHARS:]}"


# --- from a reference to bytes


def fetch(
    reference: str, *, where: str, limits: MediaLimits, root: Path | str | None = None
) -> bytes:
    """Return the encoded file behind a reference. Raises DataError.

    Args:
        reference: A path, a `data:` URL, an address of an object store or, if `limits.urls` allows
            it, an http(s) address.
        where: File and row (or task), for errors.
        limits: Limits of the file's size, and of fetching.
        root: Directory or store that paths are relative to and may not leave; None: paths are used
            unchanged.
    """
    if not isinstance(reference, str) or not reference or "\0" in reference:
        raise DataError(
            f"{where}: {reference!r:.40} names no file: give a path, a data: URL or an address"
        )
    name = f"{where}: {shorten_reference(reference)}"
    scheme = reference.partition(":")[0].lower()
    if scheme == "data":
        return _decode_data_url(reference, name, limits)
    if scheme in ("http", "https"):
        return _download(reference, name, limits)
    location = locate(reference, where=where, root=root)
    try:
        with open_binary(location) as file, convert_read_errors(location):
            return _read_within_limit(file, name, limits)
    except MissingDependency:
        raise
    except (DataError, OSError, ValueError) as error:
        raise DataError(
            f"{name}: can't be read ({_get_first_line(error)}): put the file there, or drop the row"
        ) from error


def locate(reference: str, *, where: str, root: Path | str | None) -> Path | str:
    """Return the path or object store address of a reference.

    Raises DataError if it lies outside `root`.
    """
    name = f"{where}: {shorten_reference(reference)}"
    if reference[:7].lower() == "file://":
        reference = urllib.parse.unquote(reference[7:])
    if "://" in reference or (isinstance(root, str) and "://" in root):
        return _locate_in_store(reference, name, root)
    if root is None:
        return Path(reference)
    base = Path(root).resolve()
    try:
        path = (base / reference).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # e.g. a loop of symbolic links
        raise DataError(f"{name}: is not a path: {_get_first_line(error)}") from error
    if not path.is_relative_to(base):
        raise DataError(
            f"{name}: lies outside {base}: set the root to a directory that contains all files"
        )
    return path


def _locate_in_store(reference: str, name: str, root: Path | str | None) -> str:
    base = str(root).rstrip("/") + "/" if root is not None else ""
    address = reference if "://" in reference else base + reference
    scheme = address.partition("://")[0].lower()
    if scheme not in OBJECT_STORES or "::" in address:
        schemes = ", ".join((*OBJECT_STORES, "http", "https"))
        raise DataError(
            f"{name}: media can't be read from {scheme}://: give a path, a data: URL, or one of "
            f"{schemes}"
        )
    if (base and not address.startswith(base)) or ".." in address.split("/"):
        raise DataError(
            f"{name}: lies outside {root}: set the root to a directory or store that contains "
            "all files"
        )
    return address


def _decode_data_url(reference: str, name: str, limits: MediaLimits) -> bytes:
    head, comma, body = reference.partition(",")
    if not comma or not head.endswith(";base64"):
        raise DataError(f"{name}: is not a base64 data: URL: write data:image/png;base64,...")
    if len(body) * 3 // 4 > limits.max_mib * 2**20 + 2:
        _refuse_size(name, limits)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(
            f"{name}: its base64 is broken ({_get_first_line(error)}): encode the file again"
        ) from error


def _download(reference: str, name: str, limits: MediaLimits) -> bytes:
    if not limits.urls:
        raise DataError(
            f"{name}: web addresses are not fetched: set urls: true under media, or "
            "download the files"
        )
    try:
        # The caller may be a coroutine, so the event loop of the request is in another thread.
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(asyncio.run, _request(reference, limits)).result()
        if not 200 <= answer.status < 300:
            raise NoAnswer(f"status {answer.status}")
    except AnswerTooLong:
        _refuse_size(name, limits)
    except TimeoutError as error:
        raise DataError(
            f"{name}: can't be fetched (it did not arrive whole within {limits.timeout_s:g} s): "
            "download it, or drop the row"
        ) from error
    except (NoAnswer, ValueError) as error:
        raise DataError(
            f"{name}: can't be fetched ({_get_first_line(error)}): download it, or drop the row"
        ) from error
    return answer.content


async def _request(address: str, limits: MediaLimits) -> WholeAnswer:
    import httpx2

    async with httpx2.AsyncClient(follow_redirects=True, timeout=limits.timeout_s) as client:
        return await send_request(
            client,
            "GET",
            address,
            timeout_s=limits.timeout_s,
            max_bytes=int(limits.max_mib * 2**20),
        )


def _read_within_limit(file: IO[bytes], name: str, limits: MediaLimits) -> bytes:
    size = int(limits.max_mib * 2**20)
    content = file.read(size + 1)
    if len(content) > size:
        _refuse_size(name, limits)
    return content


def _refuse_size(name: str, limits: MediaLimits) -> NoReturn:
    raise DataError(
        f"{name}: more than {limits.max_mib:g} MiB: make it smaller, or raise max_mib under media"
    )


# --- from bytes to decoded media


def decode_image(source: bytes, *, where: str, limits: MediaLimits) -> Image:
    """Decode an image to RGB, rotated by its EXIF orientation, with white behind transparency.

    The header is checked against the limits before decoding.

    Args:
        where: Row and file, for errors.

    Raises DataError if the bytes are not an image, are cut off, or exceed the limits, and
    MissingDependency without Pillow.
    """
    with _open_image(source, where, limits) as image:
        return _convert_to_rgb(image)


def decode_video(
    source: bytes | Sequence[bytes], *, where: str, limits: MediaLimits
) -> list[Image]:
    """Decode a video file, an animated GIF, WebP or PNG, or a list of frame images to RGB frames.

    At most `limits.max_frames` evenly spaced frames are kept. Raises like `decode_image`. The
    package av reads MP4, QuickTime, Matroska, WebM and AVI; without it they raise
    MissingDependency.
    """
    if not isinstance(source, bytes):
        if not source:
            raise DataError(f"{where}: the video has no frames: add frames, or drop the row")
        frame_indices = choose_evenly_spaced(len(source), limits.max_frames)
        return [
            decode_image(source[i], where=f"{where}, frame {i}", limits=limits)
            for i in frame_indices
        ]
    if is_container(source):
        return decode_video_file(source, where=where, limits=limits)
    frames = []
    with _open_image(source, where, limits) as image:
        # Pillow sets `n_frames` only for formats that may have several frames.
        for i in choose_evenly_spaced(getattr(image, "n_frames", 1), limits.max_frames):
            image.seek(i)
            frames.append(_convert_to_rgb(image.copy()))
    return frames


def decode_audio(
    source: bytes, *, where: str, limits: MediaLimits, rate_hz: int | None = None
) -> Audio:
    """Decode a clip to one channel, the mean of all channels.

    The package soundfile reads WAV, FLAC, Ogg, MP3 and others. The package av reads M4A, and the
    sound of video files.

    Args:
        where: Row and file, for errors.
        rate_hz: Sampling rate of the result; None keeps the clip's own rate.

    Raises DataError if the bytes are not audio, are cut off, or exceed the limits, and
    MissingDependency without soundfile or av.
    """
    if not source:
        raise DataError(f"{where}: the file is empty: copy it again, or drop the row")
    if is_container(source):
        samples, rate = decode_sound(source, where=where, limits=limits)
    else:
        samples, rate = _read_samples(source, where, limits)
    if not len(samples):
        raise DataError(f"{where}: the clip holds no samples: copy it again, or drop the row")
    mono = samples.mean(axis=1, dtype=np.float64)
    if rate_hz is not None and rate_hz != rate:
        mono, rate = _resample(mono, rate, rate_hz), rate_hz
    return Audio(mono.astype(np.float32), rate)


def check_media(part: Part, *, where: str, limits: MediaLimits) -> tuple[int, int] | None:
    """Return (width, height) of an image from its header; None for audio and video.

    Audio and video are fetched but not decoded. Raises DataError if the file can't be read or is
    too large.
    """
    source = fetch(part.value, where=where, limits=limits)
    name = f"{where}: {shorten_reference(part.value)}"
    if not source:
        raise DataError(f"{name}: the file is empty: copy it again, or drop the row")
    if part.type != "image":
        return None
    with _open_image(source, name, limits) as image:
        return image.size


def is_pillow_image(value: Any) -> bool:
    """True if the value is an image of Pillow, which is not imported unless it was before."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def embed(image: Image) -> Part:
    """Return an image as a PNG in a `data:` URL. Equal pixels give equal bytes."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG")
    return embed_bytes("image", buffer.getvalue())


def embed_bytes(kind: MediaKind, source: bytes) -> Part:
    """Return an encoded file in a `data:` URL, with a generic media type if it is unknown."""
    media_type = next(
        (media_type for signature, media_type in SIGNATURES if source.startswith(signature)), None
    )
    if media_type is None and source[:4] == b"RIFF":
        media_type = {b"WAVE": "audio/wav", b"WEBP": "image/webp"}.get(source[8:12])
    content = base64.b64encode(source).decode()
    return Part(kind, f"data:{media_type or 'application/octet-stream'};base64,{content}")


def import_pillow(needed_for: str = "reading and drawing images") -> Any:
    """Import and return the package PIL. Raises MissingDependency without it."""
    try:
        import PIL.Image
        import PIL.ImageDraw
        import PIL.ImageOps
    except ImportError as error:
        raise MissingDependency("pillow", extra="vision", needed_for=needed_for) from error
    return PIL


# --- decoding


@contextmanager
def _open_image(source: bytes, where: str, limits: MediaLimits) -> Iterator[Image]:
    """Open an image after checking its header against the limits.

    Decoder errors in the with block also become DataError.
    """
    if not source:
        raise DataError(f"{where}: the file is empty: copy it again, or drop the row")
    PIL = import_pillow()
    try:
        image = PIL.Image.open(io.BytesIO(source), formats=IMAGE_FORMATS)
    except PIL.UnidentifiedImageError as error:
        formats = ", ".join(IMAGE_FORMATS)
        raise DataError(
            f"{where}: is not an image of a supported format: give {formats}, or drop the row"
        ) from error
    except PIL.Image.DecompressionBombError as error:
        raise DataError(
            f"{where}: {_get_first_line(error)}: make it smaller, or drop the row"
        ) from error
    except DECODE_ERRORS as error:
        raise _make_damage_error(where, error) from error
    with image:
        width, height = image.size
        check_size(width, height, where, limits)
        if image.mode in ("I", "F"):
            raise DataError(
                f"{where}: has 32-bit pixels (mode {image.mode}) of unknown range: save it with 8 "
                "bits"
            )
        try:
            yield image
        except (PIL.Image.DecompressionBombError, *DECODE_ERRORS) as error:
            raise _make_damage_error(where, error) from error


def _make_damage_error(where: str, error: Exception) -> DataError:
    return DataError(
        f"{where}: the image is damaged or cut off ({_get_first_line(error)}): copy it "
        "again, or drop the row"
    )


def _convert_to_rgb(image: Image) -> Image:
    PIL = import_pillow()
    image.load()
    image = PIL.ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # Pillow would clip the 16-bit values at 255
        return PIL.Image.fromarray(
            (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
        ).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, "white"), image).convert(
        "RGB"
    )


def import_soundfile() -> Any:
    """Import and return the package soundfile. Raises MissingDependency without it."""
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: its C library is missing
        raise MissingDependency("soundfile", extra="audio", needed_for="reading audio") from error
    return soundfile


def _read_samples(
    source: bytes, where: str, limits: MediaLimits
) -> tuple[NDArray[np.float64], int]:
    """Return samples in [-1, 1] of shape [samples, channels], and the rate in Hz."""
    soundfile = import_soundfile()
    try:
        with soundfile.SoundFile(io.BytesIO(source)) as file:
            check_duration(file.frames, file.samplerate, where, limits)
            # A header may declare more samples than there are, so they are not allocated at once.
            read_block = partial(file.read, BLOCK_SAMPLES, dtype="float64", always_2d=True)
            blocks = [read_block()]
            while len(blocks[-1]):
                blocks.append(read_block())
            n_declared, rate = file.frames, file.samplerate
    except (soundfile.SoundFileError, *DECODE_ERRORS) as error:
        raise DataError(
            f"{where}: is not audio, or is damaged ({_get_first_line(error)}): copy it again, or "
            "drop the row"
        ) from error
    # If a WAV file is cut off, soundfile takes the number of remaining samples for the declared
    # one. So the size in the file's header is compared too.
    is_short_wave = source[:4] == b"RIFF" and len(source) < 8 + int.from_bytes(
        source[4:8], "little"
    )
    samples = np.concatenate(blocks)
    if is_short_wave or len(samples) < n_declared:
        raise DataError(f"{where}: the clip is cut off: copy it again, or drop the row")
    return samples, rate


def _resample(samples_N: NDArray[np.float64], rate: int, new_rate: int) -> NDArray[np.float64]:
    """Resample by truncating or zero-padding the spectrum, which avoids aliasing."""
    n_samples = max(1, round(len(samples_N) * new_rate / rate))
    spectrum = np.fft.rfft(samples_N)
    new_spectrum = np.zeros(n_samples // 2 + 1, spectrum.dtype)
    n_copied = min(len(spectrum), len(new_spectrum))
    new_spectrum[:n_copied] = spectrum[:n_copied]
    return np.fft.irfft(new_spectrum, n_samples) * (n_samples / len(samples_N))


def _get_first_line(error: object) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0][:200]
