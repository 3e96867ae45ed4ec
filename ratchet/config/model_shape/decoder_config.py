"""The shape of the built-in decoder, read from and written to a Hugging Face `config.json`.

The module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ratchet.config.model_shape.config_json import (
    ORIGINAL_CONTEXT,
    SIZE_RANGES,
    check_types,
    is_number,
    read_original_context,
    read_rope_section,
    shorten_repr,
)
from ratchet.errors import ModelError

# The keys that each rope_type needs besides rope_theta.
ROPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL_CONTEXT),
    "yarn": ("factor", ORIGINAL_CONTEXT),
}
SILU = ("silu", "swish")
# The number of experts: Qwen's older key, and the key of all families since transformers 5.
EXPERT_KEYS = ("num_experts", "num_local_experts")
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)


@dataclass(frozen=True)
class MoEFormat:
    """The way a `model_type` writes its experts in `config.json` and in weight names."""

    n_experts: int  # default where `config.json` has no such key
    experts_per_token: int  # default where `config.json` has no such key
    size_key: str  # key of an expert's intermediate size
    renormalise: bool | None = None  # None: read from `norm_topk_prob`
    reads_dense_layers: bool = True  # True if `mlp_only_layers` and `decoder_sparse_step` are read
    block: str = "mlp"  # the layer's name in weight files
    gate_up: tuple[str, str] = ("gate_proj", "up_proj")  # names of an expert's matrices
    down: str = "down_proj"


@dataclass(frozen=True)
class ModelFamily:
    """The fixed properties of a `model_type`, and its defaults for absent `config.json` keys."""

    architecture: str
    qk_norm: bool = False
    qkv_bias: bool | None = False  # None: `attention_bias` decides, for the output projection too
    mlp_bias: bool = False  # True if the key `mlp_bias` is read
    max_positions: int = 32768
    kv_heads: int | None = 32  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / heads
    gated_window: bool = True  # True if `use_sliding_window` switches the window on
    sliding_window: int | None = None  # default of an ungated window
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    bos_id: int | None = None
    eos_id: int | None = None
    moe: MoEFormat | None = None


MIXTRAL = MoEFormat(
    8,
    2,
    "intermediate_size",
    renormalise=True,
    reads_dense_layers=False,
    block="block_sparse_moe",
    gate_up=("w1", "w3"),
    down="w2",
)
FAMILIES: Mapping[str, ModelFamily] = {
    "llama": ModelFamily(
        "LlamaForCausalLM",
        qkv_bias=None,
        mlp_bias=True,
        max_positions=2048,
        kv_heads=None,
        bos_id=1,
        eos_id=2,
    ),
    "mistral": ModelFamily(
        "MistralForCausalLM",
        max_positions=131072,
        kv_heads=8,
        gated_window=False,
        sliding_window=4096,
        bos_id=1,
        eos_id=2,
    ),
    "qwen2": ModelFamily("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": ModelFamily("Qwen3ForCausalLM", qk_norm=True, qkv_bias=None, head_dim=128),
    "qwen3_moe": ModelFamily(
        "Qwen3MoeForCausalLM",
        qk_norm=True,
        qkv_bias=None,
        kv_heads=4,
        moe=MoEFormat(128, 8, "moe_intermediate_size"),
    ),
    "mixtral": ModelFamily(
        "MixtralForCausalLM",
        max_positions=131072,
        kv_heads=8,
        gated_window=False,
        norm_eps=1e-5,
        rope_theta=1e6,
        bos_id=1,
        eos_id=2,
        moe=MIXTRAL,
    ),
}


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a Llama, Mistral, Qwen2, Qwen3, Mixtral or Qwen3-MoE decoder.

    These families differ in the fields below only.
    """

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
    # `rope_parameters` in the form of transformers 5
    rope: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    n_experts: int = 0  # experts per layer outside `dense_layers`; 0 in families without experts
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    renormalise: bool = True  # the weights of a token's experts are scaled to sum to 1
    dense_layers: tuple[int, ...] = ()  # layers without experts, in a family that has experts
    # Content of `generation_config.json`, which other programs read: also defaults of sampling.
    generation: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        self._check_sizes()
        if self.n_heads % self.n_kv_heads:
            raise ModelError(
                f"{self.n_heads} attention heads can't share {self.n_kv_heads} KV heads evenly"
            )
        if self.head_dim % 2:
            raise ModelError(
                f"head_dim={self.head_dim} must be even: rotary embedding rotates pairs"
            )
        keys = ROPE_KEYS.get(str(self.rope.get("rope_type", "")))
        if keys is None or any(self.rope.get(key) is None for key in ("rope_theta", *keys)):
            kinds = "; ".join(
                f"{kind}: {', '.join(('rope_theta', *keys))}" for kind, keys in ROPE_KEYS.items()
            )
            raise ModelError(
                f"rope={shorten_repr(dict(self.rope))} lacks a rope_type or one of its keys; the "
                f"types and their keys are {kinds}"
            )
        if bad_key := next(
            (
                key
                for key in ("rope_theta", *keys)
                if not is_number(self.rope[key]) or self.rope[key] <= 0
            ),
            None,
        ):
            raise ModelError(
                f"rope has {bad_key}={shorten_repr(self.rope[bad_key])}, must be a number above 0"
            )
        self._check_experts()

    def _check_sizes(self) -> None:
        for name, (lower, upper) in SIZE_RANGES.items():
            value = getattr(self, name)
            if type(value) is not int or not lower <= value <= upper:
                raise ModelError(
                    f"{name}={shorten_repr(value)} must be a whole number from {lower} to {upper}"
                )
        for name in ("norm_eps", "init_std"):
            value = getattr(self, name)
            if not is_number(value) or value < 0:
                raise ModelError(f"{name}={shorten_repr(value)} must be a number of at least 0")
        for name in ("qk_norm", "qkv_bias", "out_bias", "mlp_bias", "tied", "renormalise"):
            if not isinstance(getattr(self, name), bool):
                raise ModelError(
                    f"{name}={shorten_repr(getattr(self, name))} must be true or false"
                )
        if not isinstance(self.rope, Mapping):
            raise ModelError(
                f"rope={shorten_repr(self.rope)} must be a section with rope_type and rope_theta"
            )
        if not isinstance(self.family, str) or not (
            self.bos_id is None or type(self.bos_id) is int
        ):
            raise ModelError(
                f"family={shorten_repr(self.family)} must be a name, and "
                f"bos_id={shorten_repr(self.bos_id)} a "
                "number or null"
            )
        for name in ("eos_ids", "dense_layers"):
            value = getattr(self, name)
            if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
                raise ModelError(f"{name}={shorten_repr(value)} must be a list of whole numbers")

    def _check_experts(self) -> None:
        sparse = [name for name, family in FAMILIES.items() if family.moe]
        if bool(self.n_experts) != (self.family in sparse):
            raise ModelError(
                f"n_experts={self.n_experts} with family '{self.family}': {', '.join(sparse)} have "
                "experts, other families do not"
            )
        if self.n_experts and not 0 < self.experts_per_token <= self.n_experts:
            raise ModelError(
                f"experts_per_token={self.experts_per_token} must be 1 to "
                f"n_experts={self.n_experts}"
            )
        if self.n_experts and self.expert_intermediate_size < 1:
            raise ModelError(
                f"expert_intermediate_size={self.expert_intermediate_size} must be at least 1"
            )

    def is_sparse(self, layer: int) -> bool:
        """Return True if the layer has experts."""
        return self.n_experts > 0 and layer not in self.dense_layers

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Return the indices of the layers that have experts."""
        return tuple(layer for layer in range(self.n_layers) if self.is_sparse(layer))

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> DecoderConfig:
        """Return the shape that a `config.json` describes.

        Args:
            hf: content of `config.json`.
            generation: content of `generation_config.json`; its end-of-sequence ids take
                precedence.

        Raises ModelError if `unsupported_reason` returns a reason.
        """
        if reason := unsupported_reason(hf):
            raise ModelError(
                f"the built-in decoder can't represent this model: {reason}; load it with backend "
                "'transformers'"
            )
        family = FAMILIES[hf["model_type"]]
        n_heads = int(hf["num_attention_heads"])
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
            norm_eps=float(hf.get("rms_norm_eps", family.norm_eps)),
            init_std=float(hf.get("initializer_range", 0.02)),
            rope=_read_rope(hf, family),
            bos_id=None if (bos := hf.get("bos_token_id", family.bos_id)) is None else int(bos),
            eos_ids=read_ids((generation or {}).get("eos_token_id"))
            or read_ids(hf.get("eos_token_id", family.eos_id)),
            **_read_experts(hf, family),
            generation=generation or {},
        )

    def to_hf(self) -> dict[str, Any]:
        """Return the content of a `config.json` that transformers >= 5 reads.

        `rope_theta` is repeated at the top level for older readers. Raises ModelError if `family`
        can't represent these biases, norms and experts.
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
            "eos_token_id": _unwrap_single(self.eos_ids),
            **self._write_experts(),
        }

    def _write_experts(self) -> dict[str, Any]:
        moe = FAMILIES[self.family].moe
        if moe is None:
            return {}
        return {
            **dict.fromkeys(EXPERT_KEYS, self.n_experts),
            "num_experts_per_tok": self.experts_per_token,
            moe.size_key: self.expert_intermediate_size,
            "norm_topk_prob": self.renormalise,
            "mlp_only_layers": list(self.dense_layers),
            "decoder_sparse_step": 1,
        }

    def _check_family(self) -> None:
        if self.family not in FAMILIES:
            raise ModelError(f"family '{self.family}' is not one of {', '.join(FAMILIES)}")
        family = FAMILIES[self.family]
        qkv_bias = self.out_bias if family.qkv_bias is None else family.qkv_bias
        out_bias = self.out_bias and family.qkv_bias is None
        mlp_bias = self.mlp_bias and family.mlp_bias
        representable = {
            "qk_norm": family.qk_norm,
            "qkv_bias": qkv_bias,
            "out_bias": out_bias,
            "mlp_bias": mlp_bias,
        }
        moe = family.moe
        if moe and moe.renormalise is not None:
            representable["renormalise"] = moe.renormalise
        if moe and not moe.reads_dense_layers:
            representable |= {
                "dense_layers": (),
                "expert_intermediate_size": self.intermediate_size,
            }
        for name, value in representable.items():
            if getattr(self, name) != value:
                raise ModelError(
                    f"a '{self.family}' config.json can't say {name}={getattr(self, name)}, only "
                    f"{name}={value}"
                )


def unsupported_reason(hf: Mapping[str, Any]) -> str | None:
    """Return why the built-in decoder can't run the model of a `config.json`; None if it can.

    Raises ModelError if a key that is read holds a value of the wrong type.
    """
    model_type = str(hf.get("model_type"))
    if model_type not in FAMILIES:
        return f"model_type '{model_type:.80}' is not one of {', '.join(FAMILIES)}"
    check_types(hf)
    moe = FAMILIES[model_type].moe
    if missing := [
        key for key in (*REQUIRED, *([moe.size_key] if moe else [])) if hf.get(key) is None
    ]:
        return f"its config.json says nothing about {', '.join(missing)}"
    if hf.get("hidden_act", "silu") not in SILU:
        return f"hidden_act '{hf['hidden_act']}' is not silu"
    if hf.get("quantization_config") is not None:
        return "its weights are quantized (quantization_config)"
    if sliding := _explain_sliding_window(hf, FAMILIES[model_type]):
        return sliding
    if moe and (experts := _explain_experts(hf, moe)):
        return experts
    return explain_rope(hf)


def _explain_sliding_window(hf: Mapping[str, Any], family: ModelFamily) -> str | None:
    kinds = set(hf.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        return f"layer_types has {', '.join(sorted(kinds))}"
    if not family.gated_window:
        window = hf.get("sliding_window", family.sliding_window)
        if window is not None and window < hf.get("max_position_embeddings", family.max_positions):
            return f"sliding_window={window} is shorter than its context"
    elif (
        hf.get("use_sliding_window")
        and hf.get("sliding_window", 4096) is not None
        and not hf.get("layer_types")
    ):
        first_windowed = 0 if family.moe else hf.get("max_window_layers", 28)
        if first_windowed < hf["num_hidden_layers"]:
            return f"use_sliding_window limits the attention of layers {first_windowed} and up"
    return None


def _explain_experts(hf: Mapping[str, Any], moe: MoEFormat) -> str | None:
    counts = {hf[key] for key in EXPERT_KEYS if hf.get(key) is not None}
    if len(counts) > 1:
        return f"{' and '.join(EXPERT_KEYS)} disagree"
    n_experts = counts.pop() if counts else moe.n_experts
    per_token = hf.get("num_experts_per_tok", moe.experts_per_token)
    if not 0 < per_token <= n_experts:
        return f"num_experts_per_tok={per_token} of {n_experts} experts can't be chosen"
    if moe.reads_dense_layers and hf.get("decoder_sparse_step", 1) < 1:
        return f"decoder_sparse_step={hf['decoder_sparse_step']} is below 1"
    return None


def _read_experts(hf: Mapping[str, Any], family: ModelFamily) -> dict[str, Any]:
    moe = family.moe
    if moe is None:
        return {}
    dense = set(hf.get("mlp_only_layers") or ()) if moe.reads_dense_layers else set()
    step = int(hf.get("decoder_sparse_step", 1)) if moe.reads_dense_layers else 1
    counts = (hf[key] for key in EXPERT_KEYS if hf.get(key) is not None)
    return {
        "n_experts": int(next(counts, moe.n_experts)),
        "experts_per_token": int(hf.get("num_experts_per_tok", moe.experts_per_token)),
        "expert_intermediate_size": int(hf[moe.size_key]),
        "renormalise": bool(hf.get("norm_topk_prob", False))
        if moe.renormalise is None
        else moe.renormalise,
        "dense_layers": tuple(
            n for n in range(int(hf["num_hidden_layers"])) if n in dense or (n + 1) % step
        ),
    }


def explain_rope(hf: Mapping[str, Any]) -> str | None:
    """Return why the decoder has no such rotary embedding; None if it has."""
    rope = read_rope_section(hf)
    if any(isinstance(value, Mapping) for value in rope.values()):
        return "its rotary embedding differs between layers (nested rope_parameters)"
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KEYS:
        return f"rope_type '{kind}' is not one of {', '.join(ROPE_KEYS)}"
    if missing := [
        key for key in ROPE_KEYS[kind] if key != ORIGINAL_CONTEXT and rope.get(key) is None
    ]:
        return f"rope_type '{kind}' comes without {', '.join(missing)}"
    if rope.get("partial_rotary_factor", hf.get("partial_rotary_factor")) not in (None, 1, 1.0):
        return "its rotary embedding rotates only a part of each head (partial_rotary_factor)"
    return None


def _read_rope(hf: Mapping[str, Any], family: ModelFamily) -> dict[str, Any]:
    """Return `rope_parameters` in the form of transformers 5.

    The `config.json` may have that form, or the older keys `rope_theta` and `rope_scaling`.
    """
    rope = {key: value for key, value in read_rope_section(hf).items() if key != "type"}
    rope["rope_type"] = read_rope_section(hf).get(
        "rope_type", read_rope_section(hf).get("type", "default")
    )
    rope["rope_theta"] = float(rope.get("rope_theta") or hf.get("rope_theta") or family.rope_theta)
    if ORIGINAL_CONTEXT in ROPE_KEYS[rope["rope_type"]]:
        rope[ORIGINAL_CONTEXT] = read_original_context(hf, rope, family.max_positions)
    return rope


def read_ids(value: Any) -> tuple[int, ...]:
    """Return token ids as a tuple. Raises ModelError if `value` is neither an id nor a list."""
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(type(token_id) is int for token_id in ids):
        raise ModelError(
            f"eos_token_id={shorten_repr(value)} must be a number, or a list of numbers"
        )
    return ids


def _unwrap_single(ids: tuple[int, ...]) -> int | list[int] | None:
    if len(ids) < 2:
        return ids[0] if ids else None
    return list(ids)
