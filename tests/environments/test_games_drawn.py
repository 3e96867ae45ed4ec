"""Games whose states are shown as pictures: the same games, the same tasks and splits, and what a
picture shows."""

import asyncio
from itertools import islice

import numpy as np
import pytest

from ratchet.config.resolve import build, resolve
from ratchet.data.formats.media import MediaLimits, decode_image, fetch
from ratchet.environments.games.frozen_lake import SNOW, WATER
from ratchet.environments.games.game import BoardGame
from ratchet.environments.games.rendering import COLOURS
from ratchet.environments.games.sokoban import FLOOR, STONE
from ratchet.testing import check_environment
from ratchet.types import Message, Task

GAMES = ("sokoban", "frozen_lake", "sliding_puzzle")


def made(kind, **settings) -> BoardGame:
    return build(resolve("environment", {"kind": kind, **settings}))


def tasks(game, split="train", count=12):
    return list(islice(game.tasks(split, seed=0), count))


def pixels(part):
    source = fetch(part.value, where="here", limits=MediaLimits())
    return np.asarray(decode_image(source, where="here", limits=MediaLimits()))


def colours(image, row, column, cell):
    """Of one cell of a board."""
    part = image[row * cell : (row + 1) * cell - 1, column * cell : (column + 1) * cell - 1]
    return {tuple(map(int, colour)) for colour in part.reshape(-1, 3)}


def play(game, task, says):
    async def played():
        await game.reset(task)
        return [await game.step(Message("assistant", text)) for text in says]

    return asyncio.run(played())


@pytest.mark.slow
@pytest.mark.parametrize("observation", [pytest.param("image", marks=pytest.mark.slow), "both"])
@pytest.mark.parametrize("kind", GAMES)
def test_each_keeps_the_contract_of_environments(kind, observation):
    check_environment(made(kind, observation=observation), n=40)


@pytest.mark.medium
@pytest.mark.parametrize("style", ["words", "compact"])
@pytest.mark.parametrize("kind", GAMES)
def test_the_same_games_in_the_same_splits_however_they_are_shown(kind, style):
    text, image, both = (
        made(kind, observation=shown, style=style) for shown in ("text", "image", "both")
    )
    for split in ("train", "test"):
        for seen, drawn, double in zip(
            *(tasks(game, split) for game in (text, image, both)), strict=True
        ):
            assert (seen.id, seen.meta, seen.answer) == (drawn.id, drawn.meta, drawn.answer)
            assert isinstance(seen.messages[0].content, str)
            pictured, *said = drawn.messages[0].content
            assert pictured.type == "image"
            assert [part.type for part in said] == (["text"] if style == "words" else [])
            assert double.messages[0].content[0] == pictured
            assert double.messages[0].text == seen.messages[0].text
            assert all(sign not in drawn.messages[0].text for sign in "@$#_")


@pytest.mark.parametrize("kind", GAMES)
def test_a_whole_game_in_pictures_is_won_and_plays_again_the_same(kind):
    game = made(kind, observation="image")
    for task in tasks(game, count=4):
        said = game.demonstration(task)
        moves = [message.text for message in said if message.role == "assistant"]
        told = [message for message in said if message.role == "user"]
        steps = play(game, task, moves)
        assert [message for step in steps for message in step.messages] == told
        assert all(message.content[0].type == "image" and message.text == "" for message in told)
        assert steps[-1].reward == 1.0
        assert play(game, task, moves) == steps
        assert [s.state_key for s in steps] == [s.state_key for s in play(made(kind), task, moves)]


def test_an_illegal_move_is_said_beside_the_picture():
    game = made("sokoban", observation="image")
    (task,) = tasks(game, count=1)
    (step,) = play(game, task, ["nonsense"])
    picture, complaint = step.messages[0].content
    assert complaint.value == "That is no legal move.\n"
    assert picture == task.messages[0].content[0]


ROOM = "#######@ $.## *  ##    ##    #######"


def test_a_room_by_hand():
    """A box on a goal shows both; the player stands where the text has @."""
    game = made("sokoban", observation="image", cell_px=12)
    image = pixels(game.picture(game.start(Task("x", (), meta={"room": ROOM}))))
    assert image.shape == (72, 72, 3)
    assert colours(image, 0, 0, 12) == {STONE}
    assert colours(image, 3, 3, 12) == {FLOOR}
    assert colours(image, 1, 1, 12) == {FLOOR, COLOURS["blue"]}
    assert colours(image, 1, 3, 12) == {FLOOR, COLOURS["orange"]}
    assert colours(image, 1, 4, 12) == {FLOOR, COLOURS["red"]}
    assert colours(image, 2, 2, 12) >= {COLOURS["orange"], COLOURS["red"]}


def test_a_lake_by_hand():
    game = made("frozen_lake", observation="image", size=2, cell_px=20)
    image = pixels(game.picture((".OG.", 0)))
    assert image.shape == (40, 40, 3)
    assert colours(image, 0, 0, 20) == {SNOW, COLOURS["red"]}
    assert colours(image, 0, 1, 20) == {SNOW, WATER}
    assert colours(image, 1, 0, 20) == {SNOW, COLOURS["green"]}
    assert colours(image, 1, 1, 20) == {SNOW}


def test_tiles_show_different_numbers():
    game = made("sliding_puzzle", observation="image", size=4, cell_px=24)
    image = pixels(game.picture((*range(1, 16), 0)))
    seen = {
        image[r * 24 : r * 24 + 23, c * 24 : c * 24 + 23].tobytes()
        for r in range(4)
        for c in range(4)
    }
    assert len(seen) == 16
    assert colours(image, 3, 3, 24) == {COLOURS["grey"]}
