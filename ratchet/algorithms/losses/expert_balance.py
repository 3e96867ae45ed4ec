"""Losses and metrics of the routers of a mixture of experts.

They are at sequence level, so that a batch may be cut into micro-batches between any sequences. The
load-balance loss of Switch Transformers (arXiv:2101.03961, eq. 4-6), N sum_i f_i P_i, multiplies
two means over the tokens of a batch, so it would change with the micro-batches. DeepSeek-V3
(arXiv:2412.19437, eq. 17-20) takes it over the tokens of one sequence, so the loss is a sum over
sequences. That is stricter: each sequence, not only the batch, should use all experts. Therefore
its coefficient is best small (1e-4 in DeepSeek-V3).
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
    """Return the load balance sum_i f_i P_i over experts i, averaged over layers. [S].

    f_i is the number of the sequence's choices of expert i, times experts / all its choices. P_i is
    the expert's mean probability. All tokens count, the prompt's too. It is 1 if routing is even.
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
    """Return the mean over tokens and layers of logsumexp(router logits)^2. [S].

    arXiv:2202.08906, eq. 5: large logits round badly.
    """
    z_S = out.need("routers")[:, 1]
    return z_S, {"z": z_S.detach()}


def router_terms(*, balance_coef: float, z_coef: float) -> list[AlgorithmTerm]:
    """Return the routers' loss terms, in which each training sequence weighs the same.

    Args:
        balance_coef: 0 only reports the metrics.
        z_coef: 0 leaves the z-loss out.
    """
    balance = AlgorithmTerm(
        "router", router_balance, sequence_mean, level="sequence", needs=NEEDS, coef=balance_coef
    )
    z = AlgorithmTerm(
        "router_z", router_z, sequence_mean, level="sequence", needs=NEEDS, coef=z_coef
    )
    return [balance, z] if z_coef else [balance]
