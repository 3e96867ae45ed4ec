"""Serve a model on loopback to another library's evaluation program, and keep its scores."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ratchet.commands.eval import print_and_save
from ratchet.commands.model_target import open_target
from ratchet.commands.serve import ServedModel
from ratchet.errors import ConfigError, RatchetError
from ratchet.evals.openai_client import is_endpoint
from ratchet.evals.results import EvalResults
from ratchet.executors.event_loop import run_event_loop
from ratchet.experience.openai_proxy.server import make_chat_app
from ratchet.observe.summary import get_installed_versions
from ratchet.processes.process_group import kill_group
from ratchet.types import Sampling
from ratchet.utils import credentials
from ratchet.utils.terminal_text import make_console
from ratchet.web.server import Server


@dataclass(frozen=True)
class EvalProgram:
    """The program of another library."""

    name: str
    """The program's name on PATH."""
    package: str
    """The package to install, for error messages."""
    option: str
    """The option of `ratchet eval` that selects it."""

    def find(self) -> str:
        """Return the program's path: on PATH, or beside this interpreter.

        Raises ConfigError if it is not there.
        """
        interpreter_dir = Path(sys.executable).parent
        path = shutil.which(self.name) or shutil.which(self.name, path=str(interpreter_dir))
        if path is None:
            raise ConfigError(
                f"{self.option} needs the program `{self.name}` on PATH: pip install "
                f"{self.package}, in an environment of its own"
            )
        return path

    def refuse_address(self, target: str, task: str) -> None:
        """Raise ConfigError if the target is an address: then its model is served already."""
        if is_endpoint(target):
            raise ConfigError(
                f"{self.option} serves a model of a run or a directory, and {target} is served "
                f"already: run `{self.name}` for {task} yourself"
            )


@dataclass(frozen=True)
class ServedAddress:
    """The address of the served model, and what a client needs to know of it."""

    url: str
    """The base URL of the OpenAI API, `http://127.0.0.1:PORT/v1`."""
    key: str
    """The API key. Requests without it are refused."""
    max_context: int
    """Maximum number of tokens of prompt and answer."""


@dataclass(frozen=True)
class ProgramCall:
    """A command, and the environment variables that it gets beside those of this process."""

    command: Sequence[str]
    variables: Mapping[str, str]


def serve_to_program(
    path: Path,
    make_call: Callable[[ServedAddress], ProgramCall],
    *,
    name: str,
    sampling: Sampling,
    generator: str | None = None,
    step: int | None = None,
) -> None:
    """Serve a model on a free port of loopback until a program has ended.

    Args:
        path: The directory of the run or the model.
        make_call: Returns the program's call.
        name: The command as error messages show it.
        sampling: The defaults for requests.
        generator: Kind of the generator; None: the run's.
        step: The step of the run's checkpoint; None: its trained model.

    Raises:
        RatchetError: The program failed.
    """
    status = run_event_loop(_serve_to_program(path, make_call, sampling, generator, step))
    if status:
        raise RatchetError(f"`{name}` ended with status {status}: its output is above")


async def _serve_to_program(
    path: Path,
    make_call: Callable[[ServedAddress], ProgramCall],
    sampling: Sampling,
    generator: str | None,
    step: int | None,
) -> int:
    policy = open_target(path, generator=generator, step=step).policy
    model, key = ServedModel(policy, sampling), secrets.token_urlsafe()
    app = make_chat_app(
        lambda request_key: (
            model if hmac.compare_digest(request_key.encode(), key.encode()) else None
        )
    )
    server = Server(app, socket.create_server(("127.0.0.1", 0)))
    serving = asyncio.create_task(server.run())
    host, port = server.address
    try:
        return await _run_program(
            make_call(ServedAddress(f"http://{host}:{port}/v1", key, model.max_context))
        )
    finally:
        server.stop()
        await serving
        await policy.close()


async def _run_program(call: ProgramCall) -> int:
    """Run a program that prints to this process's output, and return its exit status."""
    process = await asyncio.create_subprocess_exec(
        *call.command,
        env={**credentials.get_environment(), **call.variables},
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return await process.wait()
    finally:
        kill_group(process.pid)


def save_results(
    all_results: Sequence[tuple[EvalResults, Path]],
    target: str,
    *,
    step: int | None,
    out: Path | None,
    attached_name: str,
) -> None:
    """Print and write the results of each task of a program.

    Args:
        all_results: The results of each task, with the program's own log of them.
        target: The target of the evaluation.
        step: The step of the run's checkpoint; None: its trained model.
        out: The directory for the results, which gets one for each of several tasks; None: new
            ones, as for `ratchet eval`.
        attached_name: The name of the program's log beside the results.

    Raises:
        RatchetError: No attempt of a task has a score.
    """
    version = {"ratchet": get_installed_versions()["ratchet"]}
    checkpoint = "" if step is None else f", step {step}"
    for results, log in all_results:
        about = {"target": f"{target}{checkpoint}", **results.about, **version}
        directory = out if out is None or len(all_results) == 1 else out / str(about["on"])
        print_and_save(
            replace(results, about=about),
            target,
            directory,
            make_console(),
            attached={attached_name: log},
        )
