"""The harness and the trace of a rollout of verifiers. Importing this module needs verifiers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, NoReturn

from openai import AsyncOpenAI, DefaultAsyncHttpxClient, omit
from verifiers.v1 import Harness, HarnessConfig, TaskData, Trace
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

from ratchet.environments.tool_use.base import describe_unknown_tool
from ratchet.errors import DataError


def _refuse() -> NoReturn:
    raise DataError(
        "a function of the environment reads the number of tokens (trace.usage, "
        "trace.num_output_tokens), which environments of Ratchet don't see. Count characters or "
        "turns, or run verifiers' own client against Ratchet's OpenAI-compatible proxy instead"
    )


class PolicyTrace(Trace):
    """A trace whose counts of tokens raise DataError.

    Environments don't see the policy's tokens, and a reward must not be computed with 0 instead.
    """

    @property
    def usage(self) -> NoReturn:
        _refuse()

    @property
    def num_input_tokens(self) -> NoReturn:
        _refuse()

    @property
    def num_output_tokens(self) -> NoReturn:
        _refuse()

    @property
    def num_total_tokens(self) -> NoReturn:
        _refuse()


class ChatHarness(Harness[HarnessConfig]):
    """A harness that plays a task as a chat with its tools, like verifiers' `null`."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        await _chat(endpoint, secret, messages, mcp_urls)
        return ProgramResult(0, "", "")


async def _chat(
    endpoint: str, secret: str, messages: list[Any], mcp_urls: Mapping[str, str]
) -> None:
    """Continue a conversation, and call tools, until a reply has no call."""
    async with AsyncExitStack() as stack:
        urls = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        tools, dispatch, servers = await connect_mcp(urls, stack)
        transport = DefaultAsyncHttpxClient(trust_env=False, timeout=None)
        client = AsyncOpenAI(
            base_url=endpoint, api_key=secret, max_retries=0, http_client=transport
        )
        stack.push_async_callback(client.close)
        offered: Any = tools or omit
        while True:
            completion = await client.chat.completions.create(
                model="policy", messages=messages, tools=offered
            )
            reply = completion.choices[0].message.model_dump(exclude_none=True)
            messages.append(reply)
            if not reply.get("tool_calls"):
                return
            for call in reply["tool_calls"]:
                name = call["function"]["name"]
                if name in dispatch:
                    arguments = json.loads(call["function"]["arguments"])
                    content = await call_mcp(servers, dispatch, name, arguments)
                else:
                    content = f"Error: {describe_unknown_tool(name, dispatch)}"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
