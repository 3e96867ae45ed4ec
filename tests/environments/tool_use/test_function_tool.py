"""A plain function is a tool: its schema comes from its signature and docstring."""

import asyncio

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
    ],
)
def test_a_function_is_called_by_its_arguments(name, arguments, answer):
    toolbox = Toolbox(build(name))
    assert asyncio.run(toolbox.run_call(ToolCall("1", name, arguments))).content == answer


def test_a_function_that_returns_tools_makes_them_and_its_parameters_are_keys():
    (tool,) = build("make_two", first="a")
    assert tool.call() == "a"


def test_a_function_without_descriptions_is_refused():
    with pytest.raises(ConfigError, match=r"undescribed can't be a tool: .*below `Args:`"):
        build("undescribed")
