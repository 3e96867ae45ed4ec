"""Write grammars of tool calls, for requests that force a call or fix its arguments.

The grammars are Lark in llguidance's dialect.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ratchet.data.chat.thinking import REASONING
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.data.chat.tool_calls import ToolFormat
from ratchet.errors import ConfigError

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ANY_OBJECT = {"type": "object"}


def make_call_grammar(
    tool_format: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    free_arguments: Collection[str] = (),
    is_forced: bool,
    is_single: bool = False,
) -> str:
    """Return the grammar of a turn that calls tools, in Hermes's format.

    Args:
        tools: The tools that may be called, as chat templates read them.
        free_arguments: Names of the tools whose arguments may be any JSON object.
        is_forced: True if the turn consists of calls; False if it is text that may have calls.
        is_single: True if a forced turn has exactly one call.

    Raises:
        ConfigError: The family writes calls in another format.
    """
    if tool_format.name != "hermes":
        raise ConfigError(
            f"calls can't be forced in the format '{tool_format.name}': only those of Hermes and "
            "Qwen have a grammar. Let the model choose, with tool_choice=auto and without strict"
        )
    # llguidance matches a mark that is a token of its own by its name, not by its text.
    opening, closing = (
        json.dumps(mark) if tokenizer.token_id(mark) is None else mark for mark in (OPEN, CLOSE)
    )
    lines = [f"body: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        function = tool["function"]
        name = function["name"]
        beginning = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        schema = ANY_OBJECT
        if name not in free_arguments:
            schema = function.get("parameters") or ANY_OBJECT
        lines += [
            f'call_{i}: {json.dumps(beginning, ensure_ascii=False)} arguments_{i} "}}"',
            # Each schema is a document of its own, so that its references keep their meaning.
            f"arguments_{i}: %json {json.dumps(schema)}",
        ]
    if is_forced:
        start = "start: call" if is_single else r'start: call ("\n" call)*'
        lines += [start, rf'call: {opening} "\n" body "\n" {closing}']
    else:
        lines.append(rf'start: (before "\n" body "\n" {closing})* text')
        if opening == OPEN:
            marks = [mark for mark in REASONING[0] if tokenizer.token_id(mark) is not None]
            thinking = f" (({' | '.join(marks)}) ANY)*" if marks else ""
            lines += [f"before: text {OPEN}", f"text: ANY{thinking}", "ANY: /(?s:.*)/"]
        else:
            lines += [
                f"before[suffix={opening}]: /(?s:.*)/",
                "text: TEXT",
                f"TEXT: /(?s:.*)/ & ~/(?s:.*{OPEN}.*)/",
            ]
    return "\n".join(lines) + "\n"
