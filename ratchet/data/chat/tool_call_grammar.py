"""Write grammars of tool calls, for requests that force a call or fix its arguments.

The grammars are Lark in llguidance's dialect.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.data.chat.thinking import REASONING
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.data.chat.tool_calls import ToolFormat
from ratchet.errors import ConfigError

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class CallRules:
    """The rules of a turn that may call tools."""

    tools: Sequence[Mapping[str, Any]]
    """The tools, as chat templates read them."""
    strict_names: Collection[str] = ()
    """Names of the tools whose arguments follow their schemas. The arguments of other tools may be
    any JSON object."""
    is_forced: bool = False
    """True if the turn consists of calls; False if it is text that may have calls."""
    forced_name: str | None = None
    """The name of the tool that the only call of a forced turn calls; None: any."""
    answer_schema: Mapping[str, Any] | None = None
    """The JSON schema of a turn that calls no tool; None: it is any text."""


def make_call_grammar(rules: CallRules, tool_format: ToolFormat, tokenizer: Tokenizer) -> str:
    """Return the grammar of a turn that follows the rules, in Hermes's format.

    The calls of a forced turn follow the schemas of all tools.

    Raises:
        ConfigError: There is no tool to call, or the family writes calls in another format.
    """
    tools = [tool for tool in rules.tools if rules.forced_name in (None, tool["function"]["name"])]
    if not tools:
        name = "tools" if rules.forced_name is None else f"tool '{rules.forced_name:.80}'"
        raise ConfigError(f"the request offers no {name} to call")
    if tool_format.name != "hermes":
        raise ConfigError(
            f"calls can't be forced in the format '{tool_format.name}': only those of Hermes and "
            "Qwen have a grammar. Set tool_choice=auto, and leave out strict and the format of the "
            "answer"
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
        if rules.is_forced or name in rules.strict_names:
            schema = function.get("parameters") or ANY_OBJECT
        lines += [
            f'call_{i}: {json.dumps(beginning, ensure_ascii=False)} arguments_{i} "}}"',
            # Each schema is a document of its own, so that its references keep their meaning.
            f"arguments_{i}: %json {json.dumps(schema)}",
        ]
    if rules.is_forced or rules.answer_schema is not None:
        calls = "call" if rules.forced_name is not None else r'call ("\n" call)*'
        lines += [f"calls: {calls}", rf'call: {opening} "\n" body "\n" {closing}']
        if rules.answer_schema is None:
            lines.append("start: calls")
        else:
            lines += ["start: calls | answer", f"answer: %json {json.dumps(rules.answer_schema)}"]
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
