"""Ask questions about a drawn picture of shapes on a grid.

Answers are exact, because they are computed from the list of things in the picture. The picture is
drawn when the task is made, and is part of its message.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, Field, model_validator

from ratchet.data.formats.media import embed
from ratchet.environments.base import ALL_SOURCES, EnvironmentConfig
from ratchet.environments.games.rendering import COLOURS, blank, draw
from ratchet.environments.single_turn import Problem, Procedural
from ratchet.environments.wrong_answers import OneRightAnswer
from ratchet.types import Comparison, Message, Part, Task


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError(f"{', '.join(names)} repeat one: each is listed once")
    return names


Shape = Literal["circle", "square", "triangle", "cross"]


Colour = Literal["red", "green", "blue", "yellow", "purple", "orange", "cyan", "grey"]


Question = Literal["count", "colour", "shape", "position"]


class ShapesConfig(EnvironmentConfig):
    """Questions about a drawn picture of shapes: their number, colour, shape or relative position.

    A task like CLEVR (arXiv:1612.06890) without a download. The splits share no picture.
    """

    builds: ClassVar[str] = "ratchet.environments.toy.drawn_shapes:Shapes"
    default_reward: ClassVar[str] = "exact_match"
    gives: ClassVar[frozenset[str]] = ALL_SOURCES
    needs_media: ClassVar[bool] = True

    size: int = Field(48, ge=16, le=1024, description="Pixels a side of the picture.")
    grid: int = Field(
        3,
        ge=2,
        le=8,
        description="Cells a side that it is divided into; each holds one thing at most.",
    )
    things: tuple[int, int] = Field((1, 4), description="Fewest and most things in a picture.")
    jitter: float = Field(
        0.5,
        ge=0,
        le=1,
        description="How far things stand from their cell's middle; 1: up to its border.",
    )
    shapes: Annotated[tuple[Shape, ...], AfterValidator(_distinct)] = Field(
        ("circle", "square", "triangle"), min_length=1, description="Drawn with equal chances."
    )
    colours: Annotated[tuple[Colour, ...], AfterValidator(_distinct)] = Field(
        ("red", "green", "blue", "yellow"), min_length=1, description="Drawn with equal chances."
    )
    questions: Annotated[tuple[Question, ...], AfterValidator(_distinct)] = Field(
        ("count", "colour", "shape", "position"),
        min_length=1,
        description="Kinds of question, with equal chances.",
    )

    shuffled: bool = Field(
        False,
        description="Each question comes with another picture of its kind: what a model reaches "
        "that does not look.",
    )

    @model_validator(mode="after")
    def _can_be_asked(self) -> ShapesConfig:
        fewest, largest = self.things
        if not 1 <= fewest <= largest:
            raise ValueError(f"things={[fewest, largest]} must be [fewest, most], with at least 1")
        if largest > self.grid**2:
            raise ValueError(
                f"things={[fewest, largest]} don't fit into grid={self.grid}: {self.grid**2} at "
                "most"
            )
        if self.size < 8 * self.grid:
            raise ValueError(
                f"size={self.size} gives a cell of grid={self.grid} less than 8 pixels: set size "
                f"to {8 * self.grid}"
            )
        if "position" in self.questions and (
            largest < 2 or len(self.shapes) * len(self.colours) < 2
        ):
            raise ValueError(
                "questions has position, which needs two things that differ: raise things, or "
                "remove it"
            )
        for kind, values in (("colour", self.colours), ("shape", self.shapes)):
            if kind in self.questions and len(values) < 2:
                raise ValueError(
                    f"questions has {kind}, and there is only one of them: name more in {kind}s, "
                    "or remove it"
                )
        return self


FILLED = 0.6  # size of a thing as a share of its cell's side


class Thing(NamedTuple):
    """A shape in the picture.

    row, column: position of its cell.
    right, down: offset in pixels from the cell's middle.
    """

    shape: str
    colour: str
    row: int
    column: int
    right: int
    down: int

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


class ShapeQuestion(NamedTuple):
    """A question and its answer.

    answers: all possible answers, the right one included.
    """

    question: str
    answer: str
    answers: Sequence[str]


class Shapes(OneRightAnswer, Procedural):
    name = "shapes"

    def __init__(self, config: ShapesConfig) -> None:
        self.config = config
        self.questions: Mapping[
            str, Callable[[Sequence[Thing], random.Random], ShapeQuestion | None]
        ] = {
            "count": self._count,
            "colour": self._colour,
            "shape": self._shape,
            "position": self._position,
        }

    def sample(self, rng: random.Random) -> Problem | None:
        """Return a problem, or None if the drawn picture allows no question of the drawn kind."""
        kind = rng.choice(self.config.questions)
        things = self._things(rng)
        asked = self.questions[kind](things, rng)
        if asked is None:
            return None
        listed = [list(thing) for thing in things]
        meta = {"question": kind, "answers": list(asked.answers), "things": listed}
        return Problem(asked.question, asked.answer, meta, key=json.dumps(sorted(listed)))

    def messages(self, problem: Problem) -> tuple[Message, ...]:
        things = [Thing(*thing) for thing in problem.meta["things"]]
        if self.config.shuffled:
            things = self._things(random.Random(f"another/{problem.identity}"))
        return (Message("user", (self.picture(things), Part("text", problem.prompt))),)

    def picture(self, things: Sequence[Thing]) -> Part:
        size, cell = self.config.size, self.config.size / self.config.grid
        image = blank(size, size)
        half = int(cell * FILLED) // 2
        for thing in things:
            x, y = (
                int((thing.column + 0.5) * cell) + thing.right,
                int((thing.row + 0.5) * cell) + thing.down,
            )
            draw(
                image,
                (thing.shape, COLOURS[thing.colour]),
                (x - half, y - half, x + half - 1, y + half - 1),
            )
        return embed(image)

    def comparison(self, task: Task) -> Comparison:
        """Return the right answer, and a wrong one that is possible for the same question."""
        others = [answer for answer in task.meta["answers"] if answer != task.answer]
        wrong = random.Random(f"mistake/{task.id}").choice(others)
        return Comparison(self._says(str(task.answer)), self._says(wrong), rewards=(1.0, 0.0))

    def _things(self, rng: random.Random) -> list[Thing]:
        config = self.config
        cells = rng.sample(range(config.grid**2), rng.randint(*config.things))
        room = int(config.jitter * (1 - FILLED) / 2 * config.size / config.grid)
        return [
            Thing(
                rng.choice(config.shapes),
                rng.choice(config.colours),
                *divmod(cell, config.grid),
                *_moved(rng, room),
            )
            for cell in cells
        ]

    # --- questions

    def _count(self, things: Sequence[Thing], rng: random.Random) -> ShapeQuestion:
        colour, shape = (
            rng.choice((None, *self.config.colours)),
            rng.choice((None, *self.config.shapes)),
        )
        number = sum(
            colour in (None, thing.colour) and shape in (None, thing.shape) for thing in things
        )
        what = f"{colour or ''} {f'{shape}s' if shape else 'things'}".strip()
        return ShapeQuestion(
            f"How many {what} are there?",
            str(number),
            [str(n) for n in range(self.config.things[1] + 1)],
        )

    def _colour(self, things: Sequence[Thing], rng: random.Random) -> ShapeQuestion | None:
        thing = _only(things, "shape", rng)
        return thing and ShapeQuestion(
            f"What colour is the {thing.shape}?", thing.colour, self.config.colours
        )

    def _shape(self, things: Sequence[Thing], rng: random.Random) -> ShapeQuestion | None:
        thing = _only(things, "colour", rng)
        return thing and ShapeQuestion(
            f"What shape is the {thing.colour} thing?", thing.shape, self.config.shapes
        )

    def _position(self, things: Sequence[Thing], rng: random.Random) -> ShapeQuestion | None:
        """Return a question about the relative position of two things with unique names.

        None if there are no two, or if they are in the same column (or row).
        """
        names = Counter(thing.name for thing in things)
        named = [thing for thing in things if names[thing.name] == 1]
        if len(named) < 2:
            return None
        one, other = rng.sample(named, 2)
        across = rng.random() < 0.5
        place, its, words = (
            (one.column, other.column, ("left", "right"))
            if across
            else (one.row, other.row, ("above", "below"))
        )
        if place == its:
            return None
        asked = (
            f"Is the {one.name} {words[0]} or {words[1]}{' of' if across else ''} the {other.name}?"
        )
        return ShapeQuestion(asked, words[place > its], words)


def _moved(rng: random.Random, room: int) -> tuple[int, int]:
    return rng.randint(-room, room), rng.randint(-room, room)


def _only(things: Sequence[Thing], what: str, rng: random.Random) -> Thing | None:
    """Return a random thing whose value of attribute `what` is unique; None if there is none."""
    values = Counter(getattr(thing, what) for thing in things)
    alone = [thing for thing in things if values[getattr(thing, what)] == 1]
    return rng.choice(alone) if alone else None
