"""The recipes that come with Ratchet: found by name from any directory, listed, shown and copied."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratchet.cli.completion import complete_key, complete_run
from ratchet.cli.main import app
from ratchet.config.loader import load_config
from ratchet.errors import ConfigError
from ratchet.recipes import RECIPES_DIR, find_recipe, list_recipes, read_summary

QUICKSTART = RECIPES_DIR / "quickstart.yaml"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*words: str) -> str:
    result = CliRunner().invoke(app, ["recipes", *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_name_is_a_file_here_or_a_shipped_recipe(here):
    assert find_recipe("quickstart") == QUICKSTART
    assert find_recipe("quickstart.yaml") == Path("quickstart.yaml")  # a path, not a name
    assert find_recipe("below/quickstart") == Path("below/quickstart")
    (here / "quickstart").mkdir()
    assert find_recipe("quickstart") == QUICKSTART
    assert find_recipe("./quickstart") == Path("quickstart")
    (here / "quickstart.yaml").touch()
    assert find_recipe("quickstart") == Path("quickstart.yaml")


@pytest.mark.parametrize("command", [["train"], ["plan"], ["check", "--offline"]])
def test_a_path_that_is_no_file_is_no_shipped_recipe(here, command):
    result = CliRunner().invoke(app, [*command, "./quickstart"])
    assert isinstance(result.exception, ConfigError)
    assert "without a directory, is one that comes with Ratchet" in str(result.exception)


def test_a_recipe_is_loaded_and_extended_by_name(here):
    assert load_config("quickstart").name == "quickstart"
    (here / "longer.yaml").write_text("extends: quickstart\nstages: {grpo: {steps: 200}}\n")
    assert load_config("longer", ["stages.sft.steps=40"]).stages[1].steps == 200
    (here / "quickstart.yaml").write_text("extends: quickstart\n")
    with pytest.raises(ConfigError, match=r"or rename quickstart.yaml to extend the recipe"):
        load_config("quickstart")


@pytest.mark.parametrize("name", ["/", "."])
def test_a_directory_is_no_recipe(name):
    with pytest.raises(ConfigError, match="is a directory; a recipe is a YAML file"):
        load_config(name)


@pytest.mark.parametrize("name", ["quickstrat", "quickstrat.yaml", "recipes/quickstart.yaml"])
def test_a_wrong_name_suggests_the_nearest(name):
    with pytest.raises(ConfigError, match="did you mean `quickstart`, a recipe that comes with"):
        load_config(name)


def test_train_without_a_recipe_says_what_is_there(here):
    (here / "mine.yaml").write_text("# Mine.\nextends: quickstart\n")
    (here / "compose.yaml").write_text("services: {}\n")
    result = CliRunner().invoke(app, ["train"])
    assert result.exit_code == 2
    assert "recipes in this directory:\nmine.yaml  Mine.\n" in result.output
    assert "asynchronous, cispo, code," in result.output
    assert result.output.endswith("next: ratchet train mine.yaml\n")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train quicks", "quickstart"),
        ("train mi", "mine.yaml"),
        ("train quickstart optimizer.warmup_sh", "optimizer.warmup_share=0.0"),
        ("train quickstart stages.grpo.optim", "stages.grpo.optimizer.lr="),
        ("train quickstart stages.grpo.e", "stages.grpo.evaluation."),
        ("train --resume ", "runs/first"),
        ("report ru", "runs/first"),
    ],
)
def test_the_shell_completes_recipes_runs_and_keys(here, monkeypatch, words, expected):
    (here / "mine.yaml").touch()
    (here / "runs/first").mkdir(parents=True)
    (here / "runs/first/config.yaml").touch()
    monkeypatch.setenv("_RATCHET_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"ratchet {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" "))))
    result = CliRunner().invoke(app, [], prog_name="ratchet")
    assert expected in result.output.splitlines()


def test_completion_survives_directories_that_may_not_be_entered(here, monkeypatch):
    for name in ("others", "ours"):
        (here / "runs" / name).mkdir(parents=True)
    stat = os.stat

    def refuse(path, **options):
        if str(path).endswith("config.yaml"):
            raise PermissionError
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert complete_run("runs/o") == ["runs/others/", "runs/ours/"]


def test_completion_names_no_default_where_kinds_differ():
    assert [word for word, _ in complete_key("algorithm.group_s")] == ["algorithm.group_size="]


def test_the_list_has_a_line_for_each_recipe():
    lines = call().splitlines()
    names = [line.split()[0] for line in lines[: lines.index("")]]
    assert names == list(list_recipes())
    assert "dr_grpo                  Dr. GRPO: GRPO without the division" in call()


def test_a_summary_is_the_first_sentence(here):
    recipe = here / "r.yaml"
    recipe.write_text("# Learns x. Then\n# y.\nname: r\n")
    assert read_summary(recipe) == "Learns x."
    recipe.write_text("name: r\n")
    assert read_summary(recipe) == ""


@pytest.mark.medium
def test_show_and_copy(here):
    assert call("show", "quickstart").strip() == QUICKSTART.read_text().strip()
    assert call("copy", "quickstart", "own/mine.yaml").endswith("ratchet train own/mine.yaml\n")
    assert (here / "own/mine.yaml").read_bytes() == QUICKSTART.read_bytes()
    call("copy", "quickstart", "own")
    call("copy", "quickstart", "new/")
    assert (here / "own/quickstart.yaml").is_file()
    assert (here / "new/quickstart.yaml").is_file()
    (here / "link.yaml").symlink_to("nowhere.yaml")
    linked = CliRunner().invoke(app, ["recipes", "copy", "quickstart", "link.yaml"])
    assert "exists already" in str(linked.exception)
    refused = CliRunner().invoke(app, ["recipes", "copy", "quickstart", "own"])
    assert "exists already" in str(refused.exception)
    unknown = CliRunner().invoke(app, ["recipes", "show", "dap"])
    assert "did you mean `dapo`" in str(unknown.exception)
