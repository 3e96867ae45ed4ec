"""Cases that take turns by the day: those that show the same code in another combination."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
# Files with the longest tests of `make test-slow`. One group has its turn each day.
TURNS = (
    (
        "benchmarks/test_side_by_side.py",
        "commands/clients/test_clients.py",
        "experience/test_interop_training.py",
        "generators/test_vllm_real.py",
        "generators/test_workers_vllm.py",
        "generators/vllm/test_media.py",
    ),
    (
        "commands/test_chaos.py",
        "commands/test_generator_deaths.py",
        "commands/test_lora_runs.py",
        "commands/test_rank_deaths.py",
        "commands/test_train_signals.py",
        "recipes/test_in_part.py",
        "rehearsal/test_rehearsal.py",
        "test_notebooks.py",
        "test_site.py",
    ),
    (
        "benchmarks/test_mutants.py",
        "commands/test_ahead.py",
        "commands/test_ahead_deaths.py",
        "executors/test_ray.py",
        "learners/test_megatron.py",
        "learners/test_megatron_lora.py",
        "learners/test_plan_spread.py",
        "learners/test_spread.py",
        "recipes/test_rotating.py",
        "rewards/integrations/test_trl_peer.py",
        "rewards/test_code_humaneval.py",
        "rewards/test_code_same.py",
        "training/test_checkpointing.py",
        "training/test_session.py",
    ),
)


def todays(cases: Sequence[T], count: int) -> list[T]:
    """Return `count` of the cases, each day (UTC) the next ones, or all of them where the
    environment has RATCHET_TEST_ALL=1."""
    if _runs_all():
        return list(cases)
    first = _count_days() * count
    return [cases[(first + i) % len(cases)] for i in range(min(count, len(cases)))]


def is_todays(file: str) -> bool:
    """Return True if the slow tests of a file (its path below tests/) run today."""
    turns = [i for i, files in enumerate(TURNS) if file in files]
    return not turns or _runs_all() or turns[0] == _count_days() % len(TURNS)


def _runs_all() -> bool:
    return os.environ.get("RATCHET_TEST_ALL") == "1"


def _count_days() -> int:
    return datetime.datetime.now(datetime.UTC).date().toordinal()
