"""What NeMo RL's PPO and on-policy distillation become: losses, teacher, critic and lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet.commands.migrate.importer import PEERS, ImportResult, Item, convert, read_config
from ratchet.commands.migrate.read_config import FlatConfig
from ratchet.errors import ConfigError

FILES = Path(__file__).parent / "peers"
GAE = "ppo.adv_estimator"
SCALING = "reward_scaling"


def from_keys(method: str, **values: Any) -> ImportResult:
    return convert(PEERS["nemo-rl"], method, FlatConfig(values))


def item(result: ImportResult, key: str) -> Item:
    return next(item for item in result.items if item.peer_key == key)


# --- on-policy distillation


def test_distillation_has_teacher_divergence_and_sizes() -> None:
    result = read_config(FILES / "nemo_distillation.yaml")
    assert result.recipe["algorithm"] == {
        "kind": "distill_on_policy",
        "teacher": "org/teacher",
        "objective": "mixed",
        "mix": 0.25,
        "top_k": 32,
        # The file names no number of answers per prompt: it is 1 there.
        "group_size": 1,
        "minibatches": 96 // 32,
    }
    assert result.flat["batch_size"] == 96
    # Their scheduler counts passes over a batch.
    assert result.flat["optimizer.warmup_steps"] == 4 * 3
    # Both softmaxes are at the sampling temperature.
    assert result.flat["sampling.temperature"] == 0.7
    assert "renormalised" in item(result, "distillation.topk_logits_k").note


@pytest.mark.parametrize(
    ("kl_type", "weight", "objective", "mix"),
    [
        ("forward", 0.25, "forward", None),
        ("reverse", 0.25, "reverse", None),
        ("mixed", 0.25, "mixed", 0.25),
        # mix is above 0 and below 1 here.
        ("mixed", 1.0, "forward", None),
        ("mixed", 0, "reverse", None),
    ],
)
def test_directions_of_the_kl(
    kl_type: str, weight: float, objective: str, mix: float | None
) -> None:
    keys = {"loss_fn.kl_type": kl_type, "loss_fn.mixed_kl_weight": weight}
    result = from_keys("distillation", **keys)
    assert result.flat["algorithm.objective"] == objective
    assert result.flat.get("algorithm.mix") == mix
    assert item(result, "loss_fn.mixed_kl_weight").status == ("same" if mix else "inert")


def test_a_silent_file_distills_with_their_defaults() -> None:
    flat = from_keys("distillation").flat
    assert (flat["algorithm.objective"], flat["algorithm.mix"]) == ("mixed", 0.5)
    assert (flat["batch_size"], flat["algorithm.group_size"]) == (128, 1)


def test_settings_of_the_teacher_are_compared_with_the_students() -> None:
    result = read_config(FILES / "nemo_distillation.yaml")
    size = item(result, "teacher.dtensor_cfg.tensor_parallel_size")
    assert (size.status, result.flat["learner.tensor_parallel"]) == ("dropped", 2)
    assert item(result, "teacher.dtensor_cfg.context_parallel_size").status == "inert"
    # It does not train.
    assert item(result, "teacher.optimizer.kwargs.lr").status == "inert"


def test_distillation_across_tokenizers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "across.yaml"
    path.write_text("distillation: {max_num_steps: 1}\nloss_fn: {gold_loss: true}\n")
    with pytest.raises(ConfigError, match="teacher_tokens=aligned"):
        read_config(path, "nemo-rl")


# --- PPO


def test_ppo_has_clips_lambdas_and_passes() -> None:
    algorithm = read_config(FILES / "nemo_ppo.yaml").recipe["algorithm"]
    assert algorithm["loss"] == {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.3, "dual_clip": 5}
    assert algorithm["advantage"] == {
        "bootstrap": False,
        "lam": 0.9,
        "value_lam": 1.0,
        "gamma": 0.99,
    }
    assert algorithm["critic"] == {"lr": 1e-5, "value_clip": 0.25, "warmup_steps": 5}
    assert (algorithm["epochs"], algorithm["minibatches"]) == (3, 64 * 4 // 128)
    assert algorithm["whiten"] is True
    assert algorithm["positive_nll_coef"] == 0.1


def test_each_setting_of_the_critic_that_differs_is_told() -> None:
    result = read_config(FILES / "nemo_ppo.yaml")
    statuses = {
        key: item(result, f"value.{key}").status
        for key in (
            "model_name",
            "max_grad_norm",
            "optimizer.kwargs.betas",
            "optimizer.kwargs.eps",
            "megatron_cfg.optimizer.lr",
            "megatron_cfg.optimizer.weight_decay",
        )
    }
    assert statuses == {
        "model_name": "inert",
        "max_grad_norm": "dropped",
        "optimizer.kwargs.betas": "dropped",
        "optimizer.kwargs.eps": "inert",
        "megatron_cfg.optimizer.lr": "inert",
        "megatron_cfg.optimizer.weight_decay": "inert",
    }
    assert "max_grad_norm" in item(result, "value_loss_fn.scale").note
    assert item(result, "ppo.critic_ppo_epochs").status == "inert"


@pytest.mark.parametrize(
    ("keys", "lambdas"),
    [
        ({}, {"lam": 0.95}),
        ({"gae_lambda": 0.5}, {"lam": 0.5}),
        ({"gae_lambda": 0.5, "gae_lambda_policy": 0.75}, {"lam": 0.75, "value_lam": 0.5}),
        ({"gae_lambda_value": 1.0, "gae_lambda_policy": 1}, {"lam": 1}),
        # It goes before both others.
        (
            {"length_adaptive_alpha": 0.05, "gae_lambda_policy": 0.5, "gae_lambda_value": 1.0},
            {"length_alpha": 0.05, "value_lam": 1.0},
        ),
    ],
)
def test_lambdas_of_policy_and_critic(keys: dict[str, Any], lambdas: dict[str, Any]) -> None:
    flat = from_keys("ppo", **{f"{GAE}.{name}": value for name, value in keys.items()}).flat
    prefix = "algorithm.advantage."
    converted = {
        key.removeprefix(prefix): value
        for key, value in flat.items()
        if key.startswith(prefix) and key != f"{prefix}bootstrap"
    }
    assert converted == {**lambdas, "gamma": 1.0}


@pytest.mark.parametrize(("bound", "clip"), [(None, None), (0, None), (0.5, 0.5)])
def test_the_clip_of_values_is_off_by_default_there(bound: Any, clip: float | None) -> None:
    flat = from_keys("ppo", **{"value_loss_fn.cliprange": bound}).flat
    assert flat["algorithm.critic.value_clip"] == clip
    assert from_keys("ppo").flat["algorithm.critic.value_clip"] is None


def test_the_critics_rate_is_that_of_its_learner() -> None:
    rates = {"value.optimizer.kwargs.lr": 1e-5, "value.megatron_cfg.optimizer.lr": 2e-5}
    for enabled, rate in ((False, 1e-5), (True, 2e-5)):
        flat = from_keys("ppo", **rates, **{"value.megatron_cfg.enabled": enabled}).flat
        assert flat["algorithm.critic.lr"] == rate


@pytest.mark.parametrize("bound", ["null", "0.25"])
def test_raw_rewards_are_returns_without_a_critic(tmp_path: Path, bound: str) -> None:
    text = (FILES / "nemo_ppo.yaml").read_text(encoding="utf-8")
    path = tmp_path / "raw.yaml"
    path.write_text(text.replace("name: gae", "name: raw_reward").replace("0.25", bound))
    result = read_config(path)
    assert result.problems == []
    algorithm = result.recipe["algorithm"]
    assert algorithm["kind"] == "policy_gradient"
    assert algorithm["advantage"] == {"kind": "turn_returns"}
    assert algorithm["critic"] is None
    assert item(result, "value.optimizer.kwargs.lr").status == "inert"


def test_other_passes_of_the_critic_are_told() -> None:
    result = from_keys("ppo", **{"ppo.ppo_epochs": 1, "ppo.critic_ppo_epochs": 4})
    assert result.flat["algorithm.epochs"] == 1
    assert item(result, "ppo.critic_ppo_epochs").status == "dropped"


def test_steps_end_a_run_without_a_limit_of_passes() -> None:
    for epochs in (100_000, -1):
        flat = from_keys("ppo", **{"ppo.max_num_steps": 100_000, "ppo.max_num_epochs": epochs}).flat
        assert flat["steps"] == 100_000
        assert "passes" not in flat
    flat = from_keys("ppo", **{"ppo.max_num_steps": 100_000, "ppo.max_num_epochs": 2}).flat
    assert flat["passes"] == 2
    assert "steps" not in flat


# --- shaping, of GRPO and PPO


@pytest.mark.parametrize("section", ["grpo", "ppo"])
def test_rewards_are_clipped_and_scaled_before_the_length_counts(section: str) -> None:
    keys = {
        f"{section}.{SCALING}.enabled": True,
        f"{section}.{SCALING}.source_min": 0.0,
        f"{section}.{SCALING}.source_max": 2.0,
        f"{section}.{SCALING}.target_min": -1.0,
        f"{section}.reward_shaping.enabled": True,
        f"{section}.reward_shaping.max_response_length": 64,
        f"{section}.reward_shaping.overlong_buffer_length": 16,
        f"{section}.reward_shaping.overlong_buffer_penalty": 1,
    }
    result = from_keys(section, **keys)
    # From [0, 2] to [-1, 1], the default of target_max: a factor of 1, and a shift.
    assert result.flat["algorithm.shaping"] == [
        {"kind": "clip", "low": 0.0, "high": 2.0},
        {"kind": "scale", "factor": 1.0, "shift": -1.0},
        {"kind": "overlong_penalty", "max_length": 64, "buffer": 16, "factor": 1.0},
    ]
    scaled = from_keys(section, **{**keys, f"{section}.{SCALING}.source_max": 1.0}).flat
    assert scaled["algorithm.shaping"][1] == {"kind": "scale", "factor": 2.0, "shift": -1.0}


def test_an_empty_range_of_rewards_is_told() -> None:
    keys = {f"grpo.{SCALING}.enabled": True, f"grpo.{SCALING}.source_max": 0.0}
    result = from_keys("grpo", **keys)
    assert "algorithm.shaping" not in result.flat
    assert "range is empty" in item(result, f"grpo.{SCALING}.enabled").note


@pytest.mark.parametrize("coef", [float("inf"), [1], 10**30, "x"])
def test_a_coefficient_that_is_no_number_is_told(coef: Any) -> None:
    key = "loss_fn.reference_policy_kl_penalty"
    result = from_keys("grpo", **{key: coef, "loss_fn.reference_policy_kl_type": "k3"})
    assert "set its counterpart by hand" in item(result, key).note


# --- what belongs to the task and to the adapter


def test_prompt_files_are_taken_over(tmp_path: Path) -> None:
    """They are named from the root of the repository, somewhere above the file."""
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts/cot.txt").write_text('Use \\boxed{{}} or {{"x": 1}}:\n{}')
    (tmp_path / "prompts/system.txt").write_text("Be brief.")
    path = tmp_path / "configs" / "a.yaml"
    path.parent.mkdir()
    path.write_text(
        "policy: {model_name: m}\ngrpo: {num_prompts_per_step: 8}\n"
        "data: {train: {dataset_name: OpenMathInstruct-2}, default: {prompt_file: prompts/cot.txt,"
        " system_prompt_file: prompts/system.txt}}\n"
    )
    flat = read_config(path).flat
    assert flat["environment.prompt"] == 'Use \\boxed{} or {"x": 1}:\n{problem}'
    assert flat["environment.system"] == "Be brief."
    # A word in braces would be a column here: this one has the answer.
    (tmp_path / "prompts/cot.txt").write_text("Use \\boxed{{answer}}:\n{}")
    result = read_config(path)
    assert "environment.prompt" not in result.flat
    assert "data.default.prompt_file" in {item.peer_key for item in result.dropped}


def test_an_adapter_on_megatron_is_one_here() -> None:
    peft = {"enabled": True, "dim": 128, "alpha": 512, "target_modules": []}
    values = {f"policy.megatron_cfg.peft.{key}": value for key, value in peft.items()}
    result = from_keys("grpo", **{"policy.megatron_cfg.enabled": True, **values})
    assert result.recipe["lora"] == {"rank": 128, "alpha": 512.0, "target_modules": "all-linear"}
    off = from_keys("grpo", **{"policy.megatron_cfg.enabled": False, **values})
    assert "lora" not in off.recipe


def test_unequal_pipeline_stages_stay_so() -> None:
    stages = {
        "policy.megatron_cfg.enabled": True,
        "policy.megatron_cfg.num_layers_in_first_pipeline_stage": 11,
        "policy.megatron_cfg.num_layers_in_last_pipeline_stage": None,
    }
    result = from_keys("grpo", **stages, **{"policy.megatron_cfg.pipeline_model_parallel_size": 2})
    assert result.flat["learner.first_stage_layers"] == 11
    assert "learner.last_stage_layers" not in result.flat
    whole = from_keys("grpo", **stages)
    assert "learner.first_stage_layers" not in whole.flat
    assert whole.dropped == []


def test_a_switch_that_is_off_is_no_loss() -> None:
    keys = {
        "policy.megatron_cfg.enabled": True,
        "policy.megatron_cfg.freeze_moe_router": False,
        "policy.draft.enabled": False,
        "policy.precision": "bfloat16",
        "loss_fn.force_on_policy_ratio": False,
    }
    assert from_keys("grpo", **keys).dropped == []
    keys |= {"policy.megatron_cfg.freeze_moe_router": True, "policy.precision": "float16"}
    assert {item.peer_key for item in from_keys("grpo", **keys).dropped} == {
        "policy.megatron_cfg.freeze_moe_router",
        "policy.precision",
    }
