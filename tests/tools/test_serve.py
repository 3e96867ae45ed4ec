"""`ratchet serve`: the official client asks a model that serves, and gets what `ratchet chat` would say."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from openai import AsyncOpenAI, AuthenticationError, BadRequestError

from ratchet.data.builtin_tokenizers import byte_tokenizer
from ratchet.errors import ConfigError
from ratchet.models.load import init_policy
from ratchet.models.presets import preset
from ratchet.tools.serve import _serve, serve
from ratchet.tools.target import open_target
from ratchet.types import Message, Sampling

pytestmark = [pytest.mark.needs("fastapi"), pytest.mark.needs("openai")]

ASKED = [{"role": "user", "content": "1+2"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, tokenizer = tmp_path_factory.mktemp("model"), byte_tokenizer()
    init_policy(preset("tiny", vocab_size=tokenizer.vocab_size, n_layers=1, hidden_size=32), seed=0).save(path)
    tokenizer.save(path)
    return path


@asynccontextmanager
async def served(model: Path, key: str = "") -> AsyncIterator[AsyncOpenAI]:
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    task = asyncio.create_task(_serve(model, listener, key, Sampling(max_new_tokens=8)))
    try:
        async with AsyncOpenAI(base_url=address, api_key=key or "none", max_retries=0, timeout=60) as client:
            yield client
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_it_answers_as_the_model_does(model: Path) -> None:
    async def both() -> tuple[str | None, str]:
        async with served(model) as client:
            answer = await client.chat.completions.create(model="policy", messages=ASKED, temperature=0)
            listed = await client.models.list()
        assert [entry.id for entry in listed.data] == ["policy"]
        policy = open_target(model).policy
        prompt = policy.renderer.prompt([Message("user", "1+2")])
        completion = await policy.generator.generate(prompt, policy.ends(Sampling(temperature=0, max_new_tokens=8)))
        return answer.choices[0].message.content, policy.renderer.parse(completion.tokens.tolist(), completion.stop).text

    said, expected = asyncio.run(both())
    assert said == expected


def test_seeds_decide_and_differ(model: Path) -> None:
    async def answers() -> list[str | None]:
        async with served(model) as client:
            asked = [
                client.chat.completions.create(model="policy", messages=ASKED, temperature=1.5, seed=seed) for seed in (1, 1, 2)
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


def test_what_is_out_of_range_is_refused(model: Path) -> None:
    async def ask() -> None:
        async with served(model) as client:
            with pytest.raises(BadRequestError, match="temperature=1e-40 is too small"):
                await client.chat.completions.create(model="policy", messages=ASKED, temperature=1e-40)

    asyncio.run(ask())


def test_others_are_not_let_in_by_mistake(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0 lets others in: give --api-key"):
        serve(model, host="0.0.0.0", port=0, key="", sampling=Sampling())
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="choose another"):
        serve(model, host="127.0.0.1", port=taken.getsockname()[1], key="", sampling=Sampling())
