"""The rows of sampling and of batches, for NeMo RL's trainers that sample."""

from __future__ import annotations

from ratchet.commands.migrate import shared
from ratchet.commands.migrate.nemo_rl import placement as place
from ratchet.commands.migrate.nemo_rl import values as to
from ratchet.commands.migrate.nemo_rl.engine import GENERATOR
from ratchet.commands.migrate.nemo_rl.placement import GENERATION
from ratchet.commands.migrate.table import (
    KeyRow,
    at_least_0,
    real,
    rows_covered_by,
    whole,
    without_effect_if,
)

MINIBATCH_NOTE = (
    "it counts answers there; here minibatches is the number of optimizer steps per batch"
)


def rollout_rows(section: str, *, prompts: int, attempts: int) -> tuple[KeyRow, ...]:
    """Return the rows of a trainer that samples.

    Args:
        section: The section of the trainer's own keys (`grpo`).
        prompts: The trainer's default number of prompts per step.
        attempts: The trainer's default number of attempts at each prompt.
    """
    return (
        KeyRow(f"{section}.num_prompts_per_step", "batch_size", convert=whole, default=prompts),
        KeyRow(
            f"{section}.num_generations_per_prompt",
            "algorithm.group_size",
            convert=whole,
            default=attempts,
        ),
        KeyRow(
            "policy.train_global_batch_size",
            "algorithm.minibatches",
            MINIBATCH_NOTE,
            to.minibatches(section),
        ),
        KeyRow(f"{section}.max_val_samples", "evaluation.tasks", convert=whole),
        KeyRow(f"{section}.max_rollout_turns", "rollouts.max_turns", convert=whole),
        KeyRow(f"{GENERATION}.max_new_tokens", "sampling.max_new_tokens", convert=whole),
        KeyRow(f"{GENERATION}.temperature", "sampling.temperature", convert=real),
        KeyRow(f"{GENERATION}.top_p", "sampling.top_p", convert=real),
        KeyRow(f"{GENERATION}.top_k", "sampling.top_k", convert=at_least_0),
        KeyRow(f"{GENERATION}.stop_strings", "sampling.stop", convert=shared.as_list),
        KeyRow(
            f"{GENERATION}.stop_token_ids",
            note="the model's own end tokens end an answer; set others as text in sampling.stop",
        ),
        KeyRow(f"{GENERATION}.backend", "generator", convert=place.convert_generator),
        *GENERATOR,
        KeyRow(
            f"{GENERATION}.val_temperature",
            "evaluation",
            convert=to.sampled_evaluation(section),
        ),
        KeyRow("data.train.dataset_name", "environment", note=shared.COLUMNS, convert=to.rows),
        KeyRow("data.train.data_path", "environment", note=shared.COLUMNS, convert=to.rows),
        KeyRow("data.dataset_name", "environment", note=shared.COLUMNS, convert=to.rows),
        *rows_covered_by(
            f"{GENERATION}.backend",
            f"{GENERATION}.colocated.*",
            f"{GENERATION}.vllm_cfg.max_model_len",
        ),
        *rows_covered_by(
            f"{GENERATION}.backend",
            f"{GENERATION}.vllm_cfg.*_parallel_size",
            convert=without_effect_if(1),
        ),
    )
