"""Runs as directories, without training: two prompts a step, four attempts each, a tool, a failure
and a cut-off answer."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.evals.results import AttemptResult, EvalResults, PromptResult
from ratchet.experience.sources.prompt_ledger import PromptLedger
from ratchet.observe.records.reader import INDEX, RecordFile, StepFacts
from ratchet.observe.records.schema import SCHEMA
from ratchet.observe.sinks import JsonlSink
from ratchet.runs.run_dir import RunDirectory

GROUPS, ATTEMPTS = 2, 4
CONFIG = {
    "name": "made",
    "seed": 0,
    "tokenizer": {"kind": "bytes"},
    "stages": [{"name": "rl", "optimizer": {"lr": 1e-3}}],
}


def make_run(
    path: Path, *, steps: int = 6, lr: float = 1e-3, differs_from: int = 99, say: str = "good"
) -> RunDirectory:
    """differs_from: the step from which on rewards are others. say: what the policy answers."""
    directory = RunDirectory(path)
    path.mkdir(parents=True)
    directory.write_or_check_config({**CONFIG, "stages": [{"name": "rl", "optimizer": {"lr": lr}}]})
    grow(directory, range(1, steps + 1), differs_from=differs_from, say=say)
    directory.sentinels.mkdir()
    alarm = {"step": 3, "sentinel": "entropy", "message": f"step 3: {say}", "history": []}
    (directory.sentinels / "step-00000003-entropy.json").write_text(json.dumps(alarm))
    ledger = PromptLedger(directory.ledger)
    ledger.note("issued", ["rl/0", "rl/1", "rl/2"], version=0)
    ledger.note("trained", ["rl/0"], step=0)
    ledger.close()
    return directory


def grow(
    directory: RunDirectory, steps: Iterable[int], *, differs_from: int = 99, say: str = "good"
) -> None:
    """Adds steps to the metrics, and a file to the record."""
    steps = list(steps)
    sink = JsonlSink(directory.metrics, keep_through=steps[0] - 1)
    for step in steps:
        sink.write(step, metrics_of(step, other=step >= differs_from))
    sink.close()
    rows = [row for step in steps for row in rows_of(step, other=step >= differs_from, say=say)]
    write_record(directory.steps, steps, rows)


def metrics_of(step: int, *, other: bool) -> dict[str, float | None]:
    reward = step / 10 + (0.05 if other else 0.0)
    return {
        "rollout/reward": reward,
        "rollout/trained_tokens": 40.0,
        "policy/loss": None if step == 2 else math.cos(step),
        "policy/policy_gradient/clipped": 0.25,
        "policy/entropy/entropy": 1 / step,
        "eval/accuracy": step / 10,
        "time/step_s": 1.0,
        "time/sample_s": 0.5,
        "time/update_s": 0.25,
        "time/samples_per_s": 10.0 * step,
        "time/mfu": 0.25,
        "system/rss_gib": 1.0 + step,
        "system/disk_used_share": 0.5,
    }


def write_record(directory: Path, steps: list[int], rows: list[dict[str, Any]]) -> None:
    directory.mkdir(exist_ok=True)
    path = directory / f"{steps[0]:08d}-{steps[-1]:08d}.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
    each = len(rows) // len(steps)
    facts = tuple(
        StepFacts(step, "rl", each, GROUPS, GROUPS, {"policy": f"weights {step}"}) for step in steps
    )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with (directory / INDEX).open("a") as index:
        index.write(RecordFile(path.name, path.stat().st_size, digest, facts).line())


def rows_of(step: int, *, other: bool, say: str) -> list[dict[str, Any]]:
    """Group 0 has rewards 1, 0, none (failed), 0 and a cut-off answer without a loss; in group 1
    all are equal."""
    rows = []
    for group in range(GROUPS):
        for attempt in range(ATTEMPTS):
            reward = float(other) if group else (1.0, 0.0, None, 0.5 if other else 0.0)[attempt]
            outcome = (
                "failed"
                if reward is None
                else "truncated"
                if attempt == 3 and not group
                else "scored"
            )
            rows.append(row_of(step, group, attempt, outcome, reward, f"{say} {step}.{attempt}"))
    return rows


def row_of(
    step: int, group: int, attempt: int, outcome: str, reward: float | None, answer: str
) -> dict[str, Any]:
    prompt, ids = byte_tokenizer().encode(f"add {group}"), byte_tokenizer().encode(answer)
    written, before = len(ids), len(prompt)
    trains = outcome == "scored"
    advantage = None if not trains else 0.0 if group else 1.0 - 2 * attempt
    messages = [
        message("system", "be brief"),
        message("user", f"add {group}"),
        message(
            "assistant",
            "",
            calls=[
                {"id": "c1", "name": "calculator", "arguments": json.dumps({"sum": [1, group]})}
            ],
        ),
        message("tool", "the tool says 7", answers="c1"),
        message("assistant", answer),
    ]
    turns = [
        {"start": before, "end": before + 1, "reward": 0.25, "state_key": "", "terminated": False}
    ]
    turns.append(
        {
            "start": before + 1,
            "end": before + written,
            "reward": None,
            "state_key": "",
            "terminated": True,
        }
    )
    lists: dict[str, Any] = {
        "tokens": prompt + ids,
        "owner": [0] * before + [1] * written,
        "trainable": [False] * before + [True] * written,
        "rollout_logprobs": [0.0] * before + [-0.5 * (i % 4) for i in range(written)],
        "versions": [-1] * before + [step - 1] * written,
    }
    if outcome != "failed":
        lists |= {
            "trained": [False] * before + [trains] * written,
            "old_logprobs": [0.0] * before + [-0.5 * (i % 4) + 0.1 for i in range(written)],
            "advantages": [0.0] * before + [advantage or 0.0] * written,
            "weights": [0.0] * before + [0.01 if trains else 0.0] * written,
        }
    return {
        "step": step,
        "stage": "rl",
        "group_index": group,
        "row": attempt,
        "attempt": attempt,
        "use": "train",
        "group": f"rl/{2 * step + group}",
        "task": f"sums/{group}",
        "environment": "sums",
        "tag": ("easy", "hard")[group],
        "task_seed": 0,
        "outcome": outcome,
        "truncated": outcome == "truncated",
        "reward": reward,
        "advantage": advantage,
        "failure": "timeout" if outcome == "failed" else None,
        "failure_detail": "Traceback" if reward is None else None,
        "weight": 0.01 * written,
        "temperature": 1.0,
        "length": before + written,
        "generated_tokens": written,
        "trained_tokens": written if trains else 0,
        "policy_turns": 2,
        "oldest_version": step - 1,
        "newest_version": step - 1,
        "rollout_logprob": -1.0,
        "answer": json.dumps(group),
        "messages": messages,
        "prompt": messages[:2],
        "reward_parts": {"right": reward or 0.0, "form": 0.0},
        "metrics": {"turns": 2.0},
        "turns": turns,
        **lists,
    }


def write_results(
    directory: RunDirectory, name: str, answers: Iterable[tuple[str, str, float | None, str]]
) -> None:
    """Writes an evaluation: (task, prompt, reward, text) of each greedy attempt."""
    prompts = [
        PromptResult(
            task,
            "easy",
            f"digest of {task}",
            False,
            AttemptResult("failed" if reward is None else "scored", reward, None, 1, text),
            prompt=prompt,
        )
        for task, prompt, reward, text in answers
    ]
    EvalResults(tuple(prompts)).write(directory.evals / name)


def message(
    role: str,
    content: str,
    *,
    calls: list[dict[str, str]] | None = None,
    answers: str | None = None,
) -> dict[str, Any]:
    return {
        "role": role,
        "content": content,
        "parts": None,
        "tool_calls": calls or [],
        "tool_call_id": answers,
    }
