"""Define preference losses. A pair is a group of two training rows, the chosen one first.

T = tokens, S = sequences, G = groups. The logratio of a row is the sum, or with normalize="mean"
the mean, of logprobs - ref_logprobs over its trainable tokens. D is the logratio of the chosen row
minus that of the rejected one. Losses are at group level unless stated otherwise.
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
    """Split a column into (chosen [G], rejected [G]).

    Raises DataError unless every group has exactly two rows, both for training.
    """
    sizes_G = torch.bincount(batch.group_S, minlength=batch.n_groups)
    trained_G = batch.group_sum(batch.train_S.double())
    wrong_G = (sizes_G != 2) | (trained_G != 2)
    if bool(wrong_G.any()):
        group = int(wrong_G.nonzero()[0])
        raise DataError(
            f"group {batch.group_ids[group]} is no pair: it has {int(sizes_G[group])} rows, "
            f"{int(trained_G[group])} of them to train on. Give it two training rows alone, the "
            "chosen one first."
        )
    return x_S[0::2], x_S[1::2]


def require_rewards(batch: Batch) -> Tensor:
    """Return the reward of each training row, [S], 0 for other rows.

    Raises DataError for a training row without a reward.
    """
    missing_S = batch.train_S & ~batch.scored_S
    if bool(missing_S.any()):
        group = batch.group_ids[int(batch.group_S[missing_S][0])]
        raise DataError(
            f"group {group} has a row without a reward, which this loss reads. Give every answer "
            "a reward."
        )
    return batch.rewards_S.nan_to_num(0.0)


def compute_logratios(out: Outputs, batch: Batch, normalize: Normalize) -> Tensor:
    """Return the logratio of each row, [S]."""
    gap_T = out.need("logprobs") - batch.need("ref_logprobs")
    return row_sum(out, batch, gap_T) if normalize == "sum" else row_mean(out, batch, gap_T)


def _margin(out: Outputs, batch: Batch, normalize: Normalize) -> tuple[Tensor, Metrics]:
    """Return D [G] and the metrics of the pairs."""
    chosen_G, rejected_G = split_pairs(compute_logratios(out, batch, normalize), batch)
    return chosen_G - rejected_G, _pair_metrics(chosen_G, rejected_G)


def _pair_metrics(chosen_G: Tensor, rejected_G: Tensor) -> Metrics:
    """Return the metrics of the pairs at group level."""
    margin_G = (chosen_G - rejected_G).detach()
    return {
        "chosen": chosen_G.detach(),
        "rejected": rejected_G.detach(),
        "margin": margin_G,
        "accuracy": score_pair_accuracy(margin_G),
    }


def score_pair_accuracy(margin_G: Tensor) -> Tensor:
    """Return 1 if the chosen row wins, one half for a tie, else 0. [G]"""
    return (margin_G.sign() + 1) / 2


def dpo(
    out: Outputs,
    batch: Batch,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    normalize: Normalize = "sum",
) -> tuple[Tensor, Metrics]:
    """Return -(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D).

    e = `label_smoothing`, the share of pairs assumed to be in the wrong order. e = 0 is DPO
    (arXiv:2305.18290) eq. 7, e > 0 conservative DPO (https://ericmitchell.ai/cdpo.pdf).
    normalize="mean" normalises by length, as in Tulu 3 (arXiv:2411.15124) section 5.1.
    """
    margin_G, metrics = _margin(out, batch, normalize)
    scaled_G = beta * margin_G
    return -(1 - label_smoothing) * F.logsigmoid(scaled_G) - label_smoothing * F.logsigmoid(
        -scaled_G
    ), metrics


def ipo(
    out: Outputs, batch: Batch, *, beta: float, normalize: Normalize = "mean"
) -> tuple[Tensor, Metrics]:
    """Return (D - 1 / (2 beta))^2, which pulls the margin to a finite value.

    IPO (arXiv:2310.12036) eq. 17. By default D compares means over the tokens of each answer: the
    equation does not say sum or mean, and the paper's authors confirmed the mean to TRL.
    normalize="sum" uses log p(answer) itself.
    """
    margin_G, metrics = _margin(out, batch, normalize)
    return (margin_G - 1 / (2 * beta)).square(), metrics


def rpo(
    out: Outputs, batch: Batch, *, beta: float, eta: float, normalize: Normalize = "sum"
) -> tuple[Tensor, Metrics]:
    """Return KL(Bernoulli(b) || Bernoulli(a)), a = sigmoid(beta D).

    b = sigmoid(eta (reward of chosen - reward of rejected)), so the target grows with the reward
    difference. Reward-aware preference optimisation (arXiv:2406.11704, section 3.3.2).
    """
    margin_G, metrics = _margin(out, batch, normalize)
    better_G, worse_G = split_pairs(require_rewards(batch), batch)
    target_G = eta * (better_G - worse_G)
    scaled_G = beta * margin_G
    b_G = target_G.sigmoid()
    yes_G = F.logsigmoid(target_G) - F.logsigmoid(scaled_G)
    no_G = F.logsigmoid(-target_G) - F.logsigmoid(-scaled_G)
    return b_G * yes_G + (1 - b_G) * no_G, metrics


def simpo(out: Outputs, batch: Batch, *, beta: float, gamma: float) -> tuple[Tensor, Metrics]:
    """Return -log sigmoid(beta (mean log p of chosen - mean log p of rejected) - gamma).

    It needs no reference. SimPO (arXiv:2405.14734) eq. 6.
    """
    chosen_G, rejected_G = split_pairs(row_mean(out, batch, out.need("logprobs")), batch)
    return -F.logsigmoid(beta * (chosen_G - rejected_G) - gamma), _pair_metrics(
        chosen_G, rejected_G
    )


def odds_ratio(out: Outputs, batch: Batch) -> tuple[Tensor, Metrics]:
    """Return -log sigmoid(log odds of chosen - log odds of rejected).

    odds = p / (1 - p), where log p is the mean logprob of a row. It is the second term of ORPO
    (arXiv:2403.07691) eq. 5 to 7; the first is the likelihood of the chosen row.
    """
    mean_S = row_mean(out, batch, out.need("logprobs"))
    chosen_G, rejected_G = split_pairs(_log_odds(mean_S), batch)
    return -F.logsigmoid(chosen_G - rejected_G), _pair_metrics(chosen_G, rejected_G)


def _log_odds(logprob_S: Tensor) -> Tensor:
    """Return log(p / (1 - p)).

    p = 1, for example of an empty row, is clamped just below 1 to keep the odds finite.
    """
    below_S = logprob_S.clamp(max=-torch.finfo(logprob_S.dtype).eps)
    return below_S - torch.log(-torch.expm1(below_S))


def kto_reference_point(batch: Batch, state: AlgoState) -> Batch:
    """Fill the sequence column `kto_z0`, the batch's estimate of KL(policy || reference).

    z0 = max(0, mean over rows with use="reference" of the sum of old_logprobs - ref_logprobs).
    Those rows are answers to other prompts (KTO, arXiv:2402.01306, section 4.1). z0 is one detached
    number for all rows.
    """
    gap_T = torch.where(
        batch.predicted_T,
        batch.need("old_logprobs").double() - batch.need("ref_logprobs").double(),
        0.0,
    )
    other_S = batch.reference_S
    z0 = max(0.0, float(batch.sequence_sum(gap_T)[other_S].mean())) if bool(other_S.any()) else 0.0
    return batch.fill_sequences(
        kto_z0=torch.full((batch.n_sequences,), z0, dtype=torch.float64)
    ).note(**{"kto/z0": z0})


def kto(
    out: Outputs, batch: Batch, *, beta: float, desirable: float = 1.0, undesirable: float = 1.0
) -> tuple[Tensor, Metrics]:
    """Return desirable (1 - sigmoid(v)) for a row with a reward above 0.

    Other rows get undesirable (1 - sigmoid(-v)). v = beta (logratio - z0). The loss is at sequence
    level. KTO (arXiv:2402.01306) eq. 8.
    """
    ratio_S = compute_logratios(out, batch, "sum")
    v_S = beta * (ratio_S - batch.need("kto_z0"))
    good_S = require_rewards(batch) > 0
    x_S = torch.where(good_S, desirable * torch.sigmoid(-v_S), undesirable * torch.sigmoid(v_S))
    hit_S = (ratio_S > 0) == good_S
    return x_S, {"logratio": ratio_S.detach(), "accuracy": hit_S.to(x_S.dtype)}
