"""Configuration of the built-in environments. Free of torch and of their code."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from ratchet.config.base import Section
from ratchet.data.files import DataFile


def _distinct(operators: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(operators)) < len(operators):
        raise ValueError(f"operators {' '.join(operators)} repeat one: each is listed once")
    return operators


Operators = Annotated[
    tuple[Literal["+", "-", "*", "/"], ...], Field(min_length=1), AfterValidator(_distinct)
]
ExactOperators = Annotated[
    tuple[Literal["+", "-", "*"], ...], Field(min_length=1), AfterValidator(_distinct)
]


class EnvironmentConfig(Section):
    """`default_reward`: kind of the reward that judges this environment's answers unless the recipe
    names another. `gives`: what an algorithm may learn from here (see
    `ratchet.algorithms.config.base.Source`). `judges`: whether its steps give a reward where there
    is no default one."""

    default_reward: ClassVar[str] = ""
    gives: ClassVar[frozenset[str]] = frozenset({"rows", "rollouts"})
    judges: ClassVar[bool] = True


ALL_SOURCES = frozenset({"rows", "pairs", "labelled", "steps", "rollouts"})


class ArithmeticConfig(EnvironmentConfig):
    """One operation on two numbers: "37+48=" -> "85"."""

    builds: ClassVar[str] = "ratchet.environments.toy.arithmetic:Arithmetic"
    default_reward: ClassVar[str] = "exact_match"
    gives: ClassVar[frozenset[str]] = ALL_SOURCES

    digits: int = Field(2, ge=1, le=100, description="Digits of each operand, padded with zeros.")
    operators: ExactOperators = Field(("+",), description="Drawn with equal chances.")
    reverse: bool = Field(
        False,
        description="Write the answer least significant digit first, padded to its greatest width: "
        "37+48= -> 580.",
    )


class SortingConfig(EnvironmentConfig):
    """Sort digits: "73120465=" -> "01234567"."""

    builds: ClassVar[str] = "ratchet.environments.toy.sorting:Sorting"
    default_reward: ClassVar[str] = "exact_match"
    gives: ClassVar[frozenset[str]] = ALL_SOURCES

    digits: int = Field(8, ge=1, le=1000, description="How many digits to sort.")


class CountdownConfig(EnvironmentConfig):
    """Reach a target with given numbers: "3 5 7:22=" -> "5*3+7"."""

    builds: ClassVar[str] = "ratchet.environments.toy.countdown:Countdown"
    default_reward: ClassVar[str] = "countdown"

    numbers: int = Field(4, ge=2, le=6, description="How many numbers are given.")
    max_number: int = Field(20, ge=2, le=10_000, description="They are drawn from 1 to this.")
    max_target: int = Field(
        100, ge=2, le=1_000_000, description="The target lies between 1 and this."
    )
    operators: Operators = Field(("+", "-", "*"), description="What the sample solutions use.")
    use_all: bool = Field(
        True, description="Each number must be used exactly once; else at most once."
    )
    template: str = Field(
        "{numbers}:{target}=", description="The prompt; {numbers} and {target} are filled in."
    )

    @field_validator("template")
    @classmethod
    def _has_both(cls, template: str) -> str:
        for place in ("{numbers}", "{target}"):
            if place not in template:
                raise ValueError(f"template lacks {place}: the problem can't be solved without it")
        return template


class GSM8KConfig(EnvironmentConfig):
    """Grade school maths word problems (arXiv:2110.14168) from a file with the columns `question`
    and `answer`.

    The test split is the file `test`, or the rows of `train` that say so in `split_column`, or else
    one in ten of them.
    """

    builds: ClassVar[str] = "ratchet.environments.datasets.gsm8k:GSM8K"
    default_reward: ClassVar[str] = "numeric_answer"

    train: DataFile = Field(description="A file, or an address in an object store.")
    test: DataFile | None = Field(None, description="Likewise.")
    split_column: str | None = Field(
        None, min_length=1, description='Column of `train` that holds "train" or "test".'
    )
    suffix: str = Field(
        '\nEnd with "#### " and the answer as a number.', description="Appended to each question."
    )
    shots: int = Field(
        0,
        ge=0,
        le=64,
        description="Solved examples before the question: the first rows for training.",
    )

    @model_validator(mode="after")
    def _one_way_to_split(self) -> GSM8KConfig:
        if self.test is not None and self.split_column is not None:
            raise ValueError(
                "`test` and `split_column` both say what the test split is: remove one"
            )
        return self


class PreferencesConfig(EnvironmentConfig):
    """Preference data from files, in any of their usual formats (docs/preference-data.md).

    The test split is the file `test`, or else one in ten of the prompts of `train`.
    """

    builds: ClassVar[str] = "ratchet.environments.datasets.preferences:Preferences"
    gives: ClassVar[frozenset[str]] = ALL_SOURCES
    judges: ClassVar[bool] = False
    usual_columns: ClassVar[tuple[str, ...]] = (
        *("prompt", "chosen", "rejected", "score_chosen", "score_rejected"),
        *("completion", "label", "completions", "labels"),
    )

    train: DataFile = Field(description="A file, or an address in an object store.")
    test: DataFile | None = Field(None, description="Likewise.")
    columns: dict[str, str] = Field(
        {},
        description="What the files call their columns, where not as usual: {chosen: preferred}.",
    )
    separator: str = Field("\n", description="Appended to each step of an answer in steps.")

    @field_validator("columns")
    @classmethod
    def _usual_columns_by_distinct_names(cls, columns: dict[str, str]) -> dict[str, str]:
        for usual in columns:
            if usual not in cls.usual_columns:
                near = get_close_matches(usual, cls.usual_columns, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ValueError(
                    f"{usual} is no column: {hint}there are {', '.join(cls.usual_columns)}"
                )
        names = [columns.get(usual, usual) for usual in cls.usual_columns]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            both = " and ".join(
                usual for usual in cls.usual_columns if columns.get(usual, usual) == repeated
            )
            raise ValueError(
                f"{both} would both be read from '{repeated}': give each a column of its own"
            )
        return columns
