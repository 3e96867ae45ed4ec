"""The recipe's sections on rollouts: sampling, replay, staleness, curriculum, parity.

Their defaults are set here and nowhere else.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from ratchet.config.base import Section
from ratchet.errors import SamplingError
from ratchet.sampling import check_setting


def check_sampling_value(name: str, value: Any) -> Any:
    """Return the value of a field of `Sampling`. Raise ValueError if it is out of range."""
    try:
        return check_setting(name, value)
    except SamplingError as error:
        raise ValueError(str(error)) from None


Temperature = Annotated[
    float, AfterValidator(lambda value: check_sampling_value("temperature", value))
]


class SamplingConfig(Section):
    """The sampling of attempts. The filters top_p, top_k and min_p act after the temperature."""

    temperature: float = Field(default=1.0, description="0 is greedy; training needs more than 0.")
    top_p: float = Field(
        default=1.0,
        description="Sample from the smallest set of tokens with this total probability; 1: off.",
    )
    top_k: int = Field(default=0, description="Number of likeliest tokens to sample from; 0: off.")
    min_p: float = Field(
        default=0.0,
        description="Least probability of a token, as a share of the likeliest one's; 0: off.",
    )
    max_new_tokens: int = Field(
        default=256, ge=1, description="Maximum tokens of one completion, with its end token."
    )
    stop: tuple[str, ...] = Field(default=(), description="Strings that end a completion.")

    @field_validator("*", mode="after")
    @classmethod
    def _check_values(cls, value: Any, info: ValidationInfo) -> Any:
        return check_sampling_value(info.field_name or "", value)


class ReplayConfig(Section):
    """The replay buffer: a step also trains on groups of earlier steps (arXiv:1511.05952)."""

    groups: int = Field(
        default=8, ge=1, description="Replayed groups a step; fewer if the buffer holds fewer."
    )
    max_age: int = Field(
        default=4,
        ge=1,
        description="Maximum staleness of a replayed group, in versions of the weights.",
    )
    capacity: int = Field(
        default=256,
        ge=1,
        description="Groups in the buffer; those trained on longest ago are dropped first.",
    )
    priority: Literal["uniform", "spread"] = Field(
        default="spread",
        description="Choice of groups: spread in proportion to the standard deviation of their "
        "rewards, uniform at random.",
    )

    @model_validator(mode="after")
    def _check_capacity(self) -> ReplayConfig:
        if self.capacity < self.groups:
            raise ValueError(
                f"capacity={self.capacity} holds fewer than groups={self.groups}: raise it"
            )
        return self


class AdaptiveConfig(Section):
    """Limits that adapt the number of groups in flight, between one step's and max_staleness.

    The number rises while the learner waits, and falls while a limit is exceeded.
    """

    staleness: float | None = Field(
        default=None,
        gt=0,
        description="Largest mean staleness of tokens, in versions of the weights; null: any.",
    )
    mismatch: float | None = Field(
        default=None,
        gt=0,
        description="Largest KL from sampler to learner, in nats a token (batch/correction/kl); "
        "null: any.",
    )

    @model_validator(mode="after")
    def _check_has_limit(self) -> AdaptiveConfig:
        if self.staleness is None and self.mismatch is None:
            raise ValueError(
                "neither staleness nor mismatch is set: set one of them, or remove adaptive"
            )
        return self


class RolloutsConfig(Section):
    """The rollouts of a stage, and the handling of their failures.

    With redundant attempts or groups, the first to finish are used. This depends on timing, so such
    a run is not bitwise reproducible.
    """

    max_turns: int = Field(
        default=64, ge=1, description="Turns of the policy after which an attempt is cut off."
    )
    attempt_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="Time limit in seconds of playing an attempt, with its waits, and again of "
        "judging it; null: none. Judged programs have limits of their own (docs/rewards.md).",
    )
    retries: int = Field(
        default=2,
        ge=0,
        description="Retries of an attempt that failed in an environment, a reward or by a "
        "timeout.",
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
        description="Maximum staleness, in steps, of the weights that start an attempt when it is "
        "trained on. 0: on-policy. Above 0 the next steps' groups are generated during the update; "
        "0.5: half of the next step's groups.",
    )
    order: Literal["issued", "ready"] = Field(
        default="issued",
        description="Order in which groups enter a step: issued takes the oldest first, ready the "
        "first that have finished, unless another would become too old.",
    )
    adaptive: AdaptiveConfig | None = Field(
        default=None,
        description="Adapts the number of groups in flight to limits; null: as many as "
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
        description="Replace groups whose rewards are all equal by others (DAPO, "
        "arXiv:2503.14476).",
    )
    max_replaced: int = Field(
        default=3,
        ge=1,
        description="Maximum groups that dynamic_sampling replaces in a step, in multiples of "
        "batch_size; further ones are kept.",
    )
    replay: ReplayConfig | None = Field(
        default=None,
        description="Replay buffer, to train on groups again; null: each group trains once.",
    )

    @property
    def prefetches(self) -> bool:
        """True if groups are generated ahead of the step that trains on them."""
        return self.max_staleness > 0 or self.dynamic_sampling


class CurriculumConfig(Section):
    """A curriculum: tasks are drawn from the stage's `examples` with weights.

    Without one, each pass takes every task once. Below, p is the running success rate of a task,
    which is 0.5 before its first attempt.

    Attributes:
        prefer: "learnable" weighs a task by p (1 - p) (arXiv:2502.12272), "hard" by 1 - p
            (arXiv:2501.12599).
        difficulty: With this key easy tasks come first (arXiv:1903.09848).
    """

    prefer: Literal["even", "learnable", "hard"] = Field(
        default="learnable",
        description="Tasks to prefer: learnable, solved about half of the time; hard, solved "
        "seldom; even: none.",
    )
    explore: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="Share of tasks drawn uniformly, whatever their success rate.",
    )
    memory: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="Weight of the old success rate in its moving average, updated after each "
        "group.",
    )
    success: float = Field(default=0.5, description="Least reward of a successful attempt.")
    difficulty: str | None = Field(
        default=None,
        description="Name of a number in the tasks' meta; tasks with low values come first; null: "
        "no order.",
    )
    start_share: float = Field(
        default=0.2, gt=0, le=1, description="Share of the tasks, the easiest, to start with."
    )
    full_by_step: int = Field(
        default=50, ge=1, description="Steps in which start_share rises linearly to 1."
    )

    @model_validator(mode="after")
    def _check_unread_keys(self) -> CurriculumConfig:
        has_order, has_preference = self.difficulty is not None, self.prefer != "even"
        if not has_order and not has_preference:
            raise ValueError(
                "prefer=even without difficulty has no effect: set one of them, or remove "
                "curriculum"
            )
        for reader, is_set, keys in (
            ("difficulty", has_order, ("start_share", "full_by_step")),
            ("prefer", has_preference, ("explore", "memory", "success")),
        ):
            unread = [key for key in keys if not is_set and key in self.changed]
            if unread:
                raise ValueError(
                    f"{unread[0]} has no effect without {reader}: set {reader}, or remove it"
                )
        return self


class ParityConfig(Section):
    """The parity check: compares the log-probabilities of sampler and learner.

    It uses fresh tokens before an update, when sampler and learner have the same weights. A
    difference then points to a bug, or to numerics that differ.
    """

    first_steps: int = Field(
        default=3,
        ge=0,
        description="Number of steps at the start of a stage that are all checked.",
    )
    every: int = Field(default=50, ge=0, description="Steps between later checks; 0: none.")
    sample: int = Field(default=8, ge=1, description="Attempts compared in a check.")
    threshold: float = Field(
        default=0.05,
        gt=0,
        description="Largest mean difference, in nats a token. About 0.01 is normal in bfloat16, "
        "1e-6 in float32.",
    )
    action: Literal["stop", "warn"] = Field(
        default="stop",
        description="Reaction to a difference above the threshold; both name its cause.",
    )
