"""The key table of ROLL's RLVR pipeline.

"there" in a note means ROLL; "here" means Ratchet.
"""

from __future__ import annotations

from ratchet.commands.migrate import shared
from ratchet.commands.migrate.roll import agentic
from ratchet.commands.migrate.roll import placement as place
from ratchet.commands.migrate.roll import rewards as reward
from ratchet.commands.migrate.roll import values as to
from ratchet.commands.migrate.roll.common import COMMON, batch_rows, train_rows
from ratchet.commands.migrate.table import (
    Inert,
    KeyRow,
    at_least_0,
    choose,
    dropped,
    flag,
    no_effect,
    number,
    only_if,
    real,
    rows_covered_by,
    switches,
    whole,
)

MINIBATCH_NOTE = (
    "it counts answers of one data-parallel rank there; here minibatches is the number of "
    "optimizer steps per batch"
)
GENERATING = "actor_infer.generating_args"
CUT_NOTE = "the mass that the filter keeps enters algorithm.correction here, and nothing there"
JUDGE_KEYS = (
    *("judge_prompt", "judge_model_type", "judge_model_name", "judge_api_url"),
    *("generating_args.max_new_tokens", "generating_args.temperature"),
)
JUDGE_MODEL_KEYS = (
    *("model_args.model_name_or_path", "strategy_args.strategy_name", "device_mapping"),
    *("strategy_args.strategy_config.tensor_parallel_size",),
    *("strategy_args.strategy_config.max_model_len",),
)
# Keys at the top of agentic files that definitions of environments refer to.
AGENTIC_VALUES = (
    "max_tokens_per_step",
    "default_history_length",
    "*_format_penalty",
    "*_pattern",
    "*_template",
    "env_manager_cls",
    "agent_runner_cls",
)
POSITIVE_NOTE = "it adds the negative log-likelihood of answers with a reward above 0"

RLVR = (
    KeyRow("adv_estimator", "algorithm.kind", convert=to.estimator, default="gae"),
    KeyRow("rollout_batch_size", "batch_size", convert=whole, default=128),
    KeyRow("num_return_sequences_in_group", "algorithm.group_size", convert=whole, default=1),
    *batch_rows("actor_train", "algorithm.minibatches", MINIBATCH_NOTE, to.minibatches),
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
    *rows_covered_by("pg_clip", "importance_sampling", "dual_clip_loss"),
    *rows_covered_by("adv_estimator", "norm_mean_type", "norm_std_type"),
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
    KeyRow("difficulty_mask", "algorithm.mean_reward_range", convert=to.difficulty),
    KeyRow("difficulty_low_threshold", covered_by="difficulty_mask", default=0.0),
    KeyRow("difficulty_high_threshold", covered_by="difficulty_mask", default=1.0),
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
        "with drop, truncated answers count in the statistics, but do not train",
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
        convert=to.domain_shares,
    ),
    KeyRow("actor_infer.strategy_args.strategy_name", "generator", convert=place.convert_generator),
    KeyRow(
        "train_env_manager.group_size",
        "algorithm.group_size, batch_size",
        "a batch counts groups here, attempts there",
        agentic.convert_group_size,
    ),
    *no_effect(
        "it changes how many attempts run at once there, not results",
        "train_env_manager.num_env_groups",
        "*_env_manager.max_env_num_per_worker",
        "custom_envs.*.use_thread_lock",
        "custom_envs.*.max_env_step_concurrent",
    ),
    KeyRow("val_env_manager.num_env_groups", "evaluation.tasks", convert=whole),
    KeyRow("val_env_manager.group_size", "evaluation.samples", convert=whole),
    *no_effect("other keys of the file refer to this value", *AGENTIC_VALUES),
    *dropped(
        "gigpo's advantage has gamma and step_weight", "episode_reward_weight", "step_reward_weight"
    ),
    *dropped(
        "groups are always complete: no row is copied or left out to fill a batch",
        "batch_adjust_mode",
    ),
    KeyRow("rewards.*.worker_cls", "rewards", convert=reward.convert_rewards),
    *rows_covered_by(
        "rewards.*.worker_cls",
        "rewards.*.tag_included",
        convert=lambda value, config: Inert("the tags of a reward that is left out"),
    ),
    *rows_covered_by(
        "rewards.*.worker_cls",
        "rewards.*.reward_type",
        convert=lambda value, config: Inert("only the worker of CrossThinkQA reads it"),
    ),
    *rows_covered_by(
        "rewards.*.worker_cls",
        *(f"rewards.*.{key}" for key in JUDGE_KEYS),
        *(f"{role}.{key}" for role in ("rewards.*", "reward_model") for key in JUDGE_MODEL_KEYS),
        convert=reward.inert_judge_key,
    ),
    KeyRow("rewards.*.judge_api_key", note="the environment variable JUDGE_API_KEY has it here"),
    *(
        KeyRow(f"rewards.*.generating_args.{key}", note=reward.CUT_NOTE, convert=reward.convert_cut)
        for key in ("top_p", "top_k")
    ),
    *no_effect(
        "it changes speed and memory there, not results",
        *(
            f"rewards.*.{name}"
            for name in (
                *("world_size", "infer_batch_size", "strategy_args.*"),
                *("data_args.*", "model_args.*", "generating_args.*", "use_local"),
            )
        ),
    ),
    *switches("docs/rewards.md lists the keys of each reward", "rewards.*"),
    *no_effect(shared.KV_CACHE, "actor_infer.strategy_args.strategy_config.gpu_memory_utilization"),
    *rows_covered_by(
        "actor_infer.strategy_args.strategy_name",
        "actor_infer.device_mapping",
        "actor_infer.strategy_args.strategy_config.max_model_len",
        "actor_infer.strategy_args.strategy_config.tensor_parallel_size",
    ),
    *no_effect(
        "it changes speed and memory there, not results",
        "actor_infer.infer_batch_size",
        "actor_infer.model_args.*",
        "actor_infer.num_gpus_per_worker",
        "actor_infer.offload_nccl",
        "actor_infer.strategy_args.strategy_config.*",
    ),
    *no_effect("the group's size is algorithm.group_size", f"{GENERATING}.num_return_sequences"),
    *no_effect("answers are drawn, without beams", f"{GENERATING}.num_beams"),
    *no_effect(
        "the model's own chat template is used, unless tokenizer.template is set",
        "actor_infer.data_args.template",
    ),
    *switches("only the keys of generator can be set for vLLM", "actor_infer.*"),
    *no_effect("other keys of the file refer to this value", "reward_pretrain"),
    *no_effect(
        "only its model, its engine and its accelerators count for a judge", "reward_model.*"
    ),
    *dropped("set a reward model with rewards: [{kind: reward_model, path: ...}]", "reward.*"),
    *switches(
        "algorithm.equal_rewards=drop leaves out groups of equal rewards, and "
        "rollouts.dynamic_sampling replaces them; difficulty has no weight",
        "difficulty_loss_weight",
        "length_loss_weight",
    ),
    KeyRow(
        "reward_normalization.*",
        note="algorithm.shaping has normalise (over group, batch or all batches so far)",
        convert=agentic.convert_normalisation,
    ),
    *switches(
        "algorithm.shaping has normalise (over group, batch or all batches so far), scale and clip",
        "whiten_rewards",
        "use_reward_*",
        "add_len_reward",
        "reward_norm",
        "reward_shift",
        "reward_scale",
    ),
    *no_effect(
        "set rollouts.redundant_attempts and rollouts.redundant_groups",
        "is_use_additional_prompts",
        "max_additional_running_prompts",
        "is_num_return_sequences_expand",
        "generate_opt_level",
        "user_defined_rollout_loop_cls",
    ),
    *switches(
        "algorithm.shaping judges the length and the end of answers",
        "error_max_len_*",
        "mask_type",
        "l2",
        "balance_length",
        "minibatch_data_iter_num",
    ),
    *switches(
        "algorithm.loss.kind is ppo, reinforce, gspo, cispo, topr, gmpo, sapo or kimi",
        "use_policy_loss_type",
        "use_topr_*",
        "rl_loss_coef",
    ),
    *no_effect("the loss is ppo here too", "actor_train.pg_variant"),
    *no_effect("other keys of the file refer to this value", "pg_variant"),
    *train_rows("actor_train"),
    *COMMON,
    KeyRow(
        "train_env_manager.tags",
        "environment, rewards, rollouts.history_window, rollouts.max_turns, "
        "sampling.max_new_tokens",
        convert=agentic.convert_training,
    ),
    KeyRow(
        "val_env_manager.tags",
        "evaluation.environment",
        convert=agentic.convert_evaluation,
    ),
    *(
        row
        for role in ("train_env_manager", "val_env_manager")
        for row in rows_covered_by(
            f"{role}.tags", f"{role}.num_groups_partition", convert=agentic.inert_shares
        )
    ),
    *dropped(
        "the environment here tells its rules, shows its states and reads moves in its own way",
        "custom_envs.*_template",
        "custom_envs.*.env_config.action_pattern",
        "custom_envs.*.env_config.grid_*",
    ),
    *dropped("a malformed move costs a move here, and no reward", "*.format_penalty"),
    *dropped("rooms are drawn by another rule here", "custom_envs.*.env_config.search_depth"),
    *no_effect("max_steps beside env_config ends an episode", "custom_envs.*.env_config.max_steps"),
    *no_effect(
        "the lowest limit of training's environments counts", "custom_envs.*.max_tokens_per_step"
    ),
    *no_effect(
        "rollouts.history_window is that of training's environments", "custom_envs.*.history_length"
    ),
    *rows_covered_by("train_env_manager.tags", "custom_envs.*"),
    *dropped("the environment of the recipe has no such key", "*_env_manager.*"),
)
