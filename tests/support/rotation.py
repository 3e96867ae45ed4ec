"""Cases that take turns by the day: those that show the same code in another combination."""

from __future__ import annotations

import datetime
import os
import zlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
# Files of tests/ whose slow tests run each day: the first hour of a user, and inputs that are wrong.
EVERY_DAY = (
    "recipes/test_quickstart.py",
    "rewards/answers/test_math.py",
    "test_checks.py",
    "test_fuzz_inputs.py",
    "test_hostile_inputs.py",
    "test_readme.py",
    "test_wheel.py",
)
# The files with the longest slow tests: a group has its turn each day, so that the days take about
# as long. All other files have theirs by a checksum of their path.
TURNS = (
    (
        "commands/clients/test_inspect.py",
        "commands/clients/test_pages.py",
        "commands/test_ahead_deaths.py",
        "environments/test_adapters.py",
        "generators/test_vllm_real.py",
        "observe/test_trackers.py",
        "rehearsal/test_rehearsal.py",
    ),
    (
        "benchmarks/test_mutants.py",
        "commands/clients/test_clients.py",
        "commands/report/test_browser.py",
        "commands/test_train_signals.py",
        "environments/test_textworld.py",
        "test_platforms.py",
    ),
    (
        "commands/clients/test_mini_swe_agent.py",
        "commands/test_chaos.py",
        "commands/test_rank_deaths.py",
        "learners/test_megatron_half.py",
        "recipes/test_rotating.py",
        "sandbox/test_engines.py",
    ),
    (
        "commands/replay/test_command.py",
        "commands/report/test_browser_answers.py",
        "commands/test_code_runs.py",
        "generators/test_workers_vllm.py",
        "learners/test_plan_spread.py",
        "recipes/test_in_part.py",
    ),
    (
        "benchmarks/test_side_by_side.py",
        "commands/test_lora_runs.py",
        "executors/test_ray_nodes.py",
        "executors/test_torchrun.py",
        "learners/test_spread.py",
        "recipes/test_megatron.py",
        "test_notebooks.py",
    ),
    (
        "commands/report/test_browser_runs.py",
        "commands/test_generator_deaths.py",
        "environments/openenv/test_environment.py",
        "executors/test_kills.py",
        "executors/test_ray.py",
        "generators/vllm/test_media.py",
        "learners/test_megatron.py",
        "test_site.py",
        "test_start_pages.py",
        "training/test_checkpointing.py",
    ),
    (
        "commands/test_ahead.py",
        "commands/test_mirrored_runs.py",
        "commands/test_new_recipe.py",
        "environments/harbor/test_swe_rows.py",
        "experience/openai_proxy/test_broken_streams.py",
        "experience/test_interop_training.py",
        "generators/test_workers_processes.py",
        "learners/test_megatron_lora.py",
        "learners/test_spread_lora.py",
        "models/convert/test_true_models.py",
        "recipes/test_generator_workers.py",
        "recipes/test_ranks.py",
        "rewards/integrations/test_learns.py",
        "rewards/integrations/test_pages.py",
        "rewards/integrations/test_trl_peer.py",
        "rewards/test_code_humaneval.py",
        "rewards/test_code_same.py",
        "sandbox/test_attacks.py",
        "training/test_profiling.py",
        "training/test_session.py",
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
    if file in EVERY_DAY or runs_all():
        return True
    turns = [i for i, files in enumerate(TURNS) if file in files]
    turn = turns[0] if turns else zlib.crc32(file.encode())
    return (turn - count_days()) % len(TURNS) == 0


def runs_all() -> bool:
    """Return True if the environment has RATCHET_TEST_ALL=1: nothing is left for another day."""
    return os.environ.get("RATCHET_TEST_ALL") == "1"


def count_days() -> int:
    """Return the number of the day (UTC)."""
    return datetime.datetime.now(datetime.UTC).date().toordinal()
