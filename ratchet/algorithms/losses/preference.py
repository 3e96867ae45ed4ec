"""The preference losses (DPO, IPO, SimPO, ORPO, KTO).

A pair is a group of two training rows, the chosen one first. The logratio of a row is the sum of
logprobs - ref_logprobs over its trainable tokens, or their mean with normalize="mean". D is the
logratio of the chosen row minus the logratio of the rejected row. Losses are at group level unless
stated otherwise. T = tokens, S = sequences, G = groups.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.losses.common import Metrics, row_mean, row_sum
from ratchet.batch import Batch
from ratchet.errors import DataError
from ratchet.protocols import Outputs

Normalize = Literal["sum", "mean"]


def split_pairs(x_S: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Split a column of rows into (chosen [G], rejected [G]).

    Raises DataError unless every group has exactly two rows, both for training.
    """
    sizes_G = torch.bincount(batch.group_S, minlength=batch.n_groups)
    trained_G = batch.group_sum(batch.train_S.double())
    is_wrong_G = (sizes_G != 2) | (trained_G != 2)
    if bool(is_wrong_G.any()):
        group = int(is_wrong_G.nonzero()[0])
        raise DataError(
            f"group {batch.group_ids[group]} is not a pair: it has {int(sizes_G[group])} rows, "
            f"{int(trained_G[group])} of them for training. Give it exactly two training rows, the "
            "chosen one first."
        )
    return x_S[0::2], x_S[1::2]


def require_rewards(batch: Batch) -> Tensor:
    """Return the reward of each training row, and 0 for other rows. [S]

    Raises DataError for a training row without a reward.
    """
    lacks_reward_S = batch.train_S & ~batch.scored_S
    if bool(lacks_reward_S.any()):
        group = batch.group_ids[int(batch.group_S[lacks_reward_S][0])]
        raise DataError(
            f"group {group} has a row without a reward, but this loss reads rewards. Give every "
            "answer a reward."
        )
    return batch.rewards_S.nan_to_num(0.0)


def compute_logratios(out: Outputs, batch: Batch, normalize: Normalize) -> Tensor:
    """Return the logratio of each row, [S]."""
    gap_T = out.need("logprobs") - batch.need("ref_logprobs")
    return row_sum(out, batch, gap_T) if normalize == "sum" else row_mean(out, batch, gap_T)


def _compute_margin(out: Outputs, batch: Batch, normalize: Normalize) -> tuple[Tensor, Metrics]:
    """Return D [G] and the metrics of the pairs."""
    chosen_G, rejected_G = split_pairs(compute_logratios(out, batch, normalize), batch)
    return chosen_G - rejected_G, _compute_pair_metrics(chosen_G, rejected_G)


def _compute_pair_metrics(chosen_G: Tensor, rejected_G: Tensor) -> Metrics:
    """Return the metrics of the pairs at group level."""
    margin_G = (chosen_G - rejected_G).detach()
    return {
        "chosen": chosen_G.detach(),
        "rejected": rejected_G.detach(),
        "margin": margin_G,
        "accuracy": score_pair_accuracy(margin_G),
    }


def score_pair_accuracy(margin_G: Tensor) -> Tensor:
    """Return 1 for a margin above 0, 0.5 for a tie, and 0 for a margin below 0. [G]"""
    return (margin_G.sign() + 1) / 2


def dpo(
    out: Outputs,
    batch: Batch,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    normalize: Normalize = "sum",
) -> tuple[Tensor, Metrics]:
    """Return the DPO loss -(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D).

    e is `label_smoothing`, the share of pairs assumed to be in the wrong order. e = 0 is DPO
    (arXiv:2305.18290) eq. 7. e > 0 is conservative DPO (https://ericmitchell.ai/cdpo.pdf).
    normalize="mean" is length-normalised DPO (Tulu 3, arXiv:2411.15124, section 5.1).
    """
    margin_G, metrics = _compute_margin(out, batch, normalize)
    scaled_G = beta * margin_G
    return -(1 - label_smoothing) * F.logsigmoid(scaled_G) - label_smoothing * F.logsigmoid(
        -scaled_G
    ), metrics


def ipo(
    out: Outputs, batch: Batch, *, beta: float, normalize: Normalize = "mean"
) -> tuple[Tensor, Metrics]:
    """Return the IPO loss (D - 1 / (2 beta))^2, which pulls D to a finite value.

    IPO (arXiv:2310.12036) eq. 17. The equation leaves open if D compares sums or means over the
    tokens of an answer. The default is the mean, which the paper's authors confirmed to TRL.
    """
    margin_G, metrics = _compute_margin(out, batch, normalize)
    return (margin_G - 1 / (2 * beta)).square(), metrics


def rpo(
    out: Outputs, batch: Batch, *, beta: float, eta: float, normalize: Normalize = "sum"
) -> tuple[Tensor, Metrics]:
    """Return the RPO loss KL(Bernoulli(b) || Bernoulli(a)), where a = sigmoid(beta D).

    b = sigmoid(eta (reward of chosen - reward of rejected)), so the target of D grows with the
    reward difference. Reward-aware preference optimisation (arXiv:2406.11704, section 3.3.2).
    """
    margin_G, metrics = _compute_margin(out, batch, normalize)
    chosen_reward_G, rejected_reward_G = split_pairs(require_rewards(batch), batch)
    target_G = eta * (chosen_reward_G - rejected_reward_G)
    scaled_G = beta * margin_G
    b_G = target_G.sigmoid()
    log_b_over_a_G = F.logsigmoid(target_G) - F.logsigmoid(scaled_G)
    # The same for the other outcome: log((1 - b) / (1 - a)).
    log_complement_G = F.logsigmoid(-target_G) - F.logsigmoid(-scaled_G)
    return b_G * log_b_over_a_G + (1 - b_G) * log_complement_G, metrics


def simpo(out: Outputs, batch: Batch, *, beta: float, gamma: float) -> tuple[Tensor, Metrics]:
    """Return the SimPO loss -log sigmoid(beta (mean log p of chosen - of rejected) - gamma).

    The means are over the tokens of each answer. There is no reference model. SimPO
    (arXiv:2405.14734) eq. 6.
    """
    chosen_G, rejected_G = split_pairs(row_mean(out, batch, out.need("logprobs")), batch)
    return -F.logsigmoid(beta * (chosen_G - rejected_G) - gamma), _compute_pair_metrics(
        chosen_G, rejected_G
    )


def odds_ratio(out: Outputs, batch: Batch) -> tuple[Tensor, Metrics]:
    """Return ORPO's odds ratio loss -log sigmoid(log odds of chosen - log odds of rejected).

    odds = p / (1 - p), where log p is the mean logprob of a row. ORPO (arXiv:2403.07691) eq. 5 to 7
    adds the NLL of the chosen row, which is a loss term of its own.
    """
    mean_S = row_mean(out, batch, out.need("logprobs"))
    chosen_G, rejected_G = split_pairs(_compute_log_odds(mean_S), batch)
    return -F.logsigmoid(chosen_G - rejected_G), _compute_pair_metrics(chosen_G, rejected_G)


def _compute_log_odds(logprob_S: Tensor) -> Tensor:
    """Return log(p / (1 - p)) from log p.

    p = 1, for example of an empty row, is clamped just below 1 to keep the odds finite.
    """
    clamped_S = logprob_S.clamp(max=-torch.finfo(logprob_S.dtype).eps)
    return clamped_S - torch.log(-torch.expm1(clamped_S))


def kto_reference_point(batch: Batch, state: AlgoState) -> Batch:
    """Fill the sequence column `kto_z0`, the batch's estimate of KL(policy || reference).

    z0 = max(0, mean over rows with use="reference" of sum(old_logprobs - ref_logprobs)). Those rows
    are answers to other prompts (KTO, arXiv:2402.01306, section 4.1). z0 is one number for all
    rows, without gradient.
    """
    gap_T = torch.where(
        batch.predicted_T,
        batch.need("old_logprobs").double() - batch.need("ref_logprobs").double(),
        0.0,
    )
    gap_R = batch.sequence_sum(gap_T)[batch.reference_S]  # R = reference rows
    z0 = max(0.0, float(gap_R.mean())) if len(gap_R) else 0.0
    return batch.fill_sequences(
        kto_z0=torch.full((batch.n_sequences,), z0, dtype=torch.float64)
    ).with_metrics(**{"kto/z0": z0})


def kto(
    out: Outputs, batch: Batch, *, beta: float, desirable: float = 1.0, undesirable: float = 1.0
) -> tuple[Tensor, Metrics]:
    """Return the KTO loss: desirable (1 - sigmoid(v)) for rows with a reward above 0.

    Other rows get undesirable (1 - sigmoid(-v)). v = beta (logratio - z0), and `desirable` and
    `undesirable` are weights. KTO (arXiv:2402.01306) eq. 8. Sequence level.
    """
    logratio_S = compute_logratios(out, batch, "sum")
    v_S = beta * (logratio_S - batch.need("kto_z0"))
    is_good_S = require_rewards(batch) > 0
    x_S = torch.where(is_good_S, desirable * torch.sigmoid(-v_S), undesirable * torch.sigmoid(v_S))
    is_correct_S = (logratio_S > 0) == is_good_S
    return x_S, {"logratio": logratio_S.detach(), "accuracy": is_correct_S.to(x_S.dtype)}
