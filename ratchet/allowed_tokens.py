"""Store the tokens among which a grammar let each token of a sequence be drawn.

The sampler and the learner normalise over the same tokens, so their log-probabilities agree.

L = tokens of a sequence, M = distinct masks, B = bytes of a mask, V = vocabulary, n = tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

UNCONSTRAINED = -1


@dataclass(frozen=True, slots=True, eq=False)
class AllowedTokens:
    """The tokens that a grammar allowed at each position. Equal masks are stored once."""

    index: NDArray[np.int32]  # [L]
    """Row of `masks` for each token; -1 where every token was allowed."""
    masks: NDArray[np.uint8]  # [M, B]
    """Bit i % 8 (the lowest is 0) of byte i // 8 is set if token i was allowed."""

    @classmethod
    def concatenate(cls, parts: Sequence[tuple[AllowedTokens | None, int]]) -> AllowedTokens | None:
        """Return the allowed tokens of sequences laid end to end; None if no part has a grammar.

        parts: (allowed tokens, number of tokens) of each sequence.
        """
        import numpy as np

        if all(allowed is None for allowed, _ in parts):
            return None
        row_by_mask: dict[bytes, int] = {}
        indices: list[NDArray[np.int32]] = []
        for allowed, length in parts:
            if allowed is None:
                indices.append(np.full(length, UNCONSTRAINED, np.int32))
                continue
            rows = [row_by_mask.setdefault(m.tobytes(), len(row_by_mask)) for m in allowed.masks]
            # The last entry is that of index -1.
            indices.append(np.asarray([*rows, UNCONSTRAINED], np.int32)[allowed.index])
        masks = np.frombuffer(b"".join(row_by_mask), np.uint8).reshape(len(row_by_mask), -1)
        return cls(np.concatenate(indices), masks)


def unpack_masks(masks_nB: Tensor, vocab_size: int) -> Tensor:
    """Return masks of the format of `AllowedTokens` as booleans, [n, V].

    Tokens past the end of a mask are not allowed.
    """
    import torch
    import torch.nn.functional as F

    bits = torch.arange(8, dtype=torch.uint8, device=masks_nB.device)
    allowed_nV = ((masks_nB[:, :, None] >> bits) & 1).flatten(1)[:, :vocab_size].bool()
    return F.pad(allowed_nV, (0, vocab_size - allowed_nV.shape[1]))
