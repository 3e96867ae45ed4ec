"""The data that flows through Ratchet, from a task to a trained-on trajectory.

Configuration imports this module through environments and rewards, so it imports neither torch nor
numpy, which would delay every command. The packed tensor form of a list of groups is
`ratchet.batch.Batch`.

All training data are Groups: a supervised row is a group of one trajectory, a preference pair a
group of two (chosen first), a GRPO prompt a group of n attempts. L = tokens of one trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeGuard

from ratchet.sampling import Sampling as Sampling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ratchet.allowed_tokens import AllowedTokens

ChatRole = Literal["system", "user", "assistant", "tool"]  # those of chat templates and data
# "inline": text that the environment writes into the assistant's open turn, which then continues.
Role = Literal[ChatRole, "inline"]
Split = Literal["train", "test"]
# Tokens of a demonstration that train: those of all assistant turns, of the last one, or all but
# the first, which no token precedes.
TrainedTokens = Literal["all", "last", "text"]
# The key of a task's `meta` that holds its file and row, for error messages.
READ_FROM = "read from"
# The key of `Task.meta` for variables of the chat template that the task sets.
TEMPLATE_VARIABLES = "template variables"


MediaKind = Literal["image", "audio", "video"]


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a multimodal message.

    `value` is the text, or the location of a medium: a path, a `data:` URL that holds it (base64),
    or another URL.
    """

    type: Literal["text"] | MediaKind
    value: str


@dataclass(frozen=True, slots=True, eq=False)
class Medium:
    """An image, audio clip or video as a model reads it. The driver never inspects it."""

    key: str
    """Identifies the content and its processing. Media with equal keys have equal inputs, so they
    are stored and computed once."""
    kind: MediaKind
    span: int
    """Number of tokens that stand for it in a sequence."""
    inputs: Mapping[str, NDArray[Any]]
    """Arguments of the model's forward, by name. The inputs of several media are joined along the
    first dimension."""
    source: bytes
    """The encoded file, for records and for generators with their own processor."""
    n_frames: int | None = None
    """Number of a video's frames that were processed, evenly spaced."""


class PlacedMedium(NamedTuple):
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
        """Return the paths or URLs of the message's images, audio clips and videos."""
        return (
            ()
            if isinstance(self.content, str)
            else tuple(part.value for part in self.content if part.type != "text")
        )


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt and the data needed to judge an answer to it.

    `id` is unique within a run's data; statistics are keyed by it, not by the prompt. `tag` names
    the domain: metrics are also reported per tag, and rewards and teachers may be chosen by it.
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
        """Return the name of the task in errors: its file and row if known, else its id."""
        return str(self.meta.get(READ_FROM, f"task {self.id}"))

    @property
    def label(self) -> str:
        """Return the id, and the file and row if they are known."""
        place = self.meta.get(READ_FROM)
        return f"task {self.id}" if place is None else f"task {self.id} ({place})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two continuations of a task's messages, the better one first.

    `rewards`: (reward of `chosen`, reward of `rejected`); None if they have none.
    """

    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    rewards: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class LabelledAnswer:
    """One continuation of a task's messages, and its reward as a label."""

    messages: tuple[Message, ...]
    reward: float


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's answer to one policy turn.

    messages: the observation.
    reward: the turn's own reward; None leaves judging to the rewards.
    done: True if the episode has ended.
    state_key: names the state in which the policy took this turn (`gigpo` reads it); "": unknown.
    metrics: summed over the turns of an attempt.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False
    state_key: str = ""
    metrics: Mapping[str, float] | None = None


class StopReason(StrEnum):
    STOP_TOKEN = "stop_token"  # the last token is one of `stop_ids`
    STOP_STRING = "stop_string"
    LENGTH = "length"  # max_new_tokens reached
    CONTEXT = "context"  # the model's context is full
    ABORTED = "aborted"

    @property
    def finished(self) -> bool:
        """True if the policy itself ended the completion."""
        return self in (StopReason.STOP_TOKEN, StopReason.STOP_STRING)


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a generator, with one entry per new token."""

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    """Log-probabilities under the temperature, before the filters (for temperature 0: under
    temperature 1)."""
    log_kept_mass: NDArray[np.float32]
    """Log of the probability mass that the sampling filters kept."""
    versions: NDArray[np.int32]
    """Version of the weights that produced each token."""
    stop: StopReason
    # [tokens of prompt and completion, layers with experts, experts of a token]
    routes: NDArray[np.int16] | None = None
    """If `Sampling.routes` is set, the experts that computed each token in each layer with experts;
    -1 for the last token, which has not been computed yet. Else None."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Further values from the generator, by name."""
    allowed: AllowedTokens | None = None
    """The tokens that `Sampling.structured` allowed at each position; `logprobs` are those of the
    distribution over them. None without a grammar, or if the generator does not record them."""


class Owner(IntEnum):
    """The writer of a token."""

    PROMPT = 0
    POLICY = 1
    ENVIRONMENT = 2


# A plain int, because numpy compares with an enum member as an object, in five times the time.
POLICY = int(Owner.POLICY)


@dataclass(frozen=True, slots=True)
class Turn:
    """One policy turn: tokens [start, end) of its trajectory.

    `state_key`: as in `ratchet.protocols.Step`. `terminated`: True if the environment ended the
    episode after this turn. `cut`: True if a token limit, not the policy, ended the turn; None:
    unknown. `malformed_call`: True if a tool call of the turn can't be parsed.
    `malformed_thinking`: True unless its thinking tags enclose exactly one thought at its beginning
        (see `ratchet.data.chat.thinking`). None: not examined.
    """

    start: int
    end: int
    reward: float | None = None  # None: the environment leaves judging to rewards
    state_key: str = ""
    terminated: bool = False
    cut: bool | None = None
    malformed_call: bool | None = None
    malformed_thinking: bool | None = None


# `float` comes first, because `isinstance` with the abstract class Real is ten times as slow.
NUMBER = float | Real


def is_finite_number(number: Any) -> bool:
    """True if the value is a finite number: a valid reward, reward part or metric."""
    try:
        return isinstance(number, NUMBER) and math.isfinite(number)
    except OverflowError:  # an integer beyond the range of floats
        return False


def is_number_not_bool(value: Any) -> TypeGuard[float]:
    """True if the value is a finite number and no boolean, which Python counts among integers."""
    return not isinstance(value, bool) and is_finite_number(value)


# --- how an attempt ends. Rewards' statistics have only Scored, and Truncated with a reward.


@dataclass(frozen=True, slots=True)
class Scored:
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Truncated:
    """An attempt cut off by a token or turn budget.

    `reward` is None if the attempt could not be judged, because it is unfinished.
    """

    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unjudged:
    """An attempt without a reward, because the algorithm reads none.

    `truncated` tells if a token or turn limit ended it. It is trained on, but enters no reward
    statistic.
    """

    reward: ClassVar[None] = None
    parts: ClassVar[Mapping[str, float]] = {}

    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """An attempt in which infrastructure or user code broke.

    `kind` is one of a few words that failures are counted by, `detail` holds the traceback.
    """

    reward: ClassVar[None] = None
    parts: ClassVar[Mapping[str, float]] = {}

    kind: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Cancelled:
    reward: ClassVar[None] = None
    parts: ClassVar[Mapping[str, float]] = {}

    reason: str = ""


Outcome = Scored | Truncated | Unjudged | Failed | Cancelled
Use = Literal["train", "baseline", "reference"]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A sequence of tokens with the writer of each token. Its text is never re-tokenized.

    `use`: "train" rows give gradients. A "baseline" row (ReMax's greedy answer) and a "reference"
    row (KTO's mismatched pair) only feed statistics. `outcome=None` means that there was nothing to
    judge (supervised data). `rollout_logprobs` were recorded under `temperature`, and the learner
    computes its own logprobs under the same temperature. `extras` holds further values by name,
    such as the result of a black-box agent.
    """

    tokens: NDArray[np.int64]  # [L]
    owner: NDArray[np.int8]  # [L] of Owner
    trainable: NDArray[np.bool_]  # [L]
    rollout_logprobs: NDArray[np.float32]  # [L], 0 where the token was not sampled
    versions: NDArray[np.int32]  # [L], -1 where the token was not sampled
    log_kept_mass: NDArray[np.float32] | None = None  # [L], see `Completion`; None: no filter
    # [L, layers with experts, experts of a token], see `Completion`
    routes: NDArray[np.int16] | None = None
    attempt: int = 0
    use: Use = "train"
    temperature: float = 1.0
    turns: tuple[Turn, ...] = ()
    messages: tuple[Message, ...] = ()
    outcome: Outcome | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the whole attempt
    media: tuple[PlacedMedium, ...] = ()  # by start
    extras: Mapping[str, Any] = field(default_factory=dict)
    allowed: AllowedTokens | None = None  # see `Completion`; None: no grammar

    def __post_init__(self) -> None:
        length = len(self.tokens)
        assert len(self.owner) == length, f"owner has {len(self.owner)} entries for {length} tokens"
        assert len(self.trainable) == length, (
            f"trainable has {len(self.trainable)} entries for {length} tokens"
        )
        logprobs, versions = len(self.rollout_logprobs), len(self.versions)
        assert logprobs == length, f"rollout_logprobs has {logprobs} entries for {length} tokens"
        assert versions == length, f"versions has {versions} entries for {length} tokens"
        assert self.routes is None or len(self.routes) == length, (
            f"routes has {len(self.routes)} entries for {length} tokens"
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def reward(self) -> float | None:
        return self.outcome.reward if isinstance(self.outcome, Scored | Truncated) else None

    @property
    def reward_parts(self) -> Mapping[str, float]:
        return self.outcome.parts if isinstance(self.outcome, Scored | Truncated) else {}

    @property
    def is_usable(self) -> bool:
        """True if the trajectory has a reward, or needs none (supervised data, `Unjudged`).

        Others are left out of statistics, baselines and gradients.
        """
        return self.outcome is None or isinstance(self.outcome, Unjudged) or self.reward is not None

    @property
    def truncated(self) -> bool:
        return isinstance(self.outcome, Truncated) or (
            isinstance(self.outcome, Unjudged) and self.outcome.truncated
        )

    @property
    def is_cut_short(self) -> bool:
        """True if a token limit cut off the last answer.

        A truncated attempt may still end with a complete answer: at the turn limit, or without room
        for another turn. If `Turn.cut` is unknown (text that was not sampled), the outcome decides.
        """
        cut = self.turns[-1].cut if self.turns else None
        return self.truncated if cut is None else cut

    @property
    def sampled(self) -> bool:
        """True if any token was sampled: tokens that were not have the version -1."""
        # argmax takes a third of the time of any().
        return bool(len(self.versions)) and bool(self.versions[self.versions.argmax()] >= 0)

    @property
    def completion_length(self) -> int:
        # For short trajectories, `bytes.count` takes a tenth of the time of numpy's count.
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
        """Return a trajectory of text that was not sampled (supervised data).

        The owner of trainable tokens is the policy, and of all others the prompt.
        """
        import numpy as np

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

    def with_outcome(self, outcome: Outcome) -> Trajectory:
        """Return a copy with this outcome, in a third of the time of `dataclasses.replace`."""
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
            self.allowed,
        )


@dataclass(frozen=True, slots=True)
class Group:
    """All trajectories from one draw of a task.

    `id` names the draw, not the prompt, and is unique within a run. `n_uses` is the number of
    earlier steps that trained on the group: 0 unless it is replayed.
    """

    id: str
    task: Task
    trajectories: tuple[Trajectory, ...]
    n_uses: int = 0

    @property
    def attempts(self) -> list[list[Trajectory]]:
        """Return the trajectories of each attempt, in order.

        An attempt whose history forked has several; the last one has all its messages.
        """
        attempts: dict[int, list[Trajectory]] = {}
        for trajectory in self.trajectories:
            attempts.setdefault(trajectory.attempt, []).append(trajectory)
        return list(attempts.values())

    @property
    def rewards(self) -> list[float]:
        """Return one reward for each attempt that trains and has a reward, in order."""
        last_rows = [rows[-1] for rows in self.attempts]
        return [
            reward for row in last_rows if row.use == "train" and (reward := row.reward) is not None
        ]
