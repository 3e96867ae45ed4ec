"""Run programs on a service with SandboxFusion's API.

POST /run_code takes a RunCodeRequest and returns a RunCodeResponse. Its `status` is Success,
Failed, or SandboxError if the service itself failed.

Source: github.com/bytedance/SandboxFusion, sandbox/server/sandbox_api.py.
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

from ratchet.observe.stall_report import waiting
from ratchet.sandbox.base import (
    DEFAULT_LIMITS,
    Isolation,
    Limits,
    OwnedSandbox,
    Reason,
    Result,
    SandboxError,
    Session,
    Strength,
    end_threads,
)
from ratchet.sandbox.config import RemoteSandboxConfig
from ratchet.sandbox.workspace import Workspace
from ratchet.types import is_number_not_bool
from ratchet.utils.retry import call_with_retries
from ratchet.utils.safe_read import parse_json
from ratchet.web.client import AnswerTooLong, NoAnswer, WholeAnswer, send_request

# Bytes at which the service cuts an output, without reporting it.
SERVICE_OUTPUT_BYTES = 1 << 20
MAX_ANSWER_BYTES = 8 << 20
DECODE_ERROR_MARK = "[DecodeError]"  # the service's replacement of an output that isn't UTF-8
# Two programs that test isolation: one leaves a file, the other looks for it.
LEAVE_FILE = "open('/tmp/{name}', 'w').close()"
LOOK_FOR_FILE = "import os\nprint(os.path.exists('/tmp/{name}'))"


class ServiceUnavailable(SandboxError):
    """The service failed, or could not be reached; a retry may help."""


class RemoteSandbox(OwnedSandbox):
    """A sandbox on a service with SandboxFusion's API.

    The service does not report how it isolates programs: the config declares it (`offers`), and two
    programs test if one can leave a file for the other. The service applies the limits on time and
    memory of each request, and a limit of 1 MiB on output. `Limits.output_kib` is applied here. The
    service's own limits replace `cpu_s`, `disk_mib`, `processes` and `threads`. Raises SandboxError
    at construction if the service does not respond, or isolates too weakly.

    Args:
        slots: Number of concurrent requests.
    """

    has_same_python = False

    def __init__(
        self,
        config: RemoteSandboxConfig,
        *,
        slots: int = 2,
        at_least: Isolation = Isolation.NAMESPACES,
    ) -> None:
        import httpx2

        self.config = config
        declared = Isolation[config.offers.upper()]
        self.strength = Strength(
            declared, (f"offers={config.offers}",), (f"as declared for {config.address}",)
        )
        self.strength.require(at_least, f"the service at {config.address}")
        self._headers = {"Content-Type": "application/json"}
        if config.token_file:
            self._headers["Authorization"] = f"Bearer {_read_token(config)}"
        # Reading the certificates takes 20 ms, so it is done once.
        is_secure = config.address.startswith("https")
        self._verify = httpx2.create_ssl_context() if is_secure else False
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix="remote")
        self._closing = threading.Event()
        self._finalizer = weakref.finalize(self, _close, self._closing, self._threads)
        try:
            self._check_service()
        except SandboxError:
            self.close()
            raise

    async def run(
        self, program: str | Sequence[str], stdin: bytes = b"", limits: Limits = DEFAULT_LIMITS
    ) -> Result:
        """Run a program; see `Sandbox.run`.

        Input and output are text only. If the caller is cancelled, the program still runs on the
        service until it ends or meets its limit.
        """
        if not self._finalizer.alive:
            raise SandboxError("this sandbox is closed")
        function = functools.partial(self._run, program, stdin, limits)
        with waiting("programs", "run", f"sandbox at {self.config.address}", limits.wall_s):
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def open(self, image: str = "", limits: Limits = DEFAULT_LIMITS) -> Session:
        """Return a session; see `Sandbox.open`.

        Its files are kept on this machine and sent with each command.
        """
        if image:
            raise SandboxError(
                f"the service at {self.config.address} can't run the image {image!r}: it runs no "
                "images. Use the docker sandbox"
            )
        return Workspace(self, limits)

    def _check_service(self) -> None:
        """Raise SandboxError if the service can't run Python, or isolates less than declared."""
        name = f"ratchet-{secrets.token_hex(8)}"
        self._run(LEAVE_FILE.format(name=name), b"", DEFAULT_LIMITS)
        probe = self._run(LOOK_FOR_FILE.format(name=name), b"", DEFAULT_LIMITS)
        if not probe.ok:
            raise SandboxError(
                f"the service at {self.config.address} can't run Python: {probe.stderr[-200:]!r}"
            )
        if self.isolation > Isolation.SECCOMP and b"True" in probe.stdout:
            raise SandboxError(
                f"offers={self.config.offers} is wrong: at the service {self.config.address} a "
                "program can read files of an earlier program. Make it isolate programs, or set "
                "offers=seccomp"
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
            raise SandboxError("stdin is not UTF-8, and a remote sandbox takes only text") from None
        return call_with_retries(
            lambda: _read_result(self._post(content, limits.wall_s), limits),
            retries=self.config.retries,
            first_wait_s=self.config.retry_wait_s,
            retry_on=ServiceUnavailable,
            wait=lambda _, wait_s: self._closing.wait(wait_s),
        )

    def _post(self, content: bytes, wall_s: float) -> dict[str, Any]:
        """Return the service's response.

        Raises ServiceUnavailable if a retry may help, else SandboxError.
        """
        url = f"{self.config.address.rstrip('/')}/run_code"
        timeout_s = wall_s + self.config.timeout_s
        try:
            response = asyncio.run(self._send(url, content, timeout_s))
        except TimeoutError:
            raise ServiceUnavailable(
                f"no sandbox service answers at {url} (no answer within {timeout_s:g} s)"
            ) from None
        except AnswerTooLong as error:
            raise SandboxError(f"{url} gave {error}") from error
        except NoAnswer as error:
            raise ServiceUnavailable(f"no sandbox service answers at {url} ({error})") from error
        status, data = response.status, response.content
        if status == 429 or status >= 500:
            raise ServiceUnavailable(f"{url} answered {status}: {data[:200]!r}")
        if not 200 <= status < 300:
            raise SandboxError(
                f"{url} answered {status}: {data[:200]!r}: does it speak SandboxFusion's API?"
            )
        try:
            answer = parse_json(data)
            is_valid = answer["status"] in ("Success", "Failed", "SandboxError")
        except (ValueError, KeyError, TypeError):
            is_valid = False
            answer = {}
        if not is_valid:
            raise ServiceUnavailable(f"{url} answered {data[:200]!r}, which is no RunCodeResponse")
        if answer["status"] == "SandboxError":
            raise ServiceUnavailable(
                f"the service at {url} failed: {str(answer.get('message'))[:300]}"
            )
        return answer

    async def _send(self, url: str, content: bytes, timeout_s: float) -> WholeAnswer:
        import httpx2

        # The deadline needs an event loop, and a connection can't outlive the loop of its request.
        async with httpx2.AsyncClient(verify=self._verify, timeout=None, trust_env=False) as client:
            return await send_request(
                client,
                "POST",
                url,
                content=content,
                headers=self._headers,
                timeout_s=timeout_s,
                max_bytes=MAX_ANSWER_BYTES,
            )


def _read_result(answer: dict[str, Any], limits: Limits) -> Result:
    """Return the result in the service's response.

    Raises ServiceUnavailable if the response has no usable result.
    """
    run_result = answer.get("run_result")
    if not isinstance(run_result, dict):
        run_result = {}
    status = run_result.get("status")
    code = run_result.get("return_code")
    time_value = run_result.get("execution_time")
    seconds = float(time_value) if is_number_not_bool(time_value) else 0.0
    outputs = [
        str(run_result.get(name) or "").encode("utf-8", "surrogatepass")
        for name in ("stdout", "stderr")
    ]
    max_bytes = min(limits.output_kib << 10, SERVICE_OUTPUT_BYTES - 1)
    is_too_long = any(len(output) > max_bytes for output in outputs)
    stdout, stderr = (output[:max_bytes] for output in outputs)
    if status == "TimeLimitExceeded":
        return Result(None, None, stdout, stderr, seconds, Reason.WALL)
    if status != "Finished" or type(code) is not int:
        raise ServiceUnavailable(
            f"the service's response has no result: status {status!r}, code {code!r}"
        )
    if is_too_long:
        return Result(None, None, stdout, stderr, seconds, Reason.OUTPUT)
    # The output is lost, so the program must not count as successful.
    if stdout.startswith(DECODE_ERROR_MARK.encode()):
        return Result(code or 1, None, stdout, stderr, seconds, Reason.EXIT)
    # A signal is reported as a negative code, or as 128 + signal by a shell.
    signal_number = -code if code < 0 else code - 128 if code > 128 else None
    return Result(
        None if signal_number else code,
        signal_number,
        stdout,
        stderr,
        seconds,
        Reason.SIGNAL if signal_number else Reason.EXIT,
    )


def _read_token(config: RemoteSandboxConfig) -> str:
    assert config.token_file is not None
    try:
        return config.token_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SandboxError(f"token_file {config.token_file} can't be read: {error}") from error


def _close(closing: threading.Event, threads: ThreadPoolExecutor) -> None:
    closing.set()
    end_threads(threads)
