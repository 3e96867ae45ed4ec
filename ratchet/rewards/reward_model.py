"""A learned reward model scores the conversation.

T = tokens of packed sequences laid end to end, S = sequences.
"""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ratchet.config.base import Section
from ratchet.errors import DataError, ModelError
from ratchet.types import Cancelled, Failed, Outcome, Scored, Task, Trajectory, Truncated

if TYPE_CHECKING:  # rewards load no torch when they are imported
    from ratchet.data.chat.renderer import Renderer
    from ratchet.models.policy import PolicyModel
    from ratchet.models.scalar_head import ScalarHead


class RewardModelConfig(Section):
    """The score of a reward model."""

    builds: ClassVar[str] = "ratchet.rewards.reward_model:RewardModel"

    path: str = Field(
        min_length=1,
        description="Directory of a model with a scalar head, such as runs/reward_model/model.",
    )
    template: str | None = Field(None, description="Chat template; null: its tokenizer's own.")
    batch_tokens: int = Field(16_384, gt=0, description="Tokens that are read at once.")
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="Where it runs.")
    trust_remote_code: bool = Field(
        False, description="Let transformers run code that comes with the model."
    )


class RewardModel:
    """Judges text: the conversation is rendered with the model's own template and tokenizer, as the
    rows were that it was trained on, whatever the policy's are. An answer that a limit of tokens
    cut off is scored without an end of turn; one that the policy ended has it, whatever ended the
    attempt."""

    def __init__(self, config: RewardModelConfig) -> None:
        """Raises ModelError where the directory holds no model with a scalar head."""
        import torch

        self.config = config
        self._model, self._head, self._renderer = _load(config)
        # One thread: the rollouts go on meanwhile. It computes with as many cores as the process
        # may use.
        threads = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(
            1, "reward-model", initializer=torch.set_num_threads, initargs=(threads,)
        )

    async def score(self, trajectories: Sequence[Trajectory], task: Task) -> Sequence[Outcome]:
        """Failed("reward") for a conversation that the model can't read: too long, or without an
        answer."""
        outcomes: list[Outcome] = []
        rows: list[tuple[int, list[int]]] = []
        for i, trajectory in enumerate(trajectories):
            outcomes.append(trajectory.outcome or Scored(0.0))
            if isinstance(trajectory.outcome, Failed | Cancelled):
                continue
            try:
                rows.append((i, self._tokens(trajectory)))
            except DataError:
                outcomes[i] = Failed(
                    "reward", f"reward_model, task '{task.id}':\n{traceback.format_exc()}"
                )
        for batch in _batches(rows, self.config.batch_tokens):
            asked = [tokens for _, tokens in batch]
            scores = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._scores, asked
            )
            for (i, _), score in zip(batch, scores, strict=True):
                outcomes[i] = _outcome(score, trajectories[i])
        return outcomes

    def _tokens(self, trajectory: Trajectory) -> list[int]:
        last = max(
            (i for i, message in enumerate(trajectory.messages) if message.role == "assistant"),
            default=-1,
        )
        if last < 0:
            raise DataError("the trajectory has no assistant message to judge")
        tokens, _ = self._renderer.supervised(trajectory.messages[: last + 1], train="last")
        if trajectory.is_cut_short:
            tokens = tokens[:-1]  # the end of a turn that has none
        if len(tokens) > self._model.max_positions:
            raise DataError(
                f"the conversation has {len(tokens)} tokens, the reward model reads "
                f"{self._model.max_positions}"
            )
        return tokens

    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The scalar head at each row's last token."""
        import torch

        lengths = [len(row) for row in rows]
        device = self.config.device
        with torch.inference_mode():
            tokens_T = torch.tensor([token for row in rows for token in row], device=device)
            positions_T = torch.tensor(
                [i for length in lengths for i in range(length)], device=device
            )
            scores_T = self._head(self._model.hidden(tokens_T, positions_T, lengths))
            last_S = torch.tensor(lengths, device=device).cumsum(0) - 1
            return scores_T[last_S].tolist()


def _load(config: RewardModelConfig) -> tuple[PolicyModel, ScalarHead, Renderer]:
    from ratchet.data.chat.renderer import Renderer
    from ratchet.data.chat.tokenizer_loading import load_tokenizer
    from ratchet.models.load import find_model, load_policy
    from ratchet.models.scalar_head import load_head

    directory: Path = find_model(config.path)
    model = load_policy(directory, device=config.device, trust_remote_code=config.trust_remote_code)
    head = load_head(directory, model.hidden_size)
    if head is None:
        raise ModelError(
            f"{config.path} has no scalar head: train one with recipes/reward_model.yaml"
        )
    return (
        model.requires_grad_(False),
        head.to(config.device),
        Renderer(load_tokenizer(directory), config.template),
    )


def _batches(
    rows: Sequence[tuple[int, list[int]]], batch_tokens: int
) -> Iterator[list[tuple[int, list[int]]]]:
    """Yield batches in order; a row that is longer than a batch may be is a batch alone."""
    batch: list[tuple[int, list[int]]] = []
    for row in rows:
        if batch and sum(len(tokens) for _, tokens in batch) + len(row[1]) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _outcome(score: float, trajectory: Trajectory) -> Outcome:
    if not math.isfinite(score):
        return Failed(
            "reward", f"the reward model's score is {score}: its weights, or its device, are broken"
        )
    kind = Truncated if isinstance(trajectory.outcome, Truncated) else Scored
    return kind(score, {"reward_model": score})
