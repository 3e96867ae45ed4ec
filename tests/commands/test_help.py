"""`ratchet help` and `ratchet schema`: every key, and names of other libraries."""

import json
import re
from pathlib import Path

import jsonschema
import pytest

from ratchet.commands.help.command import make_help_text
from ratchet.commands.help.entries import list_entries
from ratchet.commands.help.json_schema import make_recipe_schema
from ratchet.commands.help.page import make_recipe_page
from ratchet.commands.migrate.importer import PEERS
from ratchet.config.key_paths import keys
from ratchet.config.peer_names import PEER_NAMES
from ratchet.config.schema import RunConfig
from ratchet.config.yaml_tree import Budget, read_file
from ratchet.errors import ConfigError

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "ratchet" / "recipes").rglob("*.yaml"))


@pytest.fixture(scope="module")
def validator():
    schema = make_recipe_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(json.loads(json.dumps(schema)))


@pytest.mark.medium
def test_the_page_of_keys_is_current():
    assert (ROOT / "docs/recipe.md").read_text() == make_recipe_page(), (
        "run `ratchet help --markdown > docs/recipe.md`"
    )


@pytest.mark.medium
def test_the_page_of_symptoms_names_metrics_and_keys_that_exist():
    page, metrics = (
        (ROOT / "docs" / name).read_text(encoding="utf-8")
        for name in ("by-symptom.md", "metrics.md")
    )
    named = set(re.findall(r"`([a-z]\w*/[\w/<>]+)`", page))
    assert named - set(re.findall(r"`([\w/<>]+)`", metrics.replace("<role>", "policy"))) == set()
    keys_named = set(re.findall(r"`([a-z]\w*(?:\.\w+)+)`", page)) - {"run.log", "task.seed"}
    paths = {entry.path for entry in list_entries()}
    assert {name for name in keys_named if not any(path.endswith(name) for path in paths)} == set()


@pytest.mark.medium
def test_every_key_is_described_and_listed():
    entries = list_entries()
    assert [entry.path for entry in entries if not entry.description] == []
    listed = {entry.name for entry in entries}
    assert {key.name for key in keys(RunConfig)} - listed == {"stages"}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("optimizer.lr", "number above 0; default: 1.0e-05\n    Peak learning rate."),
        ("clip_high", "algorithm.loss.clip_high"),
        ("optimizer", "Kinds: adamw, adamw8bit, muon"),
        ("evaluation", "evaluation.patience"),
        ("dapo", "algorithm: {kind: dapo}\n    DAPO: "),
        ("num_generations", "algorithm.group_size"),
        ("pass@k", "evaluation.pass_threshold"),
        ("", "batch_size    Number of groups (prompts, rows or pairs) in a step."),
    ],
)
def test_help_explains_keys_sections_and_kinds(words, expected):
    assert expected in make_help_text(words)


def test_help_suggests_a_near_name():
    with pytest.raises(ConfigError, match=r"called 'dappo'\. Did you mean dapo"):
        make_help_text("dappo")


def test_names_of_other_libraries_lead_to_keys():
    known = {key.recipe_path for key in keys(RunConfig)}
    paths = {path for paths in PEER_NAMES.values() for path in paths}
    unknown = {path for path in paths if path.removesuffix(".kind") not in known}
    assert unknown == set()


def test_names_of_other_libraries_agree_with_the_importer():
    """A name that `ratchet import` converts leads to one of the keys that it sets."""
    targets: dict[str, set[str]] = {}
    for peer in PEERS.values():
        for method in peer.methods.values():
            for row in method.rows:
                name = row.peer_key.rpartition(".")[2]
                targets.setdefault(name, set()).update(row.recipe_key.split(", "))
    known = {name: targets[name] - {""} for name in PEER_NAMES if targets.get(name, set()) - {""}}
    assert len(known) > 30
    disagree = {
        name: (PEER_NAMES[name], keys)
        for name, keys in known.items()
        if not any(
            key.startswith(path) or path.startswith(key)
            for path in PEER_NAMES[name]
            for key in keys
        )
    }
    assert disagree == {}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid_by_the_schema(validator, path):
    recipe = json.loads(json.dumps(read_file(path, Budget())[0].plain()))
    assert [error.message for error in validator.iter_errors(recipe)] == []


@pytest.mark.parametrize(
    "recipe",
    [
        {"optimizer": {"lrr": 1e-3}},
        {"optimizer": {"lr": 0}},
        {"optimizer": {"kind": "muon", "alpha": 1}},
        {"algorithm": {"kind": "dpo", "kl": {"coef": 1}}},
        {"algorithm": {"kind": "gpro"}},
        {"stages": [{"sampling": {"temperature": "hot"}}]},
        {"environment": {"kind": "mixture", "parts": [{"kind": "sorting", "digit": 1}]}},
    ],
    ids=str,
)
def test_schema_refuses_wrong_keys_and_values(validator, recipe):
    assert list(validator.iter_errors(recipe))


def test_schema_allows_any_keys_of_a_class_of_ones_own(validator):
    recipe = {"environment": {"kind": "my_maze:Maze", "size": 3}}
    assert list(validator.iter_errors(recipe)) == []
