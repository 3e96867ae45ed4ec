"""Define what backends, environments, rewards and sources must provide.

They are small on purpose. Each has a fake and a conformance suite in `ratchet.testing`. Methods are
async where an implementation may wait for another process.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ratchet.errors import ConfigError, DataError
from ratchet.types import (
    Comparison,
    Completion,
    Group,
    LabelledAnswer,
    Message,
    Outcome,
    PlacedMedium,
    Sampling,
    Split,
    Step,
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
    old_logprobs [T], detached: the batch's column; the live logprobs in a batch of a single step.
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


class Offloadable:
    """The part of learners and generators by which they share an accelerator (colocation)."""

    can_offload: bool = False
    """True if `offload` frees the accelerator for others."""

    async def onload(self) -> None:
        """Take the accelerator back. Repeating a call has no effect."""
        return

    async def offload(self) -> None:
        """Release the accelerator. Repeating a call has no effect."""
        return


class Learner(Offloadable, ABC):
    """A holder of trainable or frozen weights that scores batches and applies updates."""

    @abstractmethod
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

    async def score_base(
        self, batch: Batch, output_names: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        """Score like `score`, without the model's adapter (the reference of a LoRA run)."""
        raise ConfigError(
            f"{type(self).__name__} can't score without its adapter. Remove lora, or the KL to the "
            "reference"
        )

    @abstractmethod
    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        """Take one optimizer step on a mini-batch with loss weights, and return its metrics.

        Losses are summed over micro-batches and ranks, never rescaled. A step with a non-finite
        gradient, or with all weights 0, is skipped and marked in the metrics.
        """

    @abstractmethod
    def weights(self) -> Iterator[Shard]:
        """Yield the pieces of the current weights."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Save all state that a bit-equal continuation needs: weights, optimizer, schedule."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Load what `save` saved."""

    @abstractmethod
    def export(
        self, directory: Path, *, averaged: bool = False, part: ExportedPart = "all"
    ) -> None:
        """Write the model in Hugging Face format, with its scalar head if it has one.

        Args:
            averaged: write the running average of the weights, if the optimizer keeps one.
            part: "all" merges the adapter; "base" omits it; "adapter" is it alone, as in peft.
        """

    def fingerprint(self) -> str | None:
        """Return a text that changes with any bit of the trained weights; None if there is none."""
        return None

    def count_later_bytes(self) -> int:
        """Return the bytes that updates will allocate on the device for gradients and moments."""
        return 0


class Generator(Offloadable, ABC):
    """An inference engine that turns prompt tokens into completions.

    A push of new weights is a transaction: prepare, receive, commit (or rollback).
    """

    version: int
    """The version of the weights that it generates with."""
    tokenizer: Any = None
    """Its tokenizer, if it has one."""
    precision: str | None = None
    """The format to which it converts received weights; None: they are kept as sent."""
    shares_weights: bool = False
    """True if it reads the learner's own tensors."""
    adopted: bool = False
    """True if it uses any memory of the last push in place. It may do so only if `lasting` is set
    in the manifest of `prepare`: the memory then stays unchanged after the commit, until the next
    commit."""
    records_routes: bool = False
    """True if completions can record the experts that computed each token."""
    records_masks: bool = False
    """True if completions under a grammar record the tokens that it allowed, which the learner
    needs (`Completion.allowed`)."""
    computed_tokens: int = 0
    """Number of tokens computed so far; 0 if they are not counted."""
    final_error: Exception | None = None
    """The error of every further request; None while requests are answered."""

    @abstractmethod
    async def generate(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        sampling: Sampling,
        media: Sequence[PlacedMedium] = (),
    ) -> Completion:
        """Return a completion of the prompt `tokens`.

        media: the prompt's media, in order. Raises ConfigError if the model reads none.
        """

    @abstractmethod
    def abort(self) -> None:
        """End all running requests; each returns its partial output with StopReason.ABORTED."""

    @abstractmethod
    async def pause(self) -> None: ...
    @abstractmethod
    async def resume(self) -> None: ...
    @abstractmethod
    async def prepare(self, manifest: Mapping[str, Any]) -> None: ...
    @abstractmethod
    async def receive(self, shards: Iterator[Shard]) -> None: ...
    @abstractmethod
    async def commit(self, version: int) -> None: ...
    @abstractmethod
    async def rollback(self) -> None: ...

    def weights(self) -> Iterator[Shard]:
        """Yield the current weights, to compare them with the learner's; none if it can't."""
        return iter(())

    def reserve_memory(self, n_bytes: int) -> None:
        """Leave so many bytes of free device memory to the learners of the stage that begins."""
        return

    async def close(self) -> None:
        """End its processes and connections."""
        return


class Environment(ABC):
    """A source of tasks that plays one attempt at a time.

    The manager makes as many instances as it needs: shallow copies of each other that share their
    data. An instance keeps the state of an attempt in attributes that `reset` assigns.

    A class of a user need not derive from it: `ratchet.utils.user_parts.add_missing_members` adds
    the members that it lacks.
    """

    replayable: bool = False
    """True if `reset(task)` and the same messages give the same observations."""
    returns_rewards: bool = True
    """True if steps return rewards, so that the recipe needs no `rewards`."""
    stop_strings: tuple[str, ...] = ()
    """Stop strings beside the recipe's; they are read before each turn."""
    raw_observations: bool = False
    """True if the text of observations is appended as its own tokens, without the chat template.
    Special tokens written in it are parsed."""

    @abstractmethod
    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        """Yield tasks from position `start` on, in an order fixed by `seed`.

        A resumed run thus needs only the position. "train" is endless: it repeats the data. "test"
        may end, never overlaps "train", and is the same for every seed.
        """

    @abstractmethod
    async def reset(self, task: Task) -> Sequence[Message]:
        """Begin an attempt and return its first messages."""

    @abstractmethod
    async def step(self, message: Message) -> Step:
        """Answer one message of the policy."""

    def observe(
        self, task: Task, first: Sequence[Message], turns: Sequence[Sequence[Message]]
    ) -> Sequence[Message]:
        """Return the prompt of the next turn, if the recipe sets `rollouts.history_window`.

        It must depend on the arguments alone: the messages of `reset`, and the last turns, each an
        answer of the policy and the observation that followed it. By default, it is all of them.
        """
        return [*first, *(message for turn in turns for message in turn)]

    async def close(self) -> None:
        """Release what the instance holds: processes, connections, files."""
        return

    def task_count(self) -> int | None:
        """Return the number of training tasks of a pass over the data; None if it is endless."""
        return None

    def drops_too_long_rows(self, task: Task) -> bool:
        """Return True to leave the task out if its row is too long; False makes it an error."""
        return False

    def post_process(self, groups: Sequence[Group]) -> Sequence[Group]:
        """Return a step's new groups as they train, in their order, perhaps with other rewards."""
        return groups

    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Return the environment's own metrics of a step's groups."""
        return {}

    async def reward_cut_attempt(self, messages: Sequence[Message]) -> float | None:
        """Return the reward of an attempt that a limit of tokens or turns cut off.

        It is added to the rewards of the attempt's turns; None adds none.

        Args:
            messages: The whole conversation. The last message is the policy's unfinished one, or
                an observation that it can't answer any more.
        """
        return None

    # --- tools

    @property
    def has_tools(self) -> bool:
        """True if the policy may call tools, in some tasks at least."""
        return _has_own_method(self, Environment.tools)

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        """Return the tools of a task as JSON schemas: {"type": "function", "function": {"name",
        "description", "parameters"}}.

        They are read after `reset`, and with a demonstration. They must not change during an
        attempt. `step` gets the parsed calls as `tool_calls` of its message, with ids that are
        unique in the conversation. Answer each with Message("tool", ..., tool_call_id=call.id). A
        call that can't be parsed stays in the message's text and is counted.
        """
        return ()

    # --- answers to learn from; each raises DataError for a task without one

    def demonstration(self, task: Task) -> Sequence[Message]:
        """Return messages that solve the task, for supervised training."""
        raise _make_missing_answer(self, "demonstration")

    @property
    def has_pairs(self) -> bool:
        """True if the tasks come with pairs of a better and a worse answer."""
        return _has_own_method(self, Environment.comparison)

    def comparison(self, task: Task) -> Comparison:
        """Return a better and a worse answer, to train policies and reward models on."""
        raise _make_missing_answer(self, "comparison")

    @property
    def has_labelled_answers(self) -> bool:
        """True if the tasks come with single answers that have a reward."""
        return _has_own_method(self, Environment.labelled_answer)

    def labelled_answer(self, task: Task) -> LabelledAnswer:
        """Return an answer with its reward (above 0: good)."""
        raise _make_missing_answer(self, "labelled_answer")

    @property
    def has_step_labels(self) -> bool:
        """True if the tasks come with answers whose steps have labels."""
        return _has_own_method(self, Environment.steps)

    def steps(self, task: Task) -> Sequence[tuple[str, float]]:
        """Return the text and label, in [0, 1], of each step of an answer."""
        raise _make_missing_answer(self, "steps")


def _has_own_method(part: object, default: Callable[..., Any]) -> bool:
    """True if the part has a method, or a function, of its own in place of the `default`."""
    method = getattr(part, default.__name__)
    return not inspect.ismethod(method) or method.__func__ is not default


def _make_missing_answer(environment: Environment, method: str) -> DataError:
    return DataError(f"environment {type(environment).__name__} has no {method}(task)")


class Reward(ABC):
    """A judge of the trajectories of one group.

    `score` gets one trajectory for each attempt: the last one, whose messages hold the whole
    conversation, if the history forked. A plain function `(trajectory, task) -> float | dict of
    named parts` is adapted to this class (`ratchet.rewards.base.as_reward`).
    """

    compares_attempts: bool = True
    """False if each attempt can be judged by its own call as soon as it ends, so that a failed or
    late call affects no other attempt."""

    @abstractmethod
    async def score(self, trajectories: Sequence[Trajectory], task: Task) -> Sequence[Outcome]:
        """Return the outcome of each trajectory."""

    def use_judges(self, judges: Mapping[str, Any]) -> None:
        """Take the models of the recipe's `judges`, by name. It is called before any `score`.

        Raises ConfigError if a model that the reward needs is not among them.
        """
        return

    def extract_final_answer(self, trajectory: Trajectory, task: Task) -> str | None:
        """Return an attempt's final answer, which majority voting counts (cons@k).

        It is a text that is equal for equivalent answers; None if there is no answer.
        """
        return None

    def find_answer_extractor(self, task: Task) -> Reward | None:
        """Return the reward that extracts this task's final answers, itself or a part; or None."""
        has_answers = _has_own_method(self, Reward.extract_final_answer)
        return self if has_answers else None


class Source(ABC):
    """A source of groups.

    It keeps drawn groups until they are acknowledged, so that a resumed run loses none.
    """

    @abstractmethod
    async def draw(self, n: int, version: int) -> list[Group]: ...
    @abstractmethod
    def ack(self, ids: Sequence[str], step: int) -> None: ...
    @abstractmethod
    def nack(self, ids: Sequence[str], reason: str) -> None: ...

    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Return the source's own metrics of a step's groups."""
        return {}

    def adapt(self, groups: Sequence[Group], step: int, measured: Mapping[str, float]) -> None:
        """Adapt to the results of the step that trained on the groups.

        measured: metrics by name, as means over the step's optimizer steps.
        """
        return

    @abstractmethod
    async def snapshot(self) -> Mapping[str, Any]:
        """Return the JSON-serialisable state at a step boundary."""

    @abstractmethod
    async def restore(self, state: Mapping[str, Any]) -> None: ...

    async def close(self) -> None:
        """End the rollouts that still run."""
        return


class WeightSync(ABC):
    """A weight sync, which loads a learner's weights into a generator (such as vLLM)."""

    @abstractmethod
    async def push(self, version: int) -> None: ...

    async def audit(self) -> Sequence[str] | None:
        """Return the names of weights that differ at the two ends, in the learner's order.

        Returns None if the generator's weights can't be read.
        """
        return None

    async def close(self) -> None:
        """Release the resources that both ends keep between pushes."""
        return
