"""Video files become frames and their sound samples, and what is wrong with one is named."""

import io
import sys
from contextlib import suppress
from fractions import Fraction

import numpy as np
import pytest

from ratchet.data.formats.media import MediaLimits, decode_audio, decode_video
from ratchet.errors import DataError, MissingDependency

WHERE = "rows.jsonl, line 3"
LIMITS = MediaLimits()
RATE_HZ = 16000
FORMS = [("mp4", "mpeg4"), ("matroska", "ffv1"), ("webm", "libvpx"), ("avi", "mpeg4")]


def make_video(form="mp4", codec="mpeg4", n_frames=9, sound=None):
    """Return a file whose frame i is red with the value 20 i, of 64 x 48 pixels."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=form) as container:
        video = container.add_stream(codec, rate=10)
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        audio = None if sound is None else container.add_stream("aac", rate=RATE_HZ, layout="mono")
        for i in range(n_frames):
            pixels = np.full((48, 64, 3), (i * 20, 0, 0), np.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(video.encode())
        if audio is not None:
            samples = np.asarray(sound, np.float32)[None]
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
            frame.rate, frame.pts, frame.time_base = RATE_HZ, 0, Fraction(1, RATE_HZ)
            container.mux(audio.encode(frame))
            container.mux(audio.encode())
    return buffer.getvalue()


def red_values(frames):
    return [frame.getpixel((5, 5))[0] for frame in frames]


@pytest.mark.medium
@pytest.mark.needs("av")
@pytest.mark.parametrize(("form", "codec"), FORMS)
def test_the_frames_of_a_file_in_order_and_evenly_spaced(form, codec):
    source = make_video(form, codec)
    frames = decode_video(source, where=WHERE, limits=LIMITS)
    assert [frame.size for frame in frames] == [(64, 48)] * 9
    assert red_values(frames) == pytest.approx([20 * i for i in range(9)], abs=6)
    again = decode_video(source, where=WHERE, limits=LIMITS)
    assert [frame.tobytes() for frame in again] == [frame.tobytes() for frame in frames]
    few = decode_video(source, where=WHERE, limits=MediaLimits(max_frames=3))
    assert [frame.tobytes() for frame in few] == [frames[i].tobytes() for i in (0, 4, 8)]
    with pytest.raises(DataError, match=rf"^{WHERE}: the video is cut off"):
        decode_video(source[: len(source) * 2 // 3], where=WHERE, limits=LIMITS)


@pytest.mark.needs("av")
def test_the_sound_of_a_video_is_its_first_audio_track():
    wave = 0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE_HZ) / RATE_HZ)
    source = make_video(sound=wave)
    clip = decode_audio(source, where=WHERE, limits=LIMITS)
    assert clip.rate_hz == RATE_HZ
    assert clip.samples_N.dtype == np.float32
    spectrum = np.abs(np.fft.rfft(clip.samples_N[:RATE_HZ]))
    assert spectrum.argmax() == 440
    assert np.abs(clip.samples_N[3000:13000]).max() == pytest.approx(0.5, abs=0.01)
    half = decode_audio(source, where=WHERE, limits=LIMITS, rate_hz=RATE_HZ // 2)
    assert (half.rate_hz, len(half.samples_N)) == (8000, len(clip.samples_N) // 2)
    with pytest.raises(DataError, match=r"at most 0\.5 s are allowed"):
        decode_audio(source, where=WHERE, limits=MediaLimits(max_audio_s=0.5))
    with pytest.raises(DataError, match=rf"^{WHERE}: the file has no audio"):
        decode_audio(make_video(), where=WHERE, limits=LIMITS)


@pytest.mark.needs("av")
@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_side": 50}, "is 64 x 48 pixels, at most 50 on a side"),
        ({"max_pixels": 3000}, "declares 64 x 48 = 3072 pixels, at most 3000"),
    ],
)
def test_a_frame_beyond_the_limits_is_refused(limits, message):
    with pytest.raises(DataError, match=f"^{WHERE}: {message}"):
        decode_video(make_video(), where=WHERE, limits=MediaLimits(**limits))


@pytest.mark.needs("av")
def test_damaged_bytes_are_an_error_that_names_the_row():
    header = b"\0\0\0\x18ftypmp42" + bytes(12)
    with pytest.raises(DataError, match=rf"^{WHERE}: the video is damaged"):
        decode_video(header, where=WHERE, limits=LIMITS)
    source = make_video()
    generator = np.random.default_rng(0)
    for _ in range(20):  # any byte may be wrong: frames or an error, and no other exception
        broken = bytearray(source)
        for position in generator.integers(32, len(broken), 8):
            broken[position] = generator.integers(256)
        with suppress(DataError):
            assert decode_video(bytes(broken), where=WHERE, limits=LIMITS)


def test_without_the_package_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    for decode in (decode_video, decode_audio):
        with pytest.raises(MissingDependency, match=r"'av'.*ratchet-rl\[video\]"):
            decode(b"\0\0\0\x18ftypmp42" + bytes(12), where=WHERE, limits=LIMITS)
