"""Run programs and sessions in Docker containers, one container each, with the Docker Engine API.

A container lives as long as the connection to the input of its first process. So the engine ends
and removes it when the sandbox's process dies for any reason. Labels name the owning process, so
that the next sandbox on this machine removes the containers of a dead owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ratchet.observe.stall_report import waiting
from ratchet.sandbox import shell
from ratchet.sandbox.base import (
    DEFAULT_LIMITS,
    Isolation,
    Limits,
    OwnedSandbox,
    Reason,
    Result,
    SandboxError,
    Session,
    TooLarge,
    check_relative_path,
    end_threads,
)
from ratchet.sandbox.config import DockerSandboxConfig
from ratchet.sandbox.docker_api import (
    DockerEngine,
    DockerNotFound,
    DockerStream,
    EngineUnavailable,
    read_field,
    read_id,
)
from ratchet.sandbox.docker_build import build_image
from ratchet.sandbox.docker_container import (
    SCRATCH_DIRECTORY,
    build_container_config,
    read_strength,
)
from ratchet.sandbox.docker_outputs import CommandOutputs
from ratchet.sandbox.reaper import identify_process, remove_dead_containers
from ratchet.utils.retry import call_with_retries

T = TypeVar("T")
log = logging.getLogger(__name__)
RETRY_WAIT_S = 0.1  # wait before a call to the engine is tried once more, in seconds
GRACE_S = 5.0  # seconds for killed processes to end, and for the engine to notice
BROKEN_PIPE_CODE = 128 + 13
PAGE_BYTES = 4096  # smallest size of a file in memory
STATE_PATH = f"{SCRATCH_DIRECTORY}/{shell.STATE_FILE}"
# $0 is the text that both outputs end with. The file "$0.in" holds the standard input.
RUN_SCRIPT = '"$@" <"$0.in"; _code=$?; printf %s "$0"; printf %s "$0" >&2; exit $_code'
KILL_SCRIPT = "kill -KILL -1"  # all processes but the first and itself


class DockerSandbox(OwnedSandbox):
    """A sandbox that runs each program in a fresh container.

    Threads and event loops may share one sandbox.

    Args:
        slots: Number of programs that run at once.
        at_least: The weakest isolation that is accepted. An engine that filters no system calls is
            below every level, unless its runtime has a kernel of its own.

    Raises:
        SandboxError: No engine answers, or it is unfit or isolates less than `at_least`.
    """

    has_same_python = False

    def __init__(
        self,
        config: DockerSandboxConfig,
        *,
        slots: int = 2,
        at_least: Isolation = Isolation.NAMESPACES,
    ) -> None:
        self.config = config
        self._engine = DockerEngine(config.address, config.certificates, config.timeout_s)
        self.strength = read_strength(read_field(self._engine.json("GET", "/info"), dict), config)
        try:
            self.strength.require(at_least, f"the engine at {config.address}")
        except SandboxError:
            self._engine.close()
            raise
        self._owner = identify_process()
        self._stream_by_container: dict[str, DockerStream] = {}
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix="docker")
        self._finalizer = weakref.finalize(
            self, _close, self._engine, self._stream_by_container, self._threads
        )
        remove_dead_containers(self._engine)

    async def run(
        self, program: str | Sequence[str], stdin: bytes = b"", limits: Limits = DEFAULT_LIMITS
    ) -> Result:
        """Run a program in a fresh container; see `Sandbox.run`.

        An exit code above 128 is reported as signal (code - 128), by a shell's convention. The
        limits on processes and threads are added up to one limit for both together.
        """
        run_handle = _RunHandle(self)
        with waiting("programs", "run", f"docker sandbox {self.config.address}", limits.wall_s):
            return await self._call(
                lambda: self._run(run_handle, program, stdin, limits), run_handle.cancel
            )

    async def open(self, image: str = "", limits: Limits = DEFAULT_LIMITS) -> Session:
        """Start a container for a session; see `Sandbox.open`."""
        container = await self._call(
            lambda: self._retry(lambda: self.start(image or self.config.image, limits))
        )
        return DockerSession(self, container, limits)

    async def build(self, folder: Path, timeout_s: float) -> str:
        """Return the name of an image that is built from a folder with a Dockerfile."""
        return await self._call(lambda: build_image(self._engine, folder, timeout_s))

    async def _call(
        self, function: Callable[[], T], cancel: Callable[[], None] = lambda: None
    ) -> T:
        if not self._finalizer.alive:
            raise SandboxError("this sandbox is closed")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)
        except asyncio.CancelledError:
            cancel()
            raise

    def _retry(self, function: Callable[[], T]) -> T:
        def wait(_: Exception, wait_s: float) -> bool:
            time.sleep(wait_s)
            return not self._finalizer.alive

        return call_with_retries(
            function, retries=1, first_wait_s=RETRY_WAIT_S, retry_on=EngineUnavailable, wait=wait
        )

    def _run(
        self, run_handle: _RunHandle, program: str | Sequence[str], stdin: bytes, limits: Limits
    ) -> Result:
        return self._retry(lambda: self._run_once(run_handle, program, stdin, limits))

    def _run_once(
        self, run_handle: _RunHandle, program: str | Sequence[str], stdin: bytes, limits: Limits
    ) -> Result:
        run_handle.check()
        container = run_handle.container = self.start(self.config.image, limits)
        try:
            run_handle.check()
            end_marker = secrets.token_hex(16)
            files = {f"{end_marker}.in": stdin}
            words = (
                list(program)
                if not isinstance(program, str)
                else [self.config.python, "-B", f"{SCRATCH_DIRECTORY}/main.py"]
            )
            if isinstance(program, str):
                files["main.py"] = program.encode("utf-8", "surrogatepass")
            self._engine.put(container, SCRATCH_DIRECTORY, files)
            return self.execute(
                container,
                ["sh", "-c", RUN_SCRIPT, end_marker, *words],
                SCRATCH_DIRECTORY,
                limits,
                limits.wall_s,
                end_marker,
            )
        except DockerNotFound as error:
            raise EngineUnavailable(f"the container went away: {error}") from error
        finally:
            run_handle.container = None
            self.stop(container)

    # --- Blocking methods, which sessions call too.

    def start(self, image: str, limits: Limits) -> str:
        """Return the id of a new container that waits for programs."""
        engine = self._engine
        body = build_container_config(
            image, self.config, limits, self._owner, is_podman=engine.is_podman
        )
        try:
            container = read_id(engine.json("POST", "/containers/create", body))
        except DockerNotFound:
            if not self.config.pull:
                raise SandboxError(
                    f"the engine at {engine.address} has no image '{image}': docker pull {image}, "
                    "or set pull: true"
                ) from None
            engine.pull(image)
            container = read_id(engine.json("POST", "/containers/create", body))
        try:
            self._stream_by_container[container] = engine.attach(
                f"/containers/{container}/attach", stream=1, stdin=1
            )
            engine.json("POST", f"/containers/{container}/start")
        except SandboxError:
            self.stop(container)
            raise
        return container

    def stop(self, container: str) -> None:
        """End a container and remove it."""
        if stream := self._stream_by_container.pop(container, None):
            stream.close()
        # The container ends with its connection, even if this request fails.
        try:
            self._engine.remove(container)
        except SandboxError as error:
            log.warning("container %s can't be removed: %s", container, error)

    def execute(
        self,
        container: str,
        words: Sequence[str],
        folder: str,
        limits: Limits,
        timeout_s: float,
        end_marker: str,
    ) -> Result:
        """Run one command in a running container.

        Args:
            end_marker: Text that both outputs end with when they are complete.
        """
        engine = self._engine
        body = {
            "AttachStdout": True,
            "AttachStderr": True,
            "Cmd": list(words),
            "WorkingDir": folder,
            "User": self.config.user,
        }
        exec_id = read_id(engine.json("POST", f"/containers/{container}/exec", body))
        start = time.monotonic()
        stream = engine.attach(f"/exec/{exec_id}/start", {"Detach": False, "Tty": False})
        outputs = CommandOutputs(limits.output_kib << 10, end_marker)
        try:
            reason = outputs.read_to_end(stream, start + timeout_s)
            seconds = time.monotonic() - start
            if reason is not None:
                self._kill_programs(container, exec_id)
                return Result(None, None, *outputs.get_truncated_texts(), seconds, reason)
        finally:
            stream.close()
        code = self._wait_for_exit_code(exec_id)
        # If the outputs lack their end markers, the stream was cut, unless a signal killed the
        # shell before it wrote them. SIGPIPE proves no such kill: a cut stream causes it too.
        if not outputs.is_complete and (code <= 128 or code == BROKEN_PIPE_CODE):
            raise EngineUnavailable(
                "the engine's stream was cut: the program ended by itself, and its outputs are "
                "incomplete"
            )
        if code <= 128:
            return Result(code, None, *outputs.get_truncated_texts(), seconds, Reason.EXIT)
        # 137 is SIGKILL and 152 SIGXCPU, each plus 128.
        is_out_of_memory = code == 137 and read_field(
            engine.json("GET", f"/containers/{container}/json"), bool, "State", "OOMKilled"
        )
        reason = Reason.MEMORY if is_out_of_memory else Reason.CPU if code == 152 else Reason.SIGNAL
        return Result(
            None,
            code - 128 if reason is Reason.SIGNAL else None,
            *outputs.get_truncated_texts(),
            seconds,
            reason,
        )

    def _wait_for_exit_code(self, exec_id: str) -> int:
        deadline = time.monotonic() + GRACE_S
        while read_field(
            state := self._engine.json("GET", f"/exec/{exec_id}/json"), bool, "Running"
        ):
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    "the engine's stream was cut: it ended before the program did"
                )
            time.sleep(0.02)
        code = read_field(state, int, "ExitCode")
        if not 0 <= code <= 255:
            raise EngineUnavailable(f"the engine's answer has the exit status {code:.20g}")
        return code

    def _kill_programs(self, container: str, exec_id: str) -> None:
        """End every process but the first. If that fails, end the container."""
        body = {"Cmd": ["sh", "-c", KILL_SCRIPT], "User": self.config.user}
        try:
            killer = read_id(self._engine.json("POST", f"/containers/{container}/exec", body))
            self._engine.json("POST", f"/exec/{killer}/start", {"Detach": True, "Tty": False})
            self._wait_for_exit_code(exec_id)
        except SandboxError:
            self.stop(container)

    def get(self, container: str, path: str, max_bytes: int) -> dict[str, bytes]:
        try:
            return self._engine.get(container, path, max_bytes)
        except DockerNotFound:
            if container not in self._stream_by_container:  # the whole container is gone
                raise
            return {}

    def put(self, container: str, folder: str, files: Mapping[str, bytes]) -> None:
        self._engine.put(container, folder, files)


class DockerSession:
    """A container that is kept over several commands.

    A command that timed out leaves its files and the shell's state, but no background processes.
    """

    def __init__(self, sandbox: DockerSandbox, container: str, limits: Limits) -> None:
        self._sandbox = sandbox
        self.container = container
        self._limits = limits
        self._folder = sandbox.config.workdir
        # Bytes of the files put so far, each rounded up to whole pages.
        self._stored_bytes = 0
        self._finalizer = weakref.finalize(self, sandbox.stop, container)

    async def run(self, command: str, timeout_s: float) -> Result:
        end_marker = secrets.token_hex(16)
        words = shell.build_shell_command(
            self._sandbox.config.shell, command, STATE_PATH, end_marker
        )
        folder, limits = self._folder, self._limits
        return await self._call(
            lambda: self._sandbox.execute(
                self.container, words, folder, limits, timeout_s, end_marker
            )
        )

    async def put(self, files: Mapping[str, bytes]) -> None:
        files_by_path = {check_relative_path(name): bytes(data) for name, data in files.items()}
        self._stored_bytes += sum(
            -(-len(data) // PAGE_BYTES) * PAGE_BYTES for data in files_by_path.values()
        )
        if self._sandbox.config.read_only and self._stored_bytes > self._limits.disk_mib << 20:
            raise TooLarge(f"the session's files take more than its {self._limits.disk_mib} MiB")
        await self._call(lambda: self._sandbox.put(self.container, self._folder, files_by_path))

    async def get(self, path: str = ".") -> dict[str, bytes]:
        relative = check_relative_path(path)
        # "/." gives the contents of a directory; a file has no such path, so it is requested by its
        # name.
        full_path = f"{self._folder}/." if relative == "." else f"{self._folder}/{relative}"
        max_bytes = max(64 << 20, self._limits.disk_mib << 20)
        by_name = await self._call(lambda: self._sandbox.get(self.container, full_path, max_bytes))
        parent = os.path.dirname(relative)
        files = {
            os.path.normpath(os.path.join(parent, name)): data for name, data in by_name.items()
        }
        return {name: data for name, data in files.items() if name != shell.STATE_FILE}

    async def close(self) -> None:
        if self._finalizer.alive:
            await asyncio.get_running_loop().run_in_executor(None, self._finalizer)

    async def _call(self, function: Callable[[], T]) -> T:
        if not self._finalizer.alive:
            raise SandboxError("this session is closed")
        return await self._sandbox._call(function, lambda: self._sandbox.stop(self.container))


class _RunHandle:
    """The container of one run, so that a cancelled caller can stop it."""

    def __init__(self, sandbox: DockerSandbox) -> None:
        self.container: str | None = None
        self._sandbox = sandbox
        self._cancelled = False

    def check(self) -> None:
        if self._cancelled:
            raise SandboxError("the program was stopped before its end")

    def cancel(self) -> None:
        self._cancelled = True
        # A thread stops it, so that the cancelling caller does not wait for the engine.
        if container := self.container:
            threading.Thread(target=self._sandbox.stop, args=(container,), daemon=True).start()


def _close(
    engine: DockerEngine, stream_by_container: dict[str, DockerStream], threads: ThreadPoolExecutor
) -> None:
    for container, stream in list(stream_by_container.items()):
        stream.close()
        with contextlib.suppress(SandboxError):
            engine.remove(container)
    stream_by_container.clear()
    end_threads(threads)
    for container in list(stream_by_container):  # started in the meantime
        stream_by_container.pop(container).close()
    engine.close()
