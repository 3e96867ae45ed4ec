"""The KL divergence from a reference, as a term of the loss or as part of the reward.

Each form has the gradient of the divergence that it is named after. T = tokens.
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

# Key of the adaptive coefficient in `AlgoState.numbers`: "coef/" and the name of the term.
COEF = "coef/kl"


def kl_penalty(
    out: Outputs,
    batch: Batch,
    *,
    objective: Literal["reverse", "forward"],
    estimator: Literal["k1", "k2", "k3"],
    importance_weight: bool = True,
) -> tuple[Tensor, Metrics]:
    """Return a penalty whose expected gradient is that of the named KL divergence.

    The expectation is over tokens drawn from the old policy. Token level.

    objective: "reverse" is KL(policy || reference), "forward" is KL(reference || policy) (estimator
      k3 alone).
    estimator: with d = log(policy/reference), k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d
      (http://joschu.net/blog/kl-approx.html).
    importance_weight: False leaves out the ratio w below. Forward k3 is then differentiated
      directly, as in GRPO (arXiv:2402.03300) eq. 3 and 4; its gradient is right if policy and old
      policy agree.

    Differentiating k1 directly gives 0, and k3 the *forward* KL. So the importance ratio w =
    policy/old multiplies them. It carries its gradient for reverse k1 and k3 (the score function
    then acts), and is detached for k2 and forward k3, whose own derivatives are already right. The
    value is an unbiased estimate of the named KL for reverse k1 and k3; for k2 and forward k3 only
    the gradient is.

    Raises ConfigError for forward k1 and k2, whose gradients are those of no forward KL, and for
    reverse k1 and k3 without the weight that carries their gradient.
    """
    if objective == "forward" and estimator != "k3":
        raise ConfigError(f"objective=forward has no estimator {estimator}. Set estimator=k3.")
    logprobs_T = out.need("logprobs")
    d_T = logprobs_T - batch.need("ref_logprobs")
    ratio_T = bounded_ratio(logprobs_T - out.need("old_logprobs"))
    k3_T = k3(d_T)
    k_T = {"k1": d_T, "k2": d_T.square() / 2, "k3": k3_T}[estimator]
    metrics = {"kl": (ratio_T * k3_T).detach()}
    through_ratio = objective == "reverse" and estimator != "k2"
    if not importance_weight:
        if through_ratio:
            raise ConfigError(
                f"estimator={estimator} has its gradient through importance_weight. Set "
                "estimator=k2 or objective=forward."
            )
        return k_T, metrics
    weight_T = ratio_T if through_ratio else ratio_T.detach()
    return weight_T * k_T, metrics


def kl_in_reward(batch: Batch, state: AlgoState, *, coef: float) -> Batch:
    """Subtract coef * log(old policy / reference) from the token reward of every trainable token.

    This is estimator k1 of the reverse KL. The policy gradient of a reward f is E[f grad log p].
    For k1 that is the gradient of KL(policy || reference), whose direct part has expectation 0. k2
    and k3 as rewards would give the gradient of no divergence (k3: reverse minus forward KL).
    """
    gap_T = batch.need("old_logprobs").double() - batch.need("ref_logprobs").double()
    gap_T = torch.where(batch.trainable_T, gap_T, 0.0)
    before_T = (
        batch.need("token_rewards") if batch.has("token_rewards") else torch.zeros_like(gap_T)
    )
    mean = float(gap_T.sum() / batch.trainable_T.sum().clamp(min=1))
    current_coef = state.numbers.get(COEF, coef)
    return batch.fill_tokens(token_rewards=before_T - current_coef * gap_T).note(
        **{"kl/kl": mean, "kl/coef": current_coef}
    )


def kl_in_loss(batch: Batch, state: AlgoState, *, coef: float) -> Batch:
    """Report this step's coefficient as "kl/coef", as `kl_in_reward` does. Changes no column."""
    return batch.note(**{"kl/coef": state.numbers.get(COEF, coef)})


def adapt_kl(coef: float, kl: float, *, target: float, rate: float) -> float:
    """Return coef * (1 + rate * clip(kl / target - 1, -0.2, 0.2)), once a step.

    Ziegler et al. (arXiv:1909.08593), section 2.2.
    """
    return coef * (1 + rate * min(max(kl / target - 1, -0.2), 0.2))
