"""The tool that runs a policy's Python programs in the sandbox."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from ratchet.environments.tool_use.base import ToolConfig, ToolError
from ratchet.rewards.deadline import CURRENT_DEADLINE, ProgramRunner
from ratchet.sandbox import Isolation, Limits, LocalSandbox, Reason, Result


class PythonConfig(ToolConfig):
    """A tool that runs a program in the sandbox and returns what it prints."""

    builds: ClassVar[str] = "ratchet.environments.tool_use.python:PythonTool"

    timeout_s: float = Field(4.0, gt=0)
    """CPU time limit of a program, in seconds; the wall time limit is three times as long."""
    memory_mib: int = Field(512, ge=64)
    """Memory limit (address space) of a program, in MiB."""
    workers: int = Field(2, gt=0)
    """Maximum number of programs that run at once."""
    isolation: Literal["namespaces", "landlock", "seccomp"] = "landlock"
    """Weakest isolation allowed; the strongest available is used."""


# Ratio of the wall time limit to the CPU time limit, so that a quick program does not time out on a
# busy machine.
WALL_PER_CPU = 3
OUTPUT_KIB = 64
ERROR_CHARS = 1500
FAILURES = {
    Reason.WALL: "it took too long",
    # The same text as WALL, because the load of the machine decides which limit is met first.
    Reason.CPU: "it took too long",
    Reason.MEMORY: "it ran out of memory",
    Reason.OUTPUT: "it printed too much",
    Reason.SIGNAL: "it crashed",
}


class PythonTool:
    """A tool that runs a Python program and returns its output."""

    name = "python"
    description = (
        "Runs a Python program and returns what it prints. Nothing is kept from one call "
        "to the next."
    )

    def __init__(self, config: PythonConfig) -> None:
        """Create the tool. Raises SandboxError if the machine can't provide `isolation`."""
        self.config = config
        self.parameters = {
            "type": "object",
            "properties": {
                "code": {"type": "string", "description": "the program; print what you want to see"}
            },
            "required": ["code"],
        }
        self.sandbox = LocalSandbox(
            slots=config.workers, at_least=Isolation[config.isolation.upper()]
        )
        self.limits = Limits(
            wall_s=WALL_PER_CPU * config.timeout_s,
            cpu_s=config.timeout_s,
            memory_mib=config.memory_mib,
            output_kib=OUTPUT_KIB,
        )

    async def call(self, code: str) -> str:
        """Run a program, and return what it prints.

        Raises ToolError, with the end of the traceback, if the program failed, and SandboxError if
        the sandbox failed.
        """
        # The deadline limits only the program's own time. Waiting for a free sandbox slot does not
        # count, and is not an error of the policy.
        deadline = CURRENT_DEADLINE.get()
        wall_s = (
            self.limits.wall_s if deadline is None else min(self.limits.wall_s, deadline.seconds)
        )
        result = await ProgramRunner(self.sandbox).run(
            code, b"", replace(self.limits, wall_s=wall_s)
        )
        if result.ok:
            return result.stdout.decode("utf-8", "replace") or "(nothing was printed)"
        raise ToolError(describe_failure(result))


def describe_failure(result: Result) -> str:
    """Return why a program failed, with the ends of its standard error and standard output."""
    error_text = result.stderr.decode("utf-8", "replace").strip()[-ERROR_CHARS:]
    printed = result.stdout.decode("utf-8", "replace").strip()[-ERROR_CHARS:]
    reason = FAILURES.get(result.reason, f"it ended with exit code {result.exit}")
    return "\n".join(
        filter(
            None,
            (f"the program failed: {reason}", error_text, printed and f"printed before: {printed}"),
        )
    )
