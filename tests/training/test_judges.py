"""Runs whose attempts are judged by models of the run itself."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml
from rewards.spoken_judge import write_judge

from ratchet.commands.score_run import score_run
from ratchet.config.loader import load_config
from ratchet.config.model_shape.presets import get_preset
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.data.chat.chat_templates import BUILTIN_TEMPLATES
from ratchet.errors import ConfigError, DataError, WorkerError
from ratchet.models.load import init_policy
from ratchet.models.scalar_head import ScalarHead, save_head
from ratchet.training.preflight import run_preflight
from ratchet.training.start import resume_run, start_run
from ratchet.training.workers.judges import get_judge_resources, make_judge_check

RECIPE = {
    "threads": 1,
    "device": "cpu",
    "model": {"preset": "tiny"},
    "tokenizer": {"kind": "characters"},
    "judges": [{"name": "grader", "path": "judge"}],
    "algorithm": {"kind": "grpo", "group_size": 4},
    "environment": {"kind": "arithmetic"},
    "rewards": [
        {"kind": "judge", "judge": "grader", "temperature": 1.0, "prompt": "{response}"},
    ],
    "sampling": {"max_new_tokens": 60},
    "steps": 3,
    "batch_size": 2,
    "evaluation": {"tasks": 0},
    "checkpoint": {"every": 1},
}
WORKERS = {"kind": "workers", "workers": 1}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_judge(tmp_path / "judge", choices="23456789")
    return tmp_path


def written(name="run", **keys):
    with open(f"{name}.yaml", "w", encoding="utf-8") as file:
        yaml.safe_dump({**RECIPE, **keys}, file)
    return f"{name}.yaml"


def trained(name="run", **keys):
    assert start_run(written(name, **keys), [], f"runs/{name}", command="test") == 0
    with open(f"runs/{name}/metrics.jsonl", encoding="utf-8") as file:
        return [json.loads(line).get("rollout/reward") for line in file][1:]


def problem(**keys):
    with pytest.raises(ConfigError) as raised:
        load_config(written(**keys))
    return str(raised.value)


@pytest.mark.slow
def test_a_run_with_a_judge_in_its_process_is_resumed_to_the_same_bits(here):
    rewards = trained()
    assert len(set(rewards)) > 1
    start_run(written("parts"), ["steps=1"], "runs/parts", command="test")
    weights = here / "judge" / "model.safetensors"
    trained_judge, other_judge = weights.read_bytes(), bytearray(weights.read_bytes())
    other_judge[len(other_judge) // 2 :] = bytes(len(other_judge) - len(other_judge) // 2)
    weights.write_bytes(other_judge)
    with pytest.raises(DataError, match="judge changed since step 1"):
        resume_run("runs/parts", ["steps=3"], command="test")
    weights.write_bytes(trained_judge)
    assert resume_run("runs/parts", ["steps=3"], command="test") == 0
    whole, parts = (
        (here / "runs" / name / "model" / "model.safetensors").read_bytes()
        for name in ("run", "parts")
    )
    assert parts == whole


@pytest.mark.slow
def test_each_file_that_rewards_read_is_held_at_a_resumption(here):
    scoring(here / "scorer")
    (here / "turns.jinja").write_text(BUILTIN_TEMPLATES["turns"])
    keys = {
        "tokenizer": {"kind": "characters", "template": "turns.jinja"},
        "rewards": [
            {"kind": "by_tag", "domains": {"*": [{"kind": "reward_model", "path": "scorer"}]}}
        ],
        "eval_rewards": [*RECIPE["rewards"], {"kind": "reward_model", "path": "other"}],
        "evaluation": {"tasks": 1},
    }
    shutil.copytree(here / "scorer", here / "other")
    start_run(written("run", **keys), ["steps=1"], "runs/run", command="test")
    for name in (
        *("scorer/model.safetensors", "scorer/tokenizer.json", "scorer/config.json"),
        *("judge/chat_template.jinja", "turns.jinja", "other/config.json"),
    ):
        content = (here / name).read_bytes()
        (here / name).write_bytes(content[:-1] + b"#")
        changed = "scorer" if name.endswith("safetensors") else name
        with pytest.raises(DataError, match=f"^{changed} changed since step 1"):
            resume_run("runs/run", ["steps=2"], command="test")
        (here / name).write_bytes(content)
    (here / "scorer" / "added_tokens.json").write_text("{}")
    with pytest.raises(DataError, match=r"^scorer/added_tokens\.json added since step 1"):
        resume_run("runs/run", ["steps=2"], command="test")
    (here / "scorer" / "added_tokens.json").unlink()
    (here / "turns.jinja").rename(here / "moved.jinja")
    with pytest.raises(DataError, match=r"^turns\.jinja not found, .* Relative paths need"):
        resume_run("runs/run", ["steps=2"], command="test")
    (here / "moved.jinja").rename(here / "turns.jinja")
    # Rewards of evaluations may change, and then their files are no longer read.
    without = f"eval_rewards={json.dumps(RECIPE['rewards'])}"
    assert resume_run("runs/run", ["steps=2", without], command="test") == 0


@pytest.mark.slow
def test_a_recorded_run_is_scored_again_by_its_judge(here, capsys):
    trained()
    capsys.readouterr()
    score_run("runs/run", "", [], steps=[], as_json=True, workers=2)
    scores = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert scores
    assert all(score["reward"] == pytest.approx(score["recorded"]) for score in scores)


@pytest.mark.slow
def test_a_judge_in_a_process_of_its_own_gives_the_same_rewards(here):
    judge = {"name": "grader", "path": "judge", "generator": WORKERS}
    assert trained("apart", judges=[judge]) == trained("run")


def scoring(directory):
    tokenizer = byte_tokenizer()
    model = init_policy(get_preset("tiny", vocab_size=tokenizer.vocab_size), seed=1)
    model.save(directory)
    tokenizer.save(directory)
    save_head(ScalarHead(model.hidden_size).init_weights(2, std=1.0), directory)


@pytest.mark.slow
def test_a_reward_model_in_processes_of_its_own_scores_alike(here):
    scoring(here / "scorer")
    apart = trained(
        "apart",
        judges=[{"kind": "reward_model", "name": "scorer", "path": "scorer", "workers": 2}],
        rewards=[{"kind": "reward_model", "judge": "scorer"}],
    )
    within = trained("within", judges=[], rewards=[{"kind": "reward_model", "path": "scorer"}])
    assert apart == pytest.approx(within, abs=1e-5)
    assert torch.tensor(apart).std() > 0


def test_a_lost_judge_ends_the_run():
    judge = SimpleNamespace(final_error=WorkerError("judge-grader rank 0 of 1 died"))
    make_judge_check({"other": SimpleNamespace(final_error=None)})(1, {})
    with pytest.raises(WorkerError, match="judge-grader"):
        make_judge_check({"grader": judge})(1, {})


def test_the_cluster_places_the_processes_of_judges(here):
    judges = [
        {"name": "here", "path": "judge"},
        {"name": "apart", "path": "judge", "generator": {"kind": "workers", "workers": 3}},
        {"name": "scorer", "path": "judge", "kind": "reward_model", "workers": 2},
    ]
    rewards = [{"kind": "by_tag", "domains": {
        "a": [{"kind": "judge", "judge": "here"}],
        "b": [{"kind": "pairwise_judge", "judge": "apart"}],
        "*": [{"kind": "reward_model", "judge": "scorer"}],
    }}]  # fmt: skip
    config = load_config(written(judges=judges, rewards=rewards))
    roles = [(request.role, request.ranks) for request in get_judge_resources(config)]
    assert roles == [("judge-apart", 3), ("judge-scorer", 2)]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rewards": [{"kind": "judge", "judge": "gradr"}]}, "did you mean 'grader'?"),
        ({"judges": []}, "add judges: [{name: grader, path: ...}]"),
        ({"judges": RECIPE["judges"] * 2}, "two judges are called 'grader'"),
        (
            {"judges": [*RECIPE["judges"], {"name": "idle", "path": "judge"}]},
            "judge idle judges nothing",
        ),
        (
            {"rewards": [{"kind": "reward_model", "judge": "grader"}]},
            "needs a judge of kind reward_model",
        ),
        ({"generator": {**WORKERS, "worker_runs": "groups"}}, "can't reach judge grader"),
        (
            {"judges": [{"name": "grader", "path": "judge", "generator": {**WORKERS, "worker_runs": "groups"}}]},
            "a judge only answers questions",
        ),
        (
            {"judges": [{"name": "grader", "path": "judge", "generator": WORKERS, "device": "cpu"}]},
            "remove device",
        ),
        (
            {"judges": [{"name": "grader", "path": "judge", "generator": {"kind": "workers", "worker": {"kind": "engine", "quantise": "nf4"}}}]},
            "remove quantise",
        ),
        ({"rewards": [{"kind": "judge"}]}, "lacks url and model"),
        ({"rewards": [{"kind": "reward_model"}]}, "lacks path"),
        (
            {"rewards": [{"kind": "judge", "judge": "grader", "retries": 2}]},
            "retries is for a model at an endpoint",
        ),
        (
            {"rewards": [{"kind": "reward_model", "judge": "grader", "path": "judge"}]},
            "path is for a model in the reward's own process",
        ),
    ],
)  # fmt: skip
def test_a_mistake_in_judges_is_named_with_its_fix(here, keys, message):
    assert message in problem(**keys)


@pytest.mark.parametrize(
    ("judge", "rewards", "message"),
    [
        ({"path": "./judg"}, RECIPE["rewards"], "no model directory './judg'"),
        (
            {"kind": "reward_model", "path": "judge"},
            [{"kind": "reward_model", "judge": "grader"}],
            "no scalar head",
        ),
    ],
)
def test_a_judge_without_a_model_is_found_before_the_run(here, judge, rewards, message):
    report = run_preflight(
        load_config(written(judges=[{"name": "grader", **judge}], rewards=rewards))
    )
    with pytest.raises(ConfigError, match=message):
        report.raise_problems()
