"""Plain functions as tools: their schema comes from their signature and docstring.

`transformers.utils.get_json_schema` reads them, as for `apply_chat_template(tools=[function])`. So
a function that is a tool of TRL or transformers has the same description here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from ratchet.config.resolve import FunctionToolSection
from ratchet.errors import ConfigError
from ratchet.utils.user_code import get_qualified_name
from ratchet.utils.user_imports import import_object

NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
JSON_TYPES = (str, int, float, bool, NoneType, list, tuple, dict, Any)


class FunctionTool:
    """A tool that calls a function, plain or async.

    Raises ConfigError at construction if a parameter has no type or no description, or if no call
    can give it a value.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        schema = describe_function(function)["function"]
        _check_parameters(function)
        self.name: str = schema["name"]
        self.description: str = schema["description"]
        self.parameters: Mapping[str, Any] = schema["parameters"]
        self.call = function


def build_function_tool(section: FunctionToolSection) -> FunctionTool:
    return FunctionTool(import_object(section.kind_name))


def describe_function(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's schema in OpenAI's format, with the type that it returns.

    Raises ConfigError if a parameter has no type hint, or no line in the docstring.
    """
    from transformers.utils.chat_template_utils import (  # takes a second to import
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        return get_json_schema(function)
    # NameError: a type is imported under TYPE_CHECKING alone.
    except (DocstringParsingException, TypeHintParsingException, NameError) as error:
        raise ConfigError(
            f"{_get_name(function)} can't be a tool: {error}. Give each parameter a type, and a "
            "line `name: ...` below `Args:` in the docstring"
        ) from error


def _check_parameters(function: Callable[..., Any]) -> None:
    """Raise ConfigError if no call, which has JSON by name, can give a parameter a value."""
    hints = get_type_hints(function)
    for parameter in inspect.signature(function).parameters.values():
        problem = f"{_get_name(function)} can't be a tool: no call can give `{parameter}`"
        if parameter.kind not in NAMED:
            raise ConfigError(f"{problem}. Name each parameter, without * and /")
        if not _is_json(hints.get(parameter.name, Any)):
            raise ConfigError(
                f"{problem}. Write str, int, float, bool, list, dict or Literal, and convert it in "
                "the function"
            )


def _is_json(hint: Any) -> bool:
    """True if a value of JSON can have a type, or one of a union's types."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is_json(argument) for argument in arguments if argument is not NoneType)
    if origin is Literal or hint in JSON_TYPES or is_typeddict(hint):
        return True
    if origin in (list, tuple, dict):
        return all(_is_json(argument) for argument in arguments)
    return isinstance(hint, type) and issubclass(dict, hint)


def _get_name(function: Callable[..., Any]) -> str:
    return get_qualified_name(function) or repr(function)
