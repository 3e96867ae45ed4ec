"""The page on OpenEnv: its recipe is valid."""

from pages import written

from ratchet.config.loader import load_config


def test_the_recipe_is_valid(repository, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(repository / "docs" / "integrations" / "openenv.md", tmp_path)
    assert load_config(tmp_path / "with_echo.yaml").stages[0].environment.kind == "openenv"
