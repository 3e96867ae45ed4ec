"""A run whose rollouts have images and a clip in what was said."""

import io
import math
import struct
import wave
from base64 import b64decode
from dataclasses import replace

import numpy as np
import torch
from PIL import Image, ImageDraw

from ratchet.config.schema import RecordConfig
from ratchet.data.formats.media import embed, embed_bytes
from ratchet.data.packing import pack
from ratchet.observe.records.writer import Recorder
from ratchet.observe.sinks import JsonlSink
from ratchet.runs.run_dir import RunDirectory
from ratchet.testing.builders import make_trajectory
from ratchet.types import Group, Medium, Message, Part, PlacedMedium, Scored, Task

LARGE = (1400, 1000)


def shapes():
    """48 x 48 pixels, as environments draw them."""
    image = Image.new("RGB", (48, 48), "white")
    pen = ImageDraw.Draw(image)
    pen.ellipse((4, 6, 20, 22), fill="crimson")
    pen.rectangle((26, 24, 42, 42), fill="royalblue")
    return embed(image)


def photograph():
    """Larger than a page takes as it is."""
    width, height = LARGE
    sky = np.linspace(90, 220, height)[:, None, None] + np.random.default_rng(0).integers(
        0, 24, (height, width, 3)
    )
    image = Image.fromarray(sky.astype(np.uint8))
    pen = ImageDraw.Draw(image)
    pen.ellipse((180, 240, 560, 620), fill="seagreen")
    pen.polygon([(800, 760), (1020, 300), (1240, 760)], fill="goldenrod")
    return embed(image)


def beep():
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as clip:
        clip.setparams((1, 2, 8000, 0, "NONE", ""))
        clip.writeframes(
            b"".join(struct.pack("<h", int(9000 * math.sin(i / 4))) for i in range(1600))
        )
    return embed_bytes("audio", buffer.getvalue())


def make_picture_run(path, *, question="How many circles?"):
    directory = RunDirectory(path)
    path.mkdir(parents=True)
    directory.write_or_check_config(
        {"name": "made", "seed": 0, "tokenizer": {"kind": "bytes"}, "stages": [{"name": "rl"}]}
    )
    sink = JsonlSink(directory.metrics, keep_through=0)
    sink.write(1, {"rollout/reward": 0.5})
    sink.close()
    asked = Message("user", (shapes(), Part("text", question)))
    more = Message(
        "user",
        (Part("text", "And in these?"), photograph(), Part("image", "album/far.png"), beep()),
    )
    odd = Message(
        "user",
        (
            embed_bytes("video", b"no browser plays this"),
            embed_bytes("image", b"<svg onload='document.title=1'/>"),
        ),
    )
    said = (asked, Message("assistant", "one"), more, Message("assistant", "none"), odd)
    rows = []
    for attempt, reward in enumerate((1.0, 0.0)):
        row = make_trajectory(
            list(b"how many?"), list(b"one"), outcome=Scored(reward), attempt=attempt, version=0
        )
        media = tuple(
            PlacedMedium(i, Medium(f"medium {i}", "image", 1, {}, shapes_source()))
            for i in range(6)
        )
        rows.append(replace(row, messages=said, media=() if attempt else media))
    group = Group(
        "rl/0", Task("shapes/0", (asked,), environment="shapes", tag="count"), tuple(rows)
    )
    recorder = Recorder(RecordConfig(), directory.steps, seed=0)
    batch = pack([group])
    recorder.add(
        1, "rl", [group], batch, lambda batch: torch.ones(batch.n_tokens, dtype=torch.float64), {}
    )
    recorder.close()
    return directory


def shapes_source():
    return b64decode(shapes().value.partition(",")[2])
