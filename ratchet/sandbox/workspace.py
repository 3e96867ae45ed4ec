"""Provide sessions on a sandbox that keeps no files: each command is sent with the files."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files as resources
from pathlib import PurePosixPath
from typing import Any

from ratchet.sandbox import shell
from ratchet.sandbox.base import (
    Limits,
    Reason,
    Result,
    Sandbox,
    SandboxError,
    TooLarge,
    check_relative_path,
)

# Seconds that `inside/session_command.py` may take in addition to the command that it runs.
MARGIN_S = 10.0
# Processes in addition to the limit: `session_command.py`, its threads, and the commands of a
# pipeline.
SHELL_PROCESSES = 32
# Maximum size of a session's files. A remote service keeps 1 MiB of an answer, and base64 adds a
# third to the size of files.
MAX_FILES_KIB = 512
# Maximum number of files and directories that `put` leaves. The local sandbox holds 1024, and
# without some free ones the next command could not begin.
MAX_ENTRIES = 900


class Workspace:
    """A session whose files are kept in this process between commands.

    It keeps regular files with their modes, directories, the current directory and exported
    variables. It does not keep links and background processes.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits) -> None:
        self._sandbox = sandbox
        self._limits = limits
        # mode and data by path; a directory's data is None
        self._files: dict[str, tuple[int, bytes | None]] = {}
        self._closed = False

    async def run(self, command: str, timeout_s: float) -> Result:
        """Run a command; see `Session.run`.

        A command that leaves more than MAX_FILES_KIB of files ends with Reason.OUTPUT, and its
        changes are undone.
        """
        self._require_open()
        max_output_kib = min(self._limits.output_kib, MAX_FILES_KIB // 8)
        request = {
            "files": {name: [mode, _encode(data)] for name, (mode, data) in self._files.items()},
            "words": shell.build_shell_command("sh", command, shell.STATE_FILE),
            "state": shell.STATE_FILE,
            "timeout_s": timeout_s,
            "max_output_bytes": max_output_kib << 10,
            "max_files_bytes": MAX_FILES_KIB << 10,
        }
        limits = replace(
            self._limits,
            wall_s=timeout_s + MARGIN_S,
            cpu_s=max(self._limits.cpu_s, MARGIN_S),
            output_kib=2 * MAX_FILES_KIB,
            processes=self._limits.processes + SHELL_PROCESSES,
        )
        source = (
            resources("ratchet.sandbox")
            .joinpath("inside/session_command.py")
            .read_text(encoding="utf-8")
        )
        program_result = await self._sandbox.run(
            f"{source}\n\nmain()\n", json.dumps(request).encode("ascii"), limits
        )
        # The program was ended by a limit that it shares with the command, or by the command.
        if not program_result.ok:
            return replace(
                program_result,
                stdout=b"",
                stderr=b"the command ended its session's process: changes by it are undone\n",
            )
        return self._read_report(program_result)

    def _read_report(self, program_result: Result) -> Result:
        """Return the result that the program reported, and store its files.

        The report is as untrusted as the command: the limits bound its size, and it is only parsed
        as data.
        """
        try:
            report: dict[str, Any] = json.loads(program_result.stdout)
            stdout, stderr = (
                base64.b64decode(report[name], validate=True) for name in ("stdout", "stderr")
            )
            code, reason = int(report["code"]), Reason(report["reason"])
            if report["files"] is not None:
                entries = report["files"].items()
                self._files = {
                    check_relative_path(name): (int(mode) & 0o777, _decode(data))
                    for name, (mode, data) in entries
                }
        except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
            if program_result.ok and program_result.stdout:
                return replace(
                    program_result,
                    exit=1,
                    stdout=b"",
                    stderr=b"the command wrote into its session's own report\n",
                )
            raise SandboxError(
                f"a session's command came back without a report: {error}"
            ) from error
        has_status = reason in (Reason.EXIT, Reason.SIGNAL)
        signal = -code if has_status and code < 0 else None
        return Result(
            code if has_status and code >= 0 else None,
            signal,
            stdout,
            stderr,
            float(report["seconds"]),
            reason,
        )

    async def put(self, files: Mapping[str, bytes]) -> None:
        self._require_open()
        new_files = self._files | {
            check_relative_path(name): (0o755, bytes(data)) for name, data in files.items()
        }
        if sum(len(data or b"") for _, data in new_files.values()) > MAX_FILES_KIB << 10:
            raise TooLarge(
                f"the session's files take more than {MAX_FILES_KIB} KiB: use the docker sandbox"
            )
        paths = map(PurePosixPath, new_files)
        if len({entry for path in paths for entry in (path, *path.parents)}) > MAX_ENTRIES:
            raise TooLarge(
                f"the session has more than {MAX_ENTRIES} files and directories: use the docker "
                "sandbox"
            )
        self._files = new_files

    async def get(self, path: str = ".") -> dict[str, bytes]:
        self._require_open()
        relative = check_relative_path(path)
        regular_files = {
            name: data
            for name, (_, data) in self._files.items()
            if data is not None and name != shell.STATE_FILE
        }
        return {
            name: data
            for name, data in regular_files.items()
            if relative in (".", name) or name.startswith(relative + "/")
        }

    async def close(self) -> None:
        self._files = {}
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise SandboxError("this session is closed")


def _encode(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def _decode(data: Any) -> bytes | None:
    return None if data is None else base64.b64decode(data, validate=True)
