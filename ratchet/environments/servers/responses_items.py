"""Convert between messages and the items of OpenAI's Responses API, as NeMo Gym uses them.

An item is a message, a call of a function, its output, or reasoning. In messages, reasoning is text
between <think> and </think> at the beginning of an assistant's turn.

Source: the package nemo-gym 0.4.0, nemo_gym/openai_utils.py and
responses_api_models/vllm_model/app.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ratchet.data.chat.messages import read_messages
from ratchet.data.chat.thinking import mark_thought, split_thinking
from ratchet.data.jsonl import describe_type
from ratchet.environments.tool_use.base import make_tool_schema
from ratchet.errors import DataError
from ratchet.types import Message, ToolCall


def read_input(params: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    """Return the messages of a request's `instructions` and `input`.

    Args:
        params: The request: NeMo Gym's `responses_create_params`.
        where: The file and the row, for errors.

    Raises DataError for an item that would be lost or misread.
    """
    items, instructions = params.get("input"), params.get("instructions")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        actual = "an empty array" if items == [] else describe_type(items)
        raise DataError(
            f"{where}: responses_create_params.input is {actual}, must be text or an array of items"
        )
    if not isinstance(instructions, str | None):
        raise DataError(
            f"{where}: responses_create_params.instructions is {describe_type(instructions)}, must "
            "be text"
        )
    messages = [] if instructions is None else [Message("system", instructions)]
    previous_type = ""
    for index, item in enumerate(items):
        message = _read_item(item, f"{where}, item {index}")
        item_type = item.get("type", "message")
        continues_turn = previous_type == "reasoning" or (
            item_type == "function_call" and previous_type in ("message", "function_call")
        )
        is_turn = messages and messages[-1].role == message.role == "assistant"
        if is_turn and continues_turn:
            message = replace(
                message,
                content=messages[-1].text + message.text,
                tool_calls=messages.pop().tool_calls + message.tool_calls,
            )
        messages.append(message)
        previous_type = item_type
    return tuple(messages)


def _read_item(item: Any, where: str) -> Message:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind in ("function_call", "function_call_output") and not item.get("call_id"):
        raise DataError(f"{where} has no call_id, which tells the outputs of calls apart")
    if kind == "message":
        kept = {name: item[name] for name in ("role", "content") if name in item}
        return read_messages([kept], where)[0]
    if kind == "function_call":
        call = {"id": str(item["call_id"]), "function": item}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return read_messages([message], where)[0]
    if kind == "function_call_output" and isinstance(item.get("output"), str):
        return Message("tool", item["output"], tool_call_id=str(item["call_id"]))
    if kind == "reasoning":
        parts = item.get("summary") or ()
        text = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
        return Message("assistant", mark_thought(text) if text else "")
    raise DataError(
        f"{where} is of type {kind!r:.40}, must be message, function_call, function_call_output "
        "(with text) or reasoning"
    )


def read_function_tools(params: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of a request in the form of chat completions.

    Raises DataError if the tools are no array of functions.
    """
    values = params.get("tools") or []
    if not isinstance(values, list):
        raise DataError(f"{where}: tools is {describe_type(values)}, must be an array of functions")
    tools: list[Mapping[str, Any]] = []
    for tool in values:
        if not isinstance(tool, dict) or tool.get("type") != "function" or not tool.get("name"):
            raise DataError(f"{where} has the tool {tool!r:.80}, must be a function with a name")
        tools.append(
            make_tool_schema(str(tool["name"]), tool.get("description"), tool.get("parameters"))
        )
    return tuple(tools)


def describe_turn(message: Message, turn: int, *, cut: bool = False) -> list[dict[str, Any]]:
    """Return the items of a policy's message.

    Args:
        turn: Number of the turn, for the items' ids.
        cut: True if a limit ended the message.
    """
    thought, text = split_thinking(message.text)
    items: list[dict[str, Any]] = []
    if thought:
        summary = [{"type": "summary_text", "text": thought}]
        items.append({"type": "reasoning", "id": f"rs_{turn}", "summary": summary})
    if text or not message.tool_calls:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        status = "incomplete" if cut else "completed"
        items.append(
            {
                "type": "message",
                "id": f"msg_{turn}",
                "role": "assistant",
                "status": status,
                "content": content,
            }
        )
    return items + [_describe_call(call) for call in message.tool_calls]


def _describe_call(call: ToolCall) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{call.id}",
        "call_id": call.id,
        "name": call.name,
        "arguments": json.dumps(call.arguments),
        "status": "completed",
    }


def describe_output(call: ToolCall, text: str) -> dict[str, Any]:
    """Return the item of a tool's answer to a call."""
    return {"type": "function_call_output", "call_id": call.id, "output": text}


def make_response(
    output: Sequence[Mapping[str, Any]], params: Mapping[str, Any], *, cut: bool
) -> dict[str, Any]:
    """Return a Response object.

    Args:
        output: The items of the whole episode after the request's `input`.
        params: The request that it answers.
        cut: True if a limit ended the episode.
    """
    return {
        "id": "resp_0",
        "object": "response",
        "created_at": 0,
        "model": "policy",
        "output": list(output),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [
            {"parameters": None, "strict": None, **tool} for tool in params.get("tools") or ()
        ],
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
    }
