"""Run programs on a service that speaks SandboxFusion's API.

Source: github.com/bytedance/SandboxFusion, sandbox/server/sandbox_api.py: POST /run_code takes
RunCodeRequest and answers RunCodeResponse, whose `status` is Success, Failed, or SandboxError when
the service itself failed.
"""

from __future__ import annotations

import asyncio
import functools
import json
import secrets
import shlex
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ratchet.errors import MissingDependency
from ratchet.observe.stall_report import waiting
from ratchet.sandbox.base import (
    DEFAULT_LIMITS,
    Isolation,
    Limits,
    Reason,
    Result,
    SandboxError,
    Session,
    Strength,
    end_threads,
)
from ratchet.sandbox.config import RemoteSandboxConfig
from ratchet.sandbox.workspace import Workspace

# bytes that the service keeps of an output; it does not report that it cut one
SERVICE_OUTPUT = 1 << 20
MAX_ANSWER = 8 << 20
NOT_TEXT = "[DecodeError]"  # the service's replacement of an output that isn't UTF-8
LEAVE = "open('/tmp/{name}', 'w').close()"
LOOK = "import os\nprint(os.path.exists('/tmp/{name}'))"


class ServiceUnavailable(SandboxError):
    """The service failed, or could not be reached; a retry may help."""


class RemoteSandbox:
    """A sandbox on a service that speaks SandboxFusion's API.

    The service does not report how it isolates programs: its operator declares it (`offers`), and
    two programs test if one can leave a file for the other. Memory is limited by the service,
    `ServerLimits.output_kib` here and, at 1 MiB, there; `cpu_s`, `disk_mib`, `processes` and
    `threads` are the service's own. Raises SandboxError at construction if the service does not
    answer, or is too weak.

    Args:
        slots: Number of concurrent requests.
    """

    same_python = False

    def __init__(
        self,
        config: RemoteSandboxConfig,
        *,
        slots: int = 2,
        at_least: Isolation = Isolation.NAMESPACES,
    ) -> None:
        try:
            import httpx
        except ImportError:
            raise MissingDependency(
                "httpx", extra="envs", needed_for="the remote sandbox"
            ) from None
        self.config = config
        offered = Isolation[config.offers.upper()]
        self.strength = Strength(
            offered, (f"offers is {config.offers}",), (f"declared of {config.address}",)
        )
        self.strength.require(at_least, f"the service at {config.address}")
        headers = {"Authorization": f"Bearer {_token(config)}"} if config.token_file else {}
        self._client = httpx.Client(headers=headers, trust_env=False)
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix="remote")
        self._closing = threading.Event()
        self._end = weakref.finalize(self, _end, self._closing, self._threads, self._client)
        try:
            self._try_out()
        except SandboxError:
            self.close()
            raise

    @property
    def isolation(self) -> Isolation:
        return self.strength.isolation

    async def run(
        self, program: str | Sequence[str], stdin: bytes = b"", limits: Limits = DEFAULT_LIMITS
    ) -> Result:
        """Run a program; see `Sandbox.run`.

        Input and output are text only. When the caller is cancelled, the service goes on until its
        limit.
        """
        if not self._end.alive:
            raise SandboxError("this sandbox is closed")
        work = functools.partial(self._run, program, stdin, limits)
        with waiting("programs", "run", f"sandbox at {self.config.address}", limits.wall_s):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def open(self, image: str = "", limits: Limits = DEFAULT_LIMITS) -> Session:
        """Return a session; see `Sandbox.open`. Its files are kept here, and travel with each
        command."""
        if image:
            raise SandboxError(
                f"the service at {self.config.address} has no images, such as {image!r}: use the "
                "docker sandbox"
            )
        return Workspace(self, limits)

    def close(self) -> None:
        self._end()

    async def __aenter__(self) -> RemoteSandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def _try_out(self) -> None:
        name = f"ratchet-{secrets.token_hex(8)}"
        self._run(LEAVE.format(name=name), b"", DEFAULT_LIMITS)
        probe = self._run(LOOK.format(name=name), b"", DEFAULT_LIMITS)
        if not probe.ok:
            raise SandboxError(
                f"the service at {self.config.address} can't run Python: {probe.stderr[-200:]!r}"
            )
        if self.isolation > Isolation.SECCOMP and b"True" in probe.stdout:
            raise SandboxError(
                f"the service at {self.config.address} lets a program leave files for the next "
                "one, weaker than the declared "
                f"{self.config.offers}: have it isolate programs, or declare offers: seccomp"
            )

    def _run(self, program: str | Sequence[str], stdin: bytes, limits: Limits) -> Result:
        try:
            text = stdin.decode()
            body = {
                "code": program if isinstance(program, str) else shlex.join(program),
                "language": "python" if isinstance(program, str) else "bash",
                "stdin": text,
                "run_timeout": limits.wall_s,
                "memory_limit_MB": limits.memory_mib,
            }
            content = json.dumps(body).encode()
        except UnicodeDecodeError:
            raise SandboxError(
                "a remote sandbox takes text as input, and this is not UTF-8"
            ) from None
        for attempt in range(self.config.retries + 1):
            try:
                return _result(self._ask(content, limits.wall_s), limits)
            except ServiceUnavailable:
                last = attempt == self.config.retries
                if last or self._closing.wait(self.config.retry_wait_s * 2**attempt):
                    raise
        raise AssertionError("unreachable")

    def _ask(self, content: bytes, wall_s: float) -> dict[str, Any]:
        """Return the service's answer.

        Raises ServiceUnavailable, or SandboxError if the request is at fault.
        """
        import httpx

        url = f"{self.config.address.rstrip('/')}/run_code"
        headers = {"Content-Type": "application/json"}
        try:
            with self._client.stream(
                "POST",
                url,
                content=content,
                headers=headers,
                timeout=wall_s + self.config.timeout_s,
            ) as response:
                data = bytearray()
                for chunk in response.iter_bytes():
                    data += chunk
                    if len(data) > MAX_ANSWER:
                        raise SandboxError(f"{url} answered with more than {MAX_ANSWER} bytes")
        except httpx.TransportError as error:
            raise ServiceUnavailable(f"no sandbox service answers at {url} ({error!r})") from error
        if response.status_code == 429 or response.is_server_error:
            raise ServiceUnavailable(
                f"{url} answered {response.status_code}: {bytes(data[:200])!r}"
            )
        if not response.is_success:
            raise SandboxError(
                f"{url} answered {response.status_code}: {bytes(data[:200])!r}: does it speak "
                "SandboxFusion's API?"
            )
        try:
            answer = json.loads(data)
            is_valid = answer["status"] in ("Success", "Failed", "SandboxError")
        except (ValueError, KeyError, TypeError):
            is_valid = False
            answer = {}
        if not is_valid:
            raise ServiceUnavailable(
                f"{url} answered {bytes(data[:200])!r}, which is no RunCodeResponse"
            )
        if answer["status"] == "SandboxError":
            raise ServiceUnavailable(
                f"the service at {url} failed: {str(answer.get('message'))[:300]}"
            )
        return answer


def _result(answer: dict[str, Any], limits: Limits) -> Result:
    """Return the result in the service's answer. Raises ServiceUnavailable if it contradicts
    itself."""
    ran = answer.get("run_result") or {}
    status, code, seconds = (
        ran.get("status"),
        ran.get("return_code"),
        float(ran.get("execution_time") or 0.0),
    )
    outputs = [
        str(ran.get(name) or "").encode("utf-8", "surrogatepass") for name in ("stdout", "stderr")
    ]
    max_bytes = min(limits.output_kib << 10, SERVICE_OUTPUT - 1)
    over = any(len(text) > max_bytes for text in outputs)
    first, second = (text[:max_bytes] for text in outputs)
    if status == "TimeLimitExceeded":
        return Result(None, None, first, second, seconds, Reason.WALL)
    if status != "Finished" or not isinstance(code, int):
        raise ServiceUnavailable(
            f"the service ran a program to status {status!r} and code {code!r}"
        )
    if over:
        return Result(None, None, first, second, seconds, Reason.OUTPUT)
    # The output is lost, so the program can no longer be judged as right.
    if first.startswith(NOT_TEXT.encode()):
        return Result(code or 1, None, first, second, seconds, Reason.EXIT)
    number = -code if code < 0 else code - 128 if code > 128 else None
    return Result(
        None if number else code,
        number,
        first,
        second,
        seconds,
        Reason.SIGNAL if number else Reason.EXIT,
    )


def _token(config: RemoteSandboxConfig) -> str:
    assert config.token_file is not None
    try:
        return config.token_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SandboxError(f"token_file {config.token_file} can't be read: {error}") from error


def _end(closing: threading.Event, threads: ThreadPoolExecutor, client: Any) -> None:
    closing.set()
    end_threads(threads)
    client.close()
