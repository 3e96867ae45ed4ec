"""A reward that scores the conversation with a learned reward model.

Suffixes of tensors: T = tokens of the sequences, packed end to end, S = sequences.
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
from ratchet.protocols import Reward
from ratchet.types import Cancelled, Failed, Outcome, Scored, Task, Trajectory, Truncated

if TYPE_CHECKING:  # importing rewards must not load torch
    from ratchet.data.chat.renderer import Renderer
    from ratchet.models.policy import PolicyModel
    from ratchet.models.scalar_head import ScalarHead


class RewardModelConfig(Section):
    """A score of the conversation by a reward model that Ratchet trained."""

    builds: ClassVar[str] = "ratchet.rewards.reward_model:RewardModel"
    calls_model: ClassVar[bool] = True

    path: str = Field(
        min_length=1,
        description="Directory of a model with a scalar head, such as runs/reward_model/model.",
    )
    template: str | None = Field(
        None, description="Chat template; null: the template of the reward model's tokenizer."
    )
    batch_tokens: int = Field(
        16_384, gt=0, description="Maximum number of tokens in a batch of several conversations."
    )
    device: str = Field(
        "cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="Device of the reward model."
    )
    trust_remote_code: bool = Field(
        False, description="True to let transformers run code that comes with the model."
    )


class RewardModel(Reward):
    """A reward that reads the conversation as text.

    It renders the text with the reward model's own template and tokenizer, as in its training, not
    with the policy's. An answer cut off by a token limit is scored without an end-of-turn token. An
    answer that the policy ended is scored with this token, even if the attempt was truncated.
    """

    def __init__(self, config: RewardModelConfig) -> None:
        """Raise ModelError if the directory holds no model with a scalar head."""
        import torch

        self.config = config
        self._model, self._head, self._renderer = _load(config)
        # Scoring runs in its own thread, so that rollouts continue meanwhile. The thread may use as
        # many cores as the process.
        threads = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(
            1, "reward-model", initializer=torch.set_num_threads, initargs=(threads,)
        )

    async def score(self, trajectories: Sequence[Trajectory], task: Task) -> Sequence[Outcome]:
        """Return the scores as outcomes.

        A conversation that is too long, or has no answer, gives Failed("reward").
        """
        outcomes: list[Outcome] = []
        rows: list[tuple[int, list[int]]] = []
        for i, trajectory in enumerate(trajectories):
            outcomes.append(trajectory.outcome or Scored(0.0))
            if isinstance(trajectory.outcome, Failed | Cancelled):
                continue
            try:
                rows.append((i, self._render_tokens(trajectory)))
            except DataError:
                outcomes[i] = Failed(
                    "reward", f"reward_model, task '{task.id}':\n{traceback.format_exc()}"
                )
        for batch in _iter_batches(rows, self.config.batch_tokens):
            token_rows = [tokens for _, tokens in batch]
            scores = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._compute_scores, token_rows
            )
            for (i, _), score in zip(batch, scores, strict=True):
                outcomes[i] = _make_outcome(score, trajectories[i])
        return outcomes

    def _render_tokens(self, trajectory: Trajectory) -> list[int]:
        last_index = max(
            (i for i, message in enumerate(trajectory.messages) if message.role == "assistant"),
            default=-1,
        )
        if last_index < 0:
            raise DataError("the trajectory has no assistant message to judge")
        tokens, _ = self._renderer.supervised(trajectory.messages[: last_index + 1], train="last")
        if trajectory.is_cut_short:
            tokens = tokens[:-1]  # drop the end of turn: the answer was cut off
        if len(tokens) > self._model.max_positions:
            raise DataError(
                f"the conversation has {len(tokens)} tokens, and the reward model reads at "
                f"most {self._model.max_positions}"
            )
        return tokens

    def _compute_scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the scalar head's output at each row's last token."""
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
