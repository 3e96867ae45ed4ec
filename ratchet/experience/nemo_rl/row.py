"""Play one row of a NeMo RL batch with `EpisodePlayer`, and return it as a message log.

L = tokens of the row.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ratchet.errors import DataError
from ratchet.experience.nemo_rl.attempt import MessageLogDialogue, StepFunction
from ratchet.experience.nemo_rl.environment import EnvironmentInterface
from ratchet.experience.nemo_rl.generation import get_sampling, get_weights_version
from ratchet.experience.nemo_rl.metrics import measure_sample
from ratchet.experience.nemo_rl.specs import MessageLog, as_message
from ratchet.experience.nemo_rl.tokens import TokenizerType, get_log_renderer
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.experience.rollout.episode_state import PromptCache
from ratchet.experience.seeds import derive_seed
from ratchet.types import Cancelled, Failed, Owner, Sampling, Task, Trajectory


@dataclass(frozen=True)
class RowPlayer:
    """A player of a NeMo RL batch's rows."""

    policy_generation: Any
    """Provides the sampling parameters and the version of the weights. The completions come from
    the `generator` that `play` gets."""
    tokenizer: TokenizerType
    max_seq_len: int
    max_rollout_turns: int
    greedy: bool

    async def play(
        self,
        row: int,
        state: Mapping[str, Any],
        generator: Any,
        environment: EnvironmentInterface[Any],
        step_function: StepFunction,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Play row `row` from the DatumSpec `state`, and return its final state and metrics.

        `step_function` calls `environment`. The log of `state` is not changed. The final state has
        a float32 tensor for each named part of the rewards: its sum over the turns, or NaN if the
        row failed. `reward_parts` of the metrics are the names of these parts.

        Raises:
            DataError: A part has the name of another column.
        """
        log: MessageLog = state["message_log"]
        messages = tuple(as_message(entry) for entry in log)
        # The prompt is not rendered again, because the log has its tokens.
        prompt_cache = PromptCache()
        prompt_cache.key = (list(messages), None)
        prompt_cache.tokens = concatenate_tokens(log).numpy()
        dialogue = MessageLogDialogue(
            step_function,
            raw_observations=environment.raw_observations,
            judges_cut_answers=environment.judges_cut_answers,
        )
        dialogue.begin(log, state.get("extra_env_info"), state.get("stop_strings"))
        renderer = get_log_renderer(self.tokenizer)
        prompt_cache.media = renderer.media(prompt_cache.tokens, messages)
        player = EpisodePlayer(
            generator, renderer, max_context=self.max_seq_len, max_turns=self.max_rollout_turns
        )
        task = Task(f"row/{row}", messages, tag=state["task_name"])
        (whole_trajectory,) = await player.play(
            task, dialogue, self._get_sampling(row), attempt=row, prompt_cache=prompt_cache
        )
        trajectory = _truncate(whole_trajectory, self.max_seq_len)
        metrics = measure_sample(trajectory)
        final_state = {
            **state,
            "message_log": [
                *copy.deepcopy(log),
                *_list_new_entries(trajectory, dialogue, len(log)),
            ],
            "extra_env_info": dialogue.metadata,
            "stop_strings": list(dialogue.stop_strings) or None,
            "total_reward": torch.tensor(metrics["total_reward"], dtype=torch.float32),
            "truncated": metrics["truncated"],
            "failed": _describe_failure(trajectory),
            "idx": row,
        }
        _add_reward_parts(final_state, dialogue.parts, failed=bool(metrics["failed"]))
        return final_state, {**metrics, "reward_parts": tuple(dialogue.parts)}

    def _get_sampling(self, row: int) -> Sampling:
        """Return the sampling parameters of a row.

        Their seed depends on the row and the version of the weights. So the repetitions of a prompt
        in a batch get different answers, and so do the same rows of two training steps.
        """
        sampling = get_sampling(
            self.policy_generation,
            get_log_renderer(self.tokenizer).stop_ids,
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
    missing = next(
        (i for i, entry in enumerate(log) if not isinstance(entry.get("token_ids"), Tensor)), None
    )
    if missing is not None:
        raise DataError(
            f"message_log[{missing}] has no tensor `token_ids`. Tokenise the prompt, as "
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


def _add_reward_parts(
    final_state: dict[str, Any], parts: Mapping[str, float], *, failed: bool
) -> None:
    for name, value in parts.items():
        if name in final_state:
            raise DataError(
                f"an environment's reward has a part '{name}', and the batch has a column of that "
                "name. Rename one"
            )
        final_state[name] = torch.tensor(math.nan if failed else value, dtype=torch.float32)


def _truncate(trajectory: Trajectory, length: int) -> Trajectory:
    """Return the first `length` tokens of the trajectory.

    Only tokens of the environment are cut, because the policy's turns end within `length`.
    """
    columns = ("tokens", "owner", "trainable", "rollout_logprobs", "versions")
    cut_columns = {name: getattr(trajectory, name)[:length] for name in columns}
    return replace(trajectory, log_kept_mass=None, routes=None, allowed=None, **cut_columns)


def _list_new_entries(
    trajectory: Trajectory, dialogue: MessageLogDialogue, n_prompt_messages: int
) -> MessageLog:
    """Return the log's entries after the first `n_prompt_messages`.

    The message that ended the episode has no tokens, because the policy did not read it.
    """
    answers = [
        message.text
        for message in trajectory.messages[n_prompt_messages:]
        if message.role == "assistant"
    ]
    observations = dialogue.log[n_prompt_messages + 1 :: 2]
    spans = [(turn.start, turn.end) for turn in trajectory.turns]
    # If the environment failed at the last answer, that answer has no turn.
    if len(spans) < len(answers):
        last_end = spans[-1][1] if spans else 0
        positions = np.flatnonzero(trajectory.owner[last_end:] == Owner.POLICY) + last_end
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
            observation_end = spans[turn + 1][0] if turn + 1 < len(spans) else len(trajectory)
            tokens = torch.from_numpy(trajectory.tokens[end:observation_end].copy())
            entries.append({**observations[turn], "token_ids": tokens})
    return entries


def _describe_failure(trajectory: Trajectory) -> str | None:
    """Return the description of a failure, or None."""
    outcome = trajectory.outcome
    if isinstance(outcome, Failed):
        return f"{outcome.kind}: {outcome.detail}"
    return f"cancelled: {outcome.reason}" if isinstance(outcome, Cancelled) else None
