"""A recipe is read within a budget of bytes, values, depth and files; what one file may write, a
chain may not exceed."""

import hostile
import pytest

from ratchet.config import yaml_tree
from ratchet.config.from_words import section_from_words
from ratchet.config.loader import load_config
from ratchet.config.resolve import import_object
from ratchet.config.yaml_tree import Budget, read_text
from ratchet.errors import ConfigError

QUICK = (
    "6,000 digits",
    "nested 20,000",
    "nested by anchors",
    "a long key",
    "a tag",
    "a number by tag",
    "extends /dev/zero",
)
QUICK += (
    "extends /etc/passwd",
    "extends no name",
    "a kind by a path of files",
    "a class that is not an environment",
)
QUICK += (
    "a vocabulary below 0",
    "no heads",
    "10^9 layers",
    "a list for a number",
    "no YAML",
    "bytes",
)


@pytest.mark.fault("C13")
@pytest.mark.parametrize("name", QUICK)
def test_a_hostile_recipe_is_refused(name, tmp_path):
    text, expected = hostile.RECIPES[name]
    with pytest.raises(ConfigError) as error:
        load_config(hostile.place(tmp_path / "recipe.yaml", text))
    assert expected in str(error.value)


@pytest.mark.fault("C13")
def test_values_are_counted_where_anchors_repeat_them():
    text = hostile.aliases(3)  # 9 + 10 * 9 + 10 * 81 values, and their lists
    assert len(read_text(text, "x", budget=Budget(nodes=2000))[0].value) == 3
    with pytest.raises(
        ConfigError, match=r"^x:\d: anchors and merges expand this recipe to more than"
    ):
        read_text(text, "x", budget=Budget(nodes=500))
    with pytest.raises(ConfigError, match=r"^x:2: a recipe holds at most"):
        read_text(text, "x", budget=Budget(entries=20))


@pytest.mark.fault("C13")
def test_a_chain_of_recipes_shares_one_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(yaml_tree, "MAX_BYTES", 2000)
    monkeypatch.setattr(Budget.__init__, "__defaults__", (2000, *Budget.__init__.__defaults__[1:]))
    (tmp_path / "a.yaml").write_text("x: 1\n" + "#" * 1200 + "\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n" + "#" * 1200 + "\n")
    with pytest.raises(ConfigError, match="a recipe and all that it extends may hold at most"):
        load_config(tmp_path / "b.yaml")


@pytest.mark.slow
@pytest.mark.fault("C13")
def test_overrides_share_the_budget_of_the_recipe(tmp_path):
    path = hostile.place(tmp_path / "r.yaml", hostile.QUICKSTART)
    some = "{a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1], b: &b [*a, *a, *a, *a, *a], c: [*b, *b, *b, *b]}"
    with pytest.raises(
        ConfigError, match=r"anchors and merges expand this recipe to more than 100,000 values"
    ):
        load_config(path, [f"x{n}={some}" for n in range(400)])
    with pytest.raises(ConfigError, match="at most 10,000 keys and values"):
        load_config(path, [f"x{n}=[1, 2, 3, 4]" for n in range(2500)])
    with pytest.raises(
        ConfigError, match=r"anchors and merges expand this recipe to more than 100,000 values"
    ):
        section_from_words("rewards", "boxed", [f"x{n}={some}" for n in range(400)])


def test_a_key_that_no_recipe_holds_is_refused_where_it_stands(tmp_path):
    path = hostile.place(tmp_path / "r.yaml", hostile.QUICKSTART)
    for override in (f"{'a.' * 30_000}b=1", f"{'a.' * 64}b=1"):
        with pytest.raises(
            ConfigError, match=r"^command line: values are nested more than 64 deep"
        ):
            load_config(path, [override])
    with pytest.raises(ConfigError, match=r"^command line: a key has 100,000 characters"):
        load_config(path, ["a" * 100_000 + "=1"])
    with pytest.raises(ConfigError, match=r"^command line: the key 'na\\udcffme' is not text"):
        load_config(path, ["na\udcffme=1"])  # a byte that is not UTF-8
    path.write_text('"\\ud800": 1\n')
    with pytest.raises(ConfigError, match=r"r.yaml:1: the key '\\ud800' is not text"):
        load_config(path)


def test_the_content_of_a_file_that_is_no_recipe_is_not_shown(tmp_path):
    for secret in ("root:hunter2:0", "hunter2", "a: *hunter2", "- hunter2", "a: [hunter2"):
        (tmp_path / "shadow").write_text(secret)
        (tmp_path / "r.yaml").write_text("extends: shadow\n")
        with pytest.raises(ConfigError) as error:
            load_config(tmp_path / "r.yaml")
        assert "hunter2" not in str(error.value)


@pytest.mark.medium
def test_the_first_twenty_problems_are_told_and_the_rest_counted(tmp_path):
    path = hostile.place(
        tmp_path / "r.yaml", hostile.QUICKSTART + "".join(f"algoritm{n}: 1\n" for n in range(100))
    )
    with pytest.raises(ConfigError) as error:
        load_config(path)
    lines = str(error.value).splitlines()
    assert lines[0] == "100 problems:"
    assert len(lines) == 22
    assert lines[1].endswith("algoritm0: unknown key; did you mean 'algorithm'?")
    assert lines[-1].strip() == "and 80 more"


def test_stages_do_not_multiply_what_stands_at_the_top(tmp_path):
    keys = ", ".join(f"k{n}: 1" for n in range(1200))
    path = hostile.place(
        tmp_path / "r.yaml", f"sampling: {{{keys}}}\nstages:\n" + "- {steps: 1}\n" * 100
    )
    with pytest.raises(
        ConfigError, match="100 stages repeat the keys at the top, which makes 120,000 values"
    ):
        load_config(path)


@pytest.mark.parametrize(
    "path", ["../../x:Y", "..x:Y", ":Y", "x:", "a:b:c", "a b:c", "a.b:c d", "/etc/passwd:x"]
)
def test_a_path_that_names_no_class_is_refused(path):
    with pytest.raises(ConfigError, match="is not the path of a class or function"):
        import_object(path)
