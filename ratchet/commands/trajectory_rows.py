"""Run `ratchet data trajectories`: make rows for training of recorded trajectories.

Each answer of the policy becomes a row: the messages up to it, and the token ids and the
log-probabilities of its prompt and of itself where the trajectory has them.

Sources: the Agent Trajectory Interchange Format 1.8, as in the package atif 1.8.0, and
`TrainingTrace` of OpenEnv 0.10.0. The models here read the fields that rows need.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ratchet.data.chat.messages import read_messages, read_tools
from ratchet.data.chat.thinking import mark_thought
from ratchet.errors import ConfigError, DataError
from ratchet.utils.atomic_files import atomic_path
from ratchet.utils.safe_read import read_json

ROLES = {"system": "system", "user": "user", "agent": "assistant"}
TokenIds = list[Annotated[int, Field(ge=0)]]
T = TypeVar("T", bound=BaseModel)


class _Document(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Source(_Document):
    path: str


class _Part(_Document):
    type: Literal["text", "image", "audio"]
    text: str | None = None
    source: _Source | None = None

    @model_validator(mode="after")
    def _check_value(self) -> Self:
        if (self.text if self.type == "text" else self.source) is None:
            raise ValueError(f"has no {'text' if self.type == 'text' else 'source'}")
        return self


_Content = str | list[_Part]


class _Call(_Document):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class _Result(_Document):
    source_call_id: str | None = None
    content: _Content | None = None


class _Observation(_Document):
    results: list[_Result]


class _Metrics(_Document):
    prompt_token_ids: TokenIds | None = None
    completion_token_ids: TokenIds | None = None
    logprobs: list[float] | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.logprobs is not None and self.completion_token_ids is not None:
            _check_length("logprobs", len(self.logprobs), len(self.completion_token_ids))
        return self


class _Step(_Document):
    source: Literal["system", "user", "agent"]
    message: _Content
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    observation: _Observation | None = None
    metrics: _Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None


class _Agent(_Document):
    tool_definitions: list[dict[str, Any]] | None = None


class _Trajectory(_Document):
    trajectory_id: str | None = None
    agent: _Agent
    steps: Annotated[list[_Step], Field(min_length=1)]
    extra: dict[str, Any] | None = None


class _Turn(_Document):
    node_id: str
    prompt_token_ids: TokenIds
    completion_token_ids: TokenIds
    per_token_logps: list[float]
    loss_mask: list[Literal[0, 1]]
    request: dict[str, Any]
    response: dict[str, Any]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        n_prompt, n_sampled = len(self.prompt_token_ids), len(self.completion_token_ids)
        _check_length("per_token_logps", len(self.per_token_logps), n_sampled)
        _check_length("loss_mask", len(self.loss_mask), n_prompt + n_sampled)
        if any(self.loss_mask[:n_prompt]):
            raise ValueError("loss_mask trains tokens of the prompt")
        return self


class _Trace(_Document):
    schema_version: Literal[1]
    turns: Annotated[list[_Turn], Field(min_length=1)]


def _check_length(name: str, actual: int, expected: int) -> None:
    if actual != expected:
        raise ValueError(f"{name} has {actual} values for {expected} tokens")


def write_rows(source: Path, out: Path) -> int:
    """Write the rows of trajectories as JSON Lines, and return their number.

    Args:
        source: A JSON file with a trajectory, or a directory of such files.

    Raises:
        ConfigError: There is no file to read, or `out` exists or can't be written.
        DataError: A file is not a trajectory, or has a field that can't be read.
    """
    if not source.exists():
        raise ConfigError(f"{source} does not exist: give a trajectory, or a directory of them")
    if out.exists():
        raise ConfigError(f"--out {out} exists already: choose another file, or remove it")
    paths = sorted(source.glob("*.json")) if source.is_dir() else [source]
    if not paths:
        raise ConfigError(f"{source} has no .json files: give a directory of trajectories")
    lines = (_write_line(row, path) for path in paths for row in read_rows(path))
    n_rows = 0
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(out) as partial_path:
            with partial_path.open("wb") as file:
                for line in lines:
                    file.write(line)
                    n_rows += 1
            if not n_rows:
                raise DataError(f"{source}: the trajectories have no answer that may train")
    except OSError as error:
        raise ConfigError(
            f"--out {out} can't be written ({error.strerror}): choose another file"
        ) from error
    return n_rows


def _write_line(row: dict[str, Any], path: Path) -> bytes:
    """Return a row as a line of JSON. Raise DataError for NaN, infinities and broken text."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError as error:
        raise DataError(
            f"{path}: a text holds {error.object[error.start]!a}, half of a character: remove it, "
            "or leave the trajectory out"
        ) from None
    except ValueError as error:
        raise DataError(f"{path}: it has a value that no row can have: {error}") from error


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file: an ATIF trajectory, or a TrainingTrace.

    Raises:
        DataError: The file is neither, or has a field that can't be read.
    """
    try:
        document = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}") from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version == 1:
        yield from _list_trace_rows(_validate(_Trace, document, path), path)
    elif isinstance(version, str) and version.startswith("ATIF-v1."):
        yield from _list_atif_rows(_validate(_Trajectory, document, path), path)
    else:
        raise DataError(
            f"{path}: schema_version={version!r:.40} is neither ATIF-v1.x nor 1 (OpenEnv's "
            "TrainingTrace): give trajectories of these formats"
        )


def _validate(kind: type[T], document: dict[str, Any], path: Path) -> T:
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        # If no member of a union fits, the one that was read furthest is the one that was meant.
        deepest = max(errors, key=lambda details: len(details["loc"]))
        # The path of an error in a union has the members' names too ("str", "list[_Part]").
        path_parts = [part for part in deepest["loc"] if part != "str"]
        names = [part for part in path_parts if isinstance(part, int) or "[" not in part]
        place = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names)
        reason = deepest["msg"].removeprefix("Value error, ")
        raise DataError(f"{path}: {place.lstrip('.') or 'the file'}: {reason}") from error


def _list_atif_rows(trajectory: _Trajectory, path: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each answer. Those copied from an earlier trajectory are context alone."""
    shared: dict[str, Any] = {}
    if trajectory.agent.tool_definitions:
        where = f"{path}: agent.tool_definitions"
        shared["tools"] = list(read_tools(trajectory.agent.tool_definitions, where))
    for name in ("task", "reward"):
        if (value := (trajectory.extra or {}).get(name)) is not None:
            shared[name] = value
    messages: list[dict[str, Any]] = []
    for step in trajectory.steps:
        messages.append(_write_message(step))
        is_sampled = step.source == "agent" and step.llm_call_count != 0
        if is_sampled and not step.is_copied_context:
            # The metrics of several calls are summed up, so their tokens are no answer's.
            metrics = step.metrics if step.llm_call_count in (None, 1) else None
            tokens = metrics.model_dump(exclude_none=True) if metrics else {}
            yield {"messages": list(messages), **shared, **tokens}
        for result in step.observation.results if step.observation else ():
            message = {"role": "tool", "content": _write_content(result.content or "")}
            call_id = {"tool_call_id": result.source_call_id} if result.source_call_id else {}
            messages.append(message | call_id)


def _write_message(step: _Step) -> dict[str, Any]:
    content = _write_content(step.message)
    if step.reasoning_content:
        thought = mark_thought(step.reasoning_content)
        is_text = isinstance(content, str)
        content = thought + content if is_text else [{"type": "text", "text": thought}, *content]
    message: dict[str, Any] = {"role": ROLES[step.source], "content": content}
    if step.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.tool_call_id,
                "type": "function",
                "function": {"name": call.function_name, "arguments": json.dumps(call.arguments)},
            }
            for call in step.tool_calls
        ]
    return message


def _write_content(content: _Content) -> str | list[dict[str, Any]]:
    """Return the content of a row's message. Media are named by the paths that the file has."""
    if isinstance(content, str):
        return content
    return [
        {"type": part.type, part.type: part.source.path if part.source else part.text}
        for part in content
    ]


def _list_trace_rows(trace: _Trace, path: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each turn that has a token to train."""
    for index, turn in enumerate(trace.turns):
        where = f"{path}: turns[{index}]"
        mask = turn.loss_mask[len(turn.prompt_token_ids) :]
        if not any(mask):
            continue
        try:
            answer = turn.response["choices"][0]["message"]
        except (KeyError, IndexError, TypeError) as error:
            raise DataError(f"{where}.response has no choices[0].message") from error
        history = turn.request.get("messages")
        conversation = [*(history if isinstance(history, list) else ()), answer]
        conversation = [_drop_nulls(message) for message in conversation]
        read_messages(conversation, f"{where}.request.messages")  # raises DataError
        row: dict[str, Any] = {"messages": conversation}
        if turn.request.get("tools"):
            row["tools"] = list(read_tools(turn.request["tools"], f"{where}.request.tools"))
        yield row | {
            "prompt_token_ids": turn.prompt_token_ids,
            "completion_token_ids": turn.completion_token_ids,
            "logprobs": turn.per_token_logps,
            "completion_mask": mask,
        }


def _drop_nulls(message: Any) -> Any:
    """Return a message of a request without the fields that are null or empty."""
    if not isinstance(message, dict):
        return message
    return {key: value for key, value in message.items() if value or key in ("role", "content")}
