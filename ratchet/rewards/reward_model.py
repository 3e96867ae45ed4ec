"""A reward that scores the conversation with a learned reward model."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

from pydantic import Field

from ratchet.config.sections import JudgedSection
from ratchet.data.render_thread import run_beside_loop
from ratchet.errors import DataError
from ratchet.protocols import Reward
from ratchet.rewards.judge_models.scorer import ScalarModel, Scorer, render_tokens
from ratchet.rewards.llm.chat_client import find_judge, make_missing_judge_error
from ratchet.types import Cancelled, Failed, Outcome, Scored, Task, Trajectory, Truncated


class RewardModelConfig(JudgedSection):
    """A score of the conversation by a reward model that Ratchet trained."""

    builds: ClassVar[str] = "ratchet.rewards.reward_model:RewardModel"
    judge_kind: ClassVar[str] = "reward_model"

    path: str | None = Field(None, min_length=1)
    """Directory of a model with a scalar head, such as runs/reward_model/model; null: judge names
    the model."""
    template: str | None = None
    """Chat template; null: the template of the reward model's tokenizer."""
    batch_tokens: int = Field(16_384, gt=0)
    """Maximum number of tokens in a batch of several conversations."""
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """Device of the reward model."""
    trust_remote_code: bool = False
    """True to let transformers run code that comes with the model."""

    def check_keys(self) -> None:
        if self.judge is None and self.path is None:
            raise ValueError(
                "lacks path: set path to a model's directory, or judge to a reward_model of the "
                "recipe's judges"
            )
        keys = ("path", "template", "device", "trust_remote_code")
        unread = [key for key in keys if key in self.changed]
        if self.judge is not None and unread:
            raise ValueError(
                f"{unread[0]} is for a model in the reward's own process, and judge={self.judge} "
                f"is one of the run: set {unread[0]} there, or remove judge"
            )


class ConversationScorer(Protocol):
    """A reward model as this reward calls it: `Scorer` or `WorkerScorer`."""

    renderer: Any
    max_positions: int

    async def score(self, rows: Sequence[Sequence[int]]) -> list[float]: ...


class RewardModel(Reward):
    """A reward that reads the conversation as text.

    It renders the text with the reward model's own template and tokenizer, as in its training, not
    with the policy's. An answer cut off by a token limit is scored without an end-of-turn token. An
    answer that the policy ended is scored with this token, even if the attempt was truncated.
    """

    def __init__(self, config: RewardModelConfig) -> None:
        """Raise ModelError if the directory holds no model with a scalar head."""
        self.config = config
        self._scorer = None if config.path is None else _load(config, config.path)

    def use_judges(self, judges: Mapping[str, Any]) -> None:
        if self.config.judge is not None:
            self._scorer = find_judge(judges, self.config.judge)

    async def score(self, trajectories: Sequence[Trajectory], task: Task) -> Sequence[Outcome]:
        """Return the scores as outcomes.

        A conversation that is too long, has no answer, or can't be scored gives Failed("reward").
        """
        scorer = self._scorer
        if scorer is None:
            raise make_missing_judge_error(self.config.judge)
        outcomes: list[Outcome] = []
        rows: list[tuple[int, list[int]]] = []
        for i, trajectory in enumerate(trajectories):
            outcomes.append(trajectory.outcome or Scored(0.0))
            if isinstance(trajectory.outcome, Failed | Cancelled):
                continue
            try:
                render = partial(render_tokens, trajectory, scorer.renderer, scorer.max_positions)
                rows.append((i, await run_beside_loop(trajectory.messages, render)))
            except DataError:
                outcomes[i] = Failed(
                    "reward", f"reward_model, task '{task.id}':\n{traceback.format_exc()}"
                )
        for batch in _iter_batches(rows, self.config.batch_tokens):
            scores = await scorer.score([tokens for _, tokens in batch])
            for (i, _), score in zip(batch, scores, strict=True):
                outcomes[i] = _make_outcome(score, trajectories[i])
        return outcomes


def _load(config: RewardModelConfig, path: str) -> ConversationScorer:
    from ratchet.data.chat.renderer import Renderer
    from ratchet.data.chat.tokenizer_loading import load_tokenizer
    from ratchet.models.load import find_model

    directory = find_model(path)
    model = ScalarModel(directory, device=config.device, trust_remote_code=config.trust_remote_code)
    return Scorer(model, Renderer(load_tokenizer(directory), config.template))


def _iter_batches(
    rows: Sequence[tuple[int, list[int]]], batch_tokens: int
) -> Iterator[list[tuple[int, list[int]]]]:
    """Yield batches in order. A row above `batch_tokens` is a batch of its own."""
    batch: list[tuple[int, list[int]]] = []
    for row in rows:
        if batch and sum(len(tokens) for _, tokens in batch) + len(row[1]) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _make_outcome(score: float, trajectory: Trajectory) -> Outcome:
    if not math.isfinite(score):
        return Failed(
            "reward", f"the reward model's score is {score}: its weights, or its device, are broken"
        )
    outcome_type = Truncated if isinstance(trajectory.outcome, Truncated) else Scored
    return outcome_type(score, {"reward_model": score})
