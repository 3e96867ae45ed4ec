"""Read the grammars that requests set: formats of the answer, vLLM's fields, forced tool calls.

Sources: the API references of OpenAI (`response_format`, `text.format`, `tool_choice`) and
Anthropic (`output_config.format`), and vLLM 0.32 (`structured_outputs`, `guided_json` and others).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tool_call_grammar import make_call_grammar
from ratchet.errors import RatchetError
from ratchet.experience.openai_proxy.wire import ApiError, SamplingFields, WireModel
from ratchet.structured_output import StructuredOutput
from ratchet.types import Sampling


class TextFormat(WireModel):
    """Answers of any text."""

    type: Literal["text"]


class JsonObjectFormat(WireModel):
    """Answers that are JSON objects."""

    type: Literal["json_object"]


class JsonSchema(WireModel):
    """A JSON schema with its name. `strict` has no effect: the schema is always followed."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(WireModel):
    """Answers that follow a JSON schema, in chat completions."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class FlatJsonSchemaFormat(JsonSchema):
    """Answers that follow a JSON schema, in OpenAI's responses and Anthropic's messages."""

    type: Literal["json_schema"]


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat
FlatFormat = TextFormat | JsonObjectFormat | FlatJsonSchemaFormat


def nest_format(flat_format: FlatFormat | None) -> ResponseFormat | None:
    """Return a format of the other APIs as one of chat completions."""
    if not isinstance(flat_format, FlatJsonSchemaFormat):
        return flat_format
    schema = JsonSchema(schema=flat_format.schema_)
    return JsonSchemaFormat(type="json_schema", json_schema=schema)


def read_format(response_format: ResponseFormat | None) -> Mapping[str, Any] | None:
    """Return the grammar of a format as a mapping; None for text."""
    if isinstance(response_format, JsonSchemaFormat):
        return {"json": response_format.json_schema.schema_}
    if isinstance(response_format, JsonObjectFormat):
        return {"json": {"type": "object"}}
    return None


async def choose_structured(
    request: SamplingFields, sampling: Sampling, renderer: Renderer, can_mask: bool
) -> StructuredOutput | None:
    """Return the grammar of a request's answer: its own, or that of the sampling.

    Its own is compiled in a thread, so that other requests are answered meanwhile.

    Args:
        sampling: The sampling of the attempt, or of the served model.
        can_mask: False if the answers train, but the generator does not report the tokens that a
            grammar allows.

    Raises:
        ApiError: 400 if the grammar is invalid, or if the request has several.
    """
    grammars = request.list_grammars()
    rules = request.find_call_rules()
    params = list(grammars)
    if rules is not None:
        params.append("tool_choice" if rules.is_forced else "tools")
    if not params:
        return sampling.structured
    param = params[0]
    try:
        if len(params) > 1:
            raise ValueError(f"can't be followed together with {', '.join(params[1:])}")
        if rules is None:
            structured = StructuredOutput.from_mapping(grammars[param])
        else:
            grammar = make_call_grammar(rules, renderer.tool_format, renderer.tokenizer)
            structured = StructuredOutput.from_mapping({"grammar": grammar})
        await asyncio.to_thread(structured.compile)
    except (ValueError, RatchetError) as error:
        raise ApiError(400, f"{param}: {error}", param=param, code="invalid_value") from None
    if sampling.structured not in (None, structured):
        reason = "the run sets another grammar for this attempt (sampling.structured)"
    elif not can_mask:
        reason = (
            "the run's generator does not report the tokens that a grammar allows, which training "
            "needs. Set generator.kind=engine"
        )
    else:
        return structured
    raise ApiError(400, f"{param}: {reason}", param=param, code="unsupported_value")
