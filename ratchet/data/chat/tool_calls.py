"""Parsers of tool calls in a policy's text, one for each model family.

A policy may write anything: malformed calls are counted and never raise an error.

Sources: the chat templates of the families, and the tool parsers of vLLM and SGLang.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ratchet.data.chat.harmony import MARKS as HARMONY_MARKS
from ratchet.data.chat.harmony import read_harmony
from ratchet.data.chat.thinking import REASONING
from ratchet.data.chat.tool_call_arguments import (
    Call,
    Tools,
    convert_argument,
    find_parameter_types,
    is_too_deep,
    parse_single_value,
    parse_values,
    read_call,
    read_named_call,
)
from ratchet.data.chat.tool_calls_python import read_calls
from ratchet.data.chat.tool_calls_tagged import read_glm, read_kimi, read_minimax
from ratchet.errors import ConfigError
from ratchet.types import ToolCall

# Returns the text without calls, and one entry per call: the call, or None if it is malformed.
CallParser = Callable[[str, Tools], tuple[str, list[Call | None]]]


class ParsedCalls(NamedTuple):
    """The tool calls of a text."""

    content: str
    """The text without its calls; the whole text if a call is malformed."""
    calls: tuple[Call, ...] = ()
    """The calls; empty if one is malformed."""
    malformed: int = 0
    """Number of malformed calls."""


@dataclass(frozen=True)
class ToolFormat:
    """The format in which a model family writes tool calls."""

    name: str
    parser: CallParser
    """Function that parses the calls in a text."""
    marks: tuple[str, ...]
    """Strings that identify the family, in its chat template or its special tokens."""
    call_id: str = "call_{}"
    """Template of a call's id, formatted with the call's number and the tool's `name`."""

    def parse(self, text: str, tools: Tools = ()) -> ParsedCalls:
        """Parse the calls in a text. Its reasoning is not parsed, and stays in the content.

        Args:
            tools: Tool schemas. XML formats write all arguments as plain text; the schema says
                which are strings.
        """
        reasoning, answer = split_reasoning(text)
        content, parsed = self.parser(answer, tools)
        calls = tuple(call for call in parsed if call is not None)
        if len(calls) < len(parsed):
            return ParsedCalls(text, (), len(parsed) - len(calls))
        return ParsedCalls((reasoning + content).rstrip() if calls else text, calls)

    def number_calls(self, calls: Sequence[Call], first: int) -> tuple[ToolCall, ...]:
        """Return the calls with ids, numbered from `first` on."""
        return tuple(
            ToolCall(self.call_id.format(first + i, name=name), name, arguments)
            for i, (name, arguments) in enumerate(calls)
        )


def find_tool_format(name: str, template: str, special_tokens: Mapping[str, int]) -> ToolFormat:
    """Return the format of a model's tool calls by name.

    "auto" returns the first format with a mark in the template, else in the special tokens. Raises
    ConfigError for an unknown name, or if "auto" finds no mark.
    """
    if name in FORMATS:
        return FORMATS[name]
    if name != "auto":
        raise ConfigError(
            f"tokenizer.tool_format: there is no '{name}': use auto, {', '.join(FORMATS)}"
        )
    for text in (template, "\n".join(special_tokens)):
        for candidate in FORMATS.values():
            if any(mark in text for mark in candidate.marks):
                return candidate
    raise ConfigError(
        "the environment offers tools, but neither the chat template nor the special tokens say "
        f"how the model calls them: set tokenizer.tool_format to {', '.join(FORMATS)}, and "
        "tokenizer.template to one that writes tool calls (chatml)"
    )


def split_reasoning(text: str) -> tuple[str, str]:
    """Return the reasoning with its marks, and the text after it.

    If the reasoning is not closed, the whole text is reasoning.
    """
    for opening, closing in REASONING:
        reasoning, mark, answer = text.partition(closing)
        if mark:
            return reasoning + mark, answer
        if opening in text:
            return text, ""
    return "", text


def _read_hermes(text: str, tools: Tools) -> tuple[str, list[Call | None]]:
    """Parse calls of Hermes, Qwen2.5 and Qwen3.

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    """
    content, *blocks = text.split("<tool_call>")
    calls: list[Call | None] = [None] if "</tool_call>" in content else []
    for block in blocks:
        body, _, after = block.partition("</tool_call>")  # a model may end its turn without closing
        calls.append(read_call(parse_single_value(body)))
        content = content.rstrip() + after
    return content, calls


def _read_xml(text: str, tools: Tools) -> tuple[str, list[Call | None]]:
    """Parse calls of Qwen3-Coder.

    <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>
    """
    content, *blocks = text.replace("</tool_call>", "").split("<function=")
    is_opened = "<tool_call>" in content
    calls: list[Call | None] = [None] if is_opened and not blocks else []
    content = content.replace("<tool_call>", "")
    for block in blocks:
        body, closed, after = block.partition("</function>")
        calls.append(_read_xml_call(body, tools) if closed else None)
        content = content.rstrip() + after.replace("<tool_call>", "")
    return content, calls


def _read_xml_call(body: str, tools: Tools) -> Call | None:
    head, *parameters = body.split("<parameter=")
    name, closed, text_between = head.partition(">")
    name = name.strip()
    if not closed or not name or text_between.strip():
        return None
    types = find_parameter_types(tools, name)
    arguments: dict[str, Any] = {}
    for parameter in parameters:
        key, closed, body = parameter.partition(">")
        value, ended, text_between = body.partition("</parameter>")
        if not closed or not ended or text_between.strip() or not key.strip():
            return None
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key.strip()] = convert_argument(value, types.get(key.strip(), "string"))
    return name, arguments


def _read_llama(text: str, tools: Tools) -> tuple[str, list[Call | None]]:
    """Parse calls of Llama.

    Calls are {"name": ..., "parameters": {...}}, separated by ";", or [name(key="value"), ...].
    They may follow <|python_tag|>, or in Llama 4 stand between <|python_start|> and <|python_end|>.
    Without the tag, the whole text must be calls.
    """
    text_before, tag, body = text.replace("<|python_start|>", "<|python_tag|>").partition(
        "<|python_tag|>"
    )
    body = (body if tag else text).replace("<|python_end|>", "").strip()
    content = text_before if tag else ""
    calls: list[Call | None]
    if body.startswith("{"):
        values = parse_values(body, " \t\r\n;,")
        calls = [None] if values is None else [read_call(value) for value in values]
        looks_like_call = '"name"' in body and ('"parameters"' in body or '"arguments"' in body)
    else:
        python_calls = read_calls(body)
        looks_like_call = re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(", body) is not None
        calls = (
            [None]
            if python_calls is None or any(is_too_deep(arguments) for _, arguments in python_calls)
            else [*python_calls]
        )
    return (content, calls) if tag or looks_like_call else (text, [])


def _read_mistral(text: str, tools: Tools) -> tuple[str, list[Call | None]]:
    """Parse calls of Mistral.

    [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], or since tokenizer v11
    [TOOL_CALLS]name[ARGS]{...} for each call.
    """
    content, *blocks = text.split("[TOOL_CALLS]")
    calls: list[Call | None] = []
    for block in blocks:
        if block.lstrip()[:1] in ("[", "{") and not block.lstrip().startswith(
            ("[ARGS]", "[CALL_ID]")
        ):
            value = parse_single_value(block)
            items = value if isinstance(value, list) and value else [value]
            calls += [read_call(item) for item in items]
            continue
        name, _, arguments = (
            block.partition("[ARGS]") if "[ARGS]" in block else block.partition("{")
        )
        if "[ARGS]" not in block:
            arguments = "{" + arguments
        calls.append(read_named_call(name.partition("[CALL_ID]")[0], arguments))
    return content, calls


def _read_deepseek(text: str, tools: Tools) -> tuple[str, list[Call | None]]:
    """Parse calls of DeepSeek.

    V3 and R1: <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, then the arguments in a ```json block.
    V3.1: <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}. Both end with <｜tool▁call▁end｜>.
    Since V3.2: <｜DSML｜invoke name="NAME">.
    """
    if "<｜DSML｜" in text:
        return _read_dsml(text)
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    content, list_mark, _ = text.partition("<｜tool▁calls▁begin｜>")
    head, *blocks = text.split(begin)
    calls: list[Call | None] = [None] if list_mark and not blocks else []
    for block in blocks:
        body, closed, _ = block.partition(end)
        calls.append(_read_deepseek_call(body) if closed else None)
    return (content if list_mark else head), calls


def _read_deepseek_call(body: str) -> Call | None:
    head, _, tail = body.partition("<｜tool▁sep｜>")
    name, fence, block = tail.partition("```json")
    return (
        read_named_call(name, block.rpartition("```")[0]) if fence else read_named_call(head, tail)
    )


def _read_dsml(text: str) -> tuple[str, list[Call | None]]:
    head, *blocks = text.split('<｜DSML｜invoke name="')
    calls: list[Call | None] = [_read_dsml_call(block) for block in blocks] or [None]
    return head.partition("<｜DSML｜")[0], calls


def _read_dsml_call(block: str) -> Call | None:
    body, closed, _ = block.partition("</｜DSML｜invoke>")
    head, *parameters = body.split('<｜DSML｜parameter name="')
    name, opened, text_between = head.partition('">')
    if not closed or not opened or not name or text_between.strip():
        return None
    arguments: dict[str, Any] = {}
    for parameter in parameters:
        match = re.fullmatch(
            r'([^"]*)" string="(true|false)">(.*)</｜DSML｜parameter>\s*', parameter, re.DOTALL
        )
        if match is None:
            return None
        key, is_text, argument = match.groups()
        values = [argument] if is_text == "true" else parse_values(argument)
        if values is None or len(values) != 1:
            return None
        arguments[key] = values[0]
    return name, arguments


# Marks are searched in this order, because the templates of GLM and Qwen3-Coder also contain
# Hermes's mark.
FORMATS: Mapping[str, ToolFormat] = {
    tool_format.name: tool_format
    for tool_format in (
        ToolFormat("deepseek", _read_deepseek, ("<｜tool▁calls▁begin｜>", "<｜DSML｜")),
        # Mistral's templates require ids of 9 letters and digits.
        ToolFormat("mistral", _read_mistral, ("[TOOL_CALLS]",), call_id="call{:05d}"),
        ToolFormat(
            "kimi", read_kimi, ("<|tool_calls_section_begin|>",), call_id="functions.{name}:{0}"
        ),
        ToolFormat("minimax", read_minimax, ("<minimax:tool_call>",)),
        ToolFormat("glm", read_glm, ("<arg_key>",)),
        ToolFormat("qwen3_coder", _read_xml, ("<function=",)),
        ToolFormat("hermes", _read_hermes, ("<tool_call>",)),
        ToolFormat(
            "llama",
            _read_llama,
            ("<|python_tag|>", "<|python_start|>", "<|header_start|>", '"parameters": '),
        ),
        ToolFormat("harmony", read_harmony, HARMONY_MARKS),
    )
}
