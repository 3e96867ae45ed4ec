"""Guess a number. After each guess, the environment answers "higher" or "lower"."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import ClassVar, NamedTuple

from pydantic import Field

from ratchet.environments.games.game import Game, GameConfig
from ratchet.environments.single_turn import Problem
from ratchet.types import Task


class NumberGuessingConfig(GameConfig):
    """Guess a number by "higher" and "lower"."""

    builds: ClassVar[str] = "ratchet.environments.toy.number_guessing:NumberGuessing"

    max_moves: int = Field(6, ge=1, le=100)
    """Maximum number of guesses."""
    numbers: int = Field(50, ge=2, le=1_000_000)
    """Number of possible numbers."""
    max_low: int = Field(999, ge=9, le=1_000_000)
    """Largest lower end of the range; each task draws its lower end from 0 to this."""

    def check_keys(self) -> None:
        if 2**self.max_moves <= self.numbers:
            raise ValueError(
                f"max_moves={self.max_moves} guesses tell at most {2**self.max_moves - 1} numbers "
                f"apart, and there are numbers={self.numbers}: raise max_moves, or lower numbers"
            )


class GuessingState(NamedTuple):
    """The state of a game."""

    low: int
    """The smallest number that the hints so far allow."""
    high: int
    """The largest number that the hints so far allow."""
    secret: int
    """The number to find."""
    hint: str = ""
    """"<" if the number is lower than the last guess, ">" if it is higher, "=" if the guess was
    correct, "" at the start."""


HINTS = {"<": "lower", ">": "higher"}


class NumberGuessing(Game[GuessingState]):
    """A game in which the model finds a number from "higher" and "lower"."""

    name = "number_guessing"

    def __init__(self, config: NumberGuessingConfig) -> None:
        super().__init__(config)
        self.config = config

    def sample(self, rng: random.Random) -> Problem:
        low = rng.randint(0, self.config.max_low)
        state = GuessingState(
            low, low + self.config.numbers - 1, rng.randrange(low, low + self.config.numbers)
        )
        return Problem(
            self.prompt(state), str(state.secret), {"low": state.low, "high": state.high}
        )

    def start(self, task: Task) -> GuessingState:
        return GuessingState(task.meta["low"], task.meta["high"], int(task.answer))

    def read_move(self, text: str) -> str:
        numbers = re.findall(r"\d+", text)
        return numbers[-1] if numbers else ""

    def move(self, state: GuessingState, move: str, rng: random.Random) -> GuessingState | None:
        """Return the state after a guess, or None if the message has no valid number.

        A guess outside low .. high is legal: it gets a hint and uses up a turn.
        """
        if not 0 < len(move) <= 9:  # empty, or longer than any number in a game
            return None
        guess = int(move)
        if guess == state.secret:
            return state._replace(hint="=")
        if guess > state.secret:
            return state._replace(high=min(state.high, guess - 1), hint="<")
        return state._replace(low=max(state.low, guess + 1), hint=">")

    def has_won(self, state: GuessingState) -> bool | None:
        return True if state.hint == "=" else None

    def show(self, state: GuessingState) -> str:
        if not state.hint:
            return f"{state.low}-{state.high}"
        return HINTS[state.hint] if self.uses_word_style else state.hint

    def key(self, state: GuessingState) -> str:
        return f"{state.low}-{state.high}"

    def player(self, task: Task) -> Callable[[GuessingState], str]:
        """Return a player that guesses the middle of the remaining range."""
        return lambda state: str((state.low + state.high) // 2)

    def rules(self) -> str:
        return (
            "Guess my number, which lies within the range below, its ends included. After each of "
            "your "
            f"{self.max_moves} guesses I say whether my number is higher or lower. End each "
            "message with your guess."
        )
