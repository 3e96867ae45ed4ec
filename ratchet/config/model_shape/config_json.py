"""Check the types of the `config.json` values that the decoder reads; define size limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.errors import ModelError
from ratchet.utils.terminal_text import shorten_text

ORIGINAL_CONTEXT = "original_max_position_embeddings"  # the context length before RoPE scaling
NUMBER_BOUND = 1e300  # numbers must stay below it, so that arithmetic does not overflow
# The smallest and largest value of each field of `DecoderConfig`. The upper bounds are about ten
# times those of the largest published models: a larger number is a typo or an attack, and would
# cost hours of computation before memory ran out.
SIZE_RANGES: Mapping[str, tuple[int, int]] = {
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
# The keys of a `config.json` that must hold numbers where they are present and not null.
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
        ORIGINAL_CONTEXT,
    ),
    "rms_norm_eps",
    "initializer_range",
    "rope_theta",
    "partial_rotary_factor",
)
# The keys that may be absent, but not null. For all other keys null is accepted.
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
# The keys that must hold lists, with the type of their items.
HF_LISTS = {"layer_types": str, "mlp_only_layers": int}
HF_OBJECTS = ("rope_scaling", "rope_parameters")
# Sections of models with encoders of images, audio or video.
MEDIA_CONFIG_KEYS = ("vision_config", "audio_config")


def check_types(
    hf: Mapping[str, Any], *, remedy: str = "take the file from the original model"
) -> None:
    """Raise ModelError if a `config.json` value that the decoder reads has the wrong type.

    The numbers of heads and layers must also be in range. `remedy` ends the message.
    """

    def check(key: str, fits: bool, expected: str) -> None:
        if hf.get(key) is not None and not fits:
            raise ModelError(
                f"config.json says {key}={shorten_repr(hf[key])}, must be {expected}: {remedy}"
            )

    for key in HF_NUMBERS:
        check(key, is_number(hf.get(key)), "a number")
    for key in HF_NOT_NULL:
        if key in hf and hf[key] is None:
            raise ModelError(f"config.json says {key}=null, must be a number: {remedy}")
    for key, kind in HF_LISTS.items():
        fits = isinstance(hf.get(key), list) and all(type(item) is kind for item in hf[key])
        check(key, fits, "a list of texts" if kind is str else "a list of numbers")
    for key in HF_OBJECTS:
        check(key, isinstance(hf.get(key), dict), "an object")
    for key, value in read_rope_section(hf).items():
        if isinstance(value, list):
            raise ModelError(
                f"config.json says {key:.80}={shorten_repr(value)} for the rotary embedding, where "
                "the built-in decoder reads no lists"
            )
    n_heads = hf.get("num_attention_heads")
    n_layers = hf.get("num_hidden_layers")
    check("num_attention_heads", n_heads is None or n_heads >= 1, "at least 1")
    check(
        "num_hidden_layers",
        n_layers is None or 1 <= n_layers <= SIZE_RANGES["n_layers"][1],
        f"1 to {SIZE_RANGES['n_layers'][1]}",
    )


def read_rope_section(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary embedding section of a `config.json`, in its older or newer form."""
    return hf.get("rope_scaling") or hf.get("rope_parameters") or {}


def is_number(value: object) -> bool:
    """True for an int or float, but not a bool, of magnitude below `NUMBER_BOUND`."""
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < NUMBER_BOUND
    )


def shorten_repr(value: object) -> str:
    """Return `repr(value)`, cut to 80 characters."""
    return shorten_text(repr(value), 80)


def read_original_context(
    hf: Mapping[str, Any], rope: Mapping[str, Any], max_positions: int
) -> int:
    """Return the length that a model was trained with before its context was extended.

    max_positions: The family's default of `max_position_embeddings`.
    """
    return int(
        hf.get(ORIGINAL_CONTEXT)
        or rope.get(ORIGINAL_CONTEXT)
        or hf.get("max_position_embeddings", max_positions)
    )
