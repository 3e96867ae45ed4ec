"""Images, audio clips and videos: from what a message or a row says of one to its bytes, and on to
what a processor reads.

Bytes of strangers are hostile: sizes are checked before anything is decoded, addresses are fetched
only where that was asked for, paths don't leave their root, and whatever is wrong is a DataError
that names the row and the file. Free of torch.
"""

from __future__ import annotations

import base64
import binascii
import io
import struct
import urllib.error
import urllib.parse
import urllib.request
import wave
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ratchet.config.media_limits import MediaLimits
from ratchet.data.files import open_binary, reading
from ratchet.errors import DataError, MissingDependency
from ratchet.types import MediaKind, Part
from ratchet.utils.object_store import PACKAGES

if TYPE_CHECKING:
    from PIL.Image import Image

# Of the many that Pillow reads: no EPS (it runs Ghostscript), nothing that only converters of icons
# meet.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
OBJECT_STORES = (*PACKAGES, "hf", "memory")
SHOWN_CHARS = 80
# What the first bytes tell: a `data:` URL names its form.
SIGNATURES = (
    (b"\x89PNG\r\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"OggS", "audio/ogg"),
    (b"fLaC", "audio/flac"),
    (b"ID3", "audio/mpeg"),
)
# Whatever a decoder raises on bytes that it did not expect.
BROKEN = (
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
BROKEN += (AttributeError, AssertionError, struct.error, zlib.error)
SAMPLE_TYPES = {1: "<u1", 2: "<i2", 4: "<i4"}


class Audio(NamedTuple):
    """samples_N: float32 in [-1, 1], one channel."""

    samples_N: NDArray[np.float32]
    rate_hz: int


def shown(reference: str) -> str:
    """A path or an address as errors name it, a long one by its end: of a `data:` URL only what it
    claims to be."""
    if reference.startswith("data:"):
        return f"{reference.partition(',')[0][:SHOWN_CHARS]},..."
    return reference if len(reference) <= SHOWN_CHARS else f"...{reference[-SHOWN_CHARS:]}"


# --- from a reference to bytes


def fetch(
    reference: str, *, where: str, limits: MediaLimits, root: Path | str | None = None
) -> bytes:
    """The encoded file behind a path, a `data:` URL, an address of an object store or, where
    `limits.urls`, an http(s) one.

    where: file and row (or task), for errors. root: the directory or store that paths are relative
    to and may not leave; None: they are taken as they are. Raises DataError.
    """
    if not isinstance(reference, str) or not reference or "\0" in reference:
        raise DataError(
            f"{where}: {reference!r:.40} names no file: give a path, a data: URL or an address"
        )
    name = f"{where}: {shown(reference)}"
    scheme = reference.partition(":")[0].lower()
    if scheme == "data":
        return _inline(reference, name, limits)
    if scheme in ("http", "https"):
        return _downloaded(reference, name, limits)
    place = located(reference, where=where, root=root)
    try:
        with open_binary(place) as file, reading(place):
            return _bounded(file, name, limits)
    except MissingDependency:
        raise
    except (DataError, OSError, ValueError) as error:
        raise DataError(
            f"{name}: can't be read ({_line(error)}): put it there, or drop the row"
        ) from error


def located(reference: str, *, where: str, root: Path | str | None) -> Path | str:
    """The path or the object store's address that a reference means. Raises DataError for one
    outside `root`."""
    name = f"{where}: {shown(reference)}"
    if reference[:7].lower() == "file://":
        reference = urllib.parse.unquote(reference[7:])
    if "://" in reference or (isinstance(root, str) and "://" in root):
        return _in_store(reference, name, root)
    if root is None:
        return Path(reference)
    base = Path(root).resolve()
    try:
        path = (base / reference).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links
        raise DataError(f"{name}: is no path: {_line(error)}") from error
    if not path.is_relative_to(base):
        raise DataError(
            f"{name}: lies outside {base}: name the directory that holds all of them as the root"
        )
    return path


def _in_store(reference: str, name: str, root: Path | str | None) -> str:
    base = str(root).rstrip("/") + "/" if root is not None else ""
    address = reference if "://" in reference else base + reference
    scheme = address.partition("://")[0].lower()
    if scheme not in OBJECT_STORES or "::" in address:
        schemes = ", ".join((*OBJECT_STORES, "http", "https"))
        raise DataError(
            f"{name}: nothing reads media from {scheme}://: give a path, a data: URL, or one of "
            f"{schemes}"
        )
    if (base and not address.startswith(base)) or ".." in address.split("/"):
        raise DataError(
            f"{name}: lies outside {root}: name the directory or store that holds all of them as "
            "the root"
        )
    return address


def _inline(reference: str, name: str, limits: MediaLimits) -> bytes:
    head, comma, body = reference.partition(",")
    if not comma or not head.endswith(";base64"):
        raise DataError(f"{name}: is no data: URL in base64: write data:image/png;base64,...")
    if len(body) * 3 // 4 > limits.max_mib * 2**20 + 2:
        _refuse_size(name, limits)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(
            f"{name}: its base64 is broken ({_line(error)}): encode the file again"
        ) from error


def _downloaded(reference: str, name: str, limits: MediaLimits) -> bytes:
    if not limits.urls:
        raise DataError(
            f"{name}: addresses of the web are not fetched: set urls: true under media, or "
            "download the files"
        )
    try:
        # only http(s) comes here
        with urllib.request.urlopen(reference, timeout=limits.timeout_s) as answer:
            return _bounded(answer, name, limits)
    except (urllib.error.URLError, HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(
            f"{name}: can't be fetched ({_line(reason)}): download it, or drop the row"
        ) from error


def _bounded(file: IO[bytes], name: str, limits: MediaLimits) -> bytes:
    size = int(limits.max_mib * 2**20)
    content = file.read(size + 1)
    if len(content) > size:
        _refuse_size(name, limits)
    return content


def _refuse_size(name: str, limits: MediaLimits) -> None:
    raise DataError(
        f"{name}: more than {limits.max_mib:g} MiB: make it smaller, or raise max_mib under media"
    )


# --- from bytes to what a processor reads


def decode_image(source: bytes, *, where: str, limits: MediaLimits) -> Image:
    """RGB, decoded whole, turned as its camera was held; what is transparent lies on white.

    where: row and file, for errors. Raises DataError for what is no image, is cut off, or passes
    the limits (told from its header, before anything is decoded); MissingDependency without Pillow.
    """
    with _opened(source, where, limits) as image:
        return _decoded(image)


def decode_video(
    source: bytes | Sequence[bytes], *, where: str, limits: MediaLimits
) -> list[Image]:
    """Frames in RGB: of an animated GIF, WebP or PNG, or of images that are a frame each. Errors as
    `decode_image`."""
    if not isinstance(source, bytes):
        if not source:
            raise DataError(f"{where}: the video has no frames: give it some, or drop the row")
        taken = _spread(len(source), limits.max_frames)
        return [decode_image(source[i], where=f"{where}, frame {i}", limits=limits) for i in taken]
    if source[4:8] == b"ftyp" or (
        source[:4] in (b"\x1aE\xdf\xa3", b"RIFF") and source[8:12] != b"WEBP"
    ):
        raise DataError(
            f"{where}: MP4, Matroska and AVI are not read: give the frames as images, or a GIF or "
            "WebP"
        )
    frames = []
    with _opened(source, where, limits) as image:
        for i in _spread(getattr(image, "n_frames", 1), limits.max_frames):
            image.seek(i)
            frames.append(_decoded(image.copy()))
    return frames


def decode_audio(
    source: bytes, *, where: str, limits: MediaLimits, rate_hz: int | None = None
) -> Audio:
    """A WAV file of whole numbers, its channels averaged; at `rate_hz` where given. Other forms
    need the package soundfile.

    where: row and file, for errors. Raises DataError for what is no audio, is cut off, or passes
    the limits.
    """
    if not source:
        raise DataError(f"{where}: the file is empty: copy it again, or drop the row")
    samples, rate = (
        _read_wave(source, where, limits)
        if _is_plain_wave(source)
        else _read_soundfile(source, where, limits)
    )
    if not len(samples):
        raise DataError(f"{where}: the clip holds no samples: copy it again, or drop the row")
    mono = samples.mean(axis=1, dtype=np.float64)
    if rate_hz is not None and rate_hz != rate:
        mono, rate = _resampled(mono, rate, rate_hz), rate_hz
    return Audio(mono.astype(np.float32), rate)


def check(part: Part, *, where: str, limits: MediaLimits) -> tuple[int, int] | None:
    """(width, height) in pixels of an image, as its header says; None of another kind, which is
    only looked for. Raises DataError for what can't be read, or is too large."""
    source = fetch(part.value, where=where, limits=limits)
    name = f"{where}: {shown(part.value)}"
    if not source:
        raise DataError(f"{name}: the file is empty: copy it again, or drop the row")
    if part.type != "image":
        return None
    with _opened(source, name, limits) as image:
        return image.size


def embed(image: Image) -> Part:
    """Return an image as a PNG inside a `data:` URL: equal pixels give equal bytes."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG")
    return embedded("image", buffer.getvalue())


def embedded(kind: MediaKind, source: bytes) -> Part:
    """Return an encoded file inside a `data:` URL. Its decoder must tell its format from the
    content."""
    media_form = next(
        (form for signature, form in SIGNATURES if source.startswith(signature)), None
    )
    if media_form is None and source[:4] == b"RIFF":
        media_form = {b"WAVE": "audio/wav", b"WEBP": "image/webp"}.get(source[8:12])
    content = base64.b64encode(source).decode()
    return Part(kind, f"data:{media_form or 'application/octet-stream'};base64,{content}")


def pillow(needed_for: str = "reading and drawing images") -> Any:
    """The package PIL. Raises MissingDependency without it."""
    try:
        import PIL.Image
        import PIL.ImageDraw
        import PIL.ImageOps
    except ImportError as error:
        raise MissingDependency("pillow", extra="vision", needed_for=needed_for) from error
    return PIL


# --- inside


@contextmanager
def _opened(source: bytes, where: str, limits: MediaLimits) -> Iterator[Image]:
    """Its header read and found to be within the limits. What goes wrong inside the block is the
    image's fault too."""
    if not source:
        raise DataError(f"{where}: the file is empty: copy it again, or drop the row")
    PIL = pillow()
    try:
        image = PIL.Image.open(io.BytesIO(source), formats=FORMATS)
    except PIL.UnidentifiedImageError as error:
        formats = ", ".join(FORMATS)
        raise DataError(
            f"{where}: is no whole image of a form that is read: give {formats}, or drop the row"
        ) from error
    except PIL.Image.DecompressionBombError as error:
        raise DataError(f"{where}: {_line(error)}: make it smaller, or drop the row") from error
    except BROKEN as error:
        raise _damaged(where, error) from error
    with image:
        width, height = image.size
        if max(width, height) > limits.max_side:
            asked = (
                f"{limits.max_side} at most on a side: make it smaller, or raise max_side "
                "under media"
            )
            raise DataError(f"{where}: is {width} x {height} pixels, {asked}")
        if width * height > limits.max_pixels:
            asked = f"{limits.max_pixels} at most: make it smaller, or raise max_pixels under media"
            raise DataError(
                f"{where}: declares {width} x {height} = {width * height} pixels, {asked}"
            )
        if image.mode in ("I", "F"):
            raise DataError(
                f"{where}: has {image.mode} pixels of 32 bits, which have no range: save it with 8 "
                "bits"
            )
        try:
            yield image
        except (PIL.Image.DecompressionBombError, *BROKEN) as error:
            raise _damaged(where, error) from error


def _damaged(where: str, error: Exception) -> DataError:
    return DataError(
        f"{where}: the image is damaged or cut off ({_line(error)}): copy it again, or drop the row"
    )


def _decoded(image: Image) -> Image:
    PIL = pillow()
    image.load()
    image = PIL.ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # of which Pillow would keep the lower half, cut off at 255
        return PIL.Image.fromarray(
            (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
        ).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, "white"), image).convert(
        "RGB"
    )


def _spread(count: int, at_most: int) -> list[int]:
    """Return at most `at_most` of `count` indices, evenly spaced, the first and the last among
    them."""
    return (
        list(range(count))
        if count <= at_most
        else np.linspace(0, count - 1, at_most).round().astype(int).tolist()
    )


def _is_plain_wave(source: bytes) -> bool:
    return (
        source[:4] == b"RIFF"
        and source[8:12] == b"WAVE"
        and b"fmt \x10\x00\x00\x00\x01\x00" in source[:256]
    )


def _read_wave(source: bytes, where: str, limits: MediaLimits) -> tuple[NDArray[np.float64], int]:
    """[samples, channels] in [-1, 1], and the rate in Hz."""
    try:
        with wave.open(io.BytesIO(source)) as file:
            channels, width, rate, declared = file.getparams()[:4]
            _refuse_long(declared, rate, where, limits)
            raw = file.readframes(declared)
    except (wave.Error, EOFError, struct.error, ValueError, ArithmeticError) as error:
        raise DataError(
            f"{where}: the clip is damaged or cut off ({_line(error)}): copy it again, or drop the "
            "row"
        ) from error
    if len(raw) != declared * channels * width:
        asked = (
            f"its header declares {declared} samples, and {len(raw) // (channels * width)} "
            "are "
            "there"
        )
        raise DataError(f"{where}: the clip is cut off: {asked}: copy it again, or drop the row")
    if width == 3:  # widened to four bytes, the lowest of them 0
        padded = np.zeros((len(raw) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        whole = padded.view("<i4").ravel()
    elif width in SAMPLE_TYPES:
        whole = np.frombuffer(raw, SAMPLE_TYPES[width])
    else:
        raise DataError(f"{where}: has samples of {width} bytes, must be 1 to 4: convert it")
    values = whole.astype(np.float64)
    values = (values - 128) / 128 if width == 1 else values / 2.0 ** (whole.dtype.itemsize * 8 - 1)
    return values.reshape(-1, channels), rate


def _read_soundfile(
    source: bytes, where: str, limits: MediaLimits
) -> tuple[NDArray[np.float64], int]:
    try:
        import soundfile  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError(
            f"{where}: is no WAV file of whole numbers: convert it, or pip install "
            "'ratchet[audio]' for FLAC, Ogg and MP3"
        ) from error
    try:
        with soundfile.SoundFile(io.BytesIO(source)) as file:
            _refuse_long(file.frames, file.samplerate, where, limits)
            return file.read(dtype="float64", always_2d=True), file.samplerate
    except (soundfile.SoundFileError, *BROKEN) as error:
        raise DataError(
            f"{where}: is no audio, or damaged ({_line(error)}): copy it again, or drop the row"
        ) from error


def _refuse_long(samples: int, rate: int, where: str, limits: MediaLimits) -> None:
    if rate <= 0 or samples > limits.max_audio_s * rate:
        asked = f"{limits.max_audio_s:g} s at most: cut it, or raise max_audio_s under media"
        raise DataError(f"{where}: declares {samples} samples at {rate} Hz, {asked}")


def _resampled(samples_N: NDArray[np.float64], rate: int, wanted: int) -> NDArray[np.float64]:
    """Resample by the spectrum, cut off or filled up: no frequency is mirrored into another."""
    count = max(1, round(len(samples_N) * wanted / rate))
    spectrum = np.fft.rfft(samples_N)
    kept = np.zeros(count // 2 + 1, spectrum.dtype)
    shared = min(len(spectrum), len(kept))
    kept[:shared] = spectrum[:shared]
    return np.fft.irfft(kept, count) * (count / len(samples_N))


def _line(error: object) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0][:200]
