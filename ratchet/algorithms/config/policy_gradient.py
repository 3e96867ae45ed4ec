"""The section `policy_gradient`, which combines any advantage estimator with any policy loss.

The named algorithms (`named_policy_gradients`) are the same section with other defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ratchet.algorithms.config.advantages import (
    RLOO,
    GroupRelative,
)
from ratchet.algorithms.config.base import AlgorithmConfig, AnySection, Source, Teacher
from ratchet.algorithms.config.policy_losses import (
    PPO,
    CorrectionConfig,
    KLConfig,
    RouterConfig,
)
from ratchet.config.base import Section
from ratchet.config.resolve import Slot

Advantage = Annotated[AnySection, Slot("advantage")]
Loss = Annotated[AnySection, Slot("policy_loss")]
Shaping = Annotated[tuple[AnySection, ...], Slot("shaping", is_list=True)]

# Types of the keys whose defaults named algorithms change. A subclass that sets a new default
# reuses the type, and with it the description.
GroupSize = Annotated[int, Field(ge=1, description="Sampled attempts at each prompt.")]
Weighting = Annotated[
    Literal["token_mean", "sequence_mean", "prompt_mean", "token_sum", "fixed_length"],
    Field(
        description="Unit that weighs the same within an optimizer step: each token (DAPO), each "
        "answer (GRPO), each prompt, each token by the count of answers (token_sum), or each token "
        "over a fixed total (Dr. GRPO)."
    ),
]
EqualRewards = Annotated[
    Literal["keep", "drop", "drop_shaped"],
    Field(
        description="Groups whose rewards are all equal have no signal. drop: nor any part in the "
        "means over the batch; "
        "rewards are compared without penalties for length or truncation (DAPO). drop_shaped: "
        "compared with them."
    ),
]
OldLogprobs = Annotated[
    Literal["learner", "sampler"],
    Field(
        description="Old log-probabilities of the ratios: the learner's own before the update, or "
        "the sampler's."
    ),
]
Whiten = Annotated[bool, Field(description="Normalise advantages over all tokens of the batch.")]
PositiveNLL = Annotated[
    float,
    Field(
        ge=0,
        description="Weight of the likelihood of attempts with a reward above positive_nll_above "
        "(VAPO).",
    ),
]


class CriticConfig(Section):
    """The value model that gae reads: a copy of the policy with a scalar head."""

    lr: float | None = Field(
        default=None, gt=0, description="Its own peak learning rate; null: the policy's."
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="Batches for which it learns alone, before the policy begins to.",
    )
    value_clip: float | None = Field(
        default=0.2,
        gt=0,
        description="Values move by this much in a batch before they are clipped; null: no clip.",
    )


class PolicyGradientConfig(AlgorithmConfig):
    """A policy-gradient algorithm of any estimator with any policy loss."""

    builds: ClassVar[str] = "ratchet.algorithms.policy_gradient:build_policy_gradient"
    source: ClassVar[Source] = "rollouts"

    group_size: GroupSize = 8
    minibatches_of: Literal["groups", "attempts"] = Field(
        default="groups",
        description="Content of a mini-batch: some groups whole, whose prompts are then computed "
        "once, or some attempts of every group, which learns more a step from short prompts.",
    )
    shaping: Shaping = Field(
        default=(), description="Reward shaping, applied first and in this order."
    )
    advantage: Advantage = Field(
        default=GroupRelative(),
        description="Estimator of how much better than expected an attempt was.",
    )
    advantage_clip: float | None = Field(
        default=None, gt=0, description="Advantages are kept within this of 0; null: no bound."
    )
    whiten: Whiten = False
    equal_rewards: EqualRewards = "keep"
    truncated: Literal["keep", "drop"] = Field(
        default="keep",
        description="drop: attempts whose last answer a limit of tokens cut off count in the "
        "statistics, and don't train "
        "(DAPO).",
    )
    loss: Loss = Field(default=PPO(), description="Policy loss that is minimised.")
    old_logprobs: OldLogprobs = "learner"
    correction: CorrectionConfig | None = Field(
        default=None, description="Correction for a sampler that disagrees with the learner."
    )
    kl: KLConfig = KLConfig()
    entropy_coef: float = Field(
        default=0.0, ge=0, description="Weight of the reward for entropy (nats a token)."
    )
    positive_nll_coef: PositiveNLL = 0.0
    positive_nll_above: float = Field(
        default=0.0, description="Reward above which positive_nll_coef applies."
    )
    router: RouterConfig | None = Field(
        default=None, description="Replay and losses of the routers of a mixture of experts."
    )
    critic: CriticConfig | None = Field(
        default=None, description="Value model; needed by advantage gae, and by no other."
    )
    teacher: Teacher | None = Field(
        default=None,
        description="Directory of the model that on_policy_distillation learns from, or one by "
        "task tag.",
    )
    teacher_tokens: Literal["same", "aligned"] = Field(
        default="same",
        description="aligned: the teacher has another tokenizer, and is asked about the same text.",
    )
    weighting: Weighting = "token_mean"
    fixed_length: int | None = Field(
        default=None, ge=1, description="Tokens that weighting fixed_length divides by, per answer."
    )

    @property
    def estimators(self) -> tuple[Section, ...]:
        """Return the advantage estimators: the parts of a mixture, or the only one."""
        return getattr(self.advantage, "parts", (self.advantage,))

    @property
    def reads(self) -> frozenset[str]:
        """Return the columns and attempts that the estimators and the shaping need."""
        parts = (*self.estimators, *self.shaping)
        return frozenset[str]().union(*(getattr(part, "reads", frozenset()) for part in parts))

    @property
    def reads_reward(self) -> bool:
        """True if shaping, the positive NLL or any estimator uses the reward."""
        signals = (getattr(part, "signal", "reward") for part in self.estimators)
        return (
            bool(self.shaping)
            or self.positive_nll_coef > 0
            or any(signal != "teacher" for signal in signals)
        )

    @model_validator(mode="after")
    def _keys_agree(self) -> PolicyGradientConfig:
        """Raise ValueError if keys contradict each other, or one that is set has no effect."""
        for check in self._checks:
            check()
        if "positive_nll_above" in self.changed and not self.positive_nll_coef:
            raise ValueError(
                "positive_nll_above is not read with positive_nll_coef=0: set positive_nll_coef, "
                "or remove it"
            )
        if self.minibatches_of == "attempts" and self.minibatches == 1:
            raise ValueError(
                "minibatches_of=attempts divides nothing with minibatches=1: set minibatches, or "
                "remove it"
            )
        if self.old_logprobs == "sampler" and self.correction is not None:
            raise ValueError(
                "old_logprobs=sampler makes sampler and learner the same for correction, which "
                "then does nothing: "
                "set old_logprobs=learner, or remove correction"
            )
        return self

    @property
    def _checks(self) -> tuple[Callable[[], None], ...]:
        """Return the checks that each concern one subject, in the order in which they run."""
        return (
            self._check_group,
            self._check_rloo,
            self._check_signal,
            self._check_equal_rewards,
            self._check_critic,
            self._check_teacher,
            self._check_weighting,
            self._check_levels,
        )

    def _check_group(self) -> None:
        """Raise ValueError if a group is too small for a group baseline."""
        if self.group_size == 1 and "group" in self.reads:
            raise ValueError(
                "group_size=1 leaves the group's baseline no other attempt and every advantage is "
                "0: set group_size=2 or more"
            )

    def _check_rloo(self) -> None:
        """Raise ValueError if a group is too small for leave-one-out with a standard deviation.

        In a group of two, both advantages have the same size after scaling, whatever the rewards.
        """
        smallest_size = 3
        normalises_groups = any(
            getattr(part, "kind", "") == "normalise" and getattr(part, "over", "") == "group"
            for part in self.shaping
        )
        for part in self.estimators:
            if (
                isinstance(part, RLOO)
                and (part.scale == "std" or normalises_groups)
                and self.group_size < smallest_size
            ):
                raise ValueError(
                    f"group_size={self.group_size} with leave-one-out and a standard deviation "
                    "leaves no more than a sign of "
                    "each reward: set group_size=3 or more, or advantage.scale=none"
                )

    def _check_signal(self) -> None:
        """Raise ValueError if the advantages ignore or distort a configured change of the reward.

        Such a change is shaping, or a KL penalty in the reward.
        """
        kl_in_reward = self.kl.coef > 0 and self.kl.place == "reward"
        if all(getattr(part, "signal", "reward") != "reward" for part in self.estimators):
            for key, is_set in (("shaping", self.shaping), ("kl.place=reward", kl_in_reward)):
                if is_set:
                    raise ValueError(
                        f"{key} changes the reward of an attempt, which advantage "
                        f"{_kind(self.advantage)} does not read: "
                        "remove it, or mix in an advantage that does"
                    )
        if kl_in_reward and any(
            getattr(part, "scale", "none") == "std" for part in self.estimators
        ):
            raise ValueError(
                "kl.place=reward with advantage.scale=std divides the penalty by the spread of the "
                "group's returns, which "
                "blows it up in groups of equal rewards: set advantage.scale=none, or kl.place=loss"
            )

    def _check_equal_rewards(self) -> None:
        """Raise ValueError if equal_rewards would drop groups that have a signal."""
        if self.equal_rewards == "keep":
            return
        effect = f"equal_rewards={self.equal_rewards} leaves out groups without a signal"
        ungrouped = [
            part for part in self.estimators if "group" not in getattr(part, "reads", frozenset())
        ]
        if ungrouped:
            raise ValueError(
                f"{effect}, and advantage {_kind(ungrouped[0])} has one for groups of equal "
                "rewards too: set equal_rewards=keep"
            )
        if self.kl.coef > 0 and self.kl.place == "reward":
            raise ValueError(
                f"{effect}, and with kl.place=reward every group has one: set kl.place=loss, or "
                "equal_rewards=keep"
            )

    def _check_critic(self) -> None:
        """Raise ValueError unless there is a critic for exactly one `gae`, or neither."""
        if sum("values" in getattr(part, "reads", frozenset()) for part in self.estimators) > 1:
            raise ValueError(
                "advantage mixture has gae twice, and the critic one target: leave one of them"
            )
        if "values" in self.reads and self.critic is None:
            raise ValueError(
                "advantage gae reads a critic's values: set critic: {}, or another advantage"
            )
        if "values" not in self.reads and self.critic is not None:
            raise ValueError(
                "critic is not read without advantage gae: remove it, or set advantage.kind=gae"
            )

    def _check_teacher(self) -> None:
        """Raise ValueError if a teacher is missing, or set and not used."""
        if "teacher_logprobs" in self.reads and self.teacher is None:
            raise ValueError(
                "advantage on_policy_distillation needs a teacher: set teacher to the directory of "
                "a model"
            )
        if "teacher_logprobs" not in self.reads and self.teacher is not None:
            raise ValueError(
                "teacher is not read without advantage on_policy_distillation: remove it, or mix "
                "that in"
            )
        if self.teacher is None and self.teacher_tokens == "aligned":
            raise ValueError(
                "teacher_tokens is not read without teacher: set teacher, or remove it"
            )

    def _check_weighting(self) -> None:
        """Raise ValueError if fixed_length is missing, or set and not used."""
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
        """Raise ValueError if the correction is by token, but the loss has one value a sequence."""
        correction = self.correction
        if correction is None or getattr(self.loss, "level", "token") == "token":
            return
        if correction.weight in ("token", "turn"):
            raise ValueError(
                f"correction.weight={correction.weight} has a weight for each token, and loss "
                f"{_kind(self.loss)} one value "
                "for a sequence: set correction.weight=geometric or sequence"
            )
        if correction.mask in ("token", "turn") and correction.mask_denominator == "all":
            raise ValueError(
                f"correction.mask={correction.mask} gives some tokens of an answer the weight 0, "
                "and loss "
                f"{_kind(self.loss)} has one value for all of them: set correction.mask=geometric "
                "or sequence, or "
                "correction.mask_denominator=kept, which takes the tokens out of its ratio"
            )


def _kind(part: object) -> str:
    """Return the kind of a section, or its class's name if it has none."""
    return str(getattr(part, "kind", type(part).__name__))
