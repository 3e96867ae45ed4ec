"""docs/integrations/mini-swe-agent.md: the official package plays Harbor tasks in their sandboxes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from command_line import ratchet
from commands.clients.test_clients import CLIENTS, ROOT
from experience.openai_proxy.talk import TEMPLATE, Scripted, serving
from pages import run, written
from sandbox.test_attacks import need

from ratchet.sandbox import Isolation
from ratchet.types import Owner, Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.needs("fastapi"), pytest.mark.needs("openai")]


def write_call(command: str) -> str:
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"I try.<tool_call>\n{call}\n</tool_call>"


SUBMIT = write_call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
SOLVING = ("What?", write_call("cat numbers.txt; cd /; exit 3"), write_call("echo 3 >sum.txt"))


@pytest.fixture
def directory(
    repository: Path,
    tmp_path: Path,
    require: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A directory with the files of the page and a task."""
    require(str(CLIENTS), "make .venv/clients/installed")
    need(Isolation.NAMESPACES)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the package, for the program of the page
    monkeypatch.chdir(tmp_path)
    written(repository / "docs" / "integrations" / "mini-swe-agent.md", tmp_path)
    made = ratchet("new", "harbor-task", "my-sum")
    assert made.returncode == 0, made.stderr
    return tmp_path


async def play(lines: Sequence[str]) -> tuple[float, Scripted, list[Trajectory]]:
    """Return the reward of an attempt with these answers, the generator, and what was recorded."""
    generator = Scripted(lines)
    async with serving(generator, max_context=100_000) as (session, client):
        variables = {"OPENAI_BASE_URL": str(client.base_url), "OPENAI_API_KEY": client.api_key}
        process = await asyncio.create_subprocess_exec(
            CLIENTS,
            "mini_swe.py",
            env=os.environ | variables,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate(b'{"id": "harbor/train/my-sum"}')
        assert process.returncode == 0, errors.decode()[-3000:]
        reward = json.loads(output.decode().splitlines()[-1])
        return reward, generator, session.trajectories(0, None, {})


def test_it_solves_a_task_and_each_sampled_token_is_recorded_once(directory: Path) -> None:
    """An answer without a command is left out of its history, so it is a trajectory of its own."""
    reward, generator, (dropped, row) = asyncio.run(play((*SOLVING, SUBMIT)))
    assert reward == 1.0
    assert [len(dropped.turns), len(row.turns)] == [1, 3]
    for name, column in (
        ("tokens", "tokens"),
        ("logprobs", "rollout_logprobs"),
        ("versions", "versions"),
    ):
        recorded = [getattr(part, column)[part.owner == Owner.POLICY] for part in (dropped, row)]
        sampled = [getattr(completion, name) for completion in generator.completions]
        np.testing.assert_array_equal(np.concatenate(recorded), np.concatenate(sampled))
    results = [message.text for message in row.messages if message.role == "tool"]
    assert json.loads(results[0]) == {"returncode": 3, "output": "1\n2\n[exit code 3]"}
    assert not (directory / "sum.txt").exists(), "the command ran in the sandbox"


def test_it_trains_by_the_recipe_of_the_page(directory: Path) -> None:
    (directory / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    recipe = (directory / "with_mini.yaml").read_text(encoding="utf-8")
    (directory / "with_mini.yaml").write_text(recipe.replace("[python,", f"[{CLIENTS},"))
    run(directory, "-m", "ratchet", "train", "with_mini.yaml")
    (metrics,) = directory.glob("runs/*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    (step,) = [row for row in rows if "rollout/reward" in row]
    assert (step["rollout/reward"], step["rollout/failed_share"]) == (0.0, 0.0)
