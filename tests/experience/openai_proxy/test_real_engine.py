"""A tiny model that has learned to call a tool, on our engine, asked by the official client, and
trained by it."""

import asyncio
import json

import numpy as np
import pytest
from experience.openai_proxy.talk import TEMPLATE, TOOLS, only, said, serving
from openai import AsyncOpenAI

from ratchet.config.model_shape.presets import get_preset
from ratchet.config.resolve import build, resolve
from ratchet.config.schema import EvaluationConfig, OptimizerConfig
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.data.packing import pack
from ratchet.experience.openai_proxy.player import AgentPlayer
from ratchet.experience.sources.rollouts import RolloutSource
from ratchet.models.load import init_policy
from ratchet.testing.fakes import FakeEnvironment, FakeReward
from ratchet.training.build import make_run
from ratchet.training.loop import train
from ratchet.training.stage import EnvSetup, Policy, StageSpec
from ratchet.types import Group, Message, Owner, Sampling, Scored, Task, ToolCall

pytestmark = [pytest.mark.needs("fastapi"), pytest.mark.needs("openai"), pytest.mark.slow]

QUESTION = "1+2, +4?"
TASK = Task("sums/0", (Message("user", QUESTION),), answer="7", tag="sums")


class Sums(FakeEnvironment):
    """One task, and how it is solved."""

    def tasks(self, split, *, seed, start=0):
        while True:
            yield TASK

    def tools(self, task):
        return TOOLS

    def demonstration(self, task):
        return (
            Message("assistant", tool_calls=(ToolCall("call_0", "add", {"a": 1, "b": 2}),)),
            Message("tool", "3", tool_call_id="call_0"),
            Message("assistant", "So", tool_calls=(ToolCall("call_1", "add", {"a": 3, "b": 4}),)),
            Message("tool", "7", tool_call_id="call_1"),
            Message("assistant", "It is 7."),
        )


async def ask(client, *, stream=False):
    """Three turns; the last answer."""
    messages = [{"role": "user", "content": QUESTION}]
    for _ in range(5):
        message, _ = await said(client, messages, stream=stream, tools=TOOLS)
        messages.append(message)
        if not message.get("tool_calls"):
            return message["content"]
        for call in message["tool_calls"]:
            total = sum(json.loads(call["function"]["arguments"]).values())
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(total)})
    return ""


async def solve(task, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=60) as client:
        return await ask(client)


def plan(name, steps, **more):
    return StageSpec(name, steps, 4, evaluation=EvaluationConfig(tasks=0), **more)


@pytest.fixture(scope="module")
def learned():
    """(policy that has learned the demonstration, its learner)"""
    tokenizer = byte_tokenizer()
    shape = get_preset("tiny", vocab_size=tokenizer.vocab_size, max_positions=1024)
    policy = Policy.create(init_policy(shape, seed=0), tokenizer, template=TEMPLATE)
    optimizer = OptimizerConfig(lr=5e-3, warmup_steps=5)
    run = make_run(
        policy,
        EnvSetup(Sums()),
        build(resolve("algorithm", {"kind": "sft"})),
        plan("sft", 150, optimizer=optimizer),
    )
    asyncio.run(train(run))
    return policy, run.roles["policy"]


class Watched:
    """The engine, whose weights have another version at each request; what it gave."""

    records_masks = True

    def __init__(self, engine):
        self.engine, self.completions = engine, []

    @property
    def version(self):
        return self.engine.version

    async def generate(self, tokens, sampling, media=()):
        await self.engine.commit(self.engine.version + 1)
        self.completions.append(await self.engine.generate(tokens, sampling, media))
        return self.completions[-1]


def captured(learned, scene):
    """(what the engine sampled, the session's trajectories, the learner's logprobs of each) after
    `await scene(client)`"""
    policy, learner = learned
    watched = Watched(policy.generator)

    async def run():
        options = {"stop_ids": policy.renderer.stop_ids, "temperature": 1.0}
        async with serving(watched, renderer=policy.renderer, max_context=1024, **options) as (
            session,
            client,
        ):
            await scene(client)
        rows = session.trajectories(0, Scored(1.0), {})
        scores = [
            await learner.score(pack([Group("g", TASK, (row,))]), ["logprobs"]) for row in rows
        ]
        return rows, [score["logprobs"].numpy() for score in scores]

    return watched.completions, *asyncio.run(run())


def assert_exact(row, completions, recomputed):
    """Its policy tokens are those of `completions`, end to end; and the learner computes their
    logprobs too."""
    sampled = row.owner == Owner.POLICY
    for name, column in (
        ("tokens", row.tokens),
        ("logprobs", row.rollout_logprobs),
        ("versions", row.versions),
    ):
        np.testing.assert_array_equal(
            column[sampled], np.concatenate([getattr(c, name) for c in completions])
        )
    np.testing.assert_array_equal(row.trainable, sampled)
    np.testing.assert_allclose(
        row.rollout_logprobs[sampled], recomputed[sampled], rtol=0, atol=1e-5
    )
    assert row.rollout_logprobs[sampled].min() < -1e-4, (
        "no certainty: the comparison means something"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_captured_is_what_the_engine_sampled_and_what_the_learner_computes(learned, stream):
    async def scene(client):
        assert await ask(client, stream=stream) == "It is 7."

    completions, rows, recomputed = captured(learned, scene)
    row = only(rows)
    assert len(row.turns) == len(completions) == 3
    assert len(set(row.versions[row.owner == Owner.POLICY].tolist())) == 3, (
        "each turn has the version it was drawn with"
    )
    assert row.metrics["malformed_tool_calls"] == 0
    assert_exact(row, completions, recomputed[0])


@pytest.mark.parametrize("stream", [False, True])
def test_a_history_that_does_not_extend_forks_and_no_token_trains_twice(learned, stream):
    """The second request gives back an edited answer; the third goes on from what the policy really
    said."""

    async def scene(client):
        messages = [{"role": "user", "content": QUESTION}]
        first, _ = await said(client, messages, stream=stream, tools=TOOLS)
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "3"}
        await said(
            client, [*messages, {**first, "content": "Well."}, result], stream=stream, tools=TOOLS
        )
        await said(client, [*messages, first, result], stream=stream, tools=TOOLS)

    completions, (edited, straight), recomputed = captured(learned, scene)
    assert [len(row.turns) for row in (edited, straight)] == [1, 2]
    assert edited.metrics["forks"] == 1
    assert_exact(edited, completions[1:2], recomputed[0])
    assert_exact(straight, [completions[0], completions[2]], recomputed[1])


def test_a_few_steps_of_grpo_by_the_agent(learned):
    policy, _ = learned
    seen = []

    def judge(trajectory, task):
        seen.append(trajectory)
        # so that there is something to learn
        return float(trajectory.extras["result"] == "It is 7.") + 0.1 * (len(seen) % 3)

    setup = EnvSetup(Sums(), reward=FakeReward(judge), agent=solve)
    sampling = Sampling(temperature=1.0, max_new_tokens=100)
    first = policy.generator.version
    before = [parameter.detach().clone() for parameter in policy.model.parameters()]
    algorithm = build(resolve("algorithm", {"kind": "grpo", "group_size": 3}))
    run = make_run(policy, setup, algorithm, plan("grpo", 2, sampling=sampling))
    assert isinstance(run.managers[0].player, AgentPlayer)
    assert isinstance(run.batcher.source, RolloutSource)
    asyncio.run(train(run))
    assert len(seen) == 2 * 4 * 3
    assert all(row.outcome is None for row in seen)
    assert {int(version) for row in seen for version in row.versions if version >= 0} == {
        first,
        first + 1,
    }
    assert any(
        (old != new).any() for old, new in zip(before, policy.model.parameters(), strict=True)
    )
