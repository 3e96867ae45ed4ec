"""The commands on recipes, data and models that are written to hang or to crash: each ends with a
sentence and status 2."""

import sys

import hostile
import pytest

from ratchet.cli.main import main
from ratchet.config.model_shape.presets import get_preset
from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.models.load import init_policy

pytestmark = pytest.mark.slow


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command in this process: (status, what it wrote to both streams)."""

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["ratchet", *map(str, words)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as left:
            main()
        written = capsys.readouterr()
        return left.value.code or 0, written.out + written.err

    return command


def refused(status, said, expected=""):
    assert status == 2, said
    assert expected in said
    assert 0 < len(said) < 12_000
    assert "Traceback" not in said
    return True


@pytest.mark.fault("C13")
@pytest.mark.parametrize("name", hostile.RECIPES)
def test_a_hostile_recipe_is_refused(name, run, tmp_path):
    text, expected = hostile.RECIPES[name]
    path = hostile.place(tmp_path / "recipe.yaml", text)
    assert refused(*run("check", path), expected)
    assert refused(*run("train", path, "--run-dir", tmp_path / "run"), expected)
    assert not (tmp_path / "run").exists()


@pytest.mark.fault("C13")
@pytest.mark.parametrize(
    "content", [hostile.PIPE, hostile.ZERO, hostile.FOLDER], ids=["pipe", "zero", "folder"]
)
def test_what_is_no_plain_file_is_no_recipe(content, run, tmp_path):
    path = hostile.place(tmp_path / "recipe.yaml", content)
    variant = hostile.place(tmp_path / "variant.yaml", "extends: recipe.yaml\n")
    assert refused(*run("check", path))
    assert refused(*run("check", variant), "extends")


@pytest.mark.fault("C13")
def test_a_chain_of_1500_recipes_is_refused(run, tmp_path):
    hostile.place(tmp_path / "r0.yaml", hostile.QUICKSTART)
    for number in range(1, 1500):
        hostile.place(tmp_path / f"r{number}.yaml", f"extends: r{number - 1}.yaml\n")
    assert refused(*run("check", tmp_path / "r1499.yaml"), "more than 32 recipes extend each other")


@pytest.mark.fault("D16")
@pytest.mark.parametrize("name", hostile.DATA)
def test_hostile_data_are_refused(name, run, tmp_path):
    content, expected = hostile.DATA[name]
    path = tmp_path / name
    if content is None:
        hostile.write_bomb(path)
    else:
        hostile.place(path, content)
    assert refused(*run("data", "inspect", path), expected)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokenizer = character_tokenizer("0123456789")
    folder = tmp_path_factory.mktemp("model") / "base"
    init_policy(
        get_preset("tiny", vocab_size=tokenizer.vocab_size, n_layers=1, hidden_size=32), seed=0
    ).save(folder)
    tokenizer.save(folder)
    return folder


@pytest.mark.fault("M13")
@pytest.mark.parametrize("name", hostile.MODELS)
def test_a_hostile_model_is_refused(name, run, model, tmp_path):
    folder = hostile.write_model(tmp_path / "model", model, name)
    status, said = run("chat", folder, "--prompt", "1", "--max-new-tokens", "1")
    if name.startswith("chat_template") and "pipe" not in name:
        assert status in (0, 2)  # the question is refused, and another may be asked
        assert "the chat template can't" in said
    else:
        assert refused(status, said)
    assert "Traceback" not in said
    status, said = run("convert", folder, tmp_path / "converted", "--to", "dcp", "--no-verify")
    # weights that are whole can be converted beside a wrong tokenizer
    assert status in (0, 2), said
    assert "Traceback" not in said
