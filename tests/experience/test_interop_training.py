"""An environment written to EnvironmentInterface, in a file of its own, in the normal training
loop."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from statistics import fmean
from typing import Any

import PIL.Image
import pytest
import torch
from experience.copying_env import Copying
from pictures import picture, renderer
from pydantic import ValidationError

from ratchet.config.resolve import build, resolve
from ratchet.config.schema import RunConfig
from ratchet.data.chat.builtin_tokenizers import BUILTIN_TEMPLATES, character_tokenizer
from ratchet.data.chat.renderer import Renderer
from ratchet.errors import TrainingError
from ratchet.evals.openai_client import EndpointPlayer
from ratchet.experience.config import MessageLogConfig
from ratchet.experience.nemo_rl import BatchedDataDict, EnvironmentInterface, EnvironmentReturn
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.rewards.llm.http_client import Endpoint, EndpointConfig
from ratchet.testing import check_environment
from ratchet.testing.builders import make_trajectory
from ratchet.testing.fakes import FakeGenerator
from ratchet.training.from_config import build_policy
from ratchet.training.loop import train
from ratchet.training.stage_from_config import build_run
from ratchet.types import Group, Owner, Sampling, Turn

COPYING = {
    "kind": "message_log",
    "interface": "experience.copying_env:Copying",
    "data": "experience.copying_env:samples",
}


def run_of(
    observe,
    *,
    steps: int,
    batch_size: int = 8,
    lr: float = 3e-3,
    environment: Any = COPYING,
    **keys: Any,
):
    stage = {
        "name": "grpo",
        "algorithm": {"kind": "grpo", "group_size": 8},
        "environment": environment,
        "steps": steps,
    }
    stage |= {
        "batch_size": batch_size,
        "sampling": {"max_new_tokens": 4},
        "evaluation": {"tasks": 2},
        **keys,
    }
    settings = RunConfig.model_validate({
        "threads": 1,
        "device": "cpu",
        "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2}},
        "tokenizer": {"kind": "characters", "alphabet": "0123done"},
        "stages": [{**stage, "optimizer": {"lr": lr, "warmup_steps": 0}}],
    })  # fmt: skip
    policy = build_policy(settings)
    return policy, build_run(
        settings, 0, policy, observers=[lambda step, metrics: observe(metrics)]
    )


@pytest.mark.medium
def test_grpo_trains_on_it():
    seen: list[dict[str, Any]] = []
    policy, run = run_of(seen.append, steps=3)
    before = [weight.clone() for weight in policy.model.parameters()]
    asyncio.run(train(run))
    assert [metrics["rollout/failed_share"] for metrics in seen] == [0, 0, 0]
    assert all(metrics["policy/grad_norm"] > 0 for metrics in seen)
    assert any(
        not torch.equal(old, new)
        for old, new in zip(before, policy.model.parameters(), strict=True)
    )
    assert all(0 <= metrics["rollout/environment/copying/perfect"] <= 1 for metrics in seen)
    assert any(metrics["rollout/reward"] > 0 for metrics in seen)


def test_its_stop_strings_and_last_words_shape_the_attempt():
    groups = []
    _, run = run_of(lambda metrics: None, steps=1)

    async def draw():
        groups.extend(await run.batcher.next(0))
        await run.close()

    asyncio.run(draw())
    rows = [row for group in groups for row in group.trajectories if not row.truncated]
    assert rows
    for row in rows:
        assert len(row.turns) == 2
        said, asked = (
            [message.text for message in row.messages[1::2]],
            [message.text[-1] for message in row.messages[::2]],
        )
        assert all(digit not in text[:-1] for text in said for digit in "0123"), (
            "an answer ends at its first digit"
        )
        assert row.reward == sum(text == digit for text, digit in zip(said, asked, strict=True))


@pytest.mark.parametrize("raw", [False, True])
def test_a_key_appends_observations_as_their_own_tokens(raw):
    section = {**COPYING, "raw_observations": raw, "judges_cut_answers": True}
    environment = build(resolve("environment", section))
    parts = [{**section, "tag": "copying"}]
    mixture = build(resolve("environment", {"kind": "mixture", "parts": parts}))
    tokenizer = character_tokenizer("0123done", template=BUILTIN_TEMPLATES["turns"])
    for played in (environment, mixture):
        task = next(iter(played.tasks("train", seed=0)))
        answers = iter([tokenizer.encode(digit) for digit in ("0", "123")])
        generator = FakeGenerator(lambda *_, answers=answers: next(answers))
        player = EpisodePlayer(generator, Renderer(tokenizer), max_context=64)
        stops = tuple(tokenizer.encode("0"))
        sampling = Sampling(max_new_tokens=3, stop_ids=stops)
        (row,) = asyncio.run(player.play(task, played, sampling, attempt=0))
        written = row.tokens[row.owner == Owner.ENVIRONMENT].tolist()
        (_, reply), alone = row.messages[1:3], tokenizer.encode(row.messages[2].text)
        assert (written == alone) == raw, "the template adds the headers of turns"
        assert reply.role == "user"
        assert row.truncated
        assert row.turns[-1].reward is not None, "the environment judges the cut-off answer"


class Showing(EnvironmentInterface[None]):
    """Its prompts and its observations have images, in three forms of parts."""

    def step(self, message_log_batch, metadata):
        for log in message_log_batch:
            assert log[0]["content"] == show("prompt")["content"], "logs keep their parts"
        n = len(metadata)
        done = torch.tensor([len(log) > 2 for log in message_log_batch])
        return EnvironmentReturn(
            [show("environment")] * n, metadata, None, torch.ones(n), done, None
        )

    def global_post_process_and_metrics(self, batch):
        return batch, {}


def show(where):
    url = picture(1).value
    image = {"type": "image_url", "image_url": {"url": url}}
    if where == "environment":
        image = {"type": "image", "image": PIL.Image.new("RGB", (32, 32))}
    role = "user" if where == "prompt" else where
    return {"role": role, "content": [image, {"type": "text", "text": "what?"}]}


def shown_samples(split):
    return [{"message_log": [show("prompt")], "task_name": "showing"}]


def test_message_logs_have_images():
    section = {"kind": "message_log", "interface": f"{__name__}:Showing"}
    section |= {"data": f"{__name__}:shown_samples"}
    environment = build(resolve("environment", section))
    task = next(iter(environment.tasks("train", seed=0)))
    read = renderer()
    answer = [*read.tokenizer.encode("a"), read.stop_ids[0]]
    generator = FakeGenerator(lambda *_: answer)
    player = EpisodePlayer(generator, read, max_context=256)
    sampling = Sampling(max_new_tokens=4, stop_ids=read.stop_ids)
    (row,) = asyncio.run(player.play(task, environment, sampling, attempt=0))
    assert row.outcome is None
    assert [len(media) for media in generator.media] == [1, 2]
    assert row.media == read.media(row.tokens, row.messages[:-1])


def test_an_api_can_t_take_raw_observations():
    environment = build(resolve("environment", {**COPYING, "raw_observations": True}))
    player = EndpointPlayer(Endpoint("http://127.0.0.1:1/v1", EndpointConfig()), "model")
    task = next(iter(environment.tasks("train", seed=0)))
    (row,) = asyncio.run(player.play(task, environment, Sampling(), attempt=0))
    assert "raw observations" in str(row.outcome)


@pytest.mark.slow
def test_it_learns():
    rewards: list[float] = []
    _, run = run_of(
        lambda metrics: rewards.append(metrics["rollout/reward"]), steps=150, batch_size=16
    )
    asyncio.run(train(run))
    assert fmean(rewards[:5]) < 0.8
    assert fmean(rewards[-5:]) > 1.8


def test_it_keeps_an_environments_contract():
    check_environment(build(resolve("environment", COPYING)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"interface": "experience.copying_env:Coping"},
            "did you mean 'experience.copying_env:Copying'",
        ),
        ({"interface": "experience.copying_env:DIGITS"}, "can't be called"),
        ({"interface": "experience.copying_env:samples"}, "has no method step"),
        ({"data": "experience.copying:samples"}, "can't be imported"),
        (
            {"arguments": {"rewards": 2}},
            "arguments don't fit .* unexpected keyword argument 'rewards'",
        ),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_read(values, message):
    with pytest.raises(ValidationError, match=message):
        MessageLogConfig(**({"interface": COPYING["interface"], "data": COPYING["data"]} | values))


def drawn_by(interface, **arguments):
    """The groups of a first step as they train, and the metrics of the interface."""
    section = {**COPYING, "interface": f"{__name__}:{interface}", "arguments": arguments}
    _, run = run_of(lambda metrics: None, steps=1, environment=section)

    async def draw():
        groups = await run.batcher.next(0)
        metrics = run.measure_environment(groups)
        await run.close()
        return groups, metrics

    return asyncio.run(draw())


class Revising(Copying):
    """It doubles rewards and adds 1, and leaves attempts without a right answer out."""

    def __init__(self, reward=1.0, returns="revised"):
        super().__init__(reward)
        self.returns = returns

    def global_post_process_and_metrics(self, batch):
        revised = BatchedDataDict(dict(batch))
        if self.returns == "revised":
            revised["total_reward"] = batch["total_reward"] * 2 + 1
            revised["loss_multiplier"] = (batch["total_reward"] > 0).float()
        elif self.returns == "raises":
            raise ZeroDivisionError
        elif self.returns == "reversed":
            revised = batch.select_indices(range(batch.size - 1, -1, -1))
        else:
            revised[self.returns] = torch.full((batch.size,), math.nan)
        return revised, {"judged": batch.size, "note": "not a number"}


@pytest.mark.medium
def test_what_the_interface_changes_in_the_batch_trains():
    plain, _ = drawn_by("Copying")
    revised, metrics = drawn_by("Revising")
    assert metrics == {"copying/judged": 64}
    pairs = [
        (before, after)
        for old, new in zip(plain, revised, strict=True)
        for before, after in zip(old.trajectories, new.trajectories, strict=True)
    ]
    assert {before.reward for before, _ in pairs} >= {0.0, 1.0}
    for before, after in pairs:
        assert before.tokens.tolist() == after.tokens.tolist()
        assert after.reward == 2 * before.reward + 1
        if after.turns[-1].reward is not None:  # an answer that was cut off has none
            assert sum(turn.reward for turn in after.turns) == after.reward
        assert after.trainable.any() == (before.reward > 0)
    parts = [{**COPYING, "interface": f"{__name__}:Revising", "tag": "copying"}]
    mixture = build(resolve("environment", {"kind": "mixture", "parts": parts}))
    (again,) = mixture.post_process(plain[:1])
    assert [row.reward for row in again.trajectories] == [
        row.reward for row in revised[0].trajectories
    ]
    assert "copying/judged" in mixture.measure([again])
    assert mixture.measure([]) == {"prompts/copying": 0}


def test_only_the_last_row_of_an_attempt_gets_the_difference():
    section = {**COPYING, "interface": f"{__name__}:Revising"}
    environment = build(resolve("environment", section))
    task = next(iter(environment.tasks("train", seed=0)))
    row = make_trajectory([1], [2], reward=1.0)
    rows = [replace(row, turns=(Turn(1, 2, reward=reward),)) for reward in (0.75, 0.25)]
    (group,) = environment.post_process([Group("g", task, tuple(rows))])
    assert [row.reward for row in group.trajectories] == [3.0, 3.0]
    assert [row.turns[0].reward for row in group.trajectories] == [0.75, 2.25]


@pytest.mark.medium
def test_replayed_groups_are_not_post_processed_again():
    _, run = run_of(
        lambda metrics: None,
        steps=2,
        environment={**COPYING, "interface": f"{__name__}:Revising"},
        algorithm={"kind": "grpo", "group_size": 8, "correction": {"weight": "token"}},
        rollouts={"replay": {"groups": 4, "priority": "uniform"}},
    )

    async def draw():
        first = await run.batcher.next(0)
        run.batcher.ack(first, 0)
        second = await run.batcher.next(1)
        await run.close()
        return first, second

    first, second = asyncio.run(draw())
    rewards = {group.id: group.rewards for group in first}
    replayed = [group for group in second if group.n_uses]
    assert len(replayed) == 4
    assert all(group.rewards == rewards[group.id] for group in replayed)
    assert {reward for group in second for reward in group.rewards} <= {1.0, 3.0, 5.0}


@pytest.mark.parametrize(
    ("returns", "why"),
    [
        ("raises", "ZeroDivisionError"),
        ("reversed", "the rows are in another order"),
        ("total_reward", "total_reward must be finite, not nan"),
        ("loss_multiplier", "loss_multiplier must be 0 or 1, not nan"),
    ],
)
def test_post_processing_that_breaks_ends_the_run(returns, why):
    with pytest.raises(TrainingError, match=r"Revising\.global_post(.|\n)*" + why):
        drawn_by("Revising", returns=returns)
