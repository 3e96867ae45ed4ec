"""Find the tasks of NeMo RL's files that have no conversion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.commands.migrate.nemo_rl.distillation import CROSS_TOKENIZER
from ratchet.commands.migrate.shared import find_preset_name, normalise_name
from ratchet.data.presets.media_datasets import MEDIA_PRESETS

# Environments that are converted: questions with a checked answer.
MATH = frozenset({"math", "dapo"})
# Keys of the section `env` that are flags. The other keys are environments.
FLAGS = frozenset(
    {
        "should_use_nemo_gym",
        "should_log_nemo_gym_responses",
        "should_mask_flagged_samples",
        "_override_",
    }
)
FIXES = {
    "reward_model": "Write a recipe with rewards: [{kind: reward_model}].",
    "sliding_puzzle_game": "Write a recipe with environment.kind=sliding_puzzle.",
    "nemo_gym": "Write a recipe with environment.kind=nemo_gym.",
    "math_multi_reward": "Write a recipe with algorithm.kind=gdpo and rewards: [{kind: "
    "exact_match}, {kind: regex}, {kind: format}].",
}
SAMPLING_SECTIONS = ("grpo", "ppo", "distillation")
ESTIMATORS = {
    "grpo": ("grpo", "gdpo", "reinforce_plus_plus"),
    "ppo": ("gae", "raw_reward"),
}
# Datasets of images, video or audio: the presets' names, and names that only NeMo RL has.
MEDIA_DATASETS = frozenset(map(normalise_name, MEDIA_PRESETS)) | {
    "dailyomni",
    "generalconversationdataset",
    "mmprtiny",
    "audiomcq",
    "intenttrain",
    "mmau",
}


def explain_unsupported_task(values: Mapping[str, Any]) -> str | None:
    """Return why the file's task is not converted, and what to do instead; None if it is converted.

    Args:
        values: The file's values by dotted key.
    """
    if CROSS_TOKENIZER in values:
        return (
            "the run distills off-policy across tokenizers, which is not converted. Write a recipe "
            "with algorithm.kind=on_policy_distillation and teacher_tokens=aligned."
        )
    sections = {key.partition(".")[0] for key in values}
    return (
        _describe_environment(values, sections)
        or _describe_data(values)
        or _describe_estimator(values, sections)
    )


def _describe_environment(values: Mapping[str, Any], sections: set[str]) -> str | None:
    if not sections & set(SAMPLING_SECTIONS):
        return None
    names = {
        str(value)
        for key, value in values.items()
        if key.startswith("data.") and key.endswith("env_name") and value
    }
    environments = {key.split(".")[1] for key in values if key.startswith("env.")}
    if values.get("env.should_use_nemo_gym") is True:
        names = {"nemo_gym"}
    elif "sliding_puzzle_game" in environments:  # its trainer does not read env_name
        names = {"sliding_puzzle_game"}
    if not names:
        names = environments - FLAGS
        if names & MATH:
            return None
    other_names = sorted(names - MATH)
    if not other_names:
        return None
    fix = FIXES.get(other_names[0], "Write a recipe with environment.kind=vlm, dataset or another.")
    return f"the run's environment is {', '.join(other_names)}, which is not converted. {fix}"


def _describe_data(values: Mapping[str, Any]) -> str | None:
    train = values.get("data.train")
    if isinstance(train, list):
        parts = ", ".join(map(_write_part, train))
        return (
            f"the run mixes {len(train)} datasets, which is not converted. Write a recipe with "
            f"environment: {{kind: mixture, parts: [{parts}]}}, and a weight in each for its share."
        )
    name = values.get("data.train.dataset_name") or values.get("data.dataset_name")
    if name is not None and normalise_name(str(name)) in MEDIA_DATASETS:
        return (
            f"the run's dataset {name} has images, video or audio, which are not converted. Write "
            "a recipe with environment.kind=vlm."
        )
    return None


def _write_part(dataset: Any) -> str:
    """Return the part of a mixture that reads a dataset of the file, as a recipe writes it."""
    values: Mapping[str, Any] = dataset if isinstance(dataset, Mapping) else {}
    name = str(values.get("data_path") or values.get("dataset_name"))
    preset_name = None if values.get("data_path") else find_preset_name(name)
    source = f"train: {name}" if values.get("data_path") else f"hub: {name}"
    tag = name.rpartition("/")[2].partition(".")[0]
    return f"{{kind: dataset, {f'preset: {preset_name}' if preset_name else source}, tag: {tag}}}"


def _describe_estimator(values: Mapping[str, Any], sections: set[str]) -> str | None:
    section = next((name for name in ESTIMATORS if name in sections), "")
    estimator = values.get(f"{section}.adv_estimator.name")
    if estimator is None or estimator in ESTIMATORS[section]:
        return None
    fix = (
        "Write a recipe with algorithm.kind=on_policy_distillation."
        if estimator == "opd"
        else "Choose algorithm.kind by hand (`ratchet help algorithm`)."
    )
    return f"{section}.adv_estimator.name={estimator} is not converted. {fix}"
