"""A plain function is a tool: its schema comes from its signature and docstring."""

from __future__ import annotations

import asyncio
import enum
import functools

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from ratchet.config.resolve import resolve
from ratchet.environments.tool_use.base import Tool, Toolbox, build_tools
from ratchet.errors import ConfigError
from ratchet.types import ToolCall


def lookup(city: str, year: int = 2020) -> str:
    """
    Looks up the population of a city.

    Args:
        city: The name of the city.
        year: The year.
    """
    return f"{city} {year}"


async def wait(seconds: float) -> str:
    """
    Waits.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(0)
    return "done"


def search(text: str, year: int | None = None) -> str:
    """
    Searches.

    Args:
        text: What to search for.
        year: The year.
    """
    return f"{text} {year}"


def without_a_wrapped_coroutine(function):
    @functools.wraps(function)
    def call(**arguments):
        return function(**arguments)

    return call


decorated = without_a_wrapped_coroutine(wait)


def slow(city: str) -> str:
    """
    Raises what a request raises whose time is up.

    Args:
        city: The name of the city.
    """
    raise TimeoutError("no answer from the server")


class Color(enum.Enum):
    RED = "red"


def paint(color: Color) -> str:
    """
    Paints.

    Args:
        color: The color.
    """
    return color.value


def positional(a: int, /) -> str:
    """
    Counts.

    Args:
        a: A number.
    """
    return str(a)


def imported_for_checkers(a: Missing) -> str:  # noqa: F821
    """
    Counts.

    Args:
        a: A number.
    """
    return str(a)


def yielding():
    """Yields."""
    yield "a"


def undescribed(city: str) -> str:
    """Looks up."""
    return city


class Fixed:
    name, description = "fixed", "Returns a fixed answer."
    parameters = {"type": "object", "properties": {}}  # noqa: RUF012

    def __init__(self, answer):
        self.answer = answer

    def call(self):
        return self.answer


def make_two(first: str, second: str = "b") -> list[Fixed]:
    return [Fixed(first)]


def build(name, **keys):
    return build_tools([resolve("tool", {"kind": f"{__name__}:{name}", **keys})])


@pytest.mark.parametrize("function", [lookup, wait])
def test_a_function_is_described_as_transformers_does(function):
    (tool,) = build(function.__name__)
    assert isinstance(tool, Tool)
    expected = get_json_schema(function)["function"]
    assert Toolbox([tool]).schemas[0]["function"] == {
        name: expected[name] for name in ("name", "description", "parameters")
    }


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("lookup", {"city": "Paris"}, "Paris 2020"),
        ("lookup", {"city": 5}, "Error: the argument 'city' must be of type string, not 5"),
        ("wait", {"seconds": 1}, "done"),
        ("decorated", {"seconds": 1}, "done"),
        ("search", {"text": "a", "year": None}, "a None"),
        ("slow", {"city": "Paris"}, "Error: TimeoutError: no answer from the server"),
    ],
)
def test_a_function_is_called_by_its_arguments(name, arguments, answer):
    toolbox = Toolbox(build(name))
    called = toolbox.schemas[0]["function"]["name"]
    assert asyncio.run(toolbox.run_call(ToolCall("1", called, arguments))).content == answer


def test_a_function_that_returns_tools_makes_them_and_its_parameters_are_keys():
    (tool,) = build("make_two", first="a")
    assert tool.call() == "a"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("undescribed", r"undescribed can't be a tool: .*below `Args:`"),
        ("imported_for_checkers", r"can't be a tool: name 'Missing' is not defined"),
        ("paint", r"paint can't be a tool: no call can give `color: .*Color.*`\. Write str"),
        ("positional", r"no call can give `a: .*int.*`\. Name each parameter"),
        ("yielding", r"the tool yielding yields its answer\. Return it"),
    ],
)
def test_a_function_that_no_call_could_use_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        build(name)
