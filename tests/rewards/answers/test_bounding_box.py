"""Boxes: measures against counted pixels, every unit, and answers without a box."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.config.resolve import build, resolve
from ratchet.data.formats.media import embed
from ratchet.environments.games.rendering import create_image
from ratchet.errors import DataError
from ratchet.rewards.answers.bounding_box import Box, compute_giou, compute_iou, extract_box
from ratchet.types import Message, Part, Task

SIDE = 12
corner = st.integers(0, SIDE - 1)


@st.composite
def boxes(draw):
    left, top = draw(corner), draw(corner)
    return Box(left, top, draw(st.integers(left + 1, SIDE)), draw(st.integers(top + 1, SIDE)))


def filled(box):
    grid = np.zeros((SIDE, SIDE), bool)
    grid[int(box.top) : int(box.bottom), int(box.left) : int(box.right)] = True
    return grid


@given(boxes(), boxes())
def test_measures_are_those_of_counted_pixels(a, b):
    one, other = filled(a), filled(b)
    shared, union = (one & other).sum(), (one | other).sum()
    rows, columns = np.nonzero(one | other)
    around = (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)
    assert compute_iou(a, b) == pytest.approx(shared / union)
    assert compute_giou(a, b) == pytest.approx(shared / union - (around - union) / around)
    assert compute_iou(a, b) == compute_iou(b, a)
    assert compute_giou(a, b) == compute_giou(b, a)
    assert -1 < compute_giou(a, b) <= compute_iou(a, b) <= 1
    assert compute_iou(a.scale(3, 7), b.scale(3, 7)) == pytest.approx(compute_iou(a, b))


def test_measures_by_hand():
    """Two squares of 2 that share a corner of 1: 1/7; the box around is 9, of which 2 are empty.
    Two of 1 with a gap of 1."""
    assert compute_iou(Box(0, 0, 2, 2), Box(1, 1, 3, 3)) == pytest.approx(1 / 7)
    assert compute_giou(Box(0, 0, 2, 2), Box(1, 1, 3, 3)) == pytest.approx(1 / 7 - 2 / 9)
    assert compute_giou(Box(0, 0, 1, 1), Box(2, 0, 3, 1)) == pytest.approx(-1 / 3)


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("[1, 2, 3, 4]", (1, 2, 3, 4)),
        ("It is at (1,2,3.5,4).", (1, 2, 3.5, 4)),
        ('{"bbox_2d": [1, 2, 3, 4], "label": "cat"}', (1, 2, 3, 4)),
        ("[0, 0, 9, 9] no, [1, 2, 3, 4]", (1, 2, 3, 4)),
        ("<answer>[1, 2, 3, 4]</answer> not [0, 0, 9, 9]", (1, 2, 3, 4)),
        ("[3, 2, 1, 4]", None),
        ("[1, 2, 3]", None),
        ("[1, 2, 3, 4, 5]", None),
        ("1, 2, 3, 4", None),
        ("", None),
        ("[" + "1," * 100_000, None),
    ],
)
def test_the_box_that_an_answer_gives(text, box):
    assert extract_box(text) == (None if box is None else Box(*box))


def task(answer, *, size=None, **meta):
    parts = (
        (Part("text", "Where?"),)
        if size is None
        else (embed(create_image(*size)), Part("text", "Where?"))
    )
    return Task("t", (Message("user", parts),), answer=answer, meta=meta)


def graded(text, about, **settings):
    return build(resolve("rewards", {"kind": "bounding_box", **settings})).grade(text, about)


def test_every_key_changes_the_reward():
    about = task("[0, 0, 2, 2]")
    assert graded("[1, 1, 3, 3]", about) == pytest.approx(1 / 7)
    assert graded("[1, 1, 3, 3]", about, measure="giou") == pytest.approx(1 / 7 - 2 / 9)
    assert graded("[1, 1, 3, 3]", about, threshold=0.1) == 1.0
    assert graded("[1, 1, 3, 3]", about, threshold=0.5) == 0.0
    assert graded("[1, 1, 3, 3]", task([1, 1, 2, 2]), corners="xywh") == 1.0
    assert graded("none", about) == 0.0
    assert graded("none", about, measure="giou") == -1.0
    assert graded("none", about, measure="giou", threshold=0.5) == 0.0


def test_units_of_the_picture_and_of_the_answer():
    """A box of a picture of 200 x 50 pixels, said in each unit."""
    said = {
        "pixels": "[20, 10, 60, 40]",
        "unit": "[0.1, 0.2, 0.3, 0.8]",
        "thousand": "[100, 200, 300, 800]",
    }
    for units, text in said.items():
        for known in (
            task("[20, 10, 60, 40]", size=(200, 50)),
            task("[20, 10, 60, 40]", width=200, height=50),
        ):
            assert graded(text, known, answer_units=units) == pytest.approx(1.0)
        assert graded(
            said["thousand"], task(text, size=(200, 50)), task_units=units, answer_units="thousand"
        ) == pytest.approx(1.0)
    with pytest.raises(DataError, match="neither a picture nor the columns width and height"):
        graded(said["unit"], task("[20, 10, 60, 40]"), answer_units="unit")


@pytest.mark.parametrize("answer", [None, "cat", "[1, 2]", [1, 2, "x", 4], "[3, 3, 3, 5]"])
def test_a_task_without_a_box_is_an_error(answer):
    with pytest.raises(DataError, match=r"^task t: its (answer|box)"):
        graded("[1, 1, 3, 3]", task(answer))


# --- what the rewards of text have for answers about pictures


def test_an_exact_answer_may_be_marked_and_its_case_ignored():
    def exact(text, answer, **settings):
        return build(resolve("rewards", {"kind": "exact_match", **settings})).grade(
            text, task(answer)
        )

    assert exact("<think>a dog?</think><answer> Cat </answer>", "Cat") == 0.0
    assert exact("<think>a dog?</think><answer> Cat </answer>", "Cat", marked=True) == 1.0
    assert exact("Cat", "Cat", marked=True) == 1.0
    assert exact("<answer>dog</answer> Cat", "Cat", marked=True) == 0.0
    assert exact("cat.", "Cat") == 0.0
    assert exact("cat.", "Cat", ignore_case=True) == 1.0
    assert exact(".", ".", ignore_case=True) == 1.0
    assert exact("", ".", ignore_case=True) == 0.0
    assert exact("<answer>.</answer>", "...", marked=True, ignore_case=True) == 0.0


def test_a_number_may_be_near():
    def numeric(text, answer, **settings):
        return build(resolve("rewards", {"kind": "numeric_answer", **settings})).grade(
            text, task(answer)
        )

    assert numeric("about 3.15", "3.14") == 0.0
    assert numeric("about 3.15", "3.14", tolerance=0.01) == 1.0
    assert numeric("about 0.15", "0.14", tolerance=0.01) == 1.0
    assert numeric("about 0.16", "0.14", tolerance=0.01) == 0.0
    assert numeric("3.14", "3.14") == 1.0
    assert numeric("none", "3.14", tolerance=9.0) == 0.0
