"""The recipe's sections on rollouts: sampling, replay, staleness, curriculum, parity.

Their defaults are set here and nowhere else.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    SerializeAsAny,
    ValidationInfo,
    field_validator,
)

from ratchet.config.base import Section
from ratchet.config.resolve import Slot
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

    temperature: float = 1.0
    """Sampling temperature. 0 is greedy; training needs a value above 0."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this total probability; 1: off."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0: off."""
    min_p: float = 0.0
    """Sample only from tokens with at least this share of the likeliest token's probability; 0:
    off."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Maximum number of tokens in one completion, including its end token."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    structured: dict[str, Any] | None = None
    """Grammar that every completion follows, in training and evaluation, with the extra
    `structured`: {json: SCHEMA}, {regex: TEXT}, {choice: [TEXT, ...]} or {grammar: LARK}. null: no
    grammar."""

    @field_validator("*", mode="after")
    @classmethod
    def _check_values(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        checked = check_sampling_value(name, value)
        # Resolved recipes show the grammar as the user wrote it, so the mapping is kept.
        return value if name == "structured" else checked


class ReplayConfig(Section):
    """The replay buffer: a step also trains on groups of earlier steps (arXiv:1511.05952)."""

    groups: int = Field(default=8, ge=1)
    """Number of groups that are replayed in each step; fewer if the buffer holds fewer."""
    max_age: int = Field(default=4, ge=1)
    """Maximum staleness of a replayed group, in versions of the weights."""
    capacity: int = Field(default=256, ge=1)
    """Maximum number of groups in the buffer. A full buffer drops the groups that entered it
    first."""
    priority: Literal["uniform", "spread"] = "spread"
    """How groups are drawn. spread: with a probability in proportion to the standard deviation of
    their rewards. uniform: all with the same probability."""

    def check_keys(self) -> None:
        if self.capacity < self.groups:
            raise ValueError(
                f"capacity={self.capacity} holds fewer than groups={self.groups}: raise capacity"
            )


class AdaptiveConcurrencyConfig(Section):
    """Adaptive concurrency: limits that the number of groups in flight is adjusted to keep.

    The number starts at one step's groups and never exceeds what `max_staleness` allows. It rises
    after a step in which the learner waited for groups, and falls after a step that exceeded a
    limit.
    """

    staleness: float | None = Field(default=None, gt=0)
    """Limit on the mean staleness of a step's new tokens, in versions of the weights; null: no
    limit."""
    mismatch: float | None = Field(default=None, gt=0)
    """Limit on the KL divergence from sampler to learner, in nats per token (the metric
    batch/correction/kl); null: no limit."""

    def check_keys(self) -> None:
        if self.staleness is None and self.mismatch is None:
            raise ValueError(
                "neither staleness nor mismatch is set: set one of them, or remove adaptive"
            )


class RolloutsConfig(Section):
    """The rollouts of a stage, and the handling of their failures.

    With redundant attempts or groups, which of them finish first depends on timing. Such a run is
    not bitwise reproducible.
    """

    max_turns: int = Field(default=64, ge=1)
    """Number of turns of the policy after which an attempt is cut off."""
    history_window: int | None = Field(default=None, ge=1)
    """Number of past turns in the prompt of each turn, after the task's first messages. Each turn
    then is a row of its own with its own prompt, in supervised training too. null: a prompt has all
    turns, and extends the row of the turns before it."""
    attempt_timeout_s: float | None = Field(default=None, gt=0)
    """Time limit in seconds for playing an attempt, including time spent waiting. The same limit
    applies separately to judging the attempt. Programs that a reward runs have their own limits
    (docs/rewards.md). null: no limit."""
    retries: int = Field(default=2, ge=0)
    """Maximum number of retries of an attempt that failed by an error of its environment, agent or
    sandbox, or by a timeout. Judging is retried as often."""
    max_failed_share: float = Field(default=0.5, ge=0, le=1)
    """The run stops if more than this share of the last 8 steps' attempts failed."""
    redundant_attempts: int = Field(default=0, ge=0)
    """Number of additional attempts that each group begins. The group keeps those that end first
    without failing, and cancels the others."""
    redundant_groups: int = Field(default=0, ge=0)
    """Number of additional groups that each step begins. The step keeps the groups that end first.
    The others are cancelled, and begin again in the next step."""
    max_staleness: Annotated[int | float, Field(ge=0)] = 0
    """Maximum number of steps between the weights that an attempt begins with and the weights that
    train on it. 0: on-policy. 1: the groups of the next step are generated during the update. 0.5:
    half of them are."""
    order: Literal["issued", "ready"] = "issued"
    """Order in which groups enter a step. issued: in the order in which they began. ready: in the
    order in which they finished, unless another group would then exceed max_staleness."""
    adaptive: AdaptiveConcurrencyConfig | None = None
    """Adaptive concurrency: limits that the number of groups in flight is adjusted to keep; null:
    there are always as many groups as max_staleness allows."""
    tail_batching: int = Field(default=0, ge=0)
    """Tail batching (arXiv:2509.21009): number of additional groups that a step begins. The step
    keeps the groups that end first. The slower groups are played again later, together in steps
    that wait for all of them."""
    dynamic_sampling: bool = False
    """Replace each group whose rewards are all equal by a new group (DAPO, arXiv:2503.14476)."""
    group_filter: Annotated[
        SerializeAsAny[Section] | None, Slot("group_filter", is_optional=True)
    ] = None
    """Filter of groups: a new group replaces each one that does not pass. Its kind may be the
    import path of a function (group) -> bool, or of a class with such a method `keep`; their other
    parameters are keys. null: all groups pass."""
    max_replaced: int = Field(default=3, ge=1)
    """Maximum number of groups that dynamic_sampling and group_filter replace in a step, as a
    multiple of batch_size. Further groups are kept."""
    replay: ReplayConfig | None = None
    """Replay buffer for training on groups again; null: each group trains once."""

    @property
    def prefetches(self) -> bool:
        """True if groups are generated ahead of the step that trains on them."""
        return self.max_staleness > 0 or self.replaces_groups

    @property
    def replaces_groups(self) -> bool:
        """True if groups may be replaced by others instead of training."""
        return self.dynamic_sampling or self.group_filter is not None


class CurriculumConfig(Section):
    """A curriculum: tasks are drawn from the stage's `examples` with weights.

    Without one, each pass takes every task once. Below, p is the running success rate of a task,
    which is 0.5 before its first attempt.

    Attributes:
        prefer: "learnable" weighs a task by p (1 - p) (arXiv:2502.12272), "hard" by 1 - p
            (arXiv:2501.12599).
        difficulty: If this key is set, easy tasks come first (arXiv:1903.09848).
    """

    prefer: Literal["even", "learnable", "hard"] = "learnable"
    """Tasks that are drawn more often. learnable: tasks solved about half of the time. hard: tasks
    solved seldom. even: none."""
    explore: float = Field(default=0.1, gt=0, le=1)
    """Share of tasks drawn uniformly, whatever their success rate."""
    memory: float = Field(default=0.5, ge=0, lt=1)
    """Weight of the old success rate when a group updates this moving average: new = memory * old +
    (1 - memory) * the group's share of successes."""
    success: float = 0.5
    """Minimum reward of an attempt that counts as a success."""
    difficulty: str | None = None
    """Name of the number in a task's meta that states its difficulty. Tasks with low numbers come
    first. null: no order."""
    start_share: float = Field(default=0.2, gt=0, le=1)
    """Share of the tasks that is available at the start: the easiest ones."""
    full_by_step: int = Field(default=50, ge=1)
    """Step at which the available share, rising linearly from start_share, reaches 1."""

    def check_keys(self) -> None:
        has_order, has_preference = self.difficulty is not None, self.prefer != "even"
        if not has_order and not has_preference:
            raise ValueError(
                "prefer=even without difficulty has no effect: set one of them, or remove "
                "curriculum"
            )
        for required_key, is_set, keys in (
            ("difficulty", has_order, ("start_share", "full_by_step")),
            ("prefer", has_preference, ("explore", "memory", "success")),
        ):
            unread = [key for key in keys if not is_set and key in self.changed]
            if unread:
                raise ValueError(
                    f"{unread[0]} has no effect without {required_key}: set {required_key}, or "
                    f"remove {unread[0]}"
                )


class ParityConfig(Section):
    """The parity check, which compares the log-probabilities of sampler and learner.

    It compares newly sampled tokens before an update, when sampler and learner have the same
    weights. A difference then points to a bug, or to different numerics.
    """

    first_steps: int = Field(default=3, ge=0)
    """Number of steps at the start of a stage that are all checked."""
    every: int = Field(default=50, ge=0)
    """Steps between later checks; 0: none."""
    sample: int = Field(default=8, ge=1)
    """Number of attempts compared in a check."""
    threshold: float = Field(default=0.05, gt=0)
    """Maximum mean difference, in nats per token. About 0.01 is normal in bfloat16, and 1e-6 in
    float32."""
    action: Literal["stop", "warn"] = "stop"
    """Stop the run, or warn, if the difference is above the threshold. Either message names the
    cause."""
