"""The inputs of probes, which compare what a model computes before and after a change.

T = tokens of packed sequences, d = hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ratchet.types import Medium, PlacedMedium

if TYPE_CHECKING:
    from ratchet.models.transformers.policy import TransformersPolicy

PROBE_LENGTHS = (5, 1, 7, 3)  # numbers of tokens of the packed sequences in a probe
N_PROBE_TEXT_TOKENS = 3  # before a probe sequence's first medium; one more follows each medium


@dataclass(frozen=True)
class ProbeInputs:
    """Packed sequences of a probe.

    media: the media of each sequence; () if the model gets none.
    """

    tokens_T: Tensor
    lengths: tuple[int, ...]
    media: tuple[tuple[PlacedMedium, ...], ...] = ()

    @classmethod
    def from_rows(
        cls, rows: Sequence[Tensor], media: Sequence[tuple[PlacedMedium, ...]] = ()
    ) -> ProbeInputs:
        """Return the inputs of these sequences."""
        return cls(torch.cat(list(rows)), tuple(map(len, rows)), tuple(media))

    def run(self, policy: TransformersPolicy) -> Tensor:
        """Return a policy's hidden states of the tokens that this rank computes."""
        # A division may have moved the model.
        device = policy.model.device
        positions_T = torch.cat([torch.arange(n, device=device) for n in self.lengths])
        options: dict[str, Any] = {"media": self.media} if self.media else {}
        return policy.hidden(self.tokens_T.to(device), positions_T, self.lengths, **options)


def make_probe(policy: TransformersPolicy, lengths: Sequence[int]) -> ProbeInputs:
    """Return sequences of these lengths; of a model that reads images, sequences with images.

    Models without probe images get text.
    """
    if policy.probe_images:
        rows, media = make_image_rows(policy, policy.probe_images)
        # Stacked experts get all tokens of a probe in one forward.
        kept = slice(None) if policy.packs else slice(-1, None)
        return ProbeInputs.from_rows(rows[kept], media[kept])
    return ProbeInputs.from_rows([policy.make_probe_tokens(n) for n in lengths])


def make_image_rows(
    policy: TransformersPolicy, images: Sequence[Medium]
) -> tuple[list[Tensor], list[tuple[PlacedMedium, ...]]]:
    """Return three sequences and their media: the first image, no image, and both images."""
    token = int(policy.model.config.image_token_id)
    rows, media = list[Tensor](), list[tuple[PlacedMedium, ...]]()
    for row_images in ([images[0]], [], [images[1], images[0]]):
        pieces, placed = [policy.make_probe_tokens(N_PROBE_TEXT_TOKENS)], list[PlacedMedium]()
        for medium in row_images:
            placed.append(PlacedMedium(sum(map(len, pieces)), medium))
            pieces += [
                torch.full((medium.span,), token, device=policy.model.device),
                policy.make_probe_tokens(N_PROBE_TEXT_TOKENS + 1),
            ]
        rows.append(torch.cat(pieces))
        media.append(tuple(placed))
    return rows, media


def make_probe_states(policy: TransformersPolicy, tokens_T: Tensor) -> Tensor:
    """Return hidden states [T, d] in the place of those of an earlier pipeline stage."""
    dimensions = torch.arange(policy.hidden_size, device=tokens_T.device)
    states_Td = tokens_T[:, None] + dimensions * (tokens_T[:, None] + 1)
    return states_Td.to(policy.model.dtype).sin()


def is_close(a: Tensor, b: Tensor, dtype: torch.dtype, factor: float = 1) -> bool:
    """True if `a` equals `b` up to `factor` times the rounding errors of a model in `dtype`.

    Rounding errors are relative to the largest entry of `b`. A leak between sequences changes
    entries far more.
    """
    tolerance = (1e-5 if dtype.itemsize >= 4 else 3e-2) * factor
    return bool((a.float() - b.float()).abs().max() <= tolerance * b.float().abs().max())
