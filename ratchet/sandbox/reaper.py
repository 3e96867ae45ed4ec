"""Who a container belongs to, and the end of those whose owner has died."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from ratchet.sandbox.docker_api import Engine, Unwell

OWNER = "ratchet.owner"


def reap(engine: Engine) -> list[str]:
    """Removes the containers that a run of this machine created and that has died since; their
    ids."""
    listed = engine.json(
        "GET", "/containers/json", all="true", filters=json.dumps({"label": [OWNER]})
    )
    dead = [
        item["Id"]
        for item in listed
        if not _may_live(str((item.get("Labels") or {}).get(OWNER, "")))
    ]
    for container in dead:
        with contextlib.suppress(Unwell):
            engine.remove(container)
    return dead


def this_process() -> str:
    """This process: the boot of its machine, its id, and when it started, as ids are used again."""
    return f"{_boot()}/{os.getpid()}/{_started(os.getpid())}"


def _may_live(owner: str) -> bool:
    boot, _, rest = owner.partition("/")
    pid, _, started = rest.partition("/")
    if not boot or boot != _boot() or not pid.isdecimal():
        return True  # of another machine: who knows
    return _started(int(pid)) == started


def _boot() -> str:
    """Empty where the machine doesn't tell; the namespace of process ids is part of it, as two have
    the same ids."""
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
