"""Play groups with environments of Atropos, which play all attempts of a group in one call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ratchet.data.chat.task_variables import get_task_renderer
from ratchet.errors import ConfigError, DataError
from ratchet.experience.atropos.policy_server import PolicyServer
from ratchet.experience.atropos.scored_group import (
    ScoredSequence,
    read_group,
    select_trainable,
    take_strand,
)
from ratchet.experience.openai_proxy.session import AgentSession
from ratchet.experience.openai_proxy.strands import AgentStrand, make_trajectories
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.experience.rollout.failures import is_retryable
from ratchet.experience.rollout.manager import AttemptRows, RolloutManager
from ratchet.experience.seeds import derive_seed
from ratchet.types import Failed, Group, Outcome, Sampling, Task, Truncated
from ratchet.utils.tracer import ATTEMPT_TRACK, span
from ratchet.utils.user_code import UserCodeFailed, run_guarded

STOP_S = 5.0  # longest wait for the end of an environment that is cancelled
PROBE = "Count 12,345 words.\n\tDone: {'x': [1.5]}"
# What reading a malformed group may raise.
FLAWS = (DataError, TypeError, ValueError, OverflowError, AttributeError)


class AtroposManager(RolloutManager):
    """A manager that lets the environment play whole groups, and judges their attempts.

    Raises ConfigError if the recipe has keys for attempts that are played one by one, or if the
    environment's tokenizer is not the policy's.
    """

    def __init__(
        self, player: Any, new_environment: Callable[[], Any], *args: Any, **keys: Any
    ) -> None:
        super().__init__(player, new_environment, *args, **keys)
        if not isinstance(player, EpisodePlayer) or player.history_window is not None:
            raise ConfigError(
                "environment.kind=atropos plays by itself. Remove agent and rollouts.history_window"
            )
        self._limits, self._environment = player, new_environment()
        self._tokenizer = self._environment.items.inner.tokenizer
        ids = list(self._tokenizer.encode(PROBE, add_special_tokens=False))
        if ids != list(player.renderer.tokenizer.encode(PROBE)):
            raise ConfigError(
                "the environment's tokenizer gives other token ids than the policy's. Set "
                "environment.config.tokenizer_name to the policy's tokenizer"
            )

    async def group(
        self,
        task: Task,
        sampling: Sampling,
        *,
        group_id: str,
        attempts: int,
        greedy: bool = False,
        redundant: int = 0,
    ) -> Group:
        """Play a group in one call of the environment, and judge it.

        A failure of the environment fails all attempts. A sequence that can't be trained on fails
        its own attempt.
        """
        if redundant:
            raise ConfigError(
                "environment.kind=atropos plays whole groups. Set rollouts.redundant_attempts=0"
            )
        self.n_playing += attempts
        try:
            seeded = sampling.seeded(derive_seed(sampling.seed, group_id, "group"))
            with span(ATTEMPT_TRACK, group_id):
                rows = await self._play_with_retries(task, seeded, attempts)
                if greedy:
                    greedy_sampling = replace(seeded, temperature=0.0)
                    (baseline,) = await self._play_with_retries(task, greedy_sampling, 1)
                    rows.append([replace(row, use="baseline") for row in baseline])
            judged = await self._judge(task, rows)
        finally:
            self.n_playing -= attempts
        if self.on_group_end is not None:
            self.on_group_end(attempts)
        return Group(group_id, task, tuple(row for attempt in judged for row in attempt))

    async def _play_with_retries(
        self, task: Task, sampling: Sampling, attempts: int
    ) -> list[AttemptRows]:
        """Play a group again while all of its attempts fail for reasons that may pass."""
        rows = await self._play_group(task, sampling, attempts, 0)
        for retry in range(1, self.retries + 1):
            if not all(is_retryable(attempt[-1].outcome) for attempt in rows):
                break
            rows = await self._play_group(task, sampling, attempts, retry)
        return rows

    async def _play_group(
        self, task: Task, sampling: Sampling, attempts: int, retry: int
    ) -> list[AttemptRows]:
        limits = self._limits
        session = AgentSession(
            limits.generator,
            get_task_renderer(limits.renderer, task),
            sampling,
            max_context=limits.max_context,
            max_turns=limits.max_turns * attempts,
        )
        server = PolicyServer(session, self._environment.config.ignore, self._tokenizer)
        playing = asyncio.ensure_future(
            run_guarded(lambda: self._environment.play_group(task, server, attempts))
        )
        sequences: Sequence[ScoredSequence] = ()
        outcome: Outcome | None = None
        try:
            waited_for = {playing, session.ended}
            await asyncio.wait(
                waited_for, timeout=limits.timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if session.ended.done():
                outcome = session.ended.result()  # raises the error of the generator, if any
            elif not playing.done():
                outcome = Failed("timeout", f"the group took more than {limits.timeout_s:g} s")
            else:
                sequences = _read_result(playing, attempts)
        except (UserCodeFailed, DataError) as failure:
            outcome = _describe_failure(task, server, failure)
        finally:
            session.close()
            playing.cancel()
            await asyncio.wait({playing}, timeout=STOP_S)
        metrics = {"turn_limit": float(session.reached_turn_limit), "retries": float(retry)}
        strands = list(session.strands)
        if outcome is None:
            return [
                _take_attempt(task, session, sequence, strands, i, metrics)
                for i, sequence in enumerate(sequences)
            ]
        return [
            _make_rows(session, strands[i::attempts], i, outcome, metrics) for i in range(attempts)
        ]


def _read_result(playing: asyncio.Future[Any], attempts: int) -> Sequence[ScoredSequence]:
    """Return the sequences of a group that has been played, or raise what it raised."""
    result = playing.result()
    try:
        return read_group(result, attempts)
    except FLAWS as error:
        raise DataError(str(error)) from error


def _take_attempt(
    task: Task,
    session: AgentSession,
    sequence: ScoredSequence,
    strands: list[AgentStrand],
    attempt: int,
    metrics: Mapping[str, float],
) -> AttemptRows:
    """Return the attempt of a sequence, with its score as the reward of its last turn.

    Its strand is removed from `strands`. A sequence that is not the policy's is a failure.
    """
    decode = session.renderer.tokenizer.decode
    try:
        strand = take_strand(sequence, strands, lambda ids: decode(ids, skip_special=True))
        strand.turns[-1] = replace(strand.turns[-1], reward=float(sequence.score))
        outcome = Truncated() if strand.tip is not None and strand.tip.cut else None
        (row,) = _make_rows(session, [strand], attempt, outcome, metrics)
        return [replace(row, trainable=select_trainable(sequence, row.owner))]
    except FLAWS as error:
        failure = Failed("environment", f"{task.label}, sequence {attempt}: {error}")
        return _make_rows(session, [], attempt, failure, metrics)


def _make_rows(
    session: AgentSession,
    strands: Sequence[AgentStrand],
    attempt: int,
    outcome: Outcome | None,
    metrics: Mapping[str, float],
) -> AttemptRows:
    """Return one trajectory for each strand; without a strand, one of a single token."""
    temperature = session.sampling.temperature
    return make_trajectories(
        strands, metrics, attempt=attempt, temperature=temperature, outcome=outcome
    )


def _describe_failure(task: Task, server: PolicyServer, failure: Exception) -> Failed:
    """Return the failure of a group, with the first refused request, which may be its cause."""
    session = server.session
    if session.exhausted_budget and not session.strands:
        reason = f"{session.exhausted_budget}: shorten the prompt or drop the item"
        return Failed("prompt_too_long", f"{task.label}: {reason}")
    refusal = f"refused request: {server.refusals[0]}\n" if server.refusals else ""
    return Failed("environment", f"{task.label}:\n{refusal}{failure}")
