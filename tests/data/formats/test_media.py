"""What is said of media becomes bytes and pixels, and whatever is wrong with one is an error that
names it."""

from __future__ import annotations

import base64
import http.server
import io
import random
import struct
import sys
import threading
import time
import wave
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ratchet.data.formats.media import (
    MediaLimits,
    decode_audio,
    decode_image,
    decode_video,
    embed,
    embed_bytes,
    fetch,
    shorten_reference,
)
from ratchet.errors import DataError, MissingDependency

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:PIL", "ignore::PIL.Image.DecompressionBombWarning"
)

LIMITS = MediaLimits()
WHERE = "rows.jsonl, line 3"


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def noise(width: int = 32, height: int = 24) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def png_that_declares(width: int, height: int) -> bytes:
    content = bytearray(encoded(Image.new("L", (1, 1))))
    content[16:24] = struct.pack(">II", width, height)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    return bytes(content)


def wav(samples: bytes, *, width: int = 2, channels: int = 1, rate: int = 8000) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(samples)
    return buffer.getvalue()


# --- from a reference to bytes


def test_a_file_is_found_by_its_path_below_the_root_and_as_it_is_without_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"abc")
    assert fetch("images/a.png", where=WHERE, limits=LIMITS, root=tmp_path) == b"abc"
    assert (
        fetch(str(tmp_path / "images" / "a.png"), where=WHERE, limits=LIMITS, root=tmp_path)
        == b"abc"
    )
    assert fetch(f"file://{tmp_path}/images/a.png", where=WHERE, limits=LIMITS) == b"abc"


@pytest.mark.parametrize(
    "reference",
    ["../secret.png", "/etc/hostname", "a/../../secret.png", "file:///etc/hostname", "link.png"],
)
def test_a_path_does_not_leave_its_root(tmp_path: Path, reference: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret.png").write_bytes(b"abc")
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(DataError, match=rf"^{WHERE}: .*lies outside"):
        fetch(reference, where=WHERE, limits=LIMITS, root=root)


@pytest.mark.fault("D11")
def test_a_missing_file_is_an_error_that_names_row_and_file(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=rf"^{WHERE}: gone\.png: can't be read .*No such file or directory.*drop the row",
    ):
        fetch("gone.png", where=WHERE, limits=LIMITS, root=tmp_path)
    with pytest.raises(DataError, match=r"is not a path|can't be read"):
        fetch("a" * 5000, where=WHERE, limits=LIMITS, root=tmp_path)
    for nothing in ("", "a\0b"):
        with pytest.raises(DataError, match="names no file"):
            fetch(nothing, where=WHERE, limits=LIMITS, root=tmp_path)


def test_a_data_url_holds_its_file() -> None:
    content = bytes(range(256))
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    assert fetch(url, where=WHERE, limits=LIMITS) == content
    for broken, why in (
        ("data:image/png,abc", "is not a base64 data: URL"),
        ("data:;base64,@@@", "base64 is broken"),
    ):
        with pytest.raises(DataError, match=why):
            fetch(broken, where=WHERE, limits=LIMITS)


def test_what_is_larger_than_the_limit_is_not_read(tmp_path: Path) -> None:
    small = MediaLimits(max_mib=1)
    (tmp_path / "a.png").write_bytes(bytes(2**20 + 1))
    (tmp_path / "b.png").write_bytes(bytes(2**20))
    url = "data:image/png;base64," + base64.b64encode(bytes(2**20 + 4)).decode()
    for reference in ("a.png", url):
        with pytest.raises(DataError, match=r"more than 1 MiB.*raise max_mib"):
            fetch(reference, where=WHERE, limits=small, root=tmp_path)
    assert len(fetch("b.png", where=WHERE, limits=small, root=tmp_path)) == 2**20


def test_an_object_store_is_read_below_its_root_alone() -> None:
    import fsspec

    with fsspec.open("memory://media-test/in/a.png", "wb") as file:
        file.write(b"abc")  # pyright: ignore[reportAttributeAccessIssue]
    root = "memory://media-test/in"
    assert fetch("a.png", where=WHERE, limits=LIMITS, root=root) == b"abc"
    assert fetch("memory://media-test/in/a.png", where=WHERE, limits=LIMITS) == b"abc"
    for outside in ("../a.png", "memory://media-test/a.png", "memory://media-test/in/../a.png"):
        with pytest.raises(DataError, match="lies outside"):
            fetch(outside, where=WHERE, limits=LIMITS, root=root)


@pytest.mark.parametrize(
    "reference",
    ["ftp://a/b.png", "zip://x::http://a/b.zip", "simplecache::http://a/b.png", "local://etc/x"],
)
def test_an_address_that_nothing_should_read_is_refused(reference: str) -> None:
    with pytest.raises(DataError, match=r"media can't be read from .*give a path"):
        fetch(reference, where=WHERE, limits=LIMITS)


@pytest.fixture
def web() -> Iterator[str]:
    """The address of a server with a file, a file that is cut off, and ones whose head or body has no end."""

    class Files(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/head.png":
                self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            with suppress(OSError):
                while self.path == "/head.png":
                    self.wfile.write(b"a: b\r\n")
                    time.sleep(0.01)
            self.send_response(404 if self.path == "/b.png" else 200)
            if self.path == "/cut.png":
                self.send_header("Content-Length", "10")
            self.end_headers()
            self.wfile.write(b"" if self.path == "/b.png" else b"abc")
            with suppress(OSError):  # until the client leaves
                while self.path == "/endless.png":
                    self.wfile.write(b"d")
                    time.sleep(0.01)

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.fault("D12")
def test_an_address_of_the_web_is_fetched_only_where_that_was_asked_for(web: str) -> None:
    with pytest.raises(DataError, match=r"a\.png: web addresses are not fetched: set urls: true"):
        fetch(f"{web}/a.png", where=WHERE, limits=LIMITS)
    assert fetch(f"{web}/a.png", where=WHERE, limits=MediaLimits(urls=True)) == b"abc"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("b.png", r"\(status 404\)"),
        ("cut.png", r"\(no answer: .*received 3 bytes, expected 10"),
        ("head.png", r"\(it did not arrive whole within 0\.1 s\)"),
        ("endless.png", r"\(it did not arrive whole within 0\.1 s\)"),
    ],
)
def test_what_is_not_whole_after_its_time_is_refused(web: str, name: str, reason: str) -> None:
    limits = MediaLimits(urls=True, timeout_s=0.1 if name in ("head.png", "endless.png") else 60)
    with pytest.raises(DataError, match=rf"^{WHERE}: http.*: can't be fetched {reason}"):
        fetch(f"{web}/{name}", where=WHERE, limits=limits)


def test_an_address_where_nobody_answers_is_refused() -> None:
    with pytest.raises(DataError, match=r"can't be fetched .*(refused|connection attempts failed)"):
        fetch("http://127.0.0.1:1/a.png", where=WHERE, limits=MediaLimits(urls=True))


def test_errors_do_not_hold_the_file_itself() -> None:
    assert shorten_reference("data:image/png;base64," + "A" * 10_000) == "data:image/png;base64,..."
    assert len(shorten_reference("x" * 10_000)) < 100


# --- images


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "PPM", "GIF", "JPEG", "WEBP"])
def test_an_image_of_every_form_is_rgb(form: str) -> None:
    image = Image.new("RGB", (20, 10), (250, 0, 5))
    read = decode_image(encoded(image, form), where=WHERE, limits=LIMITS)
    assert (read.mode, read.size) == ("RGB", (20, 10))
    assert np.abs(np.asarray(read).astype(int) - np.asarray(image)).max() <= 6  # JPEG


def test_an_embedded_image_is_the_same_pixels_and_always_the_same_bytes() -> None:
    part = embed(noise())
    assert part == embed(noise())
    assert part.type == "image"
    assert part.value.startswith("data:image/png;base64,")
    read = decode_image(fetch(part.value, where=WHERE, limits=LIMITS), where=WHERE, limits=LIMITS)
    assert (np.asarray(read) == np.asarray(noise())).all()
    assert embed_bytes("image", encoded(noise(), "WEBP")).value.startswith(
        "data:image/webp;base64,"
    )
    assert embed_bytes("audio", wav(b"\0\0")).value.startswith("data:audio/wav;base64,")


def test_transparent_lies_on_white_and_sixteen_bits_keep_their_upper_half() -> None:
    clear = Image.new("RGBA", (2, 1), (10, 20, 30, 255))
    clear.putpixel((1, 0), (10, 20, 30, 0))
    read = decode_image(encoded(clear), where=WHERE, limits=LIMITS)
    assert [read.getpixel((x, 0)) for x in (0, 1)] == [(10, 20, 30), (255, 255, 255)]
    deep = Image.fromarray(np.array([[0, 256 * 77, 65535]], np.uint16))
    read = decode_image(encoded(deep), where=WHERE, limits=LIMITS)
    assert [read.getpixel((x, 0)) for x in range(3)] == [(0,) * 3, (77,) * 3, (255,) * 3]
    with pytest.raises(DataError, match="32-bit"):
        decode_image(
            encoded(Image.fromarray(np.zeros((2, 2), np.float32)), "TIFF"),
            where=WHERE,
            limits=LIMITS,
        )


def test_a_photograph_is_turned_as_the_camera_was_held() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by a quarter
    assert decode_image(
        encoded(noise(32, 24), "JPEG", exif=exif), where=WHERE, limits=LIMITS
    ).size == (
        24,
        32,
    )


@pytest.mark.fault("D13")
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_file_that_is_cut_off_anywhere_is_an_error_or_whole(form: str) -> None:
    whole = encoded(noise(), form)
    place = f"{WHERE}: a.{form.lower()}"
    for end in range(0, len(whole) * 9 // 10, max(1, len(whole) // 60)):
        with pytest.raises(
            DataError,
            match=rf"^{place}: (the file is empty|is not an image of a supported format|the image is damaged)",
        ):
            decode_image(whole[:end], where=place, limits=LIMITS)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_changed_bytes_never_raise_anything_but_a_data_error(form: str) -> None:
    whole, rng = encoded(noise(), form), random.Random(form)
    for _ in range(150):
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 8)):
            changed[rng.randrange(min(len(changed), 200))] = rng.randrange(256)
        with suppress(DataError):
            assert decode_image(bytes(changed), where=WHERE, limits=LIMITS).mode == "RGB"


@pytest.mark.fault("D13")
def test_what_is_empty_or_no_image_is_an_error() -> None:
    with pytest.raises(
        DataError,
        match=r"^rows.jsonl, line 3: a\.png: the file is empty: copy it again, or drop the row",
    ):
        decode_image(b"", where=f"{WHERE}: a.png", limits=LIMITS)
    for other in (
        b"hello",
        b"%PDF-1.7 ...",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n" * 9,
    ):
        with pytest.raises(
            DataError, match="is not an image of a supported format: give PNG, JPEG"
        ):
            decode_image(other, where=WHERE, limits=LIMITS)


@pytest.mark.fault("D14")
def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(
        DataError, match=r"is 20000 x 4 pixels, at most 8192 on a side.*raise max_side"
    ):
        decode_image(encoded(Image.new("1", (20_000, 4))), where=WHERE, limits=LIMITS)
    wide = MediaLimits(max_side=30_000)
    assert decode_image(encoded(Image.new("1", (20_000, 4))), where=WHERE, limits=wide).size == (
        20_000,
        4,
    )
    with pytest.raises(
        DataError,
        match=r"declares 8000 x 8001 = 64008000 pixels, at most 64000000.*raise max_pixels",
    ):
        decode_image(png_that_declares(8000, 8001), where=WHERE, limits=LIMITS)
    # Beyond its first limit Pillow only warns, and decodes; beyond its second it raises an error of
    # its own.
    for side in (10_000, 14_000, 30_000):
        with pytest.raises(DataError, match=r"pixels"):
            decode_image(png_that_declares(side, side), where=WHERE, limits=wide)


# --- videos


def frames(count: int) -> list[Image.Image]:
    return [Image.new("RGB", (8, 8), (i * 20, 0, 0)) for i in range(count)]


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_the_frames_of_an_animation_in_order(form: str) -> None:
    first, *rest = frames(4)
    options = {"lossless": True} if form == "WEBP" else {}
    source = encoded(first, form, save_all=True, append_images=rest, **options)
    assert [frame.getpixel((0, 0)) for frame in decode_video(source, where=WHERE, limits=LIMITS)] == [
        (0, 0, 0), (20, 0, 0), (40, 0, 0), (60, 0, 0),
    ]  # fmt: skip


def test_of_a_longer_video_frames_are_taken_at_even_distances() -> None:
    images = [encoded(frame) for frame in frames(9)]
    read = decode_video(images, where=WHERE, limits=MediaLimits(max_frames=3))
    assert [frame.getpixel((0, 0)) for frame in read] == [(0, 0, 0), (80, 0, 0), (160, 0, 0)]
    first, *rest = frames(9)
    read = decode_video(
        encoded(first, "GIF", save_all=True, append_images=rest),
        where=WHERE,
        limits=MediaLimits(max_frames=3),
    )
    assert [frame.getpixel((0, 0)) for frame in read] == [(0, 0, 0), (80, 0, 0), (160, 0, 0)]


def test_a_bad_video_is_an_error_that_says_which_frame() -> None:
    with pytest.raises(DataError, match=rf"^{WHERE}, frame 1: the file is empty"):
        decode_video([encoded(noise()), b""], where=WHERE, limits=LIMITS)
    with pytest.raises(DataError, match="has no frames"):
        decode_video([], where=WHERE, limits=LIMITS)
    first, *rest = frames(4)
    whole = encoded(first, "GIF", save_all=True, append_images=rest)
    with pytest.raises(DataError, match=r"damaged|not an image"):
        decode_video(whole[:40], where=WHERE, limits=LIMITS)


# --- audio


@pytest.mark.needs("soundfile")
def test_samples_of_every_width_are_between_minus_one_and_one() -> None:
    for width in (1, 2, 3, 4):
        top = 2 ** (8 * width - 1)
        values = [-top, -top // 2, 0, top // 2, top - 1]
        if width == 1:
            raw = bytes(value + 128 for value in values)
        else:
            raw = b"".join(value.to_bytes(width, "little", signed=True) for value in values)
        audio = decode_audio(wav(raw, width=width), where=WHERE, limits=LIMITS)
        np.testing.assert_allclose(audio.samples_N, [-1, -0.5, 0, 0.5, (top - 1) / top], atol=1e-7)
        assert (audio.samples_N.dtype, audio.rate_hz) == (np.float32, 8000)


@pytest.mark.needs("soundfile")
@pytest.mark.parametrize(
    ("form", "subtype", "tolerance"),
    [
        ("WAV", "FLOAT", 1e-6),
        ("FLAC", "PCM_16", 1e-4),
        ("OGG", "VORBIS", 0.1),
        ("OGG", "OPUS", 0.1),
        ("MP3", None, 0.1),
    ],
)
def test_a_clip_of_every_format_and_its_beginning(
    form: str, subtype: str | None, tolerance: float
) -> None:
    import soundfile

    samples_N = np.sin(np.arange(16000) / 9) * 0.4
    buffer = io.BytesIO()
    soundfile.write(buffer, samples_N, 8000, format=form, subtype=subtype)
    whole = buffer.getvalue()
    audio = decode_audio(whole, where=WHERE, limits=LIMITS)
    assert audio.rate_hz == 8000
    np.testing.assert_allclose(audio.samples_N, samples_N, atol=tolerance)
    for end in range(0, len(whole) * 9 // 10, len(whole) // 30):
        with suppress(DataError):
            # A page of Ogg does not tell whether others follow.
            assert len(decode_audio(whole[:end], where=WHERE, limits=LIMITS).samples_N) < 16000
            assert form == "OGG"


@pytest.mark.needs("soundfile")
def test_changed_bytes_of_a_clip_never_raise_anything_but_a_data_error() -> None:
    whole, rng = wav(bytes(2000)), random.Random("wav")
    for _ in range(150):
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 8)):
            changed[rng.randrange(60)] = rng.randrange(256)
        with suppress(DataError):
            assert decode_audio(bytes(changed), where=WHERE, limits=LIMITS).samples_N.ndim == 1


def test_audio_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(MissingDependency, match=r"reading audio.*soundfile.*ratchet-rl\[audio\]"):
        decode_audio(wav(bytes(2)), where=WHERE, limits=LIMITS)


@pytest.mark.needs("soundfile")
def test_channels_are_averaged() -> None:
    raw = np.array([[16384, 0], [-16384, 16384]], "<i2").tobytes()
    assert decode_audio(wav(raw, channels=2), where=WHERE, limits=LIMITS).samples_N.tolist() == [
        0.25,
        0.0,
    ]


@pytest.mark.medium
@pytest.mark.needs("soundfile")
@pytest.mark.parametrize("wanted", [4000, 7000, 16000, 44100])
def test_another_rate_as_scipy_resamples(wanted: int) -> None:
    from scipy.signal import resample  # a second to import

    t = np.arange(801)
    samples = (9000 * np.sin(t / 5) + 5000 * np.cos(t / 7) * np.exp(-t / 300)).astype("<i2")
    audio = decode_audio(wav(samples.tobytes()), where=WHERE, limits=LIMITS, rate_hz=wanted)
    expected = resample(samples / 32768, round(801 * wanted / 8000))
    assert audio.rate_hz == wanted
    np.testing.assert_allclose(audio.samples_N, expected, atol=1e-4)


@pytest.mark.needs("soundfile")
@pytest.mark.fault("D13")
def test_a_bad_clip_is_an_error() -> None:
    whole = wav(bytes(2000))
    for broken, why in (
        (b"", "is empty"),
        (whole[:1000], "the clip is cut off"),
        (whole[:30], "is damaged"),
        (wav(b""), "no samples"),
        (b"hello", "is not audio"),
    ):
        with pytest.raises(DataError, match=why) as caught:
            decode_audio(broken, where=WHERE, limits=LIMITS)
        assert str(caught.value).startswith(WHERE)
    with pytest.raises(
        DataError, match=r"declares 1000 samples at 8000 Hz, at most 0\.1 s.*raise max_audio_s"
    ):
        decode_audio(whole, where=WHERE, limits=MediaLimits(max_audio_s=0.1))
