"""The key table of verl 0.5 to 0.8, for the YAML of its trainer or a shell script with Hydra
overrides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ratchet.commands.migrate import shared
from ratchet.commands.migrate import verl_values as to
from ratchet.commands.migrate.other_tasks import explain_unsupported_verl_task
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
    positive,
    real,
    rows_covered_by,
    whole,
)
from ratchet.commands.migrate.verl_values import ACTOR, ARR, CORRECTION, MODEL, ROLLOUT

DUAL_CLIP_NOTE = "dual clip is on by default there (3), off here (null)"
EVERY_NOTE = "the value -1 means never there, and 0 means only at the end here"

# Keys of verl that concern the algorithm: most map to the recipe's `algorithm` section.
ALGORITHM = (
    KeyRow("algorithm.adv_estimator", "algorithm.kind", convert=to.choose_estimator, default="gae"),
    KeyRow(
        f"{ACTOR}.policy_loss.loss_mode",
        "algorithm.loss.kind",
        convert=to.loss_mode,
        default="vanilla",
    ),
    KeyRow(f"{ACTOR}.clip_ratio", covered_by=f"{ACTOR}.policy_loss.loss_mode", default=0.2),
    KeyRow(f"{ACTOR}.clip_ratio_low", covered_by=f"{ACTOR}.policy_loss.loss_mode"),
    KeyRow(f"{ACTOR}.clip_ratio_high", covered_by=f"{ACTOR}.policy_loss.loss_mode"),
    KeyRow(f"{ACTOR}.tau_pos", covered_by=f"{ACTOR}.policy_loss.loss_mode", default=1.0),
    KeyRow(f"{ACTOR}.tau_neg", covered_by=f"{ACTOR}.policy_loss.loss_mode", default=1.05),
    KeyRow(f"{ACTOR}.loss_scale_factor", covered_by=f"{ACTOR}.loss_agg_mode"),
    KeyRow(
        f"{ACTOR}.clip_ratio_c",
        "algorithm.loss.dual_clip",
        DUAL_CLIP_NOTE,
        only_if(
            lambda config: config[f"{ACTOR}.policy_loss.loss_mode"] == "vanilla",
            number,
            "it acts only with loss_mode=vanilla there",
        ),
        default=3.0,
    ),
    KeyRow(
        f"{ACTOR}.loss_agg_mode",
        "algorithm.weighting",
        convert=to.aggregation,
        default="token-mean",
    ),
    KeyRow(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coef", convert=real),
    KeyRow(f"{ACTOR}.use_kl_loss", "algorithm.kl", convert=to.kl_loss, default=False),
    KeyRow(f"{ACTOR}.kl_loss_coef", covered_by=f"{ACTOR}.use_kl_loss", default=0.001),
    KeyRow(f"{ACTOR}.kl_loss_type", covered_by=f"{ACTOR}.use_kl_loss", default="low_var_kl"),
    KeyRow(
        f"{ACTOR}.ppo_mini_batch_size", "algorithm.minibatches", convert=to.minibatches, default=256
    ),
    KeyRow(f"{ACTOR}.ppo_epochs", "algorithm.epochs", convert=whole, default=1),
    KeyRow(
        "algorithm.gamma",
        "algorithm.advantage.gamma",
        convert=only_if(to.uses_gae, real, "only gae reads it there"),
        default=1.0,
    ),
    KeyRow(
        "algorithm.lam",
        "algorithm.advantage.lam",
        convert=only_if(to.uses_gae, real, "only gae reads it there"),
        default=1.0,
    ),
    KeyRow(
        "algorithm.norm_adv_by_std_in_grpo",
        "algorithm.advantage.scale",
        convert=only_if(
            to.uses_grpo, choose({True: "std", False: "none"}), "only grpo reads it there"
        ),
    ),
    KeyRow("algorithm.use_kl_in_reward", "algorithm.kl", convert=to.kl_reward, default=False),
    KeyRow("algorithm.kl_ctrl.kl_coef", covered_by="algorithm.use_kl_in_reward", default=0.001),
    KeyRow("algorithm.kl_ctrl.type", covered_by="algorithm.use_kl_in_reward", default="fixed"),
    KeyRow("algorithm.kl_ctrl.target_kl", covered_by="algorithm.use_kl_in_reward", default=0.1),
    KeyRow(
        "algorithm.kl_ctrl.horizon", note="algorithm.kl.rate is the speed of the adaptation here"
    ),
    KeyRow(
        "algorithm.kl_penalty",
        note="the KL penalty in the reward is always k1, the only one with the gradient of a "
        "divergence (algorithm.kl.place)",
    ),
    KeyRow(
        "algorithm.filter_groups.enable",
        "rollouts.dynamic_sampling",
        "groups of equal rewards are replaced here, groups of equal filter_groups.metric there",
        flag,
    ),
    KeyRow(
        "algorithm.filter_groups.max_num_gen_batches",
        "rollouts.max_replaced",
        "max_replaced is the number of replaced groups per step over batch_size; beyond it groups "
        "are kept here, and the run stops there",
        only_if(
            lambda config: config.flag("algorithm.filter_groups.enable"),
            to.max_replaced,
            "it is off there",
        ),
    ),
    KeyRow(f"{CORRECTION}.rollout_is", "algorithm.correction.weight", convert=to.weight),
    KeyRow(
        f"{CORRECTION}.rollout_is_threshold", covered_by=f"{CORRECTION}.rollout_is", default=2.0
    ),
    KeyRow(f"{CORRECTION}.rollout_rs", "algorithm.correction.mask", convert=to.mask),
    *rows_covered_by(
        f"{CORRECTION}.rollout_rs",
        f"{CORRECTION}.rollout_rs_threshold",
        f"{CORRECTION}.rollout_rs_threshold_lower",
    ),
    KeyRow(
        f"{CORRECTION}.bypass_mode",
        note="the old policy's logprobs are always computed here, and the correction is decoupled "
        "from the clip",
    ),
    *dropped(
        "algorithm.correction only has a weight and a mask, each with bounds",
        f"{CORRECTION}.*",
    ),
    # The penalty for overlong answers can be in any of three sections.
    *(
        row
        for section, length in (
            ("reward_model.overlong_buffer", "reward_model.overlong_buffer.max_resp_len"),
            (
                "reward_model.reward_kwargs.overlong_buffer_cfg",
                "reward_model.reward_kwargs.max_resp_len",
            ),
            ("reward.reward_kwargs.overlong_buffer_cfg", "reward.reward_kwargs.max_resp_len"),
        )
        for row in (
            KeyRow(
                f"{section}.enable",
                "algorithm.shaping",
                convert=to.overlong_penalty(section, length),
            ),
            KeyRow(f"{section}.log", note="the metrics contain the penalty", inert=True),
            *rows_covered_by(
                f"{section}.enable", f"{section}.len", f"{section}.penalty_factor", length
            ),
        )
    ),
    KeyRow(
        "critic.optim.lr",
        "algorithm.critic.lr",
        convert=only_if(to.uses_gae, number, "only gae has a critic"),
        default=1e-5,
    ),
    KeyRow(
        "critic.cliprange_value",
        "algorithm.critic.value_clip",
        convert=only_if(to.uses_gae, number, "only gae has a critic"),
        default=0.5,
    ),
    KeyRow(
        "trainer.critic_warmup",
        "algorithm.critic.warmup_steps",
        convert=only_if(to.uses_gae, whole, "only gae has a critic"),
    ),
    *dropped(
        "the critic is a copy of the policy with a scalar head; of its settings only the learning "
        "rate differs from the policy's",
        "critic.*",
    ),
    *dropped(
        "algorithm.loss has none of these",
        f"{ACTOR}.policy_loss.*",
        "algorithm.use_pf_ppo",
        "algorithm.pf_ppo.*",
        "algorithm.filter_groups.metric",
    ),
)


def custom_reward_rows(prefix: str) -> Iterator[KeyRow]:
    """Yield the rows of a user's reward function, whose keys begin with `prefix`."""
    path = f"{prefix}.path"
    yield KeyRow(path, "rewards", convert=to.custom_reward(prefix))
    yield from rows_covered_by(path, f"{prefix}.name", f"{prefix}.reward_kwargs.*")


# Keys of verl that concern the run: data, sampling, model, optimizer, generator and rewards.
RUN = (
    KeyRow("data.train_batch_size", "batch_size", convert=whole, default=1024),
    KeyRow(f"{ROLLOUT}.n", "algorithm.group_size", convert=whole, default=1),
    KeyRow("data.max_response_length", "sampling.max_new_tokens", convert=whole, default=512),
    KeyRow(f"{ROLLOUT}.temperature", "sampling.temperature", convert=real, default=1.0),
    KeyRow(f"{ROLLOUT}.top_p", "sampling.top_p", convert=real),
    KeyRow(f"{ROLLOUT}.top_k", "sampling.top_k", convert=at_least_0),
    KeyRow("data.train_files", "environment.train", convert=to.files),
    KeyRow("data.val_files", "environment.test", convert=shared.as_list),
    KeyRow(f"{MODEL}.path", "model.path", convert=shared.as_text),
    KeyRow(f"{MODEL}.trust_remote_code", "model.trust_remote_code", convert=flag),
    KeyRow(
        f"{MODEL}.custom_chat_template",
        "tokenizer.template",
        "tokenizer.template is the path of a .jinja file here",
        shared.template,
    ),
    KeyRow(
        f"{MODEL}.enable_gradient_checkpointing",
        "learner.activation_checkpointing",
        convert=only_if(
            to.is_not_megatron, flag, "learner.recompute is attention or full with megatron"
        ),
        default=True,
    ),
    KeyRow(f"{MODEL}.lora_rank", "lora.rank", convert=positive("it is 0 there: no adapter")),
    KeyRow(
        f"{MODEL}.lora_alpha",
        "lora.alpha",
        convert=only_if(to.uses_lora, real, "lora_rank is 0 there"),
        default=16,
    ),
    KeyRow(
        f"{MODEL}.target_modules",
        "lora.target_modules",
        convert=only_if(to.uses_lora, None, "lora_rank is 0 there"),
    ),
    KeyRow(f"{ACTOR}.optim.lr", "optimizer.lr", convert=number, default=1e-6),
    KeyRow(
        f"{ACTOR}.optim.lr_warmup_steps_ratio",
        "optimizer.warmup_steps, optimizer.warmup_share",
        convert=to.warmup_ratio,
    ),
    KeyRow(f"{ACTOR}.optim.lr_warmup_steps", "optimizer.warmup_steps", convert=to.warmup),
    KeyRow(f"{ACTOR}.optim.warmup_style", "optimizer.schedule", convert=to.schedule),
    KeyRow(f"{ACTOR}.optim.lr_scheduler_type", "optimizer.schedule", convert=to.schedule),
    KeyRow(f"{ACTOR}.optim.min_lr_ratio", "optimizer.min_lr_ratio", convert=number),
    KeyRow(f"{ACTOR}.optim.num_cycles", covered_by=f"{ACTOR}.optim.lr_scheduler_type"),
    KeyRow(f"{ACTOR}.optim.betas", "optimizer.betas", convert=to.betas, default=[0.9, 0.999]),
    KeyRow(
        f"{ACTOR}.optim.weight_decay",
        "optimizer.weight_decay",
        shared.WEIGHT_DECAY,
        number,
        default=0.01,
    ),
    KeyRow(f"{ACTOR}.grad_clip", "optimizer.max_grad_norm", convert=number),
    KeyRow("trainer.total_training_steps", "steps", convert=whole),
    KeyRow(
        "trainer.total_epochs",
        "passes",
        "rows that fill no batch are left out of each pass there",
        to.passes,
        default=30,
    ),
    KeyRow("trainer.save_freq", "checkpoint.every", EVERY_NOTE, at_least_0, default=-1),
    KeyRow("trainer.max_actor_ckpt_to_keep", "checkpoint.keep", convert=whole),
    KeyRow(
        "trainer.test_freq",
        "evaluation.every",
        f"an evaluation measures greedy accuracy on held-out tasks; {EVERY_NOTE}",
        at_least_0,
        default=-1,
    ),
    KeyRow(
        f"{ROLLOUT}.val_kwargs.n",
        "evaluation.samples",
        "these are sampled attempts beside the greedy one here",
        to.samples,
    ),
    KeyRow(
        f"{ROLLOUT}.val_kwargs.temperature",
        "evaluation.temperature",
        convert=to.eval_temperature,
    ),
    KeyRow("trainer.experiment_name", "name", convert=shared.run_name),
    KeyRow(
        "trainer.logger",
        "logging.sinks",
        convert=lambda value, config: shared.sinks(value, config["trainer.project_name"]),
    ),
    KeyRow("trainer.default_local_dir", "run_dir", convert=shared.as_text),
    KeyRow("data.seed", "seed", convert=whole),
    KeyRow("data.prompt_key", covered_by="data.train_files", default="prompt"),
    KeyRow(f"{ACTOR}.strategy", "learner", convert=to.learner, default="fsdp"),
    KeyRow(
        f"{ACTOR}.fsdp_config.param_offload",
        "learner.cpu_offload",
        convert=only_if(to.is_distributed, flag, "learner.kind=dtensor alone has cpu_offload"),
    ),
    KeyRow(
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        "learner.micro_batch_tokens",
        convert=only_if(
            lambda config: config.flag(f"{ACTOR}.use_dynamic_bsz"),
            whole,
            "use_dynamic_bsz is false there",
        ),
    ),
    *(
        KeyRow(
            f"{ACTOR}.megatron.override_transformer_config.num_layers_in_{end}_pipeline_stage",
            f"learner.{end}_stage_layers",
            convert=only_if(
                lambda config: (
                    to.engine(config) == "megatron"
                    and config.whole(f"{ACTOR}.megatron.pipeline_model_parallel_size", 1) > 1
                ),
                whole,
                "no Megatron pipeline of several ranks trains there",
            ),
        )
        for end in ("first", "last")
    ),
    KeyRow(f"{ROLLOUT}.name", "generator", convert=to.generator, default="vllm"),
    KeyRow(f"{ROLLOUT}.tensor_model_parallel_size", covered_by=f"{ROLLOUT}.name", default=2),
    KeyRow(f"{ROLLOUT}.multi_turn.max_assistant_turns", "rollouts.max_turns", convert=whole),
    KeyRow(f"{ROLLOUT}.multi_turn.max_turns", "rollouts.max_turns", convert=whole),
    KeyRow("trainer.n_gpus_per_node", covered_by=f"{ACTOR}.strategy", default=8),
    KeyRow("trainer.nnodes", "cluster", convert=to.nodes, default=1),
    KeyRow("reward_model.enable", "rewards", convert=to.reward_model("reward_model.model.path")),
    KeyRow("reward_model.model.path", covered_by="reward_model.enable"),
    KeyRow(
        "reward.reward_model.enable",
        "rewards",
        convert=to.reward_model("reward.reward_model.model_path"),
    ),
    KeyRow("reward.reward_model.model_path", covered_by="reward.reward_model.enable"),
    *custom_reward_rows("custom_reward_function"),
    *custom_reward_rows("reward.custom_reward_function"),
    KeyRow(
        "data.apply_chat_template_kwargs.*",
        "tokenizer.chat_template_kwargs",
        convert=shared.collect_keys("data.apply_chat_template_kwargs."),
    ),
    *dropped(
        "rewards are chosen by kind here; the recipe has math, which corresponds to verl's rewards "
        "for mathematics",
        "reward_model.*",
        "reward.*",
        "reward_manager.*",
        "data.reward_fn_key",
    ),
)

# Keys of verl without a counterpart of their own, each group with the reason.
DROPPED_ROWS = (
    *dropped(shared.BASE_CONFIG, "--config*", "*@*"),
    *dropped(
        "for distillation set algorithm.teacher of a stage (docs/algorithms)", "distillation.*"
    ),
    *dropped(
        "set rollouts.max_staleness and rollouts.order",
        "async_training.*",
        "rollout.*",
        "skip.*",
    ),
    *dropped("programs run in the built-in sandbox (docs/sandbox.md)", "sandbox_fusion.*"),
    *dropped(
        "groups are replaced one by one here", "algorithm.filter_groups.max_inflight_gen_batches"
    ),
    *dropped(
        "gdpo uses all named parts of a reward, and rewards have weights",
        "algorithm.gdpo_reward_keys",
    ),
    KeyRow("model_engine", covered_by=f"{ACTOR}.strategy"),
    *rows_covered_by(f"{ROLLOUT}.name", f"{ROLLOUT}.max_model_len", f"{ROLLOUT}.max_num_seqs"),
    KeyRow(f"{ACTOR}.use_dynamic_bsz", covered_by=f"{ACTOR}.ppo_max_token_len_per_gpu"),
    *no_effect(
        shared.MICRO_BATCHES,
        f"{ACTOR}.ppo_micro_batch_size*",
        f"{ROLLOUT}.log_prob_*",
        f"{ARR}.ref.log_prob_*",
    ),
    *no_effect(shared.KV_CACHE, f"{ROLLOUT}.gpu_memory_utilization"),
    *dropped(shared.PRECISION, f"{ROLLOUT}.dtype", f"{ACTOR}.fsdp_config.model_dtype"),
    *no_effect(shared.PACKING, f"{MODEL}.use_remove_padding", "critic.model.use_remove_padding"),
    *dropped(
        shared.NUMERICS,
        f"{MODEL}.*",
        f"{ACTOR}.use_torch_compile",
        f"{ACTOR}.entropy_*",
        f"{ACTOR}.use_fused_kernels",
    ),
    *rows_covered_by(
        f"{ACTOR}.strategy", f"{ACTOR}.ulysses_sequence_parallel_size", f"{ACTOR}.megatron.*"
    ),
    *dropped("the learner and its checkpoints have no such switch", f"{ACTOR}.*"),
    *dropped(
        "the reference is the model at the stage's start, sharded like the policy", f"{ARR}.ref.*"
    ),
    *dropped(
        "set environment.kind to a multi-turn environment, which has its own tools "
        "(docs/environments.md)",
        f"{ROLLOUT}.multi_turn.*",
        f"{ROLLOUT}.agent.*",
    ),
    *dropped(
        "the only limit of an answer is sampling.max_new_tokens",
        f"{ROLLOUT}.prompt_length",
        f"{ROLLOUT}.response_length",
    ),
    *dropped(
        "only the keys of generator can be set for vLLM",
        f"{ROLLOUT}.*",
        f"{ARR}.hybrid_engine",
        f"{ARR}.nccl_timeout",
    ),
    *dropped(
        "prompts are never truncated here: a prompt that is too long is an error that names it",
        "data.max_prompt_length",
        "data.truncation",
        "data.filter_overlong_prompts*",
    ),
    *dropped(shared.DATA_LOADER, "data.*"),
    *dropped(
        "`ratchet train --resume RUN` continues a run",
        "trainer.resume_*",
        "trainer.del_local_ckpt_after_load",
        "trainer.default_hdfs_dir",
    ),
    *dropped(
        "each stage is evaluated before and after training; evaluation.tasks=0 turns this off",
        "trainer.val_before_train",
        "trainer.val_only",
        "trainer.log_val_generations",
        "trainer.*_data_dir",
    ),
    KeyRow("trainer.project_name", covered_by="trainer.logger"),
    *dropped(
        "this is automatic here, or set in cluster",
        "trainer.*",
        "ray_init.*",
        "ray_kwargs.*",
        "global_profiler.*",
        "hydra.*",
        "*_target_",
        "transfer_queue.*",
    ),
)


def _detect_method(values: Mapping[str, Any]) -> str:
    """Return the name of the method that a configuration trains with; "" if it is unclear."""
    return "PPO trainer" if any(key.startswith((ARR, "algorithm.")) for key in values) else ""


# Keys that every imported recipe starts from: a dataset of questions with mathematical answers.
QUESTIONS = {"environment.kind": "dataset", "rewards": [{"kind": "math"}]}
VERL = Peer(
    name="verl",
    title="verl",
    version="0.5 to 0.8",
    marks=(
        ARR,
        "trainer.total_epochs",
        "data.train_files",
        "data.train_batch_size",
        "algorithm.adv_estimator",
        "trainer.nnodes",
    ),
    detect_method=_detect_method,
    methods={
        "PPO trainer": Method(
            {"algorithm.kind": "grpo", **QUESTIONS}, (*ALGORITHM, *RUN, *DROPPED_ROWS)
        )
    },
    explain_unsupported_task=explain_unsupported_verl_task,
)
