"""docs/black-box-agents.md: what it shows runs as it stands, and what it says of requests is so."""

import json
import re

import pytest
from experience.openai_proxy.talk import TEMPLATE
from pages import run

pytestmark = [pytest.mark.needs("fastapi"), pytest.mark.needs("openai")]


@pytest.fixture
def text(repository):
    return (repository / "docs" / "black-box-agents.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_agent_of_the_page_trains(text, tmp_path):
    files = dict(re.findall(r"```(?:python|yaml|jinja)\n# (\S+)\n(.*?)```", text, flags=re.DOTALL))
    assert len(files) == text.count("```") // 2
    for name, code in files.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    assert files["template.jinja"] == TEMPLATE
    run(tmp_path, "-m", "ratchet", "train", "my_recipe.yaml")
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "rollout/reward" in row]
    assert len(steps) == 3
    assert all(row["rollout/failed_share"] == 0 for row in steps)
    assert any(row["policy/grad_norm"] > 0 for row in steps)
