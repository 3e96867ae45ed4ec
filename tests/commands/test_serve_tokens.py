"""`ratchet serve` in vLLM's dialect: its log-probabilities are those that transformers computes from
the same weights, and what the `renderers` package reads is what a learner would compute."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from openai import AsyncOpenAI, BadRequestError

from ratchet.commands.serve import _serve
from ratchet.config.model_shape.presets import get_preset
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.models.load import init_policy
from ratchet.types import Sampling

pytestmark = [pytest.mark.needs("fastapi"), pytest.mark.needs("openai")]

TEXT = "The sum of 1 and 2 is 3."
TEMPLATE = (
    "{%- for message in messages -%}<{{ message.role }}>{{ message.content }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, tokenizer = tmp_path_factory.mktemp("model"), byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    shape = get_preset("tiny", vocab_size=tokenizer.vocab_size, n_layers=1, hidden_size=32)
    policy = init_policy(shape, seed=0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(3)  # so that the likeliest tokens differ clearly
    policy.save(path)
    tokenizer.save(path)
    return path


@asynccontextmanager
async def serve(model: Path) -> AsyncIterator[AsyncOpenAI]:
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    task = asyncio.create_task(_serve(model, listener, "", Sampling(max_new_tokens=8)))
    try:
        async with AsyncOpenAI(base_url=address, api_key="none", timeout=60) as client:
            yield client
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def compute_logprobs(model: Path, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return transformers' log-probabilities of all tokens at each position, [T - 1, V]."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.no_grad():
        logits = reference(torch.tensor([tokens])).logits[0, :-1]
    return (logits / temperature).log_softmax(-1)


def test_an_echoed_prompt_has_the_logprobs_of_transformers(model: Path) -> None:
    tokens = byte_tokenizer().encode(TEXT)

    async def ask() -> None:
        async with serve(model) as client:
            for max_tokens in (0, 1):
                answer = await client.completions.create(
                    model="policy",
                    prompt=[tokens, tokens[:5]],
                    echo=True,
                    logprobs=2,
                    max_tokens=max_tokens,
                    temperature=0,
                    extra_body={"return_tokens_as_token_ids": True},
                )
                whole, start = answer.choices
                assert whole.text.startswith(TEXT)
                check(whole.logprobs, tokens)
                check(start.logprobs, tokens[:5])
                assert len(start.logprobs.tokens) == 5 + max_tokens

    def check(logprobs, prompt: list[int]) -> None:
        expected = compute_logprobs(model, prompt)
        assert logprobs.tokens[: len(prompt)] == [f"token_id:{token}" for token in prompt]
        assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
        own = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        shown = logprobs.token_logprobs[1 : len(prompt)]
        torch.testing.assert_close(torch.tensor(shown).double(), own, rtol=0, atol=1e-5)
        values, ids = expected.topk(2)
        for alternatives, top_ids, top_values in zip(
            logprobs.top_logprobs[1:], ids.tolist(), values.tolist(), strict=False
        ):
            for token, value in zip(top_ids, top_values, strict=True):
                assert abs(alternatives[f"token_id:{token}"] - value) < 1e-5

    asyncio.run(ask())


def test_alternatives_of_a_chat_are_those_of_its_temperature(model: Path) -> None:
    async def ask() -> None:
        async with serve(model) as client:
            for temperature in (1.0, 2.0):
                answer = await client.chat.completions.create(
                    model="anything",
                    messages=[{"role": "user", "content": "1+2"}],
                    temperature=temperature,
                    seed=3,
                    logprobs=True,
                    top_logprobs=3,
                    extra_body={"return_token_ids": True, "return_tokens_as_token_ids": True},
                )
                (choice,) = answer.choices
                ids = [*answer.prompt_token_ids, *choice.token_ids]
                expected = compute_logprobs(model, ids, temperature)[-len(choice.token_ids) :]
                for row, entry in zip(expected, choice.logprobs.content, strict=True):
                    assert (
                        abs(row[int(entry.token.removeprefix("token_id:"))] - entry.logprob) < 1e-5
                    )
                    values, top_ids = row.topk(3)
                    names = [top.token for top in entry.top_logprobs]
                    assert names == [f"token_id:{token}" for token in top_ids.tolist()]
                    for top, value in zip(entry.top_logprobs, values.tolist(), strict=True):
                        assert abs(top.logprob - value) < 1e-5

    asyncio.run(ask())


@pytest.mark.needs("renderers")
def test_the_client_of_renderers_reads_the_learners_logprobs(model: Path) -> None:
    from renderers.client import generate
    from renderers.default import DefaultRenderer
    from transformers import AutoTokenizer

    async def ask() -> None:
        renderer = DefaultRenderer(AutoTokenizer.from_pretrained(model))
        async with serve(model) as client:
            result = await generate(
                client=client,
                renderer=renderer,
                messages=[{"role": "user", "content": "1+2"}],
                model="policy",
                sampling_params={"temperature": 1.0, "max_tokens": 6, "seed": 1},
            )
        assert len(result["completion_ids"]) in range(1, 7)
        expected = compute_logprobs(model, [*result["prompt_ids"], *result["completion_ids"]])
        rows = expected[-len(result["completion_ids"]) :]
        for row, token, logprob in zip(
            rows, result["completion_ids"], result["completion_logprobs"], strict=True
        ):
            assert abs(row[token] - logprob) < 1e-5

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [([3] * 10_000, "the prompt has 10000 tokens, the context"), ([10**6], "a token outside of 0")],
)
def test_a_prompt_that_cannot_be_scored_is_refused(
    model: Path, prompt: list[int], reason: str
) -> None:
    async def ask() -> None:
        async with serve(model) as client:
            with pytest.raises(BadRequestError, match=reason):
                await client.completions.create(
                    model="policy", prompt=prompt, echo=True, logprobs=1, max_tokens=0
                )

    asyncio.run(ask())
