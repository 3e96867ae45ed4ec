"""The key table of Alibaba ROLL: the YAML of its RLVR, DPO and SFT pipelines.

Keys and defaults are those of ROLL 0.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.commands.migrate import roll_values as to
from ratchet.commands.migrate import shared
from ratchet.commands.migrate.table import (
    Conversion,
    KeyRow,
    Method,
    Peer,
    at_least_0,
    choose,
    covered,
    dropped,
    flag,
    no_effect,
    number,
    only_if,
    real,
    whole,
)

MINIBATCH_NOTE = (
    "counts answers of one data-parallel rank there; here minibatches is the number of optimizer "
    "steps per batch"
)
BATCH_NOTE = "counts rows of all data-parallel ranks here, of one rank there"
GENERATING = "actor_infer.generating_args"
CUT_NOTE = "the learner's probabilities are cut in the same way here, but not there"
POSITIVE_NOTE = "adds the negative log-likelihood of answers with a reward above 0"
LENGTH_KEYS = ("sequence_length", "prompt_length", "response_length")
EVALUATION_NOTE = "greedy accuracy on evaluation.tasks held-out tasks"


def _train(role: str) -> tuple[KeyRow, ...]:
    """Return the rows of a role's optimizer, model and training engine."""
    return (*_optimizer(role), *_model_and_engine(role))


def _batch_rows(role: str, recipe_key: str, note: str, convert: Conversion) -> tuple[KeyRow, ...]:
    """Return the rows of the two keys whose product is a rank's batch size."""
    defaults = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    return tuple(
        KeyRow(f"{role}.training_args.{key}", recipe_key, note, convert, default=default)
        for key, default in defaults.items()
    )


def _optimizer(role: str) -> tuple[KeyRow, ...]:
    args = f"{role}.training_args"
    return (
        KeyRow(f"{args}.learning_rate", "optimizer.lr", convert=number, default=5e-5),
        KeyRow(
            f"{args}.lr_scheduler_type",
            "optimizer.schedule",
            "the default is linear there, constant here",
            choose(
                {
                    **{name: name for name in ("linear", "cosine", "constant")},
                    "constant_with_warmup": "constant",
                }
            ),
            default="linear",
        ),
        KeyRow(f"{args}.weight_decay", "optimizer.weight_decay", "on matrices only", number),
        KeyRow(
            f"{args}.adam_beta1",
            "optimizer.betas",
            convert=shared.betas(f"{args}.adam_beta1", f"{args}.adam_beta2"),
            default=0.9,
        ),
        KeyRow(
            f"{args}.adam_beta2",
            "optimizer.betas",
            convert=shared.betas(f"{args}.adam_beta1", f"{args}.adam_beta2"),
            default=0.999,
        ),
        KeyRow(f"{args}.warmup_steps", "optimizer.warmup_steps", convert=whole),
        KeyRow(
            f"{args}.warmup_ratio",
            "optimizer.warmup_share",
            convert=to.warmup_ratio(f"{args}.warmup_steps"),
        ),
        KeyRow(
            f"{args}.num_train_epochs",
            note="max_steps is the length: set passes in place of steps for passes over the data",
        ),
    )


def _model_and_engine(role: str) -> tuple[KeyRow, ...]:
    args, model = f"{role}.training_args", f"{role}.model_args"
    return (
        KeyRow(f"{model}.model_name_or_path", "model.path"),
        KeyRow(
            f"{model}.disable_gradient_checkpointing",
            "learner.activation_checkpointing",
            convert=to.checkpointing(role),
            default=False,
        ),
        KeyRow(
            f"{role}.strategy_args.strategy_config.recompute_granularity",
            "learner.recompute",
            convert=choose({"full": "full", "selective": "attention"}),
        ),
        KeyRow(
            f"{role}.strategy_args.strategy_config.use_distributed_optimizer",
            "learner.distributed_optimizer",
            convert=flag,
        ),
        KeyRow(
            f"{role}.strategy_args.strategy_config.sequence_parallel",
            "learner.sequence_parallel",
            convert=flag,
        ),
        KeyRow(
            f"{role}.strategy_args.strategy_name",
            "learner",
            convert=to.learner(role),
            default="fsdp2_train",
        ),
        KeyRow(f"{model}.lora_target", "lora.target_modules", convert=to.lora(role, to.targets)),
        KeyRow(f"{model}.lora_rank", "lora.rank", convert=to.lora(role, whole), default=8),
        KeyRow(f"{model}.lora_alpha", "lora.alpha", convert=to.lora(role, real)),
        KeyRow(f"{model}.lora_dropout", "lora.dropout", convert=to.lora(role, number)),
        *covered(
            f"{role}.strategy_args.strategy_name",
            f"{role}.device_mapping",
            f"{role}.strategy_args.strategy_config.*_size",
            f"{model}.ulysses_size",
        ),
        *dropped("is a switch of the peer's engine that learners lack", f"{role}.strategy_args.*"),
        *no_effect(
            shared.MICRO_BATCHES,
            f"{role}.infer_batch_size",
            f"{role}.use_dynamic_batching_*",
            f"{role}.max_tokens_per_microbatch_*",
        ),
        *no_effect(
            shared.PACKING, f"{role}.use_sequence_packing", f"{role}.sequence_packing_args.*"
        ),
        *dropped(shared.PRECISION, f"{model}.dtype"),
        *dropped(shared.NUMERICS, f"{model}.*", f"{args}.*", f"{role}.*"),
        *dropped(shared.DATA_LOADER, f"{role}.data_args.*"),
    )


# Rows of every pipeline.
COMMON = (
    *dropped(shared.BASE_CONFIG, "--config*"),
    *dropped(
        "for distillation set algorithm.teacher of a stage (docs/algorithms)",
        "teacher.*",
        "student_*",
    ),
    *dropped(
        "is a value that other keys of the file refer to",
        "lora_rank",
        "lora_alpha",
        "lora_target",
        "max_actions_per_traj",
    ),
    *dropped(
        "external agents connect to the OpenAI proxy (docs/environments.md)",
        "agent_*",
        "*_agent_*",
        "env_manager_cls",
    ),
    KeyRow("pretrain", "model.path"),
    KeyRow("exp_name", "name", convert=shared.run_name),
    KeyRow("seed", "seed", convert=whole, default=42),
    KeyRow("max_steps", "steps", convert=whole, default=500),
    KeyRow("save_steps", "checkpoint.every", convert=whole, default=50),
    KeyRow("max_ckpt_to_keep", "checkpoint.keep", convert=to.kept_checkpoints),
    KeyRow("eval_steps", "evaluation.every", EVALUATION_NOTE, at_least_0, default=10),
    KeyRow("max_grad_norm", "optimizer.max_grad_norm", convert=number),
    KeyRow("track_with", "logging.sinks", convert=to.tracker),
    *dropped("set the tracker's keys in logging.sinks", "tracker_kwargs.*"),
    *dropped(
        "checkpoints, logs and metrics are all in the run's directory (run_dir)",
        "output_dir",
        "logging_dir",
        "checkpoint_config.*",
        "base_dir",
        "rollout_dump_dir",
        "*_dir",
    ),
    *no_effect("every step is logged", "logging_steps"),
    *dropped("`ratchet train --resume RUN` continues a run", "resume_from_checkpoint"),
    *dropped(
        "the model's own chat template is used, unless tokenizer.template is set",
        "global_template",
        "tag_to_template.*",
    ),
    *dropped(
        "accelerators are set in learner, generator and cluster",
        "num_gpus_per_node",
        "num_nodes",
        "is_offload_states",
        "model_update_buffer_size_mb",
    ),
    *dropped(
        "set environment variables before `ratchet train`",
        "system_envs.*",
        "rpc_timeout",
        "local_rank",
        "model_download_type",
    ),
    *dropped(
        "held-out data are set in environment.test and evaluation here",
        "validation.*",
        "val_batch_size",
        "val_*",
    ),
    *dropped("the reference is the model at the stage's start", "reference.*", "enable_reference"),
    *dropped("profile with `ratchet train --profile N`", "profiler_*", "length_profiler_dir"),
    *dropped("is read by the launcher there", "hydra.*", "defaults"),
)

RLVR = (
    KeyRow("adv_estimator", "algorithm.kind", convert=to.estimator, default="gae"),
    KeyRow("rollout_batch_size", "batch_size", convert=whole, default=128),
    KeyRow("num_return_sequences_in_group", "algorithm.group_size", convert=whole, default=1),
    *_batch_rows("actor_train", "algorithm.minibatches", MINIBATCH_NOTE, to.minibatches),
    KeyRow("ppo_epochs", "algorithm.epochs", convert=whole),
    KeyRow("response_length", covered_by=f"{GENERATING}.max_new_tokens"),
    KeyRow(
        f"{GENERATING}.max_new_tokens",
        "sampling.max_new_tokens",
        convert=to.max_answer_tokens,
        default=8192,
    ),
    KeyRow("sequence_length", covered_by=f"{GENERATING}.max_new_tokens"),
    KeyRow("prompt_length", covered_by=f"{GENERATING}.max_new_tokens", default=1024),
    KeyRow(f"{GENERATING}.temperature", "sampling.temperature", convert=real, default=0.95),
    KeyRow(f"{GENERATING}.top_p", "sampling.top_p", CUT_NOTE, number, default=0.7),
    KeyRow(f"{GENERATING}.top_k", "sampling.top_k", CUT_NOTE, at_least_0, default=50),
    KeyRow(f"{GENERATING}.stop_strings", "sampling.stop"),
    KeyRow("pg_clip", "algorithm.loss", convert=to.clip, default=0.2),
    KeyRow("use_pg_clip_range", "algorithm.loss", convert=to.clip),
    KeyRow("pg_clip_low", covered_by="pg_clip", default=0.2),
    KeyRow("pg_clip_high", covered_by="pg_clip", default=0.2),
    *covered("pg_clip", "importance_sampling", "dual_clip_loss"),
    *covered("adv_estimator", "norm_mean_type", "norm_std_type"),
    KeyRow("step_reward_gamma", covered_by="adv_estimator", default=0.95),
    KeyRow("gamma", covered_by="adv_estimator", default=1),
    KeyRow("lambd", covered_by="adv_estimator", default=0.95),
    KeyRow(
        "loss_agg_mode",
        "algorithm.weighting",
        convert=to.aggregation,
        default="seq-mean-token-mean",
    ),
    KeyRow("whiten_advantages", "algorithm.whiten", convert=flag),
    KeyRow("advantage_clip", "algorithm.advantage_clip", convert=real),
    KeyRow(
        "reward_clip",
        "algorithm.shaping",
        "rewards are first clipped to [-value, value]",
        to.reward_clip,
    ),
    KeyRow(
        "value_clip",
        "algorithm.critic.value_clip",
        convert=only_if(
            lambda config: config["adv_estimator"] == "gae", number, "only gae has a critic"
        ),
    ),
    KeyRow(
        "critic_warmup",
        "algorithm.critic.warmup_steps",
        convert=only_if(
            lambda config: config["adv_estimator"] == "gae", number, "only gae has a critic"
        ),
    ),
    KeyRow(
        "critic.training_args.learning_rate",
        "algorithm.critic.lr",
        convert=only_if(
            lambda config: config["adv_estimator"] == "gae", number, "only gae has a critic"
        ),
    ),
    *dropped("the critic is a copy of the policy with a scalar head", "critic.*"),
    KeyRow("use_kl_loss", "algorithm.kl", convert=to.kl_loss),
    KeyRow("kl_loss_coef", covered_by="use_kl_loss", default=0.0),
    KeyRow("add_token_level_kl", "algorithm.kl", convert=to.kl_reward),
    KeyRow("init_kl_coef", covered_by="add_token_level_kl", default=0.2),
    KeyRow("target_kl", covered_by="add_token_level_kl"),
    *dropped(
        "the KL penalty in the reward is k1; algorithm.kl.rate sets how fast it adapts",
        "kl_horizon",
        "kl_penalty",
    ),
    KeyRow("entropy_loss_coef", "algorithm.entropy_coef", convert=real),
    KeyRow(
        "postive_loss_coef",
        "algorithm.positive_nll_coef",
        POSITIVE_NOTE,
        real,
    ),
    KeyRow("positive_loss_coef", "algorithm.positive_nll_coef", POSITIVE_NOTE, real),
    KeyRow(
        "max_len_mask",
        "algorithm.truncated",
        "drop: truncated answers count in the statistics, but do not train",
        choose({True: "drop", False: "keep"}),
    ),
    KeyRow("async_generation_ratio", "rollouts.max_staleness", convert=to.max_staleness),
    KeyRow("max_running_requests", note="generator.max_running is the limit of one engine"),
    KeyRow(
        "train_infer_correction.is_weight.enabled",
        "algorithm.correction.weight",
        convert=to.correction,
    ),
    KeyRow(
        "train_infer_correction.is_weight.weight_type",
        covered_by="train_infer_correction.is_weight.enabled",
        default="token",
    ),
    KeyRow(
        "train_infer_correction.is_weight.upper_bound",
        covered_by="train_infer_correction.is_weight.enabled",
        default=1.2,
    ),
    KeyRow("train_infer_correction.filters", "algorithm.correction.mask", convert=to.filters),
    *dropped(
        "algorithm.correction has one weight and one mask, both without gradient",
        "train_infer_correction.*",
    ),
    KeyRow("actor_train.data_args.file_name", "environment.train", convert=to.files),
    KeyRow("validation.data_args.file_name", "environment.test", convert=shared.as_list),
    KeyRow(
        "actor_train.data_args.domain_interleave_probs.*",
        note="environment.kind=mixture has parts with weights",
    ),
    KeyRow("actor_infer.strategy_args.strategy_name", "generator", convert=to.convert_generator),
    KeyRow(
        "train_env_manager.num_env_groups", "batch_size", "groups of attempts at one task", whole
    ),
    KeyRow("train_env_manager.group_size", "algorithm.group_size", convert=whole),
    *dropped(
        "set environment.kind to a multi-turn environment or an import path (docs/environments.md)",
        "train_env_manager.*",
        "val_env_manager.*",
        "custom_envs.*",
        "max_tokens_per_step",
        "default_history_length",
    ),
    *dropped(
        "gigpo's advantage has gamma and step_weight", "episode_reward_weight", "step_reward_weight"
    ),
    *dropped(
        "groups are always complete: no row is copied or left out to fill a batch",
        "batch_adjust_mode",
    ),
    KeyRow("rewards.*.worker_cls", "rewards", convert=to.rewards),
    KeyRow("rewards.*.tag_included", covered_by="rewards.*.worker_cls"),
    *dropped(
        "docs/rewards.md lists the keys of each reward; rewards run without accelerators",
        "rewards.*",
    ),
    *no_effect(shared.KV_CACHE, "actor_infer.strategy_args.strategy_config.gpu_memory_utilization"),
    *covered(
        "actor_infer.strategy_args.strategy_name",
        "actor_infer.device_mapping",
        "actor_infer.strategy_args.strategy_config.max_model_len",
        "actor_infer.strategy_args.strategy_config.tensor_parallel_size",
    ),
    *dropped("only the keys of generator can be set for vLLM", "actor_infer.*"),
    *dropped(
        "set a reward model with rewards: [{kind: reward_model, path: ...}]",
        "reward_pretrain",
        "reward_model.*",
        "reward.*",
    ),
    *dropped(
        "algorithm.equal_rewards=drop leaves out groups of equal rewards, and "
        "rollouts.dynamic_sampling replaces them; difficulty has no weight",
        "difficulty_*",
        "length_loss_weight",
    ),
    *dropped(
        "algorithm.shaping has normalise (over group, batch or all batches so far), scale and clip",
        "whiten_rewards",
        "use_reward_*",
        "add_len_reward",
        "reward_norm",
        "reward_normalization.*",
        "reward_shift",
        "reward_scale",
    ),
    *dropped(
        "set rollouts.redundant_attempts and rollouts.redundant_groups",
        "is_use_additional_prompts",
        "max_additional_running_prompts",
        "is_num_return_sequences_expand",
        "generate_opt_level",
        "user_defined_rollout_loop_cls",
    ),
    *dropped(
        "algorithm.shaping judges the length and the end of answers",
        "error_max_len_*",
        "mask_type",
        "l2",
        "balance_length",
        "minibatch_data_iter_num",
    ),
    *dropped(
        "algorithm.loss.kind is ppo, reinforce, gspo, cispo, topr, gmpo, sapo or kimi",
        "use_policy_loss_type",
        "use_topr_*",
        "rl_loss_coef",
        "actor_train.pg_variant",
        "pg_variant",
    ),
    *_train("actor_train"),
    *COMMON,
)


def _offline(role: str) -> tuple[KeyRow, ...]:
    """Return the rows of a pipeline that trains on a dataset without sampling (DPO, SFT)."""
    return (
        *_batch_rows(role, "batch_size", BATCH_NOTE, to.rows(role)),
        KeyRow(f"{role}.data_args.file_name", "environment.train", convert=shared.training_data),
        *dropped("rows are never truncated: the limit is the model's context", *LENGTH_KEYS),
        *_train(role),
        *COMMON,
    )


DPO = (
    KeyRow("ipo", "algorithm.kind", convert=choose({True: "ipo", False: "dpo"})),
    KeyRow(
        "beta",
        "algorithm.beta",
        "is used here; ROLL 0.3 does not pass it to its loss, which uses 0.1",
        real,
        default=0.1,
    ),
    KeyRow(
        "label_smoothing",
        "algorithm.label_smoothing",
        "is used here; ROLL 0.3 does not pass it to its loss",
        only_if(lambda config: not config.flag("ipo"), real, "ipo has none"),
    ),
    KeyRow("chosen_key", "environment.columns", convert=to.column("chosen"), default="chosen"),
    KeyRow(
        "rejected_key", "environment.columns", convert=to.column("rejected"), default="rejected"
    ),
    *_offline("actor_train"),
)
SFT = (
    KeyRow("prompt_key", "environment.columns", convert=to.column("prompt"), default="instruction"),
    KeyRow("response_key", "environment.columns", convert=to.column("solution"), default="output"),
    KeyRow("system_key", "environment.columns", convert=to.column("system")),
    KeyRow(
        "query_key",
        note="environment.prompt joins several columns to a prompt: '{instruction}\n{input}'",
    ),
    *_offline("sft_train"),
)


def _detect_method(values: Mapping[str, Any]) -> str:
    if any(key.startswith("sft_train") for key in values):
        return "SFT"
    if "chosen_key" in values or "ipo" in values:
        return "DPO"
    return "RLVR" if "rollout_batch_size" in values or "adv_estimator" in values else ""


DATASET = {"environment.kind": "dataset"}
ROLL = Peer(
    "roll",
    "ROLL",
    "0.3",
    (
        "pretrain",
        "actor_train",
        "actor_infer",
        "sft_train",
        "exp_name",
        "rollout_batch_size",
        "num_return_sequences_in_group",
    ),
    _detect_method,
    {
        "RLVR": Method({"algorithm.kind": "grpo", **DATASET, "rewards": [{"kind": "math"}]}, RLVR),
        "DPO": Method({"algorithm.kind": "dpo", **DATASET}, DPO),
        "SFT": Method({"algorithm.kind": "sft", **DATASET}, SFT),
    },
)
