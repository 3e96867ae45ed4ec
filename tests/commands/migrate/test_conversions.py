"""What single values become: bounds, units, and what the peer itself makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet.commands.migrate.command import format_conversion_report, format_recipe
from ratchet.commands.migrate.importer import PEERS, ImportResult, Item, convert, read_config
from ratchet.commands.migrate.read_config import FlatConfig
from ratchet.commands.migrate.table import PeerConfig
from ratchet.commands.migrate.used_keys import HiddenValue, HiddenValueUsed
from ratchet.config.loader import load_config

TIS = "loss_fn.truncated_importance_sampling"
CORRECTION = "algorithm.rollout_correction"
ACTOR = "actor_rollout_ref.actor"


def item(result: ImportResult, key: str) -> Item:
    return next(item for item in result.items if item.peer_key == key)


def from_keys(peer: str, method: str, values: dict[str, Any]) -> ImportResult:
    return convert(PEERS[peer], method, FlatConfig(values))


def verl(values: dict[str, Any]) -> ImportResult:
    return from_keys("verl", "PPO trainer", values)


# --- rollout correction


@pytest.mark.fault("I2")
def test_nemo_truncated_weights_keep_their_lower_bound() -> None:
    """tis clamps the ratio to [ratio_min, ratio] (NeMo RL, loss_functions.py); it lost ratio_min
    without a word."""
    keys = {
        "loss_fn.use_importance_sampling_correction": True,
        f"{TIS}_type": "tis",
        f"{TIS}_ratio": 2.0,
        f"{TIS}_ratio_min": 0.25,
    }
    result = from_keys("nemo-rl", "grpo", keys)
    assert result.flat["algorithm.correction"] == {
        "weight": "token",
        "weight_low": 0.25,
        "weight_high": 2.0,
    }
    assert (
        item(result, f"{TIS}_ratio_min").covered_by == "loss_fn.use_importance_sampling_correction"
    )
    without = from_keys("nemo-rl", "grpo", {**keys, f"{TIS}_ratio_min": None})
    assert without.flat["algorithm.correction"] == {"weight": "token", "weight_high": 2.0}


@pytest.mark.fault("I2")
def test_a_bound_that_no_conversion_uses_is_told() -> None:
    """Dropped an upper bound NeMo clamps nothing, so the lower one has no effect there either."""
    keys = {
        "loss_fn.use_importance_sampling_correction": True,
        f"{TIS}_type": "tis",
        f"{TIS}_ratio_min": 0.25,
    }
    unused = item(from_keys("nemo-rl", "grpo", keys), f"{TIS}_ratio_min")
    assert unused.status == "dropped"
    assert "is not taken over" in unused.note


@pytest.mark.parametrize(("kind", "level"), [("icepop", "token"), ("seq-mask-tis", "geometric")])
def test_nemo_masks_have_both_bounds_and_the_whole_mean(kind: str, level: str) -> None:
    keys = {
        "loss_fn.use_importance_sampling_correction": True,
        f"{TIS}_type": kind,
        f"{TIS}_ratio": 5,
        f"{TIS}_ratio_min": 0.0,
    }
    result = from_keys("nemo-rl", "grpo", keys)
    correction = result.flat["algorithm.correction"]
    assert {key: correction[key] for key in ("mask", "mask_low", "mask_high", "weight_high")} == {
        "mask": level,
        "mask_low": 0.0,
        "mask_high": 5,
        "weight_high": None,
    }
    assert correction["mask_denominator"] == "all"
    assert (
        from_keys("nemo-rl", "grpo", {**keys, f"{TIS}_ratio_min": None}).flat.get(
            "algorithm.correction"
        )
        is None
    )


@pytest.mark.fault("I1")
@pytest.mark.parametrize("threshold", ["0.5_5", "0.5_5.0", " 0.5_5 "])
def test_verl_lower_upper_is_a_mask(threshold: str) -> None:
    """It was read as 0.55, as Python's float reads it; verl parts it at the underscore: IcePop
    within [0.5, 5]."""
    result = verl(
        {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": threshold}
    )
    found = {
        key.rpartition(".")[2]: value
        for key, value in result.flat.items()
        if key.startswith("algorithm.correction.")
    }
    bounds = {"mask": "token", "mask_low": 0.5, "mask_high": 5.0, "mask_denominator": "all"}
    assert found == {"weight": "token", "weight_high": None, **bounds}


@pytest.mark.parametrize("threshold", ["5_0.5", "high", True, -2, [1]])
def test_verl_bounds_that_are_none_are_told(threshold: Any) -> None:
    result = verl(
        {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": threshold}
    )
    assert not any(key.startswith("algorithm.correction") for key in result.flat)
    assert "rollout_is_threshold" in item(result, f"{CORRECTION}.rollout_is").note


def test_verl_one_bound_is_the_greatest_weight() -> None:
    for threshold in (2, 2.0, "2.0"):
        flat = verl(
            {
                f"{CORRECTION}.rollout_is": "sequence",
                f"{CORRECTION}.rollout_is_threshold": threshold,
            }
        ).flat
        assert (flat["algorithm.correction.weight"], flat["algorithm.correction.weight_high"]) == (
            "sequence",
            2.0,
        )
        assert "algorithm.correction.mask" not in flat


@pytest.mark.parametrize(
    ("name", "level"),
    [("token_k1", "token"), ("seq_sum_k1", "sequence"), ("seq_mean_k1", "geometric")],
)
def test_verl_rejection_by_k1_bounds_the_inverse_ratio(name: str, level: str) -> None:
    """k1 = -log ratio, and log 0.5 <= k1 <= log 4 is 1/4 <= ratio <= 2 (verl,
    rollout_corr_helper.py)."""
    flat = verl(
        {f"{CORRECTION}.rollout_rs": name, f"{CORRECTION}.rollout_rs_threshold": "0.5_4"}
    ).flat
    assert flat["algorithm.correction.mask"] == level
    assert (flat["algorithm.correction.mask_low"], flat["algorithm.correction.mask_high"]) == (
        0.25,
        2.0,
    )
    assert flat["algorithm.correction.weight"] == "none"
    one = verl({f"{CORRECTION}.rollout_rs": name, f"{CORRECTION}.rollout_rs_threshold": 4}).flat
    assert (one["algorithm.correction.mask_low"], one["algorithm.correction.mask_high"]) == (
        0.25,
        4.0,
    )


def test_verl_older_rejection_bounds_the_ratio() -> None:
    keys = {f"{CORRECTION}.rollout_rs": "geometric", f"{CORRECTION}.rollout_rs_threshold": 4.0}
    flat = verl({**keys, f"{CORRECTION}.rollout_rs_threshold_lower": 0.5}).flat
    assert (flat["algorithm.correction.mask_low"], flat["algorithm.correction.mask_high"]) == (
        0.5,
        4.0,
    )
    assert verl(keys).flat["algorithm.correction.mask_low"] == 0.25


@pytest.mark.parametrize("name", ["token_k3", "seq_max_k2", "token_k1,seq_mean_k3", "elsewhere"])
def test_verl_rejection_without_counterpart_is_told(name: str) -> None:
    result = verl({f"{CORRECTION}.rollout_rs": name, f"{CORRECTION}.rollout_rs_threshold": "0.5_4"})
    assert item(result, f"{CORRECTION}.rollout_rs").status == "dropped"
    assert item(result, f"{CORRECTION}.rollout_rs_threshold").status == "dropped"


def test_two_masks_are_not_made_one() -> None:
    keys = {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": "0.5_5"}
    result = verl(
        {
            **keys,
            f"{CORRECTION}.rollout_rs": "seq_mean_k1",
            f"{CORRECTION}.rollout_rs_threshold": "0.5_2",
        }
    )
    assert "two masks" in item(result, f"{CORRECTION}.rollout_is").note
    assert result.flat["algorithm.correction.mask"] == "geometric"


def test_roll_filter_by_ratio_is_the_mask() -> None:
    rule = {"enabled": True, "agg_type": "segment", "ratio_low": 0.5, "ratio_high": 2}
    result = from_keys(
        "roll", "RLVR", {"train_infer_correction.filters": [rule, {"enabled": False}]}
    )
    assert (
        result.flat["algorithm.correction.mask"],
        result.flat["algorithm.correction.mask_low"],
    ) == ("turn", 0.5)
    assert result.flat["algorithm.correction.weight"] == "none"
    two = from_keys(
        "roll", "RLVR", {"train_infer_correction.filters": [rule, {**rule, "diff_enabled": True}]}
    )
    assert item(two, "train_infer_correction.filters").status == "dropped"


# --- units


@pytest.mark.fault("I3")
def test_verl_and_nemo_schedulers_count_batches() -> None:
    """Both step their schedulers once a batch, ours once an optimizer step: a warm-up of 10 is 10 x
    4 x 2 here."""
    keys = {
        "data.train_batch_size": 64,
        f"{ACTOR}.ppo_mini_batch_size": 16,
        f"{ACTOR}.ppo_epochs": 2,
    }
    assert verl({**keys, f"{ACTOR}.optim.lr_warmup_steps": 10}).flat["optimizer.warmup_steps"] == 80
    share = {f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.05, "trainer.total_training_steps": 110}
    assert verl({**keys, **share}).flat["optimizer.warmup_steps"] == 5 * 8  # int(5.5) batches
    batch = {
        "grpo.num_prompts_per_step": 8,
        "grpo.num_generations_per_prompt": 4,
        "policy.train_global_batch_size": 16,
    }
    chain = [{"name": "x.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 10}}]
    assert (
        from_keys("nemo-rl", "grpo", {**batch, "policy.scheduler": chain}).flat[
            "optimizer.warmup_steps"
        ]
        == 20
    )


@pytest.mark.fault("I3")
def test_a_division_that_leaves_a_rest_is_refused() -> None:
    """1000 // 256 was 3 optimizer steps, without a word."""
    result = verl({"data.train_batch_size": 1000, f"{ACTOR}.ppo_mini_batch_size": 256})
    assert "algorithm.minibatches" not in result.flat
    assert "1000 / 256" in item(result, f"{ACTOR}.ppo_mini_batch_size").note


def test_trl_rounds_as_transformers_does() -> None:
    """warmup_steps below 1 is a share of all steps, rounded up; above it is cut to a whole
    number."""
    base = {"num_generations": 8, "per_device_train_batch_size": 8, "max_steps": 30}
    assert (
        from_keys("trl", "GRPOConfig", {**base, "warmup_steps": 0.05}).flat[
            "optimizer.warmup_steps"
        ]
        == 2
    )
    assert (
        from_keys("trl", "GRPOConfig", {**base, "warmup_steps": 2.9}).flat["optimizer.warmup_steps"]
        == 2
    )
    uneven = from_keys("trl", "GRPOConfig", {**base, "num_iterations": 4})
    assert uneven.flat["steps"] == 8
    assert "30 optimizer steps there, 32 here" in item(uneven, "max_steps").note


def test_roll_places_are_counted_or_refused() -> None:
    base = {"actor_train.strategy_args.strategy_name": "fsdp2_train"}
    for mapping, count in (
        ("list(range(0,8))", 8),
        ("list(range(0, 4)) + list(range(8,12))", 8),
        ("list([0,1,4])", 3),
        ([1, 2], 2),
    ):
        flat = from_keys("roll", "RLVR", {**base, "actor_train.device_mapping": mapping}).flat
        assert flat["learner.dp_shard"] == count
    infer = {"actor_infer.strategy_args.strategy_name": "vllm"}
    for train, theirs, shares in (
        ("list(range(0,8))", "list(range(8,16))", None),
        ("list(range(0,4))", "[2, 3] + list(range(4, 8))", True),
    ):
        mappings = {"actor_train.device_mapping": train, "actor_infer.device_mapping": theirs}
        flat = from_keys("roll", "RLVR", {**base, **infer, **mappings}).flat
        assert flat.get("cluster.colocated") is shares
    strange = from_keys("roll", "RLVR", {**base, "actor_train.device_mapping": "list(sorted(a))"})
    assert "device_mapping" in item(strange, "actor_train.strategy_args.strategy_name").note


# --- what the peer itself makes of a value


def test_verl_gspo_is_a_mean_over_answers_whatever_it_says() -> None:
    keys = {f"{ACTOR}.policy_loss.loss_mode": "gspo", f"{ACTOR}.loss_agg_mode": "token-mean"}
    result = verl(keys)
    assert result.flat["algorithm.weighting"] == "sequence_mean"
    assert "always takes the mean over answers" in item(result, f"{ACTOR}.loss_agg_mode").note
    assert (
        verl({f"{ACTOR}.policy_loss.loss_mode": "sapo", f"{ACTOR}.tau_neg": 2.0}).flat[
            "algorithm.loss.tau_neg"
        ]
        == 2.0
    )
    cispo = {f"{ACTOR}.policy_loss.loss_mode": "cispo", f"{ACTOR}.clip_ratio_low": 0.5}
    assert verl(cispo).flat["algorithm.loss.clip_low"] == 0.5


def test_nemo_estimator_section_goes_first() -> None:
    keys = {"grpo.use_leave_one_out_baseline": False, "grpo.adv_estimator.name": "grpo"}
    assert (
        from_keys(
            "nemo-rl", "grpo", {**keys, "grpo.adv_estimator.use_leave_one_out_baseline": True}
        ).flat["algorithm.kind"]
        == "rloo"
    )
    assert from_keys("nemo-rl", "grpo", keys).flat["algorithm.kind"] == "grpo"


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ("Et*2|(ttt|)*2tL", [2, 3, 3, 1]),
        ("Et|tt|t|tL", [1, 2, 1, 1]),
        ("E,t|t|t|t,L", None),  # equal
        ("Et|tL", "set learner.stage_layers"),  # not as many stages as ranks
        ("Et|tt|tt|mL", "set learner.stage_layers"),
        ("E" + "t*999" * 99, "set learner.stage_layers"),
    ],
)
def test_roll_layouts_of_pipelines_are_the_layers_of_ranks(layout: str, stages: Any) -> None:
    config = "actor_train.strategy_args.strategy_config"
    keys = {
        "actor_train.strategy_args.strategy_name": "megatron_train",
        f"{config}.pipeline_model_parallel_size": 4,
        f"{config}.pipeline_model_parallel_layout": layout,
        "actor_train.device_mapping": "list(range(0,4))",
    }
    result = from_keys("roll", "RLVR", keys)
    assert result.flat.get("learner.stage_layers") == (stages if isinstance(stages, list) else None)
    row = item(result, f"{config}.pipeline_model_parallel_layout")
    assert (row.status == "inert") == (stages is None)
    if isinstance(stages, str):
        assert stages in row.note
    one = from_keys("roll", "RLVR", {**keys, f"{config}.pipeline_model_parallel_size": 1})
    assert item(one, f"{config}.pipeline_model_parallel_layout").status == "inert"
    last = f"{config}.additional_configs.num_layers_in_last_pipeline_stage"
    named = from_keys(
        "roll", "RLVR", {**keys, f"{config}.pipeline_model_parallel_layout": None, last: 3}
    )
    assert named.flat["learner.last_stage_layers"] == 3


def test_roll_dual_clip_is_of_pg_clip() -> None:
    keys = {
        "dual_clip_loss": True,
        "use_pg_clip_range": True,
        "pg_clip": 0.5,
        "pg_clip_low": 0.1,
        "pg_clip_high": 0.3,
    }
    assert from_keys("roll", "RLVR", keys).flat["algorithm.loss.dual_clip"] == 2.0


def test_no_clipping_of_gradients_is_none_here() -> None:
    for peer, method, key, value in (
        ("trl", "GRPOConfig", "max_grad_norm", 0),
        ("trl", "GRPOConfig", "max_grad_norm", None),
        ("nemo-rl", "grpo", "policy.max_grad_norm", None),
    ):
        result = from_keys(peer, method, {key: value})
        assert result.flat["optimizer.max_grad_norm"] is None
        assert key not in result.null_keys


@pytest.mark.fault("I5")
def test_a_null_there_is_not_their_default() -> None:
    """TRL's null bound is not a bound; it was read as the default, 3."""
    keys = {
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": None,
    }
    assert from_keys("trl", "GRPOConfig", keys).flat["algorithm.correction"] == {
        "weight": "token",
        "weight_high": None,
    }


# --- the account


@pytest.mark.fault("I5")
def test_what_another_key_replaces_is_told() -> None:
    result = from_keys(
        "roll", "RLVR", {"rollout_batch_size": 64, "train_env_manager.group_size": 8}
    )
    assert result.flat["batch_size"] == 8
    assert (
        "batch_size is overridden by train_env_manager.group_size"
        in item(result, "rollout_batch_size").note
    )


def test_a_switch_that_is_off_leaves_its_section_without_effect() -> None:
    result = verl({f"{ACTOR}.use_kl_loss": False, f"{ACTOR}.kl_loss_coef": 0.5})
    assert item(result, f"{ACTOR}.kl_loss_coef").status == "inert"
    assert "off there" in item(result, f"{ACTOR}.kl_loss_coef").note


@pytest.mark.fault("I2")
def test_a_key_asked_for_and_left_is_not_taken_over() -> None:
    """What the mechanism holds: a conversion that reads a value and drops it does not count as one
    that used it."""
    result = from_keys(
        "nemo-rl", "grpo", {"loss_fn.disable_ppo_ratio": True, "loss_fn.ratio_clip_min": 0.1}
    )
    assert result.flat["algorithm.loss.kind"] == "reinforce"
    assert item(result, "loss_fn.ratio_clip_min").status == "dropped"
    assert "algorithm.loss.kind" not in result.chosen


@pytest.mark.parametrize(
    "use",
    [
        bool,
        str,
        len,
        iter,
        hash,
        repr,
        lambda x: x + 1,
        lambda x: x > 1,
        lambda x: x == 1,
        lambda x: isinstance(x, int),
        lambda x: x.a,
    ],
)
def test_a_hidden_value_sees_every_use(use: Any) -> None:
    with pytest.raises(HiddenValueUsed):
        use(HiddenValue())


def test_configuration_keeps_what_is_asked_for() -> None:
    config = PeerConfig({"a": None, "b": 2.0}, {"a": 1, "c": 3})
    assert (config["a"], config.whole("b"), config["c"], config["d"]) == (None, 2, 3, None)
    assert config.read_keys == {"a", "b", "c", "d"}


def test_the_whole_of_it_is_accepted(tmp_path: Path) -> None:
    path, out = tmp_path / "run.sh", tmp_path / "recipe.yaml"
    path.write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
        "actor_rollout_ref.model.path=m \\\n"
        " actor_rollout_ref.rollout.n=8 trainer.n_gpus_per_node=1 data.train_batch_size=256 a.b=1 "
        "\\\n"
        f" trainer.nnodes=1 {CORRECTION}.rollout_is=token \\\n"
        f" {CORRECTION}.rollout_is_threshold=\"'0.5_5'\" {ACTOR}.ppo_epochs=1 "
        f"{ACTOR}.ppo_epochs=2\n"
    )
    result = read_config(path)
    text = format_recipe(result, "run.sh")
    out.write_text(text)
    config = load_config(out)
    correction: Any = config.stages[0].algorithm.correction  # pyright: ignore[reportAttributeAccessIssue]
    assert (correction.mask, correction.mask_low, correction.mask_high) == ("token", 0.5, 5.0)
    told = "\n".join(format_conversion_report(result))
    assert f"{ACTOR}.ppo_epochs=1" in told
    assert "Without effect on results here:" in told


def test_passes_over_the_data_are_taken_over_where_no_steps_are() -> None:
    trl = {"num_generations": 8, "model_name_or_path": "m", "per_device_train_batch_size": 8}
    assert from_keys("trl", "GRPOConfig", trl).flat["passes"] == 3  # TRL's own default
    once = from_keys("trl", "GRPOConfig", {**trl, "num_train_epochs": 0.5, "warmup_ratio": 0.1})
    assert (once.flat["passes"], once.flat["optimizer.warmup_share"]) == (0.5, 0.1)
    stepped = from_keys("trl", "GRPOConfig", {**trl, "max_steps": 10, "warmup_ratio": 0.1}).flat
    assert (stepped["steps"], stepped["optimizer.warmup_steps"]) == (10, 1)
    assert not {"passes", "optimizer.warmup_share"} & stepped.keys()

    assert verl({"trainer.total_epochs": 15}).flat["passes"] == 15
    both = verl({"trainer.total_epochs": 15, "trainer.total_training_steps": 9}).flat
    assert both["steps"] == 9
    assert "passes" not in both

    def nemo(**keys: int) -> dict[str, Any]:
        return from_keys("nemo-rl", "grpo", {f"grpo.{key}": keys[key] for key in keys}).flat

    assert nemo(max_num_steps=1_000_000, max_num_epochs=1)["passes"] == 1
    assert nemo(max_num_epochs=2)["passes"] == 2
    assert nemo(max_num_steps=500, max_num_epochs=1)["steps"] == 500
    assert "passes" not in nemo(max_num_steps=500, max_num_epochs=1)


# --- early stopping


def test_nemo_stops_at_a_validation_metric() -> None:
    def flat(metric: str | None, **more: Any) -> dict[str, Any]:
        stop = {"stop_at_validation_metric": metric, "stop_at_validation_threshold": 0.8}
        values = {f"grpo.{key}": value for key, value in {**stop, **more}.items()}
        sampled = {"policy.generation.val_temperature": 1.0} if more else {}
        recipe = from_keys("nemo-rl", "grpo", {**values, **sampled}).flat
        return {key: recipe.get(f"evaluation.{key}") for key in ("metric", "stop_at")}

    assert flat("accuracy") == {"metric": "eval/accuracy", "stop_at": 0.8}
    sampled = flat("pass_k", val_num_generations_per_prompt=4)
    assert sampled == {"metric": "eval/pass_at_4", "stop_at": 0.8}
    for metric in (None, "pass_k", "validation_loss"):
        assert flat(metric) == {"metric": None, "stop_at": None}
    assert flat("accuracy", val_period=0)["stop_at"] is None


def test_nemo_advantages_of_malformed_turns() -> None:
    keys = {"grpo.invalid_tool_call_advantage": -5.0, "grpo.malformed_thinking_advantage": 0.0}
    result = from_keys("nemo-rl", "grpo", keys)
    assert result.flat["algorithm.malformed_call_advantage"] == -5.0
    assert "algorithm.malformed_thinking_advantage" not in result.flat
    assert item(result, "grpo.malformed_thinking_advantage").status == "dropped"
