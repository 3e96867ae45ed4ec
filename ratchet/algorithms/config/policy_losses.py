"""The recipe sections of policy losses, rollout correction, the KL penalty and MoE routers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from ratchet.algorithms.config.base import AlgorithmPart
from ratchet.config.base import Section

POLICY = "ratchet.algorithms.losses.policy"

ClipLow = Annotated[
    float, Field(gt=0, lt=1, description="The ratio is clipped below 1 - clip_low.")
]
ClipHigh = Annotated[float, Field(gt=0, description="The ratio is clipped above 1 + clip_high.")]


class PolicyLoss(AlgorithmPart):
    """The base class of the policy losses, which a recipe sets as `algorithm.loss`.

    level: "token" or "sequence", the unit for which the loss has one value. A rollout correction
      must have a weight at the same level.
    reads_old: True if the loss uses the ratio to the old policy.
    """

    level: ClassVar[Literal["token", "sequence"]] = "token"
    reads_old: ClassVar[bool] = True


if TYPE_CHECKING:
    AnyPolicyLoss = PolicyLoss
else:
    AnyPolicyLoss = SerializeAsAny[Section]  # `resolve` adds what a user's section lacks


class PPO(PolicyLoss):
    """PPO's clipped loss: the probability ratio of each token is clipped (PPO clip)."""

    function: ClassVar[str] = f"{POLICY}:clipped_surrogate"

    kind: Literal["ppo"] = "ppo"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    dual_clip: float | None = Field(default=None, gt=1)
    """Dual clip: bounds the loss of a negative advantage A by -dual_clip * A (arXiv:1912.09729);
    null: no bound."""


class Reinforce(PolicyLoss):
    """REINFORCE: the plain policy gradient, without ratio or clip."""

    function: ClassVar[str] = f"{POLICY}:reinforce"
    reads_old: ClassVar[bool] = False

    kind: Literal["reinforce"] = "reinforce"


class GSPO(PolicyLoss):
    """GSPO's loss: the length-normalised ratio of each sequence is clipped."""

    function: ClassVar[str] = f"{POLICY}:gspo"
    level: ClassVar[Literal["token", "sequence"]] = "sequence"

    kind: Literal["gspo"] = "gspo"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4


class GSPOToken(PolicyLoss):
    """GSPO-token's loss: GSPO's sequence ratio with an advantage for each token."""

    function: ClassVar[str] = f"{POLICY}:gspo_token"

    kind: Literal["gspo_token"] = "gspo_token"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4


class CISPO(PolicyLoss):
    """CISPO's loss: the clip bounds a token's importance weight, but never zeroes its gradient."""

    function: ClassVar[str] = f"{POLICY}:cispo"

    kind: Literal["cispo"] = "cispo"
    clip_low: ClipLow | None = None
    """The weight is clipped below 1 - clip_low; null: no lower bound."""
    clip_high: ClipHigh = 2.0


class TOPR(PolicyLoss):
    """TOPR's loss: an answer with a negative advantage is weighted by its sequence-level ratio."""

    function: ClassVar[str] = f"{POLICY}:topr"

    kind: Literal["topr"] = "topr"
    negative_low: float = Field(default=0.0, ge=0)
    """Lowest weight of an answer with a negative advantage."""
    negative_high: float = Field(default=1.0, gt=0)
    """Highest weight of an answer with a negative advantage."""


class GMPO(PolicyLoss):
    """GMPO's loss: it uses the geometric mean of an answer's clipped token ratios."""

    function: ClassVar[str] = f"{POLICY}:gmpo"
    level: ClassVar[Literal["token", "sequence"]] = "sequence"

    kind: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(default=0.4, gt=0)
    """Log-ratios are clipped below -clip_low."""
    clip_high: float = Field(default=0.4, gt=0)
    """Log-ratios are clipped above clip_high."""


class SAPO(PolicyLoss):
    """SAPO's loss: a soft gate on the ratio, in place of the PPO clip."""

    function: ClassVar[str] = f"{POLICY}:sapo"

    kind: Literal["sapo"] = "sapo"
    tau_pos: float = Field(default=1.0, gt=0)
    """Sharpness of the gate for positive advantages."""
    tau_neg: float = Field(default=1.05, gt=0)
    """Sharpness of the gate for negative advantages."""


class Kimi(PolicyLoss):
    """Kimi k1.5's loss: policy mirror descent around the old policy."""

    function: ClassVar[str] = f"{POLICY}:kimi"
    level: ClassVar[Literal["token", "sequence"]] = "sequence"
    exempt: ClassVar[Mapping[str, str]] = {
        "on_policy": "a sum over each row, not a mean: its gradient is A sum grad log p"
    }

    kind: Literal["kimi"] = "kimi"
    tau: float = Field(default=0.1, gt=0)
    """Weight of the pull towards the old policy."""


CorrectionLevel = Literal["none", "token", "turn", "sequence", "geometric"]
Denominator = Literal["all", "kept"]


class CorrectionConfig(AlgorithmPart):
    """The rollout correction: importance sampling for a sampler that differs from the learner.

    It weights and masks tokens by the ratio of the learner's probability to the sampler's.
    """

    function: ClassVar[str] = "ratchet.algorithms.rollout_correction:correct"

    weight: CorrectionLevel = "token"
    """Unit that shares one importance weight. token, turn, sequence (the answer): the product of
    the unit's token ratios. geometric: the answer, with the geometric mean of its token ratios.
    none: no weights."""
    weight_low: float = Field(default=0.0, ge=0)
    """Lowest importance weight."""
    weight_high: float | None = Field(default=2.0, gt=0)
    """Highest importance weight; null: no bound."""
    mask: CorrectionLevel = "none"
    """Unit whose ratio is compared with mask_low and mask_high. Outside these bounds the unit's
    tokens don't train. none: no mask."""
    mask_low: float = Field(default=0.5, ge=0)
    """Ratio below which tokens are masked."""
    mask_high: float = Field(default=2.0, gt=0)
    """Ratio above which tokens are masked."""
    mask_denominator: Denominator = "all"
    """Tokens that means over the batch count. all: masked tokens too, as in IcePop and masked
    importance sampling. kept: only unmasked tokens, as in rejection sampling."""

    def check_keys(self) -> None:
        if self.weight == self.mask == "none":
            raise ValueError(
                "correction with weight=none and mask=none does nothing: set weight or mask, or "
                "remove correction"
            )
        for key, low, high in (
            ("weight", self.weight_low, self.weight_high),
            ("mask", self.mask_low, self.mask_high),
        ):
            unread_keys = sorted({f"{key}_low", f"{key}_high", f"{key}_denominator"} & self.changed)
            if getattr(self, key) == "none" and unread_keys:
                raise ValueError(
                    f"{unread_keys[0]} is not read with {key}=none: set {key}, or remove "
                    f"{unread_keys[0]}"
                )
            if high is not None and low >= high:
                raise ValueError(
                    f"{key}_low={low:g} is not below {key}_high={high:g}: lower {key}_low"
                )


class StaleCorrectionConfig(CorrectionConfig):
    """The rollout correction for stale attempts, which were sampled with weights of earlier steps.

    By default a token with a ratio above 5 is masked, as in AReaL's code, and the importance weight
    has no upper bound.
    """

    weight_high: float | None = Field(default=None, gt=0)
    """Highest importance weight; null: no bound."""
    mask: CorrectionLevel = "token"
    """Unit whose ratio is compared with mask_low and mask_high. Outside these bounds the unit's
    tokens don't train. none: no mask."""
    mask_low: float = Field(default=0.0, ge=0)
    """Ratio below which tokens are masked."""
    mask_high: float = Field(default=5.0, gt=0)
    """Ratio above which tokens are masked."""


class KLConfig(Section):
    """The KL penalty that keeps the policy near the reference, the model at the stage's start."""

    coef: float = Field(default=0.0, ge=0)
    """Weight of the penalty; 0: no penalty."""
    objective: Literal["reverse", "forward"] = "reverse"
    """KL(policy || reference), or KL(reference || policy)."""
    estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimator of the KL (http://joschu.net/blog/kl-approx.html); null: k3 in the loss, k1 in the
    reward."""
    importance_weight: bool = True
    """Multiply the penalty of a token by its importance ratio to the old policy, so that the
    gradient stays right over several optimizer steps. false with objective=forward is the penalty
    as GRPO was published."""
    place: Literal["loss", "reward"] = "loss"
    """loss: the penalty is a term of the loss. reward: it is subtracted from each token's
    reward."""
    target: float | None = Field(default=None, gt=0)
    """KL in nats per token to which coef adapts; null: coef is fixed."""
    rate: float = Field(default=0.1, gt=0, le=1)
    """Speed at which coef adapts to target: a step multiplies coef by at least 1 - 0.2 * rate and
    at most 1 + 0.2 * rate."""

    def check_keys(self) -> None:
        if self.coef == 0 and self.changed - {"coef"}:
            unread = min(self.changed - {"coef"})
            raise ValueError(f"{unread} is not read with coef=0: set coef, or remove {unread}")
        if self.objective == "forward" and self.estimator in ("k1", "k2"):
            raise ValueError(
                f"objective=forward has no estimator {self.estimator}: set estimator=k3"
            )
        if self.place == "reward" and self.objective == "forward":
            raise ValueError(
                "place=reward only gives the gradient of the reverse KL: set objective=reverse, or "
                "place=loss"
            )
        if self.place == "reward" and self.estimator in ("k2", "k3"):
            raise ValueError(
                f"estimator={self.estimator} with place=reward gives a gradient that belongs to no "
                "divergence: set estimator=k1, or place=loss"
            )
        if not self.importance_weight and self.place == "reward":
            raise ValueError(
                "importance_weight is not read with place=reward: set place=loss, or remove "
                "importance_weight"
            )
        if not self.importance_weight and self.objective == "reverse" and self.estimator != "k2":
            raise ValueError(
                "importance_weight=false removes the gradient of "
                f"estimator={self.estimator or 'k3'} of the reverse KL: set importance_weight=true "
                "or estimator=k2"
            )
        if self.target is None and "rate" in self.changed:
            raise ValueError("rate is not read without target: set target, or remove rate")


class RouterConfig(Section):
    """The options for the routers of a mixture of experts (MoE).

    They configure router replay, load-balancing losses and router metrics.
    """

    replay: bool = False
    """Router replay: the policy's learner sends each token to the experts that the sampler chose
    (arXiv:2510.11370)."""
    balance_coef: float = Field(default=0.0, ge=0)
    """Weight of the load-balance loss of each sequence (arXiv:2412.19437, section 2.1.2)."""
    z_coef: float = Field(default=0.0, ge=0)
    """Weight of the router z-loss (arXiv:2202.08906, eq. 5)."""
    measure: bool = True
    """Report the experts' loads, the routers' entropy, and the share of choices that replay
    changed. Set false with learner.tensor_parallel, context_parallel or pipeline_parallel above 1,
    or recompute=full: such ranks can't measure them."""

    @property
    def reads_router_outputs(self) -> bool:
        """True if metrics or loss terms read the routers' outputs."""
        return self.measure or self.balance_coef > 0 or self.z_coef > 0

    def check_keys(self) -> None:
        if not self.measure and (self.balance_coef or self.z_coef):
            raise ValueError(
                "measure=false contradicts balance_coef and z_coef, whose losses measure the "
                "routers: remove measure, or both coefficients"
            )
        if not (self.replay or self.reads_router_outputs):
            raise ValueError(
                "router neither replays nor measures anything: set replay=true, or remove router"
            )
