"""The key table of NVIDIA NeMo RL: the YAML of its GRPO, DPO, SFT and reward model examples.

Keys are those of NeMo RL 0.4 to 0.7.
"""

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
    flag,
    idle,
    nothing,
    number,
    positive,
    real,
    when,
    whole,
    within,
)

ANSWERS = (
    "counted in answers there and in prompts here: minibatches is how many optimizer steps "
    "a batch is split into"
)
EVERY = "greedy accuracy on evaluation.tasks held-out tasks; 0 is only before and after"

# Rows of every trainer, without the keys of its own section.
COMMON = (
    *nothing(shared.BASE, "--config*"),
    KeyRow("policy.model_name", "model.path"),
    KeyRow(
        "policy.tokenizer.name",
        "tokenizer.path",
        how=to.tokenizer,
    ),
    KeyRow(
        "policy.tokenizer.chat_template",
        "tokenizer.template",
        "the path of a .jinja file here",
        shared.template,
    ),
    KeyRow("policy.optimizer.name", "optimizer.kind", how=to.when_megatron(False, to.optimizer)),
    KeyRow("policy.optimizer.kwargs.lr", "optimizer.lr", how=to.when_megatron(False, number)),
    KeyRow(
        "policy.optimizer.kwargs.weight_decay",
        "optimizer.weight_decay",
        "on matrices only",
        to.when_megatron(False, number),
    ),
    KeyRow("policy.optimizer.kwargs.betas", "optimizer.betas", how=to.when_megatron(False)),
    KeyRow("policy.optimizer.kwargs.eps", "optimizer.eps", how=to.when_megatron(False, number)),
    KeyRow("policy.scheduler", "optimizer.warmup_steps", how=to.when_megatron(False, to.warmup)),
    KeyRow("policy.max_grad_norm", "optimizer.max_grad_norm", how=shared.norm, null=None),
    KeyRow(f"{MEGATRON}.optimizer.lr", "optimizer.lr", how=to.when_megatron(True, number)),
    KeyRow(
        f"{MEGATRON}.optimizer.weight_decay",
        "optimizer.weight_decay",
        "on matrices only",
        to.when_megatron(True, number),
    ),
    KeyRow(
        f"{MEGATRON}.optimizer.adam_beta1",
        "optimizer.betas",
        how=to.when_megatron(
            True,
            shared.betas(f"{MEGATRON}.optimizer.adam_beta1", f"{MEGATRON}.optimizer.adam_beta2"),
        ),
    ),
    KeyRow(
        f"{MEGATRON}.optimizer.adam_beta2",
        "optimizer.betas",
        how=to.when_megatron(
            True,
            shared.betas(f"{MEGATRON}.optimizer.adam_beta1", f"{MEGATRON}.optimizer.adam_beta2"),
        ),
    ),
    KeyRow(f"{MEGATRON}.optimizer.adam_eps", "optimizer.eps", how=to.when_megatron(True, number)),
    KeyRow(
        f"{MEGATRON}.scheduler.lr_warmup_iters",
        "optimizer.warmup_steps",
        f"{to.RISES}; the rate rises from 0 here",
        to.when_megatron(True, to.batches),
    ),
    KeyRow(
        f"{MEGATRON}.scheduler.lr_decay_style",
        "optimizer.schedule",
        how=to.when_megatron(
            True, choose({"constant": "constant", "linear": "linear", "cosine": "cosine"})
        ),
    ),
    KeyRow(f"{MEGATRON}.enabled", "learner.kind", how=to.megatron_learner),
    KeyRow(
        f"{MEGATRON}.sequence_parallel",
        "learner.sequence_parallel",
        how=to.when_megatron(True, flag),
    ),
    KeyRow(
        f"{MEGATRON}.activation_checkpointing",
        "learner.recompute",
        how=to.when_megatron(True, choose({True: "full", False: "none"})),
    ),
    KeyRow(f"{DTENSOR}.enabled", "learner.kind", how=to.dtensor),
    KeyRow(
        f"{DTENSOR}.sequence_parallel",
        "learner.sequence_parallel",
        how=to.when_megatron(False, to.spread),
    ),
    KeyRow(
        f"{DTENSOR}.activation_checkpointing",
        "learner.activation_checkpointing",
        how=to.when_megatron(False, flag),
    ),
    KeyRow(
        f"{DTENSOR}.cpu_offload",
        "learner.cpu_offload",
        how=to.when_megatron(False, to.spread),
    ),
    KeyRow(f"{DTENSOR}.lora_cfg.dim", "lora.rank", how=to.lora(whole)),
    KeyRow(f"{DTENSOR}.lora_cfg.alpha", "lora.alpha", how=to.lora(real)),
    KeyRow(f"{DTENSOR}.lora_cfg.dropout", "lora.dropout", how=to.lora(number)),
    KeyRow(f"{DTENSOR}.lora_cfg.target_modules", "lora.target_modules", how=to.lora(to.targets)),
    KeyRow(
        "policy.sequence_packing.train_mb_tokens",
        "learner.micro_batch_tokens",
        how=when(
            lambda config: config.flag("policy.sequence_packing.enabled"),
            whole,
            "sequence_packing is off there",
        ),
    ),
    KeyRow("policy.sequence_packing.enabled", within="policy.sequence_packing.train_mb_tokens"),
    KeyRow("checkpointing.save_period", "checkpoint.every", how=whole),
    KeyRow(
        "checkpointing.keep_top_k",
        "checkpoint.keep_best",
        "the best by checkpoint.metric; the newest checkpoint.keep stay too",
        positive("the newest are kept, as many as checkpoint.keep says"),
    ),
    KeyRow("checkpointing.checkpoint_dir", "run_dir"),
    KeyRow(
        "checkpointing.checkpoint_must_save_by", note="checkpoint.limit_s is in seconds: set it"
    ),
    KeyRow("logger.tensorboard_enabled", "logging.tensorboard", how=flag),
    *(
        KeyRow(f"logger.{name}_enabled", "logging.sinks", how=to.convert_project(name))
        for name in shared.TRACKERS
    ),
    KeyRow("cluster.num_nodes", "cluster", how=to.convert_nodes),
    KeyRow("cluster.gpus_per_node", within=f"{DTENSOR}.enabled"),
    *nothing("accelerators are shared out by learner and generator", "cluster.*"),
    *nothing(
        "a metric here is eval/accuracy, or any other that is logged: checkpoint.metric",
        "checkpointing.metric_name",
        "checkpointing.higher_is_better",
    ),
    *nothing(
        "the run leaves model/ in Hugging Face form; `ratchet convert` makes other forms",
        "checkpointing.*",
    ),
    *idle(
        shared.MICRO,
        "policy.train_micro_batch_size",
        "policy.logprob_batch_size",
        "policy.generation_batch_size",
        "policy.dynamic_batching.*",
        "policy.logprob_chunk_size",
    ),
    *idle(shared.PACKED, "policy.sequence_packing.*", "policy.make_sequence_length_divisible_by"),
    *nothing(
        shared.FLOAT32,
        "policy.precision",
        f"{GENERATION}.vllm_cfg.precision",
        f"{GENERATION}.vllm_cfg.kv_cache_dtype",
    ),
    *nothing(
        "the model's context is the bound, and sampling.max_new_tokens bounds an answer",
        "policy.max_total_sequence_length",
        "data.max_input_seq_length",
    ),
    *idle(shared.CACHE, f"{GENERATION}.vllm_cfg.gpu_memory_utilization"),
    *within(f"{DTENSOR}.enabled", f"{DTENSOR}.*_parallel_size"),
    *within(f"{MEGATRON}.enabled", f"{MEGATRON}.*_parallel_size"),
    KeyRow(f"{MEGATRON}.optimizer.clip_grad", note="policy.max_grad_norm counts, which it repeats"),
    KeyRow(f"{DTENSOR}.lora_cfg.enabled", within=f"{DTENSOR}.lora_cfg.dim"),
    KeyRow(f"{DTENSOR}.lora_cfg.match_all_linear", within=f"{DTENSOR}.lora_cfg.target_modules"),
    *nothing(
        "is an adapter's own way of doing it, without a key",
        f"{DTENSOR}.lora_cfg.*",
        f"{MEGATRON}.peft.*",
    ),
    *nothing(
        "a switch of their engine, which the learner has not", f"{DTENSOR}.*", f"{MEGATRON}.*"
    ),
    *nothing(shared.NUMERICS, "policy.*"),
    KeyRow("data.train.split", "environment.train_split"),
    KeyRow("data.train.input_key", "environment.columns", how=to.column("prompt")),
    KeyRow("data.default.input_key", "environment.columns", how=to.column("prompt")),
    KeyRow("data.train.output_key", "environment.columns", how=to.column("answer")),
    KeyRow("data.default.output_key", "environment.columns", how=to.column("answer")),
    KeyRow("data.validation.data_path", "environment.test", how=shared.listed),
    *nothing(shared.LOADER, "data.shuffle", "data.num_workers", "data.add_*", "data.*"),
    *within("logger.wandb_enabled", "logger.wandb.*"),
    *within("logger.mlflow_enabled", "logger.mlflow.*"),
    *within("logger.swanlab_enabled", "logger.swanlab.*"),
    *idle("metrics go to metrics.jsonl and the terminal of themselves", "logger.*"),
    *nothing(
        "rewards are chosen by kind (docs/rewards.md), environments too (docs/environments.md)",
        "env.*",
    ),
    *nothing(
        "rewards judge such slips, each with its weight: malformed_tool_calls, format, regex",
        "reward_penalties.*",
    ),
    *nothing(
        "rollouts has max_staleness and order, and what is under way is the scheduler's own",
        "async_rl.*",
    ),
    *idle("columns pass between processes of themselves", "data_plane.*"),
)


def _common(section: str) -> tuple[KeyRow, ...]:
    """Return the rows of every trainer; `section` holds the trainer's own keys (`grpo`, `dpo`)."""
    return (
        KeyRow(
            f"{section}.max_num_steps",
            "steps",
            "or fewer there, where max_num_epochs ends before",
            positive(shared.EPOCHS),
        ),
        KeyRow(f"{section}.max_num_epochs", note=shared.EPOCHS),
        KeyRow(f"{section}.val_period", "evaluation.every", EVERY, at_least_0, default=10),
        KeyRow(f"{section}.seed", "seed", how=whole, default=42),
        *nothing(
            "is before and after each stage here (evaluation)",
            f"{section}.val_at_start",
            f"{section}.val_at_end",
        ),
        *nothing(
            "evaluation.tasks says how many held-out tasks",
            f"{section}.max_val_samples",
            f"{section}.val_*",
        ),
        *COMMON,
    )


GRPO = (
    KeyRow(
        "grpo.use_leave_one_out_baseline",
        "algorithm.kind, algorithm.advantage.scale",
        how=to.advantage,
        default=True,
    ),
    KeyRow("grpo.normalize_rewards", within="grpo.use_leave_one_out_baseline", default=True),
    KeyRow("grpo.adv_estimator.name", "algorithm.kind", how=to.estimator),
    *within("grpo.adv_estimator.name", "grpo.adv_estimator.*"),
    KeyRow("grpo.advantage_clip_low", "algorithm.advantage_clip", how=to.advantage_clip),
    KeyRow("grpo.advantage_clip_high", "algorithm.advantage_clip", how=to.advantage_clip),
    *nothing(
        "rewards judge such slips, each with its weight: malformed_tool_calls, format, regex",
        "grpo.penalize_*",
        "grpo.invalid_tool_call_*",
        "grpo.malformed_thinking_*",
    ),
    *nothing(
        "answers that sampler and learner see too differently leave by algorithm.correction.mask",
        "grpo.seq_logprob_error_threshold",
    ),
    *nothing(
        "advantages have no best-at-k or pass-at-1 part",
        "grpo.use_best_at_k",
        "grpo.best_at_k_*",
        "grpo.*combined_training*",
    ),
    *nothing(
        "groups of equal rewards: algorithm.equal_rewards, rollouts.dynamic_sampling",
        "grpo.zero_variance_prompt_filtering",
    ),
    *nothing(
        "a teacher is algorithm.teacher, one for each stage (docs/algorithms)",
        "on_policy_distillation.*",
        "_teachers.*",
    ),
    *idle(
        "how the trainer computes it, not what",
        "grpo.deduplicate_multimodal_data",
        "grpo.debug_payload_metrics",
        "grpo.calculate_advantages_on_gpu",
        "grpo.skip_reference_policy_logprobs_calculation",
    ),
    *nothing("a run ends with its steps: sentinels stop it before", "grpo.stop_at_validation_*"),
    *nothing(
        "evaluation.samples says how many attempts a held-out task has",
        "grpo.num_val_generations_per_prompt",
    ),
    KeyRow(
        "grpo.dynamic_sampling_oversample_ratio",
        note="groups are replaced one by one here: no more are begun than needed",
    ),
    KeyRow("grpo.num_prompts_per_step", "batch_size", how=whole, default=32),
    KeyRow("grpo.num_generations_per_prompt", "algorithm.group_size", how=whole, default=16),
    KeyRow("policy.train_global_batch_size", "algorithm.minibatches", ANSWERS, to.minibatches),
    KeyRow("grpo.max_rollout_turns", "rollouts.max_turns", how=whole),
    KeyRow(
        "grpo.overlong_filtering", "algorithm.truncated", how=choose({True: "drop", False: "keep"})
    ),
    KeyRow("grpo.use_dynamic_sampling", "rollouts.dynamic_sampling", how=flag),
    KeyRow(
        "grpo.dynamic_sampling_max_gen_batches",
        "rollouts.max_replaced",
        "groups replaced a step over batch_size; then they stay, where there the run stops",
        when(
            lambda config: config.flag("grpo.use_dynamic_sampling"),
            whole,
            "use_dynamic_sampling is false there",
        ),
    ),
    KeyRow(
        "grpo.batch_multiplier",
        note="groups are replaced one by one here: no more are begun than needed",
    ),
    KeyRow("grpo.reward_shaping.enabled", "algorithm.shaping", how=to.overlong),
    KeyRow(
        "grpo.async_grpo.max_trajectory_age_steps",
        "rollouts.max_staleness",
        how=when(
            lambda config: config.flag("grpo.async_grpo.enabled"), number, "async_grpo is off there"
        ),
    ),
    *within("grpo.reward_shaping.enabled", "grpo.reward_shaping.*"),
    KeyRow("grpo.async_grpo.enabled", within="grpo.async_grpo.max_trajectory_age_steps"),
    *nothing("algorithm.shaping has scale and clip", "grpo.reward_scaling.*"),
    *nothing(
        "weights arrive at running requests when they are pushed; generator.keep_kv keeps their "
        "old cache",
        "grpo.async_grpo.*",
    ),
    KeyRow("loss_fn.ratio_clip_min", "algorithm.loss", how=to.clip, default=0.2),
    KeyRow("loss_fn.ratio_clip_max", "algorithm.loss", how=to.clip, default=0.2),
    KeyRow(
        "loss_fn.ratio_clip_c",
        "algorithm.loss.dual_clip",
        how=when(
            lambda config: (
                not (config.flag("loss_fn.disable_ppo_ratio") or config.flag("loss_fn.use_cispo"))
            ),
            number,
            "acts on the clipped ratio alone there",
        ),
    ),
    KeyRow(
        "loss_fn.token_level_loss",
        "algorithm.weighting",
        how=choose({True: "token_mean", False: "sequence_mean"}),
        default=True,
    ),
    KeyRow("loss_fn.reference_policy_kl_penalty", "algorithm.kl", how=to.kl, default=0.01),
    KeyRow(
        "loss_fn.reference_policy_kl_type",
        within="loss_fn.reference_policy_kl_penalty",
        default="k3",
    ),
    KeyRow("loss_fn.use_importance_sampling_correction", "algorithm.correction", how=to.correction),
    KeyRow(
        "loss_fn.force_on_policy_ratio",
        note="with minibatches and epochs of 1 all ratios are 1, and nothing is computed twice",
    ),
    KeyRow("loss_fn.positive_example_nll_weight", "algorithm.positive_nll_coef", how=number),
    *within(
        "loss_fn.ratio_clip_min",
        "loss_fn.disable_ppo_ratio",
        "loss_fn.use_cispo",
        "loss_fn.sequence_level_importance_ratios",
    ),
    *within(
        "loss_fn.use_importance_sampling_correction",
        f"{to.TIS}_type",
        f"{to.TIS}_ratio",
        f"{to.TIS}_ratio_min",
    ),
    KeyRow("loss_fn.use_kl_in_reward", within="loss_fn.reference_policy_kl_penalty"),
    *nothing(
        "the ratio to the sampler's policy weighs the KL here, without clamps",
        "loss_fn.use_on_policy_kl_approximation",
        "loss_fn.kl_*",
    ),
    KeyRow(f"{GENERATION}.max_new_tokens", "sampling.max_new_tokens", how=whole),
    KeyRow(f"{GENERATION}.temperature", "sampling.temperature", how=real),
    KeyRow(f"{GENERATION}.top_p", "sampling.top_p", how=real),
    KeyRow(f"{GENERATION}.top_k", "sampling.top_k", how=at_least_0),
    KeyRow(f"{GENERATION}.stop_strings", "sampling.stop", how=shared.listed),
    KeyRow(
        f"{GENERATION}.stop_token_ids",
        note="a model's own end tokens end an answer; others as text in sampling.stop",
    ),
    KeyRow(f"{GENERATION}.backend", "generator", how=to.convert_generator),
    KeyRow(
        f"{GENERATION}.vllm_cfg.enforce_eager",
        note="generator.enforce_eager, or generator.worker.enforce_eager where workers hold it",
    ),
    *nothing("counted in generator, or without a switch", f"{GENERATION}.*"),
    KeyRow("data.train.dataset_name", "environment", note=shared.ROWS, how=to.rows),
    KeyRow("data.train.data_path", "environment", note=shared.ROWS, how=to.rows),
    KeyRow("data.dataset_name", "environment", note=shared.ROWS, how=to.rows),
    KeyRow(
        "data.default.prompt_file",
        note="environment.prompt is the text around a question: '{problem}\nThink first.'",
    ),
    *within(
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
        KeyRow("policy.train_global_batch_size", "batch_size", how=whole),
        KeyRow("data.train.dataset_name", "environment", note=note, how=to.rows),
        KeyRow("data.train.data_path", "environment", note=note, how=to.rows),
        KeyRow("data.dataset_name", "environment", note=note, how=to.rows),
        *_common(section),
    )


DPO = (
    KeyRow(
        "dpo.reference_policy_kl_penalty", "algorithm.beta", "the beta of DPO", real, default=0.05
    ),
    KeyRow(
        "dpo.preference_average_log_probs",
        "algorithm.normalize",
        how=choose({True: "mean", False: "sum"}),
    ),
    KeyRow(
        "dpo.sft_loss_weight",
        "algorithm.sft_coef",
        "over preference_loss_weight",
        to.sft_coef,
    ),
    KeyRow(
        "dpo.preference_loss_weight",
        note="the loss has weight 1 here, and sft_coef is over it: scale optimizer.lr by it",
        default=1,
    ),
    KeyRow(
        "dpo.sft_average_log_probs",
        note="the likelihood of the chosen answers is a mean over their tokens",
    ),
    *_offline("dpo", shared.PAIRS),
)
SFT = (
    KeyRow("sft.only_unmask_final", "algorithm.train", how=choose({True: "last", False: "all"})),
    *_offline("sft", shared.ROWS),
)


def _method(values: Mapping[str, Any]) -> str:
    sections = {key.partition(".")[0] for key in values}
    return next((name for name in ("grpo", "dpo", "sft", "rm") if name in sections), "")


ROWS = {"environment.kind": "dataset"}
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
    _method,
    {
        "grpo": Method({"algorithm.kind": "grpo", **ROWS, "rewards": [{"kind": "math"}]}, GRPO),
        "dpo": Method({"algorithm.kind": "dpo", **ROWS}, DPO),
        "sft": Method({"algorithm.kind": "sft", **ROWS}, SFT),
        "rm": Method({"algorithm.kind": "reward_model", **ROWS}, _offline("rm", shared.PAIRS)),
    },
)
