"""Every number of every section: none is taken that isn't one, or that no run could hold."""

import math
from collections.abc import Mapping
from functools import cache
from typing import Literal, get_args, get_origin

import pytest
from config.test_knobs import place_of
from pydantic import ValidationError

from ratchet.config.base import _list_item_annotations, _list_leaf_types
from ratchet.config.key_paths import leaf_keys
from ratchet.config.loader import load_config
from ratchet.config.schema import RunConfig
from ratchet.errors import ConfigError
from ratchet.rewards.integrations.roll_detection import DetectionConfig

NUMBERS = {int, float, type(None)}
NO_NUMBERS = [
    math.nan,
    math.inf,
    -math.inf,
    1e309,
    -(10**400),
    10**400,
    True,
    False,
    "1",
    "nan",
    "1e-3",
]
HUGE = [2**63, 10**12, -(10**12), 1e12, 2**31]
RECIPE = """
model: {preset: tiny}
tokenizer: {kind: characters}
environment: {kind: sorting}
algorithm: {kind: grpo}
"""


@cache
def numeric():
    """(section, field) of every key that holds a number alone, or a list of them."""
    places = {place_of(key) for key in leaf_keys(RunConfig)}
    fields = [(section, name, section.model_fields[name].annotation) for section, name in places]
    return [
        (section, name) for section, name, kinds in fields if _list_leaf_types(kinds) & {int, float}
    ]


@cache
def numeric_mappings():
    """(section, field, key) of every key that holds a mapping to numbers; the key is a valid one."""
    sections = {place_of(key) for key in leaf_keys(RunConfig)} | {(DetectionConfig, "weights")}
    annotations = [(s, n, get_item_annotations(s.model_fields[n])) for s, n in sections]
    return [
        (section, name, get_args(items[0])[0] if get_origin(items[0]) is Literal else "a")
        for section, name, items in annotations
        if len(items) == 2 and _list_leaf_types(items[1]) & {int, float}
    ]


def get_item_annotations(field):
    return _list_item_annotations(field.annotation, (dict, Mapping))


def is_refused(section, name, value):
    """Whether that very key is refused: other keys of a section may be missing."""
    try:
        section.model_validate({name: value})
    except ValidationError as error:
        return any(line["loc"][:1] == (name,) for line in error.errors())
    return False


@pytest.mark.medium
@pytest.mark.fault("C14")
def test_no_section_takes_what_is_no_number():
    assert len(numeric()) > 250
    taken = [
        f"{section.__name__}.{name}={value!r:.20}"
        for section, name in numeric()
        for kinds in [_list_leaf_types(section.model_fields[name].annotation)]
        # a field that takes words, such as "auto", refuses true and false all the same
        for value in (NO_NUMBERS if kinds <= NUMBERS else () if bool in kinds else (True, False))
        if not is_refused(section, name, value)
    ]
    assert taken == []


def test_no_section_takes_a_mapping_to_what_is_no_number():
    assert len(numeric_mappings()) >= 3
    taken = [
        f"{section.__name__}.{name}: {{{key}: {value!r:.20}}}"
        for section, name, key in numeric_mappings()
        for value in NO_NUMBERS
        if not is_refused(section, name, {key: value})
    ]
    assert taken == []


@pytest.mark.fault("C14")
def test_no_whole_number_is_taken_that_no_run_could_hold():
    wholes = [
        (s, n)
        for s, n in numeric()
        if int in _list_leaf_types(s.model_fields[n].annotation) and n != "seed"
    ]
    assert len(wholes) > 120
    taken = [
        f"{s.__name__}.{n}={value}"
        for s, n in wholes
        for value in HUGE
        if not is_refused(s, n, value)
    ]
    assert taken == []


@pytest.mark.parametrize("seed", [-1, 2**63, 10**400, 1.5])
def test_a_seed_has_63_bits(seed):
    assert is_refused(RunConfig, "seed", seed)
    assert not is_refused(RunConfig, "seed", 2**63 - 1)


@pytest.mark.fault("C14")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "batch_size=2000000000",
            r"batch_size=2,000,000,000 of 8 attempts .*\. Set batch_size=1250000 or less\.",
        ),
        (
            "algorithm.group_size=2000000000",
            r"batch_size=\d+ of 2,000,000,000 attempts each is more than",
        ),
        (
            "evaluation.tasks=2000000000",
            r"evaluation\.tasks=2,000,000,000 makes .* Set evaluation\.tasks=10000000 or less\.",
        ),
        (
            "evaluation.samples=2000000000",
            r"evaluation\.tasks=512 makes 1,024,000,000,512 attempts",
        ),
        ("steps=1000000000000", r"steps: 1000000000000 must be at most 2147483647"),
        (
            "sampling.temperature=1e-40",
            r"sampling\.temperature: temperature=1e-40 is too small.* Set temperature=0 \(greedy\) "
            r"or",
        ),
        (
            "evaluation.temperature=1e-40",
            r"evaluation\.temperature: temperature=1e-40 is too small",
        ),
        (
            "rewards=[{kind: detection, weights: {map: true}}]",
            r"rewards.*weights: .*map must be a number",
        ),
        ("optimizer.lr=.nan", "optimizer.lr: nan must be a finite number"),
        ("optimizer.lr=1e999", "optimizer.lr: inf must be a finite number"),
        ("optimizer.betas=[0.9, .inf]", r"optimizer\.betas.*must be a finite number"),
    ],
)
def test_check_refuses_a_recipe_that_no_run_could_hold(tmp_path, override, message):
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_config(path, [override])


def test_check_refuses_what_vllm_would_sample_otherwise(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    for generator in ("{kind: vllm}", "{kind: workers, worker: {kind: vllm}}"):
        for key in ("sampling", "evaluation"):
            with pytest.raises(
                ConfigError, match=rf"{key}\.temperature=0\.001 .* would use 0\.01 instead"
            ):
                load_config(path, [f"generator={generator}", f"{key}.temperature=0.001"])
