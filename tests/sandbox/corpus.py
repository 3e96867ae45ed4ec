"""Runs every attack and says what got through or was left behind. A script too, for another user:

PYTHONPATH=.:tests python tests/sandbox/corpus.py LEVEL     prints {"isolation": ..., "count": ..., "problems": [...]}
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sandbox.attacks import ANSWER, ATTACKS, STDIN, Attack

from ratchet.sandbox import Isolation, Limits, LocalSandbox, Result, output_matches

SECRET = "only the trainer reads this"


@contextmanager
def targets(directory: Path) -> Iterator[dict[str, str]]:
    """What attacks reach for, all of it as open as the machine allows: only the sandbox stands
    before it."""
    directory.chmod(0o777)
    canary, expected = directory / "canary", directory / "expected"
    canary.write_text(SECRET)
    expected.write_bytes(ANSWER)
    canary.chmod(0o666)
    name = f"ratchet-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0" + name)
        abstract.listen()
        places = {
            "PARENT": os.getpid(),
            "PORT": tcp.getsockname()[1],
            "ABSTRACT": name,
            "CANARY": canary,
            "EXPECTED": expected,
        }
        yield {word: str(value) for word, value in places.items()}
        for listener in (tcp, abstract):
            listener.settimeout(0)
            try:
                listener.accept()
            except BlockingIOError:
                continue
            raise AssertionError("somebody connected")


async def attack(sandbox: LocalSandbox, attempt: Attack, places: dict[str, str]) -> Result:
    source = attempt.source
    for word, value in places.items():
        source = source.replace(word, value)
    allowed = attempt.processes if sandbox.isolation is Isolation.NAMESPACES else 1
    limits = Limits(
        wall_s=0.4 if attempt.long else 3,
        cpu_s=1,
        memory_mib=256,
        disk_mib=4,
        output_kib=64,
        processes=allowed,
    )
    return await sandbox.run(source, STDIN, limits)


FORK_SERVER = "from ratchet.testing.forks import serve"


def descendants(pid: int) -> dict[int, str]:
    """By process id, the command line, or "zombie". Reads /proc, as no bookkeeping of ours could be
    trusted here. The server from which tests fork commands is left out: it is not part of what is
    tested, and must not be killed with it."""
    parents: dict[int, int] = {}
    kinds: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, parent = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:2]
                line = (
                    entry.joinpath("cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                )
            except OSError:
                continue
            parents[int(entry.name)] = int(parent)
            kinds[int(entry.name)] = "zombie" if state == "Z" else line
    found: set[int] = set()
    while grown := {
        child
        for child, parent in parents.items()
        if (parent == pid or parent in found) and child not in found
    }:
        found |= grown
    return {child: kinds[child] for child in found if FORK_SERVER not in kinds[child]}


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


async def run_all(sandbox: LocalSandbox, places: dict[str, str]) -> list[str]:
    """What got through. Those that harm only our own canary go first: where one of them does, the
    rest would hurt for real."""
    own = [attempt for attempt in ATTACKS if "CANARY" in attempt.source]
    return await run_some(sandbox, own, places) or await run_some(
        sandbox, [a for a in ATTACKS if a not in own], places
    )


async def run_some(
    sandbox: LocalSandbox, attempts: Sequence[Attack], places: dict[str, str]
) -> list[str]:
    runs = [attack(sandbox, attempt, places) for attempt in attempts]
    problems = []
    for attempt, result in zip(
        attempts, await asyncio.gather(*runs, return_exceptions=True), strict=True
    ):
        if isinstance(result, BaseException):
            problems.append(f"{attempt.name}: {result}")
        elif output_matches(result, ANSWER):
            problems.append(f"{attempt.name} got through: {result}")
    return problems


def leftovers() -> list[str]:
    return [
        str(path)
        for folder in ("/tmp", "/var/tmp", "/dev/shm")
        for path in Path(folder).glob("left_by_attack*")
    ]


def find_problems(at_most: Isolation) -> tuple[Isolation, list[str]]:
    """The corpus against a sandbox of its own, then what is left of it while it idles and after it
    closed."""
    problems = []
    with tempfile.TemporaryDirectory() as folder, targets(Path(folder)) as places:
        before = descendants(os.getpid())
        sandbox = LocalSandbox(at_most=at_most)
        asyncio.run(warm_up(sandbox))
        servers, files = descendants(os.getpid()), open_files()
        problems += asyncio.run(run_all(sandbox, places))
        if (after := descendants(os.getpid())) != servers:
            problems.append(f"processes: {after} instead of {servers}")
        if open_files() != files:
            problems.append(f"open files: {sorted(open_files() ^ files)}")
        if (
            sorted(os.listdir(folder)) != ["canary", "expected"]
            or Path(places["CANARY"]).read_text() != SECRET
        ):
            problems.append("the trainer's files were changed")
        sandbox.close()
        if (after := descendants(os.getpid())) != before:
            problems.append(f"after close: {after}")
    return sandbox.isolation, problems + leftovers()


async def warm_up(sandbox: LocalSandbox) -> None:
    """Until every slot has its fork server."""
    await asyncio.gather(*[sandbox.run("import time; time.sleep(0.2)") for _ in range(2)])


if __name__ == "__main__":
    level, found = find_problems(Isolation[sys.argv[1]])
    sys.stdout.write(
        json.dumps({"isolation": level.name, "count": len(ATTACKS), "problems": found})
    )
