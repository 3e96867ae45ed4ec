"""Configuration of the environments whose tasks are asked about pictures. Free of torch and of
their code."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from ratchet.environments.config import ALL_SOURCES, EnvironmentConfig


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError(f"{', '.join(names)} repeat one: each is listed once")
    return names


Shape = Literal["circle", "square", "triangle", "cross"]
Colour = Literal["red", "green", "blue", "yellow", "purple", "orange", "cyan", "grey"]
Question = Literal["count", "colour", "shape", "position"]


class ShapesConfig(EnvironmentConfig):
    """Questions about a drawn picture of shapes: how many there are, of which colour or shape one
    is, which is left of which.

    A kind of CLEVR (arXiv:1612.06890) that needs no download. The splits share no picture.
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
