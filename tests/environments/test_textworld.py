"""Games of TextWorld: its own solution wins, and only commands of the game reach the interpreter."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from environments import stand_in_textworld
from support.programs import run_program

from ratchet.config.resolve import build, resolve
from ratchet.errors import ConfigError, DataError
from ratchet.types import Message

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / ".venv" / "textworld"


@pytest.mark.slow
@pytest.mark.needs(str(PACKAGE / "installed"))
def test_games_that_textworld_makes_are_played_and_train(tmp_path):
    play = Path(__file__).with_name("textworld_play.py")
    environment = {**os.environ, "PYTHONPATH": f"{PACKAGE}:{ROOT}", "OMP_NUM_THREADS": "1"}
    run_program(sys.executable, play, tmp_path, cwd=tmp_path, env=environment)
    result = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert "Possible commands:\n" in result["start"]
    assert sum(result["rewards"]) == pytest.approx(1.0)
    assert result["ends"] == [False] * (len(result["ends"]) - 1) + [True]
    assert result["won"] == 1.0
    assert result["keys"] > 1
    assert result["impossible"] == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert result["odd rewards"] == [0.0] * 5
    assert result["status"] == 0


@pytest.fixture
def environment(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "textworld", stand_in_textworld)
    for name in ("a.z8", "a.json", "held/unscored.z8", "held/unscored.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    section = {"kind": "textworld", "train": [f"{tmp_path}/*.z8"], "test": f"{tmp_path}/held"}
    return lambda **keys: build(resolve("environment", {**section, **keys}))


def play(environment, task, *commands):
    async def attempt():
        first = await environment.reset(task)
        steps = [await environment.step(Message("assistant", command)) for command in commands]
        await environment.close()
        return first[0].text, steps

    return asyncio.run(attempt())


def test_a_turn_earns_its_part_of_the_score(environment):
    game = environment()
    (task,) = game.rows("train")
    start, steps = play(game, task, "I open it.\n> Open the BOX.", "take a key")
    assert start == (
        "Take the key out of the box.\n\n-= Attic =-\nStage 0.\n\nPossible commands:\nlook\nopen box"
    )
    assert steps[0].messages[0].text == "You open box.\n\nPossible commands:\nlook\ntake key"
    assert [(step.reward, step.done, step.metrics["won"]) for step in steps] == [
        (0.5, False, 0.0),
        (0.5, True, 1.0),
    ]


def test_only_possible_commands_reach_the_interpreter(environment):
    game = environment(commands=False, max_turns=3)
    (task,) = game.rows("train")
    start, steps = play(game, task, "save", "look. open box", "")
    assert "Possible" not in start
    assert steps[0].messages[0].text == "That is not a possible command."
    assert [step.metrics["impossible_commands"] for step in steps] == [1.0] * 3
    assert [(step.reward, step.done) for step in steps] == [(0.0, False), (0.0, False), (0.0, True)]


def test_a_game_without_a_score_or_a_description_is_refused(environment, tmp_path):
    game = environment()
    (task,) = game.rows("test")
    with pytest.raises(DataError, match=r"unscored\.z8 has no score"):
        play(game, task)
    (tmp_path / "a.json").unlink()
    with pytest.raises(DataError, match=r"there is no file .*a.json: `tw-make` writes"):
        environment().rows("train")


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "textworld", None)
    with pytest.raises(ConfigError, match=r"can't import textworld.*ratchet-rl\[textworld\]"):
        build(resolve("environment", {"kind": "textworld", "train": ["games"]}))


def test_a_directory_without_games_is_refused(tmp_path):
    section = resolve("environment", {"kind": "textworld", "train": [str(tmp_path)]})
    with pytest.raises(DataError, match=r"holds no game of TextWorld \(.z8, .ulx\)"):
        section.list_data_files()
