"""Report what the process of a run is waiting for (`ratchet status RUN`).

The process answers through a socket whose address is written in its run directory.
"""

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

from ratchet.errors import RunDirectoryError, RunNotFound
from ratchet.observe.stall_report import answer_status, request_status, show_on_signal
from ratchet.observe.write_files import replace_text
from ratchet.runs.run_dir import RunDirectory
from ratchet.utils.safe_read import read_json
from ratchet.utils.temp_dirs import TemporaryFolder

log = logging.getLogger(__name__)


@contextmanager
def serve_status(directory: RunDirectory) -> Iterator[None]:
    """Answer `ratchet status` and SIGUSR1 inside the block.

    The block must be entered in the main thread.
    """
    with _open_address() as address:
        location = {"pid": os.getpid(), "host": socket.gethostname(), "socket": address}
        with show_on_signal(), answer_status(address):
            replace_text(directory.status, json.dumps(location))
            try:
                yield
            finally:
                # Another run may have replaced the file by now.
                with suppress(OSError, ValueError):
                    if read_json(directory.status) == location:
                        directory.status.unlink()


@contextmanager
def _open_address() -> Iterator[str]:
    """Yield the address of a socket.

    On Linux it is an abstract name, which disappears with a killed process. On other systems it is
    a file in a temporary folder, because a run directory may be on a network disk, or its path may
    be too long for a socket.
    """
    if sys.platform == "linux":
        yield f"\0ratchet-{os.getpid()}-{secrets.token_hex(8)}"
        return
    with TemporaryFolder("status") as folder:
        yield f"{folder}/socket"


def query_status(path: Path) -> str:
    """Return the stall report of the process that trains in `path`.

    Raises:
        RunDirectoryError: No run is under way in `path`, it runs on another machine, or it does not
            answer.
    """
    directory = RunDirectory(path)
    if not directory.is_used:
        raise RunNotFound(
            f"{path} holds no run (no config.yaml). Give the directory that `ratchet train` printed"
        )
    try:
        location = read_json(directory.status)
        host = str(location["host"])
        socket_path = str(location["socket"])
        pid = location["pid"]
    except FileNotFoundError:
        raise RunDirectoryError(f"no run is under way in {path}") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunDirectoryError(
            f"{directory.status} does not describe a run ({error}). Remove this file"
        ) from error
    if host != socket.gethostname():
        raise RunDirectoryError(
            f"the run in {path} is under way on {host}. Run `ratchet status` there"
        )
    try:
        return request_status(socket_path)
    except (OSError, ValueError) as error:  # ValueError: an address or an answer of another program
        raise RunDirectoryError(
            f"process {pid}, which runs in {path}, does not answer ({error}): it is suspended "
            "or was killed"
        ) from error
