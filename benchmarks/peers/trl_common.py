"""Functions that TRL's drivers share. Call `start` before importing anything that loads torch."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import protocol


def start(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    if any(
        importlib.util.find_spec(module) is None for module in ("trl", "datasets", "accelerate")
    ):
        protocol.unavailable("not installed: `make peers` installs it, or name another --python")
    protocol.quiet_offline(options.threads)
    if options.device != "cpu":
        # With several visible GPUs the trainer would divide batches over them, or refuse to start.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.partition(",")[0]
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(options.threads)
    return options


def make_common_settings(options: argparse.Namespace, directory: str) -> dict[str, Any]:
    """Return settings of every trainer: constant learning rate, nothing saved, nothing reported."""
    return {
        "output_dir": directory,
        "max_steps": options.warmup + options.steps,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "seed": options.seed,
        "use_cpu": options.device == "cpu",
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def make_tuned_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that a careful user changes from TRL's defaults."""
    return {
        "bf16": protocol.is_bfloat16(options),
        "gradient_checkpointing": False,
        "logging_strategy": "no",
    }


class StepTimer:
    """A timer of optimizer steps, with the methods of a `TrainerCallback`.

    seconds: time from the end of the previous optimizer step to the end of each step.
    tokens: trained tokens of each step, without padding.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.phases = protocol.Phases()
        self.seconds: list[float] = []
        self.tokens = [0]
        self.startup_s = 0.0
        self.mark = 0.0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *_, **__: None  # ignore all other events

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.mark = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.options.device != "cpu":
            import torch

            torch.cuda.synchronize(self.options.device)
        now = time.perf_counter()
        self.startup_s = self.startup_s or now - protocol.STARTED
        self.seconds.append(now - self.mark)
        self.tokens.append(0)
        self.phases.next_step()
        self.mark = time.perf_counter()

    @property
    def timed(self) -> slice:
        """Return the slice of the timed steps."""
        return slice(self.options.warmup, self.options.warmup + self.options.steps)


@contextlib.contextmanager
def training(options: argparse.Namespace) -> Iterator[tuple[str, StepTimer]]:
    """Yield a temporary directory and a timer.

    Inside the block, standard output goes to standard error: only the result goes to the former.
    """
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
        yield directory, StepTimer(options)


def watch(trainer: Any, timer: StepTimer) -> Any:
    """Time the trainer's forward and backward passes, count its tokens, and return it."""
    forward = timer.phases.timed("forward", trainer.compute_loss)

    def count_and_forward(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if "input_ids" in inputs:
            mask = inputs.get("attention_mask")
            timer.tokens[-1] += int(inputs["input_ids"].numel() if mask is None else mask.sum())
        return forward(model, inputs, *args, **kwargs)

    trainer.compute_loss = count_and_forward
    trainer.accelerator.backward = timer.phases.timed("backward", trainer.accelerator.backward)
    return trainer


def emit(options: argparse.Namespace, timer: StepTimer, trainer: Any, **facts: Any) -> None:
    """Print the result by `protocol.emit`, with the facts that all of TRL's drivers report."""
    import torch
    import trl

    steps = options.warmup + options.steps
    assert len(timer.seconds) == steps, f"{len(timer.seconds)} optimizer steps instead of {steps}"
    args = trainer.args
    protocol.emit(
        options,
        timer.seconds[timer.timed],
        peer="trl",
        version=trl.__version__,
        torch=torch.__version__,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        parameters=trainer.model.num_parameters(),
        autocast="bfloat16" if args.bf16 else None,
        gradient_checkpointing=args.gradient_checkpointing,
        rows_per_micro_batch=args.per_device_train_batch_size,
        startup_s=round(timer.startup_s, 2),
        **facts,
    )
