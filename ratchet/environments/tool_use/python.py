"""Programs that a policy writes, run in the sandbox."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from ratchet.environments.tool_use.base import ToolConfig, ToolError
from ratchet.rewards.deadline import CURRENT, Programs
from ratchet.sandbox import Isolation, Limits, LocalSandbox, Reason, Result


class PythonConfig(ToolConfig):
    """Runs a program in the sandbox and answers with what it prints."""

    builds: ClassVar[str] = "ratchet.environments.tool_use.python:PythonTool"

    timeout_s: float = Field(
        4.0, gt=0, description="Processor time of one program; of the clock, three times it."
    )
    memory_mib: int = Field(512, ge=64, description="Address space of the program.")
    workers: int = Field(2, gt=0, description="Programs that run at once.")
    isolation: Literal["namespaces", "landlock", "seccomp"] = Field(
        "landlock",
        description="The weakest sandbox that will do; the strongest that there is is taken.",
    )


WALL_PER_CPU = 3  # a busy machine must not make a quick program late
OUTPUT_KIB = 64
ERROR_CHARS = 1500
ENDS = {
    Reason.WALL: "it took too long",
    # which of the two limits is met first hangs on how busy the machine is
    Reason.CPU: "it took too long",
    Reason.MEMORY: "it ran out of memory",
    Reason.OUTPUT: "it printed too much",
    Reason.SIGNAL: "it crashed",
}


class PythonTool:
    name = "python"
    description = (
        "Runs a Python program and returns what it prints. Nothing is kept from one "
        "call "
        "to the next."
    )

    def __init__(self, config: PythonConfig) -> None:
        """Raises SandboxError where the machine isolates programs less than `isolation` says."""
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
        """Raises ToolError for a program that failed, with the end of its traceback; SandboxError
        where the sandbox did."""
        # The wait for a place in the sandbox is none of the program's, and no error to tell the
        # policy.
        deadline = CURRENT.get()
        wall_s = (
            self.limits.wall_s if deadline is None else min(self.limits.wall_s, deadline.seconds)
        )
        result = await Programs(self.sandbox).run(code, b"", replace(self.limits, wall_s=wall_s))
        if result.ok:
            return result.stdout.decode("utf-8", "replace") or "(nothing was printed)"
        raise ToolError(failure(result))


def failure(result: Result) -> str:
    """Return how a program failed, and the last of its error output."""
    error_text = result.stderr.decode("utf-8", "replace").strip()[-ERROR_CHARS:]
    printed = result.stdout.decode("utf-8", "replace").strip()[-ERROR_CHARS:]
    end = ENDS.get(result.reason, f"it ended with exit code {result.exit}")
    return "\n".join(
        filter(
            None,
            (f"the program failed: {end}", error_text, printed and f"printed before: {printed}"),
        )
    )
