"""The protocols that backends, environments, rewards and sources implement.

They are small on purpose. Each has a fake and a conformance suite in `ratchet.testing`. Methods are
async where an implementation may wait for another process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from ratchet.types import (
    Comparison,
    Completion,
    Group,
    LabelledAnswer,
    Message,
    Outcome,
    Placed,
    Sampling,
    Split,
    Task,
    Trajectory,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from ratchet.batch import Batch


ExportedPart = Literal["all", "base", "adapter"]
# The fields of `Outputs` that have an entry for each sequence, not for each token.
SEQUENCE_OUTPUTS = frozenset({"scores", "routers"})


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of a learner for the loss terms on one micro-batch, with gradient.

    A field that no term `needs` is None.

    sequence_sum: sums a token column within each sequence, over context-parallel ranks too.
    logprobs [T]: log p(token | tokens before it in its sequence) under the row's temperature; 0 if
        the token does not train.
    old_logprobs [T], detached: the batch's column; the live logprobs if the batch gets a single
        optimizer step.
    entropy [T]: in nats, under the row's temperature. Like `logprobs` and `values`, entry t belongs
        to the prediction *of* token t.
    values [T]: aligned with `logprobs`.
    scores [S]: the scalar head at each sequence's last token.
    token_scores [T]: the scalar head at each token itself.
    topk_logprobs [T, K + 1]: log p of the K tokens in the batch's column `teacher_ids`, then of all
        other tokens together (no last column if K is the whole vocabulary); 0 if the token does not
        train.
    routers [S, 5]: measures of the MoE routers, see
        `ratchet.models.layers.expert_routing.RouterMonitor.columns`.
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
    """A rank-local piece of one weight, under its Hugging Face name (adapters: its peft name)."""

    name: str
    shape: tuple[int, ...]  # of the whole weight
    offsets: tuple[int, ...]  # where the piece starts, per dimension
    tensor: Tensor
    is_frozen: bool = False  # True if training never changes it, so receivers need it only once


class LossTerm(Protocol):
    """A loss term as a learner sees it, implemented by `ratchet.algorithms.base.AlgorithmTerm`."""

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> frozenset[str]: ...
    def __call__(self, out: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (the micro-batch's sum of weight * x, its weighted mean metrics, detached)."""
        ...


def list_needed_outputs(terms: Iterable[LossTerm]) -> frozenset[str]:
    """Return the names of all outputs that the terms read."""
    return frozenset[str]().union(*(term.needs for term in terms))


@runtime_checkable
class Learner(Protocol):
    """A holder of trainable or frozen weights that scores batches and applies updates."""

    async def score(
        self, batch: Batch, output_names: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        """Return the named columns at `predicted_T`, without gradient.

        The columns are on the CPU, in float32 (float64 for a float64 model; "topk_ids": int64).

        Args:
            output_names: some of "logprobs", "entropy", "values", "token_scores" [T], "scores" [S],
                "topk_ids" [T, K], "topk_logprobs" [T, K + 1].
            top_k: K. "topk_logprobs" has the K likeliest tokens, then all others together.
                With 0, "topk_logprobs" has the tokens in the batch's column `teacher_ids`, then
                all others together. If the batch has no such column, it has all V tokens in order
                of their ids, [T, V].
        """
        ...

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        """Take one optimizer step on a mini-batch with loss weights, and return its metrics.

        Losses are summed over micro-batches and ranks, never rescaled. A step with a non-finite
        gradient, or with all weights 0, is skipped and marked in the metrics.
        """
        ...

    def weights(self) -> Iterator[Shard]: ...
    def save(self, directory: Path) -> None:
        """Save all state that a bit-equal continuation needs: weights, optimizer, schedule."""
        ...

    def load(self, directory: Path) -> None: ...
    def export(
        self, directory: Path, *, averaged: bool = False, part: ExportedPart = "all"
    ) -> None:
        """Write the model in Hugging Face format, with its scalar head if it has one.

        Args:
            averaged: write the running average of the weights, if the optimizer keeps one.
            part: "all" merges the adapter into the model; "base" leaves it out; "adapter" writes it
                alone, in peft's format.
        """
        ...


@runtime_checkable
class Fingerprinted(Protocol):
    """A learner with a cheap fingerprint of its weights."""

    def fingerprint(self) -> str:
        """Return a text that changes with any bit of the trained weights."""
        ...


@runtime_checkable
class Generator(Protocol):
    """An inference engine that turns prompt tokens into completions.

    A push of new weights is a transaction: prepare, receive, commit (or rollback).
    """

    @property
    def version(self) -> int: ...
    async def generate(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        sampling: Sampling,
        media: Sequence[Placed] = (),
    ) -> Completion:
        """Return a completion of the prompt `tokens`.

        media: the prompt's media, in order. Raises ConfigError if the model reads none.
        """
        ...

    def abort(self) -> None:
        """End all running requests; each returns its partial output with StopReason.ABORTED."""
        ...

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def prepare(self, manifest: Mapping[str, Any]) -> None: ...
    async def receive(self, shards: Iterator[Shard]) -> None: ...
    async def commit(self, version: int) -> None: ...
    async def rollback(self) -> None: ...


@runtime_checkable
class HasReadableWeights(Protocol):
    """A generator whose weights can be read, to compare them with the learner's."""

    def weights(self) -> Iterator[Shard]: ...


@runtime_checkable
class SupportsWeightAdoption(Protocol):
    """A generator that may adopt the pushed memory instead of copying it.

    It may do so only if `lasting` is set in the manifest of `prepare`: the memory then stays
    unchanged after the commit, until the next commit.
    """

    @property
    def adopted(self) -> bool:
        """True if the generator uses any memory of the last push."""
        ...


@runtime_checkable
class Placeable(Protocol):
    """A component that can release its accelerator to others and take it back.

    Repeating a call has no effect.
    """

    async def onload(self) -> None: ...
    async def offload(self) -> None: ...


@runtime_checkable
class Closeable(Protocol):
    """A component with processes, connections or files to close."""

    async def close(self) -> None: ...


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


@runtime_checkable
class Environment(Protocol):
    """A source of tasks that plays one attempt at a time.

    The manager makes as many instances as it needs: shallow copies of each other that share their
    data. An instance keeps the state of an attempt in attributes that `reset` assigns.

    replayable: True if `reset(task)` and the same messages give the same observations.
    """

    replayable: bool

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        """Yield tasks from position `start` on, in an order fixed by `seed`.

        A resumed run thus needs only the position. "train" is endless: it repeats the data. "test"
        may end, never overlaps "train", and is the same for every seed.
        """
        ...

    def demonstration(self, task: Task) -> Sequence[Message]:
        """Return messages that solve the task, for supervised training.

        Raises DataError if there are none.
        """
        ...

    async def reset(self, task: Task) -> Sequence[Message]: ...
    async def step(self, message: Message) -> Step: ...
    async def close(self) -> None: ...


@runtime_checkable
class HasTools(Protocol):
    """An environment whose policy may call tools.

    `step` gets the parsed calls as `tool_calls` of its message, with ids that are unique in the
    conversation. Answer each with Message("tool", ..., tool_call_id=call.id). A call that can't be
    parsed stays in the message's text and is counted.
    """

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        """Return JSON schemas: {"type": "function", "function": {"name", "description",
        "parameters"}}.

        They are read after `reset`, and with a demonstration. They must not change during an
        attempt.
        """
        ...


@runtime_checkable
class HasStopStrings(Protocol):
    """An environment that adds stop strings to the recipe's; they are read before each turn."""

    @property
    def stop_strings(self) -> tuple[str, ...]: ...


@runtime_checkable
class HasTaskCount(Protocol):
    """An environment that can tell how many training tasks a pass over its data has."""

    def task_count(self) -> int | None:
        """Return the number of training tasks; None if they are endless."""
        ...


@runtime_checkable
class HasMetrics(Protocol):
    """An environment or source that computes metrics of its own from a step's groups."""

    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]: ...


@runtime_checkable
class HasPreferencePairs(Protocol):
    """An environment with pairs of a better and a worse answer to its tasks.

    They train policies on preferences, and reward models.
    """

    def comparison(self, task: Task) -> Comparison: ...


@runtime_checkable
class HasLabelledAnswers(Protocol):
    """An environment with single answers that have a reward (above 0: good)."""

    def labelled_answer(self, task: Task) -> LabelledAnswer: ...


@runtime_checkable
class HasStepLabels(Protocol):
    """An environment with answers in steps that have labels in [0, 1]."""

    def steps(self, task: Task) -> Sequence[tuple[str, float]]:
        """Return the text and label of each step."""
        ...


@runtime_checkable
class Reward(Protocol):
    """A judge of the trajectories of one group.

    `score` gets one trajectory for each attempt: the last one, whose messages hold the whole
    conversation, if the history forked. A plain function `(trajectory, task) -> float | dict of
    named parts` is adapted to this protocol.

    A reward that does not compare attempts may set the attribute `compares_attempts = False`. Each
    attempt is then judged by its own call as soon as it ends, so a failed or late call affects no
    other attempt.
    """

    async def score(self, trajectories: Sequence[Trajectory], task: Task) -> Sequence[Outcome]: ...


@runtime_checkable
class HasFinalAnswers(Protocol):
    """A reward that extracts an attempt's final answer, which majority voting counts (cons@k)."""

    def extract_final_answer(self, trajectory: Trajectory, task: Task) -> str | None:
        """Return a text that is equal for equivalent answers; None if there is no answer."""
        ...


@runtime_checkable
class Source(Protocol):
    """A source of groups.

    It keeps drawn groups until they are acknowledged, so that a resumed run loses none.
    """

    async def draw(self, n: int, version: int) -> list[Group]: ...
    def ack(self, ids: Sequence[str], step: int) -> None: ...
    def nack(self, ids: Sequence[str], reason: str) -> None: ...
    async def snapshot(self) -> Mapping[str, Any]:
        """Return the JSON-serialisable state at a step boundary."""
        ...

    async def restore(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class AdaptiveSource(Protocol):
    """A source that adapts to training results."""

    def adapt(self, groups: Sequence[Group], step: int, measured: Mapping[str, float]) -> None:
        """Adapt after the step that trained on the groups.

        measured: metrics by name, as means over the step's optimizer steps.
        """
        ...


@runtime_checkable
class WeightSync(Protocol):
    """A weight sync, which loads a learner's weights into a generator (such as vLLM)."""

    async def push(self, version: int) -> None: ...
    async def close(self) -> None:
        """Release the resources that both ends keep between pushes."""
        ...


@runtime_checkable
class Ranks(Protocol):
    """Components of one kind that are called together.

    Each component runs in a process of its own, or there is a single one in this process.
    """

    async def call(self, method: str, /, *arguments: Any) -> list[Any]:
        """Call a method on all ranks and return the results by rank.

        Raises the exception of a rank, or an error that names the rank that died.
        """
        ...


@runtime_checkable
class Workers(Ranks, Protocol):
    """The ranks of one role, each a process with a component of its own.

    `ratchet.executors.worker_group.WorkerGroup` implements it. Ranks run a call at the same time,
    and each rank runs one call after another. `each` gives each rank arguments of its own.
    """

    @property
    def size(self) -> int: ...
    async def build(self, factory: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Build the component of each rank.

        factory: "module:callable", called with the rank's place (rank, world_size, rendezvous,
            device, ...) and `arguments`.
        """
        ...

    def within(self, timeout_s: float, *, owner: str = "driver") -> Workers:
        """Return the same workers with another deadline for calls."""
        ...

    async def call(self, method: str, /, *arguments: Any, **keywords: Any) -> list[Any]: ...
    async def each(self, method: str, arguments_by_rank: Sequence[Sequence[Any]]) -> list[Any]: ...
    def call_now(self, method: str, /, *arguments: Any, **keywords: Any) -> list[Any]:
        """Call all ranks and block until they return, for callers that can't await."""
        ...

    def build_now(self, factory: str, arguments: Mapping[str, Any] | None = None) -> None: ...
    def each_now(self, method: str, arguments_by_rank: Sequence[Sequence[Any]]) -> list[Any]: ...
    def close(self) -> None: ...


@runtime_checkable
class WeightAudit(Protocol):
    """A weight sync that can compare the weights of both ends."""

    async def audit(self) -> Sequence[str] | None:
        """Return the names of differing weights, in the learner's order.

        Returns None if the generator's weights can't be read.
        """
        ...


@runtime_checkable
class Executor(Protocol):
    """An executor starts components: in this process (`spawn`) or in worker groups (`group`)."""

    def spawn(self, factory: Callable[..., Any], /, **arguments: Any) -> Any: ...
    def plan(self, needs: Sequence[Any]) -> None:
        """Assign the resources of all groups, before the first group starts.

        Raises ConfigError with a table of missing resources.
        """
        ...

    def group(self, role: str, rank: int | None = None) -> Workers:
        """Start the processes of a role of the plan.

        rank: start only this rank, as a group of one, if the ranks are independent. A second call
            after the process ended starts a new process on the same accelerators.
        """
        ...

    def close(self) -> None: ...
