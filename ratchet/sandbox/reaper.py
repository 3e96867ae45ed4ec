"""Label containers with their owner process, and remove those of dead owners."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from ratchet.sandbox.docker_api import DockerEngine, EngineUnavailable

OWNER = "ratchet.owner"


def reap(engine: DockerEngine) -> list[str]:
    """Remove the containers of dead owners on this machine, and return their ids."""
    listed = engine.json(
        "GET", "/containers/json", all="true", filters=json.dumps({"label": [OWNER]})
    )
    dead = [
        item["Id"]
        for item in listed
        if not _may_live(str((item.get("Labels") or {}).get(OWNER, "")))
    ]
    for container in dead:
        with contextlib.suppress(EngineUnavailable):
            engine.remove(container)
    return dead


def identify_process() -> str:
    """Return an id of this process: its machine's boot, its pid, and its start time, because pids
    are reused."""
    return f"{_boot()}/{os.getpid()}/{_started(os.getpid())}"


def _may_live(owner: str) -> bool:
    boot, _, rest = owner.partition("/")
    pid, _, started = rest.partition("/")
    if not boot or boot != _boot() or not pid.isdecimal():
        return True  # perhaps on another machine, which can't be inspected from here
    return _started(int(pid)) == started


def _boot() -> str:
    """Return an id of the machine's boot and this pid namespace, as two namespaces may use the same
    pid; "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink(
            "/proc/self/ns/pid"
        ).strip("pid:[]")
    except OSError:
        return ""


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
