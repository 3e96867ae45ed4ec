"""Compile the C kernels for this machine's processor, with the C compiler on its PATH.

The library is cached on disk.
"""

from __future__ import annotations

import ctypes
import hashlib
import secrets
import shutil
import subprocess
from functools import cache
from pathlib import Path

from ratchet.utils.object_store import get_cache_dir

HERE = Path(__file__).parent
SOURCES = HERE / "kernels.c", HERE / "decoding.c", HERE / "attention.c"
HEADER = HERE / "rows.h"
# Names that Linux gives to instructions that multiply in bfloat16.
BFLOAT16_INSTRUCTIONS = (b"avx512_bf16", b"amx_bf16")
COMPILERS = ("cc", "gcc", "clang")
# -fassociative-math lets the compiler split a sum into SIMD lanes. No flag may assume finite
# numbers, because a NaN from broken weights must reach the outputs.
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
COMPILER_TIMEOUT_S = 60.0


@cache
def load_library() -> ctypes.CDLL:
    """Return the compiled library. Raises OSError if there is no compiler, or if it fails."""
    compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
    if compiler is None:
        raise OSError("no C compiler is on the PATH")
    directory = get_cache_dir("kernels")
    key = _make_cache_key(compiler)
    path = next(filter(_is_complete, directory.glob(f"{key}-*.so")), None) or _compile(
        compiler, directory, key
    )
    return ctypes.CDLL(str(path))


def _is_complete(path: Path) -> bool:
    """True if the digest in the file's name is the digest of its content.

    After a power loss a file may lack some of its content, and loading such a file would kill the
    process.
    """
    return path.stem.endswith(_hash_file(path))


def _hash_file(path: Path) -> str:
    """Return a digest of the file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:24]


def _compile(compiler: str, directory: Path, key: str) -> Path:
    """Compile the library and return its path.

    The file gets its final name only when it is complete, because several processes may compile at
    the same time, also on other machines that share the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    draft = directory / f".{key}.{secrets.token_hex(8)}"
    command = [compiler, *FLAGS, *map(str, SOURCES), "-o", str(draft), "-lm"]
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILER_TIMEOUT_S,
            check=False,
        )
        if result.returncode:
            raise OSError(f"{compiler} failed: {result.stderr.strip()[-500:]}")
        return draft.replace(directory / f"{key}-{_hash_file(draft)}.so")
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{compiler} took more than {COMPILER_TIMEOUT_S:g} s") from error
    finally:
        draft.unlink(missing_ok=True)


def _make_cache_key(compiler: str) -> str:
    """Return a digest of the sources, the flags, the compiler and the processor."""
    compiler_path = Path(compiler).resolve()
    sources = [path.read_bytes() for path in (*SOURCES, HEADER)]
    parts = [
        *sources,
        " ".join(FLAGS).encode(),
        f"{compiler_path} {compiler_path.stat().st_mtime_ns}".encode(),
        describe_processor(),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def has_bfloat16_instructions() -> bool:
    """True if the processor multiplies in bfloat16, by Linux's description of it."""
    flags = describe_processor().split()
    return any(name in flags for name in BFLOAT16_INSTRUCTIONS)


def describe_processor() -> bytes:
    """Return Linux's description of the first processor; b"" on other systems.

    Without a description, machines with different processors must not share the cache.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_bytes().split(b"\n\n", 1)[0].splitlines() if cpuinfo.exists() else []
    fields = (b"vendor_id", b"model name", b"flags", b"Features", b"CPU part")
    return b"\n".join(line for line in lines if line.split(b":")[0].strip() in fields)
