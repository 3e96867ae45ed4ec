"""Profile a stage for `ratchet train --profile N`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ratchet.batch import Batch
from ratchet.config.schema import RunConfig
from ratchet.generators.async_engine import AsyncEngine
from ratchet.learners.wrapper import LearnerWrapper
from ratchet.observe.tracing.profiler import ProfiledStage, Profiler
from ratchet.protocols import Learner, LossTerm
from ratchet.runs.stage_progress import Progress
from ratchet.training.stage import Policy
from ratchet.utils.tracer import TRACER


def choose_profiled_stage(config: RunConfig, first: int) -> int:
    """Return the index of the first remaining stage that samples rollouts; `first` if none does."""
    remaining = range(first, len(config.stages))
    return next((index for index in remaining if config.stages[index].source == "rollouts"), first)


class StageProfiling:
    """The profiler of a stage, and the counter of the tokens of its learners.

    Args:
        policy: The policy.
        config: The recipe.
        steps: Maximum number of profiled steps.
        stage: Name of the stage.
        remaining: The remaining steps, at least one.
        progress: The progress of the stage.
        directory: Receives the trace and the table.
        show: Shows a line of text, or the table.
    """

    def __init__(
        self,
        policy: Policy,
        config: RunConfig,
        steps: int,
        *,
        stage: str,
        remaining: range,
        progress: Progress,
        directory: Path,
        show: Callable[[str], None],
    ) -> None:
        self.counter = LearnerTokens()
        self.generator = policy.generator
        self.profiler = Profiler(
            _describe_stage(policy, config, stage, progress, self.counter),
            steps,
            first_step=remaining.start,
            steps_left=len(remaining),
            directory=directory,
            show=show,
        )

    def wrap_learners(self, roles: Mapping[str, Learner]) -> dict[str, Learner]:
        """Wrap the learners so that the tokens of their batches are counted."""
        return {
            name: TokenCountingLearner(learner, self.counter) for name, learner in roles.items()
        }

    @contextmanager
    def profile_stage(self) -> Iterator[None]:
        """Follow the phases in the block and then finish the profile.

        The profile is abandoned if the block raises.
        """
        TRACER.subscribe(self.profiler.follow, phases_only=True)
        if isinstance(self.generator, AsyncEngine):
            self.generator.on_step = self.profiler.end_generator_step
        try:
            yield
            self.profiler.finish()
        finally:
            if isinstance(self.generator, AsyncEngine):
                self.generator.on_step = None
            TRACER.unsubscribe(self.profiler.follow)
            self.profiler.abandon()


@dataclass
class LearnerTokens:
    """A counter of the tokens that learners computed."""

    tokens: int = 0


def _describe_stage(
    policy: Policy, config: RunConfig, stage: str, progress: Progress, counter: LearnerTokens
) -> ProfiledStage:
    """Return the facts about model and machine that the profiler needs."""
    model = policy.model
    device = torch.device(config.device)
    # Prefer matrices other than embeddings and heads: lookups multiply nothing, and heads run on
    # few rows.
    matrices = [p.shape[-2:] for p in model.parameters() if p.dim() >= 2]
    widest = max(matrices, key=lambda shape: (shape[0] != model.vocab_size, shape.numel()))

    def get_computed_tokens() -> float:
        """Return the number of tokens that the learners and the generator have computed."""
        return policy.generator.computed_tokens + counter.tokens

    return ProfiledStage(
        stage=stage,
        device=device,
        # The dtype of the operands of products.
        dtype=(torch.bfloat16 if config.rounds_products else next(model.parameters()).dtype),
        threads=int(config.threads),
        vocab_size=model.vocab_size,
        largest_layer=(widest[1], widest[0]),
        requested_tokens=get_computed_tokens,
        generated_tokens=lambda: progress.generated_tokens,
    )


class TokenCountingLearner(LearnerWrapper):
    """A learner wrapper that counts the tokens of its batches."""

    def __init__(self, inner: Learner, counter: LearnerTokens) -> None:
        super().__init__(inner)
        self.counter = counter

    async def score(
        self, batch: Batch, output_names: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Any]:
        self.counter.tokens += batch.n_tokens
        return await super().score(batch, output_names, top_k=top_k)

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        self.counter.tokens += mini.n_tokens
        return await super().update(mini, terms)
