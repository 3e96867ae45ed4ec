"""Shape of the built-in decoder, read from and written to a Hugging Face `config.json`. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ratchet.errors import ModelError

ORIGINAL = "original_max_position_embeddings"  # the context length before it was stretched
ROPE_KEYS: Mapping[str, tuple[str, ...]] = {  # what each rope_type needs besides rope_theta
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor", ORIGINAL),
}
SILU = ("silu", "swish")
REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


@dataclass(frozen=True)
class Family:
    """What a `model_type` fixes, and its defaults for keys that a `config.json` leaves out."""

    architecture: str
    qk_norm: bool = False
    qkv_bias: bool | None = False  # None: `attention_bias` says so, for the output projection too
    mlp_bias: bool = False  # whether the key `mlp_bias` means anything
    max_positions: int = 32768
    kv_heads: int | None = 32  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / heads
    sliding_window: int | None = None  # applies where the key is absent; `use_sliding_window` gates it in Qwen's
    bos_id: int | None = None
    eos_id: int | None = None


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", qkv_bias=None, mlp_bias=True, max_positions=2048, kv_heads=None, bos_id=1, eos_id=2),
    "mistral": Family("MistralForCausalLM", max_positions=131072, kv_heads=8, sliding_window=4096, bos_id=1, eos_id=2),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, qkv_bias=None, head_dim=128),
}


@dataclass(frozen=True)
class DecoderConfig:
    """Llama, Mistral, Qwen2 and Qwen3 dense decoders: they differ in these fields only."""

    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int = 4096
    family: str = "qwen3"  # Hugging Face `model_type`
    qk_norm: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = True
    norm_eps: float = 1e-6
    init_std: float = 0.02
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ModelError(f"{self.n_heads} attention heads can't share {self.n_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"head_dim={self.head_dim} must be even: rotary embedding turns pairs")
        keys = ROPE_KEYS.get(self.rope.get("rope_type", ""))
        if keys is None or any(self.rope.get(key) is None for key in ("rope_theta", *keys)):
            known = "; ".join(f"{kind}: {', '.join(('rope_theta', *keys))}" for kind, keys in ROPE_KEYS.items())
            raise ModelError(f"rope={dict(self.rope)} lacks a rope_type or a key of it; they are {known}")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> DecoderConfig:
        """From the content of `config.json`, and of `generation_config.json`, whose end-of-sequence ids come first.

        Raises ModelError where `unsupported_reason` has one.
        """
        if reason := unsupported_reason(hf):
            raise ModelError(f"the built-in decoder can't represent this model: {reason}; load it with backend 'transformers'")
        family, n_heads = FAMILIES[hf["model_type"]], int(hf["num_attention_heads"])
        attention_bias = bool(hf.get("attention_bias", False))
        return cls(
            vocab_size=int(hf["vocab_size"]),
            hidden_size=int(hf["hidden_size"]),
            n_layers=int(hf["num_hidden_layers"]),
            n_heads=n_heads,
            n_kv_heads=int(hf.get("num_key_value_heads", family.kv_heads) or n_heads),
            head_dim=int(hf.get("head_dim", family.head_dim) or hf["hidden_size"] // n_heads),
            intermediate_size=int(hf["intermediate_size"]),
            max_positions=int(hf.get("max_position_embeddings", family.max_positions)),
            family=hf["model_type"],
            qk_norm=family.qk_norm,
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            out_bias=attention_bias if family.qkv_bias is None else False,
            mlp_bias=bool(hf.get("mlp_bias", False)) and family.mlp_bias,
            tied=bool(hf.get("tie_word_embeddings", False)),
            norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            init_std=float(hf.get("initializer_range", 0.02)),
            rope=_rope(hf, int(hf.get("max_position_embeddings", family.max_positions))),
            bos_id=hf.get("bos_token_id", family.bos_id),
            eos_ids=_ids((generation or {}).get("eos_token_id")) or _ids(hf.get("eos_token_id", family.eos_id)),
        )

    def to_hf(self) -> dict[str, Any]:
        """The content of a `config.json` that transformers >= 5 reads (`rope_theta` is repeated outside for older readers).

        Raises ModelError where no `model_type` has this combination of biases and norms.
        """
        self._check_family()
        return {
            "architectures": [FAMILIES[self.family].architecture],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_positions,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "initializer_range": self.init_std,
            "tie_word_embeddings": self.tied,
            "rope_parameters": dict(self.rope),
            "rope_theta": self.rope["rope_theta"],
            "attention_bias": self.out_bias,
            "mlp_bias": self.mlp_bias,
            "attention_dropout": 0.0,
            "sliding_window": None,
            "use_sliding_window": False,
            "bos_token_id": self.bos_id,
            "eos_token_id": _one_or_list(self.eos_ids),
        }

    def _check_family(self) -> None:
        if self.family not in FAMILIES:
            raise ModelError(f"family '{self.family}' is not one of {', '.join(FAMILIES)}")
        family = FAMILIES[self.family]
        qkv_bias = self.out_bias if family.qkv_bias is None else family.qkv_bias
        out_bias = self.out_bias and family.qkv_bias is None
        mlp_bias = self.mlp_bias and family.mlp_bias
        fitting = {"qk_norm": family.qk_norm, "qkv_bias": qkv_bias, "out_bias": out_bias, "mlp_bias": mlp_bias}
        for name, value in fitting.items():
            if getattr(self, name) != value:
                raise ModelError(f"no '{self.family}' config.json can say {name}={getattr(self, name)}, only {name}={value}")


def unsupported_reason(hf: Mapping[str, Any]) -> str | None:
    """Why the built-in decoder can't run the model of a `config.json`; None when it can."""
    model_type = str(hf.get("model_type"))
    if model_type not in FAMILIES:
        return f"model_type '{model_type}' is not one of {', '.join(FAMILIES)}"
    if missing := [key for key in REQUIRED if hf.get(key) is None]:
        return f"its config.json says nothing about {', '.join(missing)}"
    if hf.get("hidden_act", "silu") not in SILU:
        return f"hidden_act '{hf['hidden_act']}' is not silu"
    if hf.get("quantization_config") is not None:
        return "its weights are quantized (quantization_config)"
    if sliding := _sliding_reason(hf, FAMILIES[model_type]):
        return sliding
    return _rope_reason(hf)


def _sliding_reason(hf: Mapping[str, Any], family: Family) -> str | None:
    kinds = set(hf.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        return f"layer_types has {', '.join(sorted(kinds))}"
    if family.sliding_window is not None:
        window = hf.get("sliding_window", family.sliding_window)
        if window is not None and window < hf.get("max_position_embeddings", family.max_positions):
            return f"sliding_window={window} is shorter than its context"
    elif hf.get("use_sliding_window") and hf.get("sliding_window", 4096) is not None and not hf.get("layer_types"):
        first = hf.get("max_window_layers", 28)
        if first < hf["num_hidden_layers"]:
            return f"use_sliding_window limits the attention of layers {first} and up"
    return None


def _rope_reason(hf: Mapping[str, Any]) -> str | None:
    stated = _stated_rope(hf)
    if any(isinstance(value, Mapping) for value in stated.values()):
        return "its rotary embedding differs between layers (nested rope_parameters)"
    kind = stated.get("rope_type", stated.get("type", "default"))
    if kind not in ROPE_KEYS:
        return f"rope_type '{kind}' is not one of {', '.join(ROPE_KEYS)}"
    if missing := [key for key in ROPE_KEYS[kind] if key != ORIGINAL and stated.get(key) is None]:
        return f"rope_type '{kind}' comes without {', '.join(missing)}"
    if stated.get("partial_rotary_factor", hf.get("partial_rotary_factor")) not in (None, 1, 1.0):
        return "its rotary embedding turns a part of each head only (partial_rotary_factor)"
    return None


def _stated_rope(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    return hf.get("rope_scaling") or hf.get("rope_parameters") or {}


def _rope(hf: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    """`rope_parameters` as transformers 5 writes them, from these or from the older `rope_theta` + `rope_scaling`."""
    rope = {key: value for key, value in _stated_rope(hf).items() if key != "type"}
    rope["rope_type"] = _stated_rope(hf).get("rope_type", _stated_rope(hf).get("type", "default"))
    rope["rope_theta"] = float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    if ORIGINAL in ROPE_KEYS[rope["rope_type"]]:
        rope[ORIGINAL] = int(hf.get(ORIGINAL) or rope.get(ORIGINAL) or max_positions)
    return rope


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    if len(ids) < 2:
        return ids[0] if ids else None
    return list(ids)
