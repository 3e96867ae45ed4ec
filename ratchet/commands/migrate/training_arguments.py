"""The key rows that all of TRL's trainers share: those of TrainingArguments and ModelConfig.

A key that matches several patterns gets the narrowest row, so `eval_*` does not cover the listed
`eval_on_start`.
"""

from __future__ import annotations

from ratchet.commands.migrate import shared
from ratchet.commands.migrate import trl_values as to
from ratchet.commands.migrate.table import (
    KeyRow,
    choose,
    flag,
    idle,
    nothing,
    number,
    real,
    whole,
    within,
)

# The note on keys that distribute a run over processes and devices.
PLACED = (
    "learner, generator and cluster say where it runs (docs/cluster.md), and nothing is "
    "launched beside `ratchet train`"
)

# The note on keys that upload to the Hugging Face Hub.
HUB = (
    "nothing is uploaded: the run leaves model/ in Hugging Face form, and `huggingface-cli "
    "upload` sends it"
)


TRAINING = (
    KeyRow("model_name_or_path", "model.path"),
    KeyRow("model_revision", "model.revision"),
    KeyRow("trust_remote_code", "model.trust_remote_code", how=flag),
    KeyRow("lr_scheduler_type", "optimizer.schedule", how=to.schedule, default="linear"),
    KeyRow("warmup_steps", "optimizer.warmup_steps", how=to.warmup),
    KeyRow("warmup_ratio", "optimizer.warmup_steps", how=to.warmup),
    KeyRow("weight_decay", "optimizer.weight_decay", "on matrices only", number),
    KeyRow(
        "adam_beta1", "optimizer.betas", how=shared.betas("adam_beta1", "adam_beta2"), default=0.9
    ),
    KeyRow(
        "adam_beta2", "optimizer.betas", how=shared.betas("adam_beta1", "adam_beta2"), default=0.999
    ),
    KeyRow("adam_epsilon", "optimizer.eps", how=number),
    KeyRow("max_grad_norm", "optimizer.max_grad_norm", how=shared.norm, null=None),
    KeyRow("optim", "optimizer.kind", how=to.optimizer),
    KeyRow("seed", "seed", how=whole, default=42),
    KeyRow("gradient_checkpointing", "learner.activation_checkpointing", how=flag, default=True),
    KeyRow(
        "save_steps",
        "checkpoint.every",
        how=to.every("save_strategy", "checkpoint.every"),
        default=500,
    ),
    KeyRow("save_total_limit", "checkpoint.keep", how=to.kept),
    KeyRow(
        "eval_steps",
        "evaluation.every",
        "what is evaluated is `evaluation` here: greedy accuracy on held-out tasks",
        to.every("eval_strategy", "evaluation.every"),
    ),
    KeyRow("run_name", "name", how=shared.run_name),
    KeyRow("output_dir", "run_dir"),
    KeyRow("report_to", "logging.sinks", how=to.reports),
    KeyRow("lora_r", "lora.rank", how=to.lora(whole), default=16),
    KeyRow("lora_alpha", "lora.alpha", how=to.lora(real), default=32),
    KeyRow("lora_dropout", "lora.dropout", how=to.lora(number), default=0.05),
    KeyRow(
        "lora_target_modules",
        "lora.target_modules",
        how=to.lora(to.targets),
        default=["q_proj", "v_proj"],
    ),
    KeyRow("use_rslora", "lora.rslora", how=to.lora(flag)),
    KeyRow("load_in_4bit", "lora.base", how=to.lora(choose({True: "nf4"}))),
    KeyRow("save_strategy", within="save_steps", default="steps"),
    KeyRow("eval_strategy", within="eval_steps", default="no"),
    KeyRow("use_peft", within="lora_r"),
    *within("lr_scheduler_type", "lr_scheduler_kwargs", "lr_scheduler_kwargs.*"),
    KeyRow("project", within="report_to"),
    *nothing(
        shared.FLOAT32, "dtype", "torch_dtype", "bf16", "fp16", "tf32", "cast_lm_head_to_fp32"
    ),
    *nothing(
        shared.NUMERICS,
        "attn_implementation",
        "use_liger_kernel",
        "torch_compile*",
        "activation_offloading",
        "gradient_checkpointing_kwargs",
    ),
    *nothing(
        shared.LOADER,
        "dataloader_*",
        "remove_unused_columns",
        "dataset_num_proc",
        "dataset_streaming",
        "shuffle_dataset",
        "data_seed",
    ),
    *idle(
        shared.PACKED,
        "padding_free",
        "pad_to_multiple_of",
        "group_by_length",
        "pad_token",
        "packing*",
        "eval_packing",
    ),
    *nothing(
        PLACED,
        "deepspeed",
        "fsdp*",
        "ddp_*",
        "local_rank",
        "ds3_gather_for_generation",
        "accelerator_config",
        "use_cpu",
    ),
    *nothing(HUB, "push_to_hub", "hub_*"),
    *idle("every step is logged", "logging_*", "log_*", "num_completions_to_print", "disable_tqdm"),
    *nothing(
        "is drawn from the held-out tasks: evaluation.tasks says how many",
        "per_device_eval_batch_size",
        "eval_accumulation_steps",
        "num_generations_eval",
        "eval_on_start",
        "do_eval",
    ),
    *nothing(
        "a run goes on by `ratchet train --resume RUN`",
        "resume_from_checkpoint",
        "overwrite_output_dir",
        "save_only_model",
        "load_best_model_at_end",
    ),
    *nothing(
        "chosen by checkpoint.metric and checkpoint.keep_best",
        "metric_for_best_model",
        "greater_is_better",
    ),
    *nothing(
        "8 bits are lora: {base: float8} here, 4 bits nf4, without options of their own",
        "load_in_8bit",
        "bnb_*",
        "use_bnb_nested_quant",
    ),
    *nothing(
        "an adapter is the plain one of LoRA (or rslora), on linear maps",
        "use_dora",
        "lora_modules_to_save",
        "lora_target_parameters",
        "lora_task_type",
    ),
    *nothing(
        "the reference is the model at the stage's start, and stays: an earlier stage can move it",
        "sync_ref_model",
        "ref_model_*",
    ),
    *nothing("no dropout acts here but lora.dropout", "disable_dropout"),
    *nothing("set algorithm.router.balance_coef for a mixture of experts", "router_aux_loss_coef"),
    *nothing("model.path is loaded as it stands", "model_init_kwargs"),
    *nothing(
        "set tokenizer.template to a .jinja file",
        "chat_template_path",
        "eos_token",
        "chat_template_kwargs",
    ),
    *nothing(
        "evaluation draws answers and judges them, before and after each stage, and every so many "
        "steps",
        "batch_eval_metrics",
        "bf16_full_eval",
        "fp16_full_eval",
        "eval_*",
        "include_*",
        "do_train",
        "do_predict",
        "prediction_loss_only",
        "label_names",
    ),
    *nothing(
        "a micro-batch finds its own size where learner.micro_batch_tokens is auto",
        "auto_find_batch_size",
    ),
    *nothing("sums over tokens are over all ranks, always", "average_tokens_across_devices"),
    *nothing(
        "all training state is in a checkpoint, and comes back by --resume",
        "enable_jit_checkpoint",
        "restore_callback_*",
        "save_on_each_node",
    ),
    *nothing(
        "the loss is that of the algorithm, without noise or smoothing beside it",
        "label_smoothing_factor",
        "neftune_noise_alpha",
    ),
    *nothing("optimizer has keys of its own", "optim_args", "optim_target_modules"),
    *nothing(PLACED, "parallelism_config"),
    *nothing(shared.NUMERICS, "liger_kernel_config", "use_cache", "debug"),
    *nothing(shared.LOADER, "length_column_name", "train_sampling_strategy"),
    *nothing("logging.sinks has {kind: trackio, space: ...}", "trackio_*"),
    KeyRow("dataset_config", "environment.subset"),
    KeyRow("dataset_train_split", "environment.train_split"),
    KeyRow("dataset_test_split", "environment.test_split"),
    *nothing(
        "environment.kind=mixture mixes several, each with its columns",
        "datasets",
        "dataset_text_field",
        "dataset_kwargs",
        "ignore_bias_buffers",
        "test_split_size",
        "streaming",
    ),
    *nothing(
        "the library stops where something breaks, and `ratchet doctor` says what is missing",
        "ignore_data_skip",
        "skip_memory_metrics",
        "full_determinism",
        "torch_empty_cache_steps",
    ),
)
