"""The protocols that every backend, environment, reward and source implements. Small on purpose;
each has a fake and a conformance suite in `ratchet.testing`. Methods are async wherever an
implementation may wait for another process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ratchet.types import (
    Comparison,
    Completion,
    Group,
    Judged,
    Message,
    Outcome,
    Placed,
    Sampling,
    Split,
    Task,
    Trajectory,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ratchet.batch import Batch


Exported = Literal["all", "base", "adapter"]
# those of the `Outputs` with an entry for each sequence
OF_SEQUENCES = frozenset({"scores", "routers"})


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of a learner for a term on one micro-batch, with gradient. A quantity that no
    term `needs` is None.

    `logprobs` [T]: log p(token | tokens before it in its sequence) under the row's temperature, 0
    where a token does not train. `old_logprobs` [T], detached: the batch's column, or, where the
    batch gets a single optimizer step, the live ones. `entropy` [T] (nats, under the temperature)
    and `values` [T] are aligned with `logprobs`: entry t belongs to the prediction *of* token t.
    `token_scores` [T]: the scalar head at each token itself; `scores` [S]: at each sequence's last
    one. `topk_logprobs` [T, K + 1]: log p of the K tokens in the batch's column `teacher_ids`, and
    of any other (no last column where K is the whole vocabulary); 0 where a token does not train.
    `routers` [S, 5]: what a mixture's routers did with each sequence, see
    `ratchet.models.layers.expert_routing.RouterMonitor`. `sequence_sum` sums a token column within
    each sequence, over context-parallel ranks too.
    """

    sequence_sum: Callable[[Tensor], Tensor]
    logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None
    token_scores: Tensor | None = None
    topk_logprobs: Tensor | None = None
    routers: Tensor | None = None

    def need(self, name: str) -> Tensor:
        value = getattr(self, name)
        assert value is not None, f"a term reads '{name}' without declaring it in `needs`"
        return value


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank-local piece of one weight under its canonical Hugging Face name, or an adapter's under
    that of peft."""

    name: str
    shape: tuple[int, ...]  # of the whole weight
    offsets: tuple[int, ...]  # where the piece starts, per dimension
    tensor: Tensor
    rests: bool = False  # frozen: receivers need it only once


class LossTerm(Protocol):
    """The part of a term that a learner uses (`ratchet.algorithms.base.AlgorithmTerm` implements
    it)."""

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> frozenset[str]: ...
    def __call__(self, out: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """(sum over the micro-batch of weight * x, metrics weighted alike and detached)"""
        ...


def needed(terms: Iterable[LossTerm]) -> frozenset[str]:
    """Return the outputs that any of the terms reads."""
    return frozenset[str]().union(*(term.needs for term in terms))


@runtime_checkable
class Learner(Protocol):
    """Holds trainable (or frozen) weights, computes columns, applies updates."""

    async def score(
        self, batch: Batch, wanted: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        """Columns without gradient, at `predicted_T`: "logprobs", "entropy", "values",
        "token_scores" [T], "scores" [S], "topk_ids" (int64) [T, K] and "topk_logprobs" [T, K + 1]
        of the K likeliest tokens and of any other (top_k=0: [T, V], of all in order of their ids);
        on the CPU, in float32, or float64 for a float64 model."""
        ...

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        """One optimizer step on a weighed mini-batch. Only sums: micro-batches and ranks never
        rescale. A step whose gradient is not finite, or whose weights are all 0, changes nothing
        and says so in the metrics."""
        ...

    def weights(self) -> Iterator[Shard]: ...
    def save(self, directory: Path) -> None:
        """Save everything that a bit-equal continuation needs: weights, optimizer, schedule."""
        ...

    def load(self, directory: Path) -> None: ...
    def export(self, directory: Path, *, averaged: bool = False, part: Exported = "all") -> None:
        """The model in Hugging Face form, with its adapter merged into it and its scalar head where
        it has them. averaged: with the running average of its weights in their place, where the
        optimizer keeps one. part: "base" is the model without its adapter, "adapter" that alone, in
        peft's form."""
        ...


@runtime_checkable
class Fingerprinted(Protocol):
    """A learner that says cheaply which weights it has."""

    def fingerprint(self) -> str:
        """Changes with any bit of what it trains."""
        ...


@runtime_checkable
class Generator(Protocol):
    """Turns prompt tokens into completions. A push of new weights is a transaction: prepare,
    receive, commit (or rollback)."""

    @property
    def version(self) -> int: ...
    async def generate(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        sampling: Sampling,
        media: Sequence[Placed] = (),
    ) -> Completion:
        """media: those of the prompt, in order; a generator whose model reads none raises
        ConfigError."""
        ...

    def abort(self) -> None:
        """Ends every running request; each returns what it has, with StopReason.ABORTED."""
        ...

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def prepare(self, manifest: Mapping[str, Any]) -> None: ...
    async def receive(self, shards: Iterator[Shard]) -> None: ...
    async def commit(self, version: int) -> None: ...
    async def rollback(self) -> None: ...


@runtime_checkable
class HasReadableWeights(Protocol):
    """A generator that can say what it holds, so that it can be compared with what was sent."""

    def weights(self) -> Iterator[Shard]: ...


@runtime_checkable
class SupportsWeightAdoption(Protocol):
    """A generator that may use pushed weights where it received them, if the sender marks them as
    lasting.

    `lasting` in the manifest of `prepare` says that they stay as they are after the commit, until
    the next one.
    """

    @property
    def adopted(self) -> bool:
        """Return True if the generator uses any memory of the last push."""
        ...


@runtime_checkable
class Placeable(Protocol):
    """A component that can release its accelerator to others, and take it back. Both calls do
    nothing if it is already so."""

    async def onload(self) -> None: ...
    async def offload(self) -> None: ...


@runtime_checkable
class Closeable(Protocol):
    """A component that has started or opened something."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's answer to one policy turn: what it says back, the turn's own reward (None:
    this environment leaves judging to rewards), and whether the episode ended. `metrics` are summed
    over the turns of an attempt."""

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False
    state_key: str = ""
    metrics: Mapping[str, float] | None = None


@runtime_checkable
class Environment(Protocol):
    """Serves tasks, and plays one attempt at a time (the manager makes as many instances as it
    needs).

    `replayable`: reset(task) followed by the same messages gives the same observations.
    """

    replayable: bool

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        """Tasks in a fixed order given `seed`, from position `start` on, so that resuming costs one
        integer. "train" is endless (data are passed over again and again); "test" may end, never
        overlaps "train", and is the same for every seed. An instance keeps what belongs to one
        attempt in attributes that `reset` assigns: instances are shallow copies of each other and
        share their data."""
        ...

    def demonstration(self, task: Task) -> Sequence[Message]:
        """The messages that solve the task, for supervised training. Raises DataError where there
        is none."""
        ...

    async def reset(self, task: Task) -> Sequence[Message]: ...
    async def step(self, message: Message) -> Step: ...
    async def close(self) -> None: ...


@runtime_checkable
class HasTools(Protocol):
    """An environment whose policy may call tools. The calls arrive parsed, as `tool_calls` of the
    message that `step` gets, with ids that are unique in the conversation; answer each by a
    Message("tool", ..., tool_call_id=call.id). What was meant as a call and can't be read is no
    tool call: it stays in the message's text, and is counted."""

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        """JSON-schema descriptions ({"type": "function", "function": {"name", "description",
        "parameters"}}), asked for after `reset`, and with a demonstration; the same during the
        whole attempt."""
        ...


@runtime_checkable
class HasStopStrings(Protocol):
    """An environment that says which strings end the policy's next turn, beside those of the
    recipe. Asked for before each."""

    @property
    def stop_strings(self) -> tuple[str, ...]: ...


@runtime_checkable
class HasMetrics(Protocol):
    """An environment or a source with numbers of its own on the groups of a step, beside those that
    every run measures."""

    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]: ...


@runtime_checkable
class HasPreferencePairs(Protocol):
    """An environment that also has better and worse answers to its tasks, for preference learning
    and reward models."""

    def comparison(self, task: Task) -> Comparison: ...


@runtime_checkable
class HasLabelledAnswers(Protocol):
    """An environment that also has single answers with a reward (above 0: good)."""

    def judged(self, task: Task) -> Judged: ...


@runtime_checkable
class HasStepLabels(Protocol):
    """An environment that also has answers in steps, each with a label in [0, 1]: the text of each
    step, and its label."""

    def steps(self, task: Task) -> Sequence[tuple[str, float]]: ...


@runtime_checkable
class Reward(Protocol):
    """Judges the trajectories of one group, one for each attempt: where a history forked, the last,
    with the whole conversation in its messages. A plain function `(trajectory, task) -> float |
    dict of named parts` is adapted.

    With an attribute `together = False` it says that it compares none with another: each attempt is
    then judged by a call of its own, as soon as it ends, and what breaks or is late costs no
    other."""

    async def score(self, trajectories: Sequence[Trajectory], task: Task) -> Sequence[Outcome]: ...


@runtime_checkable
class HasFinalAnswers(Protocol):
    """A reward that can say which final answer an attempt gives, so that attempts at a task can be
    counted by it."""

    def vote(self, trajectory: Trajectory, task: Task) -> str | None:
        """Return a text that is equal for answers that mean the same; None if the attempt gives
        none."""
        ...


@runtime_checkable
class Source(Protocol):
    """Yields groups; keeps what was drawn until it is acknowledged, so that a resumed run loses
    nothing."""

    async def draw(self, n: int, version: int) -> list[Group]: ...
    def ack(self, ids: Sequence[str], step: int) -> None: ...
    def nack(self, ids: Sequence[str], reason: str) -> None: ...
    async def snapshot(self) -> Mapping[str, Any]:
        """JSON-serialisable state at a step boundary."""
        ...

    async def restore(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class AdaptiveSource(Protocol):
    """A source that goes by how its groups did."""

    def adapt(self, groups: Sequence[Group], step: int, measured: Mapping[str, float]) -> None:
        """Adapt after the step that trained on the groups. measured: means over its optimizer
        steps, under the names of the metrics."""
        ...


@runtime_checkable
class WeightSync(Protocol):
    """Moves weights from a learner to a generator."""

    async def push(self, version: int) -> None: ...
    async def close(self) -> None:
        """Both ends let go of what they keep between pushes."""
        ...


@runtime_checkable
class Ranks(Protocol):
    """Components of one kind, each in a process of its own (or one in this process), that are
    called together."""

    async def call(self, method: str, /, *arguments: Any) -> list[Any]:
        """The results by rank; raises what a rank raised, or the error that names the rank that
        died."""
        ...


@runtime_checkable
class Workers(Ranks, Protocol):
    """The ranks of one role, each a process with a component of its own
    (`ratchet.executors.worker_group.WorkerGroup`). Methods run on all ranks at the same time, one
    after another on each."""

    @property
    def size(self) -> int: ...
    async def build(self, factory: str, arguments: Mapping[str, Any] | None = None) -> None:
        """factory: "module:callable", called with the rank's place (rank, world_size, rendezvous,
        device, ...) and these."""
        ...

    def within(self, timeout_s: float, *, owner: str = "driver") -> Workers:
        """Return the same workers with another deadline for calls."""
        ...

    async def call(self, method: str, /, *arguments: Any, **named: Any) -> list[Any]: ...
    async def each(self, method: str, arguments_by_rank: Sequence[Sequence[Any]]) -> list[Any]: ...
    def call_now(self, method: str, /, *arguments: Any, **named: Any) -> list[Any]:
        """Call and wait, for callers that can't await."""
        ...

    def build_now(self, factory: str, arguments: Mapping[str, Any] | None = None) -> None: ...
    def each_now(self, method: str, arguments_by_rank: Sequence[Sequence[Any]]) -> list[Any]: ...
    def close(self) -> None: ...


@runtime_checkable
class WeightAudit(Protocol):
    """A weight sync that can compare both ends, weight by weight."""

    async def audit(self) -> Sequence[str] | None:
        """The weights that differ, in the learner's order; None where the generator can't show what
        it has."""
        ...


@runtime_checkable
class Executor(Protocol):
    """Decides where components live: in this process (`spawn`), or in a group of processes."""

    def spawn(self, factory: Callable[..., Any], /, **arguments: Any) -> Any: ...
    def plan(self, needs: Sequence[Any]) -> None:
        """All that groups will need, before the first is started. Raises ConfigError with a table
        of what is missing."""
        ...

    def group(self, role: str, rank: int | None = None) -> Workers:
        """Starts the processes of a role of the plan. rank: this one alone, as a group of one,
        where ranks do not need one another; after its end another process, on the same
        accelerators."""
        ...

    def close(self) -> None: ...
