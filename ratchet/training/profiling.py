"""Profile a stage for `ratchet train --profile N`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ratchet.batch import Batch
from ratchet.config.schema import RunConfig
from ratchet.learners.wrapper import LearnerWrapper
from ratchet.observe.tracing.profiler import ProfiledStage, Profiler
from ratchet.protocols import Learner, LossTerm
from ratchet.training.run import StageRun
from ratchet.training.stage import Policy
from ratchet.utils.tracer import TRACER


def choose_profiled_stage(config: RunConfig, first: int) -> int:
    """Return the first remaining stage that samples rollouts, or the first remaining one."""
    remaining = range(first, len(config.stages))
    return next((index for index in remaining if config.stages[index].source == "rollouts"), first)


@contextmanager
def profiling(
    run: StageRun, policy: Policy, config: RunConfig, steps: int, directory: Path, console: Console
) -> Iterator[None]:
    """Profile up to `steps` of the run's remaining steps inside the block."""

    def show(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    remaining = run.last_step - run.first_step
    if not remaining:
        show(f"Nothing is profiled: stage {run.name} has no step left.")
        yield
        return
    roles = run.roles
    run.roles = counting_learners = {
        name: TokenCountingLearner(learner) for name, learner in roles.items()
    }
    subject = _make_subject(run, policy, config, counting_learners)
    run.profiler = profiler = Profiler(
        subject,
        steps,
        first_step=run.first_step,
        steps_left=remaining,
        directory=directory,
        show=show,
    )
    TRACER.subscribe(profiler.follow, phases_only=True)
    try:
        yield
        profiler.finish()
    finally:
        TRACER.unsubscribe(profiler.follow)
        profiler.abandon()
        run.roles = roles


def _make_subject(
    run: StageRun, policy: Policy, config: RunConfig, roles: Mapping[str, TokenCountingLearner]
) -> ProfiledStage:
    """Return the facts about model and machine that the profiler needs."""
    model = policy.model
    parameter = next(model.parameters())
    # Prefer matrices other than embeddings and heads: lookups multiply nothing, and heads run on
    # few rows.
    matrices = [p.shape[-2:] for p in model.parameters() if p.dim() >= 2]
    widest = max(matrices, key=lambda shape: (shape[0] != model.vocab_size, shape.numel()))
    core = getattr(policy.generator, "core", None)

    def count_tokens() -> float:
        """Return the number of tokens computed by the learners and by a generator that counts."""
        return getattr(core, "computed_tokens", 0) + sum(
            learner.tokens for learner in roles.values()
        )

    return ProfiledStage(
        stage=run.name,
        device=parameter.device,
        # The dtype of the learner's autocast.
        dtype=torch.bfloat16 if parameter.device.type == "cuda" else parameter.dtype,
        threads=int(config.threads),
        vocab_size=model.vocab_size,
        largest_layer=(widest[1], widest[0]),
        requested_tokens=count_tokens,
        generated_tokens=lambda: run.progress.generated_tokens,
    )


class TokenCountingLearner(LearnerWrapper):
    """A learner wrapper that counts the tokens of its batches."""

    def __init__(self, inner: Learner) -> None:
        super().__init__(inner)
        self.tokens = 0

    async def score(
        self, batch: Batch, output_names: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Any]:
        self.tokens += batch.n_tokens
        return await super().score(batch, output_names, top_k=top_k)

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        self.tokens += mini.n_tokens
        return await super().update(mini, terms)
