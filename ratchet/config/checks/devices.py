"""Checks across keys: what devices other than CPUs and CUDA's lack."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ratchet.config.checks.clash import Conflict, clash
from ratchet.config.schema import RunConfig, StageConfig


def _check_device(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Refuse what needs CUDA, its libraries or its number formats on another accelerator."""
    if not config.device.startswith(("mps", "xpu")):
        return
    learner, generator, optimizer = stage.learner, stage.generator, stage.optimizer
    lacks = f"device={config.device} has"
    if learner.is_distributed:
        yield clash(
            f"{lacks} no ranks: learner.kind={learner.kind_name} places them on CUDA devices or "
            "CPUs. Set learner.kind=local",
            "learner.kind",
        )
    if generator.n_workers or generator.copies_weights:
        yield clash(
            f"{lacks} no generator of kind {generator.kind_name}, whose processes are placed on "
            "CUDA devices or CPUs. Set generator.kind=engine",
            "generator.kind",
        )
    if any(judge.n_processes for judge in config.judges):
        yield clash(
            f"{lacks} no judges in worker processes, which are placed on CUDA devices or CPUs. "
            "Set device=cpu",
            "device",
        )
    if optimizer.required_package is not None:
        yield clash(
            f"{lacks} no {optimizer.required_package}, which optimizer.kind={optimizer.kind_name} "
            "needs. Set optimizer.kind=adamw",
            "optimizer.kind",
        )
    if config.precision == "bfloat16":
        yield clash(f"{lacks} no products in bfloat16. Set precision=auto", "precision")
    if stage.lora is not None and stage.lora.base is not None:
        yield clash(
            f"{lacks} no kernels for lora.base={stage.lora.base}. Remove lora.base", "lora.base"
        )


DEVICE_CHECKS: tuple[Callable[[StageConfig, RunConfig], Iterator[Conflict]], ...] = (_check_device,)
