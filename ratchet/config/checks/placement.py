"""Checks across keys: placement of learners, generators and weight sync."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ratchet.config.checks.clash import Conflict, clash
from ratchet.config.schema import RunConfig, StageConfig


def _check_same_learner(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    first_learner = config.stages[0].learner
    if stage.learner != first_learner and (
        first_learner.is_distributed or stage.learner.is_distributed
    ):
        yield clash(
            f"learner differs from that of stage {config.stages[0].name}, but a distributed "
            "learner keeps its processes from stage to stage: put one learner section at the top "
            "of the recipe",
            "learner",
        )


def _check_sequence_parallel(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    if stage.learner.uses_sequence_parallelism and stage.learner.tensor_ranks == 1:
        yield clash(
            "learner.sequence_parallel divides tokens among the ranks of learner.tensor_parallel, "
            "which is 1: set learner.tensor_parallel to 2 or more, or remove "
            "learner.sequence_parallel",
            "learner.sequence_parallel",
            "learner.tensor_parallel",
        )


def _check_optimizer(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    learner = stage.learner.kind_name
    if stage.learner.has_own_adamw:
        if stage.optimizer.kind_name != "adamw":
            yield clash(
                f"learner.kind={learner} has only its own AdamW: set optimizer.kind=adamw, or "
                "learner.kind=dtensor",
                "optimizer.kind",
                "learner.kind",
            )
        if stage.optimizer.ema_decay is not None:
            yield clash(
                "optimizer.ema_decay needs a moving average of the weights, and the optimizer of "
                f"learner.kind={learner} keeps none: remove optimizer.ema_decay, or set "
                "learner.kind=dtensor",
                "optimizer.ema_decay",
                "learner.kind",
            )


def _check_background_checkpoint(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    learner = stage.learner
    if stage.checkpoint.background and not learner.supports_background_save:
        yield clash(
            f"checkpoint.background writes copies of the weights, and learner.kind="
            f"{learner.kind_name} writes its own: remove checkpoint.background, or set "
            "learner.kind=dtensor or local",
            "checkpoint.background",
            "learner.kind",
        )


def _check_cluster(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    kind = config.cluster.kind_name
    has_processes = stage.generator.n_workers or any(judge.n_processes for judge in config.judges)
    ray_starts = kind == "ray" and has_processes
    if kind in ("ray", "torchrun") and stage.learner.kind_name == "local" and not ray_starts:
        yield clash(
            f"cluster.kind={kind} places worker processes, and learner.kind=local trains in the "
            "main process: set learner.kind=dtensor or remove cluster",
            "cluster.kind",
            "learner.kind",
        )


def _check_colocation(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check that generator and weight sync work with the learner on the same accelerators."""
    if config.cluster.is_resident:
        yield from _check_resident(stage)
    if not config.cluster.takes_turns:
        return
    if not stage.generator.can_offload:
        yield clash(
            "cluster.colocated lets learner and generator take turns on accelerators, and "
            f"generator.kind={stage.generator.kind_name} never frees its accelerator: set "
            "generator.kind=vllm; with generator.kind=workers, cluster.colocated=resident leaves "
            "both there; or remove cluster.colocated",
            "cluster.colocated",
            "generator.kind",
        )
    if stage.weight_sync.reads_accelerator:
        yield clash(
            "cluster.colocated moves the learner's weights to host memory while the generator has "
            "the accelerator, and this weight sync reads them from an accelerator: set "
            "weight_sync.kind=auto",
            "cluster.colocated",
            "weight_sync.kind",
        )


def _check_resident(stage: StageConfig) -> Iterator[Conflict]:
    if not stage.generator.n_workers:
        yield clash(
            "cluster.colocated=resident shares accelerators with generator workers, and "
            f"generator.kind={stage.generator.kind_name} has none: set generator.kind=workers, or "
            "remove cluster.colocated",
            "cluster.colocated",
            "generator.kind",
        )
    # `_check_weight_transfer` has its own words for a generator that needs NCCL.
    if stage.weight_sync.reads_accelerator and not stage.generator.sampler.reads_accelerator:
        yield clash(
            "cluster.colocated=resident has two processes on one accelerator, which NCCL can't "
            "connect: set weight_sync.kind=auto",
            "cluster.colocated",
            "weight_sync.kind",
        )


def _check_weight_transfer(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check that a generator gets weights on an accelerator if it takes no others."""
    generator, learner = stage.generator, stage.learner
    if not generator.sampler.reads_accelerator:
        return
    key = "generator.worker.weight_transfer" if generator.n_workers else "generator.weight_transfer"
    if config.cluster.takes_turns:
        yield clash(
            f"{key}=ipc reads weights on the learner's accelerator, and cluster.colocated has them "
            f"in main memory during a push: set {key}=auto",
            key,
            "cluster.colocated",
        )
        return
    if config.cluster.is_resident:
        yield clash(
            f"{key}=ipc needs NCCL between processes, which can't connect two on one accelerator: "
            f"set {key}=auto",
            key,
            "cluster.colocated",
        )
        return
    has_processes = generator.n_workers or learner.is_distributed
    if has_processes and not stage.weight_sync.reads_accelerator:
        yield clash(
            f"{key}=ipc needs weights on an accelerator, and between processes this weight sync "
            f"brings them to main memory: set weight_sync.kind=collective with backend=nccl, or "
            f"{key}=file",
            key,
            "weight_sync.kind",
        )


PLACEMENT_CHECKS: tuple[Callable[[StageConfig, RunConfig], Iterator[Conflict]], ...] = (
    _check_same_learner,
    _check_sequence_parallel,
    _check_optimizer,
    _check_background_checkpoint,
    _check_cluster,
    _check_colocation,
    _check_weight_transfer,
)
