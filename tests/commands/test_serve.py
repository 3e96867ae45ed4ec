"""`ratchet serve`: the official client asks a model that serves, and gets what `ratchet chat` would
say."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI, AuthenticationError, BadRequestError

from ratchet.commands.model_target import open_target
from ratchet.commands.serve import _serve, serve
from ratchet.config.model_shape.presets import get_preset
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.errors import ConfigError
from ratchet.models.load import init_policy
from ratchet.types import Message, Sampling
from ratchet.web.server import Server

pytestmark = [pytest.mark.needs("fastapi"), pytest.mark.needs("openai")]

ASKED = [{"role": "user", "content": "1+2"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, tokenizer = tmp_path_factory.mktemp("model"), byte_tokenizer()
    init_policy(
        get_preset("tiny", vocab_size=tokenizer.vocab_size, n_layers=1, hidden_size=32), seed=0
    ).save(path)
    tokenizer.save(path)
    return path


@asynccontextmanager
async def served(model: Path, key: str = "") -> AsyncIterator[AsyncOpenAI]:
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    task = asyncio.create_task(_serve(model, listener, key, Sampling(max_new_tokens=8)))
    try:
        async with AsyncOpenAI(
            base_url=address, api_key=key or "none", max_retries=0, timeout=60
        ) as client:
            yield client
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_it_answers_as_the_model_does(model: Path) -> None:
    async def both() -> tuple[str | None, str]:
        async with served(model) as client:
            answer = await client.chat.completions.create(
                model="policy", messages=ASKED, temperature=0
            )
            listed = await client.models.list()
        assert [entry.id for entry in listed.data] == ["policy"]
        policy = open_target(model).policy
        prompt = policy.renderer.prompt([Message("user", "1+2")])
        completion = await policy.generator.generate(
            prompt, policy.with_stop_ids(Sampling(temperature=0, max_new_tokens=8))
        )
        return answer.choices[0].message.content, policy.renderer.parse(
            completion.tokens.tolist(), completion.stop
        ).text

    said, expected = asyncio.run(both())
    assert said == expected


def test_a_stop_sequence_ends_a_message_by_name(model: Path) -> None:
    body = {"messages": ASKED, "max_tokens": 8, "temperature": 0}

    async def ask() -> None:
        async with (
            served(model) as client,
            httpx.AsyncClient(base_url=str(client.base_url), timeout=60) as raw,
        ):
            whole = (await raw.post("messages", json=body)).json()
            text = whole["content"][0]["text"]
            assert whole["usage"]["output_tokens"] == 8
            stop = text[2:4]
            answer = await raw.post("messages", json={**body, "stop_sequences": ["never", stop]})
            cut = answer.json()
            assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", stop)
            assert cut["content"][0]["text"] == text[: text.index(stop)]
            chat = await raw.post("chat/completions", json={**body, "stop": [stop]})
            said = chat.json()["choices"][0]
            assert (said["message"]["content"], said["finish_reason"]) == (
                cut["content"][0]["text"],
                "stop",
            )

    asyncio.run(ask())


def test_seeds_decide_and_differ(model: Path) -> None:
    async def answers() -> list[str | None]:
        async with served(model) as client:
            asked = [
                client.chat.completions.create(
                    model="policy", messages=ASKED, temperature=1.5, seed=seed
                )
                for seed in (1, 1, 2)
            ]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

    first, again, other = asyncio.run(answers())
    assert first == again != other


def test_a_key_lets_in(model: Path) -> None:
    async def ask() -> None:
        async with served(model, key="open-sesame") as client:
            assert (await client.chat.completions.create(model="policy", messages=ASKED)).choices
            with pytest.raises(AuthenticationError):
                await client.with_options(api_key="guess").models.list()

    asyncio.run(ask())


@pytest.mark.medium
def test_what_is_out_of_range_is_refused(model: Path) -> None:
    async def ask() -> None:
        async with served(model) as client:
            with pytest.raises(BadRequestError, match="temperature=1e-40 is too small"):
                await client.chat.completions.create(
                    model="policy", messages=ASKED, temperature=1e-40
                )

    asyncio.run(ask())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_with_its_status(
    model: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Signalled(Server):
        async def run(self) -> None:
            os.kill(os.getpid(), number)
            await self._stop_event.wait()
            self._listener.close()

    def unhandled(number: int, frame: object) -> None:
        raise AssertionError(f"serve does not handle signal {number}")

    monkeypatch.setattr("ratchet.commands.serve.Server", Signalled)
    previous = signal.signal(number, unhandled)
    said: list[str] = []
    sampling = Sampling(max_new_tokens=8)
    try:
        with pytest.raises(SystemExit) as ended:
            serve(model, host="127.0.0.1", port=0, key="", sampling=sampling, say=said.append)
    finally:
        signal.signal(number, previous)
    assert ended.value.code == 128 + number
    assert re.match(r"http://127\.0\.0\.1:[1-9]\d+/v1 serves ", said[0]), "which port was free"


@pytest.mark.slow
@pytest.mark.fault("S15")
def test_a_crowd_leaves_nothing_behind(model: Path) -> None:
    """300 silent connections, 300 clients that leave in the middle and 200 that stay: those are
    answered, and afterwards the process has the descriptors it had, and has written no
    traceback."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["ratchet", "serve", str(model), "--port", str(port), "--max-new-tokens", "2"]
    code = f"import sys; from ratchet.cli.main import main; sys.argv = {command!r}; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            before, after, answers = asyncio.run(crowd(port, server.pid))
        finally:
            server.terminate()
            output, _ = server.communicate(timeout=60)
    assert answers == [200] * 200
    assert after <= before + 2
    assert "Traceback" not in output
    assert server.returncode == 128 + signal.SIGTERM


async def crowd(port: int, pid: int) -> tuple[int, int, list[int]]:
    """Return (descriptors before, descriptors after, statuses of the clients that stay)."""
    body = json.dumps({"model": "policy", "messages": ASKED, "stream": True}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: "
        f"{len(body)}\r\n\r\n"
    ).encode()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/v1", timeout=60) as client:
        while True:
            try:
                assert (await client.get("/models")).status_code == 200
                break
            except httpx.ConnectError:
                await asyncio.sleep(0.1)
        before = len(os.listdir(f"/proc/{pid}/fd"))
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]

        async def leave(data: bytes) -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            await writer.drain()
            writer.transport.abort()

        async def stay() -> int:
            return (
                await client.post("/chat/completions", json={"model": "policy", "messages": ASKED})
            ).status_code

        leaving = [leave(data) for data in (head, head + body[:9], head + body) for _ in range(100)]
        _, answers = await asyncio.gather(
            asyncio.gather(*leaving), asyncio.gather(*(stay() for _ in range(200)))
        )
        for _, writer in silent:
            writer.close()
    async with asyncio.timeout(60):
        while len(os.listdir(f"/proc/{pid}/fd")) > before + 2:
            await asyncio.sleep(0.1)
    return before, len(os.listdir(f"/proc/{pid}/fd")), list(answers)


def test_others_are_not_let_in_by_mistake(model: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--host 0\.0\.0\.0 can be reached from other machines: give --api-key"
    ):
        serve(model, host="0.0.0.0", port=0, key="", sampling=Sampling())
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match="choose another"),
    ):
        serve(model, host="127.0.0.1", port=taken.getsockname()[1], key="", sampling=Sampling())
