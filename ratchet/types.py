"""The data that flows through Ratchet, from a task to a trained-on trajectory. Free of torch:
environments, rewards and configuration import it. The packed tensor form of a list of groups is
`ratchet.batch.Batch`.

Group is the one datum: a supervised row is a group of one trajectory, a preference pair a group of
two (chosen first), a GRPO prompt a group of n attempts. L = tokens of one trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from numbers import Real
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ratchet.sampling import Sampling as Sampling

Role = Literal["system", "user", "assistant", "tool"]
Split = Literal["train", "test"]
# key of a task's meta: the file and the row that it was read from, for errors
READ_FROM = "read from"


MediaKind = Literal["image", "audio", "video"]


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a multimodal message. `value` is text, or says where a medium is: a path, a
    `data:` URL that holds it (base64), or another URL."""

    type: Literal["text"] | MediaKind
    value: str


@dataclass(frozen=True, slots=True, eq=False)
class Medium:
    """An image, audio clip or video as a model reads it, whose driver never looks into it.

    key: names its content and how it was processed: equal keys have equal inputs, and are stored
    and computed once. span: tokens that stand for it in a sequence. inputs: what the model's
    forward takes, by that argument's name; those of several media are joined along the first
    dimension. source: the encoded file, for generators that process it by themselves, and for
    records.
    """

    key: str
    kind: MediaKind
    span: int
    inputs: Mapping[str, NDArray[Any]]
    source: bytes


class Placed(NamedTuple):
    """A medium whose tokens are [start, start + span) of a sequence."""

    start: int
    medium: Medium


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str | tuple[Part, ...] = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.value for part in self.content if part.type == "text")

    @property
    def media(self) -> tuple[str, ...]:
        """Return the paths or URLs of its images, clips and videos."""
        return (
            ()
            if isinstance(self.content, str)
            else tuple(part.value for part in self.content if part.type != "text")
        )


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt and what is needed to judge an answer to it.

    `id` is unique within a run's data; statistics are keyed by it, never by equal prompts. `tag`
    names the domain (metrics and reward routing split by it).
    """

    id: str
    messages: tuple[Message, ...]
    answer: Any = None
    environment: str = ""
    seed: int = 0
    tag: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """Return the name of the task in errors: its file and row, if it has such."""
        return str(self.meta.get(READ_FROM, f"task {self.id}"))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two continuations of a task's messages, the better one first; `rewards` of both if they were
    scored."""

    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    rewards: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """One way to go on from a task's messages, and what it is worth."""

    messages: tuple[Message, ...]
    reward: float


class StopReason(StrEnum):
    STOP_TOKEN = "stop_token"  # the last token is one of `stop_ids`
    STOP_STRING = "stop_string"
    LENGTH = "length"  # max_new_tokens reached
    CONTEXT = "context"  # the model's context is full
    ABORTED = "aborted"

    @property
    def finished(self) -> bool:
        """The policy itself ended the completion."""
        return self in (StopReason.STOP_TOKEN, StopReason.STOP_STRING)


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a generator, per new token: id, logprob under the temperature alone (at
    temperature 0: under 1), log of the probability mass that the filters kept, and the version of
    the weights that produced it.

    `routes`, where the sampling asks for them: of each token of prompt and completion, the experts
    that computed it in each layer that has some; -1 for the last token, which nothing has computed
    yet.
    """

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    log_kept_mass: NDArray[np.float32]
    versions: NDArray[np.int32]
    stop: StopReason
    # [prompt and completion, layers with experts, experts of a token]
    routes: NDArray[np.int16] | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)


class Owner(IntEnum):
    """The writer of a token."""

    PROMPT = 0
    POLICY = 1
    ENVIRONMENT = 2


# numpy compares with a member of an enumeration as with an object, five times as slowly
POLICY = int(Owner.POLICY)


@dataclass(frozen=True, slots=True)
class Turn:
    """One policy turn: tokens [start, end) of its trajectory. `terminated`: the environment ended
    the episode here. `cut`: a limit of tokens ended the turn, and not the policy; None: unknown."""

    start: int
    end: int
    reward: float | None = None  # None: the environment leaves judging to rewards
    state_key: str = ""
    terminated: bool = False
    cut: bool | None = None


# a float is known at once; of anything else the abstract class is asked, ten times as slowly
NUMBER = float | Real


def finite(number: Any) -> bool:
    """Return True if a value can be a reward, a part of one, or a metric."""
    return isinstance(number, NUMBER) and math.isfinite(number)


# --- how an attempt ends. A failure is never a reward: only Scored, and Truncated with a reward,
# enter statistics.


@dataclass(frozen=True, slots=True)
class Scored:
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Truncated:
    """An attempt cut off by a token or turn budget. `reward=None` if the unfinished attempt could
    not be judged."""

    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unjudged:
    """Ended or was cut off, and no reward is asked for: the algorithm reads none. It trains, and
    enters no reward statistic."""

    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """Infrastructure or user code broke: `kind` is one of a few words to count by, `detail` holds
    the traceback."""

    kind: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Cancelled:
    reason: str = ""


Outcome = Scored | Truncated | Unjudged | Failed | Cancelled
Use = Literal["train", "baseline", "reference"]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A sequence of tokens with their origin. Text is a view; nothing is ever re-tokenized.

    `use`: "train" rows give gradients; a "baseline" row (ReMax's greedy answer) and a "reference"
    row (KTO's mismatched pair) only feed statistics. `outcome=None` means there was nothing to
    judge (supervised data). `temperature` is the one that `rollout_logprobs` were recorded under,
    and under which the learner computes its own.
    """

    tokens: NDArray[np.int64]  # [L]
    owner: NDArray[np.int8]  # [L] of Owner
    trainable: NDArray[np.bool_]  # [L]
    rollout_logprobs: NDArray[np.float32]  # [L], 0 where the policy did not write
    versions: NDArray[np.int32]  # [L], -1 where the policy did not write
    log_kept_mass: NDArray[np.float32] | None = None  # [L], see `Completion`; None: nothing was cut
    # [L, layers with experts, experts of a token], see `Completion`
    routes: NDArray[np.int16] | None = None
    attempt: int = 0
    use: Use = "train"
    temperature: float = 1.0
    turns: tuple[Turn, ...] = ()
    messages: tuple[Message, ...] = ()
    outcome: Outcome | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the whole attempt
    media: tuple[Placed, ...] = ()  # in order
    extras: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        length = len(self.tokens)
        assert len(self.owner) == length, f"owner has {len(self.owner)} entries for {length} tokens"
        assert len(self.trainable) == length, (
            f"trainable has {len(self.trainable)} entries for {length} tokens"
        )
        logprobs, versions = len(self.rollout_logprobs), len(self.versions)
        assert logprobs == length, f"rollout_logprobs has {logprobs} entries for {length} tokens"
        assert versions == length, f"versions has {versions} entries for {length} tokens"
        assert self.routes is None or len(self.routes) == length, "routes are of other tokens"

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def reward(self) -> float | None:
        return self.outcome.reward if isinstance(self.outcome, Scored | Truncated) else None

    @property
    def reward_parts(self) -> Mapping[str, float]:
        return self.outcome.parts if isinstance(self.outcome, Scored | Truncated) else {}

    @property
    def counts(self) -> bool:
        """Return True if the trajectory may enter statistics, baselines and gradients."""
        return self.outcome is None or isinstance(self.outcome, Unjudged) or self.reward is not None

    @property
    def truncated(self) -> bool:
        return isinstance(self.outcome, Truncated) or (
            isinstance(self.outcome, Unjudged) and self.outcome.truncated
        )

    @property
    def is_cut_short(self) -> bool:
        """True if the last answer has no end of its own, as a limit of tokens cut it off.

        An attempt may be truncated behind an answer that has one: at the limit of turns, or without
        room for another turn. Where turns don't say (given text), the outcome decides.
        """
        cut = self.turns[-1].cut if self.turns else None
        return self.truncated if cut is None else cut

    @property
    def sampled(self) -> bool:
        """Return True if a policy wrote any of it: its tokens have their weights' version, and
        given text has none."""
        # a third of the time of any()
        return bool(len(self.versions)) and bool(self.versions[self.versions.argmax()] >= 0)

    @property
    def completion_length(self) -> int:
        # of a few tokens in a tenth of the time that numpy takes to begin
        return self.owner.tobytes().count(POLICY)

    @classmethod
    def supervised(
        cls,
        tokens: Sequence[int],
        trainable: Sequence[bool],
        *,
        messages: tuple[Message, ...] = (),
        **fields: Any,
    ) -> Trajectory:
        """A row of given text: every token is the prompt's, except those that train, which stand
        for the policy."""
        mask = np.asarray(trainable, dtype=np.bool_)
        return cls(
            tokens=np.asarray(tokens, dtype=np.int64),
            owner=np.where(mask, Owner.POLICY, Owner.PROMPT).astype(np.int8),
            trainable=mask,
            rollout_logprobs=np.zeros(len(mask), dtype=np.float32),
            versions=np.full(len(mask), -1, dtype=np.int32),
            messages=messages,
            **fields,
        )

    def judged(self, outcome: Outcome) -> Trajectory:
        """Return what `replace` would give, in a third of the time."""
        return Trajectory(
            self.tokens,
            self.owner,
            self.trainable,
            self.rollout_logprobs,
            self.versions,
            self.log_kept_mass,
            self.routes,
            self.attempt,
            self.use,
            self.temperature,
            self.turns,
            self.messages,
            outcome,
            self.metrics,
            self.media,
            self.extras,
        )


@dataclass(frozen=True, slots=True)
class Group:
    """All trajectories of one task that one draw produced. `id` is unique within a run: it names
    the draw, not the prompt. `uses`: steps that have trained on it before, 0 unless it is
    replayed."""

    id: str
    task: Task
    trajectories: tuple[Trajectory, ...]
    uses: int = 0

    @property
    def attempts(self) -> list[list[Trajectory]]:
        """The trajectories by attempt, in order: several for one whose history forked, the last
        with all its messages."""
        attempts: dict[int, list[Trajectory]] = {}
        for trajectory in self.trajectories:
            attempts.setdefault(trajectory.attempt, []).append(trajectory)
        return list(attempts.values())
