"""Refuse configurations whose task can't be converted: the recipe would train on another task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ratchet.errors import ConfigError

# NeMo RL's environments that are converted: questions with a checked answer.
NEMO_RL_MATH = frozenset({"math", "math_multi_reward", "dapo"})
# Keys of NeMo RL's section `env` that are flags. The other keys are environments.
NEMO_RL_FLAGS = frozenset(
    {
        "should_use_nemo_gym",
        "should_log_nemo_gym_responses",
        "should_mask_flagged_samples",
        "_override_",
    }
)
NEMO_RL_FIXES = {
    "reward_model": "Write a recipe with rewards: [{kind: reward_model}].",
    "sliding_puzzle_game": "Write a recipe with environment.kind=sliding_puzzle.",
    "nemo_gym": "Ratchet has no client of NeMo Gym's servers.",
}


def refuse_other_tasks(peer: str, values: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError if the file trains on a task that the importer does not convert.

    Args:
        peer: Key in `PEERS` of the library that the file is for.
        values: The file's values by dotted key.
        path: The file, for the error.
    """
    find = FINDERS.get(peer)
    problem = None if find is None else find(values)
    if problem is not None:
        raise ConfigError(
            f"{path}: {problem} To convert its other keys, run `ratchet import` on a copy that "
            "trains on questions."
        )


def _find_roll_task(values: Mapping[str, Any]) -> str | None:
    """Return sentences on the task and its fix; None if the task is converted."""
    sections = {key.partition(".")[0] for key in values}
    if "train_env_manager" in sections:
        kinds = {
            str(value) for key, value in values.items() if key.rpartition(".")[2] == "env_type"
        }
        return (
            f"the run plays ROLL's environments ({', '.join(sorted(kinds)) or 'train_env_manager'})"
            ", which are not converted. Write a recipe with environment.kind=sokoban, frozen_lake, "
            "gem or another (`ratchet help environment`)."
        )
    distills = "student_train" in sections or any(
        values.get(key) is True for key in ("is_pure_opd", "use_opd")
    )
    if distills:
        return (
            "the run distills on-policy, which is not converted from ROLL. Write a recipe with "
            "algorithm.kind=on_policy_distillation or distill_on_policy."
        )
    return None


def _find_nemo_rl_task(values: Mapping[str, Any]) -> str | None:
    """Return sentences on the task and its fix; None if the task is converted."""
    if not any(key.startswith(("grpo.", "ppo.", "distillation.")) for key in values):
        return None
    names = {
        str(value)
        for key, value in values.items()
        if key.startswith("data.") and key.endswith("env_name") and value
    }
    sections = {key.split(".")[1] for key in values if key.startswith("env.")}
    if values.get("env.should_use_nemo_gym") is True:
        names = {"nemo_gym"}
    elif "sliding_puzzle_game" in sections:  # its trainer does not read env_name
        names = {"sliding_puzzle_game"}
    if not names:
        names = sections - NEMO_RL_FLAGS
        if names & NEMO_RL_MATH:
            return None
    other_names = sorted(names - NEMO_RL_MATH)
    if not other_names:
        return None
    fix = NEMO_RL_FIXES.get(
        other_names[0], "Write a recipe with environment.kind=vlm, dataset or another."
    )
    return f"the run's environment is {', '.join(other_names)}, which is not converted. {fix}"


FINDERS: Mapping[str, Callable[[Mapping[str, Any]], str | None]] = {
    "roll": _find_roll_task,
    "nemo-rl": _find_nemo_rl_task,
}
