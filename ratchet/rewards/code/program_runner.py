"""The program that calls a judged function in the sandbox.

It gets the arguments of calls and sends back the results; it never sees a test or an expected
value. It imports only the standard library and `plain_values`.
"""

from __future__ import annotations

import ast
import contextlib
import json
import linecache
import os
import sys
import traceback
import types
from typing import Any, NoReturn

from ratchet.rewards.code.plain_values import (
    NotPlainError,
    compile_if_valid,
    decode,
    encode,
    fill_in_answers,
    send,
    take_stdout,
)

SHOWN_CHARS = 500  # maximum length of an argument or a returned value, as shown


def answer_calls() -> NoReturn:
    """Read {"prompt", "entry_point", "text", "calls"}; write a line for each call that ended.

    The judged code may tamper with this process, but can reach only its own answers in it.
    """
    leave = os._exit  # kept here, because the judged code may replace it
    channel = take_stdout()
    request = json.load(sys.stdin.buffer)
    function = load_function(**{name: request[name] for name in ("prompt", "entry_point", "text")})
    lines: list[str] = []
    for call in request["calls"]:
        if (call := fill_in_answers(call, lines)) is None:
            break
        lines.append(answer_call(function, call))
        send(channel, lines[-1] + "\n")
    leave(0)


def explain() -> NoReturn:
    """Read {"prompt", "entry_point", "text", "call"}; write the call and its returned value.

    An exception's traceback goes to stderr. This process knows only one call of the tests, so
    whatever the judged code prints can be shown to the policy.
    """
    channel = take_stdout()
    request = json.load(sys.stdin.buffer)
    arguments, keywords = (decode(part) for part in json.loads(request["call"]))
    argument_texts = [
        *map(shorten_repr, arguments),
        *(f"{name}={shorten_repr(value)}" for name, value in keywords.items()),
    ]
    send(channel, json.dumps(f"{request['entry_point']}({', '.join(argument_texts)})") + "\n")
    parts = {name: request[name] for name in ("prompt", "entry_point", "text")}
    source = (
        parts["text"]
        if defines_name(parts["text"], parts["entry_point"])
        else parts["prompt"] + parts["text"]
    )
    linecache.cache["solution"] = (len(source), None, source.splitlines(keepends=True), "solution")
    try:
        value = load_function(**parts)(*arguments, **keywords)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != "solution":
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        sys.stderr.flush()
        os._exit(1)
    send(channel, json.dumps(shorten_repr(value)) + "\n")
    os._exit(0)


def shorten_repr(value: Any) -> str:
    """Return the `repr` of a value, cut to SHOWN_CHARS characters; its type if `repr` fails."""
    try:
        text = repr(value)
    except Exception:  # an integer of many digits, or a broken `__repr__`
        return f"<{type(value).__name__}>"
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def load_function(prompt: str, entry_point: str, text: str) -> Any:
    """Return the function `entry_point` of `text`.

    `text` is a whole program if it parses without `prompt` and defines the function; else it
    continues `prompt`.
    """
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    if defines_name(text, entry_point):
        parts = [compile_if_valid(prompt), compile(text, "solution", "exec", dont_inherit=True)]
    else:
        parts = [
            compile_if_valid(prompt + text)
            or compile(prompt + "\n" + text, "solution", "exec", dont_inherit=True)
        ]
    for part in filter(None, parts):
        exec(part, module.__dict__)
    return module.__dict__[entry_point]


def defines_name(source: str, name: str) -> bool:
    """True if a top-level definition, assignment or import in `source` binds the name."""
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):
        return False
    for statement in statements:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        aliases = statement.names if isinstance(statement, ast.Import | ast.ImportFrom) else []
        is_definition = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        names = {
            *([statement.name] if is_definition else []),
            *(target.id for target in targets if isinstance(target, ast.Name)),
            *(alias.asname or alias.name for alias in aliases),
        }
        if name in names:
            return True
    return False


def answer_call(function: Any, call: str) -> str:
    """Return the line for a call: its value, its exception, or the type of a value not plain."""
    arguments, keywords = (decode(part) for part in json.loads(call))
    try:
        value = function(*arguments, **keywords)
    except BaseException as error:
        return json.dumps({"raised": describe_exception(error)})
    try:
        return json.dumps({"value": encode(value)})
    except BaseException:
        return json.dumps({"opaque": type(value).__name__})


def describe_exception(error: BaseException) -> list[Any]:
    """Return [names of the exception's classes, most derived first; arguments to rebuild it].

    The arguments are the exception's own if its built-in base class, built from them, has the same
    text. Otherwise they are only the text.
    """
    kinds = type(error).__mro__
    builtin = next(kind for kind in kinds if kind.__module__ == "builtins")
    arguments = encode([str(error)[:500]])
    with contextlib.suppress(NotPlainError, TypeError, ValueError):
        if str(builtin(*error.args)) == str(error):
            arguments = encode(list(error.args))
    return [[kind.__name__ for kind in kinds], arguments]
