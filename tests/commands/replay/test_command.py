"""Steps that are played again from a run's record: bit for bit, or saying where not."""

import asyncio
import hashlib
import json
import random
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from ratchet.commands.replay.command import compare_steps, replay_steps
from ratchet.commands.replay.engine import Replay, load_changed_config
from ratchet.config.yaml_tree import write_text
from ratchet.errors import CheckpointError, ConfigError, DataError
from ratchet.observe.records.reader import INDEX, Record
from ratchet.runs.run_dir import RunDirectory
from ratchet.training.start import start_run

RECIPE = {
    "name": "replayed",
    "threads": 1,
    "logging": {"progress": "off", "tensorboard": False},
    "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "environment": {"kind": "sorting", "digits": 1},
    "sampling": {"max_new_tokens": 2},
    "evaluation": {"tasks": 0},
    "checkpoint": {"every": 3, "keep": 2},
    "optimizer": {"lr": 0.01},
    "stages": [
        {"name": "sft", "algorithm": {"kind": "sft"}, "steps": 8, "batch_size": 16},
        {
            "name": "grpo",
            "algorithm": {
                "kind": "grpo",
                "group_size": 4,
                "minibatches": 2,
                "old_logprobs": "sampler",
                "weighting": "token_mean",  # by which answers are right in every later step
            },
            "steps": 4,
            "batch_size": 6,
        },
        {
            "name": "ppo",
            "algorithm": {"kind": "ppo", "critic": {"lr": 0.01}, "minibatches": 2},
            "steps": 4,
            "batch_size": 8,
        },
        {
            "name": "dpo",
            "algorithm": {"kind": "dpo", "sft_coef": 1.0},
            "environment": {"kind": "sorting", "digits": 3},
            "steps": 4,
            "batch_size": 4,
        },
    ],
}
GRPO, PPO, DPO = 11, 14, 20  # steps of theirs


def trained(path: Path, recipe: dict, *overrides: str) -> Path:
    file = path.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(recipe))
    assert start_run(file, list(overrides), path, command="test") == 0
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("replay") / "run", RECIPE)


@pytest.fixture
def copy(run, tmp_path):
    return Path(shutil.copytree(run, tmp_path / "copy"))


def played(path, *steps, changes=()):
    async def all_of_them():
        return [verdict async for verdict in compare_steps(Replay(path), steps, changes)]

    return asyncio.run(all_of_them())


@pytest.mark.slow
def test_every_step_of_sft_grpo_ppo_and_dpo_is_bit_equal(run):
    found = played(run, *range(1, 21))
    assert [str(difference) for verdict in found for difference in verdict.differences] == []
    assert [verdict.replayed.step for verdict in found] == list(range(1, 21))
    assert all(verdict.n_compared >= 8 for verdict in found)
    # what lies between two steps is played once
    assert {verdict.start_step for verdict in found} == {0}
    assert found[PPO - 1].replayed.fingerprints.keys() == {"policy", "critic"}
    norms = [verdict.replayed.metrics["policy/grad_norm"] for verdict in found]
    assert all(norm > 0 for norm in norms)


@pytest.mark.medium
def test_steps_of_products_in_bfloat16_are_bit_equal(tmp_path, bfloat16_products):
    run = trained(tmp_path / "run", RECIPE, "precision=bfloat16")
    found = [*played(run, *range(9, 21)), *played(run, DPO)]
    assert [str(difference) for verdict in found for difference in verdict.differences] == []
    assert [verdict.start_step for verdict in found] == [0] * 12 + [19]


@pytest.mark.medium
def test_a_step_is_played_from_the_nearest_checkpoint_before_it(run):
    (last,) = played(run, DPO)
    assert (last.start_step, last.is_equal) == (19, True)


def flip(file: Path, at: float = 0.5) -> None:
    content = bytearray(file.read_bytes())
    content[int(len(content) * at)] ^= 1
    file.write_bytes(content)


@pytest.mark.medium
def test_a_bit_of_the_record_or_of_the_checkpoint_is_noticed(copy):
    flip(copy / "checkpoints/step-00000019/policy/state.safetensors")
    with pytest.raises(CheckpointError, match="damaged"):
        played(copy, DPO)
    flip(next((copy / "steps").glob("00000009-*.parquet")))
    with pytest.raises(DataError, match="changed since it was recorded"):
        played(copy, GRPO)
    assert played(copy, 8)[0].is_equal


@pytest.mark.medium
def test_a_digit_of_a_metric_is_noticed(copy):
    metrics = copy / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    row = next(row for row in rows if row["step"] == DPO)
    row["policy/loss"] *= 1 + 2**-52
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (difference,) = played(copy, DPO)[0].differences
    assert difference.what == "policy/loss"


@pytest.mark.medium
def test_what_a_changed_token_changes_is_named_and_since_when(copy):
    """Here with checksums that fit, as if the run had learned from something else than it wrote
    down."""
    name = next(file.name for file in Record(copy / "steps").files if file.steps[0].step == 9)
    table = pq.read_table(copy / "steps" / name)
    at = table.column_names.index("rollout_logprobs")
    rows = table.column(at).to_pylist()
    earned = zip(
        table.column("step").to_pylist(), table.column("advantages").to_pylist(), strict=True
    )
    teaches = next(
        row for row, (step, advantages) in enumerate(earned) if step == 10 and advantages[-1]
    )
    rows[teaches][-1] += 0.5
    changed = table.set_column(
        at, table.schema.field(at), pa.array(rows, table.schema.field(at).type)
    )
    pq.write_table(changed, copy / "steps" / name)
    again = Record(copy / "steps")
    size = (copy / "steps" / name).stat().st_size
    digest = hashlib.sha256((copy / "steps" / name).read_bytes()).hexdigest()
    lines = [
        file.line() if file.name != name else type(file)(name, size, digest, file.steps).line()
        for file in again.files
    ]
    (copy / "steps" / INDEX).write_text("".join(lines))
    first, second = played(copy, 10, 11)
    named = {difference.what.partition(" of ")[0] for difference in first.differences}
    assert "old_logprobs" in named
    assert "weights" in named
    assert (first.diverged_step, second.diverged_step, second.is_equal) == (None, 10, False)


@pytest.mark.slow
def test_what_the_record_left_out_is_said(run, tmp_path):
    recipe = {**RECIPE, "stages": RECIPE["stages"][:2], "checkpoint": {"every": 0}}
    some = trained(tmp_path / "some", recipe, "record.groups=3")
    with pytest.raises(DataError, match=r"step 11 .* has only 3 of 6 groups \(record.groups\)"):
        played(some, GRPO)
    seldom = trained(tmp_path / "seldom", recipe, "record.every=5")
    with pytest.raises(DataError, match=r"step 11 .* nothing was recorded \(record.every=5\)"):
        played(seldom, GRPO)
    with pytest.raises(
        DataError,
        match=r"needs all steps since the checkpoint of step 8, but of step 9 nothing was recorded",
    ):
        played(seldom, 10)
    with pytest.raises(DataError, match="steps 1 to 20: there is no step 21"):
        played(run, 21)


@pytest.mark.slow
def test_another_algorithm_is_shown_beside_the_step_and_changes_nothing(run):
    found = played(run, GRPO, GRPO + 1, changes=["algorithm.clip_high=0.001", "optimizer.lr=0.001"])
    assert all(verdict.is_equal for verdict in found)
    before, after = found[0].replayed.metrics, found[0].changed_step.metrics
    assert (before["policy/lr"], after["policy/lr"]) == (0.01, 0.001)
    clipped = "policy/policy_gradient/clip_high_share"
    names = {name for name in before if before[name] != after[name]}
    assert names
    assert clipped not in before or before[clipped] != after[clipped]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("batch_size=3", "only algorithm, optimizer, learner"),
        ("algorithm.kl.coef=0.1", "role 'reference', of which the run has no weights"),
        ("algorithm.clip_hihg=0.1", "clip_hihg"),
    ],
)
def test_changes_that_mean_nothing_are_refused(run, change, why):
    with pytest.raises(ConfigError, match=why):
        played(run, GRPO, changes=[change])


@pytest.mark.medium
def test_a_key_of_one_part_of_the_algorithm_needs_no_path(run):
    replay = Replay(run)
    asyncio.run(replay.advance_to(GRPO))
    assert (
        load_changed_config(replay, ["algorithm.clip_high=0.7"]).stages[1].algorithm.loss.clip_high
        == 0.7
    )


@pytest.mark.medium
def test_a_learner_in_other_processes_is_refused_with_the_reason(copy):
    config = RunDirectory(copy).read_config()
    for stage in config["stages"]:
        stage["learner"] = {"kind": "dtensor", "dp_shard": 2}
    config["kernels"] = "torch"
    (copy / "config.yaml").write_text(write_text(config))
    with pytest.raises(ConfigError, match=r"learner\.kind=dtensor"):
        played(copy, 3)


@pytest.mark.medium
def test_the_command_says_what_it_found(run, copy, capsys):
    assert replay_steps(run, [GRPO]) == 0
    assert (
        "step 11 (grpo), from the start of the run and 10 recorded steps: bit-equal"
        in capsys.readouterr().out
    )
    metrics = copy / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"policy/lr": 0.01', '"policy/lr": 0.02'))
    assert replay_steps(copy, [DPO], as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["differences"] == [{"what": "policy/lr", "recorded": 0.02, "replayed": 0.01}]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "ppo", "dpo"])
def test_random_steps_of_the_quickstart_are_bit_equal(name, repository, tmp_path):
    """10 of the supervised stage and of the one after it, both shorter than in the recipes."""
    recipe = repository / "ratchet" / "recipes" / f"{name}.yaml"
    last = "grpo" if name == "quickstart" else name
    shorter = ["stages.sft.steps=20", f"stages.{last}.steps=20", f"stages.{last}.batch_size=32"]
    shorter += [
        "evaluation.tasks=0",
        "evaluation.every=0",
        "checkpoint.every=10",
        "logging.progress=off",
    ]
    assert start_run(recipe, shorter, tmp_path / "run", command="test") == 0
    steps = random.Random(name).sample(range(1, 41), 10)
    found = played(tmp_path / "run", *steps)
    assert [str(difference) for verdict in found for difference in verdict.differences] == []
    assert len(found) == 10
