"""Play one row of a NeMo RL batch with `EpisodePlayer`, and return it as a message log.

L = tokens of the row.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ratchet.errors import DataError
from ratchet.experience.nemo_rl.attempt import Ask, MessageLogDialogue
from ratchet.experience.nemo_rl.generation import get_sampling, get_weights_version
from ratchet.experience.nemo_rl.metrics import measure_sample
from ratchet.experience.nemo_rl.specs import MessageLog, as_message
from ratchet.experience.nemo_rl.tokens import LogRenderer
from ratchet.experience.rollout.episode import EpisodePlayer, PromptMemo
from ratchet.experience.seeds import derive_seed
from ratchet.types import Cancelled, Failed, Owner, Sampling, Task, Trajectory


@dataclass(frozen=True)
class RowPlayer:
    """A player of a NeMo RL batch's rows.

    policy_generation: has the sampling parameters and the version of the weights. `play` generates
      with its own argument `generator`.
    """

    policy_generation: Any
    renderer: LogRenderer
    max_seq_len: int
    max_rollout_turns: int
    greedy: bool

    async def play(
        self, row: int, state: Mapping[str, Any], generator: Any, ask: Ask
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Play row `row` from the DatumSpec `state`, and return its final state and metrics.

        The log of `state` is not changed.
        """
        log: MessageLog = state["message_log"]
        messages = tuple(as_message(entry) for entry in log)
        # The prompt is not rendered again: its tokens are those of the log.
        memo = PromptMemo()
        memo.key = (list(messages), None)
        memo.tokens = concatenate_tokens(log).numpy()
        dialogue = MessageLogDialogue(ask)
        dialogue.begin(log, state.get("extra_env_info"), state.get("stop_strings"))
        player = EpisodePlayer(
            generator, self.renderer, max_context=self.max_seq_len, max_turns=self.max_rollout_turns
        )
        task = Task(f"row/{row}", messages, tag=state["task_name"])
        (played,) = await player.play(task, dialogue, self._sampling(row), attempt=row, memo=memo)
        trajectory = _truncate(played, self.max_seq_len)
        metrics = measure_sample(trajectory)
        final = {
            **state,
            "message_log": [
                *copy.deepcopy(log),
                *_list_new_entries(trajectory, dialogue, len(log)),
            ],
            "extra_env_info": dialogue.metadata,
            "stop_strings": list(dialogue.stop_strings) or None,
            "total_reward": torch.tensor(metrics["total_reward"], dtype=torch.float32),
            "truncated": metrics["truncated"],
            "failed": _failure(trajectory),
            "parts": {} if metrics["failed"] else dict(dialogue.parts),
        }
        return final, metrics

    def _sampling(self, row: int) -> Sampling:
        """Return the sampling parameters of a row.

        Its seed depends on the row and the version of the weights, so repetitions of a prompt
        differ, and so do two training steps.
        """
        sampling = get_sampling(
            self.policy_generation,
            self.renderer.stop_ids,
            max_new_tokens=self.max_seq_len,
            greedy=self.greedy,
        )
        seed = derive_seed(sampling.seed, get_weights_version(self.policy_generation), row)
        return replace(sampling, seed=seed)


def concatenate_tokens(log: MessageLog) -> Tensor:
    """Return int64 [L]: the tokens of all messages, end to end.

    Raises:
        DataError: A message has no tokens.
    """
    without = next(
        (i for i, entry in enumerate(log) if not isinstance(entry.get("token_ids"), Tensor)), None
    )
    if without is not None:
        raise DataError(
            f"message_log[{without}] has no tensor `token_ids`. Tokenise the prompt, as "
            "`make_datum` does"
        )
    return (
        torch.cat([entry["token_ids"].to("cpu", torch.int64) for entry in log])
        if log
        else torch.zeros(0, dtype=torch.int64)
    )


def make_answer_entry(content: str, tokens: np.ndarray, logprobs: np.ndarray) -> dict[str, Any]:
    """Return an answer of the policy as an entry of a log.

    Log-probabilities are left out if any is NaN (unknown).
    """
    entry: dict[str, Any] = {
        "role": "assistant",
        "content": content,
        "token_ids": torch.from_numpy(tokens.copy()),
    }
    if not np.isnan(logprobs).any():
        entry["generation_logprobs"] = torch.from_numpy(logprobs.copy())
    return entry


def _truncate(trajectory: Trajectory, length: int) -> Trajectory:
    """Return the first `length` tokens of the trajectory.

    Only tokens of the environment are cut, because the policy's turns end before.
    """
    columns = ("tokens", "owner", "trainable", "rollout_logprobs", "versions")
    shorter = {name: getattr(trajectory, name)[:length] for name in columns}
    return replace(trajectory, log_kept_mass=None, routes=None, **shorter)


def _list_new_entries(
    trajectory: Trajectory, dialogue: MessageLogDialogue, prompt: int
) -> MessageLog:
    """Return the log's entries after the first `prompt` ones.

    The message that ended the episode has no tokens, because the policy did not read it.
    """
    answers = [
        message.text for message in trajectory.messages[prompt:] if message.role == "assistant"
    ]
    observations = dialogue.log[prompt + 1 :: 2]
    spans = [(turn.start, turn.end) for turn in trajectory.turns]
    # If the environment failed at the last answer, that answer has no turn.
    if len(spans) < len(answers):
        after = spans[-1][1] if spans else 0
        positions = np.flatnonzero(trajectory.owner[after:] == Owner.POLICY) + after
        start = int(positions[0]) if len(positions) else len(trajectory)
        spans.append((start, len(trajectory)))
    entries: MessageLog = []
    for turn, (start, end) in enumerate(spans):
        entries.append(
            make_answer_entry(
                answers[turn], trajectory.tokens[start:end], trajectory.rollout_logprobs[start:end]
            )
        )
        if turn < len(observations):
            until = spans[turn + 1][0] if turn + 1 < len(spans) else len(trajectory)
            tokens = torch.from_numpy(trajectory.tokens[end:until].copy())
            entries.append({**observations[turn], "token_ids": tokens})
    return entries


def _failure(trajectory: Trajectory) -> str | None:
    """Return the description of a failure, or None."""
    outcome = trajectory.outcome
    if isinstance(outcome, Failed):
        return f"{outcome.kind}: {outcome.detail}"
    return f"cancelled: {outcome.reason}" if isinstance(outcome, Cancelled) else None
