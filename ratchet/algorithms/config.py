"""Configuration of the algorithms. Free of torch, so that a recipe is checked in no time."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from ratchet.config.base import Section


class AlgorithmConfig(Section):
    """`source`: what the algorithm learns from, "rows" (given text) or "rollouts" (attempts of its own)."""

    source: ClassVar[Literal["rows", "rollouts"]]

    minibatches: int = Field(default=1, ge=1, description="Optimizer steps that a batch is split into, by whole groups.")
    epochs: int = Field(default=1, ge=1, description="Times that a batch is gone through.")


class SFTConfig(AlgorithmConfig):
    """Supervised fine-tuning on the environment's demonstrations."""

    builds: ClassVar[str] = "ratchet.algorithms.sft:build_sft"
    source: ClassVar[Literal["rows", "rollouts"]] = "rows"

    kind: Literal["sft"] = "sft"
    train: Literal["all", "last"] = Field(
        default="all", description="Assistant messages that train: every one, or the last alone."
    )
    weighting: Literal["token_mean", "sequence_mean"] = Field(
        default="token_mean", description="What weighs the same within an optimizer step: each token, or each row."
    )


class GRPOConfig(AlgorithmConfig):
    """Group relative policy optimisation (arXiv:2402.03300), with the options that later work showed to matter."""

    builds: ClassVar[str] = "ratchet.algorithms.grpo:build_grpo"
    source: ClassVar[Literal["rows", "rollouts"]] = "rollouts"

    kind: Literal["grpo"] = "grpo"
    group_size: int = Field(default=8, ge=1, description="Attempts at each prompt; their mean reward is the baseline.")
    advantage_scale: Literal["std", "none"] = Field(
        default="std", description='Divide a group\'s advantages by the standard deviation of its rewards; "none": Dr. GRPO.'
    )
    std_epsilon: float = Field(default=1e-6, gt=0, description="Added to that standard deviation.")
    equal_rewards: Literal["keep", "drop"] = Field(
        default="keep",
        description="Groups whose rewards are all equal have no signal; drop: nor any part in the means over the batch.",
    )
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="The probability ratio is clipped below 1 - clip_low.")
    clip_high: float = Field(default=0.2, gt=0, description="The probability ratio is clipped above 1 + clip_high.")
    dual_clip: float | None = Field(
        default=None,
        gt=1,
        description="Bounds the loss of a negative advantage by this factor (arXiv:1912.09729); null: no bound.",
    )
    kl_coef: float = Field(
        default=0.0, ge=0, description="Weight of the penalty for leaving the model that the stage starts from."
    )
    kl_objective: Literal["reverse", "forward"] = Field(
        default="reverse", description="KL(policy || reference), or KL(reference || policy)."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="http://joschu.net/blog/kl-approx.html")
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the reward for entropy (nats a token).")
    weighting: Literal["token_mean", "sequence_mean", "prompt_mean", "fixed_length"] = Field(
        default="token_mean",
        description="What weighs the same within an optimizer step: each token (DAPO), each answer (GRPO), each prompt, or "
        "each token over a fixed total (Dr. GRPO).",
    )
    fixed_length: int | None = Field(
        default=None, ge=1, description="Tokens that weighting fixed_length divides by, per answer."
    )

    @model_validator(mode="after")
    def _keys_agree(self) -> GRPOConfig:
        if self.group_size == 1:
            raise ValueError(
                "group_size=1 leaves the group's baseline no other attempt and every advantage is 0: set group_size=2 or more"
            )
        if self.weighting == "fixed_length" and self.fixed_length is None:
            raise ValueError("weighting=fixed_length needs fixed_length: set it to the stage's sampling.max_new_tokens")
        if self.weighting != "fixed_length" and self.fixed_length is not None:
            raise ValueError(
                f"fixed_length={self.fixed_length} is not read with weighting={self.weighting}: "
                "set weighting=fixed_length, or remove fixed_length"
            )
        if self.kl_coef > 0 and self.kl_objective == "forward" and self.kl_estimator != "k3":
            raise ValueError(f"kl_objective=forward has no estimator {self.kl_estimator}: set kl_estimator=k3")
        return self
