"""`ratchet status RUN`: what a run that is under way waits for. A run answers through a socket that
its directory names."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ratchet.errors import RunDirectoryError
from ratchet.observe.stall_report import answer_status, ask_status, shown_on_signal
from ratchet.observe.write_files import replace_text
from ratchet.runs.run_dir import RunDirectory
from ratchet.utils.safe_read import read_json
from ratchet.utils.temp_dirs import TemporaryFolder

log = logging.getLogger(__name__)


@contextmanager
def answers_status(directory: RunDirectory) -> Iterator[None]:
    """The process of a run answers `ratchet status` and SIGUSR1, inside the block. To be entered in
    the main thread."""
    with _address() as address:
        where = {"pid": os.getpid(), "host": socket.gethostname(), "socket": address}
        with shown_on_signal(), answer_status(address):
            replace_text(directory.status, json.dumps(where))
            try:
                yield
            finally:
                # The path may lead elsewhere by now, even to another run.
                with suppress(OSError, ValueError):
                    if read_json(directory.status) == where:
                        directory.status.unlink()


@contextmanager
def _address() -> Iterator[str]:
    """On Linux a name that is no file, which a killed process would leave; else in the folder for
    temporary files: a run directory may be on a disk of the network, or its path too long."""
    if sys.platform == "linux":
        yield f"\0ratchet-{os.getpid()}-{secrets.token_hex(8)}"
        return
    with TemporaryFolder("status") as folder:
        yield f"{folder}/socket"


def status_of(path: Path) -> str:
    """Raises RunDirectoryError where no run is under way in `path`, or not on this machine."""
    directory = RunDirectory(path)
    if not directory.used:
        raise RunDirectoryError(
            f"{path} holds no run (no config.yaml): give the directory that `ratchet train` named"
        )
    try:
        where = read_json(directory.status)
        host, socket_path, process = str(where["host"]), str(where["socket"]), where["pid"]
    except FileNotFoundError:
        raise RunDirectoryError(f"no run is under way in {path}") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunDirectoryError(
            f"{directory.status} says nothing of a run: {error}; remove it"
        ) from error
    if host != socket.gethostname():
        raise RunDirectoryError(f"the run in {path} is under way on {host}: ask there")
    try:
        return ask_status(socket_path)
    except OSError as error:
        raise RunDirectoryError(
            f"process {process}, whose run is in {path}, does not answer ({error}): it is stopped, "
            "or was killed"
        ) from error
