"""The rows of the keys of NeMo RL's training and sampling engines that have no counterpart.

The value of a key decides whether the missing counterpart matters: a switch that is off, or a
section that is not enabled, changes no result. "there" in a note means NeMo RL; "here" means
Ratchet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ratchet.commands.migrate import shared
from ratchet.commands.migrate.nemo_rl.placement import (
    DTENSOR,
    GENERATION,
    MEGATRON,
    when_megatron,
)
from ratchet.commands.migrate.table import (
    Conversion,
    Dropped,
    Inert,
    KeyRow,
    PeerConfig,
    choose_inert,
    is_off,
    no_effect,
    only_if,
    only_value,
    switches,
)

SPEED = "it changes speed and memory there, not results"
POLICY_LEARNER = "it runs on the policy's learner here, with its settings"
SWITCH = "this is a switch of the engine there, which learners lack"
# Patterns below a section of Megatron or DTensor, of keys that change speed and memory alone.
SPEED_KEYS = (
    *("*fusion*", "*offload*", "*cuda_graph*", "*overlap*", "*deepep*", "*hybridep*", "*gloo*"),
    *("*dispatcher*", "*logging*", "checkpoint.*", "env_vars.*", "empty_unused_memory_level"),
    *("force_reconvert_from_hf", "converter_type", "*fused_*", "recompute_*", "_v2"),
    *("clear_cache_every_n_steps", "automodel_kwargs.use_*", "automodel_kwargs.backend.*"),
    *("automodel_kwargs.force_hf", "automodel_kwargs.attn_implementation", "attention_backend"),
    *(
        "distributed_data_parallel_config.*",
        "*grouped_gemm",
        "num_layers_in_*",
        "moe_parallelizer*",
    ),
    *("dp_replicate_size", "expert_tensor_parallel_size", "defer_fp32_logits"),
)
DTYPE_KEYS = ("*dtype", "optimizer.bf16", "optimizer.use_*", "*dtype.*")
VLLM_SPEED_KEYS = (
    *(
        "enforce_eager",
        "async_engine",
        "use_deep_gemm",
        "*metrics_logger*",
        "use_tqdm",
        "env_vars.*",
    ),
    *("enable_prefix_caching", "reset_*", "logprobs_mode", "expose_http_server"),
    *("enable_expert_parallel", "load_format"),
)


def _when_bfloat16(value: Any, config: PeerConfig) -> Any:
    if value in ("bfloat16", "float32", "auto"):
        return Inert("products are in bfloat16 and weights in float32 here")
    return Dropped(shared.PRECISION)


def _when_fp8(value: Any, config: PeerConfig) -> Any:
    if config[f"{MEGATRON}.fp8_cfg.enabled"] is True:
        return Dropped("learner.fp8 has this setting: set it by hand")
    return Inert("fp8_cfg is off there")


def _when_draft(value: Any, config: PeerConfig) -> Any:
    if config["policy.draft.enabled"] is True:
        return Dropped("drafts of speculative decoding do not train here")
    return Inert("draft is off there")


def _with_vllm(convert: Conversion | None = None) -> Conversion:
    return only_if(
        lambda config: config[f"{GENERATION}.backend"] in (None, "vllm"),
        convert,
        "the backend there is not vllm",
    )


def _convert_if_backend(name: str) -> Conversion:
    """Return a conversion of keys that only count with one backend of generation."""

    def convert(value: Any, config: PeerConfig) -> Any:
        if config[f"{GENERATION}.backend"] == name:
            return Dropped("other keys of generator set this, or there is no switch")
        return Inert(f"the backend there is not {name}")

    return convert


def _drop_in(megatron: bool, reason: str) -> Conversion:
    """Return a conversion of keys without counterpart that only count with one learner."""

    def convert(value: Any, config: PeerConfig) -> Any:
        return Inert("it is off there") if is_off(value) else Dropped(reason)

    return when_megatron(megatron, convert)


def _min_lr(value: Any, config: PeerConfig) -> Any:
    if config[f"{MEGATRON}.scheduler.lr_decay_style"] in (None, "constant"):
        return Inert("a constant learning rate has no end there")
    return Dropped("optimizer.min_lr_ratio is this rate over optimizer.lr: set it by hand")


def context(value: Any, config: PeerConfig) -> Any:
    """Return why the maximum length of a sequence is not converted."""
    if config[f"{GENERATION}.backend"] == "vllm":
        return Inert("the generator's max_context is the limit of prompt and answer")
    return Dropped("the limits are the model's context and sampling.max_new_tokens")


def _decay(value: Any, config: PeerConfig) -> Any:
    if value == config[f"{MEGATRON}.optimizer.weight_decay"]:
        return Inert("it is the weight decay, which stays the same")
    return Dropped("weight decay is constant here")


def _when_enabled(switch: str) -> Conversion:
    """Return a conversion of the keys of a section that `switch` turns on."""

    def convert(value: Any, config: PeerConfig) -> Any:
        if is_off(value) or config[switch] is not True:
            return Inert("it is off there")
        return Dropped(POLICY_LEARNER)

    return convert


def section_rows(section: str) -> Iterator[KeyRow]:
    """Yield the rows of a learner's settings without a counterpart, which mostly change speed.

    section: the section of the learner's model: `policy`, `value` or `teacher`.
    """
    for engine in ("megatron_cfg", "dtensor_cfg"):
        yield from no_effect(SPEED, *(f"{section}.{engine}.{key}" for key in SPEED_KEYS))
        yield from no_effect(
            "weights and the optimizer's state are in float32 here",
            *(f"{section}.{engine}.{key}" for key in DTYPE_KEYS),
        )
        if section != "policy":  # the policy's sections have rows of their own
            for part in ("", "lora_cfg.", "peft.", "fp8_cfg."):
                yield KeyRow(
                    f"{section}.{engine}.{part}*",
                    note=POLICY_LEARNER,
                    convert=_when_enabled(f"{section}.{engine}.{part}enabled"),
                )
    yield from no_effect(
        SPEED,
        f"{section}.offload_optimizer_for_logprob",
        f"{section}.refit_*",
        f"{section}.optimizer.kwargs.*",
    )


ENGINE = (
    *section_rows("policy"),
    KeyRow("policy.precision", note=shared.PRECISION, convert=_when_bfloat16),
    *(
        KeyRow(
            f"{MEGATRON}.optimizer.{name}",
            note="the optimizer is adam here",
            convert=only_value(value, "it is adam, as here"),
        )
        for name, value in (("optimizer", "adam"),)
    ),
    *no_effect("it counts only with optimizer: sgd there", f"{MEGATRON}.optimizer.sgd_momentum"),
    *no_effect("it repeats policy.max_grad_norm, which counts", f"{MEGATRON}.optimizer.clip_grad"),
    KeyRow(f"{MEGATRON}.optimizer.min_lr", note=SWITCH, convert=when_megatron(True, _min_lr)),
    *(
        KeyRow(f"{MEGATRON}.scheduler.{name}", note=SWITCH, convert=when_megatron(True, _decay))
        for name in ("start_weight_decay", "end_weight_decay")
    ),
    *no_effect(
        "it has no effect with constant weight decay", f"{MEGATRON}.scheduler.weight_decay_*"
    ),
    *no_effect("schedules end with the last step here", f"{MEGATRON}.scheduler.lr_decay_iters"),
    *no_effect("the warm-up rises from 0 here", f"{MEGATRON}.scheduler.lr_warmup_init"),
    *(
        KeyRow(
            f"{MEGATRON}.{name}",
            note=f"it counts for models with experts: {reason}",
            convert=_drop_in(True, f"it counts for models with experts: {reason}"),
        )
        for name, reason in (
            ("freeze_moe_router", "their router trains here"),
            ("moe_router_*", "their router has no such key here"),
        )
    ),
    KeyRow(
        f"{MEGATRON}.moe_router_dtype",
        note="the router computes in float32 here",
        inert=True,
    ),
    KeyRow(
        f"{MEGATRON}.fp8_cfg.*",
        note="learner.fp8 sets this here",
        convert=when_megatron(True, _when_fp8),
    ),
    KeyRow("policy.draft.*", note="drafts do not train here", convert=_when_draft),
    KeyRow(f"{MEGATRON}.*", note=SWITCH, convert=_drop_in(True, SWITCH)),
    KeyRow(f"{DTENSOR}.*", note=SWITCH, convert=_drop_in(False, SWITCH)),
    *switches(shared.NUMERICS, "policy.*"),
)
GENERATOR = (
    *(
        KeyRow(f"{GENERATION}.{name}", note=shared.PRECISION, convert=_with_vllm(_when_bfloat16))
        for name in ("vllm_cfg.precision", "vllm_cfg.kv_cache_dtype")
    ),
    *no_effect(SPEED, *(f"{GENERATION}.vllm_cfg.{key}" for key in VLLM_SPEED_KEYS)),
    *no_effect(SPEED, f"{GENERATION}.refit_*", f"{GENERATION}.port_range_*"),
    *(
        KeyRow(
            f"{GENERATION}.{section}.*",
            note="other keys of generator set this",
            convert=_convert_if_backend(name),
        )
        for section, name in (
            ("mcore_generation_config", "megatron"),
            ("sglang_cfg", "sglang"),
            ("trtllm_cfg", "trtllm"),
            ("dynamo_cfg", "dynamo"),
            ("vllm_kwargs", "vllm"),
        )
    ),
    KeyRow(
        f"{GENERATION}.val_top_p",
        note="evaluation draws from the whole distribution",
        convert=choose_inert(1.0, "evaluation draws from the whole distribution"),
    ),
    *no_effect(
        "it counts only with quant_cfg there", f"{GENERATION}.real_quant_export_cpu_offload"
    ),
    *switches("other keys of generator set this, or there is no switch", f"{GENERATION}.*"),
)
