"""Parsers of tool calls in a policy's text, one for each model family.

A policy may write anything: malformed calls are counted and never raise an error.

Sources: the chat templates of the families, and the tool parsers of vLLM and SGLang.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ratchet.data.chat.tool_calls_python import read_calls
from ratchet.errors import ConfigError
from ratchet.types import ToolCall

Call = tuple[str, dict[str, Any]]  # name, arguments
Tools = Sequence[Mapping[str, Any]]
# Returns the text without calls, and one entry per call: the call, or None if it is malformed.
CallParser = Callable[[str, Tools], tuple[str, list[Call | None]]]

# Maximum nesting of arguments. No tool needs more, and recursive code would fail on more.
MAX_DEPTH = 32
REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


class ParsedCalls(NamedTuple):
    """The tool calls of a text.

    Attributes:
        content: The text without its calls; the whole text if a call is malformed.
        calls: The calls; empty if one is malformed.
        malformed: Number of malformed calls.
    """

    content: str
    calls: tuple[Call, ...] = ()
    malformed: int = 0


@dataclass(frozen=True)
class ToolFormat:
    """The format in which a model family writes tool calls.

    Attributes:
        parser: Function that parses the calls in a text.
        marks: Strings that identify the family, in its chat template or its special tokens.
        call_id: Template of a call's id, formatted with the call's number.
    """

    name: str
    parser: CallParser
    marks: tuple[str, ...]
    call_id: str = "call_{}"

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
            ToolCall(self.call_id.format(first + i), name, arguments)
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
        f"how the model calls them: set tokenizer.tool_format to {', '.join(FORMATS)}, and tokenizer.template to one that "
        "writes tool calls (chatml)"
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


# --- JSON


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _parse_values(text: str, separators: str = " \t\r\n") -> list[Any] | None:
    """Return the JSON values in `text`, with any characters of `separators` between them.

    Return None if there is no value, any other text, or a value that is nested too deeply.
    """
    values: list[Any] = []
    position = 0
    try:
        while True:
            while position < len(text) and text[position] in separators:
                position += 1
            if position == len(text):
                break
            value, position = _DECODER.raw_decode(text, position)
            values.append(value)
        _require_encodable(values)
    except (ValueError, RecursionError):
        return None
    return values if values and not _is_too_deep(values) else None


def _require_encodable(values: object) -> None:
    """Raise ValueError for infinite numbers (1e999), and for unpaired UTF-16 surrogates.

    JSON can spell a lone surrogate, but no tokenizer can write it.
    """
    json.dumps(values, ensure_ascii=False, allow_nan=False).encode()


def _is_too_deep(value: object) -> bool:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH + 1):
        next_level: list[object] = []
        for item in level:
            next_level += (
                item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
            )
        level = next_level
    return bool(level)


def _read_call(value: object) -> Call | None:
    """Return the call in a JSON object, or None. Its arguments may be an object, or JSON text."""
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _parse_single_value(arguments)
    return (
        (name, arguments)
        if isinstance(name, str) and name and isinstance(arguments, dict)
        else None
    )


def _parse_single_value(text: str) -> Any:
    """Return the one JSON value in `text`; None if there is not exactly one."""
    values = _parse_values(text)
    return values[0] if values is not None and len(values) == 1 else None


def _read_named_call(name: str, arguments: str) -> Call | None:
    return _read_call({"name": name.strip(), "arguments": arguments})


# --- families


def _read_hermes(text: str, tools: Tools) -> tuple[str, list[Call | None]]:
    """Parse calls of Hermes, Qwen2.5 and Qwen3.

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    """
    content, *blocks = text.split("<tool_call>")
    calls: list[Call | None] = [None] if "</tool_call>" in content else []
    for block in blocks:
        body, _, after = block.partition("</tool_call>")  # a model may end its turn without closing
        calls.append(_read_call(_parse_single_value(body)))
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
    types = _find_parameter_types(tools, name)
    arguments: dict[str, Any] = {}
    for parameter in parameters:
        key, closed, body = parameter.partition(">")
        value, ended, text_between = body.partition("</parameter>")
        if not closed or not ended or text_between.strip() or not key.strip():
            return None
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key.strip()] = _convert_argument(value, types.get(key.strip(), "string"))
    return name, arguments


def _find_parameter_types(tools: Tools, name: str) -> dict[str, Any]:
    """Return the JSON type of each parameter of a tool."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {
                key: schema.get("type")
                for key, schema in properties.items()
                if isinstance(schema, Mapping)
            }
    return {}


def _convert_argument(value: str, json_type: object) -> Any:
    """Return an argument: its text for a string parameter, else the JSON value in its text.

    Text that is not one JSON value stays text, and the tool reports the mistake.
    """
    if json_type == "string":
        return value
    values = _parse_values(value)
    return values[0] if values is not None and len(values) == 1 else value


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
        values = _parse_values(body, " \t\r\n;,")
        calls = [None] if values is None else [_read_call(value) for value in values]
        looks_like_call = '"name"' in body and ('"parameters"' in body or '"arguments"' in body)
    else:
        python_calls = read_calls(body)
        looks_like_call = re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(", body) is not None
        calls = (
            [None]
            if python_calls is None or any(_is_too_deep(arguments) for _, arguments in python_calls)
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
            value = _parse_single_value(block)
            items = value if isinstance(value, list) and value else [value]
            calls += [_read_call(item) for item in items]
            continue
        name, _, arguments = (
            block.partition("[ARGS]") if "[ARGS]" in block else block.partition("{")
        )
        if "[ARGS]" not in block:
            arguments = "{" + arguments
        calls.append(_read_named_call(name.partition("[CALL_ID]")[0], arguments))
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
        _read_named_call(name, block.rpartition("```")[0])
        if fence
        else _read_named_call(head, tail)
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
        values = [argument] if is_text == "true" else _parse_values(argument)
        if values is None or len(values) != 1:
            return None
        arguments[key] = values[0]
    return name, arguments


# Marks are searched in this order, because Qwen3-Coder's template also contains the mark of Hermes.
FORMATS: Mapping[str, ToolFormat] = {
    tool_format.name: tool_format
    for tool_format in (
        ToolFormat("deepseek", _read_deepseek, ("<｜tool▁calls▁begin｜>", "<｜DSML｜")),
        # Mistral's templates require ids of 9 letters and digits.
        ToolFormat("mistral", _read_mistral, ("[TOOL_CALLS]",), call_id="call{:05d}"),
        ToolFormat("qwen3_coder", _read_xml, ("<function=",)),
        ToolFormat("hermes", _read_hermes, ("<tool_call>",)),
        ToolFormat(
            "llama",
            _read_llama,
            ("<|python_tag|>", "<|python_start|>", "<|header_start|>", '"parameters": '),
        ),
    )
}
