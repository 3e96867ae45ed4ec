"""Losses and measures of the routers of a mixture of experts: sequence level, so that micro-batches
may be cut anywhere between sequences.

The load-balance loss of Switch Transformers (arXiv:2101.03961, eq. 4-6), N sum_i f_i P_i,
multiplies two means over the tokens of a batch: cut into micro-batches, it would be another loss.
Taken over the tokens of one sequence, as DeepSeek-V3 does (arXiv:2412.19437, eq. 17-20), it is a
number of that sequence, and the loss a sum. It asks for more: each sequence, not the batch alone,
should use all experts; so its coefficient is best small (1e-4 there).
"""

from __future__ import annotations

from torch import Tensor

from ratchet.algorithms.base import Term
from ratchet.algorithms.loss_aggregation import sequence_mean
from ratchet.algorithms.losses.common import Metrics
from ratchet.batch import Batch
from ratchet.protocols import Outputs

NEEDS = frozenset({"routers"})


def router_balance(out: Outputs, batch: Batch) -> tuple[Tensor, Metrics]:
    """sum_i f_i P_i over the experts, f_i a sequence's choices of expert i times experts / all its
    choices, P_i the mean probability of it; mean over layers. All tokens count, the prompt's too. 1
    where routing is even. [S]."""
    balance_S, _, entropy_S, max_load_S, rerouted_S = out.need("routers").T
    measured = {
        "balance": balance_S,
        "entropy": entropy_S,
        "max_load": max_load_S,
        "rerouted": rerouted_S,
    }
    return balance_S, {name: column_S.detach() for name, column_S in measured.items()}


def router_z(out: Outputs, batch: Batch) -> tuple[Tensor, Metrics]:
    """Mean over tokens and layers of logsumexp(router logits)^2 (arXiv:2202.08906, eq. 5): large
    logits round badly. [S]."""
    z_S = out.need("routers")[:, 1]
    return z_S, {"z": z_S.detach()}


def router_terms(*, balance_coef: float, z_coef: float) -> list[Term]:
    """Each sequence that trains weighs the same. A coefficient of 0 measures; the z-loss is there
    for one above."""
    balance = Term(
        "router", router_balance, sequence_mean, level="sequence", needs=NEEDS, coef=balance_coef
    )
    z = Term("router_z", router_z, sequence_mean, level="sequence", needs=NEEDS, coef=z_coef)
    return [balance, z] if z_coef else [balance]
