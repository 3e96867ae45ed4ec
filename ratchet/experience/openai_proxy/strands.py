"""The answers of an attempt, the strands that they form, and the keys of conversations.

Keys are digests that identify a conversation by the fields that a client sees.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.data.chat.renderer import Tools
from ratchet.experience.rollout.episode_state import TokenRecord
from ratchet.types import Completion, Message, Owner, PlacedMedium, Sampling, Trajectory, Turn


@dataclass(eq=False)
class AgentStrand:
    """A sequence of answers that each extend the one before; it becomes one trajectory.

    `tip` is the last answer. `media` are those of all its tokens.
    """

    record: TokenRecord = field(default_factory=TokenRecord)
    turns: list[Turn] = field(default_factory=list)
    tip: AgentAnswer | None = None

    @property
    def media(self) -> tuple[PlacedMedium, ...]:
        return () if self.tip is None else self.tip.media


def make_trajectories(
    strands: Sequence[AgentStrand], metrics: Mapping[str, float], **fields: Any
) -> list[Trajectory]:
    """Return the rows of an attempt: one for each strand, or without one, one of a single token.

    Args:
        metrics: Metrics of the attempt beside the numbers of its turns and forks.
        fields: Further fields of `Trajectory`, equal in all rows.
    """
    metrics = {
        "turns": float(sum(len(strand.turns) for strand in strands)),
        "forks": max(len(strands) - 1.0, 0.0),
        **metrics,
    }
    empty = AgentStrand(TokenRecord([(Owner.PROMPT, np.zeros(1, np.int64), None)], 1))
    return [
        strand.record.trajectory(
            turns=tuple(strand.turns),
            messages=strand.tip.messages if strand.tip else (),
            media=strand.media,
            metrics=metrics,
            **fields,
        )
        for strand in strands or [empty]
    ]


@dataclass(eq=False)
class AgentAnswer:
    """An answer of the policy."""

    prompt: NDArray[np.int64]
    """All tokens before the answer."""
    completion: Completion
    messages: tuple[Message, ...]
    """The conversation, with the answer last."""
    key: bytes
    """The digest of the conversation, the answer included."""
    parent: AgentAnswer | None
    """The answer whose tokens the prompt begins with, if any."""
    sampling: Sampling
    """The sampling parameters of the answer."""
    n_malformed: int
    """Number of malformed tool calls."""
    cut: bool
    """True if a limit of the run ended the answer, not the policy or the agent."""
    media: tuple[PlacedMedium, ...] = ()
    """The images of the prompt, with their places in it."""
    strand: AgentStrand | None = None
    """The strand in which the answer was recorded; None before that."""

    @property
    def message(self) -> Message:
        return self.messages[-1]

    @property
    def tokens(self) -> NDArray[np.int64]:
        return np.concatenate([self.prompt, self.completion.tokens])


@dataclass(frozen=True)
class AgentPrompt:
    """The prompt of a request."""

    tokens: NDArray[np.int64]
    parent: AgentAnswer | None = None
    """The answer whose tokens the prompt begins with, if any."""
    media: tuple[PlacedMedium, ...] = ()
    """The images, with their places in `tokens`."""


def find_token_parent(
    answers: Iterable[AgentAnswer], prompt: NDArray[np.int64]
) -> AgentAnswer | None:
    """Return the answer whose tokens are the longest proper prefix of a prompt.

    Among answers with equal tokens, one that is still the last of its strand is preferred.
    """
    parent, longest = None, (0, False)
    for answer in answers:
        tokens = answer.tokens
        is_tip = answer.strand is not None and answer.strand.tip is answer
        is_better = longest < (len(tokens), is_tip) and len(tokens) < len(prompt)
        if is_better and np.array_equal(tokens, prompt[: len(tokens)]):
            parent, longest = answer, (len(tokens), is_tip)
    return parent


def compute_keys(
    messages: Sequence[Message], tools: Tools | None, variables: Mapping[str, Any] | None = None
) -> list[bytes]:
    """Return the keys of a conversation's prefixes: key i covers tools and the first i messages.

    Args:
        variables: The request's variables of the chat template, which every key covers too.
    """
    keys = [digest(b"", [tools, variables] if variables else tools)]
    for message in messages:
        keys.append(extend_key(keys[-1], message))
    return keys


def extend_key(key: bytes, message: Message) -> bytes:
    """Return the key of the conversation with `key`, extended by a message."""
    calls = [
        [call.id, call.name, _normalise_numbers(call.arguments)] for call in message.tool_calls
    ]
    content = (
        message.content
        if isinstance(message.content, str)
        else [[part.type, part.value] for part in message.content]
    )
    return digest(key, [message.role, content, calls, message.tool_call_id])


def _normalise_numbers(value: Any) -> Any:
    """Return JSON data with whole numbers as integers.

    Clients in JavaScript send 1.0 back as 1 if arguments are JSON values and not text.
    """
    if isinstance(value, Mapping):
        return {name: _normalise_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_normalise_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def digest(key: bytes, value: Any) -> bytes:
    """Return a 16-byte digest of `key` and of a JSON value."""
    text = json.dumps(value, sort_keys=True, default=dict)
    return blake2b(key + text.encode(), digest_size=16).digest()
