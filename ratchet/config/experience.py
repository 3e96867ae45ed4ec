"""The recipe's sections on rollouts: sampling, replay, staleness, curriculum, parity.

Their defaults are set here and nowhere else.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from ratchet.config.base import Section
from ratchet.errors import SamplingError
from ratchet.sampling import check_setting


def checked_setting(name: str, value: Any) -> Any:
    """Return the value of a field of `Sampling`.

    Raise ValueError, which pydantic reports, if `Sampling` refuses it.
    """
    try:
        return check_setting(name, value)
    except SamplingError as error:
        raise ValueError(str(error)) from None


Temperature = Annotated[float, AfterValidator(lambda value: checked_setting("temperature", value))]


class SamplingConfig(Section):
    """The sampling of attempts. top_p, top_k and min_p act after the temperature."""

    temperature: float = Field(default=1.0, description="0 is greedy; training needs more than 0.")
    top_p: float = Field(default=1.0, description="Smallest set of tokens of this mass; 1: off.")
    top_k: int = Field(default=0, description="So many likeliest tokens; 0: off.")
    min_p: float = Field(
        default=0.0, description="Tokens of at least this share of the top one's mass; 0: off."
    )
    max_new_tokens: int = Field(
        default=256, ge=1, description="Tokens of one completion, its end included."
    )
    stop: tuple[str, ...] = Field(default=(), description="Strings that end a completion.")

    @field_validator("*", mode="after")
    @classmethod
    def _can_be_drawn_with(cls, value: Any, info: ValidationInfo) -> Any:
        return checked_setting(info.field_name or "", value)


class ReplayConfig(Section):
    """The replay buffer: a step also trains on groups of earlier steps (arXiv:1511.05952)."""

    groups: int = Field(
        default=8, ge=1, description="More groups a step, as far as there are so many."
    )
    max_age: int = Field(
        default=4,
        ge=1,
        description="Versions by which the weights that drew a group may lie behind those that it "
        "trains.",
    )
    capacity: int = Field(
        default=256,
        ge=1,
        description="Groups that are kept; those that were trained on first go first.",
    )
    priority: Literal["uniform", "spread"] = Field(
        default="spread",
        description="Which come: with chances by the standard deviation of their rewards, or any.",
    )

    @model_validator(mode="after")
    def _keeps_enough(self) -> ReplayConfig:
        if self.capacity < self.groups:
            raise ValueError(
                f"capacity={self.capacity} keeps fewer than groups={self.groups}: raise it"
            )
        return self


class AdaptiveConfig(Section):
    """The control of the number of groups in flight, from one step's up to max_staleness.

    The number rises while the learner waits, and falls while one of these limits is exceeded.
    """

    staleness: float | None = Field(
        default=None,
        gt=0,
        description="Versions by which tokens may be older, in the mean, than what they train; "
        "null: any.",
    )
    mismatch: float | None = Field(
        default=None,
        gt=0,
        description="KL from sampler to learner, nats a token (batch/correction/kl); null: any.",
    )

    @model_validator(mode="after")
    def _holds_something(self) -> AdaptiveConfig:
        if self.staleness is None and self.mismatch is None:
            raise ValueError(
                "neither staleness nor mismatch is to be held: set one of them, or remove adaptive"
            )
        return self


class RolloutsConfig(Section):
    """The rollouts of a stage, and the handling of their failures.

    Which redundant attempts and groups finish first depends on timing, so a run with redundancy is
    not bitwise reproducible.
    """

    max_turns: int = Field(
        default=64, ge=1, description="Turns of the policy, after which an attempt is cut off."
    )
    attempt_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds to play an attempt in, waiting included, and to judge it in; null: no "
        "limit. Judged programs have "
        "limits of their own (docs/rewards.md).",
    )
    retries: int = Field(
        default=2,
        ge=0,
        description="Further tries of an attempt that an environment, a reward or a timeout broke.",
    )
    max_failed_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Maximum share of failed attempts in the last 8 steps; above it the run stops.",
    )
    redundant_attempts: int = Field(
        default=0, ge=0, description="Additional attempts a group; the first to end are kept."
    )
    redundant_groups: int = Field(
        default=0,
        ge=0,
        description="Additional groups a step; the first to end are kept, others wait.",
    )
    max_staleness: Annotated[int | float, Field(ge=0)] = Field(
        default=0,
        description="Steps by which the weights that begin an attempt may lie behind those that "
        "it trains; 0: the same. Above 0 attempts go on while the learner works; 0.5: those of "
        "half of the next step's groups.",
    )
    order: Literal["issued", "ready"] = Field(
        default="issued",
        description="Order in which groups in flight enter a step: the oldest first, or the first "
        "that are ready, as long as none becomes too old.",
    )
    adaptive: AdaptiveConfig | None = Field(
        default=None,
        description="Holds mean staleness or mismatch at a target; null: always as many as "
        "max_staleness allows.",
    )
    tail_batching: int = Field(
        default=0,
        ge=0,
        description="Additional groups a step; the first to end are kept, the others come "
        "together in steps of their own (arXiv:2509.21009).",
    )
    dynamic_sampling: bool = Field(
        default=False,
        description="Groups whose rewards are all equal are replaced by others (DAPO, "
        "arXiv:2503.14476).",
    )
    max_replaced: int = Field(
        default=3,
        ge=1,
        description="Groups that dynamic_sampling replaces a step, over batch_size; beyond it "
        "they stay.",
    )
    replay: ReplayConfig | None = Field(
        default=None, description="Trains on groups more than once; null: each once."
    )

    @property
    def prefetches(self) -> bool:
        return self.max_staleness > 0 or self.dynamic_sampling


class CurriculumConfig(Section):
    """A curriculum: weighted draws from the stage's `examples` in place of passes over them.

    p = running success rate of a task, 0.5 until it is tried.

    Attributes:
        prefer: "learnable" weighs a task by p (1 - p) (arXiv:2502.12272), "hard" by 1 - p
            (arXiv:2501.12599).
        difficulty: Easy tasks come first (arXiv:1903.09848).
    """

    prefer: Literal["even", "learnable", "hard"] = Field(
        default="learnable",
        description="Tasks that succeed half of the time, or seldom; even: all alike.",
    )
    explore: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="Share that is drawn evenly, whatever is known of a task.",
    )
    memory: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="Share that a task's success rate keeps of itself when a group of it ends.",
    )
    success: float = Field(
        default=0.5, description="The reward from which on an attempt is a success."
    )
    difficulty: str | None = Field(
        default=None,
        description="A number in the tasks' meta: those that have least of it come first; null: no "
        "order.",
    )
    start_share: float = Field(
        default=0.2, gt=0, le=1, description="Share of the tasks, the easiest, that come first."
    )
    full_by_step: int = Field(
        default=50, ge=1, description="Steps in which this share rises to 1, evenly."
    )

    @model_validator(mode="after")
    def _reads_all_that_is_set(self) -> CurriculumConfig:
        ordered, weighed = self.difficulty is not None, self.prefer != "even"
        if not ordered and not weighed:
            raise ValueError(
                "prefer=even without difficulty prefers nothing: set one of them, or remove "
                "curriculum"
            )
        for reader, is_set, keys in (
            ("difficulty", ordered, ("start_share", "full_by_step")),
            ("prefer", weighed, ("explore", "memory", "success")),
        ):
            unread = [key for key in keys if not is_set and key in self.changed]
            if unread:
                raise ValueError(f"{unread[0]} is read with {reader} alone: set that, or remove it")
        return self


class ParityConfig(Section):
    """The parity gate: compares the log-probabilities of sampler and learner.

    It compares those of fresh tokens before an update, when both have the same weights.
    """

    first_steps: int = Field(
        default=3,
        ge=0,
        description="Number of first steps with a check, so after the first pushes of weights.",
    )
    every: int = Field(default=50, ge=0, description="Steps between later checks; 0: none.")
    sample: int = Field(default=8, ge=1, description="Attempts compared in a check.")
    threshold: float = Field(
        default=0.05,
        gt=0,
        description="Largest mean difference, in nats a token. bfloat16 makes about 0.01, float32 "
        "1e-6.",
    )
    action: Literal["stop", "warn"] = Field(
        default="stop",
        description="Reaction to a difference above the threshold; both say which part causes it.",
    )
