"""An environment of questions about drawn pictures of shapes on a grid.

The answers are computed from the list of things in the picture. The picture is drawn when the task
is created, and is part of its message.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, Field

from ratchet.config.sections import ALL_SOURCES, EnvironmentConfig
from ratchet.data.formats.media import embed
from ratchet.environments.games.rendering import COLOURS, create_image, draw
from ratchet.environments.single_turn import Problem, Procedural
from ratchet.environments.wrong_answers import SingleAnswer
from ratchet.types import Comparison, Message, Part, Task


def _check_distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError(f"{', '.join(names)} has one twice: list each once")
    return names


Shape = Literal["circle", "square", "triangle", "cross"]


Colour = Literal["red", "green", "blue", "yellow", "purple", "orange", "cyan", "grey"]


Question = Literal["count", "colour", "shape", "position"]


class ShapesConfig(EnvironmentConfig):
    """Questions about a drawn picture of shapes: their number, colour, shape or relative position.

    It is like CLEVR (arXiv:1612.06890) but needs no download. The splits share no picture.
    """

    builds: ClassVar[str] = "ratchet.environments.toy.drawn_shapes:Shapes"
    default_reward: ClassVar[str] = "exact_match"
    data_kinds: ClassVar[frozenset[str]] = ALL_SOURCES
    needs_media: ClassVar[bool] = True

    size: int = Field(48, ge=16, le=1024)
    """Side of the picture, in pixels."""
    grid: int = Field(3, ge=2, le=8)
    """Number of cells on a side of the picture; each has at most one thing."""
    things: tuple[int, int] = (1, 4)
    """Smallest and largest number of things in a picture."""
    jitter: float = Field(0.5, ge=0, le=1)
    """Maximum distance of things from the centre of their cell, as a share of the distance at which
    they touch its border."""
    shapes: Annotated[tuple[Shape, ...], AfterValidator(_check_distinct)] = Field(
        ("circle", "square", "triangle"), min_length=1
    )
    """Shapes, drawn with equal probabilities."""
    colours: Annotated[tuple[Colour, ...], AfterValidator(_check_distinct)] = Field(
        ("red", "green", "blue", "yellow"), min_length=1
    )
    """Colours, drawn with equal probabilities."""
    questions: Annotated[tuple[Question, ...], AfterValidator(_check_distinct)] = Field(
        ("count", "colour", "shape", "position"), min_length=1
    )
    """Kinds of questions, drawn with equal probabilities."""

    shuffled: bool = False
    """Show another random picture with each question, to measure a model's accuracy without
    looking."""

    def check_keys(self) -> None:
        fewest, most = self.things
        if not 1 <= fewest <= most:
            raise ValueError(f"things={[fewest, most]} must be [fewest, most], with at least 1")
        if most > self.grid**2:
            raise ValueError(
                f"things={[fewest, most]} don't fit into grid={self.grid}: set the second to "
                f"at most {self.grid**2}"
            )
        if self.size < 8 * self.grid:
            raise ValueError(
                f"size={self.size} gives a cell of grid={self.grid} less than 8 pixels: set size "
                f"to {8 * self.grid}"
            )
        if "position" in self.questions and (most < 2 or len(self.shapes) * len(self.colours) < 2):
            raise ValueError(
                "questions has position, which needs two different things: raise things, add "
                "shapes or colours, or remove position"
            )
        for kind, values in (("colour", self.colours), ("shape", self.shapes)):
            if kind in self.questions and len(values) < 2:
                raise ValueError(
                    f"questions has {kind}, but {kind}s has only one value: add one to {kind}s, or "
                    f"remove {kind} from questions"
                )


FILLED_SHARE = 0.6  # size of a thing as a share of its cell's side


class Thing(NamedTuple):
    """A shape in the picture."""

    shape: str
    colour: str
    row: int
    """Row of its cell."""
    column: int
    """Column of its cell."""
    right: int
    """Offset to the right from the centre of the cell, in pixels."""
    down: int
    """Offset down from the centre of the cell, in pixels."""

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


class ShapeQuestion(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str
    answers: Sequence[str]
    """All possible answers, including the correct one."""


class Shapes(SingleAnswer, Procedural):
    """An environment of questions about drawn pictures."""

    name = "shapes"

    def __init__(self, config: ShapesConfig) -> None:
        self.config = config
        self.questions: Mapping[
            str, Callable[[Sequence[Thing], random.Random], ShapeQuestion | None]
        ] = {
            "count": self._ask_count,
            "colour": self._ask_colour,
            "shape": self._ask_shape,
            "position": self._ask_position,
        }

    def sample(self, rng: random.Random) -> Problem | None:
        """Return a problem, or None if the drawn picture allows no question of the drawn kind."""
        kind = rng.choice(self.config.questions)
        things = self._draw_things(rng)
        question = self.questions[kind](things, rng)
        if question is None:
            return None
        thing_lists = [list(thing) for thing in things]
        meta = {"question": kind, "answers": list(question.answers), "things": thing_lists}
        key = json.dumps(sorted(thing_lists))
        return Problem(question.question, question.answer, meta, key=key)

    def messages(self, problem: Problem) -> tuple[Message, ...]:
        things = [Thing(*thing) for thing in problem.meta["things"]]
        if self.config.shuffled:
            things = self._draw_things(random.Random(f"another/{problem.identity}"))
        return (Message("user", (self.picture(things), Part("text", problem.prompt))),)

    def picture(self, things: Sequence[Thing]) -> Part:
        size, cell = self.config.size, self.config.size / self.config.grid
        image = create_image(size, size)
        half = int(cell * FILLED_SHARE) // 2
        for thing in things:
            x = int((thing.column + 0.5) * cell) + thing.right
            y = int((thing.row + 0.5) * cell) + thing.down
            draw(
                image,
                (thing.shape, COLOURS[thing.colour]),
                (x - half, y - half, x + half - 1, y + half - 1),
            )
        return embed(image)

    def comparison(self, task: Task) -> Comparison:
        """Return the correct answer, and a wrong one that is possible for the same question."""
        wrong_answers = [answer for answer in task.meta["answers"] if answer != task.answer]
        wrong = random.Random(f"mistake/{task.id}").choice(wrong_answers)
        return Comparison(
            self._to_messages(str(task.answer)), self._to_messages(wrong), rewards=(1.0, 0.0)
        )

    def _draw_things(self, rng: random.Random) -> list[Thing]:
        """Return a random number of random things, in distinct cells."""
        config = self.config
        cells = rng.sample(range(config.grid**2), rng.randint(*config.things))
        max_offset = int(config.jitter * (1 - FILLED_SHARE) / 2 * config.size / config.grid)
        return [
            Thing(
                rng.choice(config.shapes),
                rng.choice(config.colours),
                *divmod(cell, config.grid),
                *_random_offset(rng, max_offset),
            )
            for cell in cells
        ]

    # --- questions

    def _ask_count(self, things: Sequence[Thing], rng: random.Random) -> ShapeQuestion:
        colour = rng.choice((None, *self.config.colours))
        shape = rng.choice((None, *self.config.shapes))
        number = sum(
            colour in (None, thing.colour) and shape in (None, thing.shape) for thing in things
        )
        noun = f"{colour or ''} {f'{shape}s' if shape else 'things'}".strip()
        return ShapeQuestion(
            f"How many {noun} are there?",
            str(number),
            [str(n) for n in range(self.config.things[1] + 1)],
        )

    def _ask_colour(self, things: Sequence[Thing], rng: random.Random) -> ShapeQuestion | None:
        thing = _choose_unique(things, "shape", rng)
        return thing and ShapeQuestion(
            f"What colour is the {thing.shape}?", thing.colour, self.config.colours
        )

    def _ask_shape(self, things: Sequence[Thing], rng: random.Random) -> ShapeQuestion | None:
        thing = _choose_unique(things, "colour", rng)
        return thing and ShapeQuestion(
            f"What shape is the {thing.colour} thing?", thing.shape, self.config.shapes
        )

    def _ask_position(self, things: Sequence[Thing], rng: random.Random) -> ShapeQuestion | None:
        """Return a question about the relative position of two things with unique names.

        Return None if there are not two, or if they are in the same column (or row).
        """
        name_counts = Counter(thing.name for thing in things)
        unique_things = [thing for thing in things if name_counts[thing.name] == 1]
        if len(unique_things) < 2:
            return None
        first, second = rng.sample(unique_things, 2)
        is_horizontal = rng.random() < 0.5
        first_index, second_index, words = (
            (first.column, second.column, ("left", "right"))
            if is_horizontal
            else (first.row, second.row, ("above", "below"))
        )
        if first_index == second_index:
            return None
        relation = f"{words[0]} or {words[1]}{' of' if is_horizontal else ''}"
        question = f"Is the {first.name} {relation} the {second.name}?"
        return ShapeQuestion(question, words[first_index > second_index], words)


def _random_offset(rng: random.Random, limit: int) -> tuple[int, int]:
    return rng.randint(-limit, limit), rng.randint(-limit, limit)


def _choose_unique(things: Sequence[Thing], attribute: str, rng: random.Random) -> Thing | None:
    """Return a random thing with a unique value of an attribute; None if there is none."""
    values = Counter(getattr(thing, attribute) for thing in things)
    unique_things = [thing for thing in things if values[getattr(thing, attribute)] == 1]
    return rng.choice(unique_things) if unique_things else None
