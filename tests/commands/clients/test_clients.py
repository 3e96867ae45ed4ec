"""Official clients, unchanged, against `ratchet serve`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from command_line import ratchet

from ratchet.config.model_shape.presets import get_preset
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.evals.results import EvalResults
from ratchet.models.load import init_policy

ROOT = Path(__file__).parents[3]
CLIENTS = ROOT / ".venv" / "clients" / "bin" / "python"
TEMPLATE = (
    "{%- if tools -%}<system>{{ tools | tojson }}{%- endif -%}"
    "{%- for message in messages -%}<{{ message.role }}>{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] -%}"
    "\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{%- endfor -%}"
    "{%- if message.role == 'assistant' -%}{{ eos_token }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)
PAGE = ROOT / "docs" / "integrations" / "lm-evaluation-harness.md"
TASK = re.compile(r"```yaml\n# my_task.yaml\n(.*?)```", re.DOTALL)  # in the page


def write_model(path: Path, scale: float = 8.0) -> None:
    """Write a model whose weights are scaled: by 8, its likeliest tokens differ by half a nat."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    shape = get_preset(
        "tiny", vocab_size=tokenizer.vocab_size, n_layers=1, hidden_size=32, max_positions=2048
    )
    policy = init_policy(shape, seed=3)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(scale)
    policy.save(path)
    tokenizer.save(path)


def write_task(path: Path) -> None:
    rows = [
        {"question": f"{number}+1=", "choices": [f" {number + 1}", " 77", " no"], "label": 0}
        for number in range(5)
    ]
    (path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (task,) = TASK.findall(PAGE.read_text(encoding="utf-8"))
    (path / "sums.yaml").write_text(task.replace("sums.jsonl", str(path / "sums.jsonl"), 1))


@contextmanager
def serve_model(model: Path, *options: str) -> Iterator[str]:
    """Serve a model with `ratchet serve`; yield the base URL."""
    command = [sys.executable, "-m", "ratchet", "serve", str(model), "--port", "0", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            assert server.stdout is not None
            yield next(
                match[0] for line in server.stdout if (match := re.search(r"http://\S+/v1", line))
            )
        finally:
            server.terminate()


@pytest.mark.slow
def test_official_clients_get_tokens_and_likelihoods(
    tmp_path: Path, require: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenEnv's check of an endpoint, litellm, and lm-evaluation-harness, whose likelihoods equal
    those that it computes itself with transformers."""
    require(str(CLIENTS), "make .venv/clients/installed")
    model, tasks = tmp_path / "model", tmp_path / "tasks"
    model.mkdir()
    tasks.mkdir()
    write_model(model)
    write_task(tasks)
    with serve_model(model) as address:
        asked = subprocess.run(
            [CLIENTS, Path(__file__).with_name("ask.py"), address, str(model), str(tasks)],
            capture_output=True,
            text=True,
            timeout=500,
            cwd=tmp_path,
            check=False,
        )
    assert asked.returncode == 0, asked.stderr[-3000:]
    answers = json.loads(asked.stdout.splitlines()[-1])
    assert answers["openenv"] == {
        "capture_level": "tokens",
        "logprobs_mode": "processed",
        "param_fixes": [],
    }
    assert answers["litellm"]["prompt_token_ids"]
    assert len(answers["litellm"]["token_ids"]) in range(1, 5)
    served, reference = answers["lm_eval"]["local-completions"], answers["lm_eval"]["hf"]
    assert len(served) == 5
    for served_values, values in zip(served, reference, strict=True):
        assert served_values == pytest.approx(values, abs=1e-4)

    monkeypatch.setenv("PATH", str(CLIENTS.parent), prepend=os.pathsep)
    out = tmp_path / "results"
    done = ratchet("eval", model, "num_fewshot=0", "--lm-eval", tasks / "sums.yaml", "--out", out)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = EvalResults.read(out)
    choices = [max(range(3), key=values.__getitem__) for values in reference]
    rewards = [prompt.greedy and prompt.greedy.reward for prompt in results.prompts]
    assert rewards == [float(choice == 0) for choice in choices]
    assert len((out / "lm_eval.jsonl").read_text().splitlines()) == 5
