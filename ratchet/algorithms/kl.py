"""The KL penalty between policy and reference, as a loss term or as part of the reward.

In both places, its expected gradient is the gradient of the configured KL divergence. T = tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.losses.common import Metrics
from ratchet.algorithms.ratios import bounded_ratio, k3
from ratchet.batch import Batch
from ratchet.errors import ConfigError
from ratchet.protocols import Outputs

# Key of the adaptive coefficient in `AlgoState.numbers`: "coef/" followed by the term's name.
COEF = "coef/kl"


def kl_penalty(
    out: Outputs,
    batch: Batch,
    *,
    objective: Literal["reverse", "forward"],
    estimator: Literal["k1", "k2", "k3"],
    importance_weight: bool = True,
) -> tuple[Tensor, Metrics]:
    """Return a KL penalty per token whose expected gradient is that of the KL divergence.

    The expectation is over tokens drawn from the old policy.

    Without a factor, on-policy tokens give k1 the expected gradient 0, and k3 the gradient of the
    *forward* KL. So each estimator is multiplied by the importance ratio w = policy / old policy:
    - For k1 and k3 of the reverse KL, w keeps its gradient, which adds the score function term.
      The value is an unbiased estimate of the KL.
    - For k2, and k3 of the forward KL, w is detached, because their own gradients are already
      right. Only the gradient is unbiased, not the value.

    Args:
        objective: "reverse" is KL(policy || reference), "forward" is KL(reference || policy), which
            only estimator k3 has.
        estimator: With d = log(policy/reference), k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d
            (http://joschu.net/blog/kl-approx.html).
        importance_weight: False leaves out w. k3 of the forward KL is then the penalty of GRPO
            (arXiv:2402.03300) eq. 3 and 4. Its gradient is right if policy and old policy agree.

    Raises:
        ConfigError: For k1 and k2 of the forward KL, whose gradients are not that of the forward
            KL. Also for k1 and k3 of the reverse KL without importance_weight, because their
            gradient flows through w.
    """
    if objective == "forward" and estimator != "k3":
        raise ConfigError(f"objective=forward has no estimator {estimator}. Set estimator=k3.")
    logprobs_T = out.need("logprobs")
    log_ratio_T = logprobs_T - batch.need("ref_logprobs")
    importance_T = bounded_ratio(logprobs_T - out.need("old_logprobs"))
    k3_T = k3(log_ratio_T)
    penalty_T = {"k1": log_ratio_T, "k2": log_ratio_T.square() / 2, "k3": k3_T}[estimator]
    metrics = {"kl": (importance_T * k3_T).detach()}
    needs_importance_gradient = objective == "reverse" and estimator != "k2"
    if not importance_weight:
        if needs_importance_gradient:
            raise ConfigError(
                f"importance_weight=false removes the gradient of estimator={estimator} of the "
                "reverse KL. Set importance_weight=true or estimator=k2."
            )
        return penalty_T, metrics
    weight_T = importance_T if needs_importance_gradient else importance_T.detach()
    return weight_T * penalty_T, metrics


def kl_in_reward(batch: Batch, state: AlgoState, *, coef: float) -> Batch:
    """Subtract coef * log(old policy / reference) from the token reward of every trainable token.

    This is estimator k1 of the reverse KL. The policy gradient of a reward f is E[f grad log p].
    For f = k1 that is exactly the gradient of KL(policy || reference), because E[grad k1] is 0.
    k2 or k3 as a reward would not give the gradient of a divergence: k3 gives the gradient of the
    reverse KL minus that of the forward KL.
    """
    log_ratio_T = batch.need("old_logprobs").double() - batch.need("ref_logprobs").double()
    log_ratio_T = torch.where(batch.trainable_T, log_ratio_T, 0.0)
    rewards_T = (
        batch.need("token_rewards") if batch.has("token_rewards") else torch.zeros_like(log_ratio_T)
    )
    mean_kl = float(log_ratio_T.sum() / batch.trainable_T.sum().clamp(min=1))
    current_coef = state.numbers.get(COEF, coef)
    return batch.fill_tokens(token_rewards=rewards_T - current_coef * log_ratio_T).with_metrics(
        **{"kl/kl": mean_kl, "kl/coef": current_coef}
    )


def report_kl_coef(batch: Batch, state: AlgoState, *, coef: float) -> Batch:
    """Report this step's KL coefficient as metric "kl/coef".

    The penalty itself is the loss term `kl_penalty`, which is multiplied by this coefficient.
    """
    return batch.with_metrics(**{"kl/coef": state.numbers.get(COEF, coef)})


def adapt_kl(coef: float, kl: float, *, target: float, rate: float) -> float:
    """Return the next step's KL coefficient: coef * (1 + rate * clip(kl / target - 1, -0.2, 0.2)).

    This is the adaptive KL controller of Ziegler et al. (arXiv:1909.08593), section 2.2.
    """
    return coef * (1 + rate * min(max(kl / target - 1, -0.2), 0.2))
