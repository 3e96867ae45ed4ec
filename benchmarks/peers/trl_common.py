"""What the drivers of TRL share. `start` comes before anything that loads torch."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
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
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(options.threads)
    return options


def common(options: argparse.Namespace, directory: str) -> dict[str, Any]:
    """Settings of every trainer: so many optimizer steps at one rate, nothing saved, nothing
    reported."""
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


def tuned(options: argparse.Namespace) -> dict[str, Any]:
    """What a careful user sets, and TRL doesn't by default."""
    return {
        "bf16": options.device != "cpu",
        "gradient_checkpointing": False,
        "logging_strategy": "no",
    }


class StepTimer:
    """A `TrainerCallback`, by its methods alone: the time from one optimizer step's end to the next
    one's, and the trained tokens of each, padding not counted."""

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
        return lambda *_, **__: None  # the events that don't matter here

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
        return slice(self.options.warmup, self.options.warmup + self.options.steps)


@contextlib.contextmanager
def training(options: argparse.Namespace) -> Iterator[tuple[str, StepTimer]]:
    """A directory that is removed afterwards, and the timer. What is printed goes to stderr: stdout
    is for the result alone."""
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
        yield directory, StepTimer(options)


def watch(trainer: Any, timer: StepTimer) -> Any:
    """Times the trainer's forward and backward passes, and counts its tokens."""
    forward = timer.phases.timed("forward", trainer.compute_loss)

    def counted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if "input_ids" in inputs:
            mask = inputs.get("attention_mask")
            timer.tokens[-1] += int(inputs["input_ids"].numel() if mask is None else mask.sum())
        return forward(model, inputs, *args, **kwargs)

    trainer.compute_loss = counted
    trainer.accelerator.backward = timer.phases.timed("backward", trainer.accelerator.backward)
    return trainer


def emit(options: argparse.Namespace, timer: StepTimer, trainer: Any, **facts: Any) -> None:
    """`protocol.emit`, with what all of TRL's report."""
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
