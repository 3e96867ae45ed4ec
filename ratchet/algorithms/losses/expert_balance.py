"""Losses and metrics of MoE routers: the load-balancing auxiliary loss and the router z-loss.

They are at sequence level, so that they do not depend on how a batch is cut into micro-batches. The
load-balancing loss of Switch Transformers (arXiv:2101.03961, eq. 4-6), N sum_i f_i P_i, multiplies
two means over the tokens of a batch, so it does depend on the micro-batches. The loss here takes
these means over the tokens of each sequence, as DeepSeek-V3 does (arXiv:2412.19437, eq. 17-20). It
is stricter, because it is lowest if every single sequence uses all experts evenly. So its
coefficient should be small (1e-4 in DeepSeek-V3).

S = sequences.
"""

from __future__ import annotations

from torch import Tensor

from ratchet.algorithms.base import AlgorithmTerm
from ratchet.algorithms.loss_aggregation import sequence_mean
from ratchet.algorithms.losses.common import Metrics
from ratchet.batch import Batch
from ratchet.protocols import Outputs

NEEDS = frozenset({"routers"})


def router_balance(out: Outputs, batch: Batch) -> tuple[Tensor, Metrics]:
    """Return the load-balancing loss sum_i f_i P_i over experts i, averaged over layers. [S]

    f_i is the share of the sequence's choices that fell on expert i, times the number of experts.
    P_i is the mean probability of expert i. Both cover all tokens, also the prompt's. The loss is
    1 if the load is even.
    """
    balance_S, _, entropy_S, max_load_S, rerouted_S = out.need("routers").T
    metrics = {
        "balance": balance_S,
        "entropy": entropy_S,
        "max_load": max_load_S,
        "rerouted": rerouted_S,
    }
    return balance_S, {name: column_S.detach() for name, column_S in metrics.items()}


def router_z(out: Outputs, batch: Batch) -> tuple[Tensor, Metrics]:
    """Return the z-loss: the mean over tokens and layers of logsumexp(router logits)^2. [S]

    It keeps router logits small, because large logits have large rounding errors
    (arXiv:2202.08906, eq. 5).
    """
    z_S = out.need("routers")[:, 1]
    return z_S, {"z": z_S.detach()}


def router_terms(*, balance_coef: float, z_coef: float) -> list[AlgorithmTerm]:
    """Return the loss terms of the routers. Every training sequence has the same weight.

    Args:
        balance_coef: Factor of the load-balancing loss; 0: only report its metrics.
        z_coef: Factor of the z-loss; 0: leave it out.
    """
    balance = AlgorithmTerm(
        "router", router_balance, sequence_mean, level="sequence", needs=NEEDS, coef=balance_coef
    )
    z = AlgorithmTerm(
        "router_z", router_z, sequence_mean, level="sequence", needs=NEEDS, coef=z_coef
    )
    return [balance, z] if z_coef else [balance]
