"""Parsers of tool calls whose name and arguments stand between tags: GLM, MiniMax and Kimi.

Each parser returns the text outside the calls (`read_kimi`: only the text before them), and the
calls. A malformed call is None.

Sources: the chat templates of GLM-4.5, MiniMax-M2 and Kimi-K2.
"""

from __future__ import annotations

import re
from typing import Any

from ratchet.data.chat.tool_call_arguments import (
    Call,
    Tools,
    convert_argument,
    find_parameter_types,
    read_named_call,
)

# Each pattern matches one argument and the white space after it, so that the next match begins
# where this one ends.
GLM_ARGUMENT = re.compile(
    r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL
)
MINIMAX_ARGUMENT = re.compile(r'<parameter name="([^"]*)">(.*?)</parameter>\s*', re.DOTALL)


def read_glm(text: str, tools: Tools) -> tuple[str, list[Call | None]]:
    """Parse calls of GLM.

    <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>
    """
    content, *blocks = text.split("<tool_call>")
    calls: list[Call | None] = [None] if "</tool_call>" in content else []
    for block in blocks:
        body, is_closed, after = block.partition("</tool_call>")
        name, mark, arguments = body.partition("<arg_key>")
        calls.append(_read_call(name, mark + arguments, GLM_ARGUMENT, tools) if is_closed else None)
        content = content.rstrip() + after
    return content, calls


def read_minimax(text: str, tools: Tools) -> tuple[str, list[Call | None]]:
    """Parse calls of MiniMax.

    <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter>...</invoke>...
    </minimax:tool_call>
    """
    content, *sections = text.split("<minimax:tool_call>")
    calls: list[Call | None] = []
    for section in sections:
        body, _, after = section.partition("</minimax:tool_call>")
        text_before, *blocks = body.split('<invoke name="')
        calls += [_read_invoke(block, tools) for block in blocks]
        if text_before.strip() or not blocks:
            calls.append(None)
        content = content.rstrip() + after
    return content, calls


def _read_invoke(block: str, tools: Tools) -> Call | None:
    """Return the call in the text after `<invoke name="`, or None if it is malformed."""
    body, is_closed, after = block.partition("</invoke>")
    name, is_named, arguments = body.partition('">')
    if not is_closed or not is_named or after.strip():
        return None
    return _read_call(name, arguments, MINIMAX_ARGUMENT, tools)


def _read_call(name: str, arguments: str, argument: re.Pattern[str], tools: Tools) -> Call | None:
    """Return the call, or None if the text has anything but arguments that match the pattern."""
    name, arguments = name.strip(), arguments.lstrip()
    if not name or "<" in name:
        return None
    types = find_parameter_types(tools, name)
    values: dict[str, Any] = {}
    position = 0
    while position < len(arguments):
        match = argument.match(arguments, position)
        if match is None:
            return None
        key = match[1].strip()
        values[key] = convert_argument(match[2], types.get(key, "string"))
        position = match.end()
    return name, values


def read_kimi(text: str, tools: Tools) -> tuple[str, list[Call | None]]:
    """Parse calls of Kimi. Return only the text before their section: what follows it is dropped.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:NUMBER
    <|tool_call_argument_begin|>{...}<|tool_call_end|>...<|tool_calls_section_end|>
    """
    content, section_mark, _ = text.partition("<|tool_calls_section_begin|>")
    head, *blocks = text.split("<|tool_call_begin|>")
    calls: list[Call | None] = [None] if section_mark and not blocks else []
    for block in blocks:
        body, is_closed, _ = block.partition("<|tool_call_end|>")
        call_id, _, arguments = body.partition("<|tool_call_argument_begin|>")
        name = re.sub(r":\d+$", "", call_id.strip()).removeprefix("functions.")
        calls.append(read_named_call(name, arguments) if is_closed else None)
    return (content if section_mark else head), calls
