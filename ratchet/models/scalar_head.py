"""The scalar head: the value head of a critic, or the score head of a reward model.

T = tokens, d = hidden size.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ratchet.errors import ModelError
from ratchet.models.weights.hf_weights import SCORE, WeightFiles
from ratchet.models.weights.tensor_files import save_tensors
from ratchet.utils.atomic_files import atomic_path

HEAD_FILE = "score.safetensors"


class ScalarHead(nn.Module):
    """A linear layer from hidden states to scalars, without bias, for critics and reward models.

    Its weight is named as in Hugging Face's `*ForSequenceClassification` with one label. It starts
    at zero, so that a critic's first values and a reward model's first scores have no noise.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))

    def forward(self, hidden_Td: Tensor) -> Tensor:
        """Return the scalars [T] of hidden states [T, d]."""
        return hidden_Td @ self.weight[0]

    def init_weights(self, seed: int, std: float = 0.0) -> ScalarHead:
        """Draw the weight from normal(0, std). A seed gives the same bits on every device."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.weight.copy_(torch.empty(self.weight.shape).normal_(0.0, std, generator=generator))
        return self


def save_head(head: ScalarHead, directory: Path) -> None:
    """Write the head to `score.safetensors` in the model's directory, in float32."""
    directory.mkdir(parents=True, exist_ok=True)
    with atomic_path(directory / HEAD_FILE) as temporary:
        save_tensors(
            {SCORE: head.weight.detach().to("cpu", torch.float32, copy=True)},
            temporary,
            metadata={"format": "pt"},
        )


def load_head(directory: Path, hidden_size: int) -> ScalarHead | None:
    """Return the scalar head in a model's directory; None if there is none.

    The directory is one that `save_head` wrote to, or a Hugging Face `*ForSequenceClassification`
    model. Raises ModelError if the head has more than one label, or another hidden size.
    """
    files = _find_head(directory)
    if files is None:
        return None
    ((_, weight),) = files.read([SCORE])
    if tuple(weight.shape) != (1, hidden_size):
        raise ModelError(
            f"{directory}: {SCORE} has shape {tuple(weight.shape)}, but a scalar head of this "
            f"model has (1, {hidden_size})"
        )
    head = ScalarHead(hidden_size)
    with torch.no_grad():
        head.weight.copy_(weight)
    return head


def require_head(directory: Path) -> None:
    """Raise ModelError if a model's directory has no scalar head. No weights are read."""
    if _find_head(directory) is None:
        raise ModelError(
            f"{directory} has no scalar head: train one with `ratchet train reward_model`"
        )


def _find_head(directory: Path) -> WeightFiles | None:
    if (directory / HEAD_FILE).exists():
        return WeightFiles(directory, {SCORE: HEAD_FILE})
    files = WeightFiles.find(directory)
    return files if SCORE in files.files else None
