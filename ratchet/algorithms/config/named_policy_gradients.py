"""Define policy-gradient algorithms (GRPO and others) by defaults of `PolicyGradientConfig`."""

from __future__ import annotations

from ratchet.algorithms.config.advantages import (
    GAE,
    GDPO,
    OPO,
    RLOO,
    GiGPO,
    GroupRelative,
    OnPolicyDistillation,
    ReinforcePP,
    ReMax,
)
from ratchet.algorithms.config.policy_gradient import (
    Advantage,
    CriticConfig,
    EqualRewards,
    GroupSize,
    Loss,
    OldLogprobs,
    PolicyGradientConfig,
    PositiveNLL,
    Weighting,
    Whiten,
)
from ratchet.algorithms.config.policy_losses import (
    CISPO,
    GMPO,
    GSPO,
    PPO,
    SAPO,
    TOPR,
    Kimi,
    Reinforce,
    StaleCorrectionConfig,
)


class GRPOConfig(PolicyGradientConfig):
    """GRPO, group relative policy optimisation (arXiv:2402.03300).

    Its parts: advantage A = (R - mean(R)) / (std(R) + epsilon) over the group (`group_relative`);
    loss -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with the token's ratio r (`ppo`); mean
    over sequences of token means (`sequence_mean`).
    """

    weighting: Weighting = "sequence_mean"


class DrGRPOConfig(PolicyGradientConfig):
    """Dr. GRPO: GRPO without its biases by length and by difficulty (arXiv:2503.20783).

    Its parts: advantage A = R - mean(R of the group) (`group_relative`, scale=none); the loss of
    `ppo`; every token over a fixed total (`fixed_length`).
    """

    advantage: Advantage = GroupRelative(scale="none")
    weighting: Weighting = "fixed_length"


class DAPOConfig(PolicyGradientConfig):
    """DAPO: clip-higher, token mean, groups without signal left out (arXiv:2503.14476).

    Its parts: advantage `group_relative`; loss `ppo` with clip_high=0.28; `token_mean`;
    equal_rewards=drop. Its overlong penalty is a shaping (`overlong_penalty`).
    """

    equal_rewards: EqualRewards = "drop"
    loss: Loss = PPO(clip_high=0.28)


class GSPOConfig(PolicyGradientConfig):
    """GSPO: the ratio of whole sequences (arXiv:2507.18071).

    Its parts: advantage `group_relative`; loss `gspo` with s = exp(mean over the row of log r_t) in
    place of the token's ratio; `sequence_mean`.
    """

    loss: Loss = GSPO()
    weighting: Weighting = "sequence_mean"


class CISPOConfig(PolicyGradientConfig):
    """CISPO: clipped weights that silence no token's gradient (MiniMax-M1, arXiv:2506.13585).

    Its parts: advantage `group_relative`; loss `cispo`, -sg[clip(r)] A log p; `token_mean`.
    """

    loss: Loss = CISPO()


class RLOOConfig(PolicyGradientConfig):
    """RLOO: REINFORCE with a leave-one-out baseline (arXiv:2402.14740).

    Its parts: advantage A_i = R_i - mean of the other attempts' R (`rloo`); loss -A log p
    (`reinforce`); `token_sum`.
    """

    advantage: Advantage = RLOO()
    loss: Loss = Reinforce()
    weighting: Weighting = "token_sum"


class ReinforcePPConfig(PolicyGradientConfig):
    """REINFORCE++ (arXiv:2501.03262).

    Its parts: advantage `reinforce_pp`, the reward-to-go whitened over the batch; loss `ppo`;
    `token_mean`; one attempt a prompt.
    """

    group_size: GroupSize = 1
    advantage: Advantage = ReinforcePP()


class ReMaxConfig(PolicyGradientConfig):
    """ReMax: REINFORCE with the greedy attempt as its baseline (arXiv:2310.10505).

    Its parts: advantage A_i = R_i - R of the greedy attempt (`remax`); loss -A log p (`reinforce`);
    `token_mean`; one sampled attempt a prompt.
    """

    group_size: GroupSize = 1
    advantage: Advantage = ReMax()
    loss: Loss = Reinforce()


class OPOConfig(PolicyGradientConfig):
    """OPO: the baseline of least variance, meant for exactly on-policy steps (arXiv:2505.23585).

    Its parts: advantage `opo`, the reward minus the group's length-weighted mean; loss `ppo`;
    `token_mean`.
    """

    advantage: Advantage = OPO()


class GiGPOConfig(PolicyGradientConfig):
    """GiGPO: group in group, for environments of many turns (arXiv:2505.10978).

    Its parts: advantage `gigpo`, over whole episodes and over turns from the same state; loss
    `ppo`; `token_mean`.
    """

    advantage: Advantage = GiGPO()


class GDPOConfig(PolicyGradientConfig):
    """GDPO: several rewards, normalised apart (arXiv:2601.05242).

    Its parts: advantage `gdpo`, each part of the reward normalised within its group; loss `ppo`;
    `token_mean`.
    """

    advantage: Advantage = GDPO()


class PPOConfig(PolicyGradientConfig):
    """PPO: proximal policy optimisation with a critic (arXiv:1707.06347).

    Its parts: advantage `gae`, whitened over the batch; loss `ppo`; `token_mean`; a critic; one
    attempt a prompt.
    """

    group_size: GroupSize = 1
    advantage: Advantage = GAE()
    whiten: Whiten = True
    critic: CriticConfig | None = CriticConfig()


class VAPOConfig(PolicyGradientConfig):
    """VAPO: PPO for long answers (arXiv:2504.05118).

    Its parts: advantage `gae` with a length-adaptive lambda; loss `ppo` with clip_high=0.28;
    `token_mean`; a critic that is warmed up; the likelihood of correct answers
    (`positive_nll_coef`).
    """

    advantage: Advantage = GAE(value_lam=1.0, length_alpha=0.05)
    loss: Loss = PPO(clip_high=0.28)
    positive_nll_coef: PositiveNLL = 0.1
    critic: CriticConfig | None = CriticConfig(warmup_steps=50)


class TOPRConfig(PolicyGradientConfig):
    """TOPR: tapered off-policy REINFORCE (arXiv:2503.14286).

    Its parts: advantage A = R - mean(R of the group) (`group_relative`, scale=none); loss `topr`,
    with ratios to the sampler; `token_sum`.
    """

    loss: Loss = TOPR()
    advantage: Advantage = GroupRelative(scale="none")
    old_logprobs: OldLogprobs = "sampler"
    weighting: Weighting = "token_sum"


class GMPOConfig(PolicyGradientConfig):
    """GMPO: the geometric mean of ratios (arXiv:2507.20673).

    Its parts: advantage `group_relative`; loss `gmpo`, -A exp(mean over the row of clipped log
    r_t); `sequence_mean`.
    """

    loss: Loss = GMPO()
    weighting: Weighting = "sequence_mean"


class SAPOConfig(PolicyGradientConfig):
    """SAPO: a soft gate in place of the clip (arXiv:2511.20347).

    Its parts: advantage `group_relative`; loss `sapo`, -A sigmoid(tau (r - 1)) 4 / tau;
    `sequence_mean`.
    """

    loss: Loss = SAPO()
    weighting: Weighting = "sequence_mean"


class KimiConfig(PolicyGradientConfig):
    """The policy mirror descent of Kimi k1.5 (arXiv:2501.12599).

    Its parts: advantage A = R - mean(R of the group) (`group_relative`, scale=none); loss `kimi`,
    -sum of A log p + tau / 2 (sum of log r)^2; `sequence_mean`.
    """

    advantage: Advantage = GroupRelative(scale="none")
    loss: Loss = Kimi()
    weighting: Weighting = "sequence_mean"


class DecoupledPPOConfig(PolicyGradientConfig):
    """PPO for stale attempts, clipped against the learner before the update (arXiv:2505.24298).

    Its parts: advantage `group_relative`; loss `ppo`; `token_mean`; a correction that weighs each
    token by its ratio to the policy that sampled it.
    """

    correction: StaleCorrectionConfig | None = (  # pyright: ignore[reportIncompatibleVariableOverride]
        StaleCorrectionConfig()
    )


class OnPolicyDistillationConfig(PolicyGradientConfig):
    """The teacher judges each sampled token: on-policy distillation.

    Its parts: advantage `on_policy_distillation`, A_t = log teacher(t) - log policy(t); loss `ppo`;
    `token_mean`; one attempt a prompt. https://thinkingmachines.ai/blog/on-policy-distillation
    """

    group_size: GroupSize = 1
    advantage: Advantage = OnPolicyDistillation()
