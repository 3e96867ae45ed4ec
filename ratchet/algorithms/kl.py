"""The KL divergence between policy and reference, as a term of the loss or as part of the reward.

Both have, in expectation, the gradient of the divergence that they are named after. T = tokens.
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
    """Return a penalty whose expected gradient is that of the named KL divergence.

    The penalty has one value per token. The expectation is over tokens drawn from the old policy.

    Differentiated directly, k1 has a gradient of expectation 0, and k3 that of the *forward* KL (on
    policy). So the importance ratio w = policy/old multiplies each estimator. For reverse k1
    and k3, w keeps its gradient, which adds the score function term. For k2 and forward k3, w is
    detached, since their own derivatives are already right. The value is an unbiased estimate of
    the named KL for reverse k1 and k3. For k2 and forward k3 only the gradient is unbiased.

    Args:
        objective: "reverse" is KL(policy || reference), "forward" is KL(reference || policy), which
            only estimator k3 has.
        estimator: With d = log(policy/reference), k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d
            (http://joschu.net/blog/kl-approx.html).
        importance_weight: False leaves out w. Forward k3 is then differentiated directly, as in
            GRPO (arXiv:2402.03300) eq. 3 and 4. Its gradient is right if policy and old policy
            agree.

    Raises:
        ConfigError: For forward k1 and k2, whose gradients are not that of the forward KL. Also for
            reverse k1 and k3 without importance_weight, through which their gradient flows.
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
    With f = k1 it is the gradient of KL(policy || reference): the remaining part, E[grad k1], is 0.
    Rewards of k2 or k3 would not give the gradient of a divergence (k3: reverse minus forward KL).
    """
    log_ratio_T = batch.need("old_logprobs").double() - batch.need("ref_logprobs").double()
    log_ratio_T = torch.where(batch.trainable_T, log_ratio_T, 0.0)
    rewards_T = (
        batch.need("token_rewards") if batch.has("token_rewards") else torch.zeros_like(log_ratio_T)
    )
    mean_kl = float(log_ratio_T.sum() / batch.trainable_T.sum().clamp(min=1))
    current_coef = state.numbers.get(COEF, coef)
    return batch.fill_tokens(token_rewards=rewards_T - current_coef * log_ratio_T).note(
        **{"kl/kl": mean_kl, "kl/coef": current_coef}
    )


def kl_in_loss(batch: Batch, state: AlgoState, *, coef: float) -> Batch:
    """Return the batch with this step's coefficient as metric "kl/coef", like `kl_in_reward`.

    The columns stay as they are.
    """
    return batch.note(**{"kl/coef": state.numbers.get(COEF, coef)})


def adapt_kl(coef: float, kl: float, *, target: float, rate: float) -> float:
    """Return the next step's coefficient: coef * (1 + rate * clip(kl / target - 1, -0.2, 0.2)).

    See Ziegler et al. (arXiv:1909.08593), section 2.2.
    """
    return coef * (1 + rate * min(max(kl / target - 1, -0.2), 0.2))
