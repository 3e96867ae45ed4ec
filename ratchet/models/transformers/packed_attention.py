"""Attention of transformers' models over packed sequences, without a mask of all their tokens.

transformers separates packed sequences by a mask [1, 1, T, T]. Attention then computes all pairs of
the T tokens, also those of different sequences, and on CUDA it can't use the flash kernel. Here
layers with plain causal attention get the sequences' lengths instead. Layers with another mask,
such as a sliding window, keep it.

T = tokens, H = query heads, K = key/value heads, D = head_dim.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    causal_mask_function,
    packed_sequence_mask_function,
    sdpa_mask,
)

from ratchet.models.decoder import AttentionFn

# The name of this attention in transformers' configurations.
NAME = "ratchet_packed"
# The argument of the backbone by which attention gets the lengths.
ARGUMENT = "packed_attention"


def set_packed_attention(model: PreTrainedModel, *, enabled: bool) -> bool:
    """Set the attention of a model to this one or PyTorch's; return True if it is that now.

    Another attention than these two stays.
    """
    name = NAME if enabled else "sdpa"
    # Setting it again would set it in encoders too, which may have another.
    if model.config._attn_implementation == name:
        return True
    if model.config._attn_implementation not in ("sdpa", NAME):
        return False
    model.set_attn_implementation(name)
    return model.config._attn_implementation == name


def make_mask(**arguments: Any) -> Tensor | None:
    """Return transformers' mask; an empty tensor if it only keeps packed sequences apart.

    Args:
        arguments: Those of `sdpa_mask`.
    """
    if _is_causal_and_packed(arguments["mask_function"]) and arguments.get("local_size") is None:
        return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=arguments["device"])
    return sdpa_mask(**arguments)


def _is_causal_and_packed(mask_function: Any) -> bool:
    """True if a token sees exactly the earlier tokens of its own sequence.

    transformers combines the functions of a mask in closures. From 5.24 on it gives the causal one
    the positions in the sequence, which have the same order.
    """
    combined = next(iter(_list_closure(mask_function, "and_masks")), ())
    if len(combined) != 2:
        return False
    causal, packed = combined
    functions = [causal, *_list_closure(causal, "remap_positions_for_packed_sequence")]
    is_causal = any(function is causal_mask_function for function in functions)
    return is_causal and bool(_list_closure(packed, packed_sequence_mask_function.__name__))


def _list_closure(function: Any, maker: str) -> list[Any]:
    """Return what the inner function of a function `maker` refers to; [] for any other function."""
    is_made = inspect.isfunction(function) and function.__qualname__.startswith(f"{maker}.")
    return [cell.cell_contents for cell in function.__closure__ or ()] if is_made else []


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_attention: AttentionFn | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Return the attention of a layer [1, T, H, D], and None for the attention weights.

    Args:
        module: The layer.
        query: [1, H, T, D].
        key, value: [1, K, T, D].
        attention_mask: Of `make_mask`.
        packed_attention: The attention of the packed sequences.
        arguments: Those of transformers' `sdpa_attention_forward`. Dropout is off in a policy.

    Raises:
        NotImplementedError: The layer separates sequences by their lengths, but does more than
            causal attention, or did not get the lengths.
    """
    if attention_mask is None or attention_mask.numel():
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    is_causal = arguments.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)  # as transformers reads it
    others = arguments.get("position_bias"), arguments.get("cache")
    if packed_attention is None or not is_causal or others != (None, None):
        raise NotImplementedError(f"{type(module).__name__} has attention of its own")
    head_dim = query.shape[-1]
    scaling = arguments.get("scaling")
    if scaling is not None and scaling != head_dim**-0.5:
        query = query * (scaling * head_dim**0.5)
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    return packed_attention(0, q_THD, k_TKD, v_TKD)[None], None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)
