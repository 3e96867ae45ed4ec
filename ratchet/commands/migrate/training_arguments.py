"""The key rows that all of TRL's trainers share: those of TrainingArguments and ModelConfig.

A row with the exact key takes precedence over a row with a pattern, so `eval_*` does not cover
`eval_on_start`, which has a row of its own. Keys that are not converted have `dropped` rows, whose
note names what to set instead or why there is nothing; `no_effect` rows need no action.
"""

from __future__ import annotations

from ratchet.commands.migrate import shared
from ratchet.commands.migrate import trl_values as to
from ratchet.commands.migrate.table import (
    KeyRow,
    choose,
    dropped,
    flag,
    no_effect,
    number,
    real,
    rows_covered_by,
    whole,
)

# The note on keys that distribute a run over processes and devices.
PLACEMENT_NOTE = (
    "learner, generator and cluster set where a run computes (docs/cluster.md); "
    "`ratchet train` starts the processes itself"
)

# The note on keys that upload to the Hugging Face Hub.
HUB_NOTE = "a run uploads nothing by itself: `ratchet push RUN` uploads its model and a model card"


TRAINING = (
    KeyRow("model_name_or_path", "model.path"),
    KeyRow("model_revision", "model.revision"),
    KeyRow("trust_remote_code", "model.trust_remote_code", convert=flag),
    KeyRow("lr_scheduler_type", "optimizer.schedule", convert=to.schedule, default="linear"),
    KeyRow(
        "warmup_steps",
        "optimizer.warmup_steps, optimizer.warmup_share",
        convert=to.warmup,
    ),
    KeyRow(
        "warmup_ratio",
        "optimizer.warmup_steps, optimizer.warmup_share",
        convert=to.warmup,
    ),
    KeyRow("weight_decay", "optimizer.weight_decay", shared.WEIGHT_DECAY, number),
    KeyRow(
        "adam_beta1",
        "optimizer.betas",
        convert=shared.betas("adam_beta1", "adam_beta2"),
        default=0.9,
    ),
    KeyRow(
        "adam_beta2",
        "optimizer.betas",
        convert=shared.betas("adam_beta1", "adam_beta2"),
        default=0.999,
    ),
    KeyRow("adam_epsilon", "optimizer.eps", convert=number),
    KeyRow("max_grad_norm", "optimizer.max_grad_norm", convert=shared.clip_norm, null=None),
    KeyRow("optim", "optimizer.kind", convert=to.optimizer),
    KeyRow("seed", "seed", convert=whole, default=42),
    KeyRow(
        "gradient_checkpointing", "learner.activation_checkpointing", convert=flag, default=True
    ),
    KeyRow(
        "save_steps",
        "checkpoint.every",
        convert=to.convert_interval("save_strategy", "checkpoint.every"),
        default=500,
    ),
    KeyRow("save_total_limit", "checkpoint.keep", convert=to.kept_checkpoints),
    KeyRow(
        "eval_steps",
        "evaluation.every",
        "an evaluation measures greedy accuracy on held-out tasks here",
        to.convert_interval("eval_strategy", "evaluation.every"),
    ),
    KeyRow("run_name", "name", convert=shared.run_name),
    KeyRow("output_dir", "run_dir"),
    KeyRow("report_to", "logging.sinks", convert=to.reports),
    KeyRow("lora_r", "lora.rank", convert=to.only_with_adapter(whole), default=16),
    KeyRow("lora_alpha", "lora.alpha", convert=to.only_with_adapter(real), default=32),
    KeyRow("lora_dropout", "lora.dropout", convert=to.only_with_adapter(number), default=0.05),
    KeyRow(
        "lora_target_modules",
        "lora.target_modules",
        convert=to.only_with_adapter(to.targets),
        default=["q_proj", "v_proj"],
    ),
    KeyRow(
        "lora_target_parameters",
        "lora.target_parameters",
        convert=to.only_with_adapter(shared.as_list),
    ),
    KeyRow("use_rslora", "lora.rslora", convert=to.only_with_adapter(flag)),
    KeyRow("load_in_4bit", "lora.base", convert=to.only_with_adapter(choose({True: "nf4"}))),
    KeyRow("save_strategy", covered_by="save_steps", default="steps"),
    KeyRow("eval_strategy", covered_by="eval_steps", default="no"),
    KeyRow("use_peft", covered_by="lora_r"),
    *rows_covered_by("lr_scheduler_type", "lr_scheduler_kwargs", "lr_scheduler_kwargs.*"),
    KeyRow("project", covered_by="report_to"),
    *dropped(
        shared.PRECISION, "dtype", "torch_dtype", "bf16", "fp16", "tf32", "cast_lm_head_to_fp32"
    ),
    *dropped(
        shared.NUMERICS,
        "attn_implementation",
        "use_liger_kernel",
        "torch_compile*",
        "activation_offloading",
        "gradient_checkpointing_kwargs",
    ),
    *dropped(
        shared.DATA_LOADER,
        "dataloader_*",
        "remove_unused_columns",
        "dataset_num_proc",
        "dataset_streaming",
        "shuffle_dataset",
        "data_seed",
    ),
    *no_effect(
        shared.PACKING,
        "padding_free",
        "pad_to_multiple_of",
        "group_by_length",
        "pad_token",
        "packing*",
        "eval_packing",
    ),
    *dropped(
        PLACEMENT_NOTE,
        "deepspeed",
        "fsdp*",
        "ddp_*",
        "local_rank",
        "ds3_gather_for_generation",
        "accelerator_config",
        "use_cpu",
    ),
    *dropped(HUB_NOTE, "push_to_hub", "hub_*"),
    *no_effect(
        "every step is logged", "logging_*", "log_*", "num_completions_to_print", "disable_tqdm"
    ),
    *dropped(
        "an evaluation has no batch size: generator.max_running and learner.micro_batch_tokens "
        "limit what is computed at once",
        "per_device_eval_batch_size",
        "eval_accumulation_steps",
    ),
    *dropped(
        "set evaluation.samples: sampled attempts at each held-out task", "num_generations_eval"
    ),
    *dropped(
        "evaluation.tasks above 0 evaluates before and after each stage", "eval_on_start", "do_eval"
    ),
    *dropped(
        "`ratchet train --resume RUN` continues a run",
        "resume_from_checkpoint",
        "overwrite_output_dir",
    ),
    *dropped(
        "a checkpoint always has the complete training state, and the trained model is model/ in "
        "the run's directory",
        "save_only_model",
    ),
    *dropped(
        "set checkpoint.end_with=best: a stage then ends with the weights of its best checkpoint",
        "load_best_model_at_end",
    ),
    *dropped(
        "set checkpoint.metric and checkpoint.keep_best",
        "metric_for_best_model",
        "greater_is_better",
    ),
    *dropped(
        "set lora: {base: float8} for 8 bits or {base: nf4} for 4 bits; they have no options",
        "load_in_8bit",
        "bnb_*",
        "use_bnb_nested_quant",
    ),
    *dropped(
        "adapters are plain LoRA or rsLoRA on linear layers",
        "use_dora",
        "lora_modules_to_save",
        "lora_task_type",
    ),
    *dropped(
        "the reference is the model at the stage's start, and does not change during the stage",
        "sync_ref_model",
        "ref_model_*",
    ),
    *dropped("the only dropout is lora.dropout", "disable_dropout"),
    *dropped("set algorithm.router.balance_coef for a mixture of experts", "router_aux_loss_coef"),
    *dropped("model.path is loaded without further options", "model_init_kwargs"),
    *dropped(
        "set tokenizer.template to a .jinja file",
        "chat_template_path",
        "eos_token",
    ),
    KeyRow(
        "chat_template_kwargs.*",
        "tokenizer.chat_template_kwargs",
        convert=shared.collect_keys("chat_template_kwargs."),
    ),
    *dropped(
        "an evaluation samples and judges answers, before and after each stage and every "
        "evaluation.every steps",
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
    *dropped(
        "learner.micro_batch_tokens=auto finds the size of micro-batches",
        "auto_find_batch_size",
    ),
    *dropped("token sums are always over all ranks", "average_tokens_across_devices"),
    *dropped(
        "a checkpoint has the complete training state, which --resume restores",
        "enable_jit_checkpoint",
        "restore_callback_*",
        "save_on_each_node",
    ),
    *dropped(
        "the algorithm's loss has no added noise or smoothing",
        "label_smoothing_factor",
        "neftune_noise_alpha",
    ),
    *dropped("set the keys of optimizer", "optim_args", "optim_target_modules"),
    *dropped(PLACEMENT_NOTE, "parallelism_config", "ignore_bias_buffers"),
    *dropped(shared.NUMERICS, "liger_kernel_config", "use_cache", "debug"),
    *dropped(shared.DATA_LOADER, "length_column_name", "train_sampling_strategy", "streaming"),
    *dropped("set logging.sinks: [{kind: trackio, space: ...}]", "trackio_*"),
    KeyRow("dataset_config", "environment.subset"),
    KeyRow("dataset_train_split", "environment.train_split"),
    KeyRow("dataset_test_split", "environment.test_split"),
    *dropped(
        "environment.kind=mixture mixes several datasets, each with its columns",
        "datasets",
    ),
    *dropped("set environment.columns: {text: NAME}", "dataset_text_field"),
    *dropped("environment.kind=dataset prepares its rows without options", "dataset_kwargs"),
    *dropped(
        "set environment.test_share, the share of the rows that is held out", "test_split_size"
    ),
    *dropped(
        "a resumed run always continues with the row after its checkpoint", "ignore_data_skip"
    ),
    *dropped("the metrics of a step always have the memory in use", "skip_memory_metrics"),
    *dropped(
        "there is no switch here: runs with equal seeds are equal on a CPU, but may differ on an "
        "accelerator",
        "full_determinism",
    ),
    *dropped(
        "there is no switch here: learner.micro_batch_tokens limits the memory of a step",
        "torch_empty_cache_steps",
    ),
)
