"""Fakes that fulfil their protocols. A test sets their behaviour with a `script` function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratchet.batch import Batch
from ratchet.errors import DataError
from ratchet.protocols import (
    Environment,
    ExportedPart,
    Generator,
    Learner,
    LossTerm,
    Outputs,
    Reward,
    Shard,
    Source,
    Step,
    WeightSync,
)
from ratchet.types import (
    Completion,
    Group,
    Message,
    Outcome,
    PlacedMedium,
    Sampling,
    Scored,
    Split,
    StopReason,
    Task,
    Trajectory,
)


class TextOnlyMixin:
    """A mixin for test renderers that support no media."""

    def media(self, tokens: Sequence[int], messages: Sequence[Message]) -> tuple[PlacedMedium, ...]:
        return ()

    def find_media_token(self, sampled: Sequence[int] | NDArray[np.int64]) -> str | None:
        return None


class FakeGenerator(Generator):
    """A generator whose completions come from `script(prompt tokens, sampling) -> tokens`.

    The stop reason is STOP_TOKEN if the last token is in `stop_ids`, else LENGTH.
    """

    def __init__(self, script: Callable[[Any, Sampling], Sequence[int]]) -> None:
        self.script = script
        self.requests: list[tuple[list[int], Sampling]] = []
        self.media: list[tuple[PlacedMedium, ...]] = []  # the media of each request
        self.version = 0

    async def generate(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        sampling: Sampling,
        media: Sequence[PlacedMedium] = (),
    ) -> Completion:
        if not len(tokens):
            raise DataError("an empty prompt: nothing precedes the first token")
        self.requests.append((list(tokens), sampling))
        self.media.append(tuple(media))
        new_tokens = list(self.script(tokens, sampling))[: sampling.max_new_tokens]
        n_tokens = len(new_tokens)
        has_stop_token = n_tokens > 0 and new_tokens[-1] in sampling.stop_ids
        return Completion(
            tokens=np.asarray(new_tokens, dtype=np.int64),
            logprobs=np.full(n_tokens, -1.0, dtype=np.float32),
            log_kept_mass=np.zeros(n_tokens, dtype=np.float32),
            versions=np.full(n_tokens, self.version, dtype=np.int32),
            stop=StopReason.STOP_TOKEN if has_stop_token else StopReason.LENGTH,
        )

    def abort(self) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def prepare(self, manifest: Mapping[str, Any]) -> None: ...

    async def receive(self, shards: Iterator[Shard]) -> None:
        for _ in shards:
            pass

    async def commit(self, version: int) -> None:
        self.version = version

    async def rollback(self) -> None: ...


class FakeLearner(Learner):
    """A learner whose model is a float64 softmax over one logit per token id.

    All positions share it, so that gradients can be worked out by hand.
    """

    def __init__(self, vocab_size: int, *, lr: float = 1.0) -> None:
        self.logits = torch.zeros(vocab_size, dtype=torch.float64, requires_grad=True)
        self.lr = lr
        self.updates = 0

    def _outputs(self, batch: Batch) -> Outputs:
        logprobs_V = self.logits.log_softmax(-1)
        logprobs_T = torch.where(batch.trainable_T, logprobs_V[batch.tokens_T], 0.0)
        entropy_T = torch.where(batch.trainable_T, -(logprobs_V.exp() * logprobs_V).sum(), 0.0)
        old_T = batch.need("old_logprobs") if batch.has("old_logprobs") else logprobs_T.detach()
        return Outputs(
            batch.sequence_sum, logprobs=logprobs_T, old_logprobs=old_T, entropy=entropy_T
        )

    async def score(
        self, batch: Batch, output_names: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        with torch.no_grad():
            return {name: self._outputs(batch).need(name) for name in output_names}

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        loss = sum(
            (term(self._outputs(mini), mini)[0] for term in terms),
            torch.zeros((), dtype=torch.float64),
        )
        (gradient,) = torch.autograd.grad(loss, self.logits)
        with torch.no_grad():
            self.logits -= self.lr * gradient
        self.updates += 1
        return {"loss": float(loss.detach())}

    def weights(self) -> Iterator[Shard]:
        yield Shard("logits", tuple(self.logits.shape), (0,), self.logits.detach())

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        np.save(directory / "logits.npy", self.logits.detach().numpy(), allow_pickle=False)

    def export(
        self, directory: Path, *, averaged: bool = False, part: ExportedPart = "all"
    ) -> None:
        self.save(directory)

    def load(self, directory: Path) -> None:
        with torch.no_grad():
            self.logits.copy_(
                torch.from_numpy(np.load(directory / "logits.npy", allow_pickle=False))
            )


class FakeEnvironment(Environment):
    """An echo environment: a task shows a digit, and the right answer repeats it.

    Without `script`, the first step ends the attempt. With it, `script(task, message) -> Step`
    returns every step.
    """

    replayable = True

    def __init__(self, script: Callable[[Task, Message], Step] | None = None) -> None:
        self.script = script
        self.task: Task | None = None

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        offset, count = (0, 5) if split == "train" else (5, 5)
        index = start
        while split == "train" or index < count:
            digit = str(offset + (index + (seed if split == "train" else 0)) % count)
            yield Task(
                f"echo/{split}/{index}",
                (Message("user", digit),),
                answer=digit,
                environment="echo",
                tag="echo",
            )
            index += 1

    def demonstration(self, task: Task) -> Sequence[Message]:
        return (Message("assistant", task.answer),)

    async def reset(self, task: Task) -> Sequence[Message]:
        self.task = task
        return task.messages

    async def step(self, message: Message) -> Step:
        assert self.task is not None
        return Step(done=True) if self.script is None else self.script(self.task, message)

    async def close(self) -> None:
        self.task = None


class FakeReward(Reward):
    """A reward whose scores come from `script(trajectory, task) -> float`."""

    def __init__(self, script: Callable[[Trajectory, Task], float]) -> None:
        self.script = script

    async def score(self, trajectories: Sequence[Trajectory], task: Task) -> Sequence[Outcome]:
        return [Scored(self.script(trajectory, task)) for trajectory in trajectories]


class FakeSource(Source):
    """A source that yields the given groups in a cycle, each time under new ids."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = list(groups)
        self.position = 0
        self.pending: list[int] = []
        self.to_repeat: list[int] = []

    async def draw(self, n: int, version: int) -> list[Group]:
        repeated, self.to_repeat = self.to_repeat[:n], self.to_repeat[n:]
        fresh = list(range(self.position, self.position + n - len(repeated)))
        self.position += len(fresh)
        self.pending += [*repeated, *fresh]
        return [self._group(number) for number in [*repeated, *fresh]]

    def _group(self, number: int) -> Group:
        group = self.groups[number % len(self.groups)]
        return Group(f"fake/{number}", group.task, group.trajectories)

    def ack(self, ids: Sequence[str], step: int) -> None:
        for name in ids:
            self.pending.remove(int(name.partition("/")[2]))

    def nack(self, ids: Sequence[str], reason: str) -> None:
        self.ack(ids, -1)
        self.to_repeat += [int(name.partition("/")[2]) for name in ids]

    async def snapshot(self) -> Mapping[str, Any]:
        return {"position": self.position, "pending": sorted([*self.pending, *self.to_repeat])}

    async def restore(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]
        self.pending = []
        self.to_repeat = list(state["pending"])


class FakeWeightSync(WeightSync):
    def __init__(self) -> None:
        self.pushed: list[int] = []

    async def push(self, version: int) -> None:
        self.pushed.append(version)

    async def close(self) -> None: ...
