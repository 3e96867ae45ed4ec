"""A reward computed by an HTTP endpoint, which gets the attempts of a group in one request."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ratchet.errors import DataError
from ratchet.protocols import Reward
from ratchet.rewards.base import answer_text
from ratchet.rewards.llm.http_client import Endpoint, EndpointConfig, Url
from ratchet.types import (
    Cancelled,
    Failed,
    Message,
    Outcome,
    Scored,
    Task,
    Trajectory,
    Truncated,
    is_number_not_bool,
)


class RemoteConfig(EndpointConfig):
    """The reward that an HTTP endpoint of yours returns."""

    builds: ClassVar[str] = "ratchet.rewards.remote:Remote"

    url: Url
    """Address to which the attempts of a group are posted."""


class Remote(Reward):
    """A reward that an HTTP endpoint computes.

    It posts {"rows": [{"prompt", "response", "answer", "messages", "meta", "tag", "truncated"}]}
    and reads {"results": [{"reward": number, "parts": {name: number}} or {"error": text}]}, in
    order. "parts" may be left out.
    """

    def __init__(self, config: RemoteConfig) -> None:
        self._endpoint = Endpoint(config.url, config)

    async def score(self, trajectories: Sequence[Trajectory], task: Task) -> Sequence[Outcome]:
        """Return the outcomes, with Failed("reward") for attempts that could not be judged.

        If the endpoint's response is unusable, all attempts sent to it fail.
        """
        outcomes: list[Outcome] = [_get_initial_outcome(trajectory) for trajectory in trajectories]
        indices = [
            i for i, outcome in enumerate(outcomes) if not isinstance(outcome, Failed | Cancelled)
        ]
        if not indices:
            return outcomes
        try:
            response = await self._endpoint.post(
                {"rows": [_make_row(trajectories[i], task) for i in indices]}
            )
            judged_outcomes = [
                _parse_result(result, trajectories[i])
                for i, result in zip(indices, _parse_results(response, len(indices)), strict=True)
            ]
        # Any error fails only these attempts: the endpoint and the content of `meta` are user code.
        except Exception:
            judged_outcomes = [
                Failed("reward", f"remote, task '{task.id}':\n{traceback.format_exc()}")
            ] * len(indices)
        for i, outcome in zip(indices, judged_outcomes, strict=True):
            outcomes[i] = outcome
        return outcomes


def _get_initial_outcome(trajectory: Trajectory) -> Outcome:
    """Return Failed or Cancelled for an attempt that can't be judged.

    Any other outcome is replaced after judging.
    """
    if isinstance(trajectory.outcome, Failed | Cancelled):
        return trajectory.outcome
    if not any(message.role == "assistant" for message in trajectory.messages):
        return Failed("reward", "remote: the attempt has no assistant message to judge")
    return trajectory.outcome or Scored(0.0)


def _make_row(trajectory: Trajectory, task: Task) -> dict[str, Any]:
    return {
        "prompt": task.messages[-1].text
        if len(task.messages) == 1
        else [_encode_message(message) for message in task.messages],
        "response": answer_text(trajectory),
        "answer": task.answer,
        "messages": [_encode_message(message) for message in trajectory.messages],
        "meta": dict(task.meta),
        "tag": task.tag,
        "truncated": isinstance(trajectory.outcome, Truncated),
    }


def _encode_message(message: Message) -> dict[str, Any]:
    encoded: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.tool_calls:
        encoded["tool_calls"] = [
            {"id": c.id, "name": c.name, "arguments": dict(c.arguments)} for c in message.tool_calls
        ]
    return encoded


def _parse_results(response: Any, n_results: int) -> list[Any]:
    results = response.get("results") if isinstance(response, Mapping) else None
    if not isinstance(results, list) or len(results) != n_results:
        raise DataError(
            f'the endpoint must answer {{"results": [...]}} with {n_results} results, not '
            f"{response!r:.200}"
        )
    return results


def _parse_result(result: Any, trajectory: Trajectory) -> Outcome:
    if isinstance(result, Mapping) and result.get("error") is not None:
        return Failed("reward", f"remote: {str(result['error'])[:2000]}")
    reward: Any = result.get("reward") if isinstance(result, Mapping) else None
    parts: Any = result.get("parts") or {"remote": reward} if isinstance(result, Mapping) else None
    if not isinstance(parts, Mapping) or not all(
        is_number_not_bool(value) for value in (reward, *parts.values())
    ):
        return Failed(
            "reward",
            f"remote: a result must hold a finite reward, and finite parts, not {result!r:.200}",
        )
    outcome_type = Truncated if isinstance(trajectory.outcome, Truncated) else Scored
    return outcome_type(float(reward), {str(name): float(value) for name, value in parts.items()})
