"""Checks across keys: low precision that this machine or its packages do not support."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from ratchet.config.checks.clash import Conflict, clash
from ratchet.config.schema import RunConfig, StageConfig
from ratchet.errors import suggest_install

BITSANDBYTES, TRANSFORMER_ENGINE = "bitsandbytes", "transformer_engine"
CUDA_DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # device files on Linux and on WSL


def _check_optimizer(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    package = stage.optimizer.required_package
    if package is not None and find_spec(package) is None:
        yield clash(
            f"optimizer.kind={stage.optimizer.kind_name} needs the package "
            f"{package}, which is not installed: {suggest_install('quantised')}, or set "
            "optimizer.kind=adamw",
            "optimizer.kind",
        )


def _check_lora_base(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    if stage.lora is None or stage.lora.base is None:
        return
    quantisation, learner = stage.lora.base, stage.learner.kind_name
    if reason := _explain_missing(quantisation):
        yield clash(
            f"lora.base={quantisation} {reason}, set lora.base=float8, or remove lora.base",
            "lora.base",
        )
    if stage.learner.is_distributed:
        yield clash(
            f"lora.base={quantisation} quantises whole matrices, and learner.kind={learner} "
            "shards them over processes: set learner.kind=local, or remove lora.base",
            "lora.base",
            "learner.kind",
        )
    if config.model.backend == "transformers":
        yield clash(
            f"lora.base={quantisation} quantises the built-in decoder only, and "
            "model.backend=transformers does not use it: set model.backend=auto, or remove "
            "lora.base",
            "lora.base",
            "model.backend",
        )


def _check_generator(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    generator = stage.generator.sampler
    quantisation = generator.quantisation
    if quantisation is None:
        return
    if reason := _explain_missing(quantisation):
        yield clash(
            f"generator.quantise={quantisation} {reason}, or set generator.quantise=float8",
            "generator.quantise",
        )
    if generator is stage.generator and not generator.copies_weights:
        yield clash(
            f"generator.quantise={quantisation} needs a generator with its own copy of the "
            "weights, and this one reads the learner's: "
            "set generator={kind: workers, worker: {kind: engine, quantise: %s}}, or remove "
            "generator.quantise" % quantisation,
            "generator.quantise",
        )
    if generator.copies_weights and _lacks_cuda(config):
        yield clash(
            f"generator.quantise={quantisation} works in vLLM only on CUDA devices, and there is "
            "none here: remove it",
            "generator.quantise",
        )


def _check_fp8(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    learner = stage.learner
    if learner.fp8_format is None:
        return
    setting = f"learner.fp8={learner.fp8_format}"
    if _lacks_cuda(config):
        yield clash(
            f"{setting} works only on CUDA devices, and there is none here: remove learner.fp8",
            "learner.fp8",
        )
    elif find_spec(TRANSFORMER_ENGINE) is None:
        yield clash(
            f"{setting} needs the package {TRANSFORMER_ENGINE}, which is not installed: pip "
            "install 'transformer-engine[pytorch]', or remove learner.fp8",
            "learner.fp8",
        )
    if learner.weight_format != "bfloat16":
        yield clash(
            f"{setting} needs weights in bfloat16, and learner.weights={learner.weight_format}: "
            "set learner.weights=bfloat16",
            "learner.weights",
            "learner.fp8",
        )


def _check_products(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check `precision`: on a CPU learner and generator must round alike.

    The device is the recipe's, because runs on CUDA are also read where there is none.
    """
    setting = f"precision={config.precision}"
    if config.device.startswith("cuda") and config.precision == "float32":
        yield clash(
            f"{setting} is for CPUs: device={config.device} multiplies in bfloat16. Set "
            "precision=auto",
            "precision",
        )
    is_on_cpu = config.device == "cpu" or (config.device == "auto" and _lacks_cuda(config))
    if not is_on_cpu or config.precision != "bfloat16":
        return
    learner, generator = stage.learner, stage.generator.sampler
    if not learner.supports_cpu_kernels:
        yield clash(
            f"{setting} on a CPU is not for learner.kind={learner.kind_name}, which computes in "
            "float32: set precision=auto, or learner.kind=local",
            "precision",
            "learner.kind",
        )
    if not generator.rounds_like_learner:
        yield clash(
            f"{setting} on a CPU is not for generator.kind={generator.kind_name}, which rounds "
            "otherwise than the learner: set precision=auto, or generator.kind=engine",
            "precision",
            "generator.kind",
        )
    if config.model.backend == "transformers":
        yield clash(
            f"{setting} on a CPU is for the built-in decoder only, and model.backend=transformers "
            "does not use it: set precision=auto, or model.backend=auto",
            "precision",
            "model.backend",
        )


def _check_lora_weights(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    if stage.lora is not None and stage.learner.weight_format != "float32":
        yield clash(
            "lora freezes the base weights, and learner.weights=bfloat16 is for training them: set "
            "learner.weights=float32, or remove lora",
            "learner.weights",
            "lora",
        )


def _explain_missing(quantisation: str) -> str:
    """Return why a quantisation is unavailable, with a fix; "" if it is available."""
    if quantisation != "nf4" or find_spec(BITSANDBYTES) is not None:
        return ""
    return (
        f"needs the package {BITSANDBYTES}, which is not installed: {suggest_install('quantised')}"
    )


def _lacks_cuda(config: RunConfig) -> bool:
    """True if the run is on the CPU, or on this machine without CUDA's driver.

    The device files are checked, because importing torch is slow.
    """
    if config.device == "cpu":
        return True
    is_local = config.cluster.kind_name == "local"
    return is_local and not any(Path(path).exists() for path in CUDA_DEVICES)


PRECISION_CHECKS: tuple[Callable[[StageConfig, RunConfig], Iterator[Conflict]], ...] = (
    _check_optimizer,
    _check_lora_base,
    _check_generator,
    _check_fp8,
    _check_lora_weights,
    _check_products,
)
