"""Alibaba ROLL 0.3: the YAML of its RLVR, DPO and SFT pipelines.

"there" in a note means ROLL; "here" means Ratchet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.commands.migrate import shared
from ratchet.commands.migrate.roll import values as to
from ratchet.commands.migrate.roll.agentic import keep_used_definitions
from ratchet.commands.migrate.roll.common import COMMON, batch_rows, train_rows
from ratchet.commands.migrate.roll.rlvr import RLVR
from ratchet.commands.migrate.roll.tasks import explain_unsupported_task
from ratchet.commands.migrate.table import (
    KeyRow,
    Method,
    Peer,
    choose,
    dropped,
    only_if,
    real,
)

BATCH_NOTE = "the batch counts rows of all data-parallel ranks here, of one rank there"
LENGTH_KEYS = ("sequence_length", "prompt_length", "response_length")


def _offline(role: str) -> tuple[KeyRow, ...]:
    """Return the rows of a pipeline that trains on a dataset without sampling (DPO, SFT)."""
    return (
        *batch_rows(role, "batch_size", BATCH_NOTE, to.rows(role)),
        KeyRow(f"{role}.data_args.file_name", "environment.train", convert=shared.training_data),
        *dropped("rows are never truncated: the limit is the model's context", *LENGTH_KEYS),
        *train_rows(role),
        *COMMON,
    )


DPO = (
    KeyRow("ipo", "algorithm.kind", convert=choose({True: "ipo", False: "dpo"})),
    KeyRow(
        "beta",
        "algorithm.beta",
        "it is used here; ROLL 0.3 does not pass it to its loss, which uses 0.1",
        real,
        default=0.1,
    ),
    KeyRow(
        "label_smoothing",
        "algorithm.label_smoothing",
        "it is used here; ROLL 0.3 does not pass it to its loss",
        only_if(lambda config: not config.flag("ipo"), real, "ipo does not read it"),
    ),
    KeyRow("chosen_key", "environment.columns", convert=to.column("chosen"), default="chosen"),
    KeyRow(
        "rejected_key", "environment.columns", convert=to.column("rejected"), default="rejected"
    ),
    *_offline("actor_train"),
)
SFT = (
    KeyRow("prompt_key", "environment.columns", convert=to.column("prompt"), default="instruction"),
    KeyRow("response_key", "environment.columns", convert=to.column("solution"), default="output"),
    KeyRow("system_key", "environment.columns", convert=to.column("system")),
    KeyRow(
        "query_key",
        note="environment.prompt joins several columns to a prompt: '{instruction}\n{input}'",
    ),
    *_offline("sft_train"),
)


def _detect_method(values: Mapping[str, Any]) -> str:
    if any(key.startswith("sft_train") for key in values):
        return "SFT"
    if "chosen_key" in values or "ipo" in values:
        return "DPO"
    return "RLVR" if "rollout_batch_size" in values or "adv_estimator" in values else ""


DATASET = {"environment.kind": "dataset"}
ROLL = Peer(
    name="roll",
    title="ROLL",
    version="0.3",
    marks=(
        "pretrain",
        "actor_train",
        "actor_infer",
        "sft_train",
        "student_pretrain",
        "exp_name",
        "rollout_batch_size",
        "num_return_sequences_in_group",
    ),
    detect_method=_detect_method,
    methods={
        "RLVR": Method({"algorithm.kind": "grpo", **DATASET, "rewards": [{"kind": "math"}]}, RLVR),
        "DPO": Method({"algorithm.kind": "dpo", **DATASET}, DPO),
        "SFT": Method({"algorithm.kind": "sft", **DATASET}, SFT),
    },
    explain_unsupported_task=explain_unsupported_task,
    keep_used=keep_used_definitions,
)
