"""Find the tasks of ROLL's files that have no conversion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.commands.migrate.roll.agentic import describe_environments
from ratchet.commands.migrate.roll.rewards import find_reward_problem, list_workers
from ratchet.commands.migrate.table import PeerConfig

ESTIMATORS = ("gae", "grpo", "reinforce", "gigpo")
# Policy losses of `pg_variant`, and their counterparts.
LOSSES = {"topr": "topr", "vanilla": "reinforce", "cispo": "cispo", "kimi15": "kimi"}
# Keys that only data with images, video or audio have, as endings.
MEDIA_ENDINGS = (".image_max_pixels", ".image_folder", ".video_folder", ".audio_folder")
MEDIA_REWARDS = {"DetectionRewardWorker": "detection", "VideoR1RewardWorker": "video_r1"}


def explain_unsupported_task(values: Mapping[str, Any]) -> str | None:
    """Return why the file's task is not converted, and what to do instead; None if it is converted.

    Args:
        values: The file's values by dotted key.
    """
    sections = {key.partition(".")[0] for key in values}
    config = PeerConfig(values, {})
    workers = {path.rpartition(".")[2] for path in list_workers(config).values()}
    if "train_env_manager" in sections:
        return describe_environments(values) or _describe_estimator(values)
    if sections & {"student_train", "student_infer"} or any(
        values.get(key) is True for key in ("is_pure_opd", "use_opd")
    ):
        return (
            "the run distills on-policy, which is not converted from ROLL. Write a recipe with "
            "algorithm.kind=on_policy_distillation or distill_on_policy."
        )
    if "student" in sections:
        return (
            "the run distills off-policy, which is not converted from ROLL. Write a recipe with "
            "algorithm.kind=distill_off_policy, whose page has the counterpart of each key."
        )
    if any(
        key.endswith(".model_type") and "diffusion" in str(value) for key, value in values.items()
    ):
        return "the run trains a diffusion model, which Ratchet does not."
    rewards = [kind for worker, kind in MEDIA_REWARDS.items() if worker in workers]
    if any(key.endswith(MEDIA_ENDINGS) for key in values) or rewards:
        kinds = f" and rewards of kind {', '.join(rewards)}" if rewards else ""
        return (
            "the run's data have images, video or audio, whose columns and rewards are not "
            f"converted. Write a recipe with environment.kind=vlm{kinds}."
        )
    return _describe_rewards(config) or _describe_estimator(values)


def _describe_rewards(config: PeerConfig) -> str | None:
    """Return sentences on the rewards if none of them is converted; None if there are none."""
    problem = find_reward_problem(config)
    return None if problem is None else f"none of the run's rewards is converted. {problem}."


def _describe_estimator(values: Mapping[str, Any]) -> str | None:
    variant = values.get("actor_train.pg_variant", "ppo")
    if values.get("use_topr_neg_loss_coef") is not None:
        variant = "topr"
    if variant != "ppo":
        return (
            f"the run's policy loss is {variant}, which is not converted. Write a recipe with "
            f"algorithm.loss.kind={LOSSES.get(variant, 'ppo')}."
        )
    estimator = values.get("adv_estimator")
    if estimator is None or estimator in ESTIMATORS:
        return None
    return (
        f"adv_estimator={estimator} is not converted, only {', '.join(ESTIMATORS)}. Set the "
        "nearest of them in a copy, or choose algorithm.kind by hand (`ratchet help algorithm`)."
    )
