"""Compiles `kernels.c` for the processor at hand with the machine's own C compiler: once, and then it is kept."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from ratchet.stores import kept

SOURCE = Path(__file__).with_name("kernels.c")
COMPILERS = ("cc", "gcc", "clang")
# Sums may be split into lanes. Nothing may take it that numbers are finite: broken weights have to show.
FLAGS = (
    *("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
    *("-fopenmp", "-shared", "-fPIC"),
)
LIMIT_S = 60.0


@cache
def library() -> ctypes.CDLL:
    """Raises OSError where there is no compiler or it fails."""
    compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
    if compiler is None:
        raise OSError("no C compiler is on the PATH")
    place = kept("kernels") / f"{_key(compiler)}.so"
    if not place.exists():
        _compile(compiler, place)
    return ctypes.CDLL(str(place))


def _compile(compiler: str, place: Path) -> None:
    """It takes its name when it is whole: several processes may be at it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f".{place.name}.{os.getpid()}")
    command = [compiler, *FLAGS, str(SOURCE), "-o", str(draft), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            raise OSError(f"{compiler} failed: {done.stderr.strip()[-500:]}")
        draft.replace(place)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{compiler} took more than {LIMIT_S:g} s") from error
    finally:
        draft.unlink(missing_ok=True)


def _key(compiler: str) -> str:
    """Of all that the result depends on: the source, the command, the compiler and the processor."""
    found = Path(compiler).resolve()
    parts = [SOURCE.read_bytes(), " ".join(FLAGS).encode(), f"{found} {found.stat().st_mtime_ns}".encode(), processor()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def processor() -> bytes:
    """What Linux says of the first one; empty elsewhere, where what is kept belongs to one machine."""
    said = Path("/proc/cpuinfo")
    lines = said.read_bytes().split(b"\n\n", 1)[0].splitlines() if said.exists() else []
    wanted = (b"vendor_id", b"model name", b"flags", b"Features", b"CPU part")
    return b"\n".join(line for line in lines if line.split(b":")[0].strip() in wanted)
