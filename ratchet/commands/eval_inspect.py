"""The command `ratchet eval --inspect TASK`: serve a model to inspect-ai, and keep its scores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ratchet.commands.eval_program import (
    EvalProgram,
    ProgramCall,
    save_results,
    serve_to_program,
)
from ratchet.commands.eval_setup import MAX_NEW_TOKENS
from ratchet.errors import ConfigError, RatchetError
from ratchet.evals.inspect_log import read_inspect_log
from ratchet.runs.resolve import fetch_run_model
from ratchet.types import Sampling
from ratchet.utils.temp_dirs import TemporaryFolder

INSPECT = EvalProgram("inspect", "inspect-ai", "--inspect")
# inspect-ai reads the address and the key of this model from RATCHET_BASE_URL and RATCHET_API_KEY.
MODEL = "openai-api/ratchet/policy"
LOG = "inspect.json"  # the log of inspect-ai, beside the results


@dataclass(frozen=True)
class InspectSettings:
    """Settings of an evaluation by inspect-ai."""

    task: str
    """A file (sums.py, sums.py@name) or a registered name (package/name)."""
    step: int | None = None
    """The step of the run's checkpoint; None: its trained model."""
    tasks: int | None = None
    """Maximum number of samples; None: all."""
    temperature: float | None = None
    """The temperature; None: the task's, or 1."""
    max_new_tokens: int | None = None
    """Maximum number of tokens of an answer; None: the task's, or 2048."""
    generator: str | None = None
    """Kind of the generator; None: the run's."""


def evaluate_by_inspect(target: str, settings: InspectSettings, *, out: Path | None = None) -> None:
    """Evaluate a model by inspect-ai, print the results, and write them to a directory.

    Args:
        target: The run, checkpoint or model directory.
        settings: The task, and the settings that replace the task's.
        out: The directory for the results; None: a new one, as for `ratchet eval`.

    Raises:
        ConfigError: The target is an endpoint, or inspect-ai or the task's file is missing.
        RatchetError: inspect-ai failed, or no attempt has a score.
    """
    INSPECT.refuse_address(target, settings.task)
    file = settings.task.partition("@")[0]
    if file.endswith(".py") and not Path(file).is_file():
        raise ConfigError(
            f"--inspect={settings.task} names {file}, which is not a file: correct the path"
        )
    program = INSPECT.find()
    path = fetch_run_model(target, settings.step)
    with TemporaryFolder("inspect") as folder:
        serve_to_program(
            path,
            lambda served: ProgramCall(
                make_command(program, settings, folder),
                {"RATCHET_BASE_URL": served.url, "RATCHET_API_KEY": served.key},
            ),
            name=f"{INSPECT.name} eval {settings.task}",
            sampling=Sampling(max_new_tokens=settings.max_new_tokens or MAX_NEW_TOKENS),
            generator=settings.generator,
            step=settings.step,
        )
        logs = sorted(folder.glob("*.json"))
        if not logs:
            raise RatchetError(f"{INSPECT.name} wrote no log: its output is above")
        save_results(
            [(read_inspect_log(log, MODEL), log) for log in logs],
            target,
            step=settings.step,
            out=out,
            attached_name=LOG,
        )


def make_command(program: str, settings: InspectSettings, log_dir: Path) -> list[str]:
    """Return the command; options that are not set are left to the task."""
    values = {
        "--limit": settings.tasks,
        "--temperature": settings.temperature,
        "--max-tokens": settings.max_new_tokens,
    }
    options = [(name, str(value)) for name, value in values.items() if value is not None]
    return [
        program,
        "eval",
        settings.task,
        *("--model", MODEL),
        *("--log-dir", str(log_dir)),
        *("--log-format", "json"),
        *("--display", "plain"),
        # A sample with an error is counted as a failed attempt.
        "--no-fail-on-error",
        *(word for option in options for word in option),
    ]
