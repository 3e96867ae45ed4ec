"""The key table of Alibaba ROLL: the YAML of its RLVR, DPO and SFT pipelines.

Keys and defaults are those of ROLL 0.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.commands.migrate import roll_values as to
from ratchet.commands.migrate import shared
from ratchet.commands.migrate.table import (
    Convert,
    KeyRow,
    Method,
    Peer,
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

COUNTED = (
    "counted in answers of one data rank there, in prompts here: minibatches is how many "
    "optimizer steps a batch has"
)
ROWS_COUNTED = "rows over all data ranks here, of one of them there"
SAMPLED = "actor_infer.generating_args"
CUT = "there the learner's probabilities are not cut alike"
LENGTHS = ("sequence_length", "prompt_length", "response_length")
EVERY = "greedy accuracy on evaluation.tasks held-out tasks"


def _train(role: str) -> tuple[KeyRow, ...]:
    """Return the rows of a role's optimizer, model and training engine."""
    return (*_optimizer(role), *_model_and_engine(role))


def _batch_rows(role: str, ours: str, note: str, how: Convert) -> tuple[KeyRow, ...]:
    """Return the rows of the two keys whose product is a rank's batch size."""
    defaults = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    return tuple(
        KeyRow(f"{role}.training_args.{key}", ours, note, how, default=default)
        for key, default in defaults.items()
    )


def _optimizer(role: str) -> tuple[KeyRow, ...]:
    args = f"{role}.training_args"
    return (
        KeyRow(f"{args}.learning_rate", "optimizer.lr", how=number, default=5e-5),
        KeyRow(
            f"{args}.lr_scheduler_type",
            "optimizer.schedule",
            "their default is linear, ours constant",
            choose(
                {
                    "linear": "linear",
                    "cosine": "cosine",
                    "constant": "constant",
                    "constant_with_warmup": "constant",
                }
            ),
            default="linear",
        ),
        KeyRow(f"{args}.weight_decay", "optimizer.weight_decay", "on matrices only", number),
        KeyRow(
            f"{args}.adam_beta1",
            "optimizer.betas",
            how=shared.betas(f"{args}.adam_beta1", f"{args}.adam_beta2"),
            default=0.9,
        ),
        KeyRow(
            f"{args}.adam_beta2",
            "optimizer.betas",
            how=shared.betas(f"{args}.adam_beta1", f"{args}.adam_beta2"),
            default=0.999,
        ),
        KeyRow(f"{args}.warmup_steps", "optimizer.warmup_steps", how=whole),
        KeyRow(f"{args}.warmup_ratio", note="optimizer.warmup_steps counts steps: set it"),
        KeyRow(f"{args}.num_train_epochs", note=shared.EPOCHS),
    )


def _model_and_engine(role: str) -> tuple[KeyRow, ...]:
    args, model = f"{role}.training_args", f"{role}.model_args"
    return (
        KeyRow(f"{model}.model_name_or_path", "model.path"),
        KeyRow(
            f"{model}.disable_gradient_checkpointing",
            "learner.activation_checkpointing",
            how=to.checkpointing(role),
            default=False,
        ),
        KeyRow(
            f"{role}.strategy_args.strategy_config.recompute_granularity",
            "learner.recompute",
            how=choose({"full": "full", "selective": "attention"}),
        ),
        KeyRow(
            f"{role}.strategy_args.strategy_config.use_distributed_optimizer",
            "learner.distributed_optimizer",
            how=flag,
        ),
        KeyRow(
            f"{role}.strategy_args.strategy_config.sequence_parallel",
            "learner.sequence_parallel",
            how=flag,
        ),
        KeyRow(
            f"{role}.strategy_args.strategy_name",
            "learner",
            how=to.learner(role),
            default="fsdp2_train",
        ),
        KeyRow(f"{model}.lora_target", "lora.target_modules", how=to.lora(role, to.targets)),
        KeyRow(f"{model}.lora_rank", "lora.rank", how=to.lora(role, whole), default=8),
        KeyRow(f"{model}.lora_alpha", "lora.alpha", how=to.lora(role, real)),
        KeyRow(f"{model}.lora_dropout", "lora.dropout", how=to.lora(role, number)),
        *within(
            f"{role}.strategy_args.strategy_name",
            f"{role}.device_mapping",
            f"{role}.strategy_args.strategy_config.*_size",
            f"{model}.ulysses_size",
        ),
        *nothing("a switch of their engine, which the learner has not", f"{role}.strategy_args.*"),
        *idle(
            shared.MICRO,
            f"{role}.infer_batch_size",
            f"{role}.use_dynamic_batching_*",
            f"{role}.max_tokens_per_microbatch_*",
        ),
        *idle(shared.PACKED, f"{role}.use_sequence_packing", f"{role}.sequence_packing_args.*"),
        *nothing(shared.FLOAT32, f"{model}.dtype"),
        *nothing(shared.NUMERICS, f"{model}.*", f"{args}.*", f"{role}.*"),
        *nothing(shared.LOADER, f"{role}.data_args.*"),
    )


# Rows of every pipeline.
COMMON = (
    *nothing(shared.BASE, "--config*"),
    *nothing(
        "a teacher is algorithm.teacher, of a stage of its own (docs/algorithms)",
        "teacher.*",
        "student_*",
    ),
    *nothing(
        "a value of the file's own, which its other keys refer to",
        "lora_rank",
        "lora_alpha",
        "lora_target",
        "max_actions_per_traj",
    ),
    *nothing(
        "an agent from outside talks to the proxy (docs/environments.md)",
        "agent_*",
        "*_agent_*",
        "env_manager_cls",
    ),
    KeyRow("pretrain", "model.path"),
    KeyRow("exp_name", "name", how=shared.run_name),
    KeyRow("seed", "seed", how=whole, default=42),
    KeyRow("max_steps", "steps", how=whole, default=500),
    KeyRow("save_steps", "checkpoint.every", how=whole, default=50),
    KeyRow("max_ckpt_to_keep", "checkpoint.keep", how=to.kept),
    KeyRow("eval_steps", "evaluation.every", EVERY, at_least_0, default=10),
    KeyRow("max_grad_norm", "optimizer.max_grad_norm", how=number),
    KeyRow("track_with", "logging.sinks", how=to.tracker),
    *nothing("a tracker's keys are those of logging.sinks", "tracker_kwargs.*"),
    *nothing(
        "a run has a directory of its own, with checkpoints, logs and metrics in it: run_dir",
        "output_dir",
        "logging_dir",
        "checkpoint_config.*",
        "base_dir",
        "rollout_dump_dir",
        "*_dir",
    ),
    *idle("every step is logged", "logging_steps"),
    *nothing("a run goes on by `ratchet train --resume RUN`", "resume_from_checkpoint"),
    *nothing(
        "set tokenizer.template, or the model's own counts", "global_template", "tag_to_template.*"
    ),
    *nothing(
        "accelerators are shared out by learner, generator and cluster",
        "num_gpus_per_node",
        "num_nodes",
        "is_offload_states",
        "model_update_buffer_size_mb",
    ),
    *nothing(
        "the environment of the process is set before `ratchet train`",
        "system_envs.*",
        "rpc_timeout",
        "local_rank",
        "model_download_type",
    ),
    *nothing(
        "what is held out is environment.test and evaluation here",
        "validation.*",
        "val_batch_size",
        "val_*",
    ),
    *nothing("the reference is the model at the stage's start", "reference.*", "enable_reference"),
    *nothing("`ratchet train --profile N`", "profiler_*", "length_profiler_dir"),
    *nothing("read by the launcher there", "hydra.*", "defaults"),
)

RLVR = (
    KeyRow("adv_estimator", "algorithm.kind", how=to.estimator, default="gae"),
    KeyRow("rollout_batch_size", "batch_size", how=whole, default=128),
    KeyRow("num_return_sequences_in_group", "algorithm.group_size", how=whole, default=1),
    *_batch_rows("actor_train", "algorithm.minibatches", COUNTED, to.minibatches),
    KeyRow("ppo_epochs", "algorithm.epochs", how=whole),
    KeyRow("response_length", within=f"{SAMPLED}.max_new_tokens"),
    KeyRow(f"{SAMPLED}.max_new_tokens", "sampling.max_new_tokens", how=to.longest, default=8192),
    KeyRow("sequence_length", within=f"{SAMPLED}.max_new_tokens"),
    KeyRow("prompt_length", within=f"{SAMPLED}.max_new_tokens", default=1024),
    KeyRow(f"{SAMPLED}.temperature", "sampling.temperature", how=real, default=0.95),
    KeyRow(f"{SAMPLED}.top_p", "sampling.top_p", CUT, number, default=0.7),
    KeyRow(f"{SAMPLED}.top_k", "sampling.top_k", CUT, at_least_0, default=50),
    KeyRow(f"{SAMPLED}.stop_strings", "sampling.stop"),
    KeyRow("pg_clip", "algorithm.loss", how=to.clip, default=0.2),
    KeyRow("use_pg_clip_range", "algorithm.loss", how=to.clip),
    KeyRow("pg_clip_low", within="pg_clip", default=0.2),
    KeyRow("pg_clip_high", within="pg_clip", default=0.2),
    *within("pg_clip", "importance_sampling", "dual_clip_loss"),
    *within("adv_estimator", "norm_mean_type", "norm_std_type"),
    KeyRow("step_reward_gamma", within="adv_estimator", default=0.95),
    KeyRow("gamma", within="adv_estimator", default=1),
    KeyRow("lambd", within="adv_estimator", default=0.95),
    KeyRow(
        "loss_agg_mode", "algorithm.weighting", how=to.aggregation, default="seq-mean-token-mean"
    ),
    KeyRow("whiten_advantages", "algorithm.whiten", how=flag),
    KeyRow("advantage_clip", "algorithm.advantage_clip", how=real),
    KeyRow(
        "reward_clip",
        "algorithm.shaping",
        "rewards are kept within it on both sides, before anything else",
        to.clipped_reward,
    ),
    KeyRow(
        "value_clip",
        "algorithm.critic.value_clip",
        how=when(lambda config: config["adv_estimator"] == "gae", number, "only gae has a critic"),
    ),
    KeyRow(
        "critic_warmup",
        "algorithm.critic.warmup_steps",
        how=when(lambda config: config["adv_estimator"] == "gae", number, "only gae has a critic"),
    ),
    KeyRow(
        "critic.training_args.learning_rate",
        "algorithm.critic.lr",
        how=when(lambda config: config["adv_estimator"] == "gae", number, "only gae has a critic"),
    ),
    *nothing("the critic is a copy of the policy with a scalar head", "critic.*"),
    KeyRow("use_kl_loss", "algorithm.kl", how=to.kl_loss),
    KeyRow("kl_loss_coef", within="use_kl_loss", default=0.0),
    KeyRow("add_token_level_kl", "algorithm.kl", how=to.kl_reward),
    KeyRow("init_kl_coef", within="add_token_level_kl", default=0.2),
    KeyRow("target_kl", within="add_token_level_kl"),
    *nothing(
        "the penalty in the reward is k1, and algorithm.kl.rate is the speed of its adaptation",
        "kl_horizon",
        "kl_penalty",
    ),
    KeyRow("entropy_loss_coef", "algorithm.entropy_coef", how=real),
    KeyRow(
        "postive_loss_coef",
        "algorithm.positive_nll_coef",
        "the likelihood of answers that earned more than 0",
        real,
    ),
    KeyRow(
        "positive_loss_coef",
        "algorithm.positive_nll_coef",
        "the likelihood of answers that earned more than 0",
        real,
    ),
    KeyRow(
        "max_len_mask",
        "algorithm.truncated",
        "drop: answers that were cut off count in the statistics, and don't train",
        choose({True: "drop", False: "keep"}),
    ),
    KeyRow("async_generation_ratio", "rollouts.max_staleness", how=to.ahead),
    KeyRow("max_running_requests", note="generator.max_running bounds requests of one engine"),
    KeyRow(
        "train_infer_correction.is_weight.enabled", "algorithm.correction.weight", how=to.correction
    ),
    KeyRow(
        "train_infer_correction.is_weight.weight_type",
        within="train_infer_correction.is_weight.enabled",
        default="token",
    ),
    KeyRow(
        "train_infer_correction.is_weight.upper_bound",
        within="train_infer_correction.is_weight.enabled",
        default=1.2,
    ),
    KeyRow("train_infer_correction.filters", "algorithm.correction.mask", how=to.filters),
    *nothing(
        "algorithm.correction has one weight and one mask, both without gradients",
        "train_infer_correction.*",
    ),
    KeyRow("actor_train.data_args.file_name", "environment.train", how=to.files),
    KeyRow("validation.data_args.file_name", "environment.test", how=shared.listed),
    KeyRow(
        "actor_train.data_args.domain_interleave_probs.*",
        note="environment.kind=mixture has parts with weights",
    ),
    KeyRow("actor_infer.strategy_args.strategy_name", "generator", how=to.convert_generator),
    KeyRow(
        "train_env_manager.num_env_groups", "batch_size", "groups of attempts at one task", whole
    ),
    KeyRow("train_env_manager.group_size", "algorithm.group_size", how=whole),
    *nothing(
        "an environment of many turns is chosen by environment.kind, by its path where it is yours "
        "(docs/environments.md)",
        "train_env_manager.*",
        "val_env_manager.*",
        "custom_envs.*",
        "max_tokens_per_step",
        "default_history_length",
    ),
    *nothing(
        "advantage gigpo has gamma and step_weight", "episode_reward_weight", "step_reward_weight"
    ),
    *nothing(
        "groups are whole whatever they hold: no row is copied or left out to fill a batch",
        "batch_adjust_mode",
    ),
    KeyRow("rewards.*.worker_cls", "rewards", how=to.rewards),
    KeyRow("rewards.*.tag_included", within="rewards.*.worker_cls"),
    *nothing(
        "a reward's own keys are in docs/rewards.md; it runs in the run's own processes, on "
        "no accelerator",
        "rewards.*",
    ),
    *idle(shared.CACHE, "actor_infer.strategy_args.strategy_config.gpu_memory_utilization"),
    *within(
        "actor_infer.strategy_args.strategy_name",
        "actor_infer.device_mapping",
        "actor_infer.strategy_args.strategy_config.max_model_len",
        "actor_infer.strategy_args.strategy_config.tensor_parallel_size",
    ),
    *nothing(
        "vLLM's own ways are set by generator's keys, and nothing else of it", "actor_infer.*"
    ),
    *nothing(
        "a learned reward is rewards: [{kind: reward_model, path: ...}]",
        "reward_pretrain",
        "reward_model.*",
        "reward.*",
    ),
    *nothing(
        (
            "prompts of equal rewards are left out by algorithm.equal_rewards=drop or replaced by "
            "rollouts.dynamic_sampling; "
            "difficulty has no weight"
        ),
        "difficulty_*",
        "length_loss_weight",
    ),
    *nothing(
        "algorithm.shaping has normalise (over the group, the batch or all batches so far), scale "
        "and clip",
        "whiten_rewards",
        "use_reward_*",
        "add_len_reward",
        "reward_norm",
        "reward_normalization.*",
        "reward_shift",
        "reward_scale",
    ),
    *nothing(
        "rollouts has redundant_attempts and redundant_groups; what is under way is the "
        "scheduler's own",
        "is_use_additional_prompts",
        "max_additional_running_prompts",
        "is_num_return_sequences_expand",
        "generate_opt_level",
        "user_defined_rollout_loop_cls",
    ),
    *nothing(
        "without a counterpart: the answer's end and its length are judged by algorithm.shaping",
        "error_max_len_*",
        "mask_type",
        "l2",
        "balance_length",
        "minibatch_data_iter_num",
    ),
    *nothing(
        "algorithm.loss.kind chooses among ppo, reinforce, gspo, cispo, topr, gmpo, sapo and kimi",
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
        *_batch_rows(role, "batch_size", ROWS_COUNTED, to.rows(role)),
        KeyRow(f"{role}.data_args.file_name", "environment.train", how=shared.rows),
        *nothing("a row is never cut: the model's context is the bound", *LENGTHS),
        *_train(role),
        *COMMON,
    )


DPO = (
    KeyRow("ipo", "algorithm.kind", how=choose({True: "ipo", False: "dpo"})),
    KeyRow(
        "beta",
        "algorithm.beta",
        "taken here; ROLL 0.3 does not hand it to its loss, which has 0.1",
        real,
        default=0.1,
    ),
    KeyRow(
        "label_smoothing",
        "algorithm.label_smoothing",
        "taken here; ROLL 0.3 does not hand it to its loss",
        when(lambda config: not config.flag("ipo"), real, "ipo has none"),
    ),
    KeyRow("chosen_key", "environment.columns", how=to.column("chosen"), default="chosen"),
    KeyRow("rejected_key", "environment.columns", how=to.column("rejected"), default="rejected"),
    *_offline("actor_train"),
)
SFT = (
    KeyRow("prompt_key", "environment.columns", how=to.column("prompt"), default="instruction"),
    KeyRow("response_key", "environment.columns", how=to.column("solution"), default="output"),
    KeyRow("system_key", "environment.columns", how=to.column("system")),
    KeyRow(
        "query_key",
        note="environment.prompt makes one prompt of several columns: '{instruction}\n{input}'",
    ),
    *_offline("sft_train"),
)


def _method(values: Mapping[str, Any]) -> str:
    if any(key.startswith("sft_train") for key in values):
        return "SFT"
    if "chosen_key" in values or "ipo" in values:
        return "DPO"
    return "RLVR" if "rollout_batch_size" in values or "adv_estimator" in values else ""


ROWS = {"environment.kind": "dataset"}
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
    _method,
    {
        "RLVR": Method({"algorithm.kind": "grpo", **ROWS, "rewards": [{"kind": "math"}]}, RLVR),
        "DPO": Method({"algorithm.kind": "dpo", **ROWS}, DPO),
        "SFT": Method({"algorithm.kind": "sft", **ROWS}, SFT),
    },
)
