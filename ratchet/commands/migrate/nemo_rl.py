"""The key table of NVIDIA NeMo RL 0.4 to 0.7, for the YAML of GRPO, DPO, SFT and reward models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.commands.migrate import nemo_rl_values as to
from ratchet.commands.migrate import shared
from ratchet.commands.migrate.nemo_rl_values import DTENSOR, GENERATION, MEGATRON
from ratchet.commands.migrate.table import (
    KeyRow,
    Method,
    Peer,
    at_least_0,
    choose,
    covered,
    dropped,
    flag,
    inert,
    number,
    only_if,
    positive,
    real,
    whole,
)

MINIBATCH_NOTE = "counts answers there; here minibatches is the number of optimizer steps per batch"
EVALUATION_NOTE = "greedy accuracy on evaluation.tasks held-out tasks; 0: only before and after"

# Rows of every trainer, without the keys of its own section.
COMMON = (
    *dropped(shared.BASE_CONFIG, "--config*"),
    KeyRow("policy.model_name", "model.path"),
    KeyRow("policy.tokenizer.name", "tokenizer.path", convert=to.tokenizer),
    KeyRow(
        "policy.tokenizer.chat_template",
        "tokenizer.template",
        "the path of a .jinja file here",
        shared.template,
    ),
    KeyRow(
        "policy.optimizer.name", "optimizer.kind", convert=to.when_megatron(False, to.optimizer)
    ),
    KeyRow("policy.optimizer.kwargs.lr", "optimizer.lr", convert=to.when_megatron(False, number)),
    KeyRow(
        "policy.optimizer.kwargs.weight_decay",
        "optimizer.weight_decay",
        "on matrices only",
        to.when_megatron(False, number),
    ),
    KeyRow("policy.optimizer.kwargs.betas", "optimizer.betas", convert=to.when_megatron(False)),
    KeyRow("policy.optimizer.kwargs.eps", "optimizer.eps", convert=to.when_megatron(False, number)),
    KeyRow(
        "policy.scheduler", "optimizer.warmup_steps", convert=to.when_megatron(False, to.warmup)
    ),
    KeyRow("policy.max_grad_norm", "optimizer.max_grad_norm", convert=shared.clip_norm, null=None),
    KeyRow(f"{MEGATRON}.optimizer.lr", "optimizer.lr", convert=to.when_megatron(True, number)),
    KeyRow(
        f"{MEGATRON}.optimizer.weight_decay",
        "optimizer.weight_decay",
        "on matrices only",
        to.when_megatron(True, number),
    ),
    KeyRow(
        f"{MEGATRON}.optimizer.adam_beta1",
        "optimizer.betas",
        convert=to.when_megatron(
            True,
            shared.betas(f"{MEGATRON}.optimizer.adam_beta1", f"{MEGATRON}.optimizer.adam_beta2"),
        ),
    ),
    KeyRow(
        f"{MEGATRON}.optimizer.adam_beta2",
        "optimizer.betas",
        convert=to.when_megatron(
            True,
            shared.betas(f"{MEGATRON}.optimizer.adam_beta1", f"{MEGATRON}.optimizer.adam_beta2"),
        ),
    ),
    KeyRow(
        f"{MEGATRON}.optimizer.adam_eps", "optimizer.eps", convert=to.when_megatron(True, number)
    ),
    KeyRow(
        f"{MEGATRON}.scheduler.lr_warmup_iters",
        "optimizer.warmup_steps",
        f"{to.WARMUP_NOTE}; the learning rate rises from 0 here",
        to.when_megatron(True, to.batches),
    ),
    KeyRow(
        f"{MEGATRON}.scheduler.lr_decay_style",
        "optimizer.schedule",
        convert=to.when_megatron(
            True, choose({"constant": "constant", "linear": "linear", "cosine": "cosine"})
        ),
    ),
    KeyRow(f"{MEGATRON}.enabled", "learner.kind", convert=to.megatron_learner),
    KeyRow(
        f"{MEGATRON}.sequence_parallel",
        "learner.sequence_parallel",
        convert=to.when_megatron(True, flag),
    ),
    KeyRow(
        f"{MEGATRON}.activation_checkpointing",
        "learner.recompute",
        convert=to.when_megatron(True, choose({True: "full", False: "none"})),
    ),
    KeyRow(f"{DTENSOR}.enabled", "learner.kind", convert=to.dtensor),
    KeyRow(
        f"{DTENSOR}.sequence_parallel",
        "learner.sequence_parallel",
        convert=to.when_megatron(False, to.flag_if_distributed),
    ),
    KeyRow(
        f"{DTENSOR}.activation_checkpointing",
        "learner.activation_checkpointing",
        convert=to.when_megatron(False, flag),
    ),
    KeyRow(
        f"{DTENSOR}.cpu_offload",
        "learner.cpu_offload",
        convert=to.when_megatron(False, to.flag_if_distributed),
    ),
    KeyRow(f"{DTENSOR}.lora_cfg.dim", "lora.rank", convert=to.lora(whole)),
    KeyRow(f"{DTENSOR}.lora_cfg.alpha", "lora.alpha", convert=to.lora(real)),
    KeyRow(f"{DTENSOR}.lora_cfg.dropout", "lora.dropout", convert=to.lora(number)),
    KeyRow(
        f"{DTENSOR}.lora_cfg.target_modules", "lora.target_modules", convert=to.lora(to.targets)
    ),
    KeyRow(
        "policy.sequence_packing.train_mb_tokens",
        "learner.micro_batch_tokens",
        convert=only_if(
            lambda config: config.flag("policy.sequence_packing.enabled"),
            whole,
            "sequence_packing is off there",
        ),
    ),
    KeyRow("policy.sequence_packing.enabled", covered_by="policy.sequence_packing.train_mb_tokens"),
    KeyRow("checkpointing.save_period", "checkpoint.every", convert=whole),
    KeyRow(
        "checkpointing.keep_top_k",
        "checkpoint.keep_best",
        "the best by checkpoint.metric are kept, and the newest checkpoint.keep too",
        positive("checkpoint.keep is the number of newest checkpoints to keep"),
    ),
    KeyRow("checkpointing.checkpoint_dir", "run_dir"),
    KeyRow(
        "checkpointing.checkpoint_must_save_by", note="checkpoint.limit_s is in seconds: set it"
    ),
    KeyRow("logger.tensorboard_enabled", "logging.tensorboard", convert=flag),
    *(
        KeyRow(f"logger.{name}_enabled", "logging.sinks", convert=to.convert_project(name))
        for name in shared.TRACKERS
    ),
    KeyRow("cluster.num_nodes", "cluster", convert=to.convert_nodes),
    KeyRow("cluster.gpus_per_node", covered_by=f"{DTENSOR}.enabled"),
    *dropped("learner and generator set their accelerators", "cluster.*"),
    *dropped(
        "checkpoint.metric is eval/accuracy, or any other logged metric",
        "checkpointing.metric_name",
        "checkpointing.higher_is_better",
    ),
    *dropped(
        "the run writes model/ in Hugging Face form; `ratchet convert` converts it",
        "checkpointing.*",
    ),
    *inert(
        shared.MICRO_BATCHES,
        "policy.train_micro_batch_size",
        "policy.logprob_batch_size",
        "policy.generation_batch_size",
        "policy.dynamic_batching.*",
        "policy.logprob_chunk_size",
    ),
    *inert(shared.PACKING, "policy.sequence_packing.*", "policy.make_sequence_length_divisible_by"),
    *dropped(
        shared.PRECISION,
        "policy.precision",
        f"{GENERATION}.vllm_cfg.precision",
        f"{GENERATION}.vllm_cfg.kv_cache_dtype",
    ),
    *dropped(
        "the limits are the model's context and sampling.max_new_tokens",
        "policy.max_total_sequence_length",
        "data.max_input_seq_length",
    ),
    *inert(shared.KV_CACHE, f"{GENERATION}.vllm_cfg.gpu_memory_utilization"),
    *covered(f"{DTENSOR}.enabled", f"{DTENSOR}.*_parallel_size"),
    *covered(f"{MEGATRON}.enabled", f"{MEGATRON}.*_parallel_size"),
    KeyRow(f"{MEGATRON}.optimizer.clip_grad", note="repeats policy.max_grad_norm, which counts"),
    KeyRow(f"{DTENSOR}.lora_cfg.enabled", covered_by=f"{DTENSOR}.lora_cfg.dim"),
    KeyRow(f"{DTENSOR}.lora_cfg.match_all_linear", covered_by=f"{DTENSOR}.lora_cfg.target_modules"),
    *dropped(
        "is a detail of the adapter that has no key here",
        f"{DTENSOR}.lora_cfg.*",
        f"{MEGATRON}.peft.*",
    ),
    *dropped(
        "is a switch of the peer's engine that learners lack", f"{DTENSOR}.*", f"{MEGATRON}.*"
    ),
    *dropped(shared.NUMERICS, "policy.*"),
    KeyRow("data.train.split", "environment.train_split"),
    KeyRow("data.train.input_key", "environment.columns", convert=to.column("prompt")),
    KeyRow("data.default.input_key", "environment.columns", convert=to.column("prompt")),
    KeyRow("data.train.output_key", "environment.columns", convert=to.column("answer")),
    KeyRow("data.default.output_key", "environment.columns", convert=to.column("answer")),
    KeyRow("data.validation.data_path", "environment.test", convert=shared.as_list),
    *dropped(shared.DATA_LOADER, "data.shuffle", "data.num_workers", "data.add_*", "data.*"),
    *covered("logger.wandb_enabled", "logger.wandb.*"),
    *covered("logger.mlflow_enabled", "logger.mlflow.*"),
    *covered("logger.swanlab_enabled", "logger.swanlab.*"),
    *inert("metrics always go to metrics.jsonl and the terminal", "logger.*"),
    *dropped(
        "rewards and environments are chosen by kind (docs/rewards.md, docs/environments.md)",
        "env.*",
    ),
    *dropped(
        "rewards judge such slips, each with its weight: malformed_tool_calls, format, regex",
        "reward_penalties.*",
    ),
    *dropped("only rollouts.max_staleness and rollouts.order can be set here", "async_rl.*"),
    *inert("data pass between processes without settings", "data_plane.*"),
)


def _common(section: str) -> tuple[KeyRow, ...]:
    """Return the rows of every trainer; `section` holds the trainer's own keys (`grpo`, `dpo`)."""
    return (
        KeyRow(
            f"{section}.max_num_steps",
            "steps",
            "there max_num_epochs may end the run earlier",
            to.steps(section),
        ),
        KeyRow(f"{section}.max_num_epochs", "passes", convert=to.passes(section)),
        KeyRow(
            f"{section}.val_period", "evaluation.every", EVALUATION_NOTE, at_least_0, default=10
        ),
        KeyRow(f"{section}.seed", "seed", convert=whole, default=42),
        *dropped(
            "evaluation always runs before and after each stage here",
            f"{section}.val_at_start",
            f"{section}.val_at_end",
        ),
        *dropped(
            "evaluation.tasks is the number of held-out tasks",
            f"{section}.max_val_samples",
            f"{section}.val_*",
        ),
        *COMMON,
    )


GRPO = (
    KeyRow(
        "grpo.use_leave_one_out_baseline",
        "algorithm.kind, algorithm.advantage.scale",
        convert=to.advantage,
        default=True,
    ),
    KeyRow("grpo.normalize_rewards", covered_by="grpo.use_leave_one_out_baseline", default=True),
    KeyRow("grpo.adv_estimator.name", "algorithm.kind", convert=to.estimator),
    *covered("grpo.adv_estimator.name", "grpo.adv_estimator.*"),
    KeyRow("grpo.advantage_clip_low", "algorithm.advantage_clip", convert=to.advantage_clip),
    KeyRow("grpo.advantage_clip_high", "algorithm.advantage_clip", convert=to.advantage_clip),
    *dropped(
        "rewards judge such slips, each with its weight: malformed_tool_calls, format, regex",
        "grpo.penalize_*",
        "grpo.invalid_tool_call_*",
        "grpo.malformed_thinking_*",
    ),
    *dropped(
        "algorithm.correction.mask masks answers whose logprobs differ between sampler and learner",
        "grpo.seq_logprob_error_threshold",
    ),
    *dropped(
        "advantages have no best-at-k or pass-at-1 term",
        "grpo.use_best_at_k",
        "grpo.best_at_k_*",
        "grpo.*combined_training*",
    ),
    *dropped(
        "for groups of equal rewards set algorithm.equal_rewards or rollouts.dynamic_sampling",
        "grpo.zero_variance_prompt_filtering",
    ),
    *dropped(
        "for on-policy distillation set algorithm.teacher of a stage (docs/algorithms)",
        "on_policy_distillation.*",
        "_teachers.*",
    ),
    *inert(
        "changes how the trainer computes, not its results",
        "grpo.deduplicate_multimodal_data",
        "grpo.debug_payload_metrics",
        "grpo.calculate_advantages_on_gpu",
        "grpo.skip_reference_policy_logprobs_calculation",
    ),
    *dropped("evaluation.patience stops a run early", "grpo.stop_at_validation_*"),
    *dropped(
        "evaluation.samples is the number of attempts per held-out task",
        "grpo.num_val_generations_per_prompt",
    ),
    *dropped(
        "groups are replaced one by one here, without oversampling",
        "grpo.dynamic_sampling_oversample_ratio",
        "grpo.batch_multiplier",
    ),
    KeyRow("grpo.num_prompts_per_step", "batch_size", convert=whole, default=32),
    KeyRow("grpo.num_generations_per_prompt", "algorithm.group_size", convert=whole, default=16),
    KeyRow(
        "policy.train_global_batch_size", "algorithm.minibatches", MINIBATCH_NOTE, to.minibatches
    ),
    KeyRow("grpo.max_rollout_turns", "rollouts.max_turns", convert=whole),
    KeyRow(
        "grpo.overlong_filtering",
        "algorithm.truncated",
        convert=choose({True: "drop", False: "keep"}),
    ),
    KeyRow("grpo.use_dynamic_sampling", "rollouts.dynamic_sampling", convert=flag),
    KeyRow(
        "grpo.dynamic_sampling_max_gen_batches",
        "rollouts.max_replaced",
        "is the number of replaced groups per step over batch_size; beyond it groups are kept "
        "here, and the run stops there",
        only_if(
            lambda config: config.flag("grpo.use_dynamic_sampling"),
            whole,
            "use_dynamic_sampling is false there",
        ),
    ),
    KeyRow("grpo.reward_shaping.enabled", "algorithm.shaping", convert=to.overlong_penalty),
    KeyRow(
        "grpo.async_grpo.max_trajectory_age_steps",
        "rollouts.max_staleness",
        convert=only_if(
            lambda config: config.flag("grpo.async_grpo.enabled"), number, "async_grpo is off there"
        ),
    ),
    *covered("grpo.reward_shaping.enabled", "grpo.reward_shaping.*"),
    KeyRow("grpo.async_grpo.enabled", covered_by="grpo.async_grpo.max_trajectory_age_steps"),
    *dropped("algorithm.shaping has scale and clip", "grpo.reward_scaling.*"),
    *dropped(
        "running requests get new weights with each weight sync; generator.keep_kv keeps their KV "
        "cache",
        "grpo.async_grpo.*",
    ),
    KeyRow("loss_fn.ratio_clip_min", "algorithm.loss", convert=to.clip, default=0.2),
    KeyRow("loss_fn.ratio_clip_max", "algorithm.loss", convert=to.clip, default=0.2),
    KeyRow(
        "loss_fn.ratio_clip_c",
        "algorithm.loss.dual_clip",
        convert=only_if(
            lambda config: (
                not (config.flag("loss_fn.disable_ppo_ratio") or config.flag("loss_fn.use_cispo"))
            ),
            number,
            "only acts on the clipped ratio there",
        ),
    ),
    KeyRow(
        "loss_fn.token_level_loss",
        "algorithm.weighting",
        convert=choose({True: "token_mean", False: "sequence_mean"}),
        default=True,
    ),
    KeyRow("loss_fn.reference_policy_kl_penalty", "algorithm.kl", convert=to.kl, default=0.01),
    KeyRow(
        "loss_fn.reference_policy_kl_type",
        covered_by="loss_fn.reference_policy_kl_penalty",
        default="k3",
    ),
    KeyRow(
        "loss_fn.use_importance_sampling_correction", "algorithm.correction", convert=to.correction
    ),
    KeyRow(
        "loss_fn.force_on_policy_ratio",
        note="with minibatches=1 and epochs=1 all ratios are 1",
    ),
    KeyRow("loss_fn.positive_example_nll_weight", "algorithm.positive_nll_coef", convert=number),
    *covered(
        "loss_fn.ratio_clip_min",
        "loss_fn.disable_ppo_ratio",
        "loss_fn.use_cispo",
        "loss_fn.sequence_level_importance_ratios",
    ),
    *covered(
        "loss_fn.use_importance_sampling_correction",
        f"{to.TIS}_type",
        f"{to.TIS}_ratio",
        f"{to.TIS}_ratio_min",
    ),
    KeyRow("loss_fn.use_kl_in_reward", covered_by="loss_fn.reference_policy_kl_penalty"),
    *dropped(
        "the ratio to the sampler's policy weights the KL here, without clamps",
        "loss_fn.use_on_policy_kl_approximation",
        "loss_fn.kl_*",
    ),
    KeyRow(f"{GENERATION}.max_new_tokens", "sampling.max_new_tokens", convert=whole),
    KeyRow(f"{GENERATION}.temperature", "sampling.temperature", convert=real),
    KeyRow(f"{GENERATION}.top_p", "sampling.top_p", convert=real),
    KeyRow(f"{GENERATION}.top_k", "sampling.top_k", convert=at_least_0),
    KeyRow(f"{GENERATION}.stop_strings", "sampling.stop", convert=shared.as_list),
    KeyRow(
        f"{GENERATION}.stop_token_ids",
        note="the model's own end tokens end an answer; set others as text in sampling.stop",
    ),
    KeyRow(f"{GENERATION}.backend", "generator", convert=to.convert_generator),
    KeyRow(
        f"{GENERATION}.vllm_cfg.enforce_eager",
        note="set generator.enforce_eager, or generator.worker.enforce_eager with workers",
    ),
    *dropped("is set by other keys of generator, or has no switch", f"{GENERATION}.*"),
    KeyRow("data.train.dataset_name", "environment", note=shared.COLUMNS, convert=to.rows),
    KeyRow("data.train.data_path", "environment", note=shared.COLUMNS, convert=to.rows),
    KeyRow("data.dataset_name", "environment", note=shared.COLUMNS, convert=to.rows),
    KeyRow(
        "data.default.prompt_file",
        note="set environment.prompt to the text around a question: '{problem}\nThink first.'",
    ),
    *covered(
        f"{GENERATION}.backend",
        f"{GENERATION}.colocated.*",
        f"{GENERATION}.vllm_cfg.*_parallel_size",
        f"{GENERATION}.vllm_cfg.max_model_len",
    ),
    *_common("grpo"),
)


def _offline(section: str, note: str) -> tuple[KeyRow, ...]:
    """Return the rows of a trainer that reads a dataset without sampling (DPO, SFT, RM)."""
    return (
        KeyRow("policy.train_global_batch_size", "batch_size", convert=whole),
        KeyRow("data.train.dataset_name", "environment", note=note, convert=to.rows),
        KeyRow("data.train.data_path", "environment", note=note, convert=to.rows),
        KeyRow("data.dataset_name", "environment", note=note, convert=to.rows),
        *_common(section),
    )


DPO = (
    KeyRow(
        "dpo.reference_policy_kl_penalty", "algorithm.beta", "the beta of DPO", real, default=0.05
    ),
    KeyRow(
        "dpo.preference_average_log_probs",
        "algorithm.normalize",
        convert=choose({True: "mean", False: "sum"}),
    ),
    KeyRow("dpo.sft_loss_weight", "algorithm.sft_coef", "over preference_loss_weight", to.sft_coef),
    KeyRow(
        "dpo.preference_loss_weight",
        note="the preference loss has weight 1 here: multiply optimizer.lr by this weight",
        default=1,
    ),
    KeyRow(
        "dpo.sft_average_log_probs",
        note="the SFT loss of the chosen answers is a mean over their tokens",
    ),
    *_offline("dpo", shared.PAIR_COLUMNS),
)
SFT = (
    KeyRow(
        "sft.only_unmask_final", "algorithm.train", convert=choose({True: "last", False: "all"})
    ),
    *_offline("sft", shared.COLUMNS),
)


def _detect_method(values: Mapping[str, Any]) -> str:
    sections = {key.partition(".")[0] for key in values}
    return next((name for name in ("grpo", "dpo", "sft", "rm") if name in sections), "")


DATASET = {"environment.kind": "dataset"}
NEMO_RL = Peer(
    "nemo-rl",
    "NeMo RL",
    "0.4 to 0.7",
    (
        "policy.model_name",
        "loss_fn",
        "checkpointing",
        "cluster.gpus_per_node",
        "grpo",
        "dpo",
        "policy.generation",
    ),
    _detect_method,
    {
        "grpo": Method({"algorithm.kind": "grpo", **DATASET, "rewards": [{"kind": "math"}]}, GRPO),
        "dpo": Method({"algorithm.kind": "dpo", **DATASET}, DPO),
        "sft": Method({"algorithm.kind": "sft", **DATASET}, SFT),
        "rm": Method(
            {"algorithm.kind": "reward_model", **DATASET}, _offline("rm", shared.PAIR_COLUMNS)
        ),
    },
)
