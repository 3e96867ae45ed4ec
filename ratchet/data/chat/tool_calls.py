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
# Returns (the text without calls, one entry for each call, None for a malformed call).
Reader = Callable[[str, Tools], tuple[str, list[Call | None]]]

# Maximum nesting of arguments: no tool needs more, and recursive code would break on more.
MAX_DEPTH = 32
REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


class ParsedCalls(NamedTuple):
    """The tool calls of a text. If one call is malformed, `calls` is empty."""

    content: str  # the text without its calls; the whole text if one call is malformed
    calls: tuple[Call, ...] = ()
    malformed: int = 0  # number of malformed calls


@dataclass(frozen=True)
class ToolFormat:
    """The format in which a model family writes tool calls.

    Attributes:
        marks: Strings that identify the family, in its chat template or else its special tokens.
        call_id: Template of a call's id, formatted with the call's number.
    """

    name: str
    reader: Reader
    marks: tuple[str, ...]
    call_id: str = "call_{}"

    def read(self, text: str, tools: Tools = ()) -> ParsedCalls:
        """Parse the calls in a text, except in its reasoning, which stays in the content.

        `tools` gives the types of arguments that the family writes without quotes.
        """
        reasoning, answer = split_reasoning(text)
        content, found = self.reader(answer, tools)
        calls = tuple(call for call in found if call is not None)
        if len(calls) < len(found):
            return ParsedCalls(text, (), len(found) - len(calls))
        return ParsedCalls((reasoning + content).rstrip() if calls else text, calls)

    def numbered(self, calls: Sequence[Call], first: int) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(self.call_id.format(first + i), name, given)
            for i, (name, given) in enumerate(calls)
        )


def tool_format(name: str, template: str, special_tokens: Mapping[str, int]) -> ToolFormat:
    """Return the format named `name`.

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
        "how the model calls them: "
        f"set tokenizer.tool_format to {', '.join(FORMATS)}, and tokenizer.template to one that "
        "writes tool calls (chatml)"
    )


def split_reasoning(text: str) -> tuple[str, str]:
    """Return (the reasoning with its marks, the text after it).

    All of the text is reasoning if the reasoning was never closed.
    """
    for opening, closing in REASONING:
        before, closed, after = text.partition(closing)
        if closed:
            return before + closed, after
        if opening in text:
            return text, ""
    return "", text


# --- JSON


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _values(text: str, between: str = " \t\r\n") -> list[Any] | None:
    """Return the JSON values in `text`, which characters of `between` may separate.

    None if there is no value or any other text, or if a value is nested too deeply.
    """
    values: list[Any] = []
    position = 0
    try:
        while True:
            while position < len(text) and text[position] in between:
                position += 1
            if position == len(text):
                break
            value, position = _DECODER.raw_decode(text, position)
            values.append(value)
        _check_text(values)
    except (ValueError, RecursionError):
        return None
    return values if values and not _too_deep(values) else None


def _check_text(values: object) -> None:
    """Raise ValueError for infinite numbers (1e999), and for unpaired UTF-16 surrogates.

    JSON can spell a lone surrogate, but no tokenizer can write it.
    """
    json.dumps(values, ensure_ascii=False, allow_nan=False).encode()


def _too_deep(value: object) -> bool:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[object] = []
        for item in level:
            inner += (
                item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
            )
        level = inner
    return bool(level)


def _as_call(value: object) -> Call | None:
    """Return the call of a JSON object, whose arguments may be an object or an object's text."""
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _one(arguments)
    return (
        (name, arguments)
        if isinstance(name, str) and name and isinstance(arguments, dict)
        else None
    )


def _one(text: str) -> Any:
    values = _values(text)
    return values[0] if values is not None and len(values) == 1 else None


def _named(name: str, arguments: str) -> Call | None:
    return _as_call({"name": name.strip(), "arguments": arguments})


# --- families


def _hermes(text: str, tools: Tools) -> tuple[str, list[Call | None]]:
    """Parse calls of Hermes, Qwen2.5 and Qwen3.

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    """
    content, *blocks = text.split("<tool_call>")
    calls: list[Call | None] = [None] if "</tool_call>" in content else []
    for block in blocks:
        body, _, after = block.partition("</tool_call>")  # a model may end its turn without closing
        calls.append(_as_call(_one(body)))
        content = content.rstrip() + after
    return content, calls


def _xml(text: str, tools: Tools) -> tuple[str, list[Call | None]]:
    """Parse calls of Qwen3-Coder.

    <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>
    """
    content, *blocks = text.replace("</tool_call>", "").split("<function=")
    opened = content.count("<tool_call>")
    calls: list[Call | None] = [None] if opened and not blocks else []
    content = content.replace("<tool_call>", "")
    for block in blocks:
        body, closed, after = block.partition("</function>")
        calls.append(_xml_call(body, tools) if closed else None)
        content = content.rstrip() + after.replace("<tool_call>", "")
    return content, calls


def _xml_call(body: str, tools: Tools) -> Call | None:
    head, *parameters = body.split("<parameter=")
    name, closed, between = head.partition(">")
    name = name.strip()
    if not closed or not name or between.strip():
        return None
    types = _types(tools, name)
    arguments: dict[str, Any] = {}
    for parameter in parameters:
        key, closed, rest = parameter.partition(">")
        value, ended, between = rest.partition("</parameter>")
        if not closed or not ended or between.strip() or not key.strip():
            return None
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key.strip()] = _typed(value, types.get(key.strip(), "string"))
    return name, arguments


def _types(tools: Tools, name: str) -> dict[str, Any]:
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


def _typed(value: str, kind: object) -> Any:
    """Return a string parameter's text, or the JSON value of another parameter.

    Text that is not one JSON value stays text: the tool reports the mistake.
    """
    if kind == "string":
        return value
    values = _values(value)
    return values[0] if values is not None and len(values) == 1 else value


def _llama(text: str, tools: Tools) -> tuple[str, list[Call | None]]:
    """Parse calls of Llama.

    Calls are {"name": ..., "parameters": {...}}, separated by ";", or [name(key="value"), ...].
    Either may follow <|python_tag|> (Llama 4: stand between <|python_start|> and <|python_end|>).
    Without the tag, the whole text must be calls.
    """
    before, tag, body = text.replace("<|python_start|>", "<|python_tag|>").partition(
        "<|python_tag|>"
    )
    body = (body if tag else text).replace("<|python_end|>", "").strip()
    content = before if tag else ""
    calls: list[Call | None]
    if body.startswith("{"):
        values = _values(body, " \t\r\n;,")
        calls = [None] if values is None else [_as_call(value) for value in values]
        meant = '"name"' in body and ('"parameters"' in body or '"arguments"' in body)
    else:
        written = read_calls(body)
        meant = re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(", body) is not None
        calls = (
            [None]
            if written is None or any(_too_deep(given) for _, given in written)
            else [*written]
        )
    return (content, calls) if tag or meant else (text, [])


def _mistral(text: str, tools: Tools) -> tuple[str, list[Call | None]]:
    """Parse calls of Mistral.

    [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], or from tokenizer v11 on
    [TOOL_CALLS]name[ARGS]{...} for each call.
    """
    content, *blocks = text.split("[TOOL_CALLS]")
    calls: list[Call | None] = []
    for block in blocks:
        if block.lstrip()[:1] in ("[", "{") and not block.lstrip().startswith(
            ("[ARGS]", "[CALL_ID]")
        ):
            value = _one(block)
            listed = value if isinstance(value, list) and value else [value]
            calls += [_as_call(item) for item in listed]
            continue
        name, _, arguments = (
            block.partition("[ARGS]") if "[ARGS]" in block else block.partition("{")
        )
        if "[ARGS]" not in block:
            arguments = "{" + arguments
        calls.append(_named(name.partition("[CALL_ID]")[0], arguments))
    return content, calls


def _deepseek(text: str, tools: Tools) -> tuple[str, list[Call | None]]:
    """Parse calls of DeepSeek.

    V3 and R1: <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, then the arguments in a ```json block.
    V3.1: <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}. Both end with <｜tool▁call▁end｜>.
    From V3.2 on: <｜DSML｜invoke name="NAME">.
    """
    if "<｜DSML｜" in text:
        return _dsml(text)
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    content, opened, _ = text.partition("<｜tool▁calls▁begin｜>")
    head, *blocks = text.split(begin)
    calls: list[Call | None] = [None] if opened and not blocks else []
    for block in blocks:
        body, closed, _ = block.partition(end)
        calls.append(_deepseek_call(body) if closed else None)
    return (content if opened else head), calls


def _deepseek_call(body: str) -> Call | None:
    head, _, rest = body.partition("<｜tool▁sep｜>")
    name, fenced, block = rest.partition("```json")
    return _named(name, block.rpartition("```")[0]) if fenced else _named(head, rest)


def _dsml(text: str) -> tuple[str, list[Call | None]]:
    head, *blocks = text.split('<｜DSML｜invoke name="')
    calls: list[Call | None] = [_dsml_call(block) for block in blocks] or [None]
    return head.partition("<｜DSML｜")[0], calls


def _dsml_call(block: str) -> Call | None:
    body, closed, _ = block.partition("</｜DSML｜invoke>")
    head, *parameters = body.split('<｜DSML｜parameter name="')
    name, opened, between = head.partition('">')
    if not closed or not opened or not name or between.strip():
        return None
    arguments: dict[str, Any] = {}
    for parameter in parameters:
        match = re.fullmatch(
            r'([^"]*)" string="(true|false)">(.*)</｜DSML｜parameter>\s*', parameter, re.DOTALL
        )
        if match is None:
            return None
        key, is_text, written = match.groups()
        values = [written] if is_text == "true" else _values(written)
        if values is None or len(values) != 1:
            return None
        arguments[key] = values[0]
    return name, arguments


# In the order of the search for marks: Qwen3-Coder's template also contains the mark of Hermes.
FORMATS: Mapping[str, ToolFormat] = {
    found.name: found
    for found in (
        ToolFormat("deepseek", _deepseek, ("<｜tool▁calls▁begin｜>", "<｜DSML｜")),
        # Mistral's templates require ids of 9 letters and digits.
        ToolFormat("mistral", _mistral, ("[TOOL_CALLS]",), call_id="call{:05d}"),
        ToolFormat("qwen3_coder", _xml, ("<function=",)),
        ToolFormat("hermes", _hermes, ("<tool_call>",)),
        ToolFormat(
            "llama",
            _llama,
            ("<|python_tag|>", "<|python_start|>", "<|header_start|>", '"parameters": '),
        ),
    )
}
