"""What may stand in a `config.json` where the built-in decoder reads it, and how large the sizes of
a model may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.errors import ModelError
from ratchet.utils.terminal_text import shortened

ORIGINAL = "original_max_position_embeddings"  # the context length before it was stretched
NUMBERS_END = 1e300  # beyond it, arithmetic overflows
# What a field of the shape may be. The upper bounds are some ten times beyond every published
# model: what lies above them is a slip or an attack, and would be computed with for hours before
# memory ended.
SIZES: Mapping[str, tuple[int, int]] = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**20),
    "n_layers": (1, 10_000),
    "n_heads": (1, 2**16),
    "n_kv_heads": (1, 2**16),
    "head_dim": (2, 2**16),
    "intermediate_size": (1, 2**24),
    "max_positions": (1, 2**31),
    "n_experts": (0, 2**16),
    "experts_per_token": (0, 2**16),
    "expert_intermediate_size": (0, 2**24),
}
# What a `config.json` may say, for keys that are read here.
HF_NUMBERS = (
    *(
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ),
    *(
        "intermediate_size",
        "max_position_embeddings",
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
    ),
    *(
        "moe_intermediate_size",
        "decoder_sparse_step",
        "sliding_window",
        "max_window_layers",
        "bos_token_id",
        ORIGINAL,
    ),
    *("rms_norm_eps", "initializer_range", "rope_theta", "partial_rotary_factor"),
)
# Keys whose null means nothing; null elsewhere is another default than absence.
HF_NOT_NULL = (
    *(
        "max_position_embeddings",
        "rms_norm_eps",
        "initializer_range",
        "decoder_sparse_step",
        "num_experts_per_tok",
    ),
    "max_window_layers",
)
HF_LISTS = {"layer_types": str, "mlp_only_layers": int}
HF_OBJECTS = ("rope_scaling", "rope_parameters")


def check_types(hf: Mapping[str, Any]) -> None:
    """Raise ModelError for a key of a `config.json` that holds another type than code here computes
    with."""

    def check(key: str, fits: bool, wanted: str) -> None:
        if hf.get(key) is not None and not fits:
            raise ModelError(
                f"config.json says {key}={brief(hf[key])}, must be {wanted}: take the file from "
                "the original model"
            )

    for key in HF_NUMBERS:
        check(key, is_number(hf.get(key)), "a number")
    for key in HF_NOT_NULL:
        if key in hf and hf[key] is None:
            raise ModelError(
                f"config.json says {key}=null, must be a number: copy it from the model again"
            )
    for key, kind in HF_LISTS.items():
        fits = isinstance(hf.get(key), list) and all(type(item) is kind for item in hf[key])
        check(key, fits, "a list of texts" if kind is str else "a list of numbers")
    for key in HF_OBJECTS:
        check(key, isinstance(hf.get(key), dict), "an object")
    for key, value in stated_rope(hf).items():
        if isinstance(value, list):
            raise ModelError(
                f"config.json says {key:.80}={brief(value)} of its rotary embedding: the built-in "
                "decoder reads no lists"
            )
    heads, layers = hf.get("num_attention_heads"), hf.get("num_hidden_layers")
    check("num_attention_heads", heads is None or heads >= 1, "at least 1")
    check(
        "num_hidden_layers",
        layers is None or 1 <= layers <= SIZES["n_layers"][1],
        f"1 to {SIZES['n_layers'][1]}",
    )


def stated_rope(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a `config.json` says of its rotary embedding, in the older or the newer form."""
    return hf.get("rope_scaling") or hf.get("rope_parameters") or {}


def is_number(value: object) -> bool:
    """Return True for an int or a float that is finite and far from overflow; a bool is none."""
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < NUMBERS_END
    )


def brief(value: object) -> str:
    """Return a value as Python writes it, cut to 80 characters."""
    return shortened(repr(value), 80)
