"""Chat templates: built-in ones, and Jinja templates of Hugging Face tokenizers.

Templates are rendered as by transformers' `apply_chat_template`: in sandboxed Jinja with trimmed
blocks, `raise_exception`, `strftime_now`, `tojson` without HTML escapes, loop controls, and
`{% generation %}` blocks. A template reads messages as dictionaries in OpenAI's format.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, NoReturn, TypeVar, get_args

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from ratchet.data.chat.harmony import is_harmony, move_thoughts
from ratchet.data.chat.template_limits import BUDGET_VARIABLE, MeteredEnvironment, StepBudget
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.errors import DataError
from ratchet.types import ChatRole, Message
from ratchet.utils.safe_read import format_size, read_text
from ratchet.utils.terminal_text import shorten_text

T = TypeVar("T")
ROLES: tuple[str, ...] = get_args(ChatRole)

MAX_INDENT = 100  # spaces by which `tojson` may indent
MAX_TEMPLATE_BYTES = 128 << 10  # size of a template; the longest published ones have about 20 KiB

# The content of a probe message: text that no template contains, splits, strips or escapes.
SENTINEL = "\ue000RatchetProbe\ue001"

BUILTIN_TEMPLATES: Mapping[str, str] = {
    # Writes the contents alone, with EOS after each answer; for small models trained from scratch.
    "plain": """\
{%- for message in messages -%}
    {{- message.content -}}
    {%- if message.role == "assistant" -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
""",
    # Opens each turn with one token, and closes the assistant's turns with EOS. Writes tool calls,
    # but no descriptions of tools.
    "turns": """\
{%- for message in messages -%}
    {{- "<" + message.role + ">" + message.content -}}
    {%- for call in message.tool_calls or [] -%}
        {{- "<tool_call>" + ({"name": call.function.name, "arguments": call.function.arguments} | tojson) + "</tool_call>" -}}
    {%- endfor -%}
    {%- if message.role == "assistant" -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<assistant>" -}}{%- endif -%}
""",
    "chatml": """\
{%- if tools -%}
    {{- "<|im_start|>system\\n" -}}
    {%- if messages[0].role == "system" -%}{{- messages[0].content + "\\n\\n" -}}{%- endif -%}
    {{- "# Tools\\n\\nYou may call these functions:\\n<tools>" -}}
    {%- for tool in tools -%}{{- "\\n" + (tool | tojson) -}}{%- endfor -%}
    {{- '\\n</tools>\\n\\nCall one by <tool_call>\\n{"name": name, "arguments": object}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if tools and messages[0].role == "system" else messages) -%}
    {{- "<|im_start|>" + message.role + "\\n" + message.content -}}
    {%- for call in message.tool_calls or [] -%}
        {{- "\\n" if message.content or not loop.first -}}
        {{- "<tool_call>\\n" + ({"name": call.function.name, "arguments": call.function.arguments} | tojson) -}}
        {{- "\\n</tool_call>" -}}
    {%- endfor -%}
    {{- "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
""",
}


def load_template_source(choice: str | None, tokenizer: Tokenizer) -> str:
    """Return the Jinja text of a template. Raise DataError if there is none.

    Args:
        choice: A built-in name, the path of a .jinja file, Jinja text, or None for the template of
            the tokenizer. A built-in template begins with BOS if the tokenizer adds BOS to texts.
    """
    if choice is None:
        if tokenizer.chat_template is None:
            raise DataError(
                "the tokenizer has no chat template, so messages can't become tokens: set "
                "`tokenizer.template: chatml` (or plain, turns, or the path of a .jinja file)"
            )
        return tokenizer.chat_template
    if choice in BUILTIN_TEMPLATES:
        return (
            "{{- bos_token -}}\n" + BUILTIN_TEMPLATES[choice]
            if tokenizer.adds_bos
            else BUILTIN_TEMPLATES[choice]
        )
    if "{" in choice:
        return choice
    if choice.endswith(".jinja"):
        try:
            return read_text(choice, MAX_TEMPLATE_BYTES)
        except OSError as error:
            raise DataError(
                f"tokenizer.template: {choice} can't be read: {error.strerror}"
            ) from error
        except ValueError as error:
            raise DataError(f"tokenizer.template: {choice} {error}: save it as UTF-8") from error
    raise DataError(
        f"tokenizer.template: there is no '{choice}': use {', '.join(BUILTIN_TEMPLATES)}, or the "
        "path of a .jinja file"
    )


class _Generation(Extension):
    """The tag {% generation %}, which some templates put around the assistant's text.

    Ratchet does not need the tag to find the assistant's text, so the tag only renders its content.
    """

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and indent > MAX_INDENT:
        raise ValueError(
            f"tojson indents by {indent}, but templates may indent by at most {MAX_INDENT}"
        )
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _make_environment() -> MeteredEnvironment:
    environment = MeteredEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.add_filter("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception
    return environment


def parse_template(source: str) -> nodes.Template:
    """Return the syntax tree of a template. Raise DataError if it can't be compiled."""
    _compile(source)
    return _make_environment().parse(source)


@lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_BYTES:
        raise DataError(
            f"the chat template has more than {format_size(MAX_TEMPLATE_BYTES)}, which no real one "
            "needs"
        )
    environment = _make_environment()
    try:
        template = environment.from_string(source)
        # The globals are a ChainMap, which each rendering would convert to a dictionary, slowly.
        template.globals = dict(template.globals)
        return template
    except jinja2.TemplateSyntaxError as error:
        message = shorten_text(error.message or "", 400)
        raise DataError(
            f"the chat template has a syntax error in line {error.lineno}: {message}"
        ) from error
    except (
        RecursionError,
        MemoryError,
        OverflowError,
        SyntaxError,
        ValueError,
        TypeError,
    ) as error:
        reason = (
            "it nests too deeply"
            if isinstance(error, RecursionError)
            else shorten_text(str(error), 400)
        )
        raise DataError(
            f"the chat template can't be compiled: {reason or type(error).__name__}"
        ) from error


_printed_date: datetime | None = None


def set_printed_date(date: str | None) -> None:
    """Set the date that templates print as today, for templates created later in this process.

    A run sets the date of its start in all of its processes, so that prompts stay the same after
    midnight and after a resume.

    Args:
        date: The day in ISO 8601; None for the day on which a template is created.
    """
    global _printed_date
    _printed_date = None if date is None else datetime.fromisoformat(date)


def get_printed_time() -> datetime:
    """Return the date of `set_printed_date`, or the current time if no date is set."""
    return _printed_date or datetime.now()


def today() -> str:
    """Return the current day in the format that `set_printed_date` takes."""
    return datetime.now().date().isoformat()


def may_print_date(choice: str | None, *, has_template: bool) -> bool:
    """True if the template that a recipe chooses may print a date.

    Args:
        choice: The recipe's `tokenizer.template`.
        has_template: True if the tokenizer may have a template.
    """
    return has_template if choice is None else choice not in BUILTIN_TEMPLATES


def copy_without_cache(value: T) -> T:
    """Return a shallow copy that computes its cached properties anew."""
    copied = copy.copy(value)
    for name in list(vars(copied)):
        if isinstance(getattr(type(copied), name, None), cached_property):
            del vars(copied)[name]
    return copied


class ChatTemplate:
    """A compiled chat template with its variables.

    `strftime_now` always formats the time `now`, so that a prompt with today's date is the same in
    the whole run.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], now: datetime) -> None:
        self.source = source
        self._template = _compile(source)
        self._variables = {"strftime_now": now.strftime, **variables}

    def with_variables(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """Return the template with further variables, which replace those of the same name."""
        changed = copy_without_cache(self)
        changed._variables = {**self._variables, **variables}
        return changed

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        prompt: bool,
    ) -> str:
        """Return the text of the conversation.

        Raise DataError for no messages, an unknown role, a role that the template leaves out, and
        an error of the template.

        Args:
            prompt: True to end with the header of the assistant's next turn.
        """
        if not messages:
            raise DataError("there are no messages to render: a prompt has at least one")
        self._check_roles(messages)
        dictionaries = _to_dictionaries(messages, self._choose_dialect(messages))
        if is_harmony(self.source):
            move_thoughts(dictionaries)
        return self._call(dictionaries, tools, prompt)

    def _call(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        prompt: bool,
    ) -> str:
        n_chars = sum(len(message["content"] or "") for message in messages)
        variables = {
            **self._variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": prompt,
        }
        try:
            return self._template.render(
                {**variables, BUDGET_VARIABLE: StepBudget(len(messages), n_chars)}
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            AssertionError,  # of Jinja's filter `truncate`
        ) as error:
            self._raise_render_error(
                messages, shorten_text(str(error), 400) or type(error).__name__, error
            )
        except RecursionError as error:
            self._raise_render_error(messages, "its macros call each other too deeply", error)
        except MemoryError as error:
            self._raise_render_error(messages, "memory ran out", error)

    def _raise_render_error(
        self, messages: list[dict[str, Any]], reason: str, error: BaseException
    ) -> NoReturn:
        roles = shorten_text(", ".join(message["role"] for message in messages), 200)
        raise DataError(
            f"the chat template can't render messages of these roles ({roles}): {reason}"
        ) from error

    def _check_roles(self, messages: Sequence[Message]) -> None:
        for i, message in enumerate(messages):
            if message.role not in ROLES:
                raise DataError(
                    f"message {i} has the unknown role '{message.role}': use {', '.join(ROLES)}"
                )
            if message.role in ("system", "tool") and not self._writes_role[message.role]:
                raise DataError(
                    f"message {i}: the chat template leaves out what the role '{message.role}' says"
                )

    @cached_property
    def _writes_role(self) -> dict[str, bool]:
        """Map each optional role to True if the template writes its messages.

        A template that raises on the probe counts as True, because `render` will raise again.
        """
        user, assistant = Message("user", "u"), Message("assistant", "a")
        probes = {
            "system": [Message("system", SENTINEL), user],
            "tool": [user, assistant, Message("tool", SENTINEL, tool_call_id="call00000")],
        }
        return {
            role: self._contains(_to_dictionaries(probe, DIALECTS[0]), SENTINEL)
            for role, probe in probes.items()
        }

    def _contains(self, messages: list[dict[str, Any]], text: str) -> bool:
        try:
            return text in self._call(messages, None, False)
        except DataError:
            return True

    def _choose_dialect(self, messages: Sequence[Message]) -> Dialect:
        """Return the dialect for these messages.

        If a message has tool calls, it is the first dialect in which the template writes them;
        otherwise it is the default.
        """
        return (
            self._tool_dialect if any(message.tool_calls for message in messages) else DIALECTS[0]
        )

    @cached_property
    def _tool_dialect(self) -> Dialect:
        user = {"role": "user", "content": "u"}
        for dialect in DIALECTS:
            call = {"name": "f", "arguments": dialect[1]({"k": SENTINEL})}
            calls = [{"id": "call00000", "type": "function", "function": call}]
            probe = [user, {"role": "assistant", "content": dialect[0], "tool_calls": calls}]
            try:
                if SENTINEL in self._call(probe, None, False):
                    return dialect
            except DataError:
                continue
        raise DataError(
            "the chat template does not write tool calls: use one that does, or write the calls "
            "into the content"
        )


# The form in which a template reads messages with tool calls: the value of empty content ("" or
# None), and a function that converts arguments (to an object or to JSON).
Dialect = tuple[str | None, Callable[[Mapping[str, Any]], Any]]
DIALECTS: tuple[Dialect, ...] = (("", dict), (None, dict), ("", _tojson), (None, _tojson))


def _to_dictionaries(messages: Sequence[Message], dialect: Dialect) -> list[dict[str, Any]]:
    """Return messages in the form that templates read, with the tool's name in tool messages."""
    empty_content, write_arguments = dialect
    dictionaries: list[dict[str, Any]] = []
    tool_names = {call.id: call.name for message in messages for call in message.tool_calls}
    for message in messages:
        dictionary: dict[str, Any] = {
            "role": message.role,
            "content": _to_template_content(message),
        }
        if message.tool_calls:
            dictionary["content"] = dictionary["content"] or empty_content
            dictionary["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": write_arguments(call.arguments)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            dictionary["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in tool_names:
                dictionary["name"] = tool_names[message.tool_call_id]
        dictionaries.append(dictionary)
    return dictionaries


def _to_template_content(message: Message) -> str | list[dict[str, str]]:
    if isinstance(message.content, str) or all(part.type == "text" for part in message.content):
        return message.text
    return [
        {"type": "text", "text": part.value} if part.type == "text" else {"type": part.type}
        for part in message.content
    ]
