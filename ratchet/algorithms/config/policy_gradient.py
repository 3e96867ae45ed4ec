"""The section `policy_gradient`, which combines any advantage estimator with any policy loss.

The named algorithms (`named_policy_gradients`) are the same section with other defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from ratchet.algorithms.config.advantages import (
    RLOO,
    AnyEstimator,
    Estimator,
    GroupRelative,
)
from ratchet.algorithms.config.base import AlgorithmConfig, Teacher, list_teacher_paths
from ratchet.algorithms.config.policy_losses import (
    PPO,
    AnyPolicyLoss,
    CorrectionConfig,
    KLConfig,
    RouterConfig,
)
from ratchet.algorithms.config.shaping import AnyShaping, NormaliseRewards
from ratchet.config.base import Section
from ratchet.config.resolve import Slot
from ratchet.config.sections import Source

Advantage = Annotated[AnyEstimator, Slot("advantage")]
Loss = Annotated[AnyPolicyLoss, Slot("policy_loss")]
Shaping = Annotated[tuple[AnyShaping, ...], Slot("shaping", is_list=True)]

# Types of the keys for which named algorithms set other defaults. The subclasses reuse these types
# together with their descriptions.
GroupSize = Annotated[int, Field(ge=1, description="Sampled attempts at each prompt.")]
Weighting = Annotated[
    Literal["token_mean", "sequence_mean", "prompt_mean", "token_sum", "fixed_length"],
    Field(
        description="Loss aggregation over an optimizer step. token_mean: the mean over all tokens "
        "(DAPO). sequence_mean: the mean over answers of their token means (GRPO). prompt_mean: "
        "the mean over prompts of their token means. token_sum: the mean over answers of their "
        "token sums. fixed_length: token_sum divided by fixed_length (Dr. GRPO)."
    ),
]
EqualRewards = Annotated[
    Literal["keep", "drop", "drop_shaped"],
    Field(
        description="keep: keep all groups. drop: remove groups whose rewards are all equal, which "
        "have no signal, from the means over the batch (DAPO); penalties for length or truncation "
        "are ignored in the comparison. drop_shaped: the same, but the comparison includes these "
        "penalties."
    ),
]
OldLogprobs = Annotated[
    Literal["learner", "sampler"],
    Field(
        description="Old log-probabilities in the importance ratios: computed by the learner "
        "before the update, or recorded by the sampler."
    ),
]
Whiten = Annotated[
    bool,
    Field(
        description="Advantage normalization: subtract the mean over all tokens of the batch, and "
        "divide by the standard deviation."
    ),
]
PositiveNLL = Annotated[
    float,
    Field(
        ge=0,
        description="Weight of an added NLL loss on attempts with a reward above "
        "positive_nll_above (VAPO).",
    ),
]


class CriticConfig(Section):
    """The critic (value model) for gae: a copy of the policy with a scalar head."""

    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of the critic; null: the policy's."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start of the stage that train the critic alone."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Value clipping: the largest allowed difference between a value and its value before the
    update; null: no clip."""


class PolicyGradientConfig(AlgorithmConfig):
    """A policy-gradient algorithm that combines any advantage estimator with any policy loss."""

    builds: ClassVar[str] = "ratchet.algorithms.policy_gradient:build_policy_gradient"
    source: ClassVar[Source] = "rollouts"

    group_size: GroupSize = 8
    minibatches_of: Literal["groups", "attempts"] = "groups"
    """Content of a mini-batch. groups: some groups as a whole, so that a prompt is computed once
    for all attempts. attempts: some attempts of every group, so that each optimizer step sees all
    prompts of the batch. Each prompt is then computed once per mini-batch, which is cheap if
    prompts are short."""
    shaping: Shaping = ()
    """Reward shaping before advantages are estimated, in this order."""
    advantage: Advantage = GroupRelative()
    """Advantage estimator."""
    advantage_clip: float | tuple[float, float] | None = None
    """Number above 0: advantages are clipped to [-advantage_clip, advantage_clip]. [low, high]: to
    this range, which includes 0. null: no clip."""
    malformed_call_advantage: float | None = Field(default=None, lt=0, allow_inf_nan=False)
    """Advantage of all tokens of a turn with a tool call that can't be parsed, in place of the
    estimated one, such as -5; advantage_clip applies to it. null: as estimated."""
    malformed_thinking_advantage: float | None = Field(default=None, lt=0, allow_inf_nan=False)
    """The same for a turn whose tags <think> and </think>, or [THINK] and [/THINK], do not enclose
    exactly one thought at its beginning."""
    whiten: Whiten = False
    equal_rewards: EqualRewards = "keep"
    mean_reward_range: tuple[float, float] | None = None
    """Bounds of a group's mean reward, as in [0.1, 0.9]. A group whose mean is not between them, or
    equals one, is removed from the loss, because its prompt is too hard or too easy. The reward is
    the one before shaping. rollouts.dynamic_sampling replaces these groups too. null: no bounds."""
    truncated: Literal["keep", "drop"] = "keep"
    """Attempts whose last answer was cut off by a token limit. keep: they train. drop: they don't
    train, but count in the statistics of their group (overlong filtering of DAPO)."""
    loss: Loss = PPO()
    """Policy loss."""
    old_logprobs: OldLogprobs = "learner"
    correction: CorrectionConfig | None = None
    """Rollout correction: importance sampling (TIS, IcePop) for a sampler that differs from the
    learner; null: none."""
    kl: KLConfig = KLConfig()
    """KL penalty to the model at the start of the stage."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus (nats per token)."""
    positive_nll_coef: PositiveNLL = 0.0
    positive_nll_above: float = 0.0
    """Reward above which positive_nll_coef applies."""
    router: RouterConfig | None = None
    """Router replay, router losses and router metrics of a mixture of experts; null: none."""
    critic: CriticConfig | None = None
    """Critic (value model), which advantage gae reads; null: none."""
    teacher: Teacher | None = None
    """Directory of the teacher's model for on_policy_distillation, or a directory for each task
    tag."""
    teacher_tokens: Literal["same", "aligned"] = "same"
    """same: the teacher has the policy's tokenizer. aligned: the teacher has another tokenizer, so
    the text is tokenised again for it, and its log-probabilities are aligned by text spans."""
    weighting: Weighting = "token_mean"
    fixed_length: int | None = Field(default=None, ge=1)
    """Number of tokens per answer that weighting=fixed_length divides by."""

    @property
    def estimators(self) -> tuple[Estimator, ...]:
        """Return the advantage estimators: the parts of a mixture, or the only one."""
        return self.advantage.estimators

    @property
    def advantage_bounds(self) -> tuple[float, float] | None:
        """Return the bounds (low, high) that advantages are clipped to; None: there is no clip."""
        if self.advantage_clip is None or isinstance(self.advantage_clip, tuple):
            return self.advantage_clip
        return -self.advantage_clip, self.advantage_clip

    @property
    def reads(self) -> frozenset[str]:
        """Return what the estimators and the shaping need, see `AlgorithmPart.reads`."""
        parts = (*self.estimators, *self.shaping)
        return frozenset[str]().union(*(part.reads for part in parts))

    @property
    def reads_reward(self) -> bool:
        """True if shaping, the positive NLL or any estimator uses the reward."""
        return (
            bool(self.shaping)
            or self.positive_nll_coef > 0
            or any(part.signal != "teacher" for part in self.estimators)
        )

    @property
    def n_attempts(self) -> int:
        return self.group_size

    @property
    def splits_groups(self) -> bool:
        return self.minibatches_of == "attempts"

    @property
    def corrects_rollouts(self) -> bool:
        return self.correction is not None

    @property
    def weights_rollouts(self) -> bool:
        return self.correction is not None and self.correction.weight != "none"

    @property
    def critic_warmup_steps(self) -> int:
        return 0 if self.critic is None else self.critic.warmup_steps

    def limit_critic_warmup(self, maximum: int) -> Self:
        if self.critic is None or self.critic.warmup_steps <= maximum:
            return self
        critic = self.critic.model_copy(update={"warmup_steps": maximum})
        return self.model_copy(update={"critic": critic})

    @property
    def penalty_starts(self) -> Mapping[int, int]:
        starts = enumerate(part.penalty_start for part in self.shaping)
        return {index: start for index, start in starts if start is not None}

    @property
    def teacher_paths(self) -> tuple[str, ...]:
        return list_teacher_paths(self.teacher)

    def suggest_correction(self) -> str | None:
        """Return the keys that correct for attempts sampled with older weights; None: none needed.

        With old_logprobs=learner, importance ratios are relative to the learner's weights at the
        start of the step. They do not correct for the older weights that sampled the attempt.
        """
        has_ratio = self.loss.reads_old
        if self.corrects_rollouts or (has_ratio and self.old_logprobs == "sampler"):
            return None
        # A loss with one ratio per answer also needs one correction weight per answer.
        level = "{weight: geometric}" if self.loss.level == "sequence" else "{}"
        alternative = ", or algorithm.old_logprobs=sampler" if has_ratio else ""
        return f"algorithm.correction={level}{alternative}"

    def check_keys(self) -> None:
        for check in self._checks:
            check()
        if "positive_nll_above" in self.changed and not self.positive_nll_coef:
            raise ValueError(
                "positive_nll_above is not read with positive_nll_coef=0: set positive_nll_coef, "
                "or remove positive_nll_above"
            )
        if self.minibatches_of == "attempts" and self.minibatches == 1:
            raise ValueError(
                "minibatches_of=attempts has no effect with minibatches=1: set minibatches, or "
                "remove minibatches_of"
            )
        if self.old_logprobs == "sampler" and self.correction is not None:
            raise ValueError(
                "correction has no effect with old_logprobs=sampler, which makes every ratio "
                "between learner and sampler 1: set old_logprobs=learner, or remove correction"
            )

    @property
    def _checks(self) -> tuple[Callable[[], None], ...]:
        """Return the checks, each for one group of related keys, in the order in which they run."""
        return (
            self._check_group_size,
            self._check_rloo,
            self._check_signal,
            self._check_advantage_clip,
            self._check_equal_rewards,
            self._check_mean_reward_range,
            self._check_critic,
            self._check_teacher,
            self._check_weighting,
            self._check_levels,
        )

    def _check_group_size(self) -> None:
        """Raise ValueError if a group is too small for a group baseline."""
        if self.group_size == 1 and "group" in self.reads:
            raise ValueError(
                "group_size=1 makes every advantage 0, because the group's baseline needs other "
                "attempts: set group_size=2 or more"
            )

    def _check_rloo(self) -> None:
        """Raise ValueError if a group is too small for leave-one-out with a standard deviation.

        In a group of two, the size of the scaled advantages does not depend on the rewards.
        """
        min_size = 3
        normalises_groups = any(
            isinstance(part, NormaliseRewards) and part.over == "group" for part in self.shaping
        )
        for part in self.estimators:
            if (
                isinstance(part, RLOO)
                and (part.scale == "std" or normalises_groups)
                and self.group_size < min_size
            ):
                raise ValueError(
                    f"group_size={self.group_size} with leave-one-out and a standard deviation "
                    "leaves only the sign of each advantage: set group_size=3 or more, or "
                    "advantage.scale=none"
                )

    def _check_signal(self) -> None:
        """Raise ValueError if the advantages ignore shaping, or ignore or distort a KL penalty."""
        kl_in_reward = self.kl.coef > 0 and self.kl.place == "reward"
        if all(part.signal != "reward" for part in self.estimators):
            for key, is_set in (("shaping", self.shaping), ("kl.place=reward", kl_in_reward)):
                if is_set:
                    raise ValueError(
                        f"{key} has no effect, because advantage {_kind(self.advantage)} does not "
                        f"read the reward: remove {key}, or mix in an advantage that reads it"
                    )
        if kl_in_reward and any(part.divides_by_std for part in self.estimators):
            raise ValueError(
                "kl.place=reward with advantage.scale=std divides the penalty by the standard "
                "deviation of the group's returns, which makes it huge in groups of equal rewards: "
                "set advantage.scale=none, or kl.place=loss"
            )

    def _check_advantage_clip(self) -> None:
        """Raise ValueError unless advantage_clip is above 0, or a range around 0."""
        if self.advantage_bounds is None:
            return
        low, high = self.advantage_bounds
        if not low < 0 < high:
            raise ValueError(
                f"advantage_clip leaves advantages from {low:g} to {high:g}: set a number above 0, "
                "or a range around 0 such as [-2, 1]"
            )

    def _check_equal_rewards(self) -> None:
        """Raise ValueError if equal_rewards would drop groups that have a signal."""
        if self.equal_rewards == "keep":
            return
        effect = f"equal_rewards={self.equal_rewards} removes groups without a signal"
        without_group_baseline = [part for part in self.estimators if "group" not in part.reads]
        if without_group_baseline:
            raise ValueError(
                f"{effect}, but with advantage {_kind(without_group_baseline[0])} groups of equal "
                "rewards have a signal too: set equal_rewards=keep"
            )
        if self.kl.coef > 0 and self.kl.place == "reward":
            raise ValueError(
                f"{effect}, but with kl.place=reward every group has a signal: set kl.place=loss, "
                "or equal_rewards=keep"
            )

    def _check_mean_reward_range(self) -> None:
        """Raise ValueError if the range is empty, or if no reward is read."""
        if self.mean_reward_range is None:
            return
        low, high = self.mean_reward_range
        if low >= high:
            raise ValueError(
                f"mean_reward_range is empty, because {low:g} is not below {high:g}: lower {low:g}"
            )
        if all(part.signal == "teacher" for part in self.estimators):
            raise ValueError(
                f"mean_reward_range is not read with advantage {_kind(self.advantage)}, which "
                "needs no reward: remove mean_reward_range"
            )

    def _check_critic(self) -> None:
        """Raise ValueError unless there is one `gae` with a critic, or neither of them."""
        if sum("values" in part.reads for part in self.estimators) > 1:
            raise ValueError(
                "advantage mixture has gae twice, but the critic can have only one target: remove "
                "one gae"
            )
        if "values" in self.reads and self.critic is None:
            raise ValueError(
                "advantage gae reads a critic's values: set critic: {}, or another advantage"
            )
        if "values" not in self.reads and self.critic is not None:
            raise ValueError(
                "critic is not read without advantage gae: remove critic, or set advantage.kind=gae"
            )

    def _check_teacher(self) -> None:
        """Raise ValueError if a teacher is missing, or is set but not used."""
        if "teacher_logprobs" in self.reads and self.teacher is None:
            raise ValueError(
                "advantage on_policy_distillation needs a teacher: set teacher to the directory of "
                "a model"
            )
        if "teacher_logprobs" not in self.reads and self.teacher is not None:
            raise ValueError(
                "teacher is not read without advantage on_policy_distillation: remove teacher, or "
                "mix in that advantage"
            )
        if self.teacher is None and self.teacher_tokens == "aligned":
            raise ValueError(
                "teacher_tokens is not read without teacher: set teacher, or remove teacher_tokens"
            )

    def _check_weighting(self) -> None:
        """Raise ValueError if fixed_length is missing, or is set but not used."""
        if self.weighting == "fixed_length" and self.fixed_length is None:
            raise ValueError(
                "weighting=fixed_length needs fixed_length: set it to the stage's "
                "sampling.max_new_tokens"
            )
        if self.weighting != "fixed_length" and self.fixed_length is not None:
            raise ValueError(
                f"fixed_length={self.fixed_length} is not read with weighting={self.weighting}: "
                "set weighting=fixed_length, or remove fixed_length"
            )

    def _check_levels(self) -> None:
        """Raise ValueError if the correction is per token, but the loss is per sequence."""
        correction = self.correction
        if correction is None or self.loss.level == "token":
            return
        if correction.weight in ("token", "turn"):
            raise ValueError(
                f"correction.weight={correction.weight} gives each token a weight, but loss "
                f"{_kind(self.loss)} has one value per sequence: set correction.weight=geometric "
                "or sequence"
            )
        if correction.mask in ("token", "turn") and correction.mask_denominator == "all":
            raise ValueError(
                f"correction.mask={correction.mask} gives some tokens of an answer the weight 0, "
                f"but loss {_kind(self.loss)} has one value per sequence: set "
                "correction.mask=geometric or sequence, or correction.mask_denominator=kept"
            )


def _kind(part: Section) -> str:
    """Return the kind of a section, or its class's name if it has none."""
    return part.kind_name or type(part).__name__
