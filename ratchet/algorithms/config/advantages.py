"""The config sections of the advantage estimators (the key `algorithm.advantage`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from ratchet.algorithms.config.base import AlgorithmPart
from ratchet.config.base import Section
from ratchet.config.resolve import Slot

# Modules of the estimators' functions.
GROUP = "ratchet.algorithms.advantages.group_baselines"
PER_TURN = "ratchet.algorithms.advantages.per_turn"

Scale = Literal["std", "none"]
ScaleField = Annotated[
    Scale, Field(description="std: divide by the standard deviation (ddof 1). none: do not divide.")
]
Epsilon = Annotated[float, Field(gt=0, description="Added to the standard deviation.")]

# Reasons why an estimator lacks a property (see `ratchet.algorithms.properties`). `ratchet check`
# prints them.
WHOLE_BATCH = "normalised over the whole batch: the reward of one row moves the advantages of all"
SAME_STATE = (
    "turns from the same state can have different returns, even within one attempt or among "
    "attempts of equal reward"
)
NO_BASELINE = (
    "by default there is no baseline of the group: equal rewards still give advantages other than 0"
)
KL_BY_TOKEN = "a KL penalty in the reward differs from token to token, and so do returns"


class Estimator(AlgorithmPart):
    """The base class of the advantage estimators' sections."""

    signal: ClassVar[Literal["reward", "parts", "teacher"]] = "reward"
    """The source of the advantages: "reward" (the attempt's reward), "parts" (each part of the
    reward by itself) or "teacher" (a teacher's log-probabilities)."""
    exempt_under_kl: ClassVar[Mapping[str, str]] = {"equal_rewards": KL_BY_TOKEN}
    """Further properties, besides those in `exempt`, that do not hold if a KL penalty is part of
    the reward, with reasons. equal_rewards: equal rewards in a group give advantages of 0.
    lone_attempt: a group of one attempt gives 0 or an error."""

    @property
    def estimators(self) -> tuple[Estimator, ...]:
        """Return the estimators of the section: itself, or the parts of a mixture."""
        return (self,)

    @property
    def divides_by_std(self) -> bool:
        """True if advantages are divided by the standard deviation of the group's rewards."""
        return False


if TYPE_CHECKING:
    AnyEstimator = Estimator
else:
    # At run time any Section is accepted, because a user's estimator section need not inherit
    # Estimator; `config.resolve` adds the missing members.
    AnyEstimator = SerializeAsAny[Section]


class GroupRelative(Estimator):
    """GRPO's advantage: the reward, normalised within the group."""

    function: ClassVar[str] = f"{GROUP}:group_relative"
    reads: ClassVar[frozenset[str]] = frozenset({"group"})

    kind: Literal["group_relative"] = "group_relative"
    scale: Literal["std", "batch_std", "none"] = "std"
    """std: divide by the standard deviation of the group (ddof 1). batch_std: by that of the batch
    (LitePPO). none: do not divide."""
    epsilon: Epsilon = 1e-6

    @property
    def divides_by_std(self) -> bool:
        return self.scale == "std"


class RLOO(Estimator):
    """RLOO's leave-one-out advantage: the reward minus the mean of the group's other attempts."""

    function: ClassVar[str] = f"{GROUP}:rloo"
    reads: ClassVar[frozenset[str]] = frozenset({"group"})

    kind: Literal["rloo"] = "rloo"
    scale: ScaleField = "none"
    epsilon: Epsilon = 1e-6

    @property
    def divides_by_std(self) -> bool:
        return self.scale == "std"


class OPO(Estimator):
    """OPO's advantage: the reward minus the group's mean reward, a mean weighted by length."""

    function: ClassVar[str] = f"{GROUP}:opo"
    reads: ClassVar[frozenset[str]] = frozenset({"group"})

    kind: Literal["opo"] = "opo"


class ReMax(Estimator):
    """ReMax's advantage: the reward minus the reward of the group's greedy attempt."""

    function: ClassVar[str] = f"{GROUP}:remax"
    reads: ClassVar[frozenset[str]] = frozenset({"greedy"})
    exempt: ClassVar[Mapping[str, str]] = {
        "equal_rewards": "the baseline is the greedy attempt's reward, which may differ from the "
        "sampled attempts' rewards",
        "lone_attempt": "the greedy attempt is the baseline: one sampled attempt is enough",
    }

    kind: Literal["remax"] = "remax"


class ReinforcePP(Estimator):
    """REINFORCE++'s advantage: the reward-to-go, normalised over all tokens of the batch."""

    function: ClassVar[str] = f"{GROUP}:reinforce_pp"
    exempt_under_kl: ClassVar[Mapping[str, str]] = {
        "equal_rewards": KL_BY_TOKEN,
        "lone_attempt": KL_BY_TOKEN,
    }

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    baseline: Literal["none", "group"] = "none"
    """none: no baseline besides the batch's mean. group: first subtract the group's mean reward."""
    epsilon: Epsilon = 1e-8

    @property
    def reads(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset({"group"} if self.baseline == "group" else ())

    @property
    def exempt(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the properties that the estimator lacks: none with baseline=group."""
        return (
            {}
            if self.baseline == "group"
            else {"equal_rewards": WHOLE_BATCH, "lone_attempt": WHOLE_BATCH}
        )


class GDPO(Estimator):
    """GDPO's advantage: the normalised sum of the reward's normalised parts.

    Each part is normalised within its group. Their weighted sum is normalised over the batch.
    """

    function: ClassVar[str] = f"{GROUP}:gdpo"
    reads: ClassVar[frozenset[str]] = frozenset({"group", "parts"})
    signal: ClassVar[Literal["reward", "parts", "teacher"]] = "parts"

    kind: Literal["gdpo"] = "gdpo"
    weights: dict[str, float] | None = None
    """Weight of each part of the reward, by name; null: 1 for every part."""
    epsilon: Epsilon = 1e-6


class GAE(Estimator):
    """GAE, generalised advantage estimation with a critic."""

    function: ClassVar[str] = f"{PER_TURN}:gae"
    reads: ClassVar[frozenset[str]] = frozenset({"values"})
    exempt: ClassVar[Mapping[str, str]] = {
        "equal_rewards": "the baseline is the critic's value, not the group",
        "lone_attempt": "the baseline is the critic's value, not the group",
    }

    kind: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount factor per token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda: 0 gives one-step estimates, 1 whole-episode estimates."""
    value_lam: float | None = Field(default=None, ge=0, le=1)
    """Lambda of the critic's targets; null: lam."""
    length_alpha: float | None = Field(default=None, gt=0)
    """Sets lambda to 1 - 1 / (length_alpha * length) for each answer (VAPO); null: lambda is
    lam."""
    bootstrap: bool = True
    """true: after a truncated attempt, the critic's value stands for the rewards to come. false:
    truncation ends the episode with value 0. Choose false if the limit is part of the task;
    otherwise the policy may gain by never stopping."""

    def check_keys(self) -> None:
        """Raise ValueError if lam is set, but other keys set both lambdas."""
        if "lam" in self.changed and self.length_alpha is not None and self.value_lam is not None:
            raise ValueError(
                "lam is not read with length_alpha and value_lam, which set the lambdas of policy "
                "and critic: remove lam"
            )


class TurnReturns(Estimator):
    """The discounted return of each turn."""

    function: ClassVar[str] = f"{PER_TURN}:turn_returns"
    exempt: ClassVar[Mapping[str, str]] = {
        "equal_rewards": NO_BASELINE,
        "lone_attempt": NO_BASELINE,
    }

    kind: Literal["turn_returns"] = "turn_returns"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount factor per turn."""
    baseline: Literal["none", "group"] = "none"
    """none: no baseline. group: subtract the mean return of the group's turns."""

    @property
    def reads(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset({"group"} if self.baseline == "group" else ())


class GiGPO(Estimator):
    """GiGPO's advantage: the sum of the episode's and the turn's group-relative advantages.

    A turn is compared with the turns of its group that began in the same state.
    """

    function: ClassVar[str] = f"{PER_TURN}:gigpo"
    reads: ClassVar[frozenset[str]] = frozenset({"group"})

    kind: Literal["gigpo"] = "gigpo"
    gamma: float = Field(default=0.95, gt=0, le=1)
    """Discount factor per turn."""
    step_weight: float = Field(default=1.0, ge=0)
    """Weight of the turn's advantage; the episode's has weight 1."""
    scale: ScaleField = "std"
    epsilon: Epsilon = 1e-6

    @property
    def divides_by_std(self) -> bool:
        return self.scale == "std"

    @property
    def exempt(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the properties that the estimator lacks: none with step_weight=0."""
        return {"equal_rewards": SAME_STATE, "lone_attempt": SAME_STATE} if self.step_weight else {}


class OnPolicyDistillation(Estimator):
    """The advantage of on-policy distillation: log teacher - log policy of each sampled token."""

    function: ClassVar[str] = "ratchet.algorithms.advantages.teacher:on_policy_distillation"
    reads: ClassVar[frozenset[str]] = frozenset({"teacher_logprobs", "old_logprobs"})
    signal: ClassVar[Literal["reward", "parts", "teacher"]] = "teacher"
    exempt: ClassVar[Mapping[str, str]] = {
        "equal_rewards": "the signal is the teacher's, not the reward's",
        "lone_attempt": "the signal is the teacher's, not the group's",
    }

    kind: Literal["on_policy_distillation"] = "on_policy_distillation"


class AdvantageMixture(Estimator):
    """A weighted sum of several estimators' advantages."""

    builds: ClassVar[str] = "ratchet.algorithms.policy_gradient:build_mixture"
    function: ClassVar[str] = "ratchet.algorithms.advantages.compose:mixture"

    kind: Literal["mixture"] = "mixture"
    parts: Annotated[tuple[AnyEstimator, ...], Slot("estimator", is_list=True)] = Field(
        min_length=1
    )
    """Estimators, each with its weight."""

    @property
    def estimators(self) -> tuple[Estimator, ...]:
        return self.parts
