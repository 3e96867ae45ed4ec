"""The key table of NeMo RL's on-policy distillation.

"there" in a note means NeMo RL; "here" means Ratchet.
"""

from __future__ import annotations

from typing import Any

from ratchet.commands.migrate import numbers, shared
from ratchet.commands.migrate.nemo_rl import values as to
from ratchet.commands.migrate.nemo_rl.common import common_rows
from ratchet.commands.migrate.nemo_rl.engine import section_rows
from ratchet.commands.migrate.nemo_rl.rollouts import rollout_rows
from ratchet.commands.migrate.table import (
    Dropped,
    Inert,
    KeyRow,
    PeerConfig,
    no_effect,
    switches,
    whole,
)

# A key of the loss that only distillation across tokenizers has.
CROSS_TOKENIZER = "loss_fn.gold_loss"
DIRECTIONS = ("forward", "reverse")
# Settings of the teacher's learner. In Ratchet the teacher runs on the student's learner.
TEACHER_SETTINGS = (
    "dtensor_cfg.enabled",
    "dtensor_cfg.tensor_parallel_size",
    "dtensor_cfg.context_parallel_size",
    "dtensor_cfg.sequence_parallel",
    "dtensor_cfg.cpu_offload",
    "megatron_cfg.enabled",
    "megatron_cfg.tensor_model_parallel_size",
    "megatron_cfg.pipeline_model_parallel_size",
    "megatron_cfg.expert_model_parallel_size",
    "megatron_cfg.context_parallel_size",
    "megatron_cfg.sequence_parallel",
    "precision",
    "max_total_sequence_length",
)


def _objective(value: Any, config: PeerConfig) -> Any:
    if value in DIRECTIONS:
        return value
    if value != "mixed":
        return Dropped(f"{value} is not one of forward, reverse and mixed")
    weight = config.number("loss_fn.mixed_kl_weight")
    return "reverse" if weight == 0 else "forward" if weight == 1 else "mixed"


def _mix(value: Any, config: PeerConfig) -> Any:
    if config["loss_fn.kl_type"] != "mixed":
        return Inert("it counts only with kl_type=mixed there")
    weight = numbers.number(value)
    if weight in (0, 1):
        return Inert("all weight is on one direction, which algorithm.objective has")
    return weight


DISTILLATION = (
    KeyRow("teacher.model_name", "algorithm.teacher"),
    # NeMo RL and Ratchet agree: forward is KL(teacher || student), and the weight is forward's.
    KeyRow("loss_fn.kl_type", "algorithm.objective", convert=_objective, default="mixed"),
    KeyRow("loss_fn.mixed_kl_weight", "algorithm.mix", convert=_mix, default=0.5),
    KeyRow(
        "distillation.topk_logits_k",
        "algorithm.top_k",
        "the tokens outside the teacher's top k are one more outcome here; there both "
        "distributions are renormalised over the top k",
        whole,
    ),
    KeyRow(
        "loss_fn.zero_outside_topk",
        note="the tokens outside the teacher's top k are one more outcome here, neither left out "
        "(false there) nor of teacher probability 0 (true there)",
    ),
    *no_effect(
        "the teacher must have the student's tokenizer, as there",
        "teacher.tokenizer.*",
    ),
    *no_effect(
        "the teacher neither trains nor samples",
        "teacher.optimizer.*",
        "teacher.scheduler",
        "teacher.max_grad_norm",
        "teacher.generation.*",
        "teacher.train_global_batch_size",
        "teacher.dtensor_cfg.activation_checkpointing",
        "teacher.megatron_cfg.activation_checkpointing",
        "teacher.megatron_cfg.optimizer.*",
        "teacher.megatron_cfg.scheduler.*",
    ),
    *no_effect(
        shared.MICRO_BATCHES,
        "teacher.train_micro_batch_size",
        "teacher.logprob_batch_size",
        "teacher.generation_batch_size",
        "teacher.dynamic_batching.*",
        "teacher.logprob_chunk_size",
    ),
    *no_effect(
        shared.PACKING, "teacher.sequence_packing.*", "teacher.make_sequence_length_divisible_by"
    ),
    *(
        KeyRow(f"teacher.{name}", note=to.SHARED_NOTE, convert=to.like_policy(name, "the teacher"))
        for name in TEACHER_SETTINGS
    ),
    *section_rows("teacher"),
    *switches("the teacher runs on the student's learner, with its settings", "teacher.*"),
    *rollout_rows("distillation", prompts=128, attempts=1),
    *common_rows("distillation"),
)
