"""A model behind an API plays like any other: against a fake on loopback, and against our own
server of the policy."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from rewards.fake_http import Answer, chat, serve

from ratchet.config.resolve import build, resolve
from ratchet.config.schema import RunConfig
from ratchet.environments.toy.sorting import Sorting
from ratchet.errors import DataError
from ratchet.evals.evaluator import Evaluator
from ratchet.evals.openai_client import (
    EndpointPlayer,
    format_message,
    get_completions_url,
    read_message,
)
from ratchet.evals.results import EvalResults
from ratchet.experience.openai_proxy.server import Proxy
from ratchet.experience.openai_proxy.session import AgentSession
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.protocols import Environment, Reward
from ratchet.rewards.llm.http_client import Endpoint, EndpointConfig, EndpointError
from ratchet.rewards.weighted_sum import compose_rewards
from ratchet.testing.fakes import FakeEnvironment
from ratchet.training.from_config import build_policy
from ratchet.types import Message, Part, Sampling, Task, ToolCall
from ratchet.utils.credentials import set_environment

TASKS = [Task(f"t/{i}", (Message("user", f"{i}?"),), answer=str(i), tag="t") for i in range(3)]
PATIENT: dict[str, Any] = {"retries": 0, "backoff_s": 0.001}
EXACT = {"kind": "exact_match"}


def player(
    url: str, *, timeout_s: float | None = None, body: dict[str, Any] | None = None, **keys: Any
) -> EndpointPlayer:
    section = EndpointConfig.model_validate({**PATIENT, **keys})
    return EndpointPlayer(
        Endpoint(get_completions_url(url), section), "m", body or {}, timeout_s=timeout_s
    )


def sorting() -> Sorting:
    return build(resolve("environment", {"kind": "sorting", "digits": 2}))


def evaluated(
    plays: EndpointPlayer,
    tasks: Sequence[Task] = TASKS,
    *,
    environment: Environment | None = None,
    reward: Reward | None = None,
    samples: int = 0,
) -> EvalResults:
    environment = environment or sorting()
    reward = reward or compose_rewards([resolve("rewards", EXACT)])
    manager = RolloutManager(plays, lambda: copy.copy(environment), reward)
    return asyncio.run(
        Evaluator(manager, tasks, Sampling(max_new_tokens=9, temperature=0.7), samples).run()
    )


def said(text: str, reason: str = "stop") -> dict[str, Any]:
    answer = chat(text)
    answer["choices"][0]["finish_reason"] = reason
    return {**answer, "usage": {"completion_tokens": 5}}


def test_answers_are_judged_and_counted():
    with serve(
        lambda body, _: said(
            body["messages"][-1]["content"].rstrip("?")
            if "1" not in str(body["messages"])
            else "no"
        )
    ) as fake:
        found = evaluated(player(f"{fake.url}/v1/"), samples=2)
        assert found.accuracy.value == pytest.approx(2 / 3)
        assert [prompt.greedy.reward for prompt in found.prompts if prompt.greedy] == [
            1.0,
            0.0,
            1.0,
        ]
        assert {attempt.tokens for prompt in found.prompts for attempt in prompt.attempts} == {5}
        assert found.prompts[1].sampled[0].answer == "no"
        assert len(fake.seen) == 9
        # Requests arrive in any order.
        path, _, body = next(
            row
            for row in fake.seen
            if row[2]["messages"][0]["content"] == "0?" and not row[2]["temperature"]
        )
        assert path == "/v1/chat/completions"
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.0, 9)
        assert body["messages"] == [{"role": "user", "content": "0?"}]
        assert "top_p" not in body
        assert len({row[2]["seed"] for row in fake.seen if row[2]["temperature"]}) == 6


@pytest.mark.medium
def test_what_breaks_is_a_failure_and_no_prompt_is_dropped():
    broken = {
        "0?": Answer("busy", 503),
        "1?": said("", "content_filter"),
        "2?": {"choices": []},
        "3?": Answer("too long", 400),
        "6?": {**said("0"), "usage": {"completion_tokens": -3}},
        "7?": {**said("0"), "usage": {"completion_tokens": 10**12}},
        "8?": '{"choices": [{"message": {"role": "assistant", "tool_calls": 5}}]}',
        "9?": '{"choices": [{"message": {"role": "assistant"}}], "usage": {"completion_tokens": 1e999}}',
    }
    tasks = [
        replace(TASKS[0], id=f"t/{i}", messages=(Message("user", f"{i}?"),)) for i in range(10)
    ]
    answer = {**broken, "4?": said("0", "length"), "5?": said("0")}
    with serve(lambda body, _: answer[body["messages"][0]["content"]]) as fake:
        found = evaluated(player(f"{fake.url}/v1"), tasks)
    ends = [prompt.greedy.end for prompt in found.prompts if prompt.greedy]
    assert ends == ["failed"] * 4 + ["truncated", "scored"] + ["failed"] * 4
    assert found.failures == {"endpoint": 8}
    assert (found.accuracy.value, found.accuracy.prompts) == (0.5, 2)
    details = [prompt.greedy.detail for prompt in found.prompts if prompt.greedy]
    for detail, part in zip(details, ("503", "withheld", "without a message", "400"), strict=False):
        assert part in detail


@pytest.mark.parametrize(("reason", "cut"), [("length", True), ("stop", False)])
def test_a_turn_says_if_its_answer_was_cut(reason: str, cut: bool):
    with serve(lambda body, _: said("0", reason)) as fake:
        (row,) = asyncio.run(
            player(f"{fake.url}/v1").play(TASKS[0], FakeEnvironment(), Sampling(), attempt=0)
        )
    assert row.is_cut_short is cut


@pytest.mark.parametrize("status", [401, 404])
def test_an_endpoint_that_serves_nobody_ends_the_evaluation(status: int):
    with (
        serve(lambda body, _: Answer("no", status)) as fake,
        pytest.raises(EndpointError, match=str(status)),
    ):
        evaluated(player(f"{fake.url}/v1"))


def test_an_attempt_has_its_time():
    from rewards.fake_http import HANG

    with serve(lambda body, _: HANG) as fake:
        found = evaluated(player(f"{fake.url}/v1", timeout_s=0.2), TASKS[:1])
    assert found.failures == {"timeout": 1}


def test_keys_of_a_request_are_added_and_removed():
    with serve(lambda body, _: said("0")) as fake:
        evaluated(
            player(
                f"{fake.url}/v1",
                body={"max_tokens": None, "max_completion_tokens": 7, "seed": None},
            ),
            TASKS[:1],
        )
        body = fake.seen[0][2]
    assert body["max_completion_tokens"] == 7
    assert not {"max_tokens", "seed"} & set(body)


def test_tools_are_called_in_turns():
    environment = build(resolve("environment", {
        "kind": "tool_use",
        "problems": {"kind": "arithmetic", "digits": 2},
        "tools": [{"kind": "calculator"}],
    }))  # fmt: skip
    task = next(iter(environment.tasks("test", seed=0)))

    def answer(body: Any, number: int) -> Any:
        if body["messages"][-1]["role"] == "tool":
            return said(body["messages"][-1]["content"])
        name = body["tools"][0]["function"]["name"]
        arguments = json.dumps({"expression": "2*3"})
        call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {
            "choices": [{"message": message, "finish_reason": "tool_calls"}],
            "usage": {"completion_tokens": 4},
        }

    with serve(answer) as fake:
        found = evaluated(
            player(f"{fake.url}/v1"), [replace(task, answer="6")], environment=environment
        )
        assert len(fake.seen) == 2
        assert fake.seen[1][2]["messages"][-1] == {
            "role": "tool",
            "content": "6",
            "tool_call_id": "c1",
        }
    greedy = found.prompts[0].greedy
    assert greedy is not None
    assert (greedy.reward, greedy.text, greedy.tokens) == (1.0, "6", 9)


def test_messages_there_and_back():
    call = ToolCall("1", "f", {"x": [1]})
    message, malformed = read_message(format_message(Message("assistant", "hm", (call,))))
    assert (message, malformed) == (Message("assistant", "hm", (call,)), 0)
    broken = {"id": "2", "type": "function", "function": {"name": "f", "arguments": "[1]"}}
    message, malformed = read_message(
        {"role": "assistant", "content": None, "tool_calls": [broken]}
    )
    assert malformed == 1
    assert json.loads(message.text) == broken
    for arguments in ("[" * 100_000, {"x": 1}, 7):
        broken = {"id": "2", "function": {"name": "f", "arguments": arguments}}
        assert read_message({"role": "assistant", "tool_calls": [broken]})[1] == 1
    shown = Message("user", (Part("text", "what?"), Part("image", "data:image/png;base64,AA")))
    assert format_message(shown)["content"] == [
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
    ]
    with pytest.raises(DataError, match=r"the image a\.png, and only images in"):
        format_message(Message("user", (Part("image", "a.png"),)))


@pytest.mark.needs("fastapi", "uvicorn")
def test_our_own_server_answers_as_the_policy_does():
    stage = {
        "name": "a",
        "algorithm": {"kind": "grpo"},
        "environment": {"kind": "sorting", "digits": 2},
    }
    config = RunConfig.model_validate({
        "threads": 1,
        "device": "cpu",
        "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
        "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
        "stages": [stage],
    })  # fmt: skip
    policy = build_policy(config)
    environment = sorting()
    task = next(iter(environment.tasks("test", seed=0)))
    greedy = policy.with_stop_ids(Sampling(temperature=0.0, max_new_tokens=6))

    async def asked() -> str:
        session = AgentSession(
            policy.generator, policy.renderer, greedy, max_context=64, max_turns=8
        )
        async with Proxy().open(session) as (url, key):
            set_environment({"KEY": key})
            section = EndpointConfig.model_validate({**PATIENT, "api_key_env": "KEY"})
            plays = EndpointPlayer(Endpoint(get_completions_url(url), section), "policy")
            rows = await plays.play(task, environment, greedy, attempt=0)
        assert rows[0].completion_length > 0
        return rows[0].messages[-1].text

    async def direct() -> str:
        completion = await policy.generator.generate(policy.renderer.prompt(task.messages), greedy)
        return policy.renderer.parse(completion.tokens.tolist(), completion.stop).text

    try:
        assert asyncio.run(asked()) == asyncio.run(direct())
    finally:
        set_environment({})
