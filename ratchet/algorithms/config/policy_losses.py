"""The recipe sections of policy losses, rollout correction, the KL penalty and MoE routers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ratchet.algorithms.config.base import AlgorithmPart
from ratchet.config.base import Section

POLICY = "ratchet.algorithms.losses.policy"

ClipLow = Annotated[
    float, Field(gt=0, lt=1, description="The ratio is clipped below 1 - clip_low.")
]
ClipHigh = Annotated[float, Field(gt=0, description="The ratio is clipped above 1 + clip_high.")]


class PolicyLoss(AlgorithmPart):
    """The base class of the policy losses, which a recipe sets as `algorithm.loss`.

    level: whether the loss has one value per token or per sequence. A rollout correction must have
      a weight at the same level.
    reads_old: False if the loss does not use the ratio to the old policy.
    """

    level: ClassVar[Literal["token", "sequence"]] = "token"
    reads_old: ClassVar[bool] = True


class PPO(PolicyLoss):
    """A loss that clips the probability ratio of each token (PPO)."""

    function: ClassVar[str] = f"{POLICY}:clipped_surrogate"

    kind: Literal["ppo"] = "ppo"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    dual_clip: float | None = Field(
        default=None,
        gt=1,
        description="Bounds the loss of a negative advantage by this factor (arXiv:1912.09729).",
    )


class Reinforce(PolicyLoss):
    """A loss that is the plain policy gradient, without ratio or clip."""

    function: ClassVar[str] = f"{POLICY}:reinforce"
    reads_old: ClassVar[bool] = False

    kind: Literal["reinforce"] = "reinforce"


class GSPO(PolicyLoss):
    """A loss that clips the ratio of each sequence, normalised by its length."""

    function: ClassVar[str] = f"{POLICY}:gspo"
    level: ClassVar[Literal["token", "sequence"]] = "sequence"

    kind: Literal["gspo"] = "gspo"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4


class GSPOToken(PolicyLoss):
    """A loss with the ratio of GSPO and an advantage for each token."""

    function: ClassVar[str] = f"{POLICY}:gspo_token"

    kind: Literal["gspo_token"] = "gspo_token"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4


class CISPO(PolicyLoss):
    """A loss whose clip bounds a token's weight, but never sets its gradient to 0."""

    function: ClassVar[str] = f"{POLICY}:cispo"

    kind: Literal["cispo"] = "cispo"
    clip_low: ClipLow | None = Field(
        default=None, description="The weight is clipped below 1 - clip_low; null: no lower bound."
    )
    clip_high: ClipHigh = 2.0


class TOPR(PolicyLoss):
    """A loss that weighs an answer with a negative advantage by its sequence-level ratio."""

    function: ClassVar[str] = f"{POLICY}:topr"

    kind: Literal["topr"] = "topr"
    negative_low: float = Field(default=0.0, ge=0, description="Least weight of a negative answer.")
    negative_high: float = Field(
        default=1.0, gt=0, description="Greatest weight of a negative answer."
    )


class GMPO(PolicyLoss):
    """A loss with the geometric mean of an answer's clipped token ratios."""

    function: ClassVar[str] = f"{POLICY}:gmpo"
    level: ClassVar[Literal["token", "sequence"]] = "sequence"

    kind: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(
        default=0.4, gt=0, description="Log-ratios are clipped below -clip_low."
    )
    clip_high: float = Field(
        default=0.4, gt=0, description="Log-ratios are clipped above clip_high."
    )


class SAPO(PolicyLoss):
    """A loss with a soft gate on the ratio in place of the clip."""

    function: ClassVar[str] = f"{POLICY}:sapo"

    kind: Literal["sapo"] = "sapo"
    tau_pos: float = Field(
        default=1.0, gt=0, description="Sharpness of the gate where the advantage is positive."
    )
    tau_neg: float = Field(default=1.05, gt=0, description="The same where it is negative.")


class Kimi(PolicyLoss):
    """A loss of policy mirror descent around the old policy (Kimi k1.5)."""

    function: ClassVar[str] = f"{POLICY}:kimi"
    level: ClassVar[Literal["token", "sequence"]] = "sequence"
    exempt: ClassVar[Mapping[str, str]] = {
        "on_policy": "a sum over each row, not a mean: its gradient is A sum grad log p"
    }

    kind: Literal["kimi"] = "kimi"
    tau: float = Field(default=0.1, gt=0, description="Pull towards the old policy.")


CorrectionLevel = Literal["none", "token", "turn", "sequence", "geometric"]
Denominator = Literal["all", "kept"]


class CorrectionConfig(AlgorithmPart):
    """The rollout correction, for a sampler whose probabilities differ from the learner's.

    It weighs and masks tokens by the ratio of the learner's to the sampler's probabilities.
    """

    function: ClassVar[str] = "ratchet.algorithms.rollout_correction:correct"

    weight: CorrectionLevel = Field(
        default="token",
        description="Level of the importance weight; geometric: the mean over the answer.",
    )
    weight_low: float = Field(default=0.0, ge=0, description="Least importance weight.")
    weight_high: float | None = Field(
        default=2.0, gt=0, description="Greatest importance weight; null: no bound."
    )
    mask: CorrectionLevel = Field(
        default="none",
        description="Level at which ratios are compared with the bounds; tokens out of bounds "
        "don't train.",
    )
    mask_low: float = Field(default=0.5, ge=0, description="Ratio below which tokens are masked.")
    mask_high: float = Field(default=2.0, gt=0, description="Ratio above which tokens are masked.")
    mask_denominator: Denominator = Field(
        default="all",
        description="Tokens that the loss is divided by. all: masked ones count, as in IcePop and "
        "masked importance sampling; "
        "kept: they don't, as in rejection sampling.",
    )

    @model_validator(mode="after")
    def _keys_agree(self) -> CorrectionConfig:
        if self.weight == self.mask == "none":
            raise ValueError(
                "correction with weight=none and mask=none does nothing: set one of them, or "
                "remove it"
            )
        for key, low, high in (
            ("weight", self.weight_low, self.weight_high),
            ("mask", self.mask_low, self.mask_high),
        ):
            unread_keys = sorted({f"{key}_low", f"{key}_high", f"{key}_denominator"} & self.changed)
            if getattr(self, key) == "none" and unread_keys:
                raise ValueError(
                    f"{unread_keys[0]} is not read with {key}=none: set {key}, or remove it"
                )
            if high is not None and low >= high:
                raise ValueError(f"{key}_low={low:g} is not below {key}_high={high:g}: lower it")
        return self


class StaleCorrectionConfig(CorrectionConfig):
    """The rollout correction for attempts that were generated with weights of earlier steps.

    By default a token with a ratio above 5 is masked, as in AReaL's code, and the importance weight
    has no upper bound.
    """

    weight_high: float | None = Field(
        default=None, gt=0, description="Greatest importance weight; null: no bound."
    )
    mask: CorrectionLevel = Field(
        default="token",
        description="Level at which ratios are compared with the bounds; tokens out of bounds "
        "don't train.",
    )
    mask_low: float = Field(default=0.0, ge=0, description="Ratio below which tokens are masked.")
    mask_high: float = Field(default=5.0, gt=0, description="Ratio above which tokens are masked.")


class KLConfig(Section):
    """The KL penalty that keeps the policy near the model that the stage starts from."""

    coef: float = Field(default=0.0, ge=0, description="Weight of the penalty; 0: none.")
    objective: Literal["reverse", "forward"] = Field(
        default="reverse", description="KL(policy || reference), or KL(reference || policy)."
    )
    estimator: Literal["k1", "k2", "k3"] | None = Field(
        default=None,
        description="http://joschu.net/blog/kl-approx.html; null: k3 in the loss, k1 in the "
        "reward.",
    )
    importance_weight: bool = Field(
        default=True,
        description="Weigh a token by its ratio to what drew it: the gradient then stays right "
        "over several optimizer steps; "
        "false: as GRPO was published, with objective=forward.",
    )
    place: Literal["loss", "reward"] = Field(
        default="loss", description="A term of the loss, or part of each token's reward."
    )
    target: float | None = Field(
        default=None,
        gt=0,
        description="KL (nats a token) that the coefficient adapts towards; null: it is fixed.",
    )
    rate: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="Speed of that adaptation: a step changes coef by a fifth of it.",
    )

    @model_validator(mode="after")
    def _keys_agree(self) -> KLConfig:
        if self.coef == 0 and self.changed - {"coef"}:
            raise ValueError(
                f"{min(self.changed - {'coef'})} is not read with coef=0: set coef, or remove it"
            )
        if self.objective == "forward" and self.estimator in ("k1", "k2"):
            raise ValueError(
                f"objective=forward has no estimator {self.estimator}: set estimator=k3"
            )
        if self.place == "reward" and self.objective == "forward":
            raise ValueError(
                "place=reward has the gradient of the reverse KL alone: set objective=reverse, or "
                "place=loss"
            )
        if self.place == "reward" and self.estimator in ("k2", "k3"):
            raise ValueError(
                f"estimator={self.estimator} as a reward has the gradient of no divergence: set "
                "estimator=k1, or place=loss"
            )
        if not self.importance_weight and self.place == "reward":
            raise ValueError(
                "importance_weight is not read with place=reward: set place=loss, or remove it"
            )
        if not self.importance_weight and self.objective == "reverse" and self.estimator != "k2":
            raise ValueError(
                f"estimator={self.estimator or 'k3'} has its gradient through importance_weight: "
                "set objective=forward, "
                "estimator=k2, or importance_weight=true"
            )
        if self.target is None and "rate" in self.changed:
            raise ValueError("rate is not read without target: set target, or remove rate")
        return self


class RouterConfig(Section):
    """The options for the routers of a mixture of experts.

    They are the replay of the sampler's routing, losses that balance the experts' loads, and
    metrics.
    """

    replay: bool = Field(
        default=False,
        description="The policy's learner sends each token to the experts that the sampler sent it "
        "to (arXiv:2510.11370).",
    )
    balance_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the load-balance loss of each sequence (arXiv:2412.19437, section "
        "2.1.2).",
    )
    z_coef: float = Field(
        default=0.0, ge=0, description="Weight of the router z-loss (arXiv:2202.08906, eq. 5)."
    )
    measure: bool = Field(
        default=True,
        description="Measure loads and entropy, and which choices a replay has changed; false: "
        "where ranks can't.",
    )

    @property
    def watches(self) -> bool:
        """True if a metric or a loss term reads the routers' outputs."""
        return self.measure or self.balance_coef > 0 or self.z_coef > 0

    @model_validator(mode="after")
    def _does_something(self) -> RouterConfig:
        if not self.measure and (self.balance_coef or self.z_coef):
            raise ValueError(
                "measure=false is not read with a loss of the routers, which measures: remove one "
                "of them"
            )
        if not (self.replay or self.watches):
            raise ValueError(
                "router neither replays nor measures anything: set replay=true, or remove it"
            )
        return self
