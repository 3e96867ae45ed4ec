"""Run `ratchet runs trajectories`: write recorded rollouts in Harbor's interchange format (ATIF).

A trajectory is one JSON file. Each turn of the policy has the token ids of its prompt and of its
completion, with the log-probabilities that were recorded when it was sampled.

Source: the Agent Trajectory Interchange Format 1.8, as in the package atif 1.8.0.
"""

from __future__ import annotations

import base64
import json
import mimetypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ratchet import __version__
from ratchet.errors import DataError
from ratchet.observe.records.media import hash_content
from ratchet.observe.records.reader import Record
from ratchet.runs.run_dir import RunDirectory
from ratchet.types import Group, Message, Part, Trajectory, Turn
from ratchet.utils.atomic_files import require_empty_directory

SCHEMA = "ATIF-v1.8"
SOURCES = {"system": "system", "user": "user", "assistant": "agent"}


def export_trajectories(run: Path, folder: Path, step: int | None = None) -> int:
    """Write the recorded trajectories of a run, and return their number.

    Args:
        folder: Directory of the files, which must not exist yet, or be empty.
        step: The only step to write; None: all steps that were recorded.

    Raises:
        ConfigError: `folder` has files, or is one.
        DataError: The run has no such record, or a message has a video, which ATIF lacks, or a
            damaged medium.
    """
    require_empty_directory(folder)
    record = Record(RunDirectory(run).steps)
    steps = sorted(record.steps) if step is None else [step]
    if not steps:
        raise DataError(f"{run} has no recorded rollouts: give a run that has trained a step")
    count = 0
    for number in steps:
        for group in record.groups(number):
            for trajectory in group.trajectories:
                name = f"step-{number:08}-{count:06}"
                document = write_document(name, number, group, trajectory, folder)
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
                count += 1
    return count


def write_document(
    name: str, step: int, group: Group, trajectory: Trajectory, folder: Path
) -> dict[str, Any]:
    """Return the ATIF document of a trajectory. Images are written below `folder`.

    Args:
        name: Identifies the trajectory among those of the run.
        step: The step that trained on the trajectory.
    """
    outcome = trajectory.outcome
    extra = {
        "task": group.task.id,
        "group": group.id,
        "attempt": trajectory.attempt,
        "step": step,
        "outcome": None if outcome is None else type(outcome).__name__,
        "reward": None if outcome is None else outcome.reward,
        "temperature": trajectory.temperature,
    }
    sampled = sum(turn.end - turn.start for turn in trajectory.turns)
    return {
        "schema_version": SCHEMA,
        "session_id": f"{group.id}/{trajectory.attempt}",
        "trajectory_id": name,
        "agent": {"name": "ratchet", "version": __version__, "model_name": "policy"},
        "steps": list(_write_steps(trajectory, folder)),
        "final_metrics": {
            "total_prompt_tokens": sum(turn.start for turn in trajectory.turns),
            "total_completion_tokens": sampled,
        },
        "extra": extra,
    }


def _write_steps(trajectory: Trajectory, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the steps. The results of tools belong to the step of the policy before them."""
    messages = trajectory.messages
    n_answers = sum(message.role == "assistant" for message in messages)
    # The turns are the last answers. Those before them came with the prompt.
    turns: list[Turn | None] = [None] * (n_answers - len(trajectory.turns))
    next_turn = iter([*turns, *trajectory.turns])
    step: dict[str, Any] | None = None
    number = 0
    for message in messages:
        if message.role not in SOURCES and step is not None and step["source"] == "agent":
            results = step.setdefault("observation", {"results": []})["results"]
            results.append(_write_result(message, step, folder))
            continue
        if step is not None:
            yield step
        number += 1
        source = SOURCES.get(message.role, "user")
        content = _write_content(message, folder)
        step = {"step_id": number, "source": source, "message": content}
        if source == "agent":
            step |= _write_answer(message, next(next_turn), trajectory)
    if step is not None:
        yield step


def _write_result(message: Message, step: dict[str, Any], folder: Path) -> dict[str, Any]:
    ids = {call["tool_call_id"] for call in step.get("tool_calls", ())}
    known_id = message.tool_call_id if message.tool_call_id in ids else None
    return {"source_call_id": known_id, "content": _write_content(message, folder)}


def _write_answer(message: Message, turn: Turn | None, trajectory: Trajectory) -> dict[str, Any]:
    """Return the fields of a step that only the policy has."""
    fields: dict[str, Any] = {}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "tool_call_id": call.id,
                "function_name": call.name,
                "arguments": dict(call.arguments),
            }
            for call in message.tool_calls
        ]
    if turn is None:
        return {**fields, "is_copied_context": True}
    span = slice(turn.start, turn.end)
    fields["metrics"] = {
        "prompt_tokens": turn.start,
        "completion_tokens": turn.end - turn.start,
        "prompt_token_ids": trajectory.tokens[: turn.start].tolist(),
        "completion_token_ids": trajectory.tokens[span].tolist(),
        "logprobs": trajectory.rollout_logprobs[span].tolist(),
        "extra": {"weight_versions": trajectory.versions[span].tolist()},
    }
    return {**fields, "llm_call_count": 1}


def _write_content(message: Message, folder: Path) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str):
        return message.content
    return [
        {"type": "text", "text": part.value}
        if part.type == "text"
        else {"type": part.type, "source": _write_medium(part, folder)}
        for part in message.content
    ]


def _write_medium(part: Part, folder: Path) -> dict[str, str]:
    """Return the reference to a medium. If the part holds the file itself, write it."""
    if part.type == "video":
        raise DataError("a message has a video, which ATIF can't hold: choose another --step")
    header, _, data = part.value.partition(";base64,")
    if not data:
        media_type = mimetypes.guess_type(part.value)[0] or f"{part.type}/unknown"
        return {"media_type": media_type, "path": part.value}
    media_type = header.removeprefix("data:")
    try:
        content = base64.b64decode(data, validate=True)
    except ValueError as error:
        raise DataError(
            f"a message has a damaged {part.type} ({error}): choose another --step"
        ) from error
    # A media type may come from a server of tools, so it is not part of the file's name.
    suffix = mimetypes.guess_extension(media_type, strict=False) or ""
    path = Path("media", f"{hash_content(content)}{suffix}")
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(content)
    return {"media_type": media_type, "path": path.as_posix()}
