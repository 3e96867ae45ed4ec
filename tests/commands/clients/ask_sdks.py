"""Holds a conversation with a server by the official packages of OpenAI and Anthropic, in each of
their APIs, and prints what they report as JSON. It runs in the clients' own environment:
`ask_sdks.py URL KEY`."""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic
import openai

QUESTION = "1+2, then add 4?"
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}
ADD: dict[str, Any] = {"name": "add", "description": "The sum of two numbers."}
TURNS = 3


def ask_chat(client: openai.OpenAI, stream: bool) -> list[Any]:
    tools: Any = [{"type": "function", "function": {**ADD, "parameters": PARAMETERS}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    texts = []
    for _ in range(TURNS):
        fields: dict[str, Any] = {"model": "policy", "messages": messages, "tools": tools}
        if stream:
            chunks = client.chat.completions.create(stream=True, **fields)
            deltas = [chunk.choices[0].delta for chunk in chunks]
            text = "".join(delta.content or "" for delta in deltas)
            calls = [call for delta in deltas for call in delta.tool_calls or []]
        else:
            answer = client.chat.completions.create(**fields).choices[0].message
            text, calls = answer.content or "", answer.tool_calls or []
        texts.append(text)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [call.model_dump(exclude={"index"}) for call in calls]
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in calls]
    return texts


def ask_responses(client: openai.OpenAI, stream: bool, by_id: bool) -> list[Any]:
    tool: Any = {"type": "function", **ADD, "parameters": PARAMETERS, "strict": False}
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    texts, previous = [], None
    for _ in range(TURNS):
        fields: dict[str, Any] = {"model": "policy", "input": items, "tools": [tool]}
        if by_id and previous is not None:
            fields["previous_response_id"] = previous
        if stream:
            with client.responses.stream(**fields) as events:
                received: list[Any] = list(events)
            assert [event.sequence_number for event in received] == list(range(len(received)))
            response = received[-1].response  # completed, or incomplete at the limit of tokens
        else:
            response = client.responses.create(**fields)
        assert client.responses.retrieve(response.id).output_text == response.output_text
        texts.append(response.output_text)
        previous = response.id
        outputs: list[Any] = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "5"}
            for item in response.output
            if item.type == "function_call"
        ]
        items = outputs if by_id else [*items, *response.output, *outputs]
    return texts


def ask_messages(client: anthropic.Anthropic, stream: bool) -> list[Any]:
    tools: Any = [{**ADD, "input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    texts = []
    for _ in range(TURNS):
        fields: dict[str, Any] = {"model": "policy", "messages": messages, "tools": tools}
        count = client.messages.count_tokens(**fields).input_tokens
        if stream:
            with client.messages.stream(max_tokens=128, **fields) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(max_tokens=128, **fields)
        assert message.usage.input_tokens == count
        texts.append("".join(block.text for block in message.content if block.type == "text"))
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "5"}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "assistant", "content": message.content})
        messages.append({"role": "user", "content": results or "Go on."})
    return texts


def list_refusals(openai_client: openai.OpenAI, client: anthropic.Anthropic) -> list[str]:
    """Return what each client says of a request that can't be answered."""
    refusals = []
    try:
        client.messages.create(
            model="policy",
            max_tokens=9,
            messages=[{"role": "user", "content": "hi"}],
            tool_choice={"type": "any"},
        )
    except anthropic.BadRequestError as error:
        body: Any = error.body
        refusals.append(body["error"]["message"])
    try:
        openai_client.responses.create(model="policy", input="hi", previous_response_id="resp_x")
    except openai.BadRequestError as error:
        body = error.body
        refusals.append(body["message"])
    return refusals


if __name__ == "__main__":
    url, key = sys.argv[1:]
    openai_client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    anthropic_client = anthropic.Anthropic(
        base_url=url.removesuffix("/v1"), api_key=key, max_retries=0
    )
    conversations = {
        "chat": ask_chat(openai_client, stream=False),
        "chat, streamed": ask_chat(openai_client, stream=True),
        "responses": ask_responses(openai_client, stream=False, by_id=False),
        "responses, streamed": ask_responses(openai_client, stream=True, by_id=False),
        "responses, by id": ask_responses(openai_client, stream=False, by_id=True),
        "messages": ask_messages(anthropic_client, stream=False),
        "messages, streamed": ask_messages(anthropic_client, stream=True),
    }
    completion = openai_client.completions.create(model="policy", prompt="1+2", max_tokens=4)
    report = {
        "conversations": conversations,
        "completion": completion.choices[0].text,
        "refusals": list_refusals(openai_client, anthropic_client),
    }
    sys.stdout.write("\n" + json.dumps(report) + "\n")
