"""The rows of the keys that several of ROLL's pipelines have: optimizer, model, engine, run.

"there" in a note means ROLL; "here" means Ratchet.
"""

from __future__ import annotations

from ratchet.commands.migrate import shared
from ratchet.commands.migrate.roll import placement as place
from ratchet.commands.migrate.roll import values as to
from ratchet.commands.migrate.table import (
    Conversion,
    KeyRow,
    at_least_0,
    choose,
    dropped,
    flag,
    no_effect,
    number,
    real,
    rows_covered_by,
    switches,
    whole,
    without_effect_if,
)

EPOCHS_NOTE = (
    "max_steps sets the length of training; to train for epochs, set `passes` instead of `steps`"
)
# Keys of an engine that change speed and memory alone, below strategy_config.
SPEED_KEYS = (
    *("*fusion*", "*overlap*", "*offload*", "*recompute*", "*dispatcher*", "*grouped*", "bf16"),
    *("*dtype", "virtual_pipeline_model_parallel_size", "account_for_*", "apply_*", "tiled_*"),
    *("reshard_after_forward", "wrap_policy.*", "use_batched_*"),
    *("distrib_optim_*",),
)
EVALUATION_NOTE = (
    "an evaluation measures greedy accuracy on held-out tasks; evaluation.tasks is their number"
)


def train_rows(role: str) -> tuple[KeyRow, ...]:
    """Return the rows of a role's optimizer, model, training engine and data."""
    return (*_optimizer(role), *_model_and_engine(role), *_data(role))


def batch_rows(role: str, recipe_key: str, note: str, convert: Conversion) -> tuple[KeyRow, ...]:
    """Return the rows of the two keys whose product is a rank's batch size."""
    defaults = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    return tuple(
        KeyRow(f"{role}.training_args.{key}", recipe_key, note, convert, default=default)
        for key, default in defaults.items()
    )


def _optimizer(role: str) -> tuple[KeyRow, ...]:
    args = f"{role}.training_args"
    return (
        KeyRow(f"{args}.learning_rate", "optimizer.lr", convert=number, default=5e-5),
        KeyRow(
            f"{args}.lr_scheduler_type",
            "optimizer.schedule",
            "the default is linear there, constant here",
            choose(
                {
                    **{name: name for name in ("linear", "cosine", "constant")},
                    "constant_with_warmup": "constant",
                }
            ),
            default="linear",
        ),
        KeyRow(f"{args}.weight_decay", "optimizer.weight_decay", shared.WEIGHT_DECAY, number),
        KeyRow(
            f"{args}.adam_beta1",
            "optimizer.betas",
            convert=shared.betas(f"{args}.adam_beta1", f"{args}.adam_beta2"),
            default=0.9,
        ),
        KeyRow(
            f"{args}.adam_beta2",
            "optimizer.betas",
            convert=shared.betas(f"{args}.adam_beta1", f"{args}.adam_beta2"),
            default=0.999,
        ),
        KeyRow(f"{args}.warmup_steps", "optimizer.warmup_steps", convert=whole),
        KeyRow(
            f"{args}.warmup_ratio",
            "optimizer.warmup_share",
            convert=to.warmup_ratio(f"{args}.warmup_steps"),
        ),
        KeyRow(f"{args}.num_train_epochs", note=EPOCHS_NOTE, convert=to.epochs),
    )


def _model_and_engine(role: str) -> tuple[KeyRow, ...]:
    args, model = f"{role}.training_args", f"{role}.model_args"
    return (
        KeyRow(f"{model}.model_name_or_path", "model.path"),
        KeyRow(
            f"{model}.disable_gradient_checkpointing",
            "learner.activation_checkpointing",
            convert=to.checkpointing(role),
            default=False,
        ),
        KeyRow(
            f"{role}.strategy_args.strategy_config.recompute_granularity",
            "learner.recompute",
            convert=choose({"full": "full", "selective": "attention"}),
        ),
        KeyRow(
            f"{role}.strategy_args.strategy_config.use_distributed_optimizer",
            "learner.distributed_optimizer",
            convert=flag,
        ),
        KeyRow(
            f"{role}.strategy_args.strategy_config.sequence_parallel",
            "learner.sequence_parallel",
            convert=flag,
        ),
        KeyRow(
            f"{role}.strategy_args.strategy_config.pipeline_model_parallel_layout",
            "learner.stage_layers",
            convert=place.stage_layout(role),
        ),
        *(
            KeyRow(
                f"{role}.strategy_args.strategy_config.additional_configs."
                f"num_layers_in_{end}_pipeline_stage",
                f"learner.{end}_stage_layers",
                convert=place.stage_layers(role),
            )
            for end in ("first", "last")
        ),
        KeyRow(
            f"{role}.strategy_args.strategy_name",
            "learner",
            convert=place.learner(role),
            default="fsdp2_train",
        ),
        KeyRow(f"{model}.lora_target", "lora.target_modules", convert=to.lora(role, to.targets)),
        KeyRow(f"{model}.lora_rank", "lora.rank", convert=to.lora(role, whole), default=8),
        KeyRow(f"{model}.lora_alpha", "lora.alpha", convert=to.lora(role, real)),
        KeyRow(f"{model}.lora_dropout", "lora.dropout", convert=to.lora(role, number)),
        KeyRow(f"{role}.device_mapping", covered_by=f"{role}.strategy_args.strategy_name"),
        *rows_covered_by(
            f"{role}.strategy_args.strategy_name",
            f"{role}.strategy_args.strategy_config.*_size",
            f"{model}.ulysses_size",
            convert=without_effect_if(1),
        ),
        *no_effect(
            "it changes speed and memory there, not results",
            *(f"{role}.strategy_args.strategy_config.{name}" for name in SPEED_KEYS),
            *(f"{role}.{name}" for name in ("offload_nccl", "use_remove_padding")),
            f"{role}.sequence_length_round_*",
        ),
        *switches(
            "this is a switch of the engine there, which learners lack", f"{role}.strategy_args.*"
        ),
        *no_effect(
            shared.MICRO_BATCHES,
            f"{role}.infer_batch_size",
            f"{role}.use_dynamic_batching_*",
            f"{role}.max_tokens_per_microbatch_*",
        ),
        *no_effect(
            shared.PACKING, f"{role}.use_sequence_packing", f"{role}.sequence_packing_args.*"
        ),
        KeyRow(f"{model}.dtype", note=shared.PRECISION, convert=to.precision),
        *no_effect("attention has one kernel here", f"{model}.attn_implementation"),
        *no_effect("attention has one kernel here", f"{model}.flash_attn"),
        *switches(shared.NUMERICS, f"{model}.*", f"{args}.*", f"{role}.*"),
    )


def _data(role: str) -> tuple[KeyRow, ...]:
    return (
        *no_effect(
            "the model's own chat template is used, unless tokenizer.template is set",
            f"{role}.data_args.template",
        ),
        *no_effect(
            shared.DATA_LOADER,
            f"{role}.data_args.preprocessing_num_workers",
            f"{role}.data_args.dataset_dir",
        ),
        KeyRow(
            f"{role}.data_args.interleave_probs",
            note="data are not interleaved here: files are read one after the other "
            "(environment.kind=mixture mixes sources)",
            inert=True,
        ),
        KeyRow(
            f"{role}.data_args.messages",
            note="it names the prompt's column there; here the column is always `prompt`",
            convert=to.messages,
        ),
        *switches(shared.DATA_LOADER, f"{role}.data_args.*"),
    )


# Rows of every pipeline.
COMMON = (
    *dropped(shared.BASE_CONFIG, "--config*"),
    *dropped(
        "for distillation set algorithm.teacher of a stage (docs/algorithms)",
        "teacher.*",
        "student_*",
    ),
    *no_effect(
        "other keys of the file refer to this value",
        "lora_rank",
        "lora_alpha",
        "lora_target",
        "max_actions_per_traj",
    ),
    *dropped(
        "external agents connect to the OpenAI proxy (docs/environments.md)",
        "agent_*",
        "*_agent_*",
    ),
    KeyRow("pretrain", "model.path"),
    KeyRow("exp_name", "name", convert=shared.run_name),
    KeyRow("seed", "seed", convert=whole, default=42),
    KeyRow("max_steps", "steps", convert=whole, default=500),
    KeyRow("save_steps", "checkpoint.every", convert=whole, default=50),
    KeyRow("max_ckpt_to_keep", "checkpoint.keep", convert=to.kept_checkpoints),
    KeyRow("eval_steps", "evaluation.every", EVALUATION_NOTE, at_least_0, default=10),
    KeyRow("max_grad_norm", "optimizer.max_grad_norm", convert=number),
    KeyRow("track_with", "logging.sinks", convert=to.tracker),
    *no_effect("set the tracker's keys in logging.sinks", "tracker_kwargs.*"),
    *no_effect(
        "checkpoints, logs and metrics are all in the run's directory (run_dir)",
        "output_dir",
        "logging_dir",
        "checkpoint_config.*",
        "base_dir",
        "rollout_dump_dir",
        "*_dir",
    ),
    *no_effect("every step is logged", "logging_steps"),
    *no_effect("`ratchet train --resume RUN` continues a run", "resume_from_checkpoint"),
    *no_effect(
        "the model's own chat template is used, unless tokenizer.template is set",
        "global_template",
        "tag_to_template.*",
    ),
    *no_effect(
        "accelerators are set in learner, generator and cluster",
        "num_gpus_per_node",
        "num_nodes",
        "is_offload_states",
        "model_update_buffer_size_mb",
    ),
    *no_effect(
        "set environment variables before `ratchet train`",
        "system_envs.*",
        "rpc_timeout",
        "local_rank",
        "model_download_type",
    ),
    *no_effect(
        "evaluation is greedy here, unless evaluation.greedy is false",
        "validation.generating_args.*",
    ),
    *no_effect(
        "held-out data are set in environment.test and evaluation here",
        "validation.*",
        "val_batch_size",
        "val_*",
    ),
    *no_effect(
        "the reference is the model at the stage's start", "reference.*", "enable_reference"
    ),
    *no_effect("profile with `ratchet train --profile N`", "profiler_*", "length_profiler_dir"),
    *no_effect("the launcher there reads it", "hydra.*", "defaults"),
    *no_effect(
        "a run's records keep the rollouts of every step, so nothing needs to be dumped or mocked",
        "rollout_mock.*",
    ),
)
