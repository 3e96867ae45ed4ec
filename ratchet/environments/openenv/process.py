"""Start the server of an OpenEnv package, and end it."""

from __future__ import annotations

import re
import select
import subprocess
import tempfile
import weakref
from importlib.resources import files
from pathlib import Path

from ratchet.errors import ConfigError
from ratchet.processes.process_group import kill_group
from ratchet.utils.safe_read import read_text

MANIFEST = "openenv.yaml"
DEFAULT_APP = "server.app:app"
SHOWN_ERROR = 2000  # characters of the server's error output in an error


class ServerProcess:
    """A process that serves an OpenEnv package on loopback. It ends with this object.

    Args:
        package: Directory of the package, as `openenv init` writes it.
        python: Interpreter with `openenv` and the package's requirements.
        sessions: Maximum number of sessions at once, if the environment allows several.
        timeout_s: Seconds that the start may take.

    Raises:
        ConfigError: The directory is not a package, or the server does not start.
    """

    def __init__(self, package: Path, python: str, sessions: int, timeout_s: float) -> None:
        manifest = package / MANIFEST
        if not manifest.is_file():
            raise ConfigError(
                f"environment.path={package} has no {MANIFEST}. Name a directory that `openenv "
                "init` wrote."
            )
        app = re.search(r"^app:\s*([\w.]+:\w+)", read_text(manifest), re.MULTILINE)
        launcher = str(files("ratchet.environments.openenv").joinpath("launcher.py"))
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        command = [python, "-P", launcher, app[1] if app else DEFAULT_APP, str(sessions)]
        try:
            self._process = subprocess.Popen(
                command,
                cwd=package,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"environment.python={python} can't be started: {error}") from error
        self._finalizer = weakref.finalize(self, _end, self._process)
        port = self._read_port(timeout_s)
        if not port.isdigit():
            self.close()
            raise ConfigError(
                f"the server of environment.path={package} did not start with {python}: "
                f"{self._read_errors()}"
            )
        self.url = f"http://127.0.0.1:{port}"

    def _read_port(self, timeout_s: float) -> str:
        """Return the line in which the launcher prints its port; "" without one in time."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        return self._process.stdout.readline().decode("ascii", "replace").strip() if ready else ""

    def _read_errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode("utf-8", "replace")[-SHOWN_ERROR:].strip()

    def describe_end(self) -> str:
        """Return how the server ended, and the end of its error output; "" while it runs."""
        code = self._process.poll()
        return "" if code is None else f" (it ended with code {code}: {self._read_errors()})"

    def close(self) -> None:
        """End the process. Further calls do nothing."""
        self._finalizer()


def _end(process: subprocess.Popen[bytes]) -> None:
    kill_group(process.pid)  # the server's own child processes too
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
