"""Predictions: the arithmetic by hand, a probe that really runs, divisions that fit and say when
none does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratchet.cli.main import app
from ratchet.commands.plan.cluster import plan_cluster
from ratchet.commands.plan.command import (
    CHECKPOINT_COPY,
    MemoryPlan,
    ProcessMemory,
    StagePlan,
    Workload,
    estimate_run_peak,
    plan_stage,
    read_shape,
)
from ratchet.commands.plan.probe import Probe, StageProbe, probe
from ratchet.config.loader import load_config
from ratchet.config.model_shape.presets import get_preset
from ratchet.errors import ConfigError, RatchetError, RunDirectoryError
from ratchet.executors.freeze import freeze
from ratchet.models.flops import DecoderCost
from ratchet.utils.datasheets import GIB, ClusterSpec

RECIPE = """
threads: 1
model: {preset: tiny, overrides: {hidden_size: 32, n_layers: 2}}
tokenizer: {kind: characters, alphabet: "0123456789="}
environment: {kind: sorting, digits: 3}
evaluation: {tasks: 0}
algorithm: {kind: grpo, group_size: 4}
sampling: {max_new_tokens: 4}
learner: {workers: 1}
steps: 1000
batch_size: 2
"""
CPU = ProcessMemory("cpu", 100 * 2**20)


def recipe(path: Path, text: str = RECIPE) -> Path:
    (path / "recipe.yaml").write_text(text)
    return path / "recipe.yaml"


def planned(path: Path, *overrides: str, process: ProcessMemory = CPU):
    config = freeze(load_config(recipe(path), list(overrides)))
    return plan_stage(config, 0, DecoderCost(read_shape(config)), process)


def test_load_and_memory_by_hand(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    config = load_config(tmp_path / "recipe.yaml", [])
    cost = DecoderCost(read_shape(config))
    assert (plan.workload.n_rows, plan.workload.max_running_attempts) == (8, 8)
    assert plan.workload.max_sequence_tokens == plan.workload.max_prompt_tokens + 4
    held = plan.memory.resident
    assert plan.max_buffered_steps == 32  # steps of a file; a save every 50
    assert held == {
        "process": CPU.empty_process_bytes,
        "policy: weights": 4 * cost.parameters,
        "policy: optimizer": 8 * cost.parameters,
        "record": 2 * 32 * (8 * 400 + 8 * plan.workload.max_sequence_tokens * 30),
    }
    update, sample = plan.memory.phases["update"], plan.memory.phases["sample"]
    assert update["gradients"] == 4 * cost.parameters
    assert update["activations"] == 8 * plan.workload.max_sequence_tokens * cost.activation_bytes(4)
    assert sample["keys and values"] == 8 * 8 * cost.kv_bytes(4)  # 8 attempts, 7 or 8 tokens
    assert plan.memory.peak_bytes == sum(held.values()) + sum(update.values()) + sum(
        sample.values()
    )
    assert plan.flop_by_phase["update"] == 3 * plan.flop_by_phase["sample"]


@pytest.mark.parametrize(
    ("override", "part", "factor"),
    [
        ("optimizer.ema_decay=0.9", "policy: average", 4),
        ("algorithm.kl={coef: 0.1}", "reference: weights", 4),
    ],
)
def test_more_models_take_more(tmp_path: Path, override: str, part: str, factor: int) -> None:
    plan = planned(tmp_path, override)
    assert (
        plan.memory.resident[part]
        == factor * DecoderCost(read_shape(load_config(tmp_path / "recipe.yaml", []))).parameters
    )


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"model_type": "qwen3_vl", "vision_config": {}}, "nothing counts its encoders"),
        ({"model_type": "gpt_oss"}, "model_type 'gpt_oss' is not one of .*"),
    ],
)
def test_a_model_that_is_not_counted_is_measured(tmp_path: Path, shape, reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    preset = "{preset: tiny, overrides: {hidden_size: 32, n_layers: 2}}"
    text = RECIPE.replace(preset, f"{{path: {tmp_path}}}")
    config = freeze(load_config(recipe(tmp_path, text), []))
    with pytest.raises(ConfigError, match=rf"not {tmp_path}: {reason}\. .* RECIPE --try 60\.$"):
        read_shape(config)


@pytest.mark.slow
def test_rows_of_a_history_window_are_short_and_many(tmp_path: Path) -> None:
    games = (
        "environment={kind: frozen_lake, style: compact, min_distance: 4}",
        "tokenizer={kind: bytes}",
        "algorithm={kind: sft}",
    )
    whole = planned(tmp_path, *games).workload
    window = planned(tmp_path, *games, "rollouts.history_window=1").workload
    assert whole.n_rows == 2
    assert window.n_rows >= 4 * whole.n_rows  # the longest demonstration has 4 turns or more
    assert window.max_sequence_tokens < whole.max_sequence_tokens


def test_a_limited_cache_takes_no_more(tmp_path: Path) -> None:
    limit = 2**-17  # GiB: 8 KiB
    sample = planned(tmp_path, f"generator.kv_cache_gib={limit}").memory.phases["sample"]
    assert sample["keys and values"] == 2**13


def test_the_engine_copies_matrices_on_an_accelerator_and_products_do_on_a_cpu(
    tmp_path: Path,
) -> None:
    cost = DecoderCost(read_shape(load_config(recipe(tmp_path), [])))
    matrices = 2 * cost.count_layer_matrices()
    cuda = ProcessMemory("cuda", 0, rounds_products=True)
    plan = planned(tmp_path, "algorithm.kl={coef: 0.1}", process=cuda).memory
    assert plan.phases["sample"]["keys and values"] == 8 * 8 * cost.kv_bytes(2)
    assert plan.resident["policy: matrices in bfloat16"] == matrices
    assert "reference: matrices in bfloat16" not in plan.resident
    cpu = replace(CPU, rounds_products=True)
    options = ("algorithm.kl={coef: 0.1}", "learner.workers=2", "threads=2")
    plan = planned(tmp_path, *options, process=cpu).memory
    assert plan.phases["sample"]["keys and values"] == 8 * 8 * cost.kv_bytes(4)
    assert plan.resident["policy: matrices in bfloat16"] == matrices  # not one for each worker
    assert plan.resident["reference: matrices in bfloat16"] == matrices


def test_an_adapter_has_small_moments_and_no_second_model(tmp_path: Path) -> None:
    whole = planned(tmp_path, "algorithm.kl={coef: 0.1}").memory.resident
    held = planned(tmp_path, "lora={rank: 2}", "algorithm.kl={coef: 0.1}").memory.resident
    assert held["policy: optimizer"] < whole["policy: optimizer"] / 4
    assert "reference: weights" not in held


def test_workers_have_gradients_of_their_own(tmp_path: Path) -> None:
    one, two = planned(tmp_path), planned(tmp_path, "learner.workers=2", "threads=2")
    assert two.memory.phases["update"]["gradients"] == 2 * one.memory.phases["update"]["gradients"]


def test_what_is_used_by_turns_is_not_added() -> None:
    memory = MemoryPlan({"a": 1}, {"x": {"b": 5}, "y": {"c": 3}})
    assert memory.peak_bytes == 9
    assert MemoryPlan(memory.resident, memory.phases, phases_take_turns=True).peak_bytes == 6


@pytest.mark.parametrize(
    ("overrides", "recorded", "share"),
    [
        (["record.every=3", "checkpoint.every=9"], 3, 1),
        (["record.every=3", "checkpoint.every=0", "steps=12"], 4, 1),
        (["record.groups=1"], 32, 0.5),  # of two
        (["record.every=0"], 0, 0),
    ],
)
def test_a_record_takes_what_it_keeps_until_a_file_is_written(
    tmp_path: Path, overrides, recorded: int, share: float
) -> None:
    plan = planned(tmp_path, *overrides)
    assert plan.max_buffered_steps == recorded
    assert plan.memory.resident.get("record", 0) == 2 * recorded * share * (
        8 * 400 + 8 * plan.workload.max_sequence_tokens * 30
    )


def test_checkpoints_that_are_written_beside_the_training_take_a_copy(tmp_path: Path) -> None:
    plain, beside = planned(tmp_path), planned(tmp_path, "checkpoint.background=true")
    assert CHECKPOINT_COPY not in plain.memory.resident
    assert (
        beside.memory.resident[CHECKPOINT_COPY]
        == 12 * DecoderCost(read_shape(load_config(tmp_path / "recipe.yaml", []))).parameters
    )
    assert (
        CHECKPOINT_COPY
        not in planned(tmp_path, "checkpoint={background: true, every: 0}").memory.resident
    )


def test_what_a_short_run_did_not_see_is_added_by_hand() -> None:
    def stage(recorded: int, held: dict[str, int]) -> StagePlan:
        return StagePlan("s", 100, LOAD, MemoryPlan({"process": 1000, **held}, {}), {}, recorded)

    def probed(tables: float, recorded: int) -> StageProbe:
        return StageProbe(recorded, {}, 0.0, tables, recorded)

    plans = [stage(32, {}), stage(20, {CHECKPOINT_COPY: 70})]
    assert estimate_run_peak(plans, None) == 1070
    # Of the second stage 20 steps of 5 lie in memory, where at most 10 of 3 were seen.
    assert estimate_run_peak(
        plans, Probe((probed(1.0, 32), probed(5.0, 5)), 500)
    ) == 500 + 70 + 2 * (100 - 32)
    assert estimate_run_peak(plans, Probe((probed(1.0, 32), probed(5.0, 20)), 500)) == 500 + 70


STAGES = """
threads: 1
model: {preset: tiny, overrides: {hidden_size: 32, n_layers: 2}}
tokenizer: {kind: characters, alphabet: "0123456789="}
environment: {kind: sorting, digits: 3}
evaluation: {tasks: 9, every: 1000, patience: 3, metric: eval/mean_length, min_gain: 1}
checkpoint: {every: 1000, keep_best: 1, metric: -eval/mean_length, end_with: best, limit_s: 10000}
sampling: {max_new_tokens: 4}
learner: {workers: 1}
logging: {sinks: [{kind: prometheus}]}
stages:
  - {name: sft, algorithm: {kind: sft}, steps: 3, batch_size: 4}
  - {name: rl, algorithm: {kind: grpo, group_size: 4, equal_rewards: drop}, steps: 100000, batch_size: 2}
"""


@pytest.mark.slow
def test_a_probe_runs_all_stages_in_turn(tmp_path: Path) -> None:
    config = freeze(load_config(recipe(tmp_path, STAGES), []))
    found = probe(config, limit_s=0.1)
    sft, rl = found.stages
    assert sft.steps == sft.max_buffered_steps == 3
    assert 3 <= rl.steps < 100_000
    assert 1 <= rl.max_buffered_steps <= 32
    assert rl.seconds_by_phase["sample"] > 0
    assert 0 < sft.record_bytes_per_step < rl.record_bytes_per_step
    assert sft.processor_s > 0
    assert 50 * 2**20 < found.peak_bytes < 2**34


@pytest.mark.slow
def test_a_probe_that_fails_says_why(tmp_path: Path) -> None:
    nowhere = RECIPE.replace(
        "{preset: tiny, overrides: {hidden_size: 32, n_layers: 2}}", "{path: nowhere}"
    )
    config = freeze(load_config(recipe(tmp_path, nowhere), []))
    with pytest.raises(
        RatchetError, match=r"a probe of recipe failed. Its output ends with: [\s\S]*nowhere"
    ):
        probe(config, limit_s=100)


@pytest.mark.slow
def test_a_plan_waits_in_the_directory_of_its_run(tmp_path: Path) -> None:
    def ratchet(*arguments: str):
        return CliRunner().invoke(app, list(arguments), catch_exceptions=False)

    file, run = str(recipe(tmp_path)), str(tmp_path / "run")
    done = ratchet("plan", file, "steps=1", "--json", "--run-dir", run)
    kept = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert kept.pop("recipe")["stages"][0]["steps"] == 1
    assert kept == json.loads(done.stdout)
    assert kept["peak_bytes"] == kept["stages"][0]["computed_peak_bytes"]
    with pytest.raises(
        RunDirectoryError,
        match=r"the plan of another recipe; different: stages.0.steps: 1 -> 1000.*remove",
    ):
        ratchet("train", file, "--run-dir", run)
    assert ratchet("train", file, "steps=1", "--run-dir", run).exit_code == 0
    with pytest.raises(
        RunDirectoryError,
        match=r"has the run of another recipe; different: .*steps: 1 -> 2.*or plan .*yaml",
    ):
        ratchet("plan", file, "steps=2", "--run-dir", run)
    (tmp_path / "run" / "plan.json").write_text("[]")
    with pytest.raises(RunDirectoryError, match=r"plan.json is not a plan .*Remove this file"):
        ratchet("plan", f"{run}/config.yaml", "--run-dir", run)


# --- clusters

SHAPE = get_preset("qwen3-1.7b", vocab_size=151936)
LOAD = Workload(
    n_rows=1024,
    max_prompt_tokens=512,
    max_sequence_tokens=4096,
    max_running_attempts=1024,
    max_running_eval_attempts=0,
    n_scoring_passes=1,
    n_updates=1,
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("2x8", "give NODESxACCELERATORSxKIND"),
        ("2x8xH10", "did you mean H100"),
        ("0x8xH100", "it has no accelerators"),
        ("x8xH100", "give NODES"),
    ],
)
def test_a_cluster_that_is_none(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ClusterSpec.parse(text)


def test_a_cluster_is_read() -> None:
    assert ClusterSpec.parse("2x8xh100") == ClusterSpec(2, 8, "H100")
    assert ClusterSpec.parse("8xA100-40") == ClusterSpec(1, 8, "A100-40")


def divided(spec: str, shape=SHAPE, load: Workload = LOAD):
    from ratchet.config.schema import RunConfig

    cost = DecoderCost(shape)
    stage = RunConfig.model_validate(
        {
            "stages": [
                {"name": "s", "algorithm": {"kind": "sft"}, "environment": {"kind": "sorting"}}
            ]
        }
    )
    return plan_cluster(
        stage.stages[0], cost, load, cost.parameters, cost.parameters, ClusterSpec.parse(spec)
    )


def test_a_division_fits_and_uses_everything() -> None:
    plan = divided("2x8xH100")
    assert plan.memory.peak_bytes <= 80 * GIB
    division = plan.layout
    assert division.tensor_parallel * division.dp_shard == 16
    assert division.generator_tensor_parallel * division.n_generators == 16
    assert division.tensor_parallel == 1  # a model of 2 B needs no more


def test_twice_the_accelerators_take_less_time_and_memory() -> None:
    small, large = divided("1x8xH100"), divided("2x8xH100")
    assert sum(large.seconds_by_phase.values()) < sum(small.seconds_by_phase.values())
    assert large.memory.resident["weights"] < small.memory.resident["weights"]


def test_attempts_without_room_in_the_cache_wait() -> None:
    shape = get_preset("qwen3-1.7b", vocab_size=151936)
    one = LOAD.max_sequence_tokens * DecoderCost(shape).kv_bytes(2)
    few, many = (
        divided("1x8xH100", load=replace(LOAD, max_running_attempts=count)) for count in (512, 8192)
    )
    assert few.memory.phases["sample"]["keys and values"] == 512 // 8 * one
    fitting = many.memory.phases["sample"]["keys and values"] // one
    assert 512 // 8 < fitting < 8192 // 8
    assert many.memory.peak_bytes <= 80 * GIB * 0.93
    waves = -(-1024 // fitting)
    assert many.seconds_by_phase["sample"] > waves * few.seconds_by_phase["sample"]


def test_what_does_not_fit_says_by_how_much() -> None:
    huge = get_preset(
        "qwen3-1.7b", vocab_size=151936, n_layers=80, hidden_size=16384, intermediate_size=65536
    )
    with pytest.raises(
        ConfigError,
        match=r"does not fit on 8 H100: the best parallel layout takes \d+ GiB of the 74 GiB usable",
    ):
        divided("1x8xH100", huge)


def test_a_probe_says_nothing_of_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="remove --cluster, or the other options"):
        CliRunner().invoke(
            app,
            ["plan", str(recipe(tmp_path)), "--cluster", "1x8xH100", "--probe", "5"],
            catch_exceptions=False,
        )


def test_the_command(tmp_path: Path) -> None:
    arguments = ["plan", str(recipe(tmp_path)), "--cluster", "1x8xH100", "--json"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    (stage,) = json.loads(done.stdout)["stages"]
    assert stage["recipe"]["learner"]["dp_shard"] == 8
    assert stage["step_s"] == pytest.approx(sum(stage["seconds"].values()))
    table = CliRunner().invoke(app, arguments[:-1], catch_exceptions=False).stdout
    assert "on 8 H100 (from data sheets, not measured), at least" in table
    assert "dp_shard: 8" in table
