"""Build container images from folders with a Dockerfile."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from pathlib import Path

from ratchet.sandbox.base import SandboxError
from ratchet.sandbox.docker_api import DockerEngine

# One build at a time: attempts of one task would otherwise build its image several times.
BUILD_LOCK = threading.Lock()


def build_image(engine: DockerEngine, folder: Path, timeout_s: float) -> str:
    """Build the folder's image unless the engine has it, and return its name.

    The name is a hash of the folder's files, so a changed folder has another image. Raises
    SandboxError if the build fails.

    Args:
        folder: The build context. It has a file named Dockerfile.
        timeout_s: Maximum number of seconds without output of the builder.
    """
    context = _pack(folder)
    image = f"ratchet-task:{hashlib.sha256(context).hexdigest()[:24]}"
    with BUILD_LOCK:
        if not engine.has_image(image):
            engine.build(image, context, timeout_s)
    return image


def _pack(folder: Path) -> bytes:
    """Return the folder's files as a tar archive without their times and owners."""
    packed = io.BytesIO()
    try:
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path in sorted(folder.rglob("*")):
                entry = archive.gettarinfo(path, path.relative_to(folder).as_posix())
                entry.mtime = 0
                entry.uid = 0
                entry.gid = 0
                entry.uname = ""
                entry.gname = ""
                if entry.isreg():
                    with path.open("rb") as file:
                        archive.addfile(entry, file)
                else:
                    archive.addfile(entry)
    except OSError as error:
        raise SandboxError(f"the folder {folder} can't be read: {error}") from error
    return packed.getvalue()
