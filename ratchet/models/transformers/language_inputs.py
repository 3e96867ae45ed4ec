"""Divide the inputs that a language model gets from its multimodal model over ranks.

The multimodal model has inserted the embeddings of media into those of all tokens. Qwen3-VL also
adds features of images to the hidden states after the first layers (deepstack).

T = all tokens, U = tokens that are computed, P = tokens of images or videos among T, p = those
among U, t = tokens of a tensor-parallel rank, d = hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ratchet.errors import ModelError
from ratchet.models.transformers.sequence_parallel import TokenShards

EMBEDDINGS, VISUAL_MASK, FEATURES = "inputs_embeds", "visual_pos_masks", "deepstack_visual_embeds"
# The inputs that a division knows. Positions are divided before.
KNOWN_INPUTS = {EMBEDDINGS, VISUAL_MASK, FEATURES, "position_ids"}

REMEDY = (
    "set learner.context_parallel=1, pipeline_parallel=1 and sequence_parallel=false, and "
    "learner.dp_shard to the number of ranks"
)


@contextmanager
def divide_language_inputs(
    language: nn.Module, index_U: Tensor | None, tokens: TokenShards | None = None
) -> Iterator[None]:
    """Within the context, give a language model only the inputs of some tokens.

    Args:
        language: The language model inside a multimodal model.
        index_U: The tokens; None: all.
        tokens: The division of hidden states over tensor-parallel ranks (sequence parallelism).

    Raises ModelError if the language model gets inputs that are unknown here, or none.
    """
    if index_U is None and tokens is None:
        yield
        return
    is_divided = False

    def divide(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        nonlocal is_divided
        is_divided = True
        unknown = [name for name, x in named.items() if _is_input(x) and name not in KNOWN_INPUTS]
        if index_U is not None and (args or unknown):
            raise ModelError(
                f"{type(language).__name__} gets {', '.join(unknown) or 'unnamed arguments'} of "
                f"its multimodal model, which can't be divided over ranks: {REMEDY}"
            )
        changed = named if index_U is None else named | _select_tokens(named, index_U)
        if tokens is not None and changed.get(FEATURES) is not None:
            changed = changed | _divide_features(changed, tokens)
        return args, changed

    hook = language.register_forward_pre_hook(divide, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
    if not is_divided:
        raise ModelError(
            f"the inputs of {type(language).__name__} can't be divided over ranks: {REMEDY}"
        )


def _is_input(x: Any) -> bool:
    """True if an argument may have entries for tokens."""
    return isinstance(x, Tensor | dict | list | tuple)


def _select_tokens(named: Mapping[str, Any], index_U: Tensor) -> dict[str, Any]:
    """Return a language model's inputs of the tokens at `index_U`, by name."""
    changed = {EMBEDDINGS: named[EMBEDDINGS].index_select(1, index_U)}
    if (features := named.get(FEATURES)) is not None:
        is_visual_1T = named[VISUAL_MASK]
        changed[VISUAL_MASK] = is_visual_1T[:, index_U]
        # Features have a row for each token of an image or video, in the order of all tokens.
        rows_p = (is_visual_1T[0].cumsum(0) - 1)[index_U][changed[VISUAL_MASK][0]]
        changed[FEATURES] = [x_Pd[rows_p] for x_Pd in features]
    return changed


def _divide_features(named: Mapping[str, Any], tokens: TokenShards) -> dict[str, Any]:
    """Return the features of images of this rank's tokens between the blocks of the model."""
    is_visual_1U = named[VISUAL_MASK]
    is_visual_1t = tokens.drop_others(is_visual_1U[..., None])[..., 0]

    def take_own(x_pd: Tensor) -> Tensor:
        # A row for each token, so that the backward can gather the gradients of all ranks.
        x_1Ud = x_pd.new_zeros(*is_visual_1U.shape, x_pd.shape[-1])
        x_1Ud = x_1Ud.masked_scatter(is_visual_1U[..., None], x_pd)
        return tokens.take_own(x_1Ud)[is_visual_1t]

    return {VISUAL_MASK: is_visual_1t, FEATURES: [take_own(x_pd) for x_pd in named[FEATURES]]}
