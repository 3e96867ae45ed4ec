"""Values that make the importer's conversions count, over the neutral values of `keys/`.

By peer and method: several sets of values; a pattern stands for many keys, and a later entry goes
over an earlier one, and `...` removes a key. A key that is in no newest file, but in older ones, is
added by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Values = Mapping[str, Any]

COLOCATED = "policy.generation.colocated"
NEMO: Values = {
    "*_parallel_size": 1,
    "policy.dtensor_cfg.enabled": True,
    "policy.megatron_cfg.enabled": False,
    "policy.generation.backend": "vllm",
    "policy.generation.stop_strings": ["a"],
    "policy.tokenizer.name": "tokens",
    "policy.train_global_batch_size": 2,
    "policy.sequence_packing.enabled": True,
    "policy.sequence_packing.train_mb_tokens": 4,
    "policy.optimizer.name": "torch.optim.AdamW",
    "policy.optimizer.kwargs.betas": [0.5, 0.5],
    "policy.tokenizer.chat_template": "text.jinja",
    "loss_fn.use_cispo": False,
    "loss_fn.disable_ppo_ratio": False,
    "loss_fn.use_kl_in_reward": False,
    "loss_fn.truncated_importance_sampling_type": "tis",
    "loss_fn.truncated_importance_sampling_ratio": 4,
    "loss_fn.truncated_importance_sampling_ratio_min": 1,
    "grpo.reward_shaping.stop_properly_penalty_coef": None,
    "grpo.reward_shaping.overlong_buffer_length": 2,
    "grpo.reward_shaping.overlong_buffer_penalty": 1,
    "grpo.reward_shaping.max_response_length": 4,
    "grpo.adv_estimator.name": "grpo",
    "grpo.reward_scaling.source_min": 0.25,
    "grpo.reward_scaling.source_max": 1.0,
    "grpo.reward_scaling.target_min": -1.0,
    "grpo.reward_scaling.target_max": 1.0,
    "grpo.invalid_tool_call_advantage": -5.0,
    "grpo.malformed_thinking_advantage": -5.0,
    "grpo.stop_at_validation_metric": "accuracy",
    "grpo.stop_at_validation_threshold": 0.5,
    "grpo.advantage_clip_low": -2,
    "grpo.advantage_clip_high": 2,
    f"{COLOCATED}.enabled": True,
    "policy.scheduler": [
        {"name": "a.LinearLR", "kwargs": {"start_factor": 0.5, "total_iters": 2}},
        {"milestones": [2]},
    ],
    "policy.dtensor_cfg.lora_cfg.match_all_linear": False,
    "policy.dtensor_cfg.lora_cfg.target_modules": ["a"],
}
NEMO_APART: Values = {
    "policy.dtensor_cfg.enabled": False,
    "policy.megatron_cfg.enabled": True,
    "policy.megatron_cfg.pipeline_model_parallel_size": 2,
    **{f"policy.megatron_cfg.num_layers_in_{end}_pipeline_stage": 3 for end in ("first", "last")},
    "grpo.adv_estimator.name": "reinforce_plus_plus",
    "loss_fn.truncated_importance_sampling_type": "icepop",
    f"{COLOCATED}.enabled": False,
    f"{COLOCATED}.resources.num_nodes": 1,
    f"{COLOCATED}.resources.gpus_per_node": 2,
    "cluster.num_nodes": 4,
}
NEMO_OLDER: Values = {
    "grpo.adv_estimator.*": None,
    "grpo.use_leave_one_out_baseline": True,
    "data.train.dataset_name": None,
    "data.train.data_path": None,
    "data.train.input_key": None,
    "data.train.output_key": None,
    "data.dataset_name": "org/rows",
    "data.default.input_key": "question",
    "data.default.output_key": "result",
    "logger.trackio_enabled": True,
}
NEMO_PPO: Values = {
    "ppo.adv_estimator.name": "gae",
    "ppo.adv_estimator.gae_lambda": 0.5,
    "ppo.adv_estimator.gae_lambda_policy": 0.75,
    "ppo.adv_estimator.gae_lambda_value": 0.25,
    "ppo.adv_estimator.length_adaptive_alpha": None,
    "ppo.reward_scaling.source_min": 0.25,
    "ppo.reward_scaling.source_max": 1.0,
    "ppo.reward_scaling.target_min": -1.0,
    "ppo.reward_scaling.target_max": 1.0,
    "ppo.reward_shaping.stop_properly_penalty_coef": None,
    "ppo.async_ppo.enabled": True,
    "ppo.critic_ppo_epochs": 2,
    "value.megatron_cfg.enabled": False,
    "value.megatron_cfg.optimizer.lr": 0.25,
    "loss_fn.sequence_level_importance_ratios": False,
}
NEMO_PPO_MEGATRON: Values = {
    "ppo.adv_estimator.gae_lambda_policy": None,
    "ppo.adv_estimator.length_adaptive_alpha": 0.5,
    "value.megatron_cfg.enabled": True,
}
NEMO_DISTILLATION: Values = {
    "loss_fn.kl_type": "mixed",
    "loss_fn.mixed_kl_weight": 0.25,
}
NEMO_COLUMNS: Values = {
    "data.default.*": None,
    "data.train.input_key": "question",
    "data.train.output_key": "result",
}

ACTOR, ROLLOUT, MODEL = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.model",
)
CORRECTION = "algorithm.rollout_correction"
VERL: Values = {
    "*_parallel_size": 1,
    "algorithm.adv_estimator": "grpo",
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.use_kl_in_reward": True,
    "algorithm.norm_adv_by_std_in_grpo": True,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
    f"{ACTOR}.loss_scale_factor": 4,
    f"{ACTOR}.strategy": "fsdp",
    f"{ACTOR}.optim.lr_scheduler_type": "cosine",
    f"{ACTOR}.optim.num_cycles": 0.5,
    f"{ACTOR}.optim.betas": [0.5, 0.5],
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.max_model_len": 4,
    f"{ROLLOUT}.val_kwargs.n": 2,
    f"{ROLLOUT}.multi_turn.max_assistant_turns": 2,
    f"{MODEL}.custom_chat_template": "text.jinja",
    "data.seed": 1,
    "data.prompt_key": "question",
    "trainer.logger": ["wandb"],
    "trainer.project_name": "text",
    "trainer.critic_warmup": 2,
    "model_engine": None,
    "--config*": None,
    "reward_model.*": None,
    "reward.*": None,
    f"{CORRECTION}.rollout_is": "token",
    f"{CORRECTION}.rollout_is_threshold": 2.0,
    f"{CORRECTION}.rollout_rs": "seq_mean_k1",
    f"{CORRECTION}.rollout_rs_threshold": "0.5_4",
}
OVERLONG = {
    "reward_model.overlong_buffer": "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg": "reward_model.reward_kwargs",
    "reward.reward_kwargs.overlong_buffer_cfg": "reward.reward_kwargs",
}


def _overlong(section: str, beside: str) -> Values:
    parts = {"enable": True, "len": 2, "penalty_factor": 1.0}
    return {f"{section}.{key}": value for key, value in parts.items()} | {
        f"{beside}.max_resp_len": 4
    }


VERL_MEGATRON: Values = {
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": False,
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.policy_loss.loss_mode": "cispo",
    f"{ACTOR}.clip_ratio_low": None,
    f"{ACTOR}.clip_ratio_high": None,
    f"{ACTOR}.strategy": "megatron",
    f"{ACTOR}.megatron.pipeline_model_parallel_size": 2,
    **{
        f"{ACTOR}.megatron.override_transformer_config.num_layers_in_{end}_pipeline_stage": 3
        for end in ("first", "last")
    },
    f"{ACTOR}.optim.warmup_style": "cosine",
    f"{ACTOR}.optim.lr_scheduler_type": None,
    f"{ACTOR}.optim.lr_warmup_steps": None,
    "trainer.total_training_steps": 8,
    "reward_model.enable": True,
    "reward_model.model.path": "org/judge",
    f"{CORRECTION}.rollout_rs": "token",
    f"{CORRECTION}.rollout_rs_threshold": 4,
    f"{CORRECTION}.rollout_rs_threshold_lower": 0.125,
    **_overlong(*next(iter(OVERLONG.items()))),
}
VERL_SAPO: Values = {
    f"{ACTOR}.policy_loss.loss_mode": "sapo",
    f"{CORRECTION}.rollout_is_threshold": "0.5_4",
    f"{CORRECTION}.rollout_rs": None,
    "reward.reward_model.enable": True,
    "reward.reward_model.model_path": "org/judge",
    f"{ROLLOUT}.multi_turn.max_assistant_turns": None,
    f"{ROLLOUT}.multi_turn.max_turns": 3,
    **_overlong("reward.reward_kwargs.overlong_buffer_cfg", "reward.reward_kwargs"),
}
VERL_ENGINE: Values = {
    f"{ACTOR}.strategy": ...,
    "model_engine": "megatron",
    **_overlong("reward_model.reward_kwargs.overlong_buffer_cfg", "reward_model.reward_kwargs"),
}


def _custom_reward(prefix: str) -> Values:
    """Return the keys of a user's reward function."""
    return {
        f"{prefix}.path": "rewards.py",
        f"{prefix}.name": "score",
        f"{prefix}.reward_kwargs.scale": 2,
    }


ROLES = ("actor_train", "sft_train")
ROLL: Values = {
    "*_parallel_size": 1,
    "*.model_args.ulysses_size": 1,
    "*.training_args.warmup_ratio": None,
    "adv_estimator": "gae",
    "gamma": 1,
    "lambd": 0.5,
    "loss_agg_mode": "seq-mean-token-sum-norm",
    "importance_sampling": "token",
    "dual_clip_loss": True,
    "use_pg_clip_range": False,
    "target_kl": 0.5,
    "critic_warmup": 2,
    "ipo": False,
    "label_smoothing": 0.25,
    "max_ckpt_to_keep": 2,
    "postive_loss_coef": ...,
    "positive_loss_coef": 0.5,
    "system_key": "system",
    "track_with": "wandb",
    "sequence_length": None,
    "tracker_kwargs.project": "text",
    "rollout_batch_size": 64,
    "num_return_sequences_in_group": 8,
    "advantage_clip": 2.0,
    "reward_clip": 2.0,
    "pg_clip_low": 0.25,
    "pg_clip_high": 0.25,
    "train_env_manager.*": None,
    "train_infer_correction.is_weight.enabled": True,
    "train_infer_correction.is_weight.upper_bound": 2.0,
    "train_infer_correction.is_weight.weight_type": "token",
    "train_infer_correction.filters": [
        {"enabled": True, "agg_type": "geometric", "ratio_low": 0.5, "ratio_high": 2}
    ],
    "rewards.*": None,
    "rewards.a.worker_cls": "x.MathRuleRewardWorker",
    "rewards.a.tag_included": ["b"],
    "rewards.c.worker_cls": "x.MultipleChoiceBoxedRuleRewardWorker",
    "rewards.d.worker_cls": "x.CrossThinkQARuleRewardWorker",
    "rewards.d.reward_type": "soft",
    "actor_infer.strategy_args.strategy_name": "vllm",
    "actor_infer.device_mapping": "list(range(0,4))",
    "actor_infer.generating_args.stop_strings": ["a"],
    "actor_infer.strategy_args.strategy_config.max_model_len": 4,
    **{f"{role}.device_mapping": "list(range(0,4))" for role in ROLES},
    **{f"{role}.strategy_args.strategy_name": "fsdp2_train" for role in ROLES},
    **{f"{role}.model_args.lora_target": "a,b" for role in ROLES},
    **{f"{role}.model_args.lora_{part}": 2 for role in ROLES for part in ("rank", "alpha")},
    **{f"{role}.model_args.lora_dropout": 0.25 for role in ROLES},
    **{f"{role}.model_args.disable_gradient_checkpointing": True for role in ROLES},
    **{f"{role}.training_args.adam_{beta}": 0.5 for role in ROLES for beta in ("beta1", "beta2")},
    **{f"{role}.training_args.lr_scheduler_type": "cosine" for role in ROLES},
    **{f"{role}.training_args.warmup_steps": 2 for role in ROLES},
    **{f"{role}.training_args.weight_decay": 0.25 for role in ROLES},
    **{f"{role}.model_args.model_name_or_path": "org/model" for role in ROLES},
    "actor_train.data_args.file_name": ["a.jsonl"],
    "sft_train.data_args.file_name": ["a.jsonl"],
    "validation.data_args.file_name": ["a.jsonl"],
}
MEGATRON = "strategy_args.strategy_config"


def _judge(kind: str, place: str) -> Values:
    """Return the keys of a judge, and of the model at `place`."""
    return {
        "rewards.e.worker_cls": "x.LLMJudgeRewardWorker",
        "rewards.e.judge_prompt": "Qwen2.5-7B-Instruct-RLVR-prompt",
        "rewards.e.judge_model_type": kind,
        "rewards.e.judge_model_name": "text",
        "rewards.e.judge_api_url": "http://judge/v1",
        "rewards.e.generating_args.max_new_tokens": 4,
        "rewards.e.generating_args.temperature": 0.5,
        f"{place}.model_args.model_name_or_path": "org/judge",
        f"{place}.device_mapping": "list(range(0,4))",
        f"{place}.strategy_args.strategy_name": "vllm",
        f"{place}.{MEGATRON}.tensor_parallel_size": 2,
        f"{place}.{MEGATRON}.max_model_len": 4,
    }


ROLL_MEGATRON: Values = {
    **{f"{role}.strategy_args.strategy_name": "megatron_train" for role in ROLES},
    **{f"{role}.{MEGATRON}.recompute_granularity": "full" for role in ROLES},
    **{f"{role}.{MEGATRON}.use_distributed_optimizer": True for role in ROLES},
    **{f"{role}.{MEGATRON}.sequence_parallel": True for role in ROLES},
    **{f"{role}.{MEGATRON}.pipeline_model_parallel_size": 2 for role in ROLES},
    **{
        f"{role}.{MEGATRON}.additional_configs.num_layers_in_{end}_pipeline_stage": count
        for role in ROLES
        for end, count in (("first", 2), ("last", 1))
    },
    "adv_estimator": "reinforce",
    "norm_mean_type": "batch",
    "norm_std_type": "batch",
    "sequence_length": 16,
    "prompt_length": 4,
    "use_pg_clip_range": True,
    "add_token_level_kl": False,
    "use_kl_loss": True,
    "kl_loss_coef": 0.5,
    "pretrain": None,
}
ROLL_LAYOUT: Values = {
    **{key: value for key, value in ROLL_MEGATRON.items() if not key.endswith("_pipeline_stage")},
    **{f"{role}.{MEGATRON}.pipeline_model_parallel_layout": "Ett|tL" for role in ROLES},
}
ROLL_TURNS: Values = {
    "adv_estimator": "gigpo",
    "step_reward_gamma": 0.5,
    "positive_loss_coef": ...,
    "postive_loss_coef": 0.5,
    "response_length": None,
    "sequence_length": None,
    "actor_infer.generating_args.max_new_tokens": 8,
    "train_env_manager.tags": ["Room", "Lake"],
    "train_env_manager.num_groups_partition": [1, 2],
    "train_env_manager.group_size": 4,
    "val_env_manager.tags": ["Lake", "Room"],
    "val_env_manager.num_groups_partition": [3, 4],
    "custom_envs.Room.env_type": "sokoban",
    "custom_envs.Room.max_steps": 5,
    "custom_envs.Room.env_config.dim_room": [6, 6],
    "custom_envs.Room.env_config.num_boxes": 2,
    "custom_envs.Lake.env_type": "frozen_lake",
    "custom_envs.Lake.max_steps": 6,
    "custom_envs.Lake.env_config.p": 0.75,
}

TRL: Values = {
    "use_peft": True,
    "use_vllm": True,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "generation_batch_size": None,
    "num_generations": 4,
    "num_iterations": 2,
    "max_steps": 16,
    "save_steps": 8,
    "eval_steps": 8,
    "save_strategy": "steps",
    "eval_strategy": "steps",
    "optim": "adamw_torch",
    "lr_scheduler_type": "warmup_stable_decay",
    "lr_scheduler_kwargs": {"num_decay_steps": 2},
    "lora_target_modules": ["a"],
    "lora_target_parameters": ["a"],
    "load_in_4bit": True,
    "warmup_steps": 2,
    "warmup_ratio": None,
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon": 0.25,
    "epsilon_high": 0.5,
    "beta": 0.5,
    "reward_funcs": ["accuracy_reward"],
    "reward_weights": [0.5],
    "scale_rewards": "group",
    "vllm_mode": "colocate",
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_min": 0.5,
    "vllm_importance_sampling_clip_max": 4.0,
    "mask_truncated_completions": True,
    "multi_objective_aggregation": "sum_then_normalize",
    "report_to": ["wandb"],
    "project": "text",
    "top_k": 2,
    "max_tool_calling_iterations": 2,
    "vllm_max_model_length": 4,
    "reward_clip_range": [-2, 2],
    "assistant_only_loss": True,
    "completion_only_loss": None,
    "run_name": "text",
    "output_dir": "text",
    "label_smoothing": 0.25,
    "loss_weights": None,
    "save_total_limit": 2,
}
TRL_OTHER: Values = {
    "chat_template_kwargs.enable_thinking": False,
    "loss_type": "sapo",
    "generation_batch_size": 16,
    "warmup_ratio": 0.25,
    "warmup_steps": None,
    "assistant_only_loss": None,
    "completion_only_loss": True,
    "lr_scheduler_kwargs": None,
    "lr_scheduler_kwargs.num_decay_steps": 2,
}
PAIRS: Values = TRL | {"loss_type": ["sigmoid"]}

# Passes over the data where no number of steps is set; warm-up as a share of them.
TRL_PASSES: Values = {"max_steps": -1, "num_train_epochs": 2.0}
NEMO_PASSES: Values = {
    f"{section}.{key}": value
    for section in ("grpo", "ppo", "distillation", "dpo", "sft", "rm")
    for key, value in (("max_num_steps", 10**6), ("max_num_epochs", 2))
}
VERL_PASSES: Values = {"trainer.total_training_steps": None, "trainer.total_epochs": 2}
ROLL_SHARE: Values = {
    f"{section}.training_args.{key}": value
    for section in ("actor_train", "sft_train")
    for key, value in (("warmup_steps", ...), ("warmup_ratio", 0.1))
}
PROFILES: Mapping[str, Mapping[str, list[Values]]] = {
    "nemo-rl": {
        "grpo": [
            NEMO,
            NEMO | NEMO_APART,
            NEMO | NEMO_OLDER,
            NEMO | NEMO_COLUMNS,
            NEMO | NEMO_PASSES,
        ],
        "ppo": [
            NEMO | NEMO_PPO,
            NEMO | NEMO_PPO | NEMO_APART | NEMO_PPO_MEGATRON,
            NEMO | NEMO_PPO | NEMO_PASSES | {"ppo.adv_estimator.gae_lambda_policy": None},
        ],
        "distillation": [
            NEMO | NEMO_DISTILLATION,
            NEMO | NEMO_DISTILLATION | NEMO_APART,
            NEMO | NEMO_DISTILLATION | NEMO_PASSES,
        ],
        "dpo": [NEMO, NEMO | NEMO_PASSES],
        "sft": [NEMO, NEMO | NEMO_PASSES],
        "rm": [NEMO, NEMO | NEMO_PASSES],
    },
    "verl": {
        "PPO trainer": [
            VERL,
            VERL | VERL_MEGATRON,
            VERL | VERL_SAPO,
            VERL | VERL_ENGINE,
            VERL | VERL_PASSES,
            VERL | _custom_reward("custom_reward_function"),
            VERL | _custom_reward("reward.custom_reward_function"),
        ]
    },
    "roll": {
        "RLVR": [
            ROLL | _judge("api", "rewards.e"),
            ROLL | ROLL_MEGATRON | _judge("inference", "rewards.e"),
            ROLL | ROLL_TURNS | _judge("cluster", "reward_model"),
            ROLL | ROLL_SHARE,
        ],
        "DPO": [ROLL, ROLL | ROLL_MEGATRON, ROLL | ROLL_LAYOUT, ROLL | ROLL_SHARE],
        "SFT": [ROLL, ROLL | ROLL_MEGATRON, ROLL | ROLL_LAYOUT, ROLL | ROLL_SHARE],
    },
    "trl": {
        "GRPOConfig": [TRL, TRL | TRL_OTHER, TRL | TRL_PASSES],
        "RLOOConfig": [TRL],
        "DPOConfig": [PAIRS, PAIRS | {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}],
        "SFTConfig": [TRL, TRL | TRL_OTHER, TRL | TRL_PASSES],
        "RewardConfig": [TRL],
        "KTOConfig": [TRL | {"loss_type": "kto"}],
    },
}
# by peer: rows whose value no recipe shows, with the reason
EXEMPT: Mapping[str, Mapping[str, str]] = {
    "nemo-rl": {
        f"data.default.{name}": "needs a file: test_prompt_files_are_taken_over"
        for name in ("prompt_file", "system_prompt_file")
    }
}
