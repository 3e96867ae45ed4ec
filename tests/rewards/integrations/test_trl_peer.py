"""The same files run by TRL's GRPOTrainer and by Ratchet: equal prompts, tokens and rewards."""

import asyncio
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.warm_python import warm_python

from ratchet.config.resolve import build, resolve
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.rewards.integrations.trl import make_arguments
from ratchet.rewards.weighted_sum import NOT_APPLICABLE
from ratchet.types import Completion, Sampling, Scored, StopReason

HERE = Path(__file__).parent
TRL = HERE / "trl_rewards.py"
ENVIRONMENTS = HERE.parents[1] / "environments/adapters/trl_environments.py"
pytestmark = [pytest.mark.slow, pytest.mark.needs("trl")]


class Script:
    """A policy that says what it was told to, turn by turn."""

    version = 0

    def __init__(self, tokenizer, turns):
        self.tokenizer, self.turns = tokenizer, list(turns)

    async def generate(self, tokens, sampling, media=()):
        ids = [*self.tokenizer.encode(self.turns.pop(0)), self.tokenizer.eos_ids[0]]
        zeros = np.zeros(len(ids), np.float32)
        return Completion(
            np.array(ids), zeros, zeros, np.zeros(len(ids), np.int32), StopReason.STOP_TOKEN
        )


@pytest.fixture(scope="module")
def run_trl():
    """`run_trl(tmp_path, **job)`, in processes that have imported TRL from the start."""
    modules = ("datasets", "transformers.models.llama.modeling_llama", "trl.trainer.grpo_trainer")
    quiet = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    with warm_python(modules, environment=quiet) as warm:
        yield partial(run_trl_peer, warm)


def run_trl_peer(warm, tmp_path, **job):
    """What TRL passed to its reward functions, and the rewards, by row."""
    job["directory"] = str(tmp_path / "model")
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, str(HERE / "trl_peer.py"), str(tmp_path / "job.json")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=warm,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def play(tmp_path, rows, environment=None):
    """The trajectories of the same rows and turns here, one attempt a row, and the tasks."""
    tokenizer = load_tokenizer(tmp_path / "model")
    renderer = Renderer(tokenizer)
    played = []
    for number, entry in enumerate(rows):
        file = tmp_path / f"row{number}.jsonl"
        file.write_text(json.dumps(entry["row"]) + "\n")
        section = {"kind": "dataset", "train": str(file), "test_share": 0.0}
        if environment is not None:
            section = {"kind": "trl", "factory": environment, "problems": section}
        played_in = build(resolve("environment", section))
        task = next(played_in.tasks("train", seed=0))
        player = EpisodePlayer(Script(tokenizer, entry["turns"]), renderer, max_context=4096)
        manager = RolloutManager(player, lambda made=played_in: made, None, needs_reward=False)
        group = asyncio.run(manager.group(task, Sampling(), group_id="g", attempts=1))
        played.append((task, group.trajectories[-1]))
    return played


def judge(path, played, **keys):
    reward = build(resolve("rewards", {"kind": "trl", "function": path, **keys}))
    outcomes = [asyncio.run(reward.score([row], task))[0] for task, row in played]
    assert all(isinstance(outcome, Scored) or outcome == NOT_APPLICABLE for outcome in outcomes)
    return [float("nan") if o == NOT_APPLICABLE else o.reward for o in outcomes]


def assert_equal_calls(seen, played):
    for index, (task, row) in enumerate(played):
        arguments = make_arguments([row], task, conversational=None)
        for name in ("prompts", "completions", "completion_ids"):
            assert arguments[name] == [seen[name][index]], name


def column(seen, number):
    return [float("nan") if row[number] is None else row[number] for row in seen["rewards"]]


def rows_of(*answers, prompt="What is 2+3?", **columns):
    return [{"row": {"prompt": prompt, **columns}, "turns": [answer]} for answer in answers]


def test_functions_of_messages_earn_the_same_and_so_do_those_of_trl(tmp_path, run_trl):
    ours = [f"{TRL}:{name}" for name in ("polite", "only_sums", "by_step", "longer")]
    theirs = [
        f"trl.rewards:{name}"
        for name in ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
    ]
    made = [
        ["trl.rewards:get_cosine_scaled_reward", {"max_len": 40}],
        ["trl.rewards:get_repetition_penalty_reward", {"ngram_size": 2, "max_penalty": -1.0}],
        [
            "trl.rewards:get_soft_overlong_punishment",
            {"max_completion_len": 60, "soft_punish_cache": 40},
        ],
    ]
    rows = rows_of(
        r"It is \boxed{5}, please.",
        r"<think>2+3</think> So \boxed{5}.",
        "nonsense nonsense nonsense nonsense",
        r"<think>hm \boxed{6}",
        prompt=[{"role": "user", "content": "What is 2+3?"}],
        solution="$5$",
        answer="5",
    )
    seen = run_trl(tmp_path, rewards=[*ours, *theirs], made=made, rows=rows)
    played = play(tmp_path, rows)
    assert_equal_calls(seen, played)
    sections = [(path, {}) for path in [*ours, *theirs]]
    sections += [(path, {"factory_kwargs": keys}) for path, keys in made]
    for number, (path, keys) in enumerate(sections):
        expected = column(seen, number)
        assert judge(path, played, **keys) == pytest.approx(expected, rel=1e-6, nan_ok=True), path
    assert column(seen, 4) == [1.0, 1.0, 0.0, 0.0], "the answers differ in what they earn"


def test_functions_of_text_earn_the_same(tmp_path, run_trl):
    rows = rows_of("5", "6", " 5 ", "five", answer="5")
    seen = run_trl(tmp_path, rewards=[f"{TRL}:exact"], rows=rows)
    played = play(tmp_path, rows)
    assert_equal_calls(seen, played)
    assert judge(f"{TRL}:exact", played) == column(seen, 0) == [1.0, 0.0, 1.0, 0.0]


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_an_environment_class_plays_and_earns_the_same(tmp_path, run_trl):
    says = [
        [call("add", amount=2), "done"],
        [call("fail"), call("show"), "no idea"],
        [call("add", amount=1) + "\n" + call("add", amount=2), call("add", wrong=1), "3"],
        ["nothing at all"],
    ]
    prompt = [{"role": "user", "content": "Count."}]
    rows = [{"row": {"prompt": prompt, "target": 2}, "turns": turns} for turns in says]
    environment = f"{ENVIRONMENTS}:Counter"
    seen = run_trl(tmp_path, rewards=[f"{TRL}:polite"], environment=environment, rows=rows)
    played = play(tmp_path, rows, environment)
    assert_equal_calls(seen, played)
    rewards = [row.reward for _, row in played]
    assert rewards == pytest.approx(column(seen, 1))
    assert rewards == pytest.approx([1.0, -0.2, -0.1, -0.2])
    assert judge(f"{TRL}:polite", played) == column(seen, 0)
