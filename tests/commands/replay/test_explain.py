"""What moved the weights in a step of a recorded run."""

import asyncio
import json

import pytest
import torch
import yaml
from oracles.cases import groups
from oracles.ragged import Row

from ratchet.commands.replay.engine import Replay
from ratchet.commands.replay.explain import explain_step, make_explanation, measure_influence
from ratchet.commands.replay.gradient_attribution import find_strongest_tokens
from ratchet.config.resolve import build, resolve
from ratchet.data.packing import pack
from ratchet.errors import ConfigError
from ratchet.training.start import start_run

RECIPE = {
    "name": "explained",
    "device": "cpu",
    "threads": 1,
    "logging": {"progress": "off", "tensorboard": False},
    "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "environment": {"kind": "sorting", "digits": 1},
    "sampling": {"max_new_tokens": 2},
    "evaluation": {"tasks": 0},
    "checkpoint": {"every": 3, "keep": 9},
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
            "algorithm": {"kind": "ppo", "critic": {"lr": 0.01}},
            "steps": 2,
            "batch_size": 8,
        },
        {
            "name": "dpo",
            "algorithm": {"kind": "dpo", "sft_coef": 1.0},
            "environment": {"kind": "sorting", "digits": 3},
            "steps": 1,
            "batch_size": 4,
        },
    ],
}
GRPO, PPO, DPO = 11, 13, 15


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("explain") / "run"
    path.with_suffix(".yaml").write_text(yaml.safe_dump(RECIPE))
    assert start_run(path.with_suffix(".yaml"), [], path, command="test") == 0
    return path


def found(run, step, role="policy"):
    replay = Replay(run)
    played, influence = asyncio.run(measure_influence(replay, step, role=role, max_tokens=1000))
    return (
        replay,
        played,
        make_explanation(played, influence, replay.policy.tokenizer, role=role, top=1000),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "role", "updates"),
    [(3, "policy", 1), (GRPO, "policy", 2), (PPO, "critic", 1), (DPO, "policy", 1)],
)
def test_the_parts_of_the_groups_make_up_the_gradient(run, step, role, updates):
    _, played, told = found(run, step, role)
    assert told["updates"] == updates
    for rows in (told["groups"], told["tags"]):
        assert sum(row["direction"] for row in rows) == pytest.approx(1.0, abs=1e-5)
        assert sum(row["loss_share"] for row in rows) == pytest.approx(1.0)
        assert sum(row["loss"] for row in rows) == pytest.approx(
            played.metrics[f"{role}/loss"], abs=1e-6
        )
    assert {row["group"] for row in told["groups"]} == {group.id for group in played.groups}
    assert sum(told["gradient_norms"]) / updates == pytest.approx(
        played.metrics[f"{role}/grad_norm"], rel=1e-5
    )


@pytest.mark.medium
def test_a_group_whose_attempts_are_equal_moves_nothing(run):
    _, played, told = found(run, GRPO)
    rewards = {group.id: {row.reward for row in group.trajectories} for group in played.groups}
    silent = [row for row in told["groups"] if len(rewards[row["group"]]) == 1]
    assert silent
    assert all(row["direction"] == row["norm"] == row["loss"] == 0 for row in silent)


@pytest.mark.medium
def test_a_tokens_pull_is_its_weighted_advantage_where_nothing_was_updated_yet(run):
    _, played, told = found(run, GRPO)
    batch, first = played.batch, set(played.batch.group_ids[:3])  # of the first optimizer step
    expected = batch.need("advantages") * played.weights_T
    starts, by_row = batch.starts_S.tolist(), {}
    for s, group in enumerate(batch.group_S.tolist()):
        by_row[batch.group_ids[group], s - batch.group_S.tolist().index(group)] = starts[s]
    tokens = [token for token in told["tokens"] if token["group"] in first]
    assert tokens
    for token in tokens:
        at = by_row[token["group"], token["row"]] + token["position"]
        assert token["pull"] == pytest.approx(float(expected[at]), rel=1e-3)
        assert token["token"] == int(batch.tokens_T[at])
    assert sum(token["pull_share"] for token in told["tokens"]) == pytest.approx(1.0)


@pytest.mark.medium
def test_the_right_answer_is_pulled_up_and_the_wrong_one_down(run):
    _, _, told = found(run, DPO)
    sign = {
        row: {token["pull"] > 0 for token in told["tokens"] if token["row"] == row}
        for row in (0, 1)
    }
    assert sign == {0: {True}, 1: {False}}


@pytest.mark.medium
@pytest.mark.parametrize(("step", "role"), [(3, "policy"), (PPO, "critic"), (DPO, "policy")])
def test_an_explained_step_is_bit_equal_to_the_recorded_one(run, step, role, capsys):
    assert explain_step(run, step, role=role, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["differences"] == []


@pytest.mark.medium
def test_to_look_changes_nothing(run):
    replay, _, _ = found(run, GRPO)
    played = asyncio.run(replay.replay_next())
    assert played.fingerprints == replay.record.steps[GRPO + 1].fingerprints


@pytest.mark.medium
def test_a_role_that_does_not_train_is_refused(run):
    with pytest.raises(
        ConfigError, match="stage grpo does not train the role critic: give one of policy"
    ):
        explain_step(run, GRPO, role="critic")


@pytest.mark.slow
def test_the_command_says_it_in_tables_or_json(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert explain_step(run, GRPO, top=2) == 0
    said = capsys.readouterr().out
    assert "Groups (2 of 6)" in said
    assert "Tokens" in said
    assert "…" not in said
    for heading in ("reward", "direction", "of loss", "pull", "of pull"):
        assert heading in said
    _, _, told = found(run, GRPO)
    first = told["groups"][0]
    assert f"{first['group']}: {first['prompt']}" in said
    assert all(answer["text"] in said for answer in first["answers"])
    explain_step(run, GRPO, top=2, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], len(told["groups"]), len(told["tokens"])) == (GRPO, 6, 2)
    assert torch.isfinite(torch.tensor([row["direction"] for row in told["groups"]])).all()


def test_a_token_is_found_in_its_attempt_wherever_its_mini_batch_has_it():
    """In the second of two mini-batches of attempts, whose first row is the group's second."""
    zeros = [0.0, 0.0, 0.0]
    rows = [
        Row(
            "a",
            i,
            [0, 1, 2],
            [False, True, True],
            reward=1.0,
            logprobs=zeros,
            rollout_logprobs=zeros,
        )
        for i in range(4)
    ]
    algorithm = build(
        resolve("algorithm", {"kind": "grpo", "minibatches": 2, "minibatches_of": "attempts"})
    )
    _, second = algorithm.split(pack(groups(rows)))
    found = find_strongest_tokens(
        second, torch.zeros(6), torch.tensor([0.0, 1.0, 2.0, 0.0, 3.0, 0.5]), 3
    )
    assert [(pull.attempt, pull.trajectory, pull.position) for pull in found] == [
        (3, 0, 1),
        (1, 0, 2),
        (1, 0, 1),
    ]
