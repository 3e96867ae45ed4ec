"""Pictures of shapes: what is asked of them is what is drawn, splits share no picture, and every
key changes something."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from pydantic import ValidationError

from ratchet.config.resolve import build, resolve
from ratchet.data.formats.media import MediaLimits, decode_image, fetch
from ratchet.environments.games.rendering import COLOURS, SHAPES, create_image, draw, draw_board
from ratchet.environments.toy.drawn_shapes import Shapes, Thing
from ratchet.rewards.answers.exact_match import ExactMatch, ExactMatchConfig
from ratchet.testing import check_environment


def made(**settings) -> Shapes:
    return build(resolve("environment", {"kind": "shapes", **settings}))


def tasks(environment, count=60, split="train", seed=0):
    return list(islice(environment.tasks(split, seed=seed), count))


def pixels(task):
    (picture, text) = task.messages[0].content
    assert (picture.type, text.type) == ("image", "text")
    source = fetch(picture.value, where=task.id, limits=MediaLimits())
    return np.asarray(decode_image(source, where=task.id, limits=MediaLimits()))


def question(task):
    return task.messages[0].text


def things(task):
    return [Thing(*thing) for thing in task.meta["things"]]


@pytest.mark.slow
def test_it_is_an_environment_as_every_other():
    check_environment(made())


@pytest.mark.medium
def test_the_splits_share_no_picture_and_a_seed_gives_the_same_tasks():
    environment = made(grid=2, things=[1, 1], jitter=0.0, size=16, questions=["count", "colour"])
    test = {task.messages[0].content[0].value for task in tasks(environment, 500, "test")}
    train = {task.messages[0].content[0].value for task in tasks(environment, 500)}
    assert test
    assert train
    assert not test & train
    assert tasks(made(), 20) == tasks(made(), 20)
    assert tasks(made(), 20) != tasks(made(), 20, seed=1)
    assert tasks(made(), 20, "test", seed=0) == tasks(made(), 20, "test", seed=1)


@pytest.mark.medium
def test_the_picture_shows_the_things_of_the_task():
    environment = made(
        size=48, jitter=1.0, things=[1, 6], shapes=["circle", "square", "triangle", "cross"]
    )
    for task in tasks(environment, 40):
        image, cell = pixels(task), 16
        assert image.shape == (48, 48, 3)
        by_cell = {(thing.row, thing.column): thing for thing in things(task)}
        assert len(by_cell) == len(things(task))
        for row in range(3):
            for column in range(3):
                part = image[
                    row * cell : (row + 1) * cell, column * cell : (column + 1) * cell
                ].reshape(-1, 3)
                inside = {tuple(map(int, colour)) for colour in part} - {(255, 255, 255)}
                thing = by_cell.get((row, column))
                assert inside == ({COLOURS[thing.colour]} if thing else set())


def test_answers_follow_from_the_picture():
    """Counted again from the things, by other code."""
    asked = Counter()
    for task in tasks(made(things=[2, 6]), 300):
        kind, text, seen = task.meta["question"], question(task), things(task)
        asked[kind] += 1
        words = text.rstrip("?").split()
        if kind == "count":
            *colour, noun = words[2:-2]
            matching = [
                t
                for t in seen
                if (not colour or t.colour == colour[0]) and noun in ("things", f"{t.shape}s")
            ]
            assert task.answer == str(len(matching))
        elif kind == "colour":
            assert [t.colour for t in seen if t.shape == words[-1]] == [task.answer]
        elif kind == "shape":
            assert [t.shape for t in seen if t.colour == words[-2]] == [task.answer]
        else:
            one, other = (
                next(t for t in seen if [t.colour, t.shape] == pair)
                for pair in (words[2:4], words[-2:])
            )
            side = {"left": one.column < other.column, "right": one.column > other.column}
            side |= {"above": one.row < other.row, "below": one.row > other.row}
            assert side[task.answer]
        assert task.answer in task.meta["answers"]
    assert all(asked[kind] > 40 for kind in ("count", "colour", "shape", "position"))


def test_the_demonstration_is_right_and_the_rejected_answer_wrong():
    environment, reward = made(), ExactMatch(ExactMatchConfig())
    for task in tasks(environment, 60):
        pair = environment.comparison(task)
        assert environment.demonstration(task) == pair.chosen
        assert reward.grade(pair.chosen[0].text, task) == 1.0
        assert reward.grade(pair.rejected[0].text, task) == 0.0
        assert pair.rejected[0].text in task.meta["answers"]


def test_a_task_is_small():
    assert all(len(task.messages[0].content[0].value) < 1500 for task in tasks(made(), 60))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("size", 64), ("grid", 4), ("things", [2, 3]), ("jitter", 0.0), ("shapes", ["cross", "square"]),
        ("colours", ["cyan", "grey"]), ("questions", ["count"]),
    ],
)  # fmt: skip
def test_every_key_changes_the_tasks(key, value):
    assert tasks(made(**{key: value}), 10) != tasks(made(), 10)


def test_keys_do_what_they_say():
    assert {len(things(task)) for task in tasks(made(things=[2, 3]))} == {2, 3}
    assert all(t.right == t.down == 0 for task in tasks(made(jitter=0.0)) for t in things(task))
    assert {t.shape for task in tasks(made(shapes=["cross", "circle"])) for t in things(task)} == {
        "cross",
        "circle",
    }
    assert {task.meta["question"] for task in tasks(made(questions=["shape", "count"]))} == {
        "shape",
        "count",
    }


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"things": [3, 2]}, "must be .fewest, most."),
        ({"grid": 2, "things": [1, 5]}, "don't fit into grid=2"),
        ({"size": 16, "grid": 4}, "set size to 32"),
        ({"things": [1, 1]}, "position, which needs two different things"),
        ({"colours": ["red"]}, "questions has colour, but colours has only one value"),
        ({"shapes": ["square", "square"]}, "has one twice"),
    ],
)
def test_what_can_not_be_asked_is_refused(settings, why):
    with pytest.raises(ValidationError, match=why):
        made(**settings)


# --- drawing


@pytest.mark.parametrize("shape", list(SHAPES))
def test_every_shape_stays_in_its_box_and_differs_from_the_others(shape):
    def drawn(name):
        image = create_image(24, 24)
        draw(image, (name, COLOURS["red"]), (4, 6, 17, 19))
        return np.asarray(image)

    rows, columns = np.nonzero((drawn(shape) != 255).any(axis=2))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (6, 19, 4, 17)
    assert all((drawn(shape) != drawn(other)).any() for other in SHAPES if other != shape)


def test_a_board_has_a_ground_and_marks_for_each_cell():
    image = np.asarray(draw_board([[((1, 2, 3), ()), ((9, 9, 9), [("12", (200, 0, 0))])]], 16))
    assert image.shape == (16, 32, 3)
    assert tuple(image[0, 0]) == (1, 2, 3)
    assert tuple(image[15, 15]) == (255, 255, 255)
    assert tuple(image[0, 16]) == (9, 9, 9)
    assert {tuple(map(int, c)) for c in image[:15, 16:31].reshape(-1, 3)} == {
        (9, 9, 9),
        (200, 0, 0),
    }


def test_shuffled_pictures_come_with_questions_of_others():
    own, other = tasks(made(), 40), tasks(made(shuffled=True), 40)
    assert [(question(task), task.answer, task.id) for task in own] == [
        (question(task), task.answer, task.id) for task in other
    ]
    same = sum(
        a.messages[0].content[0] == b.messages[0].content[0]
        for a, b in zip(own, other, strict=True)
    )
    assert same < 4
    assert other == tasks(made(shuffled=True), 40)
