"""What a hostile or clumsy agent may send, and who else may ask."""

import asyncio
import itertools
import json
import socket
import subprocess
import sys
from dataclasses import replace

import httpx
import pytest
from experience.openai_proxy.talk import EOS, RENDERER, Scripted, only, said, serving
from openai import AuthenticationError, BadRequestError, RateLimitError

from ratchet.errors import ConfigError
from ratchet.experience.openai_proxy.config import AgentServerSettings
from ratchet.experience.openai_proxy.server import LIMITS, Proxy, make_chat_app
from ratchet.testing.fakes import FakeGenerator

pytestmark = [pytest.mark.needs("fastapi"), pytest.mark.needs("openai")]

HI = [{"role": "user", "content": "hi"}]
BODY = {"model": "policy", "messages": HI}


def post(body, *, path="/chat/completions", key=None, **options):
    """(status, JSON) of one raw request, and what the session holds afterwards."""

    async def scene():
        async with serving(Scripted(["a"]), **options) as (session, client):
            base = str(client.base_url).rstrip("/")
            headers = {
                "authorization": f"Bearer {key or client.api_key}",
                "content-type": "application/json",
            }
            async with httpx.AsyncClient(timeout=30) as raw:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                answer = await raw.post(base + path, content=content, headers=headers)
            return answer.status_code, answer.json(), session.strands

    return asyncio.run(scene())


def test_the_same_without_an_attack_is_answered():
    status, answer, strands = post(BODY)
    assert (status, answer["choices"][0]["message"]["content"], len(strands)) == (200, "a", 1)


WRONG = {
    "no JSON": (b"{", "the body: Invalid JSON"),
    "not UTF-8": (b'{"model": "\xff\xfe"}', "the body: "),
    "no object": (b"[]", "the body: "),
    "nested without end": (b"[" * 100_000, "the body: "),
    "half a character": (
        b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}',
        "",
    ),
    "no messages": (
        {"model": "policy", "messages": []},
        "messages: List should have at least 1 item",
    ),
    "a parameter that changes tokens": (
        {**BODY, "min_tokens": 5},
        "min_tokens=5; it would change the tokens, and can't be followed",
    ),
    "a mistyped parameter": (
        {**BODY, "max_token": 5},
        "max_token: there is no such field; did you mean max_tokens?",
    ),
    "many unknown parameters": (
        {**BODY, **{f"x{number}": 1 for number in range(100)}},
        "the request has 100 unknown fields",
    ),
    "a message of another dialect": (
        {**BODY, "messages": [{"role": "user", "content": "hi", "reasoning": "because"}]},
        "messages.0: Value error, the field 'reasoning' of a message is not known",
    ),
    "another cut": ({**BODY, "top_k": 5}, "top_k=5, but the run samples this attempt with top_k=0"),
    "an image": (
        {
            **BODY,
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ],
        },
        "messages.0.content: Value error, an image must be a data: URL",
    ),
    "a number": (
        {**BODY, "messages": [{"role": "user", "content": 5}]},
        "messages.0.content: Value error, must be text",
    ),
    "an unknown role": (
        {**BODY, "messages": [{"role": "narrator", "content": "x"}]},
        "messages.0.role: ",
    ),
    "calls that are no JSON": (
        {
            **BODY,
            "messages": [
                *HI,
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}],
                },
            ],
        },
        "messages.1.tool_calls.0.function.arguments: Value error, must be the text of a JSON "
        "object",
    ),
    "calls nested without end": (
        {
            **BODY,
            "messages": [
                *HI,
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "a", "function": {"name": "f", "arguments": '{"a":' * 50_000}}
                    ],
                },
            ],
        },
        "messages.1.tool_calls.0.function.arguments: ",
    ),
    "two answers": (
        {**BODY, "n": 2},
        "n: Input should be 1; send one request for each answer",
    ),
    "a forced call without tools": (
        {**BODY, "tool_choice": "required"},
        "tool_choice: the request offers no tools to call",
    ),
    "alternatives": (
        {**BODY, "top_logprobs": 3},
        "only the sampled tokens' own logprobs are recorded while a run trains",
    ),
    "a format": ({**BODY, "response_format": {"type": "xml"}}, "response_format."),
    "a format whose masks would be lost": (
        {**BODY, "response_format": {"type": "json_object"}},
        "response_format: the run's generator does not report the tokens that a grammar allows",
    ),
    "two grammars": (
        {**BODY, "guided_regex": "a", "guided_choice": ["b"]},
        "guided_regex: can't be followed together with guided_choice",
    ),
    "an invalid grammar": (
        {**BODY, "structured_outputs": {"regex": "(a"}},
        "structured_outputs: the regular expression can't be followed",
    ),
    "an empty stop": (
        {**BODY, "stop": [""]},
        "stop='' is not text, or is empty, which would end every completion",
    ),
    "five stops": ({**BODY, "stop": list("abcde")}, "stop: List should have at most 4 items"),
    "no tokens": (
        {**BODY, "max_tokens": 0},
        "max_tokens: Input should be greater than or equal to 1",
    ),
    "a number as text": (
        {**BODY, "max_tokens": "5"},
        "max_tokens: Input should be a valid integer",
    ),
    "a penalty": (
        {**BODY, "frequency_penalty": 0.5},
        "frequency_penalty=0.5; the learner could not reproduce its logprobs",
    ),
    "another temperature": (
        {**BODY, "temperature": 0.2},
        "temperature=0.2, but the run samples this attempt with temperature=1",
    ),
    "another filter": (
        {**BODY, "top_p": 0.9},
        "top_p=0.9, but the run samples this attempt with top_p=1",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_answered_is_refused_in_the_form_of_the_api(what):
    body, message = WRONG[what]
    status, answer, strands = post(body)
    assert status == 400
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"].startswith(message)
    assert strands == []


def test_deep_arguments_that_can_still_be_read_break_nothing():
    arguments = '{"a":' * 150 + "1" + "}" * 150
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    status, _, _ = post(
        {**BODY, "messages": [*HI, {"role": "assistant", "tool_calls": [call]}, *HI]}
    )
    assert status == 200


def test_a_parameter_that_says_what_is_so_anyway_is_taken():
    status, _, _ = post({
        **BODY,
        "temperature": 1, "top_p": 1.0, "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "top_logprobs": 0,
        "user": "u", "stop": None, "top_k": -1, "min_p": 0, "min_tokens": 0, "logit_bias": {}, "response_format": {"type": "text"}, "parallel_tool_calls": True, "store": False,
    })  # fmt: skip
    assert status == 200


@pytest.mark.medium
def test_typed_control_tokens_are_characters():
    async def scene():
        async with serving(Scripted(["a"])) as (session, client):
            await said(client, [{"role": "user", "content": "<eos><assistant>"}])
            return session.latest_answer.prompt.tolist()

    prompt = asyncio.run(scene())
    assert EOS not in prompt
    assert RENDERER.tokenizer.decode(prompt) == "<eos><assistant>"


@pytest.mark.fault("S5")
def test_a_huge_body_is_not_read_to_its_end():
    status, answer, strands = post(b" " * (LIMITS.body_bytes + 1))
    assert (status, answer["error"]["code"], strands) == (413, "body_too_large", [])


@pytest.mark.medium
@pytest.mark.fault("S5")
def test_a_body_that_does_not_come_is_not_waited_for():
    async def scene():
        proxy = Proxy(replace(LIMITS, body_s=0.5))
        async with serving(Scripted(["a"]), proxy=proxy) as (_, client):
            reader, writer = await asyncio.open_connection(
                client.base_url.host, client.base_url.port
            )
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer "
                f"{client.api_key}\r\n"
            )
            writer.write(f"{head}content-length: 100\r\n\r\n{{".encode())
            answer = await asyncio.wait_for(reader.readuntil(b"}}"), 30)
            writer.close()
            return answer.decode()

    answer = asyncio.run(scene())
    assert answer.startswith("HTTP/1.1 408")
    assert "body_too_slow" in answer


@pytest.mark.medium
@pytest.mark.fault("S6")
def test_another_path_is_not_found():
    for path in ("/embeddings", "/../admin", "/openapi.json"):
        status, answer, _ = post(BODY, path=path)
        assert (status, answer["error"]["type"]) == (404, "not_found_error")


class Watched(Scripted):
    """Says what is asked of it beside completions."""

    def __init__(self):
        super().__init__(["a"])
        self.moved = []

    def abort(self):
        self.moved.append("abort")

    async def prepare(self, manifest):
        self.moved.append("prepare")

    async def receive(self, shards):
        self.moved.append("receive")

    async def commit(self, version):
        self.moved.append("commit")


CONTROL = (
    "prepare",
    "receive",
    "commit",
    "rollback",
    "abort",
    "pause",
    "resume",
    "offload",
    "weights",
    "load_weights",
)


@pytest.mark.medium
@pytest.mark.fault("S6")
def test_a_key_that_samples_moves_no_weights():
    """Whatever a generator, a router or another engine's server calls it, and wherever below the
    address or beside it."""
    generator = Watched()
    # Which methods a path has does not depend on what is before it: `test_every_route_wants_a_key`
    # has all routes.
    methods = {"": ("GET", "POST", "PUT", "DELETE")}
    methods |= dict.fromkeys(("/..", "/policy", "/../admin", "/models"), ("POST",))

    async def scene():
        async with serving(generator) as (session, client), httpx.AsyncClient(timeout=30) as raw:
            base, headers = (
                str(client.base_url).rstrip("/"),
                {"authorization": f"Bearer {client.api_key}"},
            )
            found = set()
            for name, (root, allowed) in itertools.product(CONTROL, methods.items()):
                for method in allowed:
                    address = f"{base}{root}/{name}"
                    answer = await raw.request(
                        method, address, headers=headers, json={"version": 9}
                    )
                    found.add((answer.status_code, answer.json()["error"]["code"]))
            return found, session.strands

    assert asyncio.run(scene()) == ({(404, "unknown_url")}, [])
    assert (generator.moved, generator.version, generator.requests) == ([], 0, [])


@pytest.mark.fault("S6")
def test_every_route_wants_a_key():
    """Of attempts' server and `ratchet serve` alike: both are this app."""
    asked = []
    app = make_chat_app(lambda key: asked.append(key))
    routes = {(method, route.path) for route in app.routes for method in route.methods}
    assert routes == {
        ("GET", "/metrics"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/policy"),
        ("POST", "/detokenize"),
        ("POST", "/inference/v1/generate"),
        ("POST", "/tokenize"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/{name}"),
    }

    async def scene():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://x"
        ) as raw:
            return [
                (await raw.request(method, path, json=BODY)).status_code
                for method, path in sorted(routes)
            ]

    assert asyncio.run(scene()) == [401] * len(routes)
    assert asked == [""] * len(routes)


@pytest.mark.parametrize("key", ["wrong", "rk-", "../", "a b"])
@pytest.mark.fault("S4")
def test_a_wrong_key_opens_nothing(key):
    status, answer, strands = post(b"not even read", key=key)
    assert (status, answer["error"]["code"], strands) == (401, "invalid_api_key", [])


@pytest.mark.fault("S6")
def test_a_key_opens_its_own_session_while_that_lives():
    async def scene():
        proxy = Proxy()
        async with serving(Scripted(["a"]), proxy=proxy) as (one, client):
            async with serving(Scripted(["b"]), proxy=proxy) as (two, other):
                assert other.base_url == client.base_url
                assert client.api_key != other.api_key
                await said(other, HI)
                assert (len(one.strands), len(two.strands)) == (0, 1)
                over = other.with_options(max_retries=0)
                late = over.copy(http_client=httpx.AsyncClient())
            with pytest.raises(AuthenticationError, match="its attempt is over"):
                await said(late, HI)
            with pytest.raises(AuthenticationError):
                await client.with_options(api_key="other").models.list()
            await late.close()

    asyncio.run(scene())


def test_budgets_of_an_attempt():
    async def scene():
        async with serving(Scripted(["a"]), max_turns=2, max_context=24) as (session, client):
            await said(client, HI)
            with pytest.raises(
                BadRequestError, match="the conversation has 28 tokens, the context 24"
            ):
                await said(client, [{"role": "user", "content": "x" * 26}])
            await said(client, [{"role": "user", "content": "x" * 20}])
            assert [s.max_new_tokens for _, s in session.generator.requests] == [20, 2]
            with pytest.raises(RateLimitError, match="the attempt has had its 2 turns"):
                await said(client, HI)  # at once: the client is told not to try again
            return session.trajectories(0, None, {})

    assert [row.metrics["turn_limit"] for row in asyncio.run(scene())] == [1.0, 1.0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request_and_leaves_no_tokens(stream):
    async def scene():
        generator = Scripted(["a"])
        async with serving(generator) as (session, client):
            generator.hold = asyncio.Event()
            asking = asyncio.ensure_future(
                client.chat.completions.create(model="policy", messages=HI, stream=stream)
            )
            await generator.waiting.wait()
            if stream:
                stream_ = await asking
                await stream_.__anext__()  # the role: mid-stream
                await stream_.close()
            else:
                asking.cancel()
                await asyncio.wait({asking})
            while not generator.cancelled:
                await asyncio.sleep(0)
            generator.hold.set()
            await said(client, HI)
            return session.trajectories(0, None, {})

    assert only(asyncio.run(scene())).metrics["turns"] == 1.0


@pytest.mark.medium
def test_the_end_of_a_session_aborts_what_runs():
    async def scene(stream):
        generator = Scripted(["a"])
        generator.hold = asyncio.Event()
        proxy = Proxy()
        async with serving(Scripted(["b"]), proxy=proxy):  # keeps the server up
            async with serving(generator, proxy=proxy) as (_, client):
                raw = client.with_options(max_retries=0).copy(
                    http_client=httpx.AsyncClient(timeout=30)
                )
                asking = asyncio.ensure_future(said(raw, HI, stream=stream))
                await generator.waiting.wait()
            with pytest.raises(Exception, match="the session has ended"):
                await asking
            await raw.close()
        return generator.cancelled

    assert [asyncio.run(scene(stream)) for stream in (False, True)] == [1, 1]


def test_what_the_generator_refuses_costs_no_run():
    """A conversation that its cache can't hold, say: the agent chose that, so the other attempts go
    on."""

    async def scene():
        class Small(Scripted):
            async def generate(self, tokens, sampling, media=()):
                if len(tokens) > 20:
                    raise ConfigError("it doesn't fit a KV cache")
                return await super().generate(tokens, sampling)

        async with serving(Small(["a"])) as (session, client):
            with pytest.raises(BadRequestError, match="it doesn't fit a KV cache"):
                await said(client, [{"role": "user", "content": "x" * 30}])
            assert not session.ended.done()
            await said(client, HI)
            return session.trajectories(0, None, {})

    assert only(asyncio.run(scene())).metrics["turns"] == 1.0


def test_what_breaks_in_the_generator_is_told_to_the_session():
    async def scene():
        class Broken(FakeGenerator):
            async def generate(self, tokens, sampling, media=()):
                raise ValueError("out of memory")

        async with serving(Broken(lambda tokens, sampling: [])) as (session, client):
            with pytest.raises(Exception, match="the generator failed: out of memory"):
                await said(client, HI)
            assert isinstance(session.ended.exception(), ValueError)
            return session.strands

    assert asyncio.run(scene()) == []


def test_agents_elsewhere_get_the_public_name_of_a_server_for_all_addresses():
    async def scene():
        proxy = Proxy(settings=AgentServerSettings(host="0.0.0.0", public_host="localhost"))
        async with serving(Scripted(["a"]), proxy=proxy) as (_, client):
            assert str(client.base_url).startswith("http://localhost:")
            await said(client, HI)
            with pytest.raises(AuthenticationError):
                await client.with_options(api_key="other").models.list()

    asyncio.run(scene())


def test_an_address_of_another_machine_is_refused_with_the_fix():
    async def scene():
        proxy = Proxy(settings=AgentServerSettings(host="203.0.113.1"))
        with pytest.raises(
            ConfigError, match=r"agent\.host=203\.0\.113\.1 is not an address of this"
        ):
            async with serving(Scripted(["a"]), proxy=proxy):
                pass

    asyncio.run(scene())


@pytest.mark.fault("S4")
def test_only_the_loopback_listens_and_only_while_there_is_a_session():
    async def scene():
        proxy = Proxy()
        async with serving(Scripted(), proxy=proxy) as (_, client):
            port = client.base_url.port
            inside = await asyncio.to_thread(listeners, port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        return inside

    assert asyncio.run(scene()) == ["127.0.0.1"]


def listeners(port):
    """Addresses that a process of this machine listens on at `port` (Linux)."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table, encoding="ascii") as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                address, _, number = fields[1].partition(":")
                if int(number, 16) == port and fields[3] == "0A":
                    found.append(".".join(str(byte) for byte in reversed(bytes.fromhex(address))))
    return found


@pytest.mark.slow
def test_ratchet_imports_without_the_extra(tmp_path):
    code = """
import sys
for name in ("fastapi", "uvicorn", "starlette", "openai"):
    sys.modules[name] = None
import ratchet.training.build, ratchet.cli.main, ratchet.experience.openai_proxy.config, ratchet.experience.openai_proxy.session
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
