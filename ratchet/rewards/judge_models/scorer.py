"""Score conversations with a reward model, in this process or in worker processes of the run.

Suffixes of tensors: T = tokens of the sequences, packed end to end, S = sequences.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.errors import DataError
from ratchet.rewards.judge_models.base import JudgeModel
from ratchet.types import Trajectory

if TYPE_CHECKING:  # importing rewards must not load torch
    from ratchet.data.chat.renderer import Renderer
    from ratchet.models.policy import PolicyModel
    from ratchet.models.scalar_head import ScalarHead
    from ratchet.worker_protocols import Workers


class ScalarModel:
    """A model with a scalar head, as this process holds it.

    Args:
        directory: The model's local directory.
        device: The device that computes.
        trust_remote_code: True to let transformers run code that comes with the model.

    Raises:
        ModelError: The directory holds no model with a scalar head.
    """

    def __init__(self, directory: Path, *, device: str, trust_remote_code: bool = False) -> None:
        from ratchet.models.load import load_policy
        from ratchet.models.scalar_head import load_head, require_head

        self.device = device
        require_head(directory)
        model = load_policy(directory, device=device, trust_remote_code=trust_remote_code)
        head = load_head(directory, model.hidden_size)
        assert head is not None, "the directory has one"
        self._model: PolicyModel = model.requires_grad_(False)
        self._head: ScalarHead = head.to(device)

    @property
    def max_positions(self) -> int:
        """Return the maximum number of tokens of a conversation."""
        return self._model.max_positions

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the scalar head's output at each row's last token."""
        import torch

        lengths = [len(row) for row in rows]
        with torch.inference_mode():
            tokens_T = torch.tensor([token for row in rows for token in row], device=self.device)
            positions_T = torch.tensor(
                [i for length in lengths for i in range(length)], device=self.device
            )
            scores_T = self._head(self._model.hidden(tokens_T, positions_T, lengths))
            last_S = torch.tensor(lengths, device=self.device).cumsum(0) - 1
            return scores_T[last_S].tolist()


class Scorer(JudgeModel):
    """A reward model that scores conversations in a thread of this process.

    Rollouts continue meanwhile. The thread may use as many cores as the process.
    """

    def __init__(self, model: ScalarModel, renderer: Renderer) -> None:
        import torch

        self.renderer = renderer
        self.max_positions = model.max_positions
        self._model = model
        self._thread = ThreadPoolExecutor(
            1,
            "reward-model",
            initializer=torch.set_num_threads,
            initargs=(torch.get_num_threads(),),
        )

    async def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each row of tokens, computed as one batch."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._model.score, rows)

    async def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)


class WorkerScorer(JudgeModel):
    """A reward model in worker processes, each with the whole model (`ScorerRank`).

    Args:
        workers: One group of a single process for each worker.
        renderer: Renders conversations with the model's own template and tokenizer.
        max_positions: The maximum number of tokens of a conversation.
    """

    def __init__(self, workers: Sequence[Workers], renderer: Renderer, max_positions: int) -> None:
        self.renderer = renderer
        self.max_positions = max_positions
        self._workers = list(workers)
        self._loads = [0] * len(self._workers)  # tokens that each worker still has to score

    async def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each row of tokens, computed as one batch by the least busy worker.

        Raises WorkerError if the worker was lost.
        """
        n_tokens = sum(map(len, rows))
        index = self._loads.index(min(self._loads))
        self._loads[index] += n_tokens
        try:
            (scores,) = await self._workers[index].call("score", [list(row) for row in rows])
        finally:
            self._loads[index] -= n_tokens
        return scores

    @property
    def final_error(self) -> Exception | None:
        errors = (worker.final_error for worker in self._workers)
        return next((error for error in errors if error is not None), None)

    async def close(self) -> None:
        """End the worker processes."""
        await asyncio.gather(*(asyncio.to_thread(worker.close) for worker in self._workers))


def render_tokens(trajectory: Trajectory, renderer: Renderer, max_positions: int) -> list[int]:
    """Return the tokens of a conversation up to its last answer.

    An answer that was cut off by a limit of tokens has no end of turn.

    Raises DataError if there is no answer, or there are more than `max_positions` tokens.
    """
    last_index = max(
        (i for i, message in enumerate(trajectory.messages) if message.role == "assistant"),
        default=-1,
    )
    if last_index < 0:
        raise DataError("the trajectory has no assistant message to judge")
    tokens, _ = renderer.supervised(trajectory.messages[: last_index + 1], train="last")
    if trajectory.is_cut_short:
        tokens = tokens[:-1]
    if len(tokens) > max_positions:
        raise DataError(
            f"the conversation has {len(tokens)} tokens, and the reward model reads at "
            f"most {max_positions}"
        )
    return tokens
