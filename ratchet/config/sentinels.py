"""Config sections of sentinels, which watch metrics while a stage trains.

The fields of `SentinelsConfig` are the built-in sentinels.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, field_validator

from ratchet.config.base import Section
from ratchet.config.resolve import Slot

Rule = Literal["above", "below", "spike", "grows", "shrinks", "rises", "reported", "nonfinite"]


class SentinelConfig(Section):
    """A sentinel, which watches one metric.

    It raises an alarm when its rule has held for `patience` steps that report the metric. Before it
    can raise another alarm, the rule must stop holding.
    """

    metric: str
    """Name of a metric in metrics.jsonl; a pattern with * and ? stands for the largest metric that
    matches."""
    rule: Rule
    """above, below: above or below the threshold. spike: more than threshold robust standard
    deviations (1.4826 times the median deviation) above the median of the previous window. grows:
    the window's median is more than threshold times the first window's median. shrinks: it is less
    than threshold times the first window's median. rises: it exceeds the first window's median by
    more than threshold. reported: not 0; a step without the metric counts as 0. nonfinite: NaN or
    infinite."""
    threshold: float = 0.0
    """Threshold of the rule."""
    window: int = Field(default=32, ge=1)
    """Number of values of the metric in a window."""
    patience: int = Field(default=1, ge=1)
    """Steps in a row in which the rule must hold."""
    action: Literal["off", "warn", "pause"] = "warn"
    """Reaction to an alarm. warn: log it, and write the evidence to sentinels/. pause: also save a
    checkpoint and end the run with exit status 77. off: none."""


def _make_sentinel_field(alarm_text: str, **sentinel: Any) -> Any:
    return Field(default=SentinelConfig(**sentinel), description=alarm_text)


class SentinelsConfig(Section):
    """The sentinels of a stage.

    A built-in sentinel's description says what its alarm means, and is the end of the alarm's
    message. A key that a recipe sets for a built-in sentinel replaces that key only.
    """

    loss_spike: SentinelConfig = _make_sentinel_field(
        "one batch pushes the weights far: look at its rows for outliers, lower optimizer.lr or "
        "max_grad_norm",
        metric="policy/loss", rule="spike", threshold=20.0,
    )  # fmt: skip
    nonfinite_step: SentinelConfig = _make_sentinel_field(
        "a gradient was not finite, and that step was skipped: look at its rows; several such "
        "steps in a row end the run",
        metric="policy/skipped_nonfinite", rule="above",
    )  # fmt: skip
    entropy_collapse: SentinelConfig = _make_sentinel_field(
        "the policy hardly explores any more: raise algorithm.entropy_coef, kl.coef or clip_high, "
        "or lower optimizer.lr",
        metric="policy/entropy/entropy", rule="shrinks", threshold=0.02, window=16,
    )  # fmt: skip
    kl_blowup: SentinelConfig = _make_sentinel_field(
        "the policy is far from its reference: raise kl.coef, or lower optimizer.lr",
        metric="*/kl/kl", rule="above", threshold=1.0, patience=3,
    )  # fmt: skip
    policy_jump: SentinelConfig = _make_sentinel_field(
        "a single batch changes the policy a lot: lower optimizer.lr, epochs or max_staleness",
        metric="policy/policy_gradient/old_kl", rule="above", threshold=0.5, patience=3,
    )  # fmt: skip
    equal_rewards: SentinelConfig = _make_sentinel_field(
        "groups of equal rewards teach nothing: look at a few answers (can the reward read their "
        "format? are the tasks too easy, or too hard?)",
        metric="rollout/reward_std*", rule="below", threshold=1e-12, patience=10,
    )  # fmt: skip
    broken_rewards: SentinelConfig = _make_sentinel_field(
        "an attempt's reward is NaN or infinite", metric="rollout/reward*", rule="nonfinite"
    )
    failed_rewards: SentinelConfig = _make_sentinel_field(
        "attempts could not be judged, and do not count: a reward raised an exception, or returned "
        "a number that is not finite or is outside its declared bounds",
        metric="rollout/failed/reward", rule="reported",
    )  # fmt: skip
    cut_off: SentinelConfig = _make_sentinel_field(
        "nearly every attempt is cut off at a limit: raise sampling.max_new_tokens, or look "
        "whether answers ever end",
        metric="rollout/truncated_share", rule="above", threshold=0.95, patience=10,
    )  # fmt: skip
    length_growth: SentinelConfig = _make_sentinel_field(
        "answers become much longer: do they earn higher rewards too?",
        metric="rollout/length_mean", rule="grows", threshold=4.0, window=16,
    )  # fmt: skip
    length_collapse: SentinelConfig = _make_sentinel_field(
        "answers become much shorter: has the policy found a short answer that always earns some "
        "reward?",
        metric="rollout/length_mean", rule="shrinks", threshold=0.2, window=16, action="off",
    )  # fmt: skip
    repetition: SentinelConfig = _make_sentinel_field(
        "attempts repeat themselves: does a reward pay for length, or is the policy "
        "breaking down?",
        metric="rollout/repetition", rule="above", threshold=0.5, patience=3,
    )  # fmt: skip
    disagreement: SentinelConfig = _make_sentinel_field(
        "the rewards and the second opinion disagree, so one of them is fooled: look at the "
        "attempts that they judge differently",
        metric="second_opinion/disagreement", rule="above", threshold=0.2,
    )  # fmt: skip
    canary: SentinelConfig = _make_sentinel_field(
        "tasks without a solution earn rewards, so the reward does not require solving them",
        metric="canary/reward", rule="above", threshold=0.1,
    )  # fmt: skip
    canary_rise: SentinelConfig = _make_sentinel_field(
        "tasks without a solution earn more than at first: the policy is learning to hack the "
        "reward",
        metric="canary/reward", rule="rises", threshold=0.05, window=4,
    )  # fmt: skip
    custom: dict[str, SentinelConfig] = Field(default_factory=dict)
    """Sentinels of your own, by name: each with a metric and a rule."""
    second_opinion: Annotated[
        tuple[SerializeAsAny[Section], ...], Slot("rewards", is_list=True)
    ] = ()
    """Rewards that are compared with the training rewards, on the same scale, and are not trained
    on."""
    canaries: Annotated[SerializeAsAny[Section] | None, Slot("environment", is_optional=True)] = (
        None
    )
    """Environment of unsolvable held-out tasks, which must earn no reward; null: none."""
    every: int = Field(default=10, ge=1)
    """Steps between second opinions, and between plays of canaries."""
    sample: int = Field(default=16, ge=1)
    """Number of attempts that get a second opinion, and of canaries played."""

    @field_validator("*", mode="before")
    @classmethod
    def _merge_default(cls, value: Any, info: Any) -> Any:
        default = cls.model_fields[info.field_name].default if info.field_name else None
        if isinstance(default, SentinelConfig) and isinstance(value, dict):
            return {**dict(default), **value}
        return value
