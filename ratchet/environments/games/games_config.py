"""Configuration of the games. Free of torch and of their code."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from ratchet.environments.config import EnvironmentConfig


class GameConfig(EnvironmentConfig):
    """Their steps give the reward: 1 for the move that wins, else 0."""

    max_moves: int = Field(
        20,
        ge=1,
        le=10_000,
        description="Messages of the player, those that are no legal move included.",
    )
    style: Literal["words", "compact"] = Field(
        "words",
        description="words: rules, then whole words; compact: bare boards and single letters, for "
        "a model from scratch.",
    )


class BoardConfig(GameConfig):
    """The keys of games whose state can be drawn."""

    observation: Literal["text", "image", "both"] = Field(
        "text",
        description="How the player sees each state: as text, as a picture, or the picture and the "
        "text.",
    )
    cell_px: int = Field(16, ge=6, le=256, description="Pixels a side of a cell in the picture.")

    @property
    def needs_media(self) -> bool:
        return self.observation != "text"


class SlidingPuzzleConfig(BoardConfig):
    """Slide numbered tiles into order."""

    builds: ClassVar[str] = "ratchet.environments.games.sliding_puzzle:SlidingPuzzle"

    size: int = Field(3, ge=2, le=6, description="Tiles a side, the gap included.")
    shuffle_moves: int = Field(
        10, ge=1, le=1000, description="The board is at most so many moves from being solved."
    )
    min_shuffle_moves: int = Field(
        1, ge=1, description="And made by at least so many, which may lead to a nearer one."
    )

    @model_validator(mode="after")
    def _can_be_solved(self) -> SlidingPuzzleConfig:
        if self.min_shuffle_moves > self.shuffle_moves:
            raise ValueError(
                f"min_shuffle_moves={self.min_shuffle_moves} is more than "
                f"shuffle_moves={self.shuffle_moves}: lower it"
            )
        if self.max_moves < self.shuffle_moves:
            raise ValueError(
                f"max_moves={self.max_moves} can't undo shuffle_moves={self.shuffle_moves}: set "
                "max_moves to that or more"
            )
        return self


class FrozenLakeConfig(BoardConfig):
    """Walk over the ice to the goal, around the holes."""

    builds: ClassVar[str] = "ratchet.environments.games.frozen_lake:FrozenLake"

    size: int = Field(4, ge=2, le=20, description="Cells a side.")
    holes: float = Field(
        0.25, ge=0, lt=1, description="Chance of each cell to be a hole. There is always a way."
    )
    slip: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Chance of a step to go to a side instead of ahead (the usual game: 2/3).",
    )
    min_distance: int = Field(
        2, ge=1, description="Steps from the start to the goal, at the least."
    )

    @model_validator(mode="after")
    def _can_be_reached(self) -> FrozenLakeConfig:
        if self.max_moves < self.min_distance:
            raise ValueError(
                f"max_moves={self.max_moves} is less than min_distance={self.min_distance}: raise "
                "it"
            )
        return self


class SokobanConfig(BoardConfig):
    """Push boxes onto goals."""

    builds: ClassVar[str] = "ratchet.environments.games.sokoban:Sokoban"

    max_moves: int = Field(
        30,
        ge=1,
        le=10_000,
        description="Messages of the player, those that are no legal move included.",
    )
    size: int = Field(4, ge=3, le=10, description="Cells a side, without the walls around.")
    boxes: int = Field(1, ge=1, le=5, description="Boxes, and goals.")
    walls: float = Field(0.1, ge=0, le=0.5, description="Chance of each inner cell to be a wall.")
    pulls: int = Field(
        3, ge=1, le=50, description="Pushes by which a room can be solved; fewer may do."
    )


class NumberGuessingConfig(GameConfig):
    """Guess a number by "higher" and "lower"."""

    builds: ClassVar[str] = "ratchet.environments.toy.number_guessing:NumberGuessing"

    max_moves: int = Field(6, ge=1, le=100, description="Guesses.")
    numbers: int = Field(50, ge=2, le=1_000_000, description="How many numbers it may be.")
    max_low: int = Field(
        999,
        ge=9,
        le=1_000_000,
        description="The lowest of them lies between 0 and this, by the task.",
    )

    @model_validator(mode="after")
    def _can_be_found(self) -> NumberGuessingConfig:
        if 2**self.max_moves <= self.numbers:
            raise ValueError(
                f"max_moves={self.max_moves} guesses tell at most {2**self.max_moves - 1} numbers "
                "apart, and there are "
                f"numbers={self.numbers}: raise the one or lower the other"
            )
        return self
