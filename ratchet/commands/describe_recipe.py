"""Describe a recipe as text for `ratchet check`: model, workers, batch sizes and schedule."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod
from pathlib import Path
from typing import Any

from ratchet.config.base import Section
from ratchet.config.checks.model import known_context
from ratchet.config.checks.staleness import cautions
from ratchet.config.length import count_warmup_steps
from ratchet.config.schema import RunConfig, StageConfig
from ratchet.utils.object_store import is_address

ROW = "{:<14}{}"
LEARNER_PARALLELISM = (
    "dp_replicate",
    "dp_shard",
    "data_parallel",
    "context_parallel",
    "tensor_parallel",
    "pipeline_parallel",
)
VLLM_PARALLELISM = ("tensor_parallel", "pipeline_parallel", "data_parallel")


def describe(
    config: RunConfig, lengths: Mapping[int, str] | None = None, *, threads: str = ""
) -> str:
    """Return a description of the run and the batch arithmetic of each stage.

    Args:
        config: The recipe. If a stage's length is still in passes over the data, lines that depend
            on the number of steps are left out.
        lengths: Texts on the stages' lengths, by the stage's index (`ResolvedRecipe.notes`).
        threads: The value of `threads: auto` on this machine, in words. The caller measures it.
    """
    model = config.model
    source = f"preset {model.preset}, random weights" if model.preset else f"{model.path}"
    context = known_context(model)
    head = [
        ROW.format("run", f"{config.name}, seed {config.seed}, device {config.device}"),
        ROW.format(
            "model", source + (f", context {_format_count(context, 'token')}" if context else "")
        ),
        ROW.format("tokenizer", _get_kind(config.tokenizer)),
    ]
    if threads and config.threads == "auto":
        head.append(ROW.format("threads", threads))
    if ranks := _describe_ranks(config):
        head.append(ROW.format("learner", ranks))
    if workers := _describe_workers(config):
        head.append(ROW.format("generator", workers))
    has_known_steps = all(stage.steps is not None for stage in config.stages)
    total = sum(stage.n_steps for stage in config.stages) if has_known_steps else 0
    blocks = ["\n".join(head)]
    first_step = 0
    for index, stage in enumerate(config.stages):
        heading = f"stage {index + 1} of {len(config.stages)}: {stage.name}"
        if has_known_steps:
            heading += f" (steps {first_step + 1} to {first_step + stage.n_steps} of {total})"
        length = (lengths or {}).get(index, "")
        blocks.append("\n".join([heading, *_describe_stage(stage, first_step, length)]))
        first_step += stage.steps or 0
    return "\n\n".join(blocks)


def _describe_ranks(config: RunConfig) -> str:
    """Return a line on the ranks of a distributed learner, which are the same in all stages."""
    learner = config.stages[0].learner
    if not learner.is_distributed:
        return ""
    sizes = {key: getattr(learner, key, 1) for key in LEARNER_PARALLELISM}
    parallelism = " x ".join(f"{key} {size}" for key, size in sizes.items() if size > 1)
    return (
        f"{_format_count(prod(sizes.values()), 'rank')}"
        f"{f' ({parallelism})' if parallelism else ''}, cluster {_get_kind(config.cluster)}"
    )


def _describe_workers(config: RunConfig) -> str:
    """Return a line on the rollout workers, which are the same in all stages."""
    generator: Any = config.stages[0].generator
    if _get_kind(generator) != "workers":
        return ""
    sizes = {key: getattr(generator.worker, key, 1) for key in VLLM_PARALLELISM}
    parallelism = " x ".join(f"{key} {size}" for key, size in sizes.items() if size > 1)
    restarts = (
        f"at most {_format_count(generator.max_restarts, 'restart')}"
        if generator.recovery == "restart"
        else "no restarts"
    )
    worker = f"{_get_kind(generator.worker)}{f' ({parallelism})' if parallelism else ''}"
    worker += ", which play whole groups" if generator.worker_runs == "groups" else ""
    return (
        f"{_format_count(generator.workers, 'worker')} of {worker}, {restarts}, "
        f"cluster {_get_kind(config.cluster)}"
    )


def _describe_rows_per_rank(stage: StageConfig) -> str:
    """Return a line on the rows of an optimizer step, as divided among data-parallel ranks."""
    learner: Any = stage.learner
    if not learner.is_distributed:
        return ""
    groups = ceil(stage.batch_size / stage.algorithm.n_minibatches)
    rows = groups * stage.algorithm.n_attempts
    ranks = prod(getattr(learner, key) for key in learner.data_parallel_keys)
    summary = (
        f"{_format_count(rows, 'row')} for {_format_count(ranks, 'data rank')}, "
        f"about {ceil(rows / ranks)} each"
    )
    n_idle = max(0, ranks - rows)
    if n_idle:
        verbs = "gets none and computes" if n_idle == 1 else "get none and compute"
        summary += f"; {_format_count(n_idle, 'data rank')} {verbs} filler rows"
    return summary


def _describe_stage(stage: StageConfig, first_step: int, length: str) -> list[str]:
    """Return the lines of a stage: a label and a text each, without lines that do not apply."""
    lines = [
        ("length", length or ("" if stage.passes is None else f"{stage.passes:g} passes")),
        ("algorithm", f"{_get_kind(stage.algorithm)} on {_get_kind(stage.environment)}"),
        ("teacher", _describe_teachers(stage)),
        ("agent", _get_kind(stage.agent)),
        (
            "rewards",
            ", ".join(_get_kind(reward) for reward in stage.rewards) or "the environment's own",
        ),
        ("batch", _describe_batch(stage)),
        ("replay", _describe_replay(stage)),
        ("updates", _describe_updates(stage)),
        ("ranks", _describe_rows_per_rank(stage)),
        ("data", _describe_data(stage)),
        ("evaluation", _describe_evaluation(stage, first_step)),
        ("checkpoints", _describe_checkpoints(stage, first_step)),
        *(("warning", caution) for caution in cautions(stage)),
    ]
    hidden = {name for name, text in lines if not text}
    if stage.source not in ("rollouts", None) or (
        not stage.rewards and not stage.algorithm.reads_reward
    ):
        hidden.add("rewards")
    return ["  " + ROW.format(name, text) for name, text in lines if name not in hidden]


def _describe_teachers(stage: StageConfig) -> str:
    """Return a line on the teachers.

    A missing directory is not an error yet, because another run may create it first.
    """
    return ", ".join(
        path if is_address(path) or Path(path).is_dir() else f"{path} (no directory here)"
        for path in stage.algorithm.teacher_paths
    )


def _describe_batch(stage: StageConfig) -> str:
    nouns = {
        "rows": "row",
        "pairs": "pair",
        "labelled": "labelled answer",
        "steps": "stepwise answer",
    }
    if stage.source in nouns:
        return f"{_format_count(stage.batch_size, nouns[stage.source])} a step"
    attempts = stage.algorithm.n_attempts
    trajectories = stage.batch_size * attempts
    new_tokens = trajectories * stage.sampling.max_new_tokens
    factors = f"{_format_count(stage.batch_size, 'prompt')} x {_format_count(attempts, 'attempt')}"
    return (
        f"{factors} = {_format_count(trajectories, 'trajectory')} a step, "
        f"at most {_format_count(new_tokens, 'new token')} ({stage.sampling.max_new_tokens} each)"
    )


def _describe_replay(stage: StageConfig) -> str:
    replay = stage.rollouts.replay
    return (
        ""
        if replay is None
        else f"plus up to {_format_count(replay.groups, 'earlier group')} in each step"
    )


def _describe_updates(stage: StageConfig) -> str:
    algorithm = stage.algorithm
    minibatches, epochs = algorithm.n_minibatches, algorithm.n_epochs
    count, noun = (
        (stage.batch_size * algorithm.n_attempts, "attempt")
        if algorithm.splits_groups
        else (stage.batch_size, "group")
    )
    low, extra = divmod(count, minibatches)
    size = f"{low} to {low + 1} {noun}s" if extra else _format_count(low, noun)
    summary = (
        f"{_format_count(minibatches * epochs, 'optimizer step')} a batch ({minibatches} x {size}, "
        f"{_format_count(epochs, 'epoch')})"
    )
    if stage.steps is None:
        return summary
    total, optimizer = stage.optimizer_steps, stage.optimizer
    warmup = count_warmup_steps(optimizer.warmup_steps, optimizer.warmup_share, total)
    return f"{summary}, {_format_count(total, 'optimizer step')} in all, {warmup} of them warm-up"


def _describe_data(stage: StageConfig) -> str:
    if stage.steps is None:
        return ""
    n_tasks = stage.n_steps * stage.batch_size
    if stage.examples is None:
        return f"{_format_count(n_tasks, 'task')} drawn"
    return (
        f"{_format_count(n_tasks, 'task')} drawn from {stage.examples:,}: "
        f"{n_tasks / stage.examples:.3g} times each"
    )


def _describe_evaluation(stage: StageConfig, first_step: int) -> str:
    """Return a line on when the stage is evaluated, and on how many tasks and attempts."""
    settings = stage.evaluation
    if not settings.tasks:
        return "none"
    attempts = settings.tasks * (settings.greedy + settings.samples)
    kinds = [
        *(["1 greedy"] if settings.greedy else []),
        *([f"{settings.samples} sampled"] if settings.samples else []),
    ]
    size = (
        f"{_format_count(attempts, 'attempt')} each ({_format_count(settings.tasks, 'task')}, "
        f"{' and '.join(kinds)})"
    )
    environment = settings.environment or stage.environment
    is_judged = bool(stage.eval_rewards) or environment.returns_rewards
    if not is_judged:
        size = f"the loss of {_format_count(settings.tasks, 'task')} at most"
        if stage.source == "pairs":
            size = f"{_format_count(settings.tasks, 'pair')} at most, compared"
    elif stage.source == "rows":
        size += ", and the loss of the tasks"
    if stage.steps is None:
        interval = f", every {_format_count(settings.every, 'step')}" if settings.every else ""
        return f"before and after{interval}, {size}"
    n_between = _count_multiples(stage, first_step, settings.every)
    times = (
        f"before, after and at {_format_count(n_between, 'step')} between"
        if n_between
        else "before and after"
    )
    return f"{times}, {size}"


def _describe_checkpoints(stage: StageConfig, first_step: int) -> str:
    if stage.steps is None:
        return f"the newest {stage.checkpoint.keep} kept"
    return (
        f"{1 + _count_multiples(stage, first_step, stage.checkpoint.every)} written, the newest "
        f"{stage.checkpoint.keep} kept"
    )


def _count_multiples(stage: StageConfig, first_step: int, every: int) -> int:
    """Return how many steps of the stage, its last excluded, are multiples of `every`."""
    return (first_step + stage.n_steps - 1) // every - first_step // every if every else 0


def _format_count(number: int, noun: str) -> str:
    plural = noun if number == 1 else f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {plural}"


def _get_kind(section: Section | None) -> str:
    return "" if section is None else section.kind_name
