"""The numbers of a draw: which are refused, and that recipes, requests and Python refuse the same
ones."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from ratchet.config.experience import SamplingConfig
from ratchet.config.schema import EvaluationConfig
from ratchet.errors import SamplingError
from ratchet.experience.openai_proxy.wire import ApiError, apply_sampling
from ratchet.generators.engine.sampler import SamplingSettings, draw_tokens
from ratchet.sampling import (
    FIELDS,
    LARGEST_COUNT,
    LARGEST_SEED,
    LARGEST_TEMPERATURE,
    LEAST_SEED,
    LEAST_TEMPERATURE,
    MAX_STOP_IDS,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    check_setting,
)
from ratchet.structured_output import MAX_TEXT_CHARS
from ratchet.types import Sampling

NO_NUMBERS = [math.nan, math.inf, -math.inf, -1, 10**400, 10**5000, True, "1", None, [1], 1j]
NO_COUNTS = [-1, 2**31, 2**63, 10**400, 10**5000, 1.0, math.nan, True, "1", None]
WRONG = {
    "temperature": [*NO_NUMBERS, -0.5, 5e-324, 1e-40, 3e-35, 9.9e-6, 1.1e5, 1e39, 1.7e308],
    "top_p": [*NO_NUMBERS, 0, 0.0, 1.0000001, 2],
    "min_p": [*NO_NUMBERS, 1, 1.0, 2],
    "top_k": NO_COUNTS,
    "max_new_tokens": NO_COUNTS,
    "drawn": NO_COUNTS,
    "seed": [2**64, -(2**63) - 1, 10**400, 1.0, math.nan, True, "1", None],
    "stop": [
        "text",
        None,
        1,
        [""],
        ("a", ""),
        [1],
        [None],
        ["a" * (MAX_STOP_STRING_LENGTH + 1)],
        ["a\udc80"],
        ["a"] * (MAX_STOP_STRINGS + 1),
        {"a": 1},
    ],
    "stop_ids": [
        None,
        1,
        "1",
        [-1],
        [2**31],
        [2**70],
        [1.0],
        [True],
        ["1"],
        [None],
        range(3),
        [0] * (MAX_STOP_IDS + 1),
    ],
    "routes": [1, 0, None, "yes"],
    "adapter": [1, b"one", ["one"]],
    "structured": [
        {"json": {"items": [{"multipleOf": 999_983}]}},
        {"json": {"allOf": [{"multipleOf": 9_999}, {"multipleOf": 9_973}]}},
        {"json": {"allOf": [{"multipleOf": multiple} for multiple in (97, 89, 83, 79)]}},
        {"json": {"multipleOf": 9_999.99}},
        {"json": {"items": {}, "maxItems": 10**6}},
        {"json": {"items": {}, "maxItems": 10**4, "anyOf": [{"minItems": i} for i in range(9)]}},
        {"grammar": 'start: %json {"multipleOf": 999983}'},
        {"grammar": 'start: %json {"items": {}, "maxItems": 10000000}'},
        {"grammar": "start: " + " ".join(["b{0,1000000000}"] * 300) + '\nb: "y"'},
        {"regex": r"(?i)" + r"[\p{L}\p{N}]*" * 600},
        "[ab]",
        {},
        {"json": {}, "regex": "a"},
        {"json": "{"},
        {"json": "[" * 5000 + "]" * 5000},
        {"json": [1]},
        {"json": {"enum": [1j]}},
        {"choice": []},
        {"choice": [1]},
        {"regex": ""},
        {"regex": "a" * (MAX_TEXT_CHARS + 1)},
        {"grammar": 1},
    ],
}
RIGHT = {
    "temperature": [
        0,
        -0.0,
        1,
        LEAST_TEMPERATURE,
        LARGEST_TEMPERATURE,
        np.float32(0.7),
        np.float64(0.7),
        Fraction(1, 2),
    ],
    "top_p": [5e-324, 1, 1.0, np.float32(0.5)],
    "min_p": [0, 0.0, -0.0, 5e-324, 0.999],
    "top_k": [0, LARGEST_COUNT, np.int64(5)],
    "max_new_tokens": [0, LARGEST_COUNT, np.int32(5)],
    "drawn": [0, np.int64(1)],
    "seed": [LEAST_SEED, LARGEST_SEED, np.uint64(2**64 - 1)],
    "stop": [(), [], ["a"], ("a" * MAX_STOP_STRING_LENGTH,) * MAX_STOP_STRINGS],
    "stop_ids": [(), [0], [LARGEST_COUNT], (np.int64(3), 4)],
    "routes": [True, False],
    "adapter": [None, "one"],
    "structured": [None],  # mappings: below, and tests/generators/test_grammar_masks.py
}
REFUSED = [
    pytest.param(name, value, id=f"{name} {i}")
    for name, values in WRONG.items()
    for i, value in enumerate(values)
]
ACCEPTED = [
    pytest.param(name, value, id=f"{name} {i}")
    for name, values in RIGHT.items()
    for i, value in enumerate(values)
]


def test_every_field_has_its_cases():
    assert set(WRONG) == set(RIGHT) == set(FIELDS)


@pytest.mark.fault("R15")
@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_cannot_be_drawn_is_refused(name, value):
    for construct in (
        lambda: Sampling(**{name: value}),
        lambda: replace(Sampling(), **{name: value}),
    ):
        with pytest.raises(SamplingError, match=rf"(?s)^{name}=.* Set {name}=.*\.$") as caught:
            construct()
        assert caught.value.field == name
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_what_can_be_drawn_gets_its_plain_type(name, value):
    plain = getattr(Sampling(**{name: value}), name)
    assert plain == (tuple(value) if isinstance(value, list) else value)
    assert type(plain) in (float, int, bool, tuple, str, type(None))
    assert type(plain) is type(getattr(Sampling(), name)) or name == "adapter"
    assert all(type(part) in (int, str) for part in (plain if isinstance(plain, tuple) else ()))


def test_a_wrong_seed_is_refused_when_copying():
    with pytest.raises(SamplingError, match=r"seed=1\.5"):
        Sampling().seeded(1.5)  # pyright: ignore[reportArgumentType]


@pytest.mark.fault("R15")
@pytest.mark.parametrize(
    ("name", "value"), [case for case in REFUSED if case.values[0] in SamplingConfig.model_fields]
)
def test_a_recipe_refuses_the_same(name, value):
    # YAML's 1.0 is the whole number 1 to every section
    if name in ("top_k", "max_new_tokens") and value == 1.0:
        return
    with pytest.raises(ValidationError):
        SamplingConfig(**{name: value})
    if name == "temperature" and value is not None:
        with pytest.raises(ValidationError):
            EvaluationConfig(temperature=value)


@pytest.mark.fault("R15")
@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_request_refuses_the_same_and_names_it(name, value):
    with pytest.raises(ApiError) as caught:
        apply_sampling(Sampling(), **{name: value})
    assert (caught.value.status, caught.value.param) == (400, name)


def test_every_accepted_temperature_gives_finite_logprobs():
    """With logits as large as 1e4 in float32, and all filters."""
    logits = torch.randn(64, generator=torch.Generator().manual_seed(0))
    logits *= 1e4 / logits.abs().max()
    for temperature in (0.0, *np.geomspace(LEAST_TEMPERATURE, LARGEST_TEMPERATURE, 21).tolist()):
        samplings = [
            Sampling(temperature, top_p, top_k, min_p)
            for top_p, top_k, min_p in [(1, 0, 0), (5e-324, 3, 0.999)]
        ]
        settings = SamplingSettings.from_samplings(samplings, 64, torch.device("cpu"))
        drawn = draw_tokens(logits.repeat(2, 1), torch.tensor([0.3, 0.999]), settings)
        assert drawn.logprobs_N.isfinite().all()
        assert drawn.log_kept_F is None or drawn.log_kept_F.isfinite().all()


def test_one_value_is_checked_as_the_whole_is():
    assert check_setting("temperature", 1) == 1.0
    with pytest.raises(SamplingError, match=r"Set temperature=0 \(greedy\) or 1e-05\."):
        check_setting("temperature", 1e-40)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"multipleOf": 100}, {"multipleOf": 99}, {"multipleOf": 0.5}]},
        {"multipleOf": 10_000},
        {"multipleOf": 1000.0},
        {"multipleOf": 0.00001},
        {"items": {}, "maxItems": 10_000},
        {"multipleOf": True, "maxItems": None},
        {"properties": {"maxItems": {"enum": ["multipleOf"]}}},
    ],
)
def test_schemas_that_compile_in_little_time_are_accepted(schema):
    assert Sampling(structured={"json": schema}).structured is not None
