"""The divergence from a reference: as a term of the loss, or as part of the reward, with the
gradient that its name promises.

T = tokens.
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

# where an adaptive coefficient is kept in the state: "coef/" and the name of the term
COEF = "coef/kl"


def kl_penalty(
    out: Outputs,
    batch: Batch,
    *,
    objective: Literal["reverse", "forward"],
    estimator: Literal["k1", "k2", "k3"],
    importance_weight: bool = True,
) -> tuple[Tensor, Metrics]:
    """A penalty whose expected gradient, over tokens drawn from the old policy, is that of the
    named objective. Token level.

    reverse: KL(policy || reference); forward: KL(reference || policy) (estimator k3 alone). With d
    = log(policy/reference): k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d
    (http://joschu.net/blog/kl-approx.html). Differentiating k1 or k3 as they stand gives 0 and the
    *forward* KL; so the importance ratio w = policy/old multiplies them, with its gradient for
    reverse k1 and k3 (the score function then acts), detached for k2 and for forward k3, whose own
    derivatives are already right. The value is an unbiased estimate of the named KL for reverse k1
    and k3; for k2 and for forward k3 only the gradient is.

    importance_weight=False leaves a detached w out: forward k3 is then differentiated as it stands,
    as in GRPO (arXiv:2402.03300) eq. 3 and 4. Its gradient is right where policy and old policy are
    the same. Raises ConfigError for forward k1 and k2, whose gradients are those of no forward KL,
    and for reverse k1 and k3 without the weight that carries their gradient.
    """
    if objective == "forward" and estimator != "k3":
        raise ConfigError(f"objective=forward has no estimator {estimator}: use k3")
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
                f"estimator={estimator} has its gradient through importance_weight: use k2 or "
                "objective=forward"
            )
        return k_T, metrics
    weight_T = ratio_T if through_ratio else ratio_T.detach()
    return weight_T * k_T, metrics


def kl_in_reward(batch: Batch, state: AlgoState, *, coef: float) -> Batch:
    """token_rewards_t -= coef * log(old policy / reference) at every trainable token: estimator k1
    of the reverse KL.

    The policy gradient of a reward f is E[f grad log p]: for k1 that is the gradient of KL(policy
    || reference), whose direct part has no expectation. k2 and k3 as rewards would give the
    gradient of no divergence (k3: reverse minus forward KL).
    """
    gap_T = batch.need("old_logprobs").double() - batch.need("ref_logprobs").double()
    gap_T = torch.where(batch.trainable_T, gap_T, 0.0)
    before_T = (
        batch.need("token_rewards") if batch.has("token_rewards") else torch.zeros_like(gap_T)
    )
    mean = float(gap_T.sum() / batch.trainable_T.sum().clamp(min=1))
    now = state.numbers.get(COEF, coef)
    return batch.fill_tokens(token_rewards=before_T - now * gap_T).note(
        **{"kl/kl": mean, "kl/coef": now}
    )


def kl_in_loss(batch: Batch, state: AlgoState, *, coef: float) -> Batch:
    """Changes no column: measures the coefficient of this step, under the name that `kl_in_reward`
    gives it."""
    return batch.note(**{"kl/coef": state.numbers.get(COEF, coef)})


def adapt_kl(coef: float, kl: float, *, target: float, rate: float) -> float:
    """coef * (1 + rate * clip(kl / target - 1, -0.2, 0.2)), once a step. Ziegler et al.
    (arXiv:1909.08593), section 2.2."""
    return coef * (1 + rate * min(max(kl / target - 1, -0.2), 0.2))
