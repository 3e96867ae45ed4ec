"""Importance sampling ratios. Only this module exponentiates differences of log-probabilities."""

from __future__ import annotations

from torch import Tensor

# exp overflows float32 at 88.7, and the gradient of a clipped overflow is inf * 0 = NaN. A ratio
# above exp(20), five hundred million, comes from a fault (another model, corrupt
# log-probabilities), not from training. The product of two such ratios still fits into float32.
# verl and NeMo RL have the same bound.
LOG_RATIO_BOUND = 20.0


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(min(log_ratio, 20)), in the shape and dtype of `log_ratio`.

    Up to the bound this is the exact ratio with its exact gradient. Beyond the bound the ratio is
    the constant exp(20), and its gradient is 0. Small ratios need no bound. NaN stays NaN.
    """
    return log_ratio.clamp(max=LOG_RATIO_BOUND).exp()


def k3(log_ratio: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d with d = max(log_ratio, -20), in the shape and dtype of `log_ratio`.

    It estimates KL(p || q) from samples of p, with d = log(p / q). It is never negative, and 0
    where d is 0 (http://joschu.net/blog/kl-approx.html). Beyond the bound it is constant, with
    gradient 0.
    """
    d = log_ratio.clamp(min=-LOG_RATIO_BOUND)
    return (-d).exp() - 1 + d
