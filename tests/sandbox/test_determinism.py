"""What a program can see of chance is the same in every slot, whatever ran before it and whatever
the trainer set."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import os
import random
import subprocess
import sys

import pytest
from sandbox.test_attacks import need

from ratchet.sandbox import Isolation, Limits, LocalSandbox

PATIENT = Limits(wall_s=60, cpu_s=30)
COMMANDS = Limits(wall_s=60, cpu_s=30, processes=16)
SEEN = """
import gc, locale, os, random, sys, time
print(gc.get_count())  # it decides when cycles of objects end
print([*{"a", "b", "c", "d", "e"}], hash("text"), hash(b"bytes"), hash((1.5, "x")))
print(os.umask(0), os.getcwd(), sorted(os.environ.items()), sys.argv, sys.path, sys.flags)
print(random.random(), random.sample(range(99), 9), locale.setlocale(locale.LC_ALL, ""), time.tzname, time.ctime(0))
print(open(os.devnull).fileno(), sys.getrecursionlimit(), sys.executable, sys.orig_argv)
"""
ADDRESSES = 'print([*{None, int, str, "f"}], hash((None, "x")), hash(print), id(len))\n'
INSIDE = """
import os, threading
for name in "zabyc": open(name, "w").close()
print(os.getpid(), os.getppid(), os.getsid(0), threading.get_native_id(), os.uname().nodename)
print(os.listdir("."), os.listdir("/"), oct(os.stat("a").st_mode), os.stat("a").st_ino)
"""


@functools.cache
def fixed_addresses() -> bool:
    """True if this machine lets a process switch address randomisation off; many containers
    don't."""
    switch = (
        "import ctypes; p = ctypes.CDLL(None).personality; p(0x40000); raise SystemExit(not "
        "p(0xFFFFFFFF) & 0x40000)"
    )
    return subprocess.run([sys.executable, "-c", switch], check=False).returncode == 0


def outputs(source: str | list[str], level: Isolation, limits: Limits = PATIENT) -> set[bytes]:
    """What five runs of the program print, in two pools with other programs between them, under
    other umasks."""
    rng, printed = random.Random(0), set()

    async def main() -> None:
        for umask, slots, runs in ((0o077, 1, 2), (0o002, 2, 3)):
            before = os.umask(umask)
            sandbox = LocalSandbox(slots=slots, at_most=level)
            for _ in range(runs):
                printed.add((await sandbox.run(source, b"", limits)).stdout)
                for _ in range(rng.randrange(3)):
                    await sandbox.run(
                        f"x = {'1' * rng.randrange(1, 3000)}", bytes(rng.randrange(1000)), PATIENT
                    )
            sandbox.close()
            os.umask(before)

    asyncio.run(main())
    return printed


@pytest.mark.medium
@pytest.mark.parametrize("level", [Isolation.NAMESPACES, Isolation.LANDLOCK])
@pytest.mark.fault("R18")
def test_a_program_sees_the_same_in_every_slot(
    level: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(level)
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    shown = (
        SEEN
        + (ADDRESSES if fixed_addresses() else "")
        + (INSIDE if level is Isolation.NAMESPACES else "")
    )
    printed = outputs(shown, level)
    assert len(printed) == 1
    assert printed.pop().count(b"\n") >= 4


@pytest.mark.medium
@pytest.mark.fault("R18")
def test_a_command_sees_the_same_in_every_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    need(Isolation.NAMESPACES)
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    python = 'import os; print([*{"a", "b", "c", "d"}], os.getpid())'
    shown = f"python3 -c '{python}'; env; umask; pwd; echo $$; ls /; hostname"
    printed = outputs(["sh", "-c", shown], Isolation.NAMESPACES, COMMANDS)
    assert len(printed) == 1
    assert b"['" in printed.pop()


LOCKS = """
import fcntl
file = open("HELD")
fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
print("granted, and got none")
"""


@pytest.mark.medium
@pytest.mark.parametrize("level", [Isolation.NAMESPACES, Isolation.LANDLOCK])
def test_locks_carry_nothing_between_programs(level: Isolation, tmp_path) -> None:
    """A lock that the test holds stands for that of a program beside: both lock the same file of
    the machine."""
    need(level)
    held = tmp_path / "held"
    held.write_text("")
    for folder in (tmp_path, *tmp_path.parents):
        if str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    sandbox = LocalSandbox(slots=1, at_most=level, readable=[str(tmp_path)])
    with held.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.lockf(file, fcntl.LOCK_EX)
        result = asyncio.run(sandbox.run(LOCKS.replace("HELD", str(held)), b"", PATIENT))
    assert result.stdout == b"granted, and got none\n", result
    if level is Isolation.NAMESPACES:
        base = (
            "import sqlite3\nbase = sqlite3.connect('x.db')\nbase.execute('create table t (x)')\n"
        )
        base += (
            "base.execute('insert into t values "
            "(42)')\nbase.commit()\nprint(*base.execute('select x from t'))"
        )
        # which asks for the locks of others
        for begin in ("", "base.execute('pragma journal_mode=wal')\n"):
            program = base.replace("base.execute('create", begin + "base.execute('create")
            assert asyncio.run(sandbox.run(program, b"", PATIENT)).stdout == b"(42,)\n"
    sandbox.close()
