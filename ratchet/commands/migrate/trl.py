"""The key tables of TRL, for GRPOConfig, DPOConfig, SFTConfig, RewardConfig, KTOConfig and
RLOOConfig, or the file of `trl grpo --config`.

Keys and defaults are those of TRL 1.16 and of transformers' TrainingArguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.commands.migrate import shared
from ratchet.commands.migrate import trl_values as to
from ratchet.commands.migrate.other_tasks import explain_unsupported_trl_task
from ratchet.commands.migrate.table import (
    KeyRow,
    Method,
    Peer,
    at_least_0,
    choose,
    dropped,
    flag,
    no_effect,
    number,
    only_if,
    only_value,
    real,
    rows_covered_by,
    whole,
)
from ratchet.commands.migrate.training_arguments import TRAINING

BATCH_NOTE = (
    "Ratchet's batch_size counts prompts; TRL's counts answers of one process. Multiply batch_size "
    "by the number of processes. minibatches is the number of optimizer steps per batch"
)
GENERATION_BATCH_NOTE = (
    "TRL's value is over all processes, but the conversion assumes one process: divide "
    "generation_batch_size by the number of processes and import again"
)
ROWS_NOTE = (
    "TRL's batch size counts rows of one process: multiply batch_size by the number of processes"
)


# --- methods that sample attempts: GRPO, RLOO


ROLLOUT_ROWS = (
    KeyRow("loss_type", "algorithm.kind, algorithm.weighting", convert=to.loss, default="dapo"),
    KeyRow("num_generations", "algorithm.group_size", convert=whole, default=8),
    KeyRow(
        "per_device_train_batch_size", "batch_size", BATCH_NOTE, to.prompts_per_batch, default=8
    ),
    KeyRow(
        "gradient_accumulation_steps", "batch_size", BATCH_NOTE, to.prompts_per_batch, default=1
    ),
    KeyRow(
        "generation_batch_size",
        "algorithm.minibatches, algorithm.minibatches_of",
        GENERATION_BATCH_NOTE,
        to.set_minibatches,
    ),
    KeyRow(
        "steps_per_generation",
        "algorithm.minibatches, algorithm.minibatches_of",
        BATCH_NOTE,
        to.set_minibatches,
    ),
    KeyRow("num_iterations", "algorithm.epochs", convert=whole, default=1),
    KeyRow(
        "max_steps",
        "steps",
        "it counts batches here and optimizer steps there; one batch has minibatches x epochs "
        "optimizer steps",
        to.convert_max_steps,
    ),
    KeyRow("num_train_epochs", "passes", convert=to.convert_epochs, default=3.0),
    KeyRow("max_completion_length", "sampling.max_new_tokens", convert=whole, default=512),
    KeyRow("temperature", "sampling.temperature", convert=number, default=1.0),
    KeyRow("top_p", "sampling.top_p", convert=number),
    KeyRow("top_k", "sampling.top_k", convert=at_least_0),
    KeyRow("min_p", "sampling.min_p", convert=number),
    KeyRow("beta", "algorithm.kl.coef, algorithm.kl.objective", convert=to.kl, default=0.0),
    KeyRow("scale_rewards", "algorithm.advantage.scale", convert=to.reward_scale, default="group"),
    KeyRow(
        "delta",
        note="delta bounds the ratio for every sign of the advantage; algorithm.loss.dual_clip "
        "does so only for negative advantages: set it if that is enough",
    ),
    KeyRow(
        "mask_truncated_completions",
        "algorithm.truncated",
        convert=choose({True: "drop", False: "keep"}),
    ),
    KeyRow("entropy_coef", "algorithm.entropy_coef", convert=number),
    KeyRow("reward_funcs", "rewards", convert=to.rewards),
    KeyRow("use_vllm", "generator.kind, cluster.colocated", convert=to.vllm),
    KeyRow(
        "vllm_tensor_parallel_size",
        "generator.tensor_parallel",
        convert=only_if(lambda config: config.flag("use_vllm"), whole, "use_vllm is false there"),
    ),
    KeyRow(
        "vllm_max_model_length",
        "generator.max_context",
        convert=only_if(lambda config: config.flag("use_vllm"), whole, "use_vllm is false there"),
    ),
    KeyRow(
        "vllm_importance_sampling_correction",
        "algorithm.correction",
        convert=to.correction,
        default=True,
    ),
    KeyRow("max_tool_calling_iterations", "rollouts.max_turns", convert=whole),
    KeyRow("dataset_name", "environment", shared.COLUMNS, shared.training_data),
    KeyRow(
        "off_policy_mask_threshold",
        note="set algorithm.correction.mask=geometric, which masks by the mean ratio of an answer",
    ),
    KeyRow(
        "multi_objective_aggregation",
        "algorithm.advantage.kind",
        convert=choose({"normalize_then_sum": "gdpo", "sum_then_normalize": "group_relative"}),
    ),
    KeyRow("use_bias_correction_kl", covered_by="beta", default=True),
    KeyRow(
        "vllm_importance_sampling_mode",
        covered_by="vllm_importance_sampling_correction",
        default="sequence_mask",
    ),
    KeyRow(
        "vllm_importance_sampling_clip_max",
        covered_by="vllm_importance_sampling_correction",
        default=3.0,
    ),
    *rows_covered_by("vllm_importance_sampling_correction", "vllm_importance_sampling_*"),
    KeyRow("vllm_mode", covered_by="use_vllm", default="colocate"),
    KeyRow("epsilon", covered_by="loss_type", default=0.2),
    KeyRow("sapo_temperature_pos", covered_by="loss_type", default=1.0),
    KeyRow("sapo_temperature_neg", covered_by="loss_type", default=1.05),
    KeyRow("reward_weights", covered_by="reward_funcs"),
    *dropped(
        "set a reward model with rewards: [{kind: reward_model, path: ...}]",
        "reward_model_name_or_path",
    ),
    *rows_covered_by("loss_type", "epsilon_high", "importance_sampling_level"),
    *dropped(
        "VESPO has no counterpart: algorithm.loss can be ppo, gspo, cispo, sapo, gmpo, topr or "
        "kimi",
        "vespo_*",
    ),
    *no_effect(shared.KV_CACHE, "vllm_gpu_memory_utilization"),
    *dropped(
        "the run starts vLLM itself; cluster.colocated lets it share the learner's accelerators",
        "vllm_server_*",
        "vllm_group_port",
        "vllm_enable_sleep_mode",
        "vllm_model_impl",
    ),
    *dropped(
        "the only sampling parameters are temperature, top_p, top_k and min_p",
        "repetition_penalty",
        "generation_kwargs",
    ),
    *dropped(
        "set sampling.structured={regex: TEXT} and generator.kind=engine",
        "vllm_structured_outputs_regex",
    ),
    *dropped(
        "generator.kind=engine has continuous batching and a paged KV cache",
        "cache_implementation",
        "use_transformers_*",
        "transformers_continuous_batching_config",
    ),
    *dropped(
        "the entropy coefficient is fixed, and all tokens train",
        "use_adaptive_entropy",
        "entropy_coef_*",
        "entropy_target",
        "top_entropy_quantile",
    ),
    *dropped(
        "prompts are never truncated here: a prompt that is too long is an error that names it",
        "max_prompt_length",
    ),
    *TRAINING,
)

# Rows of all methods that train on a dataset without sampling.
OFFLINE_ROWS = (
    KeyRow(
        "per_device_train_batch_size", "batch_size", ROWS_NOTE, to.convert_batch_size, default=8
    ),
    KeyRow(
        "gradient_accumulation_steps", "batch_size", ROWS_NOTE, to.convert_batch_size, default=1
    ),
    KeyRow("max_steps", "steps", convert=to.convert_max_steps),
    KeyRow("num_train_epochs", "passes", convert=to.convert_epochs, default=3.0),
    *dropped(
        "rows are never truncated: a row that exceeds the model's context is an error that names "
        "it",
        "max_length",
        "max_prompt_length",
        "max_completion_length",
        "truncation_mode",
    ),
    *dropped("the reference scores each batch when it is drawn", "precompute_ref_*"),
    *TRAINING,
)


PREFERENCES = (
    KeyRow("loss_type", "algorithm.kind", convert=to.preference, default=["sigmoid"]),
    KeyRow("beta", covered_by="loss_type", default=0.1),
    KeyRow("label_smoothing", covered_by="loss_type"),
    KeyRow("loss_weights", covered_by="loss_type"),
    KeyRow("learning_rate", "optimizer.lr", convert=number, default=1e-6),
    KeyRow("dataset_name", "environment", shared.PAIR_COLUMNS, shared.training_data),
    *dropped(
        "DPO's divergence is the reverse KL here",
        "f_divergence_type",
        "f_alpha_divergence_coef",
        "discopop_tau",
    ),
    *dropped("DPO's loss has no length or probability weighting here", "ld_alpha", "use_weighting"),
    *OFFLINE_ROWS,
)

SUPERVISED = (
    KeyRow("learning_rate", "optimizer.lr", convert=number, default=2e-5),
    KeyRow("dataset_name", "environment", shared.COLUMNS, shared.training_data),
    KeyRow(
        "assistant_only_loss",
        "algorithm.train",
        "all assistant messages train here; algorithm.train=text trains the whole text",
        choose({True: "all"}),
    ),
    KeyRow(
        "completion_only_loss",
        "algorithm.train",
        "last trains the last assistant message, text the whole text",
        choose({True: "last", False: "text"}),
    ),
    KeyRow("loss_type", convert=only_value("nll", "the loss is the negative log-likelihood")),
    *OFFLINE_ROWS,
)

REWARD_MODEL = (
    KeyRow("learning_rate", "optimizer.lr", convert=number, default=1e-4),
    KeyRow("dataset_name", "environment", shared.PAIR_COLUMNS, shared.training_data),
    KeyRow("center_rewards_coefficient", note="scores are not regularised towards 0"),
    *OFFLINE_ROWS,
)

LABELLED_COLUMNS_NOTE = "the columns are prompt, completion and label here"
KTO = (
    KeyRow("learning_rate", "optimizer.lr", convert=number, default=1e-6),
    KeyRow("beta", "algorithm.beta", convert=real, default=0.1),
    KeyRow("desirable_weight", "algorithm.desirable", convert=number),
    KeyRow("undesirable_weight", "algorithm.undesirable", convert=number),
    KeyRow("dataset_name", "environment", LABELLED_COLUMNS_NOTE, shared.training_data),
    KeyRow("loss_type", convert=only_value("kto", "the loss is that of KTO")),
    *OFFLINE_ROWS,
)

# Keys of GRPO that RLOO lacks or converts differently.
NOT_SHARED_WITH_RLOO = (
    *("loss_type", "num_generations", "beta", "epsilon", "epsilon_high", "scale_rewards"),
)
RLOO = (
    KeyRow("num_generations", "algorithm.group_size", convert=whole, default=2),
    KeyRow(
        "beta",
        "algorithm.kl",
        "the KL penalty is in the reward of each token here, of the whole answer there",
        to.kl_in_reward,
        default=0.05,
    ),
    KeyRow("epsilon", "algorithm.loss.clip_low", convert=number, default=0.2),
    KeyRow("epsilon_high", "algorithm.loss.clip_high", convert=number),
    KeyRow("normalize_advantages", "algorithm.whiten", convert=flag),
    KeyRow(
        "reward_clip_range",
        "algorithm.shaping",
        convert=to.reward_clip,
    ),
    *(
        row
        for row in ROLLOUT_ROWS
        if row.peer_key not in NOT_SHARED_WITH_RLOO and row.covered_by != "loss_type"
    ),
)

# Keys by which `_detect_method` recognises the configuration class.
GRPO_KEYS = frozenset(
    {
        "num_generations",
        "max_completion_length",
        "reward_funcs",
        "num_iterations",
        "scale_rewards",
        "use_vllm",
        "steps_per_generation",
    }
)
DPO_KEYS = frozenset(
    {
        "beta",
        "precompute_ref_log_probs",
        "label_smoothing",
        "loss_weights",
        "ld_alpha",
        "f_divergence_type",
        "truncation_mode",
    }
)
SFT_KEYS = frozenset(
    {"packing", "completion_only_loss", "assistant_only_loss", "dataset_text_field", "eval_packing"}
)


def _detect_method(values: Mapping[str, Any]) -> str:
    """Return the name of the configuration class, detected from the keys; "" if it is unclear."""
    keys = set(values)
    if keys & {"normalize_advantages", "reward_clip_range"}:
        return "RLOOConfig"
    if keys & {"desirable_weight", "undesirable_weight"} or values.get("loss_type") == "kto":
        return "KTOConfig"
    if "center_rewards_coefficient" in keys:
        return "RewardConfig"
    if keys & GRPO_KEYS:
        return "GRPOConfig"
    if keys & SFT_KEYS:
        return "SFTConfig"
    return (
        "DPOConfig"
        if keys & DPO_KEYS
        else "SFTConfig"
        if "learning_rate" in keys or "max_length" in keys
        else ""
    )


DATASET = {"environment.kind": "dataset"}
JUDGED_DATASET = {**DATASET, "rewards": [{"kind": "math"}]}
LEARNING_RATE = KeyRow("learning_rate", "optimizer.lr", convert=number, default=1e-6)
TRL = Peer(
    name="trl",
    title="TRL",
    version="1.16",
    marks=(
        "per_device_train_batch_size",
        "model_name_or_path",
        "num_generations",
        "use_peft",
        "output_dir",
        "bf16",
        "learning_rate",
    ),
    detect_method=_detect_method,
    methods={
        "GRPOConfig": Method(
            {"algorithm.kind": "grpo", **JUDGED_DATASET}, (LEARNING_RATE, *ROLLOUT_ROWS)
        ),
        "DPOConfig": Method({"algorithm.kind": "dpo", **DATASET}, PREFERENCES),
        "SFTConfig": Method({"algorithm.kind": "sft", **DATASET}, SUPERVISED),
        "RewardConfig": Method({"algorithm.kind": "reward_model", **DATASET}, REWARD_MODEL),
        "KTOConfig": Method({"algorithm.kind": "kto", **DATASET}, KTO),
        "RLOOConfig": Method({"algorithm.kind": "rloo", **JUDGED_DATASET}, (LEARNING_RATE, *RLOO)),
    },
    explain_unsupported_task=explain_unsupported_trl_task,
    dialect="yaml",
)
