"""Questions about images: published sets in their own form, what judges them, and rows without an
image."""

import asyncio
import io
import json
import wave
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ratchet.config.resolve import build, resolve
from ratchet.data.formats.media import MediaLimits, decode_audio, decode_image, fetch
from ratchet.data.presets.media_datasets import MEDIA_PRESETS
from ratchet.errors import DataError
from ratchet.types import Comparison, Message, Trajectory

LIMITS = MediaLimits()


def png(i):
    buffer = io.BytesIO()
    Image.new("RGB", (40, 20), (i * 10, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def wav(i):
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(np.full(100, i * 100, "<i2").tobytes())
    return buffer.getvalue()


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def refcoco(i):
    return {
        "sent_ids": [i], "file_name": f"{i}.jpg", "split": "train", "sentences": [{"raw": "x", "sent": "x", "sent_id": 1}],
        "raw_image_info": "{}", "image_path": f"coco/train2014/{i}.png", "bbox": [1.0, 2.0, 10.5, 12.0 + i],
        "captions": [f"the {i}", "the other"],
    }  # fmt: skip


WITH_AUDIO = ("avqa", "audiomcq", "mmau")
WITH_VIDEO = ("daily_omni", "intent_train", "intent_bench")
CHOICES = "Choices:\nA. dog\nB. car\nC. rain\nD. bell"
# name -> (file, row i of it, what row 3 asks, its answer, a right answer, a wrong one)
FORMS = {
    "clevr_cogent": (
        "a.parquet",
        lambda i: {
            "image": {"bytes": png(i), "path": f"{i}.png"}, "problem": f"How many {i}?", "solution": f"<answer> {i} </answer>",
        },
        "How many 3?\nThink first, and give the answer in <answer></answer>.",
        "3", "<think>4?</think><answer>3</answer>", "<think>3</think><answer>4</answer>",
    ),
    "geometry3k": (
        "a.parquet",
        lambda i: {
            "images": [{"bytes": png(i), "path": None}], "problem": f"<image>Find x of {i}.", "answer": f"\\frac{{{i}}}{{2}}",
        },
        "Find x of 3.\nReason step by step, and put the final answer into \\boxed{}.",
        "\\frac{3}{2}", "\\boxed{\\frac{3}{2}}", "\\boxed{2}",
    ),
    "refcoco": (
        "a.jsonl", refcoco, "Give the box [x1, y1, x2, y2], in pixels, around what this describes: "
                            "the 3",
        "[1.0, 2.0, 10.5, 15.0]", "It is [1, 2, 10.5, 15].", "I see none.",
    ),
    "mmpr": (
        "a.jsonl",
        lambda i: {
            "image": f"{i}.png", "question": f"<image>\nWhat is {i}?", "chosen": f"{i}!", "rejected": "no", "answer_gt": f"{i}",
            "image_wh": "[[40, 20]]",
        },
        "\nWhat is 3?", None, None, None,
    ),
    "avqa": (
        "a.parquet",
        lambda i: {
            "audio": {"bytes": wav(i), "path": f"{i}.wav"}, "question": "What is in the video "
                                                                        f"{i}?\n{CHOICES}",
            "answer": "C. rain",
        },
        f'What is in the audio 3?\n{CHOICES}\nEnd with "The answer is X", where X is the letter of '
        'your choice.',
        "C. rain", "The answer is C", "The answer is B",
    ),
    "audiomcq": (
        "data.jsonl",
        lambda i: {
            "audio_path": f"{i}.wav", "question": f"Which {i}?", "choices": ["dog", "rain"], "answer": "rain",
            "source_dataset": "x",
        },
        "Which 3?\n- dog\n- rain\nThink first, and give the answer in <answer></answer>.",
        "rain", "<answer>rain</answer>", "<answer>dog</answer>",
    ),
    "mmau": (
        "a.parquet",
        lambda i: {
            "audio": {"bytes": wav(i), "path": None}, "question": f"Which {i}?", "choices": ["dog", "rain"], "answer": "rain",
            "task": "sound",
        },
        "Which 3?\n- dog\n- rain\nThink first, and give the answer in <answer></answer>.",
        "rain", "<answer>rain</answer>", "<answer>dog</answer>",
    ),
    "daily_omni": (
        "qa.json",
        lambda i: {
            "video_id": f"v{i}", "Question": f"Which {i}?", "Choice": ["A. a dog", "B. rain", "C. x", "D. y"], "Answer": "B",
        },
        "Which 3?\nA. a dog\nB. rain\nC. x\nD. y\nThink step by step, and end with \"The answer is X\", where X is the "
        "letter of your choice.",
        "B", "The answer is B", "The answer is A",
    ),
    **{
        name: (
            "rows.json",
            lambda i: {
                "problem": f"Why {i}?", "problem_type": "multiple choice", "options": "['A.joy', 'B.fear']", "answer": "B",
                "path": f"videos/{i}.mp4",
            },
            "Why 3?\nA.joy\nB.fear\nThink first, and give the answer in <answer></answer>.",
            "B", "<answer>b</answer>", "<answer>A</answer>",
        )
        for name in ("intent_train", "intent_bench")
    },
}  # fmt: skip


def write_media(root):
    """Write the files that rows of the forms name."""
    for i in range(6):
        files = {
            f"{i}.png": png(i),
            f"coco/train2014/{i}.png": png(i),
            f"{i}.wav": wav(i),
            f"Videos/v{i}/v{i}_audio.wav": wav(i),
            f"Videos/v{i}/v{i}_video.mp4": b"video",
            f"videos/{i}.mp4": b"video",
        }
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)


def test_every_preset_with_media_has_a_form_here():
    assert set(FORMS) == set(MEDIA_PRESETS)


@pytest.mark.parametrize("kind", ["vlm", "dataset"])
@pytest.mark.parametrize("name", FORMS)
def test_a_published_set_in_its_own_form(tmp_path, name, kind, require):
    if name in (*WITH_AUDIO, "daily_omni"):
        require("soundfile", "its rows have audio")
    file, row, asked, answer, right, wrong = FORMS[name]
    write_media(tmp_path)
    path = write(tmp_path / file, [row(i) for i in range(6)])
    section = resolve(
        "environment",
        {"kind": kind, "preset": name, "train": path, "test_share": 0.0, "shuffle": False},
    )
    environment = build(section)
    task = list(islice(environment.tasks("train", seed=0), 4))[3]
    (*media, text) = task.messages[-1].content
    assert (text.value, task.answer) == (asked, answer)
    for medium in media:
        source = fetch(medium.value, where="here", limits=LIMITS)
        if medium.type == "image":
            assert np.asarray(decode_image(source, where="here", limits=LIMITS))[0, 0, 0] == 30
        elif source != b"video":
            clip = decode_audio(source, where="here", limits=LIMITS)
            assert clip.samples_N[0] == pytest.approx(300 / 32768)
    kinds = (
        ["audio", "video"] if name in WITH_VIDEO else ["audio" if name in WITH_AUDIO else "image"]
    )
    assert sorted(medium.type for medium in media) == kinds
    if answer is None:
        assert environment.comparison(task) == Comparison(
            (Message("assistant", "3!"),), (Message("assistant", "no"),)
        )
        return
    judge = section.default_reward
    reward = build(resolve("rewards", {"kind": judge} if isinstance(judge, str) else judge))
    said = [
        Trajectory.supervised([1], [True], messages=(Message("assistant", text),))
        for text in (right, wrong)
    ]
    assert [outcome.reward for outcome in asyncio.run(reward.score(said, task))] == [1.0, 0.0]


@pytest.mark.parametrize(("answers", "kind"), [
    ("text", "exact_match"), ("number", "numeric_answer"), ("choice", "multiple_choice"), ("box", "bounding_box"),
])  # fmt: skip
def test_what_answers_are_says_what_judges_them(answers, kind):
    section = resolve("environment", {"kind": "vlm", "train": "a.jsonl", "answers": answers})
    assert section.default_reward["kind"] == kind
    assert build(resolve("rewards", dict(section.default_reward)))
    assert (
        resolve("environment", {"kind": "vlm", "train": "a.jsonl"}).default_reward["kind"]
        == "exact_match"
    )
    assert resolve("environment", {"kind": "vlm", "preset": "geometry3k"}).default_reward == "math"
    assert (
        resolve(
            "environment", {"kind": "vlm", "preset": "geometry3k", "answers": answers}
        ).default_reward["kind"]
        == kind
    )


def test_a_row_without_an_image_is_refused(tmp_path):
    file = write(tmp_path / "a.jsonl", [{"prompt": "What?", "answer": "x", "picture": "a.png"}])
    environment = build(resolve("environment", {"kind": "vlm", "train": file, "test_share": 0.0}))
    with pytest.raises(
        DataError,
        match=r"a\.jsonl, line 1: no image and no clip; the row has prompt, answer, picture: name",
    ):
        environment.rows("train")


def test_a_solution_without_an_answer_is_refused(tmp_path):
    file = write(tmp_path / "a.parquet", [{"image": png(1), "problem": "p", "solution": "3"}])
    environment = build(
        resolve("environment", {"kind": "vlm", "preset": "clevr_cogent", "train": file})
    )
    with pytest.raises(DataError, match=r"row 1: column 'solution' has no answer in <answer>"):
        environment.rows("train")
