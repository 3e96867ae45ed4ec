"""The rows of the keys that all of NeMo RL's trainers have."""

from __future__ import annotations

from ratchet.commands.migrate import shared
from ratchet.commands.migrate.nemo_rl import placement as place
from ratchet.commands.migrate.nemo_rl import values as to
from ratchet.commands.migrate.nemo_rl.engine import ENGINE, context
from ratchet.commands.migrate.nemo_rl.placement import DTENSOR, GENERATION, MEGATRON
from ratchet.commands.migrate.table import (
    KeyRow,
    at_least_0,
    choose,
    choose_inert,
    dropped,
    flag,
    no_effect,
    number,
    only_if,
    positive,
    real,
    rows_covered_by,
    switches,
    whole,
    without_effect_if,
)

EVALUATION_NOTE = (
    "an evaluation measures greedy accuracy on held-out tasks; 0: only before and after"
)

BETAS = (f"{MEGATRON}.optimizer.adam_beta1", f"{MEGATRON}.optimizer.adam_beta2")

# Rows of every trainer, without the keys of its own section.
COMMON = (
    *dropped(shared.BASE_CONFIG, "--config*"),
    KeyRow("policy.model_name", "model.path"),
    KeyRow("policy.tokenizer.name", "tokenizer.path", convert=to.tokenizer),
    KeyRow(
        "policy.tokenizer.chat_template",
        "tokenizer.template",
        "tokenizer.template is the path of a .jinja file here",
        shared.template,
    ),
    KeyRow(
        "policy.optimizer.name", "optimizer.kind", convert=place.when_megatron(False, to.optimizer)
    ),
    KeyRow(
        "policy.optimizer.kwargs.lr", "optimizer.lr", convert=place.when_megatron(False, number)
    ),
    KeyRow(
        "policy.optimizer.kwargs.weight_decay",
        "optimizer.weight_decay",
        shared.WEIGHT_DECAY,
        place.when_megatron(False, number),
    ),
    KeyRow("policy.optimizer.kwargs.betas", "optimizer.betas", convert=place.when_megatron(False)),
    KeyRow(
        "policy.optimizer.kwargs.eps", "optimizer.eps", convert=place.when_megatron(False, number)
    ),
    KeyRow(
        "policy.scheduler", "optimizer.warmup_steps", convert=place.when_megatron(False, to.warmup)
    ),
    KeyRow("policy.max_grad_norm", "optimizer.max_grad_norm", convert=shared.clip_norm, null=None),
    KeyRow(f"{MEGATRON}.optimizer.lr", "optimizer.lr", convert=place.when_megatron(True, number)),
    KeyRow(
        f"{MEGATRON}.optimizer.weight_decay",
        "optimizer.weight_decay",
        shared.WEIGHT_DECAY,
        place.when_megatron(True, number),
    ),
    *(
        KeyRow(name, "optimizer.betas", convert=place.when_megatron(True, shared.betas(*BETAS)))
        for name in BETAS
    ),
    KeyRow(
        f"{MEGATRON}.optimizer.adam_eps", "optimizer.eps", convert=place.when_megatron(True, number)
    ),
    KeyRow(
        f"{MEGATRON}.scheduler.lr_warmup_iters",
        "optimizer.warmup_steps",
        f"{to.WARMUP_NOTE}; the learning rate rises from 0 here",
        place.when_megatron(True, to.batches),
    ),
    KeyRow(
        f"{MEGATRON}.scheduler.lr_decay_style",
        "optimizer.schedule",
        convert=place.when_megatron(
            True, choose({"constant": "constant", "linear": "linear", "cosine": "cosine"})
        ),
    ),
    KeyRow(f"{MEGATRON}.enabled", "learner.kind", convert=place.megatron_learner),
    KeyRow(
        f"{MEGATRON}.sequence_parallel",
        "learner.sequence_parallel",
        convert=place.when_megatron(True, flag),
    ),
    KeyRow(
        f"{MEGATRON}.activation_checkpointing",
        "learner.recompute",
        convert=place.when_megatron(True, choose({True: "full", False: "none"})),
    ),
    KeyRow(f"{DTENSOR}.enabled", "learner.kind", convert=place.dtensor),
    KeyRow(
        f"{DTENSOR}.sequence_parallel",
        "learner.sequence_parallel",
        convert=place.when_megatron(False, place.flag_if_distributed),
    ),
    KeyRow(
        f"{DTENSOR}.activation_checkpointing",
        "learner.activation_checkpointing",
        convert=place.when_megatron(False, flag),
    ),
    KeyRow(
        f"{DTENSOR}.cpu_offload",
        "learner.cpu_offload",
        convert=place.when_megatron(False, place.flag_if_distributed),
    ),
    *(
        KeyRow(
            f"{MEGATRON}.num_layers_in_{end}_pipeline_stage",
            f"learner.{end}_stage_layers",
            convert=place.when_megatron(True, place.stage_layers),
        )
        for end in ("first", "last")
    ),
    *(
        KeyRow(f"{section}.{name}", recipe_key, convert=to.lora(convert, section))
        for section in to.ADAPTERS
        for name, recipe_key, convert in (
            ("dim", "lora.rank", whole),
            ("alpha", "lora.alpha", real),
            ("dropout", "lora.dropout", number),
            ("target_modules", "lora.target_modules", to.targets(section)),
        )
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
        "besides these best by checkpoint.metric, the newest are kept, as many as checkpoint.keep",
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
    KeyRow("cluster.num_nodes", "cluster", convert=place.convert_nodes),
    KeyRow("cluster.gpus_per_node", covered_by=f"{DTENSOR}.enabled"),
    *no_effect("learner and generator set their accelerators", "cluster.*"),
    *no_effect(
        "checkpoint.metric is eval/accuracy, or any other logged metric",
        "checkpointing.metric_name",
        "checkpointing.higher_is_better",
    ),
    *no_effect(
        "the run writes model/ in Hugging Face format; `ratchet convert` converts it",
        "checkpointing.*",
    ),
    *no_effect(
        shared.MICRO_BATCHES,
        "policy.train_micro_batch_size",
        "policy.logprob_batch_size",
        "policy.generation_batch_size",
        "policy.dynamic_batching.*",
        "policy.logprob_chunk_size",
    ),
    *no_effect(
        shared.PACKING, "policy.sequence_packing.*", "policy.make_sequence_length_divisible_by"
    ),
    *(
        KeyRow(name, note="the limits are the model's context and max_new_tokens", convert=context)
        for name in ("policy.max_total_sequence_length", "data.max_input_seq_length")
    ),
    *no_effect(shared.KV_CACHE, f"{GENERATION}.vllm_cfg.gpu_memory_utilization"),
    *rows_covered_by(
        f"{DTENSOR}.enabled", f"{DTENSOR}.*_parallel_size", convert=without_effect_if(1)
    ),
    *rows_covered_by(
        f"{MEGATRON}.enabled", f"{MEGATRON}.*_parallel_size", convert=without_effect_if(1)
    ),
    *(KeyRow(f"{section}.enabled", covered_by=f"{section}.dim") for section in to.ADAPTERS),
    KeyRow(f"{DTENSOR}.lora_cfg.match_all_linear", covered_by=f"{DTENSOR}.lora_cfg.target_modules"),
    *(
        KeyRow(f"{section}.*", note=to.ADAPTER_NOTE, convert=to.lora(to.adapter_detail, section))
        for section in to.ADAPTERS
    ),
    *ENGINE,
    KeyRow("data.train.split", "environment.train_split"),
    KeyRow("data.train.input_key", "environment.columns", convert=to.column("prompt")),
    KeyRow("data.default.input_key", "environment.columns", convert=to.column("prompt")),
    KeyRow("data.train.output_key", "environment.columns", convert=to.column("answer")),
    KeyRow("data.default.output_key", "environment.columns", convert=to.column("answer")),
    KeyRow("data.default.prompt_file", "environment.prompt", convert=to.prompt),
    KeyRow("data.default.system_prompt_file", "environment.system", convert=to.system_prompt),
    KeyRow("data.validation.data_path", "environment.test", convert=shared.as_list),
    KeyRow(
        "data.shuffle",
        note="rows are shuffled here",
        convert=choose_inert(True, "rows are shuffled here too"),
    ),
    *no_effect(shared.DATA_LOADER, "data.num_workers", "data.use_multiple_dataloader"),
    *no_effect("the environment is chosen by the task", "data.default.env_name"),
    *no_effect("seed is the run's seed here", "data.train.seed"),
    *no_effect("rows are read by their columns here", "data.default.processor"),
    *dropped("the chat template decides which tokens are added", "data.add_*"),
    *dropped(
        "environment.test or evaluation.environment holds the tasks of evaluation",
        "data.validation.*",
    ),
    *dropped(
        "a tenth of the prompts of a dataset without a test split is held out here",
        "data.train.split_validation_size",
    ),
    *switches(shared.DATA_LOADER, "data.*"),
    *rows_covered_by("logger.wandb_enabled", "logger.wandb.project"),
    *rows_covered_by("logger.mlflow_enabled", "logger.mlflow.experiment_name"),
    *rows_covered_by("logger.swanlab_enabled", "logger.swanlab.project"),
    *no_effect("metrics always go to metrics.jsonl and the terminal", "logger.*"),
    *no_effect("rewards have processes of their own", "env.*.num_workers"),
    *(
        KeyRow(
            f"env.{name}.math_verify_impl",
            note="answers are compared by math-verify here",
            convert=choose_inert("hf_math_verify", "answers are compared by math-verify here too"),
        )
        for name in ("math", "dapo")
    ),
    *switches(
        "rewards and environments are chosen by kind (docs/rewards.md, docs/environments.md)",
        "env.*",
    ),
    *switches(
        "these are weighted rewards here: malformed_tool_calls, format, unwanted_text",
        "reward_penalties.*",
    ),
    *dropped("only rollouts.max_staleness and rollouts.order can be set here", "async_rl.*"),
    *no_effect("data pass between processes without settings", "data_plane.*"),
)


def common_rows(section: str) -> tuple[KeyRow, ...]:
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
        *no_effect(
            "evaluation always runs before and after each stage here",
            f"{section}.val_at_start",
            f"{section}.val_at_end",
            f"{section}.val_start_at",
        ),
        *no_effect(
            "evaluation.tasks is the number of held-out tasks",
            f"{section}.val_*",
        ),
        *COMMON,
    )
