"""A scalar per hidden state: the value head of a critic, the score head of a reward model.

T = tokens, d = hidden size.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ratchet.errors import ModelError
from ratchet.models.weights.hf_weights import SCORE, WeightFiles
from ratchet.utils.atomic_files import atomic_path

FILE = "score.safetensors"


class ScalarHead(nn.Module):
    """One linear map without bias, named as in Hugging Face's `*ForSequenceClassification` with one
    label.

    It starts at zero: a critic's first values, and a reward model's first scores, then carry no
    noise.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))

    def forward(self, hidden_Td: Tensor) -> Tensor:
        """[T, d] -> [T]"""
        return hidden_Td @ self.weight[0]

    def init_weights(self, seed: int, std: float = 0.0) -> ScalarHead:
        """normal(0, std); the same bits on every device for one seed."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.weight.copy_(torch.empty(self.weight.shape).normal_(0.0, std, generator=generator))
        return self


def save_head(head: ScalarHead, directory: Path) -> None:
    """Writes `score.safetensors` beside the model, float32."""
    directory.mkdir(parents=True, exist_ok=True)
    with atomic_path(directory / FILE) as temporary:
        save_file(
            {SCORE: head.weight.detach().to("cpu", torch.float32, copy=True)},
            temporary,
            metadata={"format": "pt"},
        )


def load_head(directory: Path, hidden_size: int) -> ScalarHead | None:
    """The head of a directory that `save_head` wrote, or of a Hugging Face
    `*ForSequenceClassification`; None where it has none. Raises ModelError where the head has more
    than one label, or belongs to a model of another width."""
    found = _find(directory)
    if found is None:
        return None
    ((_, weight),) = found.read([SCORE])
    if tuple(weight.shape) != (1, hidden_size):
        raise ModelError(
            f"{directory}: {SCORE} has shape {tuple(weight.shape)}, a scalar head here has (1, "
            f"{hidden_size})"
        )
    head = ScalarHead(hidden_size)
    with torch.no_grad():
        head.weight.copy_(weight)
    return head


def _find(directory: Path) -> WeightFiles | None:
    if (directory / FILE).exists():
        return WeightFiles(directory, {SCORE: FILE})
    found = WeightFiles.find(directory)
    return found if SCORE in found.files else None
