"""Check `generator.arguments`: arguments of vLLM's engine that are passed on as they are.

Arguments that Ratchet sets are refused by a table, which needs no vLLM. All others are checked by
vLLM's own command-line parser, in a process of its own (`python -m
ratchet.generators.vllm.arguments`): importing vLLM takes seconds and changes the process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Any, get_type_hints

from ratchet.errors import ConfigError
from ratchet.utils.terminal_text import shorten_text

CHECK_TIMEOUT_S = 300.0
SPECULATIVE_CONFIG = "speculative_config"
ROUTED_EXPERTS = "enable_return_routed_experts"
# The arguments that make vLLM draft tokens: a mapping of all settings, and short forms of three.
SPECULATION = (SPECULATIVE_CONFIG, "spec_method", "spec_model", "spec_tokens")

# The recipe key that sets an argument of vLLM.
KEYS: Mapping[str, str] = {
    "model": "model.path",
    "tokenizer": "tokenizer",
    "seed": "seed",
    "dtype": "generator.dtype",
    "max_num_seqs": "generator.max_running",
    "max_model_len": "generator.max_context",
    "kv_cache_memory_bytes": "generator.kv_cache_gib",
    "gpu_memory_utilization": "generator.kv_cache_gib",
    "num_gpu_blocks_override": "generator.kv_cache_gib",
    "block_size": "generator.block_size",
    "tensor_parallel_size": "generator.tensor_parallel",
    "pipeline_parallel_size": "generator.pipeline_parallel",
    "data_parallel_size": "generator.data_parallel",
    "enforce_eager": "generator.enforce_eager",
    "quantization": "generator.quantise",
    "enable_lora": "generator.lora_rank",
    "max_lora_rank": "generator.lora_rank",
    "max_loras": "generator.lora_others",
    "enable_mixed_moe_lora_format": "generator.lora_rank",
    "enable_sleep_mode": "cluster.colocated",
}
_WEIGHTS = "the learner's weights are pushed to vLLM, which loads no others"
_LOGPROBS = "training needs the sampler's own logprobs, under the temperature"
_REQUESTS = "each request has the recipe's sampling settings, and vLLM gets token ids"
_PROCESSES = "Ratchet starts, halts and ends vLLM's workers"
# The reason why no recipe may set an argument of vLLM.
REASONS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "allow_deprecated_quantization",
            "code_revision",
            "config_format",
            "convert",
            "download_dir",
            "hf_config_path",
            "hf_overrides",
            "hf_token",
            "ignore_patterns",
            "load_format",
            "max_parallel_loading_workers",
            "model_class_overrides",
            "model_loader_extra_config",
            "model_weights",
            "pt_load_map_location",
            "quantization_config",
            "revision",
            "runner",
            "tokenizer_revision",
            "weight_transfer_config",
        ),
        _WEIGHTS,
    ),
    **dict.fromkeys(
        (
            "diffusion_config",
            "enable_trace_replay",
            "logits_processors",
            "logprobs_mode",
            "max_logprobs",
            "return_sampling_mask",
            "watermark_config",
        ),
        _LOGPROBS,
    ),
    **dict.fromkeys(
        (
            "default_mm_loras",
            "enable_prompt_embeds",
            "generation_config",
            "override_generation_config",
            "served_model_name",
            "skip_tokenizer_init",
            "stream_interval",
            "tokenizer_mode",
            "tokens_only",
        ),
        _REQUESTS,
    ),
    **dict.fromkeys(
        (
            "data_parallel_address",
            "data_parallel_backend",
            "data_parallel_external_lb",
            "data_parallel_hybrid_lb",
            "data_parallel_multi_port_external_lb",
            "data_parallel_rank",
            "data_parallel_rpc_port",
            "data_parallel_size_local",
            "data_parallel_start_rank",
            "device_ids",
            "disable_log_stats",
            "distributed_executor_backend",
            "ec_transfer_config",
            "enable_cumem_allocator",
            "enable_elastic_ep",
            "enable_fault_tolerance",
            "fault_tolerance_config",
            "kv_transfer_config",
            "master_addr",
            "master_port",
            "nnodes",
            "node_rank",
            "scheduler_cls",
            "sleep_preserve_parameter_names",
            "use_tqdm_on_load",
            "worker_cls",
            "worker_extension_cls",
        ),
        _PROCESSES,
    ),
    "aux_output_config": "its one output that Ratchet reads has an argument of its own, "
    "enable_return_routed_experts",
}


def explain_refusal(arguments: Mapping[str, Any]) -> str | None:
    """Return the reason why `generator.arguments` may not have these arguments; None if it may.

    vLLM need not be installed. It may still refuse names and values that this check lets pass.
    """
    for name in arguments:
        if name in KEYS:
            return f"{name} is set by a key of the recipe. Set {KEYS[name]} instead."
        if name in REASONS:
            return f"{name} can't be set: {REASONS[name]}. Remove it."
    speculation = arguments.get(SPECULATIVE_CONFIG)
    if isinstance(speculation, Mapping) and (
        speculation.get("rejection_sample_method") == "synthetic"
        or any(name.startswith("synthetic_") for name in speculation)
    ):
        return (
            f"{SPECULATIVE_CONFIG}: synthetic acceptance keeps drafted tokens that the policy "
            "didn't draw. Remove it."
        )
    return _explain_missing_drafter(arguments)


def _explain_missing_drafter(arguments: Mapping[str, Any]) -> str | None:
    """Return why vLLM can't draft by layers for multi-token prediction (MTP), if it can't."""
    settings = arguments.get(SPECULATIVE_CONFIG)
    if not isinstance(settings, Mapping):
        settings = {}
    method = str(settings.get("method", arguments.get("spec_method")))
    if not method.endswith("mtp") or settings.get("model", arguments.get("spec_model")):
        return None
    return (
        f"{SPECULATIVE_CONFIG}: {method} drafts by layers for multi-token prediction, which vLLM "
        "doesn't get with the policy. Add model: the directory of a model whose files have them."
    )


def returns_routes(arguments: Mapping[str, Any]) -> bool:
    """True if vLLM returns the experts that computed each token."""
    return bool(arguments.get(ROUTED_EXPERTS))


def is_speculative(arguments: Mapping[str, Any]) -> bool:
    """True if vLLM drafts tokens (speculative decoding)."""
    return any(arguments.get(name) is not None for name in SPECULATION)


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check arguments with the installed vLLM; do nothing if vLLM is not installed.

    Raises ConfigError for a name or value that vLLM's parser refuses.
    """
    if not arguments or find_spec("vllm") is None:
        return
    try:
        process = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(dict(arguments)),
            capture_output=True,
            text=True,
            timeout=CHECK_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"generator.arguments can't be checked, because vLLM was not imported within "
            f"{CHECK_TIMEOUT_S:g} s: try again on a machine with less load"
        ) from error
    if process.returncode:
        raise ConfigError(
            "generator.arguments can't be checked, because vLLM can't be imported: "
            f"{process.stderr.strip()[-300:]}"
        )
    if reason := json.loads(process.stdout.splitlines()[-1]):
        raise ConfigError(reason)


def parse_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as values of vLLM's `EngineArgs`. This imports vLLM.

    Raises ConfigError for a name or value that vLLM's parser refuses.
    """
    if not arguments:
        return {}
    engine_args = import_module("vllm.engine.arg_utils").EngineArgs
    parser = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    engine_args.add_cli_args(parser)
    parser.error = _raise_refusal
    names = {field.name for field in fields(engine_args)}
    parsed: dict[str, Any] = {}
    for name, value in arguments.items():
        key = f"generator.arguments.{name}"
        if name not in names:
            raise ConfigError(f"{key} is not an argument of vLLM's engine{_suggest(name, names)}")
        if value is None:  # vLLM's default
            continue
        try:
            parsed[name] = getattr(parser.parse_args(_make_options(name, value)), name)
        except ValueError as error:
            raise ConfigError(f"{key}: vLLM refuses {value!r}: {_shorten(error)}") from None
    _check_speculation(parsed.get(SPECULATIVE_CONFIG))
    return parsed


def _suggest(word: str, known: Iterable[str]) -> str:
    matches = get_close_matches(word, known, n=1)
    return f": did you mean '{matches[0]}'?" if matches else ": `vllm serve --help=all` lists all"


def _shorten(error: ValueError) -> str:
    """Return the error's text on one line, without pydantic's link to its manual."""
    text = " ".join(str(error).split()).partition(" For further information")[0]
    return shorten_text(text, 400)


def _raise_refusal(message: str) -> None:
    """Raise ValueError, where argparse would end the process."""
    raise ValueError(message)


def _make_options(name: str, value: Any) -> list[str]:
    """Return vLLM's command-line options that set an argument."""
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return [option]
    if value is False:
        return [f"--no-{name.replace('_', '-')}"]
    if isinstance(value, Mapping):
        return [option, json.dumps(value)]
    if isinstance(value, list | tuple):
        return [option, *map(str, value)]
    return [f"{option}={value}"]


def _check_speculation(settings: Any) -> None:
    """Check the names and types of the settings of speculative decoding.

    The parser only reads their JSON. vLLM checks at its start that they fit together and fit the
    model.
    """
    if settings is None:
        return
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"generator.arguments.{SPECULATIVE_CONFIG}={settings!r} is not a mapping. Set it to "
            "{method: ngram, num_speculative_tokens: 4} or the like."
        )
    section = import_module("vllm.config.speculative").SpeculativeConfig
    validator = import_module("pydantic").TypeAdapter
    types = get_type_hints(section, include_extras=True)
    names = {field.name for field in fields(section)}
    for name, value in settings.items():
        key = f"generator.arguments.{SPECULATIVE_CONFIG}.{name}"
        if name not in names:
            raise ConfigError(f"{key} is unknown to vLLM{_suggest(name, names)}")
        try:
            validator(types[name]).validate_python(value)
        except ValueError as error:
            raise ConfigError(f"{key}: vLLM refuses {value!r}: {_shorten(error)}") from None


def _main() -> None:
    """Read arguments as JSON from the input, and print the reason why vLLM refuses them, or ""."""
    try:
        parse_arguments(json.load(sys.stdin))
    except ConfigError as error:
        reason = str(error)
    else:
        reason = ""
    sys.stdout.write(f"\n{json.dumps(reason)}\n")


if __name__ == "__main__":
    _main()
