"""inspect-ai evaluates a served model, unchanged."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_line import ratchet
from commands.clients.test_clients import CLIENTS, serve_model, write_model

from ratchet.evals.results import EvalResults

INSPECT = CLIENTS.with_name("inspect")
TASK = re.compile(r"```python\n# sums.py\n(.*?)```", re.DOTALL)  # in the page
QUESTIONS = [f"{number}+1=" for number in range(6)]


def ask(address: str, question: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": question}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 8}
    return httpx.post(f"{address}/chat/completions", json=body, timeout=60).json()


def write_task(directory: Path, repository: Path, answers: list[str]) -> None:
    """Write the task of docs/integrations/inspect.md, with rows in which the first half of the answers is right."""
    targets = [
        answer if number < len(answers) // 2 else "of another model"
        for number, answer in enumerate(answers)
    ]
    rows = [
        {"id": number, "input": question, "target": target}
        for number, (question, target) in enumerate(zip(QUESTIONS, targets, strict=True))
    ]
    (directory / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = (repository / "docs" / "integrations" / "inspect.md").read_text(encoding="utf-8")
    (task,) = TASK.findall(page)
    (directory / "sums.py").write_text(task)


@pytest.mark.slow
@pytest.mark.needs("fastapi")
def test_inspect_scores_the_answers_of_a_served_model(
    repository: Path,
    tmp_path: Path,
    require: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require(str(INSPECT), "make .venv/clients/installed")
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model")
    with serve_model(tmp_path / "model") as address:
        replies = [ask(address, question) for question in QUESTIONS]
        answers = [reply["choices"][0]["message"]["content"] for reply in replies]
        write_task(tmp_path, repository, answers)
        command = [INSPECT, "eval", "sums.py", "--model", "openai-api/ratchet/policy"]
        sampling = ["--temperature", "0", "--max-tokens", "8"]
        output = ["--display", "none", "--log-dir", "logs", "--log-format", "json"]
        done = subprocess.run(
            [*command, *sampling, *output],
            cwd=tmp_path,
            env=os.environ | {"RATCHET_BASE_URL": address, "RATCHET_API_KEY": "none"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = (tmp_path / "logs").glob("*.json")
    log = json.loads(path.read_text(encoding="utf-8"))
    assert log["status"] == "success"
    samples = sorted(log["samples"], key=lambda sample: sample["id"])
    assert [sample["output"]["choices"][0]["message"]["content"] for sample in samples] == answers
    for sample, reply in zip(samples, replies, strict=True):
        usage = sample["output"]["usage"]
        assert usage["input_tokens"] == reply["usage"]["prompt_tokens"]
        assert usage["output_tokens"] == reply["usage"]["completion_tokens"]
    (score,) = [score for score in log["results"]["scores"] if "mean" in score["metrics"]]
    assert score["metrics"]["mean"]["value"] == 0.5

    monkeypatch.setenv("PATH", str(INSPECT.parent), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    sampling = ["--temperature", 0, "--max-new-tokens", 8]
    done = ratchet("eval", "model", "--inspect", "sums.py", *sampling, "--out", "results")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = EvalResults.read(Path("results"))
    assert [prompt.greedy and prompt.greedy.text for prompt in results.prompts] == answers
    assert (results.accuracy.value, results.accuracy.prompts) == (0.5, 6)
    assert json.loads(Path("results", "inspect.json").read_text())["status"] == "success"
