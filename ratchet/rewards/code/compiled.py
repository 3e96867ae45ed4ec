"""Compile programs of compiled languages in the sandbox, for the reward `code`.

The compiler and the program run in separate executions: the first gives back the executable, and
each test gets a copy of it in a fresh sandbox.
"""

from __future__ import annotations

import asyncio
import base64
import shlex
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ratchet.rewards.deadline import ProgramRunner, can_share, wait_for_shared
from ratchet.sandbox import Limits, Result, Sandbox, SandboxError

COMPILE_COMMANDS: Mapping[str, str] = {"cpp": "g++ -O2 -std=c++17", "go": "go build"}
MAX_EXECUTABLE_KIB = 8192
COMPILE_DISK_MIB = 256
# Compilers start processes, and their programs may start threads; both count as processes.
PROCESSES = 64
# The runtime of Go reserves address space that it never uses: with less, no program of it starts.
RESERVED_MIB: Mapping[str, int] = {"cpp": 0, "go": 2048}
# Go's compiler needs a cache, may fetch nothing, and does not find its library without /proc.
GO_VARIABLES = (
    "HOME=$PWD GOCACHE=$PWD/cache GOTMPDIR=$PWD GOPATH=$PWD/go GO111MODULE=off GOTOOLCHAIN=local "
    "CGO_ENABLED=0 GOTELEMETRY=off PATH=$PATH:/usr/local/go/bin"
)
GO_ROOT = 'GOROOT=$(dirname "$(dirname "$(readlink -f "$(command -v {program})")")")'
# The executable comes back as text, because a remote sandbox returns nothing else.
COMPILE_SCRIPT = {
    "cpp": "cat >main.cpp && {command} -o main main.cpp >&2 && base64 main",
    "go": f"export {GO_VARIABLES}; export {GO_ROOT}; "
    "cat >main.go && {command} -o main main.go >&2 && base64 main",
}
RUN_SCRIPT = """\
import base64, os, signal, zlib
for number in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
with open("main", "wb") as file:
    file.write(zlib.decompress(base64.b64decode({data!r})))
os.chmod("main", 0o700)
os.execv("main", ["main"])
"""
# A known program of each language, which prints the number that it reads.
PROBES: Mapping[str, str] = {
    "cpp": "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << n; }\n",
    "go": 'package main\nimport "fmt"\nfunc main() { var n int; fmt.Scan(&n); fmt.Println(n) }\n',
}
PROBE_NUMBER = b"42"


@dataclass(frozen=True)
class CompiledProgram:
    """The outcome of compiling a source."""

    runner: str | None
    """Python source that becomes the compiled program; None if the source has errors, or its
    compilation hit a limit."""
    result: Result
    """The result of the compiler."""


class Compiler:
    """A compiler of answers.

    Args:
        sandbox: The sandbox in which compilers run. It must allow processes.
        commands: The command of each language, to which the names of the files are appended.
        limits: Limits on a compiler's time and memory.
        run_limits: Limits of the compiled programs.
    """

    def __init__(
        self, sandbox: Sandbox, commands: Mapping[str, str], limits: Limits, run_limits: Limits
    ) -> None:
        self.sandbox, self.commands = sandbox, commands
        self.limits = replace(
            limits,
            disk_mib=COMPILE_DISK_MIB,
            output_kib=MAX_EXECUTABLE_KIB * 77 // 57,  # base64 has lines of 77 bytes for 57
            processes=PROCESSES,
        )
        self._run_limits = replace(run_limits, processes=PROCESSES, executable=True)
        self._checks: dict[str, asyncio.Future[None]] = {}

    def get_run_limits(self, language: str) -> Limits:
        """Return the limits of a compiled program."""
        memory_mib = self._run_limits.memory_mib + RESERVED_MIB[language]
        return replace(self._run_limits, memory_mib=memory_mib)

    async def compile(self, source: str, language: str, runner: ProgramRunner) -> CompiledProgram:
        """Compile a source.

        Raises SandboxError if the sandbox failed, or has no working compiler: the first call for a
        language compiles and runs a known program.
        """
        check = self._checks.get(language)
        if not can_share(check):
            check = self._checks[language] = asyncio.ensure_future(self._check(language))
        await wait_for_shared(check)
        return await self._compile(source, language, runner)

    async def _check(self, language: str) -> None:
        """Raise SandboxError unless a known program is compiled and runs."""
        runner = ProgramRunner(self.sandbox)
        program = await self._compile(PROBES[language], language, runner)
        result = program.result
        if program.runner is not None:
            limits = self.get_run_limits(language)
            result = await runner.run(program.runner, PROBE_NUMBER, limits)
            if result.ok and result.stdout.strip() == PROBE_NUMBER:
                return
        raise SandboxError(
            f"the sandbox can't compile and run a known {language} program by "
            f"'{self.commands[language]}' ({result.reason}, exit {result.exit}, "
            f"{result.stderr[-300:].decode('utf-8', 'replace')!r}). Install the compiler there, "
            f"or set compilers.{language}; with language=block you may also leave {language} out "
            "of block_languages"
        )

    async def _compile(self, source: str, language: str, runner: ProgramRunner) -> CompiledProgram:
        words = shlex.split(self.commands[language])
        script = COMPILE_SCRIPT[language].format(
            command=shlex.join(words), program=shlex.quote(words[0])
        )
        stdin = source.encode("utf-8", "surrogatepass")
        result = await runner.run(["sh", "-c", script], stdin, self.limits)
        if not result.ok or not result.stdout:
            return CompiledProgram(None, result)
        # A large executable takes half a second, in which all other attempts would stand still.
        program = await asyncio.to_thread(_make_runner, result.stdout)
        return CompiledProgram(program, replace(result, stdout=b""))


def _make_runner(executable_text: bytes) -> str:
    """Return Python source that becomes the executable, which is given in base64."""
    executable = base64.b64decode(executable_text)
    data = base64.b64encode(zlib.compress(executable, 1)).decode("ascii")
    return RUN_SCRIPT.format(data=data)
