"""The config sections of the advantage estimators (the key `algorithm.advantage`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ratchet.algorithms.config.base import AlgorithmPart, AnySection
from ratchet.config.resolve import Slot

# Modules of the estimators' functions.
GROUP = "ratchet.algorithms.advantages.group_baselines"
TEMPORAL = "ratchet.algorithms.advantages.per_turn"

Scale = Literal["std", "none"]
ScaleField = Annotated[
    Scale, Field(description="Divide by the standard deviation (ddof 1) or not.")
]
Epsilon = Annotated[float, Field(gt=0, description="Added to the standard deviation.")]

# Reasons why an estimator lacks a property (see `ratchet.algorithms.properties`). `ratchet check`
# prints them.
WHOLE_BATCH = "normalised over the whole batch: the reward of one row moves the advantages of all"
SAME_STATE = (
    "a state met at two turns has two returns, be it by attempts of equal reward or twice by one "
    "attempt"
)
NO_BASELINE = (
    "no baseline of the group's own: equal rewards are a signal where others earned another"
)
KL_BY_TOKEN = "a KL penalty in the reward differs from token to token, and so do returns"


class Estimator(AlgorithmPart):
    """The options of an advantage estimator.

    Attributes:
        signal: The source of the advantages: "reward" (the attempt's reward), "parts" (each part of
            the reward by itself) or "teacher" (a teacher's log-probabilities).
        exempt_under_kl: Properties that the estimator also lacks if a KL penalty is part of the
            reward, each with the reason.
    """

    signal: ClassVar[Literal["reward", "parts", "teacher"]] = "reward"
    exempt_under_kl: ClassVar[Mapping[str, str]] = {"equal_rewards": KL_BY_TOKEN}


class GroupRelative(Estimator):
    """The reward minus the mean of the group (GRPO)."""

    function: ClassVar[str] = f"{GROUP}:group_relative"
    reads: ClassVar[frozenset[str]] = frozenset({"group"})

    kind: Literal["group_relative"] = "group_relative"
    scale: ScaleField = "std"
    epsilon: Epsilon = 1e-6


class RLOO(Estimator):
    """The reward minus the mean of the group's other attempts."""

    function: ClassVar[str] = f"{GROUP}:rloo"
    reads: ClassVar[frozenset[str]] = frozenset({"group"})

    kind: Literal["rloo"] = "rloo"
    scale: ScaleField = "none"
    epsilon: Epsilon = 1e-6


class OPO(Estimator):
    """The reward minus the group's length-weighted mean."""

    function: ClassVar[str] = f"{GROUP}:opo"
    reads: ClassVar[frozenset[str]] = frozenset({"group"})

    kind: Literal["opo"] = "opo"


class ReMax(Estimator):
    """The reward minus the reward of the group's greedy attempt."""

    function: ClassVar[str] = f"{GROUP}:remax"
    reads: ClassVar[frozenset[str]] = frozenset({"greedy"})
    exempt: ClassVar[Mapping[str, str]] = {
        "equal_rewards": "the baseline is the greedy attempt's reward, which may differ from that "
        "of all sampled ones",
        "lone_attempt": "the greedy attempt is the baseline: one sampled attempt is enough",
    }

    kind: Literal["remax"] = "remax"


class ReinforcePP(Estimator):
    """The reward-to-go, whitened over all tokens of the batch (REINFORCE++)."""

    function: ClassVar[str] = f"{GROUP}:reinforce_pp"
    exempt_under_kl: ClassVar[Mapping[str, str]] = {
        "equal_rewards": KL_BY_TOKEN,
        "lone_attempt": KL_BY_TOKEN,
    }

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    baseline: Literal["none", "group"] = Field(
        default="none", description="Take the group's mean reward off first."
    )
    epsilon: Epsilon = 1e-8

    @property
    def reads(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset({"group"} if self.baseline == "group" else ())

    @property
    def exempt(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the properties that it lacks: none if the group's mean is subtracted."""
        return (
            {}
            if self.baseline == "group"
            else {"equal_rewards": WHOLE_BATCH, "lone_attempt": WHOLE_BATCH}
        )


class GDPO(Estimator):
    """The normalised sum of the reward's parts.

    Each part is normalised within its group, and their weighted sum over the batch.
    """

    function: ClassVar[str] = f"{GROUP}:gdpo"
    reads: ClassVar[frozenset[str]] = frozenset({"group", "parts"})
    signal: ClassVar[Literal["reward", "parts", "teacher"]] = "parts"

    kind: Literal["gdpo"] = "gdpo"
    weights: dict[str, float] | None = Field(
        default=None,
        description="Weight of each part of the reward, by name; null: 1 for every part.",
    )
    epsilon: Epsilon = 1e-6


class GAE(Estimator):
    """Generalised advantage estimation with a critic."""

    function: ClassVar[str] = f"{TEMPORAL}:gae"
    reads: ClassVar[frozenset[str]] = frozenset({"values"})
    exempt: ClassVar[Mapping[str, str]] = {
        "equal_rewards": "the baseline is the critic's value, not the group",
        "lone_attempt": "the baseline is the critic's value, not the group",
    }

    kind: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount a token.")
    lam: float = Field(
        default=0.95,
        ge=0,
        le=1,
        description="Between one-step (0) and whole-episode (1) estimates.",
    )
    value_lam: float | None = Field(
        default=None, ge=0, le=1, description="The same for the critic's targets; null: lam."
    )
    length_alpha: float | None = Field(
        default=None,
        gt=0,
        description="lam = 1 - 1 / (length_alpha * length) instead, for each answer (VAPO).",
    )
    bootstrap: bool = Field(
        default=True,
        description="A truncated attempt goes on, worth what the critic says; false: it is over, "
        "as where a limit is part of "
        "the task (else not to stop can pay).",
    )

    @model_validator(mode="after")
    def _check_lam(self) -> GAE:
        """Raise ValueError if lam is set, but other keys set both lambdas."""
        if "lam" in self.changed and self.length_alpha is not None and self.value_lam is not None:
            raise ValueError(
                "lam is not read with length_alpha and value_lam, which set both lambdas: remove it"
            )
        return self


class TurnReturns(Estimator):
    """The discounted return from each turn on."""

    function: ClassVar[str] = f"{TEMPORAL}:turn_returns"
    exempt: ClassVar[Mapping[str, str]] = {
        "equal_rewards": NO_BASELINE,
        "lone_attempt": NO_BASELINE,
    }

    kind: Literal["turn_returns"] = "turn_returns"
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount a turn.")
    baseline: Literal["none", "group"] = Field(
        default="none", description="Take off the mean return of the group's turns."
    )

    @property
    def reads(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset({"group"} if self.baseline == "group" else ())


class GiGPO(Estimator):
    """The group-relative advantage of the episode plus that of the turn.

    A turn is compared with the turns of its group that began in the same state.
    """

    function: ClassVar[str] = f"{TEMPORAL}:gigpo"
    reads: ClassVar[frozenset[str]] = frozenset({"group"})

    kind: Literal["gigpo"] = "gigpo"
    gamma: float = Field(default=0.95, gt=0, le=1, description="Discount a turn.")
    step_weight: float = Field(
        default=1.0, ge=0, description="Weight of the turns' part beside the episodes'."
    )
    scale: ScaleField = "std"
    epsilon: Epsilon = 1e-6

    @property
    def exempt(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the properties that it lacks: none if step_weight=0 omits the turns' part."""
        return {"equal_rewards": SAME_STATE, "lone_attempt": SAME_STATE} if self.step_weight else {}


class OnPolicyDistillation(Estimator):
    """The teacher's log-probability of each sampled token minus the policy's."""

    function: ClassVar[str] = "ratchet.algorithms.advantages.teacher:on_policy_distillation"
    reads: ClassVar[frozenset[str]] = frozenset({"teacher_logprobs", "old_logprobs"})
    signal: ClassVar[Literal["reward", "parts", "teacher"]] = "teacher"
    exempt: ClassVar[Mapping[str, str]] = {
        "equal_rewards": "the signal is the teacher's, not the reward's",
        "lone_attempt": "the signal is the teacher's, not the group's",
    }

    kind: Literal["on_policy_distillation"] = "on_policy_distillation"


class AdvantageMixture(AlgorithmPart):
    """A weighted sum of several estimators."""

    builds: ClassVar[str] = "ratchet.algorithms.policy_gradient:build_mixture"
    function: ClassVar[str] = "ratchet.algorithms.advantages.compose:mixture"

    kind: Literal["mixture"] = "mixture"
    parts: Annotated[tuple[AnySection, ...], Slot("estimator", is_list=True)] = Field(
        min_length=1, description="Estimators, each with its weight."
    )
