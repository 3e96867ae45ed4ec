"""`ratchet serve` under what no client should send: never a status of 500, never a traceback, and
it goes on answering."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratchet.commands.model_target import open_target
from ratchet.commands.report.server import make_app
from ratchet.commands.serve import ServedModel
from ratchet.config.model_shape.presets import get_preset
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.experience.openai_proxy.server import make_chat_app
from ratchet.models.load import init_policy
from ratchet.types import Sampling
from ratchet.web.guard import LOOPBACK

pytestmark = [pytest.mark.needs("fastapi")]

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

numbers = st.one_of(
    st.integers(-5, 5),
    st.sampled_from(
        [2**31, 2**63, -(2**63) - 1, 10**400, 1e-40, 1e308, -0.0, 0.5, float("nan"), float("inf")]
    ),
)
odd_texts = ["", "policy", "<eos>", "{{ 1/0 }}", "\ud800", "\0", "x" * 5000, "auto", "user"]
texts = st.one_of(st.text(max_size=8), st.sampled_from(odd_texts))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(
                ["system", "developer", "user", "assistant", "tool", "narrator"]
            ),
            "content": st.one_of(texts, values),
        },
        optional={
            "tool_calls": st.one_of(st.just([CALL]), values),
            "tool_call_id": st.one_of(st.just("a"), values),
            "name": values,
        },
    ),
    max_size=4,
)
# Each key with a likely value or with any.
likely: dict[str, st.SearchStrategy[Any]] = {
    "tools": st.just([TOOL]),
    "tool_choice": st.sampled_from(["auto", "none", "required"]),
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}),
    "temperature": numbers,
    "top_p": numbers,
    "max_tokens": numbers,
    "seed": numbers,
    "n": numbers,
    "stop": st.one_of(texts, st.lists(texts, max_size=5)),
    "logprobs": st.booleans(),
    "messages": messages,
    "model": texts,
}
bodies = st.fixed_dictionaries(
    {}, optional={key: st.one_of(each, values) for key, each in likely.items()}
).map(lambda changed: {**BODY, **changed})


token_lists = st.lists(st.one_of(st.integers(-1, 300), numbers), max_size=5)
prompts = st.one_of(texts, token_lists, st.lists(st.one_of(texts, token_lists), max_size=3))
sampling_fields = {
    key: st.one_of(likely[key], values)
    for key in ("temperature", "top_p", "max_tokens", "seed", "n", "stop")
} | {
    "top_k": st.one_of(numbers, values),
    "min_p": st.one_of(numbers, values),
    "stop_token_ids": st.one_of(token_lists, values),
    "logprobs": st.one_of(numbers, values),
}
token_requests = st.one_of(
    st.tuples(
        st.just("/v1/completions"),
        st.fixed_dictionaries(
            {"prompt": st.one_of(prompts, values)},
            optional={"echo": st.booleans(), "return_token_ids": st.booleans(), **sampling_fields},
        ),
    ),
    st.tuples(
        st.just("/inference/v1/generate"),
        st.fixed_dictionaries(
            {
                "token_ids": st.one_of(token_lists, values),
                "sampling_params": st.fixed_dictionaries({}, optional=sampling_fields),
            }
        ),
    ),
    st.tuples(
        st.just("/tokenize"),
        st.fixed_dictionaries({}, optional={"prompt": texts, "messages": messages}),
    ),
    st.tuples(st.just("/detokenize"), st.fixed_dictionaries({"tokens": token_lists})),
)


roles = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
block_types = ["text", "thinking", "tool_use", "tool_result", "image", "input_text", "output_text"]
blocks = st.fixed_dictionaries(
    {"type": st.sampled_from(block_types)},
    optional={
        "text": st.one_of(texts, values),
        "thinking": st.one_of(texts, values),
        "id": st.one_of(texts, values),
        "tool_use_id": st.one_of(texts, values),
        "name": st.one_of(texts, values),
        "input": values,
        "content": values,
    },
)
contents = st.one_of(texts, st.lists(blocks, max_size=3), values)
turns = st.fixed_dictionaries({"role": roles, "content": contents})
item_types = ["message", "function_call", "function_call_output", "reasoning", "item_reference"]
items = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(item_types),
        "role": roles,
        "content": contents,
        "call_id": st.one_of(texts, values),
        "name": texts,
        "arguments": st.one_of(st.just('{"a": 1}'), texts, values),
        "output": contents,
        "summary": contents,
    },
)
shared_fields = {
    "model": texts,
    "stream": st.booleans(),
    "temperature": numbers,
    "top_p": numbers,
    "metadata": values,
}
dialect_requests = st.one_of(
    st.tuples(
        st.sampled_from(["/v1/messages", "/v1/messages/count_tokens"]),
        st.fixed_dictionaries(
            {
                "messages": st.one_of(
                    st.just(BODY["messages"]), st.lists(turns, max_size=4), values
                ),
                "max_tokens": st.one_of(st.just(5), numbers),
            },
            optional={
                **shared_fields,
                "system": contents,
                "tools": st.one_of(st.just([{"name": "f", "input_schema": {}}]), values),
                "tool_choice": st.one_of(st.just({"type": "auto"}), values),
                "stop_sequences": st.one_of(st.lists(texts, max_size=5), values),
                "thinking": values,
            },
        ),
    ),
    st.tuples(
        st.just("/v1/responses"),
        st.fixed_dictionaries(
            {"input": st.one_of(texts, st.lists(items, max_size=4), values)},
            optional={
                **shared_fields,
                "instructions": st.one_of(texts, values),
                "tools": st.one_of(st.just([{"type": "function", "name": "f"}]), values),
                "parameters": values,
                "previous_response_id": st.one_of(texts, values),
                "max_output_tokens": numbers,
                "store": st.booleans(),
                "text": values,
            },
        ),
    ),
)


class Caller:
    """Asks an application in one event loop; `ask` returns the answer after it checked that it is
    no fault."""

    def __init__(self, runner: asyncio.Runner, app: Any, caplog: pytest.LogCaptureFixture) -> None:
        self.runner, self.app, self.caplog = runner, app, caplog

    def ask(
        self, method: str, path: str, content: bytes = b"", headers: dict[str, str] | None = None
    ) -> httpx.Response:
        async def scene() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                url = httpx.URL("http://localhost").copy_with(
                    raw_path=path.encode("ascii", "replace")
                )
                return await client.request(method, url, content=content, headers=headers)

        answer = self.runner.run(scene())
        assert answer.status_code < 500, (answer.status_code, answer.text)
        assert [record for record in self.caplog.records if record.levelno >= logging.WARNING] == []
        return answer


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, Any]]:
    path, tokenizer = tmp_path_factory.mktemp("model"), byte_tokenizer()
    sizes = {"n_layers": 1, "hidden_size": 32, "max_positions": 128}
    init_policy(get_preset("tiny", vocab_size=tokenizer.vocab_size, **sizes), seed=0).save(path)
    tokenizer.save(path)
    with asyncio.Runner() as runner:

        async def start() -> ServedModel:
            return ServedModel(open_target(path).policy, Sampling(max_new_tokens=2))

        served = runner.run(start())
        yield runner, make_chat_app(lambda key: served, hosts=LOOPBACK)
        runner.run(served.policy.close())


@pytest.fixture
def model(running: tuple[asyncio.Runner, Any], caplog: pytest.LogCaptureFixture) -> Caller:
    return Caller(*running, caplog)


QUICK = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.mark.fault("S15")
@QUICK
@given(body=bodies)
def test_no_request_is_a_fault_of_the_server(model: Caller, body: dict[str, Any]) -> None:
    answer = model.ask("POST", "/v1/chat/completions", json.dumps(body).encode())
    if answer.status_code == 200 and body.get("stream") is not True:
        assert answer.json()["choices"][0]["message"]["role"] == "assistant"
    elif answer.status_code != 200:
        assert answer.json()["error"]["message"]
    else:
        assert '"server_error"' not in answer.text


@pytest.mark.fault("S15")
@QUICK
@given(request=token_requests)
def test_no_request_of_tokens_is_a_fault(
    model: Caller, request: tuple[str, dict[str, Any]]
) -> None:
    path, body = request
    answer = model.ask("POST", path, json.dumps(body).encode())
    assert answer.status_code == 200 or answer.json()["error"]["message"]


def ask_in_dialect(model: Caller, path: str, body: dict[str, Any]) -> None:
    answer = model.ask("POST", path, json.dumps(body).encode())
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    elif body.get("stream") is True and "count" not in path:
        assert '"server_error"' not in answer.text
        assert '"api_error"' not in answer.text
        assert "NaN" not in answer.text
        assert "Infinity" not in answer.text
    else:
        assert answer.json()


@pytest.mark.fault("S15")
@QUICK
@given(request=dialect_requests)
def test_no_request_of_a_dialect_is_a_fault(
    model: Caller, request: tuple[str, dict[str, Any]]
) -> None:
    ask_in_dialect(model, *request)


@pytest.mark.slow
@pytest.mark.fault("S15")
@settings(QUICK, max_examples=500)
@given(request=dialect_requests)
def test_no_request_of_many_in_a_dialect_is_a_fault(
    model: Caller, request: tuple[str, dict[str, Any]]
) -> None:
    ask_in_dialect(model, *request)


@pytest.mark.slow
@pytest.mark.fault("S15")
@settings(QUICK, max_examples=500)
@given(body=bodies)
def test_no_request_of_many_is_a_fault(model: Caller, body: dict[str, Any]) -> None:
    model.ask("POST", "/v1/chat/completions", json.dumps(body).encode())


ODD_BYTES = [b"[" * 10**5, b'{"a":' * 10**4, b'"' + b"\\" * 999, b"9" * 5000]


@pytest.mark.fault("S15")
@QUICK
@given(content=st.one_of(st.binary(max_size=40), st.sampled_from(ODD_BYTES)))
def test_no_bytes_are_a_fault_of_the_server(model: Caller, content: bytes) -> None:
    answer = model.ask("POST", "/v1/chat/completions", content)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


paths = st.one_of(
    st.sampled_from(
        [
            "/v1/models",
            "/v1/chat/completions",
            "/v1/messages",
            "/v1/messages/x",
            "/v1/responses",
            "/v1/responses/x",
            "/",
            "/v1",
            "/docs",
            "/v1/models/policy",
        ]
    ),
    st.sampled_from(["/v1/../x", "//", "/%00", "/%ff"]),
    st.text("abc/%.:&=0", max_size=8).map(lambda text: "/" + text.replace("%", "%25")),
)


@pytest.mark.fault("S15")
@QUICK
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "X"]),
    path=paths,
)
def test_no_path_is_a_fault_of_the_server(model: Caller, method: str, path: str) -> None:
    answer = model.ask(method, path, b"{}")
    assert answer.status_code in (200, 400, 404, 405, 307), (method, path)


@pytest.mark.fault("S16")
@pytest.mark.parametrize(
    "headers", [{"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}]
)
def test_a_page_of_another_site_cannot_ask(model: Caller, headers: dict[str, str]) -> None:
    """By DNS rebinding it would name its own host; a simple POST names its own origin."""
    content, kind = json.dumps(BODY).encode(), {"content-type": "text/plain"}
    answer = model.ask("POST", "/v1/chat/completions", content, {**kind, **headers})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden_host")
    assert (
        model.ask(
            "POST", "/v1/chat/completions", content, {**kind, "origin": "http://localhost:3000"}
        ).status_code
        == 200
    )


@pytest.mark.fault("S15")
@QUICK
@given(
    path=st.sampled_from(
        [
            "run",
            "runs",
            "rollouts",
            "details",
            "media",
            "search",
            "evaluations",
            "answers",
            "files",
            "x",
        ]
    ),
    query=st.dictionaries(
        st.sampled_from(["run", "after", "known", "step", "places", "text", "name"]),
        st.one_of(
            st.sampled_from(["a", "..", "", "-1", "1", "9" * 30, "1,2", "nan", "1e9", "9" * 5000]),
            st.text(max_size=5),
        ),
    ),
)
def test_no_question_is_a_fault_of_the_dashboard(
    dashboard: Caller, path: str, query: dict[str, str]
) -> None:
    answer = dashboard.ask("GET", f"/api/{path}?{httpx.QueryParams(query)}")
    assert answer.status_code in (200, 400, 404)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, Any]]:
    from commands.report.made_runs import make_run

    path = tmp_path_factory.mktemp("runs")
    make_run(path / "a", steps=2)
    with asyncio.Runner() as runner:
        yield runner, make_app(path)


@pytest.fixture
def dashboard(runs: tuple[asyncio.Runner, Any], caplog: pytest.LogCaptureFixture) -> Caller:
    return Caller(*runs, caplog)
