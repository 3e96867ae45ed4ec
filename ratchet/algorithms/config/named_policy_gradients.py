"""The named policy-gradient algorithms (GRPO, PPO, DAPO, RLOO, ...).

Each is `PolicyGradientConfig` with other defaults, so every key can be changed in a recipe.
"""

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

    The advantage is the attempt's reward, normalised within its group: A = (R - mean(R)) /
    (std(R) + epsilon) (`group_relative`). The loss is PPO's clipped loss
    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with the importance ratio r of each token
    (`ppo`). It is averaged over the tokens of each answer, then over answers (`sequence_mean`).
    """

    weighting: Weighting = "sequence_mean"


class DrGRPOConfig(PolicyGradientConfig):
    """Dr. GRPO: GRPO without its biases by answer length and by difficulty (arXiv:2503.20783).

    The advantage is not divided by the group's standard deviation: A = R - mean(R of the group)
    (`group_relative`, scale=none). The loss is PPO's (`ppo`). Its sum is divided by a fixed number
    of tokens per answer (`fixed_length`).
    """

    advantage: Advantage = GroupRelative(scale="none")
    weighting: Weighting = "fixed_length"


class DAPOConfig(PolicyGradientConfig):
    """DAPO: GRPO with clip-higher, token-level loss and dynamic sampling (arXiv:2503.14476).

    The advantage is GRPO's (`group_relative`). The loss is PPO's with the higher upper bound
    clip_high=0.28 (`ppo`), averaged over all tokens of the batch (`token_mean`). Groups whose
    rewards are all equal are removed (equal_rewards=drop). For DAPO's overlong penalty, add
    `overlong_penalty` to `shaping`.
    """

    equal_rewards: EqualRewards = "drop"
    loss: Loss = PPO(clip_high=0.28)


class GSPOConfig(PolicyGradientConfig):
    """GSPO: PPO's clip on the importance ratio of whole sequences (arXiv:2507.18071).

    The advantage is GRPO's (`group_relative`). The loss is clipped like PPO's, but uses the
    sequence ratio s = exp(mean over the answer of log r_t) (`gspo`). It is averaged over answers
    (`sequence_mean`).
    """

    loss: Loss = GSPO()
    weighting: Weighting = "sequence_mean"


class CISPOConfig(PolicyGradientConfig):
    """CISPO: clipped importance weights that keep every token's gradient (arXiv:2506.13585).

    This is the algorithm of MiniMax-M1. The advantage is GRPO's (`group_relative`). The loss is
    -sg[clip(r)] A log p, where sg stops the gradient (`cispo`). It is averaged over all tokens
    (`token_mean`).
    """

    loss: Loss = CISPO()


class RLOOConfig(PolicyGradientConfig):
    """RLOO: REINFORCE with a leave-one-out baseline (arXiv:2402.14740).

    The advantage is A_i = R_i - mean of R over the other attempts of the group (`rloo`). The loss
    is -A log p (`reinforce`), summed over the tokens of each answer and averaged over answers
    (`token_sum`).
    """

    advantage: Advantage = RLOO()
    loss: Loss = Reinforce()
    weighting: Weighting = "token_sum"


class ReinforcePPConfig(PolicyGradientConfig):
    """REINFORCE++: PPO's loss with batch-normalised returns and no critic (arXiv:2501.03262).

    The advantage is the reward-to-go, normalised over the batch (`reinforce_pp`). The loss is PPO's
    (`ppo`), averaged over all tokens (`token_mean`). Each prompt has one attempt.
    """

    group_size: GroupSize = 1
    advantage: Advantage = ReinforcePP()


class ReMaxConfig(PolicyGradientConfig):
    """ReMax: REINFORCE with the greedy attempt's reward as the baseline (arXiv:2310.10505).

    The advantage is A_i = R_i - R of the greedy attempt (`remax`). The loss is -A log p
    (`reinforce`), averaged over all tokens (`token_mean`). Each prompt has one sampled attempt.
    """

    group_size: GroupSize = 1
    advantage: Advantage = ReMax()
    loss: Loss = Reinforce()


class OPOConfig(PolicyGradientConfig):
    """OPO: on-policy RL with the baseline of least variance (arXiv:2505.23585).

    The advantage is the reward minus a mean of the group's rewards, in which each reward is
    weighted by the length of its answer (`opo`).
    The loss is PPO's (`ppo`), averaged over all tokens (`token_mean`). The paper takes one
    optimizer step per batch, which keeps it exactly on-policy.
    """

    advantage: Advantage = OPO()


class GiGPOConfig(PolicyGradientConfig):
    """GiGPO: group-in-group policy optimisation for multi-turn agents (arXiv:2505.10978).

    The advantage compares episodes within their group, and turns that began in the same state
    (`gigpo`). The loss is PPO's (`ppo`), averaged over all tokens (`token_mean`).
    """

    advantage: Advantage = GiGPO()


class GDPOConfig(PolicyGradientConfig):
    """GDPO: GRPO for several rewards, each normalised by itself (arXiv:2601.05242).

    The advantage sums the named parts of the reward, each of them normalised within its group
    (`gdpo`). The loss is PPO's (`ppo`), averaged over all tokens (`token_mean`).
    """

    advantage: Advantage = GDPO()


class PPOConfig(PolicyGradientConfig):
    """PPO: proximal policy optimisation with a critic (arXiv:1707.06347).

    The advantage is estimated by GAE from the values of a critic (`gae`), and normalised over the
    batch (whiten=true). The loss is the clipped loss (`ppo`), averaged over all tokens
    (`token_mean`). Each prompt has one attempt.
    """

    group_size: GroupSize = 1
    advantage: Advantage = GAE()
    whiten: Whiten = True
    critic: CriticConfig | None = CriticConfig()


class VAPOConfig(PolicyGradientConfig):
    """VAPO: PPO with a critic, tuned for long answers (arXiv:2504.05118).

    The advantage is estimated by GAE with a lambda that depends on the length of the answer
    (`gae`). The critic trains alone for the first steps. The loss is PPO's with clip_high=0.28
    (`ppo`), averaged over all tokens (`token_mean`). The NLL of correct answers is added to the
    loss (`positive_nll_coef`).
    """

    advantage: Advantage = GAE(value_lam=1.0, length_alpha=0.05)
    loss: Loss = PPO(clip_high=0.28)
    positive_nll_coef: PositiveNLL = 0.1
    critic: CriticConfig | None = CriticConfig(warmup_steps=50)


class TOPRConfig(PolicyGradientConfig):
    """TOPR: tapered off-policy REINFORCE (arXiv:2503.14286).

    The advantage is A = R - mean(R of the group) (`group_relative`, scale=none). The loss is
    -A log p, with a weight of at most 1 for answers with a negative advantage (`topr`). It is
    summed over the tokens of each answer and averaged over answers (`token_sum`). Ratios are
    relative to the sampler's log-probabilities (old_logprobs=sampler).
    """

    loss: Loss = TOPR()
    advantage: Advantage = GroupRelative(scale="none")
    old_logprobs: OldLogprobs = "sampler"
    weighting: Weighting = "token_sum"


class GMPOConfig(PolicyGradientConfig):
    """GMPO: the geometric mean of clipped token ratios (arXiv:2507.20673).

    The advantage is GRPO's (`group_relative`). The loss is -A exp(mean over the answer of clipped
    log r_t) (`gmpo`), averaged over answers (`sequence_mean`).
    """

    loss: Loss = GMPO()
    weighting: Weighting = "sequence_mean"


class SAPOConfig(PolicyGradientConfig):
    """SAPO: a soft gate on the ratio in place of the PPO clip (arXiv:2511.20347).

    The advantage is GRPO's (`group_relative`). The loss is -A sigmoid(tau (r - 1)) 4 / tau
    (`sapo`). It is averaged over the tokens of each answer, then over answers (`sequence_mean`).
    """

    loss: Loss = SAPO()
    weighting: Weighting = "sequence_mean"


class KimiConfig(PolicyGradientConfig):
    """The policy mirror descent of Kimi k1.5 (arXiv:2501.12599).

    The advantage is A = R - mean(R of the group) (`group_relative`, scale=none). The loss is
    -sum(A log p) + tau / 2 (sum(log r))^2 over the tokens of an answer (`kimi`), averaged over
    answers (`sequence_mean`).
    """

    advantage: Advantage = GroupRelative(scale="none")
    loss: Loss = Kimi()
    weighting: Weighting = "sequence_mean"


class DecoupledPPOConfig(PolicyGradientConfig):
    """Decoupled PPO: GRPO for stale attempts of asynchronous rollouts (arXiv:2505.24298).

    The advantage is GRPO's (`group_relative`). The loss is PPO's (`ppo`), averaged over all tokens
    (`token_mean`). Its ratio and clip are relative to the learner's weights before the update, not
    to the older weights that sampled the attempt. The correction multiplies each token's loss by
    the importance weight p(learner before the update) / p(sampler).
    """

    correction: StaleCorrectionConfig | None = (  # pyright: ignore[reportIncompatibleVariableOverride]
        StaleCorrectionConfig()
    )


class OnPolicyDistillationConfig(PolicyGradientConfig):
    """The on-policy distillation algorithm: a teacher scores each token that the policy samples.

    The advantage is A_t = log p_teacher(t) - log p_policy(t) (`on_policy_distillation`). The loss
    is PPO's (`ppo`), averaged over all tokens (`token_mean`). Each prompt has one attempt.
    https://thinkingmachines.ai/blog/on-policy-distillation
    """

    group_size: GroupSize = 1
    advantage: Advantage = OnPolicyDistillation()
