"""Grammars of requests: what each API sends, what the served model then writes."""

import asyncio
import json

import httpx
import numpy as np
import pytest
import tokenizers
from experience.openai_proxy.talk import RENDERER

from ratchet.commands.serve import ServedModel
from ratchet.config.model_shape.presets import get_preset
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.data.chat.tool_call_grammar import CallRules, make_call_grammar
from ratchet.data.chat.tool_calls import FORMATS
from ratchet.data.packing import pack
from ratchet.errors import ConfigError
from ratchet.experience.openai_proxy.schema import ChatRequest
from ratchet.experience.openai_proxy.server import make_chat_app
from ratchet.experience.openai_proxy.session import AgentSession
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.learners.compute.forward import Forward
from ratchet.models.load import init_policy
from ratchet.training.stage import Policy
from ratchet.types import Group, Sampling, Scored, Task

pytestmark = pytest.mark.needs("fastapi")

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
STRICT = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
NAMED_SCHEMA = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


@pytest.fixture(scope="module")
def policy():
    tokenizer = RENDERER.tokenizer
    model = init_policy(
        get_preset("tiny", vocab_size=tokenizer.vocab_size, n_layers=1, hidden_size=32), seed=0
    )
    generator = EmbeddedEngine(EngineConfig(), model, tokenizer)
    return Policy(model, tokenizer, RENDERER, generator)


@pytest.fixture(scope="module")
def served(policy):
    return ServedModel(policy, Sampling(max_new_tokens=96))


def post(served, path, body):
    async def ask():
        app = make_chat_app(lambda key: served, hosts=None)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, json={"seed": 1, **body})

    answer = asyncio.run(ask())
    return answer.status_code, answer.json()


def tools_with(**more):
    function = {"name": "add", "parameters": STRICT}
    return [{"type": "function", "function": {**function, **more}}]


def read_text(body):
    if "choices" in body:
        (choice,) = body["choices"]
        return choice.get("text") or choice["message"]["content"]
    if "output" in body:
        return body["output"][0]["content"][0]["text"]
    return body["content"][0]["text"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
        (CHAT, {"structured_outputs": {"json": SCHEMA}}),
        (CHAT, {"guided_json": json.dumps(SCHEMA)}),
        (COMPLETIONS, {"structured_outputs": {"json": SCHEMA}, "max_tokens": 40}),
        (COMPLETIONS, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "max_tokens": 40}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        (MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
        (RESPONSES, {"text": {"format": NAMED_SCHEMA}}),
    ],
)  # fmt: skip
def test_every_api_takes_a_schema(served, path, fields):
    prompt = {COMPLETIONS: {"prompt": "hi"}, RESPONSES: {"input": "hi"}}.get(path, {"messages": HI})
    status, body = post(served, path, {**prompt, **fields})
    assert status == 200, body
    assert json.loads(read_text(body))["n"] in (1, 2)
    if path == RESPONSES:
        assert body["text"]["format"] == NAMED_SCHEMA


def test_choices_expressions_and_grammars(served):
    for grammar, expected in (
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "[ab]"}, {"a", "b"}),
        ({"grammar": 'start: "x" | "y"'}, {"x", "y"}),
        ({"grammar": 'root ::= "x" | "y"'}, {"x", "y"}),
    ):
        _, body = post(served, CHAT, {"messages": HI, "structured_outputs": grammar})
        assert read_text(body) in expected, body


def test_alternatives_are_those_that_the_grammar_allows(served):
    body = {"messages": HI, "guided_choice": ["a", "b"], "logprobs": True, "top_logprobs": 3}
    _, answer = post(served, CHAT, body)
    first = answer["choices"][0]["logprobs"]["content"][0]
    logprobs = {top["token"]: top["logprob"] for top in first["top_logprobs"]}
    assert abs(first["logprob"] - logprobs[first["token"]]) < 1e-5
    assert sum(np.exp([logprobs["a"], logprobs["b"]])) == pytest.approx(1, abs=1e-5)
    assert sorted(logprobs.values())[0] == -9999


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        (CHAT, "required"),
        (CHAT, {"type": "function", "function": {"name": "add"}}),
        (MESSAGES, {"type": "any"}),
        (MESSAGES, {"type": "tool", "name": "add"}),
        (RESPONSES, "required"),
        (RESPONSES, {"type": "function", "name": "add"}),
    ],
)
def test_a_forced_call_is_made(served, path, choice):
    body = {"messages": HI, "tools": tools_with()}
    if path == MESSAGES:
        body["tools"] = [{"name": "add", "input_schema": STRICT}]
    elif path == RESPONSES:
        body = {
            "input": "hi",
            "tools": [{"type": "function", "name": "add", "parameters": STRICT, "strict": True}],
        }
    # One call has 70 tokens, and a random model may write several.
    status, answer = post(served, path, {**body, "tool_choice": choice})
    assert status == 200, answer
    if path == CHAT:
        calls = answer["choices"][0]["message"].get("tool_calls") or []
        arguments = [json.loads(call["function"]["arguments"]) for call in calls]
    elif path == MESSAGES:
        arguments = [block["input"] for block in answer["content"] if block["type"] == "tool_use"]
    else:
        arguments = [
            json.loads(item["arguments"])
            for item in answer["output"]
            if item["type"] == "function_call"
        ]
        assert answer["tool_choice"] == choice
    assert arguments
    assert all(values["a"] in (1, 2) for values in arguments)


@pytest.mark.parametrize("marks", ["text", "tokens", "special tokens"])
@pytest.mark.parametrize("is_forced", [False, True])
def test_calls_follow_their_schema_and_other_text_stays_free(marks, is_forced):
    from llguidance import LLMatcher, LLTokenizer

    backend = tokenizers.Tokenizer.from_str(RENDERER.tokenizer.to_json())
    names = [] if marks == "text" else ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    special = marks == "special tokens"
    backend.add_tokens([tokenizers.AddedToken(n, special=special, normalized=False) for n in names])
    tokenizer = Tokenizer(backend, config=RENDERER.tokenizer.config)
    rules = CallRules([*tools_with(), *tools_with(name="other")], ["add"], is_forced)
    grammar = make_call_grammar(rules, FORMATS["hermes"], tokenizer)
    start = LLMatcher(
        LLTokenizer(tokenizer.to_json(), eos_token=tokenizer.eos_ids[0]),
        LLMatcher.grammar_from_lark(grammar),
    )
    call = '<tool_call>\n{"name": "%s", "arguments": {"a":%d}}\n</tool_call>'
    for text, is_allowed in (
        ("", not is_forced),
        ("no call, a < b", not is_forced),
        ("<think>\nx\n</think>\n\n" + call % ("add", 1), not is_forced),
        (call % ("add", 2), True),
        (call % ("add", 1) + "\n" + call % ("other", 2), True),
        (call % ("other", 7), not is_forced),
        ("First " + call % ("add", 1) + " done", not is_forced),
        (call % ("add", 3), False),
        (call % ("unknown", 1), False),
    ):
        matcher = start.deep_copy()
        tokens = tokenizer.encode(text, allow_special=True)
        follows = matcher.consume_tokens(tokens) and matcher.is_accepting()
        assert follows == is_allowed, text


@pytest.mark.medium
def test_with_tools_and_a_format_an_answer_is_either(served):
    formatted = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    body = {"messages": HI, "tools": tools_with(), "response_format": formatted}
    kinds = set()
    for seed in range(6):
        _, answer = post(served, CHAT, {**body, "seed": seed, "temperature": 4})
        (choice,) = answer["choices"]
        if choice["finish_reason"] == "length":  # within a second call
            continue
        message = choice["message"]
        kinds.add("calls" if message.get("tool_calls") else "answer")
        if not message.get("tool_calls"):
            assert json.loads(message["content"])["n"] in (1, 2)
    assert kinds == {"calls", "answer"}


def test_an_attempt_trains_on_its_masks(policy):
    """A free turn follows one with a grammar; the learner computes the logprobs of both."""
    formatted = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}

    async def play():
        sampling = policy.with_stop_ids(Sampling(max_new_tokens=24, seed=1))
        session = AgentSession(policy.generator, RENDERER, sampling, max_context=200, max_turns=2)
        messages = list(HI)
        for fields in ({"response_format": formatted}, {}):
            request = ChatRequest.model_validate({"messages": messages, **fields})
            answer = await session.answer(request)
            session.record(answer)
            messages = [*messages, {"role": "assistant", "content": answer.message.text}, *HI]
        return session.trajectories(0, Scored(1.0), {})

    trajectories = asyncio.run(play())
    batch = pack([Group("g", Task("t", ()), tuple(trajectories))])
    forward = Forward(policy.model, None, chunk_mib=1, autocast=False, shared_vocab=None)
    logprobs = forward.score(batch, ("logprobs",))["logprobs"][batch.trainable_T]
    np.testing.assert_allclose(logprobs, batch.rollout_logprobs_T[batch.trainable_T], atol=1e-5)
    allowed = batch.need("allowed")[batch.trainable_T]
    assert 0 < int((allowed >= 0).sum()) < len(allowed)


def test_other_families_refuse_to_force_a_call():
    with pytest.raises(ConfigError, match="can't be forced in the format 'glm'"):
        make_call_grammar(CallRules(tools_with(), ["add"]), FORMATS["glm"], RENDERER.tokenizer)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"guided_json": {"type": "none"}}, "guided_json: the JSON schema can't be followed"),
        ({"guided_json": {"enum": []}}, "guided_json: the JSON schema can't be followed"),
        ({"structured_outputs": {}}, "structured_outputs: has the keys none"),
        ({"structured_outputs": {"json": SCHEMA, "json_object": True}}, "structured_outputs: has the keys json, json_object"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag: "),
        ({"tools": tools_with(), "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice: the request offers no tool 'f'"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex: can't be followed together with response_format"),
    ],
)  # fmt: skip
def test_what_can_not_be_followed_is_refused(served, body, message):
    status, answer = post(served, CHAT, {"messages": HI, **body})
    assert (status, answer["error"]["message"][: len(message)]) == (400, message)


def test_two_formats_of_a_message_are_refused(served):
    formatted = {"type": "json_schema", "schema": SCHEMA}
    body = {"messages": HI, "output_format": formatted, "output_config": {"format": formatted}}
    status, answer = post(served, MESSAGES, body)
    assert (status, "send one of them" in answer["error"]["message"]) == (400, True)
