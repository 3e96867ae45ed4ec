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
        "commands/report/test_browser.py",
        "commands/report/test_browser_answers.py",
        "commands/report/test_browser_runs.py",
        "commands/test_ahead_deaths.py",
        "commands/test_mirrored_runs.py",
        "environments/test_textworld.py",
        "executors/test_torchrun.py",
        "generators/test_vllm_real.py",
        "learners/test_megatron_half.py",
        "observe/test_trackers.py",
        "recipes/test_in_part.py",
        "recipes/test_ranks.py",
        "sandbox/test_engines.py",
        "test_platforms.py",
    ),
    (
        "benchmarks/test_mutants.py",
        "benchmarks/test_side_by_side.py",
        "commands/test_ahead.py",
        "commands/test_new_recipe.py",
        "environments/test_adapters.py",
        "learners/test_megatron.py",
        "learners/test_plan_spread.py",
        "learners/test_spread.py",
        "recipes/test_rotating.py",
        "training/test_session.py",
    ),
    (
        "commands/clients/test_mini_swe_agent.py",
        "commands/clients/test_pages.py",
        "commands/replay/test_command.py",
        "commands/test_lora_runs.py",
        "commands/test_rank_deaths.py",
        "commands/test_train_signals.py",
        "environments/openenv/test_environment.py",
        "executors/test_kills.py",
        "generators/test_workers_processes.py",
        "generators/test_workers_vllm.py",
        "learners/test_megatron_lora.py",
        "learners/test_spread_lora.py",
        "recipes/test_generator_workers.py",
        "rehearsal/test_rehearsal.py",
        "rewards/integrations/test_pages.py",
        "rewards/integrations/test_trl_peer.py",
        "rewards/test_code_same.py",
        "training/test_checkpointing.py",
        "training/test_profiling.py",
    ),
    (
        "commands/clients/test_clients.py",
        "commands/clients/test_inspect.py",
        "commands/test_chaos.py",
        "commands/test_code_runs.py",
        "commands/test_generator_deaths.py",
        "environments/harbor/test_swe_rows.py",
        "executors/test_ray.py",
        "experience/openai_proxy/test_broken_streams.py",
        "experience/test_interop_training.py",
        "generators/vllm/test_media.py",
        "models/convert/test_true_models.py",
        "recipes/test_megatron.py",
        "rewards/integrations/test_learns.py",
        "rewards/test_code_humaneval.py",
        "sandbox/test_attacks.py",
        "test_notebooks.py",
        "test_site.py",
        "test_start_pages.py",
    ),
)


def todays(cases: Sequence[T], count: int) -> list[T]:
    """Return `count` of the cases, each day (UTC) the next ones, or all of them where the
    environment has RATCHET_TEST_ALL=1."""
    if runs_all():
        return list(cases)
    first = count_days() * count
    return [cases[(first + i) % len(cases)] for i in range(min(count, len(cases)))]


def is_todays(file: str) -> bool:
    """Return True if the slow tests of a file (its path below tests/) run today."""
    turns = [i for i, files in enumerate(TURNS) if file in files]
    return not turns or runs_all() or turns[0] == count_days() % len(TURNS)


def runs_all() -> bool:
    """Return True if the environment has RATCHET_TEST_ALL=1: nothing is left for another day."""
    return os.environ.get("RATCHET_TEST_ALL") == "1"


def count_days() -> int:
    """Return the number of the day (UTC)."""
    return datetime.datetime.now(datetime.UTC).date().toordinal()
