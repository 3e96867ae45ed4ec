"""The key tables of NVIDIA NeMo RL 0.4 to 0.7, for the YAML of its trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.commands.migrate import shared
from ratchet.commands.migrate.nemo_rl import values as to
from ratchet.commands.migrate.nemo_rl.common import common_rows
from ratchet.commands.migrate.nemo_rl.distillation import DISTILLATION
from ratchet.commands.migrate.nemo_rl.grpo import GRPO
from ratchet.commands.migrate.nemo_rl.ppo import PPO
from ratchet.commands.migrate.nemo_rl.tasks import explain_unsupported_task
from ratchet.commands.migrate.table import KeyRow, Method, Peer, choose, real, whole


def _offline(section: str, note: str) -> tuple[KeyRow, ...]:
    """Return the rows of a trainer that reads a dataset without sampling (DPO, SFT, RM)."""
    return (
        KeyRow("policy.train_global_batch_size", "batch_size", convert=whole),
        KeyRow("data.train.dataset_name", "environment", note=note, convert=to.rows),
        KeyRow("data.train.data_path", "environment", note=note, convert=to.rows),
        KeyRow("data.dataset_name", "environment", note=note, convert=to.rows),
        *common_rows(section),
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
    """Return the name of the trainer whose section the file has; "" if it has none."""
    sections = {key.partition(".")[0] for key in values}
    return next((name for name in NEMO_RL.methods if name in sections), "")


DATASET = {"environment.kind": "dataset"}
MATH = {"rewards": [{"kind": "math"}]}
NEMO_RL = Peer(
    name="nemo-rl",
    title="NeMo RL",
    version="0.4 to 0.7",
    marks=(
        "policy.model_name",
        "loss_fn",
        "checkpointing",
        "cluster.gpus_per_node",
        "grpo",
        "ppo",
        "distillation",
        "dpo",
        "policy.generation",
    ),
    detect_method=_detect_method,
    methods={
        "grpo": Method({"algorithm.kind": "grpo", **DATASET, **MATH}, GRPO),
        "ppo": Method({"algorithm.kind": "ppo", **DATASET, **MATH}, PPO),
        "distillation": Method(
            {"algorithm.kind": "distill_on_policy", **DATASET, **MATH}, DISTILLATION
        ),
        "dpo": Method({"algorithm.kind": "dpo", **DATASET}, DPO),
        "sft": Method({"algorithm.kind": "sft", **DATASET}, SFT),
        "rm": Method(
            {"algorithm.kind": "reward_model", **DATASET}, _offline("rm", shared.PAIR_COLUMNS)
        ),
    },
    explain_unsupported_task=explain_unsupported_task,
)
