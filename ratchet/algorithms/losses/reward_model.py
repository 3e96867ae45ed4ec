"""The losses of reward models (Bradley-Terry, regression, process rewards), on a scalar head.

T = tokens, S = sequences, G = groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ratchet.algorithms.losses.common import Metrics
from ratchet.algorithms.losses.preference import require_rewards, score_pair_accuracy, split_pairs
from ratchet.batch import Batch
from ratchet.errors import DataError
from ratchet.protocols import Outputs


def bradley_terry(out: Outputs, batch: Batch) -> tuple[Tensor, Metrics]:
    """Return the pairwise reward model loss -log sigmoid(score of chosen - score of rejected).

    Bradley and Terry (1952); InstructGPT (arXiv:2203.02155) eq. 1. Group level.
    """
    chosen_G, rejected_G = split_pairs(out.need("scores"), batch)
    margin_G = (chosen_G - rejected_G).detach()
    metrics = {"margin": margin_G, "accuracy": score_pair_accuracy(margin_G)}
    return -F.logsigmoid(chosen_G - rejected_G), metrics


def score_regression(out: Outputs, batch: Batch) -> tuple[Tensor, Metrics]:
    """Return (score - reward)^2 (HelpSteer2, arXiv:2406.08673, section 3). Sequence level."""
    scores_S = out.need("scores")
    return (scores_S - require_rewards(batch)).square(), {"score": scores_S.detach()}


def process_reward(out: Outputs, batch: Batch) -> tuple[Tensor, Metrics]:
    """Return the binary cross entropy of each step's score and its label. Token level.

    The score is sigmoid(head's output at the step's last token). The label is the turn's reward.
    Tokens that end no step get 0. "Let's Verify Step by Step" (arXiv:2305.20050), section 2.6.
    Raises DataError for a label outside [0, 1], because the score would diverge.
    """
    is_labelled_T = ~batch.turn_rewards_T.isnan()
    is_outside_T = (batch.turn_rewards_T < 0) | (batch.turn_rewards_T > 1)
    if bool(is_outside_T.any()):
        group = batch.group_ids[int(batch.group_S[batch.sequence_T[is_outside_T][0]])]
        raise DataError(
            f"group {group}: a step has the label {batch.turn_rewards_T[is_outside_T][0]:g}. It "
            "must lie in [0, 1]."
        )
    labels_T = batch.turn_rewards_T.nan_to_num(0.0)
    scores_T = out.need("token_scores")
    x_T = F.binary_cross_entropy_with_logits(
        scores_T, labels_T.to(scores_T.dtype), reduction="none"
    )
    is_correct_T = ((scores_T > 0) == (labels_T > 0.5)).to(x_T.dtype)
    accuracy_T = torch.where(is_labelled_T, is_correct_T, 0.0)
    return torch.where(is_labelled_T, x_T, 0.0), {"accuracy": accuracy_T}
