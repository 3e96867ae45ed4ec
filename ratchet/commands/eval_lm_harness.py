"""The command `ratchet eval --lm-eval TASK`: serve a model to lm-evaluation-harness, and keep its
scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ratchet.commands.eval_program import (
    EvalProgram,
    ProgramCall,
    ServedAddress,
    save_results,
    serve_to_program,
)
from ratchet.commands.eval_setup import MAX_NEW_TOKENS
from ratchet.errors import ConfigError, RatchetError
from ratchet.evals.lm_eval_log import find_samples, read_lm_eval_log
from ratchet.runs.resolve import fetch_run_model
from ratchet.types import Sampling
from ratchet.utils.temp_dirs import TemporaryFolder

LM_EVAL = EvalProgram("lm_eval", "'lm_eval[api]'", "--lm-eval")
SAMPLES = "lm_eval.jsonl"  # the harness's samples, beside the results
CONCURRENT_REQUESTS = 16
# Options of the harness that `ratchet eval` sets, each with a sentence on what to do instead.
SET_HERE = {
    "model": "Set the target instead.",
    "model_args": "Set the target instead.",
    "tasks": "Set --lm-eval instead.",
    "limit": "Set --tasks instead.",
    "output_path": "Set --out instead.",
    "log_samples": "It is always set.",
    "batch_size": "Requests are concurrent.",
}


@dataclass(frozen=True)
class HarnessSettings:
    """Settings of an evaluation by lm-evaluation-harness."""

    task_names: str
    """A task, group or tag of the harness, or the YAML file of a task; several are separated by
    commas."""
    options: Sequence[str] = ()
    """Further options of the harness, as key=value."""
    step: int | None = None
    """The step of the run's checkpoint; None: its trained model."""
    max_rows: int | None = None
    """Maximum number of rows of each task; None: all."""
    generator: str | None = None
    """Kind of the generator; None: the run's."""


def evaluate_by_harness(target: str, settings: HarnessSettings, *, out: Path | None = None) -> None:
    """Evaluate a model by lm-evaluation-harness, print the results, and write them to directories.

    Args:
        target: The run, checkpoint or model directory.
        settings: The harness's tasks and the options of this evaluation (step, generator, row
            limit).
        out: Directory for the results; several tasks get one subdirectory each. None: a new
            directory per task, chosen as by `ratchet eval`.

    Raises:
        ConfigError: The target is an endpoint, or the harness or a task's file is missing.
        RatchetError: The harness failed, or no row has a score.
    """
    LM_EVAL.refuse_address(target, settings.task_names)
    for name in settings.task_names.split(","):
        if name.endswith((".yaml", ".yml")) and not Path(name).is_file():
            raise ConfigError(f"--lm-eval={name} is not a file: correct the path")
    options = convert_options(settings.options)
    program = LM_EVAL.find()
    path = fetch_run_model(target, settings.step)
    with TemporaryFolder("lm_eval") as folder:

        def make_call(served: ServedAddress) -> ProgramCall:
            command = make_command(program, settings, options, served, path, folder)
            return ProgramCall(command, {"OPENAI_API_KEY": served.key})

        serve_to_program(
            path,
            make_call,
            name=f"{LM_EVAL.name} --tasks {settings.task_names}",
            sampling=Sampling(max_new_tokens=MAX_NEW_TOKENS),
            generator=settings.generator,
            step=settings.step,
        )
        samples = find_samples(folder)
        if not samples:
            raise RatchetError(f"{LM_EVAL.name} wrote no samples: its output is above")
        save_results(
            [(read_lm_eval_log(file, results), file) for file, results in samples],
            target,
            step=settings.step,
            out=out,
            attached_name=SAMPLES,
        )


def convert_options(options: Sequence[str]) -> list[str]:
    """Return key=value options as words of the harness's command line.

    `key=true` is the option alone. Raises ConfigError for an option that `ratchet eval` sets.
    """
    words = []
    for option in options:
        key, equals, value = option.partition("=")
        name = key.lstrip("-").replace("-", "_")
        if not equals or not name:
            raise ConfigError(
                f"'{option}' is not an option of lm_eval: write it as key=value, such as "
                "num_fewshot=5"
            )
        if name in SET_HERE:
            raise ConfigError(
                f"remove {option}, which `ratchet eval` sets itself. {SET_HERE[name]}"
            )
        words += [f"--{name}"] if value == "true" else [f"--{name}", value]
    return words


def make_command(
    program: str,
    settings: HarnessSettings,
    options: Sequence[str],
    served: ServedAddress,
    tokenizer: Path,
    output: Path,
) -> list[str]:
    """Return the harness's command.

    Args:
        program: The path of the harness.
        settings: The tasks.
        options: Further words of the command line.
        served: The address of the model.
        tokenizer: The directory of the model's tokenizer, with which the harness encodes texts.
        output: The directory for the harness's files.
    """
    arguments: Mapping[str, object] = {
        "model": "policy",
        "base_url": f"{served.url}/completions",
        "tokenizer": tokenizer,
        "tokenizer_backend": "huggingface",
        "num_concurrent": CONCURRENT_REQUESTS,
        "max_length": served.max_context,
    }
    limit = () if settings.max_rows is None else ("--limit", str(settings.max_rows))
    return [
        program,
        "run",
        *("--model", "local-completions"),
        *("--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())),
        *("--tasks", *settings.task_names.split(",")),
        *("--output_path", str(output)),
        "--log_samples",
        *limit,
        *options,
    ]
