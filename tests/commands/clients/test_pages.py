"""docs/integrations/anthropic.md and responses.md: their agents train as they stand, by the official
packages, and ask a served model."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from commands.clients.test_clients import CLIENTS, serve_model, write_model
from experience.openai_proxy.talk import TEMPLATE
from pages import run, written

pytestmark = [pytest.mark.slow, pytest.mark.needs("fastapi")]


@pytest.mark.parametrize("page", ["anthropic", "responses"])
def test_the_agent_of_the_page_trains_and_asks(
    page: str, repository: Path, tmp_path: Path, require: Callable[[str, str], None]
) -> None:
    require(str(CLIENTS), "make .venv/clients/installed")
    text = (repository / "docs" / "integrations" / f"{page}.md").read_text(encoding="utf-8")
    page_copy = tmp_path / "page.md"
    page_copy.write_text(text.partition("## What it takes")[0], encoding="utf-8")
    files = written(page_copy, tmp_path)
    (tmp_path / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    recipe = files["my_recipe.yaml"].replace("[python,", f"[{CLIENTS},")
    (tmp_path / "my_recipe.yaml").write_text(recipe, encoding="utf-8")
    run(tmp_path, "-m", "ratchet", "train", "my_recipe.yaml")
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "rollout/reward" in row]
    assert len(steps) == 2
    assert all(row["rollout/failed_share"] == 0 for row in steps)

    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model")
    with serve_model(tmp_path / "model") as address:
        variables = {
            "OPENAI_BASE_URL": address,
            "OPENAI_API_KEY": "none",
            "ANTHROPIC_BASE_URL": address.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": "none",
        }
        task = json.dumps({"messages": [{"role": "user", "content": "1+2"}]})
        asked = subprocess.run(
            [CLIENTS, "my_agent.py"],
            input=task,
            cwd=tmp_path,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=False,
        )
    assert asked.returncode == 0, asked.stderr[-3000:]
