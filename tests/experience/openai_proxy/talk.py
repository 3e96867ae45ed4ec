"""A scripted policy behind the proxy, and a conversation with it about a sum."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
from openai import AsyncOpenAI

from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.data.chat.renderer import Renderer
from ratchet.experience.openai_proxy.server import Proxy
from ratchet.experience.openai_proxy.session import AgentSession
from ratchet.testing.fakes import FakeGenerator
from ratchet.types import Sampling

TEMPLATE = """\
{%- if tools -%}{{- "<system>" + (tools | tojson) -}}{%- endif -%}
{%- for message in messages -%}
    {{- "<" + message.role + ">" + (message.content or "") -}}
    {%- for call in message.tool_calls or [] -%}
        {{- "<tool_call>\\n" + (call.function | tojson) + "\\n</tool_call>" -}}
    {%- endfor -%}
    {%- if message.role == "assistant" -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<assistant>" -}}{%- endif -%}
"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "The sum of two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    }
]
# Spaced and ordered as no template would: whoever renders it anew gets other tokens.
CALLS = (
    'I add.<tool_call>\n{"arguments": {"b":2,  "a":1}, "name":"add"}\n</tool_call>',
    '<tool_call>\n{"name":"add","arguments":{"a":3,"b":4}}\n</tool_call>',
    "It is 7.",
)
RENDERER = Renderer(byte_tokenizer(), TEMPLATE)
EOS = RENDERER.stop_ids[0]


class Scripted(FakeGenerator):
    """Says `lines` in turn, whatever it is asked; each token has a logprob of its own. `hold`: what
    it waits for first."""

    def __init__(self, lines=CALLS):
        self.lines, self.hold, self.waiting, self.cancelled = list(lines), None, asyncio.Event(), 0
        self.completions = []
        super().__init__(lambda tokens, sampling: self._line())

    def _line(self):
        return [
            *RENDERER.tokenizer.encode(self.lines[len(self.completions) % len(self.lines)]),
            EOS,
        ]

    async def generate(self, tokens, sampling, media=()):
        if self.hold is not None:
            self.waiting.set()
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        completion = await super().generate(tokens, sampling, media)
        n = len(self.completions)
        logprobs = -np.arange(1, len(completion.tokens) + 1, dtype=np.float32) / 64 - n
        completion = replace(
            completion, logprobs=logprobs, versions=np.full(len(logprobs), n, np.int32)
        )
        self.completions.append(completion)
        return completion


def sampling(**more):
    return Sampling(**{"max_new_tokens": 128, "stop_ids": RENDERER.stop_ids, "seed": 7, **more})


@asynccontextmanager
async def serving(
    generator, *, renderer=RENDERER, max_context=4096, max_turns=64, proxy=None, **sampled
):
    """(session, client of it)"""
    session = AgentSession(
        generator, renderer, sampling(**sampled), max_context=max_context, max_turns=max_turns
    )
    async with (
        (proxy or Proxy()).open(session) as (base_url, key),
        AsyncOpenAI(base_url=base_url, api_key=key, timeout=30) as client,
    ):
        yield session, client


async def said(client, messages, *, stream=False, **more):
    """The assistant's message as a client sends it back, and the whole answer."""
    if not stream:
        answer = await client.chat.completions.create(model="policy", messages=messages, **more)
        return answer.choices[0].message.model_dump(), answer
    chunks = [
        c
        async for c in await client.chat.completions.create(
            model="policy", messages=messages, stream=True, **more
        )
    ]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    message = {"role": "assistant", "content": "".join(delta.content or "" for delta in deltas)}
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    if calls:
        message["tool_calls"] = [
            {
                "id": c.id,
                "type": c.type,
                "function": {"name": c.function.name, "arguments": c.function.arguments},
            }
            for c in calls
        ]
    return message, chunks


async def converse(client, *, turns=3, stream=False, **more):
    """Asks, and answers every tool call with 5; the messages."""
    messages = [{"role": "user", "content": "1+2, then add 4?"}]
    for turn in range(turns):
        message, _ = await said(client, messages, stream=stream, tools=TOOLS, **more)
        messages.append(message)
        results = [
            {"role": "tool", "tool_call_id": c["id"], "content": "5"}
            for c in message.get("tool_calls") or []
        ]
        messages += results or [{"role": "user", "content": f"go on {turn}"}]
    return messages


def only(trajectories):
    (trajectory,) = trajectories
    return trajectory
