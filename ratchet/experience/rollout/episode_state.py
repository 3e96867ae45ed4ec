"""The state of an attempt while it is played: its token columns, strands and messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ratchet.allowed_tokens import AllowedTokens
from ratchet.data.chat.renderer import Renderer, Tools
from ratchet.data.render_thread import run_beside_loop
from ratchet.protocols import Environment
from ratchet.types import (
    Completion,
    Message,
    Outcome,
    Owner,
    PlacedMedium,
    Sampling,
    Task,
    Trajectory,
    Turn,
)


def render_prompt(
    renderer: Renderer, messages: Sequence[Message], tools: Tools | None
) -> tuple[np.ndarray, tuple[PlacedMedium, ...]]:
    """Return the tokens and media of a conversation's prompt."""
    tokens = np.asarray(renderer.prompt(messages, tools), dtype=np.int64)
    return tokens, renderer.media(tokens, messages)


class PromptCache:
    """A cache of the first prompt, which the attempts of a group almost always share."""

    def __init__(self) -> None:
        self.key: tuple[Sequence[Message], Tools | None] | None = None
        self.tokens = np.zeros(0, dtype=np.int64)
        self.media: tuple[PlacedMedium, ...] = ()
        self._lock = asyncio.Lock()

    async def render(
        self, renderer: Renderer, messages: Sequence[Message], tools: Tools | None
    ) -> tuple[np.ndarray, tuple[PlacedMedium, ...]]:
        """Return the prompt's tokens and media."""
        async with self._lock:
            if self.key != (messages, tools):
                work = partial(render_prompt, renderer, messages, tools)
                self.tokens, self.media = await run_beside_loop(messages, work)
                self.key = list(messages), tools
            return self.tokens, self.media


@dataclass(slots=True)
class TokenRecord:
    """The token columns of a trajectory while it is played.

    The record grows by pieces, and each piece has one owner.
    """

    pieces: list[tuple[Owner, np.ndarray, Completion | None]] = field(default_factory=list)
    length: int = 0

    def add(
        self, owner: Owner, tokens: Sequence[int] | np.ndarray, completion: Completion | None = None
    ) -> None:
        array = np.asarray(tokens, dtype=np.int64)
        self.pieces.append((owner, array, completion))
        self.length += len(array)

    def tokens(self) -> np.ndarray:
        _, first, _ = self.pieces[0]
        return (
            first
            if len(self.pieces) == 1
            else np.concatenate([tokens for _, tokens, _ in self.pieces])
        )

    def trajectory(self, **fields: Any) -> Trajectory:
        """Return the trajectory; `fields` are its other fields, without the token columns."""
        all_tokens = np.empty(self.length, np.int64)
        owner = np.empty(self.length, np.int8)
        trainable = np.empty(self.length, np.bool_)
        rollout_logprobs = np.zeros(self.length, np.float32)
        versions = np.empty(self.length, np.int32)
        versions.fill(-1)
        log_kept_mass = np.zeros(self.length, np.float32)
        routes = self._collect_routes()
        pieces = self.pieces
        start = 0
        for piece_owner, tokens, completion in pieces:
            end = start + len(tokens)
            all_tokens[start:end] = tokens
            # numpy assigns an int in half the time of an enum member.
            owner[start:end] = int(piece_owner)
            trainable[start:end] = piece_owner == Owner.POLICY
            if completion is not None:
                rollout_logprobs[start:end] = completion.logprobs
                versions[start:end] = completion.versions
                log_kept_mass[start:end] = completion.log_kept_mass
            start = end
        return Trajectory(
            tokens=all_tokens,
            owner=owner,
            trainable=trainable,
            rollout_logprobs=rollout_logprobs,
            versions=versions,
            log_kept_mass=log_kept_mass,
            routes=routes,
            allowed=AllowedTokens.concatenate(
                [(completion and completion.allowed, len(part)) for _, part, completion in pieces]
            ),
            **fields,
        )

    def _collect_routes(self) -> np.ndarray | None:
        """Return the MoE experts of all tokens, -1 where unknown; None if no completion has them.

        Each completion has the experts of all tokens so far. If several completions have computed a
        token, the first computation counts, because the turn's tokens were sampled from it. Only a
        turn's last token and the environment's tokens take their experts from the prefill of the
        next turn.
        """
        known_routes = [
            completion.routes
            for _, _, completion in self.pieces
            if completion is not None and completion.routes is not None
        ]
        if not known_routes:
            return None
        routes = np.full((self.length, *known_routes[0].shape[1:]), -1, np.int16)
        for turn_routes in known_routes:
            is_missing = routes[: len(turn_routes), 0, 0] < 0
            routes[: len(turn_routes)][is_missing] = turn_routes[is_missing]
        return routes


@dataclass(slots=True)
class EpisodeStrand:
    """A part of an attempt in which each prompt extends the one before.

    It becomes one trajectory.
    """

    record: TokenRecord = field(default_factory=TokenRecord)
    turns: list[Turn] = field(default_factory=list)
    media: tuple[PlacedMedium, ...] = ()
    """The media of all tokens so far."""
    message_count: int = 0
    """Number of leading messages of the conversation that the strand covers."""

    @property
    def has_turns(self) -> bool:
        """True if the policy has written in the strand."""
        # The first piece is the prompt, and the policy wrote the second.
        return len(self.record.pieces) > 1


@dataclass(slots=True)
class EpisodeState:
    """The state of an attempt while it is played. `metrics` are sums over its turns."""

    task: Task
    environment: Environment
    sampling: Sampling
    messages: list[Message]
    tools: Tools | None = None
    # The tokens of the assistant's open turn, with those of inline text.
    turn_tokens: list[int] = field(default_factory=list)
    turn_starts: list[int] = field(default_factory=list)  # number of messages before each turn
    strands: list[EpisodeStrand] = field(default_factory=lambda: [EpisodeStrand()])
    waits_for: str = "the environment"  # or "the generator", "the tokenizer"
    last_rendered: str = "the prompt"  # names the text that was rendered last, for errors
    metrics: dict[str, float] = field(
        default_factory=lambda: {"turns": 0.0, "turn_limit": 0.0, "retries": 0.0}
    )

    @property
    def strand(self) -> EpisodeStrand:
        return self.strands[-1]

    def trajectories(self, attempt: int, outcome: Outcome | None) -> list[Trajectory]:
        """Return one trajectory for each strand, in order.

        A strand in which the policy wrote nothing is left out, unless it is the only one.
        """
        self.strand.message_count = len(self.messages)
        strands = [strand for strand in self.strands if strand.has_turns] or self.strands[:1]
        # A trajectory needs a token, even if the attempt failed before it had a prompt.
        if not strands[0].record.length:
            strands[0].record.add(Owner.PROMPT, [0])
        return [
            strand.record.trajectory(
                attempt=attempt,
                temperature=self.sampling.temperature,
                turns=tuple(strand.turns),
                messages=tuple(self.messages[: strand.message_count]),
                media=strand.media,
                outcome=outcome,
                metrics=self.metrics | {"forks": len(strands) - 1.0},
            )
            for strand in strands
        ]
