"""Rows with images and clips: every form that they come in, their places in messages, and what is
refused."""

import base64
import io
import json
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ratchet.config.resolve import build, resolve
from ratchet.data.formats.media import MediaLimits, decode_image, fetch
from ratchet.environments.datasets.dataset import Dataset
from ratchet.errors import DataError
from ratchet.testing import check_environment
from ratchet.types import Message, Part

LIMITS = MediaLimits()


def png(i, size=8):
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), (i * 10, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def url(i):
    return "data:image/png;base64," + base64.b64encode(png(i)).decode()


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=4)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def made(**settings) -> Dataset:
    return build(
        resolve("environment", {"kind": "dataset", "test_share": 0.0, "shuffle": False, **settings})
    )


def tasks(environment, count):
    return list(islice(environment.tasks("train", seed=0), count))


def shows(part):
    """Which of the images above a part holds."""
    assert part.type == "image"
    image = decode_image(
        fetch(part.value, where="here", limits=LIMITS), where="here", limits=LIMITS
    )
    return np.asarray(image)[0, 0, 0] // 10


def said(task):
    """The text of a task's last message, with the numbers of its images at their places."""
    content = task.messages[-1].content
    return (
        content
        if isinstance(content, str)
        else [p.value if p.type == "text" else int(shows(p)) for p in content]
    )


# --- forms of one image


@pytest.mark.parametrize("form", ["path", "bytes", "struct", "struct_path", "url", "list"])
def test_every_form_of_an_image_column(tmp_path, form):
    (tmp_path / "images").mkdir()
    for i in range(3):
        (tmp_path / "images" / f"{i}.png").write_bytes(png(i))
    value = {
        "path": lambda i: f"images/{i}.png",
        "bytes": png,
        "struct": lambda i: {"bytes": png(i), "path": f"elsewhere/{i}.png"},
        "struct_path": lambda i: {"bytes": None, "path": f"images/{i}.png"},
        "url": url,
        "list": lambda i: [{"bytes": png(i), "path": None}],
    }[form]
    file = write(
        tmp_path / "a.parquet",
        [{"image": value(i), "prompt": f"What {i}?", "answer": f"{i}"} for i in range(3)],
    )
    found = tasks(made(train=file, columns={"images": "image"}), 3)
    assert [said(task) for task in found] == [[i, f"What {i}?"] for i in range(3)]
    assert [task.answer for task in found] == ["0", "1", "2"]


def test_a_task_holds_its_image_once_and_travels_as_json(tmp_path):
    file = write(
        tmp_path / "a.parquet",
        [{"images": [png(1), png(2)], "prompt": "<image> or <image>?", "answer": "x", "n": 3}],
    )
    (task,) = tasks(made(train=file), 1)
    assert said(task) == [1, " or ", 2, "?"]
    assert "images" not in task.meta
    assert task.meta["n"] == 3
    assert "base64" not in json.dumps(dict(task.meta))


@pytest.mark.medium
def test_the_environment_is_as_every_other(tmp_path):
    file = write(
        tmp_path / "a.parquet",
        [{"image": png(i), "prompt": f"What {i}?", "answer": f"{i}"} for i in range(20)],
    )
    check_environment(made(train=file, columns={"images": "image"}, test_share=0.3, shuffle=True))


# --- places


def test_marks_in_a_text_are_places_and_without_any_images_come_first(tmp_path):
    rows = [
        {"images": [url(1), url(2)], "prompt": "A <image> and\n<image>.", "answer": "x"},
        {"images": [url(1), url(2)], "prompt": "Both?", "answer": "x"},
        {"images": [], "prompt": "No image.", "answer": "x"},
    ]
    found = tasks(made(train=write(tmp_path / "a.jsonl", rows)), 3)
    assert [said(task) for task in found] == [
        ["A ", 1, " and\n", 2, "."],
        [1, 2, "Both?"],
        "No image.",
    ]


def test_marks_are_text_where_the_rows_have_no_such_media(tmp_path):
    file = write(
        tmp_path / "a.jsonl",
        [{"prompt": "What is <video> in HTML, and <image>?", "answer": "a tag"}],
    )
    (task,) = tasks(made(train=file), 1)
    assert task.messages == (Message("user", "What is <video> in HTML, and <image>?"),)


@pytest.mark.fault("D15")
@pytest.mark.parametrize(
    ("images", "prompt", "counts"),
    [
        ([1], "<image> <image>", "2 marks <image>.*the row has 1"),
        ([1, 2], "<image>", "1 marks.*has 2"),
        ([], "<image>", "1 marks.*has 0"),
    ],
)
def test_as_many_places_as_images(tmp_path, images, prompt, counts):
    rows = [
        {"images": [url(0)], "prompt": "fine", "answer": "x"},
        {"images": [*map(url, images)], "prompt": prompt, "answer": "x"},
    ]
    file = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: .*{counts}"):
        tasks(made(train=file), 1)


def test_conversations_with_parts(tmp_path):
    """OpenAI's image_url, Hugging Face's {"type": "image"} that takes the column's, and one that
    holds its own."""
    content = [
        [{"type": "text", "text": "A"}, {"type": "image_url", "image_url": {"url": url(1)}}],
        [{"type": "image"}, {"type": "text", "text": "B"}],
        [{"type": "image", "image": "x/3.png"}, {"type": "text", "text": "C"}],
        [{"type": "text", "text": "no"}, {"type": "text", "text": " image"}],
    ]
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "3.png").write_bytes(png(3))
    rows = [
        {
            "messages": [{"role": "user", "content": one}, {"role": "assistant", "content": "yes"}],
            "images": images,
        }
        for one, images in zip(content, [[], [url(2)], [], []], strict=True)
    ]
    environment = made(train=write(tmp_path / "a.jsonl", rows))
    found = tasks(environment, 4)
    assert [said(task) for task in found] == [["A", 1], [2, "B"], [3, "C"], "no image"]
    assert [environment.demonstration(task) for task in found] == [
        (Message("assistant", "yes"),)
    ] * 4
    assert "base64" not in json.dumps(dict(found[0].meta))


def test_images_of_several_turns_are_at_their_own(tmp_path):
    messages = [
        {"role": "user", "content": "First <image>"},
        {"role": "assistant", "content": "an <image> tag"},
        {"role": "user", "content": "Second <image>"},
        {"role": "assistant", "content": "ok"},
    ]
    file = write(tmp_path / "a.jsonl", [{"messages": messages, "images": [url(1), url(2)]}])
    (task,) = tasks(made(train=file), 1)
    assert task.messages[0].content == (Part("text", "First "), Part("image", url(1)))
    assert task.messages[1] == Message("assistant", "an <image> tag")
    assert task.messages[2].content == (Part("text", "Second "), Part("image", url(2)))


def test_pairs_with_an_image(tmp_path):
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    user = {"role": "user", "content": parts}
    rows = [
        {"image": png(1), "prompt": "What?", "chosen": "this", "rejected": "that", "form": "text"},
        {
            "image": png(2),
            "prompt": "<image>What?",
            "chosen": "this",
            "rejected": "that",
            "form": "text",
        },
    ]
    whole = {
        "image": url(3),
        "chosen": [user, {"role": "assistant", "content": "this"}],
        "rejected": [user, {"role": "assistant", "content": "that"}],
    }
    environment = made(train=write(tmp_path / "a.parquet", rows), columns={"images": "image"})
    others = made(train=write(tmp_path / "b.jsonl", [whole]), columns={"images": "image"})
    found = [*tasks(environment, 2), *tasks(others, 1)]
    assert [said(task) for task in found] == [[1, "What?"], [2, "What?"], [3, "What?"]]
    for task in found:
        compared = (others if task is found[2] else environment).comparison(task)
        assert (compared.chosen, compared.rejected) == (
            (Message("assistant", "this"),),
            (Message("assistant", "that"),),
        )


def test_audio_and_video_columns(tmp_path):
    rows = [
        {
            "audio": {"bytes": b"RIFF\0\0\0\0WAVEfmt ", "path": None},
            "videos": [b"GIF89a"],
            "prompt": "Hear <audio>?",
            "answer": "x",
        }
    ]
    (task,) = tasks(made(train=write(tmp_path / "a.parquet", rows)), 1)
    assert [part.type for part in task.messages[0].content] == ["video", "text", "audio", "text"]
    assert task.messages[0].content[2].value.startswith("data:audio/wav;base64,")
    rows = [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
                    ],
                }
            ]
        }
    ]
    (task,) = tasks(made(train=write(tmp_path / "b.jsonl", rows)), 1)
    assert task.messages[0].content == (Part("audio", "data:audio/wav;base64,AAAA"),)


# --- rows of the same question


def test_one_question_about_two_images_is_two_prompts(tmp_path):
    rows = [{"image": png(i), "prompt": "What?", "answer": f"{i}"} for i in (1, 2, 1)]
    file = write(tmp_path / "a.parquet", rows)
    assert len(made(train=file, columns={"images": "image"}, distinct=True).rows("train")) == 2
    test = write(tmp_path / "t.parquet", [{"image": png(3), "prompt": "What?", "answer": "3"}])
    assert len(made(train=file, test=test, columns={"images": "image"}).rows("train")) == 3
    with pytest.raises(DataError, match="the prompt is also in the training split"):
        made(
            train=file, test=write(tmp_path / "u.parquet", rows[:1]), columns={"images": "image"}
        ).rows("test")


def test_which_rows_are_held_out_does_not_depend_on_where_the_files_lie(tmp_path):
    held = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        for i in range(40):
            (tmp_path / name / f"{i}.png").write_bytes(png(i % 20))
        rows = [{"image": f"{i}.png", "prompt": "What?", "answer": "x"} for i in range(40)]
        environment = made(
            train=write(tmp_path / name / "a.jsonl", rows),
            columns={"images": "image"},
            test_share=0.3,
        )
        held.append(
            [environment.rows("test").row_number(i) for i in range(len(environment.rows("test")))]
        )
    assert held[0] == held[1]
    assert 0 < len(held[0]) < 40


# --- what is refused


def broken(tmp_path, value, **settings):
    rows = [
        {"image": url(1), "prompt": "fine", "answer": "x"},
        {"image": value, "prompt": "What?", "answer": "x"},
    ]
    return made(
        train=write(tmp_path / "rows" / "a.jsonl", rows), columns={"images": "image"}, **settings
    )


@pytest.mark.fault("D11", "D12", "D13", "D14")
@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("gone.png", None, "No such file"),
        ("empty.png", b"", "the file is empty"),
        ("text.png", b"hello", "is not an image of a supported format"),
        ("short.png", png(1)[:20], "is not an image of a supported format|damaged or cut off"),
        ("wide.png", "wide", "20000 x 1 pixels, at most 8192"),
        ("../secret.png", None, "lies outside"),
        ("http://127.0.0.1/a.png", None, "not fetched: set urls: true"),
        ("ftp://a/b.png", None, "media can't be read from ftp"),
    ],
)
def test_bad_media_are_found_before_anything_trains(tmp_path, name, content, why):
    if content == "wide":
        buffer = io.BytesIO()
        Image.new("1", (20_000, 1)).save(buffer, "PNG")
        content = buffer.getvalue()
    (tmp_path / "rows").mkdir()
    (tmp_path / "secret.png").write_bytes(png(1))
    if content is not None:
        (tmp_path / "rows" / name).write_bytes(content)
    with pytest.raises(DataError, match=why) as caught:
        tasks(broken(tmp_path, name), 1)
    assert "a.jsonl, line 2: " in str(caught.value)
    assert name in str(caught.value)
    # Without a look at all rows, rows before it are served, and it is refused when it is met (or,
    # its content, decoded).
    environment = broken(tmp_path, name, scan=False)
    assert said(tasks(environment, 1)[0])[0] == 1
    if content is None:
        with pytest.raises(DataError, match=why):
            tasks(environment, 2)


def test_media_settings_change_what_is_read(tmp_path):
    (tmp_path / "secret.png").write_bytes(png(4))
    found = tasks(broken(tmp_path, "secret.png", media_root=str(tmp_path)), 2)
    assert said(found[1])[0] == 4
    with pytest.raises(DataError, match="is 8 x 8 pixels, at most 4"):
        tasks(broken(tmp_path, url(1), media={"max_side": 4}), 1)
    address = tasks(broken(tmp_path, "http://127.0.0.1/a.png", media={"urls": True}), 2)[1]
    assert address.messages[0].content[0] == Part("image", "http://127.0.0.1/a.png")


@pytest.mark.parametrize("value", [7, {"path": None, "bytes": None}, [[1]]])
def test_a_value_that_is_no_image(tmp_path, value):
    with pytest.raises(DataError, match=r"line 2: column 'image', item 0 is .*must be a path"):
        tasks(broken(tmp_path, value), 1)


def test_a_part_of_an_unknown_type(tmp_path):
    rows = [{"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}]
    with pytest.raises(
        DataError, match=r"message 0, part 0 is an object of type 'hologram', must be .*image_url"
    ):
        tasks(made(train=write(tmp_path / "a.jsonl", rows)), 1)


@pytest.mark.needs("datasets")
def test_images_of_the_hub_stay_files(tmp_path):
    import datasets

    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    rows = [
        {
            "images": [{"bytes": png(i), "path": None}],
            "problem": f"<image>What {i}?",
            "answer": f"{i}",
        }
        for i in range(3)
    ]
    datasets.Dataset.from_list(rows, features=features).to_parquet(
        tmp_path / "hub" / "train.parquet"
    )
    environment = made(hub=str(tmp_path / "hub"), columns={"prompt": "problem"})
    assert [said(task) for task in tasks(environment, 3)] == [[i, f"What {i}?"] for i in range(3)]
