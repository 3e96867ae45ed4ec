"""The tables of TRL, for GRPOConfig, DPOConfig, SFTConfig, RewardConfig, KTOConfig and RLOOConfig,
or the file of `trl grpo --config`.

Keys and defaults are those of TRL 1.16 and of transformers' TrainingArguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.commands.migrate import shared
from ratchet.commands.migrate import trl_values as to
from ratchet.commands.migrate.table import (
    KeyRow,
    Method,
    Peer,
    alone,
    at_least_0,
    choose,
    flag,
    idle,
    nothing,
    number,
    real,
    when,
    whole,
    within,
)
from ratchet.commands.migrate.training_arguments import TRAINING

COUNTED = (
    "a batch is counted in prompts here, in answers of one process there: multiply batch_size by "
    "the processes that you launch;"
    " minibatches is how many optimizer steps a batch is split into"
)
OVER_ALL = (
    "counted over all processes there, and read here as if there were one: divide it by "
    "them and import again"
)
ROWS_COUNTED = "counted for one process there: multiply batch_size by the processes that you launch"


# --- methods that sample attempts: GRPO, RLOO


ATTEMPTS = (
    KeyRow("loss_type", "algorithm.kind, algorithm.weighting", how=to.loss, default="dapo"),
    KeyRow("num_generations", "algorithm.group_size", how=whole, default=8),
    KeyRow("per_device_train_batch_size", "batch_size", COUNTED, to.prompts, default=8),
    KeyRow("gradient_accumulation_steps", "batch_size", COUNTED, to.prompts, default=1),
    KeyRow(
        "generation_batch_size",
        "algorithm.minibatches, algorithm.minibatches_of",
        OVER_ALL,
        to.divided,
    ),
    KeyRow(
        "steps_per_generation",
        "algorithm.minibatches, algorithm.minibatches_of",
        COUNTED,
        to.divided,
    ),
    KeyRow("num_iterations", "algorithm.epochs", how=whole, default=1),
    KeyRow(
        "max_steps",
        "steps",
        "steps are batches here and optimizer steps there: theirs over minibatches x epochs",
        to.batches,
    ),
    KeyRow("num_train_epochs", note=shared.EPOCHS, how=to.epochs),
    KeyRow("max_completion_length", "sampling.max_new_tokens", how=whole, default=512),
    KeyRow("temperature", "sampling.temperature", how=number, default=1.0),
    KeyRow("top_p", "sampling.top_p", how=number),
    KeyRow("top_k", "sampling.top_k", how=at_least_0),
    KeyRow("min_p", "sampling.min_p", how=number),
    KeyRow("beta", "algorithm.kl.coef, algorithm.kl.objective", how=to.kl, default=0.0),
    KeyRow("scale_rewards", "algorithm.advantage.scale", how=to.reward_scale, default="group"),
    KeyRow(
        "delta",
        note="algorithm.loss.dual_clip bounds negative advantages alone, at any sign "
        "theirs: set it if that will do",
    ),
    KeyRow(
        "mask_truncated_completions",
        "algorithm.truncated",
        how=choose({True: "drop", False: "keep"}),
    ),
    KeyRow("entropy_coef", "algorithm.entropy_coef", how=number),
    KeyRow("reward_funcs", "rewards", how=to.rewards),
    KeyRow("use_vllm", "generator.kind, cluster.colocated", how=to.vllm),
    KeyRow(
        "vllm_tensor_parallel_size",
        "generator.tensor_parallel",
        how=when(lambda config: config.flag("use_vllm"), whole, "use_vllm is false there"),
    ),
    KeyRow(
        "vllm_max_model_length",
        "generator.max_context",
        how=when(lambda config: config.flag("use_vllm"), whole, "use_vllm is false there"),
    ),
    KeyRow(
        "vllm_importance_sampling_correction",
        "algorithm.correction",
        how=to.correction,
        default=True,
    ),
    KeyRow("max_tool_calling_iterations", "rollouts.max_turns", how=whole),
    KeyRow("dataset_name", "environment", shared.ROWS, shared.rows),
    KeyRow(
        "off_policy_mask_threshold",
        note="set algorithm.correction.mask: geometric, which masks by the mean ratio of an answer",
    ),
    KeyRow(
        "multi_objective_aggregation",
        "algorithm.advantage.kind",
        how=choose({"normalize_then_sum": "gdpo", "sum_then_normalize": "group_relative"}),
    ),
    KeyRow("use_bias_correction_kl", within="beta", default=True),
    KeyRow(
        "vllm_importance_sampling_mode",
        within="vllm_importance_sampling_correction",
        default="sequence_mask",
    ),
    KeyRow(
        "vllm_importance_sampling_clip_max",
        within="vllm_importance_sampling_correction",
        default=3.0,
    ),
    *within("vllm_importance_sampling_correction", "vllm_importance_sampling_*"),
    KeyRow("vllm_mode", within="use_vllm", default="colocate"),
    KeyRow("epsilon", within="loss_type", default=0.2),
    KeyRow("sapo_temperature_pos", within="loss_type", default=1.0),
    KeyRow("sapo_temperature_neg", within="loss_type", default=1.05),
    KeyRow("reward_weights", within="reward_funcs"),
    *nothing(
        "path of a model with a scalar head goes into rewards: [{kind: reward_model, path: ...}]",
        "reward_model_name_or_path",
    ),
    *within("loss_type", "epsilon_high", "importance_sampling_level"),
    *nothing("algorithm.loss has ppo, gspo, cispo, sapo, gmpo, topr and kimi", "vespo_*"),
    *idle(shared.CACHE, "vllm_gpu_memory_utilization"),
    *nothing(
        "cluster.colocated says whether vLLM shares the accelerator, and vLLM is started by the "
        "run itself",
        "vllm_server_*",
        "vllm_group_port",
        "vllm_enable_sleep_mode",
        "vllm_model_impl",
    ),
    *nothing(
        "samples are drawn from the model's whole distribution, shaped by temperature alone",
        "repetition_penalty",
        "generation_kwargs",
        "vllm_structured_outputs_regex",
    ),
    *nothing(
        "generator.kind=engine batches continuously and pages its cache",
        "cache_implementation",
        "use_transformers_*",
        "transformers_continuous_batching_config",
    ),
    *nothing(
        "the coefficient of entropy is fixed, and all tokens train",
        "use_adaptive_entropy",
        "entropy_coef_*",
        "entropy_target",
        "top_entropy_quantile",
    ),
    *nothing(
        "a prompt is never cut here: rows that leave no room fail by name", "max_prompt_length"
    ),
    *TRAINING,
)

# Rows of all methods that train on given text.
GIVEN = (
    KeyRow("per_device_train_batch_size", "batch_size", ROWS_COUNTED, to.rows, default=8),
    KeyRow("gradient_accumulation_steps", "batch_size", ROWS_COUNTED, to.rows, default=1),
    KeyRow("max_steps", "steps", how=to.batches),
    KeyRow("num_train_epochs", note=shared.EPOCHS, how=to.epochs),
    *nothing(
        "rows are never cut: the model's context is the bound, and a longer row is an error that "
        "names it",
        "max_length",
        "max_prompt_length",
        "max_completion_length",
        "truncation_mode",
    ),
    *nothing("the reference is scored as the batch comes", "precompute_ref_*"),
    *TRAINING,
)


PREFERENCES = (
    KeyRow("loss_type", "algorithm.kind", how=to.preference, default=["sigmoid"]),
    KeyRow("beta", within="loss_type", default=0.1),
    KeyRow("label_smoothing", within="loss_type"),
    KeyRow("loss_weights", within="loss_type"),
    KeyRow("learning_rate", "optimizer.lr", how=number, default=1e-6),
    KeyRow("dataset_name", "environment", shared.PAIRS, shared.rows),
    *nothing(
        "the divergence of DPO is the reverse KL here",
        "f_divergence_type",
        "f_alpha_divergence_coef",
        "ld_alpha",
        "use_weighting",
        "discopop_tau",
    ),
    *GIVEN,
)

SUPERVISED = (
    KeyRow("learning_rate", "optimizer.lr", how=number, default=2e-5),
    KeyRow("dataset_name", "environment", shared.ROWS, shared.rows),
    KeyRow(
        "assistant_only_loss",
        "algorithm.train",
        "only assistant messages ever train here: all of them, or the last",
        choose({True: "all"}),
    ),
    KeyRow(
        "completion_only_loss",
        "algorithm.train",
        "only assistant messages ever train here: all of them, or the last",
        choose({True: "last"}),
    ),
    KeyRow("loss_type", how=alone("nll", "the loss is the likelihood of the given tokens")),
    *GIVEN,
)

REWARD_MODEL = (
    KeyRow("learning_rate", "optimizer.lr", how=number, default=1e-4),
    KeyRow("dataset_name", "environment", shared.PAIRS, shared.rows),
    KeyRow("center_rewards_coefficient", note="scores are not pulled towards 0"),
    *GIVEN,
)

LABELLED = "labelled answers are read by their columns prompt, completion and label here"
KTO = (
    KeyRow("learning_rate", "optimizer.lr", how=number, default=1e-6),
    KeyRow("beta", "algorithm.beta", how=real, default=0.1),
    KeyRow("desirable_weight", "algorithm.desirable", how=number),
    KeyRow("undesirable_weight", "algorithm.undesirable", how=number),
    KeyRow("dataset_name", "environment", LABELLED, shared.rows),
    KeyRow("loss_type", how=alone("kto", "the loss is KTO's own")),
    *GIVEN,
)

# Keys of GRPO that RLOO lacks or converts in another way.
OTHERWISE = ("loss_type", "num_generations", "beta", "epsilon", "epsilon_high", "scale_rewards")
RLOO = (
    KeyRow("num_generations", "algorithm.group_size", how=whole, default=2),
    KeyRow(
        "beta",
        "algorithm.kl",
        "a penalty in the reward of each token, as there of the whole answer",
        to.kl_in_reward,
        default=0.05,
    ),
    KeyRow("epsilon", "algorithm.loss.clip_low", how=number, default=0.2),
    KeyRow("epsilon_high", "algorithm.loss.clip_high", how=number),
    KeyRow("normalize_advantages", "algorithm.whiten", how=flag),
    KeyRow(
        "reward_clip_range",
        "algorithm.shaping",
        how=to.clipped,
    ),
    *(row for row in ATTEMPTS if row.theirs not in OTHERWISE and row.within != "loss_type"),
)

# Keys that tell the configuration classes apart, for `_method`.
ROLLOUTS = frozenset(
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
OF_DPO = frozenset(
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
OF_SFT = frozenset(
    {"packing", "completion_only_loss", "assistant_only_loss", "dataset_text_field", "eval_packing"}
)


def _method(values: Mapping[str, Any]) -> str:
    """Return the configuration class, judged by its keys, because the file doesn't name it; "" if
    they don't tell."""
    keys = set(values)
    if keys & {"normalize_advantages", "reward_clip_range"}:
        return "RLOOConfig"
    if keys & {"desirable_weight", "undesirable_weight"} or values.get("loss_type") == "kto":
        return "KTOConfig"
    if "center_rewards_coefficient" in keys:
        return "RewardConfig"
    if keys & ROLLOUTS:
        return "GRPOConfig"
    if keys & OF_SFT:
        return "SFTConfig"
    return (
        "DPOConfig"
        if keys & OF_DPO
        else "SFTConfig"
        if "learning_rate" in keys or "max_length" in keys
        else ""
    )


DATA = {"environment.kind": "dataset"}
JUDGED = {**DATA, "rewards": [{"kind": "math"}]}
LR = KeyRow("learning_rate", "optimizer.lr", how=number, default=1e-6)
TRL = Peer(
    "trl",
    "TRL",
    "1.16",
    (
        "per_device_train_batch_size",
        "model_name_or_path",
        "num_generations",
        "use_peft",
        "output_dir",
        "bf16",
        "learning_rate",
    ),
    _method,
    {
        "GRPOConfig": Method({"algorithm.kind": "grpo", **JUDGED}, (LR, *ATTEMPTS)),
        "DPOConfig": Method({"algorithm.kind": "dpo", **DATA}, PREFERENCES),
        "SFTConfig": Method({"algorithm.kind": "sft", **DATA}, SUPERVISED),
        "RewardConfig": Method({"algorithm.kind": "reward_model", **DATA}, REWARD_MODEL),
        "KTOConfig": Method({"algorithm.kind": "kto", **DATA}, KTO),
        "RLOOConfig": Method({"algorithm.kind": "rloo", **JUDGED}, (LR, *RLOO)),
    },
    "yaml",
)
