"""Adapter for games of TextWorld (arXiv:1806.11532), which `tw-make` generates.

A game is a file for an interpreter of text adventures (`.z8`, `.ulx`), with its description in JSON
beside it. The player reads what the game answers and writes one command a turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, field_validator

from ratchet.config.sections import EnvironmentConfig
from ratchet.data.files import find_files
from ratchet.environments.single_turn import Rows, is_held_out
from ratchet.errors import ConfigError, DataError, suggest_install
from ratchet.protocols import Step
from ratchet.rewards.user_threads import call_in_thread
from ratchet.types import Message, Split, Task

SUFFIXES = (".z8", ".ulx")
ARTICLE = re.compile(r"\b(the|an?)\s+")


class TextWorldConfig(EnvironmentConfig):
    """Games of TextWorld. The reward of a turn is its part of the game's score.

    The rewards of a game that is won sum to 1. Without `test`, a tenth of the games is held out.
    """

    builds: ClassVar[str] = "ratchet.environments.adapters.textworld:TextWorld"
    data_kinds: ClassVar[frozenset[str]] = frozenset({"rollouts"})

    train: tuple[str, ...] = ()
    """Games: files (.z8, .ulx), patterns, or directories of games."""
    test: tuple[str, ...] = ()
    """Games of the test split."""
    commands: bool = True
    """List the possible commands in each observation."""
    max_turns: int = Field(50, ge=1)
    """Number of commands after which a game ends."""

    @field_validator("train", "test", mode="before", json_schema_input_type=str | tuple[str, ...])
    @classmethod
    def _list_single_location(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    def list_data_files(self) -> list[Path]:
        """Return the games. A resumed run checks that they have not changed."""
        return _find_games((*self.train, *self.test))


class TextWorld(Rows):
    """An environment that plays games of TextWorld.

    A command that is not possible in the game's state never reaches the game's interpreter, which
    knows commands that write files; it uses up the turn.

    Raises ConfigError if the package textworld is missing.
    """

    name = "textworld"

    def __init__(self, config: TextWorldConfig) -> None:
        self.config = config
        self._textworld = _import_textworld()
        self._game: Any = None

    def __copy__(self) -> Self:
        copy = type(self).__new__(type(self))
        vars(copy).update({**vars(self), "_game": None})
        return copy

    @cached_property
    def _rows(self) -> dict[Split, list[Task]]:
        train = _find_games(self.config.train)
        test = _find_games(self.config.test)
        if not self.config.test:
            test = [path for path in train if is_held_out(path.stem)]
            train = [path for path in train if not is_held_out(path.stem)]
        return {
            "train": [_make_task(path, "train") for path in train],
            "test": [_make_task(path, "test") for path in test],
        }

    def rows(self, split: Split) -> Sequence[Task]:
        """Return a split's games. Raises DataError for a game without its description."""
        return self._rows[split]

    def demonstration(self, task: Task) -> Sequence[Message]:
        raise DataError("games of textworld have no demonstrations: train with rollouts")

    async def reset(self, task: Task) -> Sequence[Message]:
        await self.close()
        self._turns = self._score = 0
        self._game, self._state = await call_in_thread(self._start, task)
        return (self._observe(self._state, _describe_start(self._state)),)

    async def step(self, message: Message) -> Step:
        self._turns += 1
        before = self._state
        command = self._find_command(message.text)
        is_done = False
        if command is None:
            observation = self._observe(before, "That is not a possible command.")
        else:
            self._state, _, is_done = await call_in_thread(self._game.step, command)
            observation = self._observe(self._state, _clean(self._state.feedback))
        gain = self._state.score - self._score
        self._score = self._state.score
        is_done = is_done or self._turns >= self.config.max_turns
        return Step(
            messages=() if is_done else (observation,),
            reward=gain / self._state.max_score,
            done=is_done,
            state_key=f"{before.description}{before.inventory}",
            metrics={
                "won": float(is_done and self._state.won),
                "impossible_commands": float(command is None),
            },
        )

    async def close(self) -> None:
        game, self._game = self._game, None
        if game is not None:
            await call_in_thread(game.close)

    def _start(self, task: Task) -> tuple[Any, Any]:
        """Start a task's game, and return it and its first state."""
        infos = self._textworld.EnvInfos(
            admissible_commands=True,
            description=True,
            feedback=True,
            inventory=True,
            max_score=True,
            objective=True,
            score=True,
            won=True,
        )
        game = self._textworld.start(str(task.meta["game"]), infos)
        state = game.reset()
        if not state.max_score:
            raise DataError(f"{task.meta['game']} has no score: make it with a quest")
        return game, state

    def _find_command(self, text: str) -> str | None:
        """Return the possible command in the last line of a message; None if it has none."""
        lines = text.strip().splitlines()
        wanted = _normalise(lines[-1]) if lines else ""
        possible = self._state.admissible_commands
        return next((command for command in possible if _normalise(command) == wanted), None)

    def _observe(self, state: Any, text: str) -> Message:
        if self.config.commands:
            listed = "\n".join(sorted(state.admissible_commands))
            text = f"{text}\n\nPossible commands:\n{listed}"
        return Message("user", text)


def _normalise(command: str) -> str:
    """Return a command without articles, its case and a full stop."""
    words = ARTICLE.sub("", command.lower().strip(" .>")).split()
    return " ".join(words)


def _describe_start(state: Any) -> str:
    """Return the goal and the first room. The game's own first text is mostly its title."""
    return f"{state.objective}\n\n{_clean(state.description)}"


def _clean(text: str) -> str:
    """Return the game's text without its prompt, ">" and a line with the room and the score."""
    return re.sub(r"\n>[^\n]*\s*$", "", text).strip()


def _find_games(locations: Sequence[str]) -> list[Path]:
    """Return the games of files, patterns and directories. Raises DataError if one has none."""
    games: list[Path] = []
    for location in locations:
        path = Path(location)
        files = sorted(path.rglob("*")) if path.is_dir() else map(Path, find_files([path]))
        location_games = [file for file in files if file.suffix in SUFFIXES]
        if not location_games:
            raise DataError(f"{location} holds no game of TextWorld ({', '.join(SUFFIXES)})")
        games += location_games
    return games


def _make_task(path: Path, split: Split) -> Task:
    for file in (path, path.with_suffix(".json")):
        if not file.is_file():
            raise DataError(f"there is no file {file}: `tw-make` writes a game and its .json")
    return Task(
        f"textworld/{split}/{path.stem}",
        (Message("user", f"the game {path.stem}"),),
        environment="textworld",
        tag="textworld",
        meta={"game": str(path)},
    )


def _import_textworld() -> Any:
    try:
        import textworld
    except ImportError as error:
        raise ConfigError(
            f"environment.kind 'textworld' can't import textworld ({error}): "
            f"{suggest_install('textworld')}"
        ) from error
    return textworld
