"""Compiles the C beside it for the processor at hand with the machine's own C compiler: once, and
then it is kept."""

from __future__ import annotations

import ctypes
import hashlib
import secrets
import shutil
import subprocess
from functools import cache
from pathlib import Path

from ratchet.utils.object_store import kept

HERE = Path(__file__).parent
SOURCES = HERE / "kernels.c", HERE / "decoding.c"
HEADER = HERE / "rows.h"
COMPILERS = ("cc", "gcc", "clang")
# Sums may be split into lanes. Nothing may take it that numbers are finite: broken weights have to
# show.
FLAGS = (
    *(
        "-O3",
        "-march=native",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fno-signed-zeros",
        "-fassociative-math",
    ),
    *("-fopenmp", "-shared", "-fPIC"),
)
LIMIT_S = 60.0


@cache
def library() -> ctypes.CDLL:
    """Raises OSError where there is no compiler or it fails."""
    compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
    if compiler is None:
        raise OSError("no C compiler is on the PATH")
    directory, key = kept("kernels"), _key(compiler)
    place = next(filter(_whole, directory.glob(f"{key}-*.so")), None) or _compiled(
        compiler, directory, key
    )
    return ctypes.CDLL(str(place))


def _whole(place: Path) -> bool:
    """A machine that lost its power may have kept the name and not all of the content, and who
    loads that is killed."""
    return place.stem.endswith(_digest(place))


def _digest(place: Path) -> str:
    return hashlib.sha256(place.read_bytes()).hexdigest()[:24]


def _compiled(compiler: str, directory: Path, key: str) -> Path:
    """It takes its name when it is whole: several processes may be at it, also some that share the
    directory alone."""
    directory.mkdir(parents=True, exist_ok=True)
    draft = directory / f".{key}.{secrets.token_hex(8)}"
    command = [compiler, *FLAGS, *map(str, SOURCES), "-o", str(draft), "-lm"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False
        )
        if done.returncode:
            raise OSError(f"{compiler} failed: {done.stderr.strip()[-500:]}")
        return draft.replace(directory / f"{key}-{_digest(draft)}.so")
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{compiler} took more than {LIMIT_S:g} s") from error
    finally:
        draft.unlink(missing_ok=True)


def _key(compiler: str) -> str:
    """Of all that the result depends on: the sources, the command, the compiler and the
    processor."""
    found = Path(compiler).resolve()
    sources = [path.read_bytes() for path in (*SOURCES, HEADER)]
    parts = [
        *sources,
        " ".join(FLAGS).encode(),
        f"{found} {found.stat().st_mtime_ns}".encode(),
        processor(),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def processor() -> bytes:
    """What Linux says of the first one; empty elsewhere, where what is kept belongs to one
    machine."""
    said = Path("/proc/cpuinfo")
    lines = said.read_bytes().split(b"\n\n", 1)[0].splitlines() if said.exists() else []
    wanted = (b"vendor_id", b"model name", b"flags", b"Features", b"CPU part")
    return b"\n".join(line for line in lines if line.split(b":")[0].strip() in wanted)
