"""The key table of NeMo RL's GRPO, and the conversions of its advantages.

"there" in a note means NeMo RL; "here" means Ratchet.
"""

from __future__ import annotations

from typing import Any

from ratchet.commands.migrate import numbers
from ratchet.commands.migrate.nemo_rl.common import common_rows
from ratchet.commands.migrate.nemo_rl.policy_gradient import LOSS, reward_rows
from ratchet.commands.migrate.nemo_rl.rollouts import rollout_rows
from ratchet.commands.migrate.table import (
    Conversion,
    Dropped,
    Inert,
    KeyRow,
    PeerConfig,
    Values,
    dropped,
    no_effect,
    only_if,
    rows_covered_by,
)

LEAVE_ONE_OUT = "use_leave_one_out_baseline"


def _estimator_flag(name: str, config: PeerConfig) -> bool:
    """Return a flag of the advantage estimator.

    The key in `grpo.adv_estimator` overrides the one in `grpo`.
    """
    section_key = f"grpo.adv_estimator.{name}"
    return config.flag(f"grpo.{name}" if config[section_key] is None else section_key)


def advantage(value: Any, config: PeerConfig) -> Any:
    scale = "std" if _estimator_flag("normalize_rewards", config) else "none"
    scale_key = {"algorithm.advantage.scale": scale}
    if not _estimator_flag("use_leave_one_out_baseline", config):
        return Values({"algorithm.kind": "grpo", **scale_key})
    note = (
        "a leave-one-out baseline is rloo here; NeMo RL also leaves the answer itself out of the "
        "standard deviation, Ratchet takes it over the whole group"
    )
    return Values({"algorithm.kind": "rloo", **scale_key}, note)


def estimator(value: Any, config: PeerConfig) -> Any:
    if value == "grpo":
        return Inert("algorithm.kind is set by grpo.use_leave_one_out_baseline")
    if value == "reinforce_plus_plus":
        baseline = "group" if config.flag("grpo.adv_estimator.minus_baseline") else "none"
        return Values(
            {"algorithm.kind": "reinforce_pp", "algorithm.advantage": {"baseline": baseline}}
        )
    if value == "gdpo":
        return Values({"algorithm.kind": "gdpo", "algorithm.advantage": {}})
    return Dropped(
        "only grpo, gdpo and reinforce_plus_plus are converted; the recipe has algorithm.kind grpo "
        "or rloo instead, by grpo.use_leave_one_out_baseline"
    )


def _only_for_grpo(convert: Conversion) -> Conversion:
    """Return the conversion, limited to files whose advantage estimator is `grpo`."""
    return only_if(
        lambda config: config["grpo.adv_estimator.name"] in (None, "grpo"),
        convert,
        "the estimator there does not read it",
    )


def advantage_clip(value: Any, config: PeerConfig) -> Any:
    low, high = (config[f"grpo.advantage_clip_{side}"] for side in ("low", "high"))
    if low is None or high is None or not numbers.number(low) < 0 < numbers.number(high):
        return Dropped(
            "algorithm.advantage_clip is a bound below 0 and one above 0, but these are "
            f"{low} and {high}"
        )
    if numbers.number(low) == -numbers.number(high):
        return numbers.real(high)
    return [numbers.real(low), numbers.real(high)]


def stop_metric(value: Any, config: PeerConfig) -> Any:
    if value == "accuracy":
        return "eval/accuracy"
    if value != "pass_k":
        return Dropped(f"{value} is not one of accuracy and pass_k")
    if not config["policy.generation.val_temperature"]:
        return Dropped("pass@k needs sampled answers: set evaluation.samples and .temperature")
    return f"eval/pass_at_{config.whole('grpo.val_num_generations_per_prompt', 1)}"


def stop_at(value: Any, config: PeerConfig) -> Any:
    metric = config["grpo.stop_at_validation_metric"]
    if metric is None:
        return Inert("it counts only with stop_at_validation_metric there")
    if isinstance(stop_metric(metric, config), Dropped):
        return Dropped("the metric of early stopping is left out")
    if not config.whole("grpo.val_period", 10, least=0):
        return Dropped("nothing is evaluated between steps: set evaluation.every too")
    return numbers.real(value)


def malformed_advantage(value: Any, config: PeerConfig) -> Any:
    advantage = numbers.real(value)
    return advantage if advantage < 0 else Dropped("an advantage of malformed turns is below 0")


GRPO = (
    KeyRow(
        f"grpo.{LEAVE_ONE_OUT}",
        "algorithm.kind, algorithm.advantage.scale",
        convert=only_if(
            lambda config: config[f"grpo.adv_estimator.{LEAVE_ONE_OUT}"] is None,
            _only_for_grpo(advantage),
            "grpo.adv_estimator overrides this key",
        ),
        default=True,
    ),
    KeyRow("grpo.normalize_rewards", covered_by=f"grpo.{LEAVE_ONE_OUT}", default=True),
    KeyRow(
        f"grpo.adv_estimator.{LEAVE_ONE_OUT}",
        "algorithm.kind, algorithm.advantage.scale",
        convert=_only_for_grpo(advantage),
    ),
    KeyRow(
        "grpo.adv_estimator.normalize_rewards", covered_by=f"grpo.adv_estimator.{LEAVE_ONE_OUT}"
    ),
    KeyRow("grpo.adv_estimator.name", "algorithm.kind", convert=estimator),
    *rows_covered_by("grpo.adv_estimator.name", "grpo.adv_estimator.*"),
    KeyRow("grpo.advantage_clip_low", "algorithm.advantage_clip", convert=advantage_clip),
    KeyRow("grpo.advantage_clip_high", "algorithm.advantage_clip", convert=advantage_clip),
    *dropped(
        "advantages have no best-at-k or pass-at-1 term",
        "grpo.use_best_at_k",
        "grpo.best_at_k_*",
        "grpo.*combined_training*",
    ),
    *dropped(
        "for groups of equal rewards set algorithm.equal_rewards or rollouts.dynamic_sampling",
        "grpo.zero_variance_prompt_filtering",
    ),
    *dropped(
        "for on-policy distillation set algorithm.teacher of a stage (docs/algorithms)",
        "on_policy_distillation.*",
        "_teachers.*",
    ),
    *no_effect(
        "it changes how the trainer computes, not its results",
        "grpo.deduplicate_multimodal_data",
        "grpo.debug_payload_metrics",
        "grpo.calculate_advantages_on_gpu",
    ),
    KeyRow(
        "grpo.invalid_tool_call_advantage",
        "algorithm.malformed_call_advantage",
        "calls are those that can't be parsed, not texts with invalid_tool_call_patterns",
        convert=malformed_advantage,
    ),
    KeyRow(
        "grpo.malformed_thinking_advantage",
        "algorithm.malformed_thinking_advantage",
        "unclosed thinking counts too, and the marks are <think> and [THINK]",
        convert=malformed_advantage,
    ),
    KeyRow("grpo.stop_at_validation_metric", "evaluation.metric", convert=stop_metric),
    KeyRow("grpo.stop_at_validation_threshold", "evaluation.stop_at", convert=stop_at),
    KeyRow(
        "grpo.val_num_generations_per_prompt",
        covered_by="policy.generation.val_temperature",
        default=1,
    ),
    *rollout_rows("grpo", prompts=32, attempts=16),
    *reward_rows("grpo"),
    *LOSS,
    *common_rows("grpo"),
)
