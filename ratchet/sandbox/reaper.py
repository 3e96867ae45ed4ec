"""Identify the owner process of a container, and remove the containers of dead owners.

The owner is the value of a container's label `OWNER_LABEL`.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from ratchet.sandbox.base import SandboxError
from ratchet.sandbox.docker_api import DockerEngine, EngineUnavailable, read_field, read_id

OWNER_LABEL = "ratchet.owner"


def remove_dead_containers(engine: DockerEngine) -> list[str]:
    """Remove the containers of dead owners on this machine, and return their ids."""
    containers = engine.json(
        "GET", "/containers/json", all="true", filters=json.dumps({"label": [OWNER_LABEL]})
    )
    if not isinstance(containers, list):
        raise EngineUnavailable(f"the engine's list of containers is {containers!r:.80}")
    dead = [
        read_id(container)
        for container in containers
        if not _may_be_alive(read_field(container, str, "Labels", OWNER_LABEL, default=""))
    ]
    for container in dead:
        with contextlib.suppress(SandboxError):
            engine.remove(container)
    return dead


def identify_process() -> str:
    """Return an id of this process: its machine's boot id, its pid and its start time.

    The start time is part of it because pids are reused.
    """
    return f"{_read_boot_id()}/{os.getpid()}/{_read_start_time(os.getpid())}"


def _may_be_alive(owner: str) -> bool:
    boot, _, process = owner.partition("/")
    pid, _, started = process.partition("/")
    if not boot or boot != _read_boot_id() or not pid.isdecimal():
        return True  # perhaps on another machine, which can't be inspected from here
    return _read_start_time(int(pid)) == started


def _read_boot_id() -> str:
    """Return an id of the machine's boot and of this pid namespace; "" if unknown.

    The namespace is part of the id, because two namespaces may use the same pid.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink(
            "/proc/self/ns/pid"
        ).strip("pid:[]")
    except OSError:
        return ""


def _read_start_time(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
