"""Plain functions as tools: their schema comes from their signature and docstring.

`transformers.utils.get_json_schema` reads them, as for `apply_chat_template(tools=[function])`. So
a function that is a tool of TRL or transformers has the same description here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ratchet.config.resolve import FunctionToolSection
from ratchet.errors import ConfigError
from ratchet.utils.user_code import get_qualified_name
from ratchet.utils.user_imports import import_object


class FunctionTool:
    """A tool that calls a function, plain or async.

    Raises ConfigError at construction if a parameter has no type or no description.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        schema = describe_function(function)["function"]
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
    except (DocstringParsingException, TypeHintParsingException) as error:
        name = get_qualified_name(function) or repr(function)
        raise ConfigError(
            f"{name} can't be a tool: {error}. Give each parameter a type, and a line `name: ...` "
            "below `Args:` in the docstring"
        ) from error
