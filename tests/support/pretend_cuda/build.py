"""Compiles the backend into the environment of this interpreter: `python build.py`.

It takes half a minute, and is done again when the source or the installed PyTorch has changed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).resolve().with_name("backend.cpp")
FOLDER = Path(sys.prefix) / "pretend_cuda"


def build_backend() -> Path:
    """Return the path of the compiled backend, which is compiled first if there is none.

    Its name is made of its sources: an environment may be copied with a backend of other sources.
    """
    spec = find_spec("torch")
    assert spec is not None, "PyTorch is not installed"
    torch = Path(str(spec.origin)).parent
    sources = SOURCE.read_bytes() + (torch / "version.py").read_bytes()
    backend = FOLDER / f"{hashlib.sha256(sources).hexdigest()[:16]}.so"
    if backend.exists():
        return backend
    FOLDER.mkdir(exist_ok=True)
    # Several processes may compile at once.
    draft = backend.with_suffix(f".{os.getpid()}")
    headers = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-w", *headers]
    subprocess.run(["c++", *options, str(SOURCE), "-o", str(draft), *libraries], check=True)
    draft.rename(backend)
    return backend


if __name__ == "__main__":
    build_backend()
