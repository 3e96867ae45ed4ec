"""Mutants that change nothing, each with the reason, by file, function and the edit as it is printed.

Add one only with a proof: that no test fails is what has to be explained, and is no explanation.
"""

from __future__ import annotations

Table = dict[tuple[str, str, str], str]

BASE, POLICY = "ratchet/algorithms/base.py", "ratchet/algorithms/losses/policy.py"
ZERO_WEIGHT = "what is not active has the weight 0, so that any finite number will do"

EQUIVALENT: Table = {
    (
        BASE,
        "Term.__call__",
        "loss = coef * (weight * torch.where(active, x, 0.0)).sum() -> "
        "loss = coef * (weight * torch.where(active, x, 1.0)).sum()",
    ): ZERO_WEIGHT,
    (
        BASE,
        "Term.__call__",
        "(share * torch.where(active, v.to(weight.dtype), 0.0)).sum() -> "
        "(share * torch.where(active, v.to(weight.dtype), 1.0)).sum()",
    ): ZERO_WEIGHT,
    (
        POLICY,
        "_sequence_metrics",
        "torch.no_grad() -> torch.enable_grad()",
    ): "what it averages comes from `_metrics`, already without a gradient",
}
