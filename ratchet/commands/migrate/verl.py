"""Map the keys of a verl configuration to those of a recipe.

The configuration is the YAML of a verl trainer, or a shell script with Hydra overrides. Keys and
defaults are those of verl 0.5 to 0.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.commands.migrate import shared
from ratchet.commands.migrate import verl_values as to
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
from ratchet.commands.migrate.verl_values import ACTOR, ARR, CORRECTION, MODEL, ROLLOUT

# Notes that the report of an import shows beside a key.
DUAL = "their dual clip is on by default at 3; null is none here, and this is theirs"
EVERY = "-1 is never there; here 0 is only at the end"

# Keys of verl that concern the algorithm: most map to the recipe's `algorithm` section.
ALGORITHM = (
    KeyRow("algorithm.adv_estimator", "algorithm.kind", how=to.choose_estimator, default="gae"),
    KeyRow(
        f"{ACTOR}.policy_loss.loss_mode", "algorithm.loss.kind", how=to.loss_mode, default="vanilla"
    ),
    KeyRow(f"{ACTOR}.clip_ratio", within=f"{ACTOR}.policy_loss.loss_mode", default=0.2),
    KeyRow(f"{ACTOR}.clip_ratio_low", within=f"{ACTOR}.policy_loss.loss_mode"),
    KeyRow(f"{ACTOR}.clip_ratio_high", within=f"{ACTOR}.policy_loss.loss_mode"),
    KeyRow(f"{ACTOR}.tau_pos", within=f"{ACTOR}.policy_loss.loss_mode", default=1.0),
    KeyRow(f"{ACTOR}.tau_neg", within=f"{ACTOR}.policy_loss.loss_mode", default=1.05),
    KeyRow(f"{ACTOR}.loss_scale_factor", within=f"{ACTOR}.loss_agg_mode"),
    KeyRow(
        f"{ACTOR}.clip_ratio_c",
        "algorithm.loss.dual_clip",
        DUAL,
        when(
            lambda config: config[f"{ACTOR}.policy_loss.loss_mode"] == "vanilla",
            number,
            "acts on loss_mode vanilla alone",
        ),
        default=3.0,
    ),
    KeyRow(
        f"{ACTOR}.loss_agg_mode", "algorithm.weighting", how=to.aggregation, default="token-mean"
    ),
    KeyRow(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coef", how=real),
    KeyRow(f"{ACTOR}.use_kl_loss", "algorithm.kl", how=to.kl_loss, default=False),
    KeyRow(f"{ACTOR}.kl_loss_coef", within=f"{ACTOR}.use_kl_loss", default=0.001),
    KeyRow(f"{ACTOR}.kl_loss_type", within=f"{ACTOR}.use_kl_loss", default="low_var_kl"),
    KeyRow(
        f"{ACTOR}.ppo_mini_batch_size", "algorithm.minibatches", how=to.minibatches, default=256
    ),
    KeyRow(f"{ACTOR}.ppo_epochs", "algorithm.epochs", how=whole, default=1),
    KeyRow(
        "algorithm.gamma",
        "algorithm.advantage.gamma",
        how=when(to.ppo, real, "read by gae alone"),
        default=1.0,
    ),
    KeyRow(
        "algorithm.lam",
        "algorithm.advantage.lam",
        how=when(to.ppo, real, "read by gae alone"),
        default=1.0,
    ),
    KeyRow(
        "algorithm.norm_adv_by_std_in_grpo",
        "algorithm.advantage.scale",
        how=when(to.grpo, choose({True: "std", False: "none"}), "read by grpo alone"),
    ),
    KeyRow("algorithm.use_kl_in_reward", "algorithm.kl", how=to.kl_reward, default=False),
    KeyRow("algorithm.kl_ctrl.kl_coef", within="algorithm.use_kl_in_reward", default=0.001),
    KeyRow("algorithm.kl_ctrl.type", within="algorithm.use_kl_in_reward", default="fixed"),
    KeyRow("algorithm.kl_ctrl.target_kl", within="algorithm.use_kl_in_reward", default=0.1),
    KeyRow(
        "algorithm.kl_ctrl.horizon", note="algorithm.kl.rate is the speed of the adaptation here"
    ),
    KeyRow(
        "algorithm.kl_penalty",
        note="the penalty in the reward is k1, whose gradient alone is a divergence's "
        "(algorithm.kl.place)",
    ),
    KeyRow(
        "algorithm.filter_groups.enable",
        "rollouts.dynamic_sampling",
        "groups of equal rewards are replaced; there by the metric of filter_groups.metric",
        flag,
    ),
    KeyRow(
        "algorithm.filter_groups.max_num_gen_batches",
        "rollouts.max_replaced",
        "groups replaced a step over batch_size; then they stay, where there the run stops",
        when(
            lambda config: config.flag("algorithm.filter_groups.enable"), to.replaced, "off there"
        ),
    ),
    KeyRow(f"{CORRECTION}.rollout_is", "algorithm.correction.weight", how=to.weight),
    KeyRow(f"{CORRECTION}.rollout_is_threshold", within=f"{CORRECTION}.rollout_is", default=2.0),
    KeyRow(f"{CORRECTION}.rollout_rs", "algorithm.correction.mask", how=to.mask),
    *within(
        f"{CORRECTION}.rollout_rs",
        f"{CORRECTION}.rollout_rs_threshold",
        f"{CORRECTION}.rollout_rs_threshold_lower",
    ),
    KeyRow(
        f"{CORRECTION}.bypass_mode",
        note="the old policy's probabilities are computed here, and the correction is apart from "
        "the clip (decoupled)",
    ),
    *nothing(
        "algorithm.correction has a weight and a mask, each with bounds, and nothing else",
        f"{CORRECTION}.*",
    ),
    # The penalty for overlong answers can stand in any of three sections.
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
            KeyRow(f"{section}.enable", "algorithm.shaping", how=to.overlong(section, length)),
            KeyRow(f"{section}.log", note="what shaping took is in the metrics", idle=True),
            *within(f"{section}.enable", f"{section}.len", f"{section}.penalty_factor", length),
        )
    ),
    KeyRow(
        "critic.optim.lr",
        "algorithm.critic.lr",
        how=when(to.ppo, number, "only gae has a critic"),
        default=1e-5,
    ),
    KeyRow(
        "critic.cliprange_value",
        "algorithm.critic.value_clip",
        how=when(to.ppo, number, "only gae has a critic"),
        default=0.5,
    ),
    KeyRow(
        "trainer.critic_warmup",
        "algorithm.critic.warmup_steps",
        how=when(to.ppo, whole, "only gae has a critic"),
    ),
    *nothing(
        "the critic is a copy of the policy with a scalar head, and shares its batches and "
        "optimizer but for its rate",
        "critic.*",
    ),
    *nothing(
        "algorithm.loss has none of these",
        f"{ACTOR}.policy_loss.*",
        "algorithm.use_pf_ppo",
        "algorithm.pf_ppo.*",
        "algorithm.filter_groups.metric",
    ),
)

# Keys of verl that concern the run: data, sampling, model, optimizer, generator and rewards.
RUN = (
    KeyRow("data.train_batch_size", "batch_size", how=whole, default=1024),
    KeyRow(f"{ROLLOUT}.n", "algorithm.group_size", how=whole, default=1),
    KeyRow("data.max_response_length", "sampling.max_new_tokens", how=whole, default=512),
    KeyRow(f"{ROLLOUT}.temperature", "sampling.temperature", how=real, default=1.0),
    KeyRow(f"{ROLLOUT}.top_p", "sampling.top_p", how=real),
    KeyRow(f"{ROLLOUT}.top_k", "sampling.top_k", how=at_least_0),
    KeyRow("data.train_files", "environment.train", how=to.files),
    KeyRow("data.val_files", "environment.test", how=shared.listed),
    KeyRow(f"{MODEL}.path", "model.path", how=shared.model),
    KeyRow(f"{MODEL}.trust_remote_code", "model.trust_remote_code", how=flag),
    KeyRow(
        f"{MODEL}.custom_chat_template",
        "tokenizer.template",
        "the path of a .jinja file here",
        shared.template,
    ),
    KeyRow(
        f"{MODEL}.enable_gradient_checkpointing",
        "learner.activation_checkpointing",
        how=when(to.no_megatron, flag, "learner.recompute is attention or full with megatron"),
        default=True,
    ),
    KeyRow(f"{MODEL}.lora_rank", "lora.rank", how=positive("0 there: no adapter")),
    KeyRow(
        f"{MODEL}.lora_alpha",
        "lora.alpha",
        how=when(to.lora, real, "lora_rank is 0 there"),
        default=16,
    ),
    KeyRow(
        f"{MODEL}.target_modules",
        "lora.target_modules",
        how=when(to.lora, None, "lora_rank is 0 there"),
    ),
    KeyRow(f"{ACTOR}.optim.lr", "optimizer.lr", how=number, default=1e-6),
    KeyRow(f"{ACTOR}.optim.lr_warmup_steps_ratio", "optimizer.warmup_steps", how=to.warmup_ratio),
    KeyRow(f"{ACTOR}.optim.lr_warmup_steps", "optimizer.warmup_steps", how=to.warmup),
    KeyRow(f"{ACTOR}.optim.warmup_style", "optimizer.schedule", how=to.schedule),
    KeyRow(f"{ACTOR}.optim.lr_scheduler_type", "optimizer.schedule", how=to.schedule),
    KeyRow(f"{ACTOR}.optim.min_lr_ratio", "optimizer.min_lr_ratio", how=number),
    KeyRow(f"{ACTOR}.optim.num_cycles", within=f"{ACTOR}.optim.lr_scheduler_type"),
    KeyRow(f"{ACTOR}.optim.betas", "optimizer.betas", how=to.betas, default=[0.9, 0.999]),
    KeyRow(
        f"{ACTOR}.optim.weight_decay",
        "optimizer.weight_decay",
        "on matrices only",
        number,
        default=0.01,
    ),
    KeyRow(f"{ACTOR}.grad_clip", "optimizer.max_grad_norm", how=number),
    KeyRow("trainer.total_training_steps", "steps", how=whole),
    KeyRow("trainer.total_epochs", note=shared.EPOCHS),
    KeyRow("trainer.save_freq", "checkpoint.every", EVERY, at_least_0, default=-1),
    KeyRow("trainer.max_actor_ckpt_to_keep", "checkpoint.keep", how=whole),
    KeyRow(
        "trainer.test_freq",
        "evaluation.every",
        f"greedy accuracy on evaluation.tasks held-out tasks; {EVERY}",
        at_least_0,
        default=-1,
    ),
    KeyRow(
        f"{ROLLOUT}.val_kwargs.n",
        "evaluation.samples",
        "sampled attempts beside the greedy one",
        to.samples,
    ),
    KeyRow(
        f"{ROLLOUT}.val_kwargs.temperature",
        "evaluation.temperature",
        how=to.evaluated,
    ),
    KeyRow("trainer.experiment_name", "name", how=shared.run_name),
    KeyRow(
        "trainer.logger",
        "logging.sinks",
        how=lambda value, config: shared.sinks(value, config["trainer.project_name"]),
    ),
    KeyRow("trainer.default_local_dir", "run_dir", how=shared.model),
    KeyRow("data.seed", "seed", how=whole),
    KeyRow("data.prompt_key", within="data.train_files", default="prompt"),
    KeyRow(f"{ACTOR}.strategy", "learner", how=to.learner, default="fsdp"),
    KeyRow(
        f"{ACTOR}.fsdp_config.param_offload",
        "learner.cpu_offload",
        how=when(to.spread, flag, "learner.kind=dtensor alone has cpu_offload"),
    ),
    KeyRow(
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        "learner.micro_batch_tokens",
        how=when(
            lambda config: config.flag(f"{ACTOR}.use_dynamic_bsz"),
            whole,
            "use_dynamic_bsz is false there",
        ),
    ),
    KeyRow(f"{ROLLOUT}.name", "generator", how=to.generator, default="vllm"),
    KeyRow(f"{ROLLOUT}.tensor_model_parallel_size", within=f"{ROLLOUT}.name", default=2),
    KeyRow(f"{ROLLOUT}.multi_turn.max_assistant_turns", "rollouts.max_turns", how=whole),
    KeyRow(f"{ROLLOUT}.multi_turn.max_turns", "rollouts.max_turns", how=whole),
    KeyRow("trainer.n_gpus_per_node", within=f"{ACTOR}.strategy", default=8),
    KeyRow("trainer.nnodes", "cluster", how=to.nodes, default=1),
    KeyRow("reward_model.enable", "rewards", how=to.learned("reward_model.model.path")),
    KeyRow("reward_model.model.path", within="reward_model.enable"),
    KeyRow(
        "reward.reward_model.enable", "rewards", how=to.learned("reward.reward_model.model_path")
    ),
    KeyRow("reward.reward_model.model_path", within="reward.reward_model.enable"),
    *nothing(shared.OWN_REWARD, "custom_reward_function.*", "reward.custom_reward_function.*"),
    *nothing(
        "rewards are chosen by kind here; the recipe has math, which judges what verl's own do for "
        "maths",
        "reward_model.*",
        "reward.*",
        "reward_manager.*",
        "data.reward_fn_key",
    ),
)

# Keys of verl without a counterpart of their own, each group with the reason.
REST = (
    *nothing(shared.BASE, "--config*", "*@*"),
    *nothing(
        "a teacher is algorithm.teacher, of a stage of its own (docs/algorithms)", "distillation.*"
    ),
    *nothing(
        "rollouts has max_staleness, order and its own scheduler",
        "async_training.*",
        "rollout.*",
        "skip.*",
    ),
    *nothing("programs run in the sandbox that is built in (docs/sandbox.md)", "sandbox_fusion.*"),
    *nothing(
        "groups are replaced one by one here", "algorithm.filter_groups.max_inflight_gen_batches"
    ),
    *nothing(
        "gdpo takes all named parts of a reward, and rewards have weights",
        "algorithm.gdpo_reward_keys",
    ),
    KeyRow("model_engine", within=f"{ACTOR}.strategy"),
    *within(f"{ROLLOUT}.name", f"{ROLLOUT}.max_model_len", f"{ROLLOUT}.max_num_seqs"),
    KeyRow(f"{ACTOR}.use_dynamic_bsz", within=f"{ACTOR}.ppo_max_token_len_per_gpu"),
    *idle(
        shared.MICRO,
        f"{ACTOR}.ppo_micro_batch_size*",
        f"{ROLLOUT}.log_prob_*",
        f"{ARR}.ref.log_prob_*",
    ),
    *idle(shared.CACHE, f"{ROLLOUT}.gpu_memory_utilization"),
    *nothing(shared.FLOAT32, f"{ROLLOUT}.dtype", f"{ACTOR}.fsdp_config.model_dtype"),
    *idle(shared.PACKED, f"{MODEL}.use_remove_padding", "critic.model.use_remove_padding"),
    *nothing(
        shared.NUMERICS,
        f"{MODEL}.*",
        f"{ACTOR}.use_torch_compile",
        f"{ACTOR}.entropy_*",
        f"{ACTOR}.use_fused_kernels",
    ),
    *within(f"{ACTOR}.strategy", f"{ACTOR}.ulysses_sequence_parallel_size", f"{ACTOR}.megatron.*"),
    *nothing("the learner and its checkpoints have no such switch", f"{ACTOR}.*"),
    *nothing(
        "the reference is the model at the stage's start, held like the learner's", f"{ARR}.ref.*"
    ),
    *nothing(
        "an environment of many turns is chosen by environment.kind, with tools of its own "
        "(docs/environments.md)",
        f"{ROLLOUT}.multi_turn.*",
        f"{ROLLOUT}.agent.*",
    ),
    *nothing(
        "sampling.max_new_tokens bounds an answer, and nothing else does",
        f"{ROLLOUT}.prompt_length",
        f"{ROLLOUT}.response_length",
    ),
    *nothing(
        "vLLM's own ways are set by generator's keys, and nothing else of it",
        f"{ROLLOUT}.*",
        f"{ARR}.hybrid_engine",
        f"{ARR}.nccl_timeout",
    ),
    *nothing(
        "a prompt is never cut here: rows that leave no room fail by name",
        "data.max_prompt_length",
        "data.truncation",
        "data.filter_overlong_prompts*",
    ),
    *nothing(shared.LOADER, "data.*"),
    *nothing(
        "a run goes on by `ratchet train --resume RUN`",
        "trainer.resume_*",
        "trainer.del_local_ckpt_after_load",
        "trainer.default_hdfs_dir",
    ),
    *nothing(
        "evaluation is before and after each stage; evaluation.tasks: 0 switches it off",
        "trainer.val_before_train",
        "trainer.val_only",
        "trainer.log_val_generations",
        "trainer.*_data_dir",
    ),
    KeyRow("trainer.project_name", within="trainer.logger"),
    *nothing(
        "done by itself, or said by cluster",
        "trainer.*",
        "ray_init.*",
        "ray_kwargs.*",
        "global_profiler.*",
        "hydra.*",
        "*_target_",
        "transfer_queue.*",
    ),
)


def _method(values: Mapping[str, Any]) -> str:
    """Return the name of the method that a configuration trains with; "" if it can't be told."""
    return "PPO trainer" if any(key.startswith((ARR, "algorithm.")) for key in values) else ""


# Keys that every imported recipe starts from: a dataset of questions with mathematical answers.
QUESTIONS = {"environment.kind": "dataset", "rewards": [{"kind": "math"}]}
VERL = Peer(
    "verl",
    "verl",
    "0.5 to 0.8",
    (
        ARR,
        "trainer.total_epochs",
        "data.train_files",
        "data.train_batch_size",
        "algorithm.adv_estimator",
        "trainer.nnodes",
    ),
    _method,
    {"PPO trainer": Method({"algorithm.kind": "grpo", **QUESTIONS}, (*ALGORITHM, *RUN, *REST))},
)
