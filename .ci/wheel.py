"""Builds the source distribution and the wheel into dist/, checks both, and tries the wheel as a
new user would: `python .ci/wheel.py`, by `make wheel`.

The wheel is installed into a new environment outside the checkout, with the versions of
constraints.txt. There `ratchet train quickstart` and a new project must run. The last lines are
the sizes that the README states. Everything but dist/ is removed at the end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PIP_INSTALL = ("-m", "pip", "install", "--disable-pip-version-check", "--quiet")
# As much as a new environment has before the wheel is installed.
NOT_OURS = ("pip", "setuptools")


def make_environment(directory: Path, *requirements: str | Path) -> Path:
    """Create a virtual environment with these requirements, and return its folder of programs."""
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    programs = directory / "bin"
    subprocess.run([programs / "python", *PIP_INSTALL, *requirements], check=True)
    return programs


def build(tools: Path) -> Path:
    """Build the source distribution, and from it the wheel; check both and return the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([tools / "python", "-m", "build", "--quiet", "--outdir", DIST, ROOT], check=True)
    files = sorted(DIST.iterdir())
    subprocess.run([tools / "twine", "check", "--strict", *files], check=True)
    (wheel,) = DIST.glob("*.whl")
    # It reads its settings from pyproject.toml.
    subprocess.run([tools / "check-wheel-contents", wheel], check=True, cwd=ROOT)
    return wheel


def try_out(programs: Path, directory: Path) -> None:
    """Run the first commands of the README in `directory`, with the programs of an environment."""
    # Without the checkout, and without what the caller's environment adds to Python's path.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    for command in (
        "ratchet --version",
        "ratchet train quickstart",
        "ratchet new project my",
        "cd my && make test && ratchet train recipe.yaml",
    ):
        print(f"$ {command}", flush=True)
        subprocess.run(["sh", "-c", command], check=True, cwd=directory, env=environment)


def count_bytes(paths: Iterable[Path]) -> int:
    """Return the size of all files in these directories. Compiled bytecode is not counted."""
    files = (file for path in paths for file in path.rglob("*") if file.suffix != ".pyc")
    return sum(file.stat().st_size for file in files if file.is_file())


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        wheel = build(make_environment(folder / "tools", "-r", ROOT / ".ci" / "wheel.txt"))
        clean = folder / "clean"
        programs = make_environment(clean, "-c", ROOT / "constraints.txt", wheel)
        (packages,) = clean.glob("lib/*/site-packages")
        installed = [path for path in packages.iterdir() if not path.name.startswith(NOT_OURS)]
        try_out(programs, folder)
        n_distributions = sum(path.suffix == ".dist-info" for path in installed)
        print(
            f"wheel: {wheel.stat().st_size / 1e6:.1f} MB, unpacked "
            f"{count_bytes([packages / 'ratchet']) / 1e6:.1f} MB"
        )
        print(
            f"installed: {count_bytes(installed) / 1e6:,.0f} MB in {n_distributions} distributions"
        )


if __name__ == "__main__":
    main()
