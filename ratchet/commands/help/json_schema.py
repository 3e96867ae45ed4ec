"""Describe recipes as a JSON schema, for the completion and checks of editors.

The schema is read from the config sections, so that it has exactly the keys that `load_config`
accepts. Checks between keys (`ratchet.config.checks`) are not part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from ratchet.config.base import Section
from ratchet.config.key_paths import find_section, find_slot
from ratchet.config.registry import DEFAULT_KIND, KINDS
from ratchet.config.resolve import Slot, section_class
from ratchet.config.schema import STAGE_KEYS, RunConfig, StageConfig

DIALECT = "http://json-schema.org/draft-07/schema#"
REFERENCE = "#/definitions/{model}"

JsonSchema = dict[str, Any]


def make_recipe_schema() -> JsonSchema:
    """Return the JSON schema (draft 7) of a recipe as it is written.

    No key is required, because a stage's key may stand at the top as the default of all stages, and
    any key may come from the recipe that this one extends. A section without its `kind`, or with an
    import path as its kind, may have any keys.
    """
    definitions: dict[str, JsonSchema] = {}
    run = _make_section_schema(RunConfig, definitions)
    stage = definitions[StageConfig.__name__]
    by_name = {"type": "object", "additionalProperties": run["properties"]["stages"]["items"]}
    run["properties"] |= {
        # A recipe that extends another one changes that recipe's stages by name.
        "stages": {"anyOf": [run["properties"]["stages"], by_name]},
        "extends": {
            "type": "string",
            "description": "Recipe to start from: a path relative to this file.",
        },
        **{key: stage["properties"][key] for key in STAGE_KEYS},
    }
    return {
        "$schema": DIALECT,
        "title": "Ratchet recipe",
        **run,
        "definitions": dict(sorted(definitions.items())),
    }


@cache
def get_key_schemas(section: type[Section]) -> Mapping[str, JsonSchema]:
    """Return the JSON schema of each key of a section, without definitions of inner sections."""
    return section.model_json_schema(ref_template=REFERENCE)["properties"]


def _make_section_schema(section: type[Section], definitions: dict[str, JsonSchema]) -> JsonSchema:
    """Return the schema of a section, and add those of its inner sections to `definitions`."""
    schema = section.model_json_schema(ref_template=REFERENCE)
    for unused in ("$defs", "title", "required"):
        schema.pop(unused, None)
    for name, field in section.model_fields.items():
        slot, inner = find_slot(field), find_section(field.annotation)
        description = section.describe_field(name)
        if slot is not None:
            # Draft 7 ignores the keys beside $ref, so the reference is put into allOf.
            slot_schema = _make_slot_schema(slot, definitions)
            schema["properties"][name] = {"description": description, "allOf": [slot_schema]}
        elif description:
            schema["properties"][name]["description"] = description
        if slot is None and inner is not None and inner.__name__ not in definitions:
            definitions[inner.__name__] = {}  # a section may contain its own class
            definitions[inner.__name__] |= _make_section_schema(inner, definitions)
    for key in schema["properties"].values():
        key.pop("title", None)
    return schema


def _make_slot_schema(slot: Slot, definitions: dict[str, JsonSchema]) -> JsonSchema:
    """Return the schema of a field whose section is chosen by `kind`."""
    schema: JsonSchema = {"$ref": REFERENCE.format(model=slot.name)}
    if slot.name not in definitions:
        definitions[slot.name] = {}  # an environment may contain others
        definitions[slot.name] |= _make_kinds_schema(slot.name, definitions)
    if slot.is_list:
        schema = {"type": "array", "items": schema}
    return {"anyOf": [schema, {"type": "null"}]} if slot.is_optional else schema


def _make_kinds_schema(slot: str, definitions: dict[str, JsonSchema]) -> JsonSchema:
    """Return the schema of a slot's section: its kind decides which keys it has."""
    branches = []
    for kind in KINDS[slot]:
        reference = f"{slot}.{kind}"
        definitions[reference] = _make_section_schema(section_class(slot, kind), definitions)
        condition: JsonSchema = {"properties": {"kind": {"const": kind}}}
        # The keys of the default kind are also those of a section without `kind`.
        if DEFAULT_KIND.get(slot) != kind:
            condition["required"] = ["kind"]
        branches.append({"if": condition, "then": {"$ref": REFERENCE.format(model=reference)}})
    kinds = {"anyOf": [{"enum": list(KINDS[slot])}, {"type": "string", "pattern": ":"}]}
    return {"type": "object", "properties": {"kind": kinds}, "allOf": branches}


# --- words for a schema

BOUNDS: Mapping[str, str] = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
}
LARGEST_SHOWN = 2**31  # bounds from here on only keep a value within a machine word
TYPE_NAMES: Mapping[str, str] = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
    "object": "keys and values",
}


def describe_schema(schema: Mapping[str, Any]) -> str:
    """Return the values that a key's schema allows in words: "number above 0 or null"."""
    if "$ref" in schema:
        return "section"
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        # The values are sorted, because the order within a Literal depends on which module is
        # imported first: `typing` caches Literals, and those with the same values in another order
        # are one cached object.
        return ", ".join(sorted("null" if value is None else str(value) for value in values))
    branches = schema.get("anyOf") or schema.get("allOf")
    if branches:
        return " or ".join(dict.fromkeys(describe_schema(branch) for branch in branches))
    if schema.get("type") == "array":
        return _describe_array(schema)
    name = TYPE_NAMES.get(schema.get("type", ""), "any value")
    bounds = [
        text.format(f"{schema[key]:g}")
        for key, text in BOUNDS.items()
        if key in schema and schema[key] < LARGEST_SHOWN
    ]
    return " ".join([name, " and ".join(bounds)]).strip()


def _describe_array(schema: Mapping[str, Any]) -> str:
    items = schema.get("prefixItems")
    if items:
        return f"list of {len(items)}: {', '.join(describe_schema(item) for item in items)}"
    inner = schema.get("items") or {}
    return f"list of {'sections' if '$ref' in inner else describe_schema(inner)}"
