"""Config sections of reward shaping: the entries of `algorithm.shaping`, applied in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from ratchet.algorithms.config.base import AlgorithmPart
from ratchet.config.base import Section

SHAPING = "ratchet.algorithms.shaping"
# Why an algorithm whose shaping reads lengths lacks the property `equal_rewards`.
LENGTH_MATTERS = "answers of different length earn different rewards after shaping"


class ShapingPart(AlgorithmPart):
    """The base class of the sections of reward shaping."""

    @property
    def penalty_start(self) -> int | None:
        """Return the length of an answer, in tokens, above which a penalty begins; None: none."""
        return None


if TYPE_CHECKING:
    AnyShaping = ShapingPart
else:
    # A user's section may derive from `Section` alone: `config.resolve` adds the rest.
    AnyShaping = SerializeAsAny[Section]


class OverlongPenalty(ShapingPart):
    """A penalty on long answers that grows linearly up to a length limit (DAPO)."""

    function: ClassVar[str] = f"{SHAPING}:overlong_penalty"
    exempt: ClassVar[Mapping[str, str]] = {"equal_rewards": LENGTH_MATTERS}

    kind: Literal["overlong_penalty"] = "overlong_penalty"
    max_length: int = Field(ge=1)
    """Length of an answer, in tokens, from which the penalty is full."""
    buffer: int = Field(ge=1)
    """Tokens before max_length over which the penalty grows."""
    factor: float = Field(default=1.0, gt=0)
    """Full penalty, at max_length and beyond."""

    @property
    def penalty_start(self) -> int:
        return self.max_length - self.buffer

    def check_keys(self) -> None:
        if self.buffer > self.max_length:
            raise ValueError(
                f"buffer={self.buffer} is more than max_length={self.max_length}: lower buffer"
            )


class StopProperly(ShapingPart):
    """A lower reward for answers that a token limit cut off."""

    function: ClassVar[str] = f"{SHAPING}:stop_properly"
    exempt: ClassVar[Mapping[str, str]] = {
        "equal_rewards": "truncated answers earn less after shaping"
    }

    kind: Literal["stop_properly"] = "stop_properly"
    coef: float = Field(ge=0, lt=1)
    """Share of a positive reward that a cut-off answer keeps. A negative reward does not change."""


class LengthPenalty(ShapingPart):
    """A penalty for each token of an answer beyond `free`."""

    function: ClassVar[str] = f"{SHAPING}:length_penalty"
    exempt: ClassVar[Mapping[str, str]] = {"equal_rewards": LENGTH_MATTERS}

    kind: Literal["length_penalty"] = "length_penalty"
    coef: float = Field(gt=0)
    """Penalty per token."""
    free: int = Field(default=0, ge=0)
    """Tokens of an answer without a penalty."""


class EffortLength(ShapingPart):
    """A bonus on right answers that are short, and a penalty on long ones, by level of effort."""

    function: ClassVar[str] = f"{SHAPING}:effort_length"
    exempt: ClassVar[Mapping[str, str]] = {"equal_rewards": LENGTH_MATTERS}

    kind: Literal["effort_length"] = "effort_length"
    tags: tuple[str, ...] = ()
    """Tags of the tasks that it applies to; empty: all tasks."""
    max_length: int = Field(ge=1)
    """Length of an answer, in tokens, up to which there is a bonus."""
    bonus: float = Field(default=1.0, gt=0)
    """Share of the reward that an answer without tokens gets in addition, up to 1; it falls
    linearly to 0 at max_length."""
    penalty: float = Field(default=1.0, ge=0)
    """Factor of the penalty, which grows by the same slope."""


class ScaleRewards(ShapingPart):
    """A factor on all rewards, and a constant added to them."""

    function: ClassVar[str] = f"{SHAPING}:scale_rewards"

    kind: Literal["scale"] = "scale"
    factor: float = Field(gt=0)
    """Factor on all rewards, also those of turns."""
    shift: float = 0.0
    """Added to the reward of each attempt after the factor. factor 2 and shift -1 turn rewards from
    0 to 1 into rewards from -1 to 1."""


class ClipRewards(ShapingPart):
    """A lower and an upper bound to which rewards are clipped."""

    function: ClassVar[str] = f"{SHAPING}:clip_rewards"

    kind: Literal["clip"] = "clip"
    low: float | None = None
    """Lowest reward; null: no bound."""
    high: float | None = None
    """Highest reward; null: no bound."""

    def check_keys(self) -> None:
        if self.low is None and self.high is None:
            raise ValueError(
                "clip without low and high does nothing: set low or high, or remove clip"
            )
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low={self.low:g} is not below high={self.high:g}: lower low")


class NormaliseRewards(ShapingPart):
    """Normalisation of rewards: subtract their mean, divide by their standard deviation."""

    function: ClassVar[str] = f"{SHAPING}:normalise_rewards"

    kind: Literal["normalise"] = "normalise"
    over: Literal["group", "batch", "running"]
    """Attempts over which mean and standard deviation are taken. group: those of the row's group.
    batch: those of the batch. running: those of all batches so far."""
    center: bool = True
    """Subtract the mean; false: only divide by the standard deviation."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""

    @property
    def reads(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset({"group"} if self.over == "group" else ())


class ComponentWeights(ShapingPart):
    """A weighted sum of the reward's named parts, which replaces the reward."""

    function: ClassVar[str] = f"{SHAPING}:component_weights"
    reads: ClassVar[frozenset[str]] = frozenset({"parts"})

    kind: Literal["component_weights"] = "component_weights"
    weights: dict[str, float] = Field(min_length=1)
    """Weight of each part, by name; parts without a weight count as 0."""
