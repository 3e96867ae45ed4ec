"""The command `ratchet eval --inspect TASK`: serve a model to inspect-ai, and keep its scores."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ratchet.commands.eval import print_and_save
from ratchet.commands.eval_setup import MAX_NEW_TOKENS
from ratchet.commands.model_target import open_target
from ratchet.commands.serve import ServedModel
from ratchet.errors import ConfigError, RatchetError
from ratchet.evals.inspect_log import read_inspect_log
from ratchet.evals.openai_client import is_endpoint
from ratchet.experience.openai_proxy.server import make_chat_app
from ratchet.observe.summary import get_installed_versions
from ratchet.processes.process_group import kill_group
from ratchet.runs.resolve import fetch_run_model
from ratchet.types import Sampling
from ratchet.utils import credentials
from ratchet.utils.temp_dirs import TemporaryFolder
from ratchet.utils.terminal_text import make_console
from ratchet.web.server import Server

PROGRAM = "inspect"
# inspect-ai reads the address and the key of this model from RATCHET_BASE_URL and RATCHET_API_KEY.
MODEL = "openai-api/ratchet/policy"
LOG = "inspect.json"  # the log of inspect-ai, beside the results


@dataclass(frozen=True)
class InspectSettings:
    """Settings of an evaluation by inspect-ai.

    Attributes:
        task: A file (sums.py, sums.py@name) or a registered name (package/name).
        step: The step of the run's checkpoint; None: its trained model.
        tasks: Maximum number of samples; None: all.
        temperature: The temperature; None: the task's, or 1.
        max_new_tokens: Maximum number of tokens of an answer; None: the task's, or 2048.
        generator: Kind of the generator; None: the run's.
    """

    task: str
    step: int | None = None
    tasks: int | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None
    generator: str | None = None


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
    if is_endpoint(target):
        raise ConfigError(
            f"--inspect serves a model of a run or a directory, and {target} is served already: "
            f"run `{PROGRAM} eval {settings.task}` yourself"
        )
    file = settings.task.partition("@")[0]
    if file.endswith(".py") and not Path(file).is_file():
        raise ConfigError(
            f"--inspect={settings.task} names {file}, which is no file: correct the path"
        )
    program = find_program()
    path = fetch_run_model(target, settings.step)
    with TemporaryFolder("inspect") as folder:
        asyncio.run(_serve_to_inspect(path, program, settings, folder))
        logs = sorted(folder.glob("*.json"))
        if not logs:
            raise RatchetError(f"{PROGRAM} wrote no log: its output is above")
        for log in logs:
            results = read_inspect_log(log, MODEL)
            step = "" if settings.step is None else f", step {settings.step}"
            version = {"ratchet": get_installed_versions()["ratchet"]}
            about = {"target": f"{target}{step}", **results.about, **version}
            results = replace(results, about=about)
            directory = out if out is None or len(logs) == 1 else out / str(about["on"])
            print_and_save(results, target, directory, make_console(), attached={LOG: log})


def find_program() -> str:
    """Return the path of inspect-ai's program: on PATH, or beside this interpreter.

    Raises ConfigError if there is none.
    """
    interpreter_dir = Path(sys.executable).parent
    program = shutil.which(PROGRAM) or shutil.which(PROGRAM, path=str(interpreter_dir))
    if program is None:
        raise ConfigError(
            f"--inspect needs the program `{PROGRAM}` on PATH: pip install inspect-ai, in an "
            "environment of its own"
        )
    return program


async def _serve_to_inspect(
    path: Path, program: str, settings: InspectSettings, log_dir: Path
) -> None:
    """Serve the model on a free port of loopback until inspect-ai has ended.

    Raises RatchetError if inspect-ai fails.
    """
    policy = open_target(path, generator=settings.generator, step=settings.step).policy
    sampling = Sampling(max_new_tokens=settings.max_new_tokens or MAX_NEW_TOKENS)
    model, key = ServedModel(policy, sampling), secrets.token_urlsafe()
    app = make_chat_app(
        lambda request_key: (
            model if hmac.compare_digest(request_key.encode(), key.encode()) else None
        )
    )
    server = Server(app, socket.create_server(("127.0.0.1", 0)))
    serving = asyncio.create_task(server.run())
    host, port = server.address
    variables = {"RATCHET_BASE_URL": f"http://{host}:{port}/v1", "RATCHET_API_KEY": key}
    try:
        status = await _run_program(
            make_command(program, settings, log_dir), {**credentials.get_environment(), **variables}
        )
    finally:
        server.stop()
        await serving
        await policy.close()
    if status:
        raise RatchetError(
            f"`{PROGRAM} eval {settings.task}` ended with status {status}: its output is above"
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


async def _run_program(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program that prints to this process's output, and return its exit status."""
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
    )
    try:
        return await process.wait()
    finally:
        kill_group(process.pid)
