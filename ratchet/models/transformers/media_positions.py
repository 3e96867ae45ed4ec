"""The positions of tokens in sequences with media, under M-RoPE (arXiv:2409.12191).

T = packed tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from ratchet.models.media import join_media_inputs
from ratchet.types import PlacedMedium


def compute_rope_positions(
    backbone: nn.Module,
    tokens_T: Tensor,
    positions_T: Tensor,
    types_T: Tensor,
    lengths: Sequence[int],
    media: Sequence[Sequence[PlacedMedium]],
    *,
    packs: bool,
) -> Tensor:
    """Return the position ids under M-RoPE [4, T]: text, time, height and width.

    Args:
        backbone: A multimodal model with M-RoPE.
        types_T: The type of each token's medium; 0 for text.
        media: The media of each sequence.
        packs: False to leave out the text positions, by which transformers tells packed sequences
            apart: [3, T].
    """
    get_rope_index: Any = backbone.get_rope_index
    rows_4T = positions_T.expand(4, -1).clone()
    if any(media):
        # `get_rope_index` reads elements one by one; on an accelerator each read synchronizes.
        tokens_T, types_T = tokens_T.cpu(), types_T.cpu()
    parameters = inspect.signature(get_rope_index).parameters
    for placed, end, length in zip(media, accumulate(lengths), lengths, strict=True):
        if placed:
            row_slice = slice(end - length, end)
            grids = {
                name: x
                for name, x in join_media_inputs([item.medium for item in placed]).items()
                if name in parameters
            }
            row_positions, _ = get_rope_index(
                tokens_T[row_slice][None], mm_token_type_ids=types_T[row_slice][None], **grids
            )
            rows_4T[1:, row_slice] = row_positions[:, 0].to(rows_4T)
    return rows_4T if packs else rows_4T[1:]
