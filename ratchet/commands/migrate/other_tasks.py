"""Refuse files of verl and TRL whose task has no conversion.

Other keys without a counterpart are only listed in the report. Without the keys that are named
here, the recipe would train on another task, or by another method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.commands.migrate.verl_values import ESTIMATORS, ROLLOUT

AGENT_LOOP = f"{ROLLOUT}.agent.default_agent_loop"
TOOLS_FIX = "Write a recipe with environment.kind=tool_use, or with agent."
# Keys of the configurations of TRL's trainers that sample answers for preference losses.
ONLINE_PREFERENCE_KEYS = ("reward_model_path", "missing_eos_penalty", "mixture_coef", "judge")
INTERACTIVE_KEYS = ("environment_factory", "rollout_func", "tools")


def explain_unsupported_verl_task(values: Mapping[str, Any]) -> str | None:
    """Return why the file's task is not converted, and what to do instead; None if it is converted.

    Args:
        values: The file's values by dotted key.
    """
    if values.get("distillation.enabled") is True:
        return (
            "the run distills on-policy, which is not converted. Write a recipe with "
            "algorithm.kind=on_policy_distillation."
        )
    model = values.get("model.partial_pretrain", values.get("model.path"))
    data = values.get("data.train_files")
    if model is not None and data is not None:
        file = data if isinstance(data, str) else "FILE"
        return (
            "the run is supervised fine-tuning, and of verl only the PPO trainer is converted. "
            f"`ratchet new recipe --like sft --data {file} --model {model}` writes its recipe."
        )
    estimator = str(values.get("algorithm.adv_estimator", "gae"))
    if estimator not in ESTIMATORS:
        return (
            f"adv_estimator={estimator} is not converted, only {', '.join(ESTIMATORS)} are. Write "
            "a recipe with the algorithm.advantage that it needs (docs/algorithms)."
        )
    loop = values.get(AGENT_LOOP)
    if loop not in (None, "single_turn_agent"):
        return f"the run's agent loop is {loop}, which is not converted. {TOOLS_FIX}"
    if reason := _find_several_turns(values):
        return (
            f"the run's attempts have several turns ({reason}), which is not converted. {TOOLS_FIX}"
        )
    return None


def _find_several_turns(values: Mapping[str, Any]) -> str:
    """Return the key of verl by which attempts have several turns; "" if they have one.

    Scripts often leave `multi_turn.enable` to a configuration file that the importer can't read.
    """
    turns = f"{ROLLOUT}.multi_turn"
    if (is_enabled := values.get(f"{turns}.enable")) is not None:
        return "multi_turn.enable" if is_enabled is True else ""
    keys = (f"{turns}.{name}" for name in ("tool_config_path", "interaction_config_path"))
    if key := next((key for key in keys if values.get(key)), ""):
        return key.removeprefix(f"{ROLLOUT}.")
    return "--config-name" if "multiturn" in str(values.get("--config-name")) else ""


def explain_unsupported_trl_task(values: Mapping[str, Any]) -> str | None:
    """Return why the file's task is not converted, and what to do instead; None if it is converted.

    Args:
        values: The file's values by key.
    """
    for key in ONLINE_PREFERENCE_KEYS:
        if values.get(key) is not None:
            return (
                f"{key} is of a trainer that samples answers for a preference loss, which is not "
                "converted. Write a recipe with algorithm.kind=grpo and rewards."
            )
    for key in INTERACTIVE_KEYS:
        if values.get(key):
            return (
                f"the run's attempts have several turns ({key}), which are not converted. Write a "
                "recipe with environment.kind=trl or tool_use."
            )
    if (path := values.get("reward_model_name_or_path")) and not values.get("reward_funcs"):
        return (
            f"the run's reward is the model {path}, which is not converted. Write a recipe with "
            f"rewards: [{{kind: reward_model, path: {path}}}]."
        )
    return None
