"""Runs all but the slow tests on a wheel installed with the lowest or the newest versions that
pyproject.toml allows: `python .ci/versions.py lowest|newest [arguments of pytest]`.

"lowest" pins each base dependency at its floor; "newest" pins nothing. torch is the one of
constraints.txt in both, since another would bring gigabytes of CUDA to a CPU machine: its floor is
not tried. Extras are those of the developer's environment, as new as the rest allows; of those
whose packages need more than the floors (NEEDS_NEWER) "lowest" skips the tests. The environment is
build/versions/NAME, made anew by each call.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = re.compile(r"ratchet-rl\[(.+)\]")
# What runs the tests, at the versions of constraints.txt, and what the test modules import besides.
TEST_TOOLS = ("pytest", "pytest-xdist", "hypothesis")
TEST_IMPORTS = ("httpx", "jsonschema", "openai", "scipy")
# trackio needs a newer huggingface-hub, verifiers a newer httpx2; pip looks for versions that suit
# gem-llm for over ten minutes.
NEEDS_NEWER = {"gem", "trackers", "verifiers"}
FLOOR = re.compile(r"([\w.-]+)>=([\w.]+)")


def read_floors(pyproject: str) -> dict[str, str]:
    """Return the lowest version of each base dependency that has a floor."""
    dependencies = tomllib.loads(pyproject)["project"]["dependencies"]
    return dict(match.groups() for line in dependencies if (match := FLOOR.match(line)))


def read_extras(pyproject: str) -> list[str]:
    """Return the extras of the developer's environment."""
    lines = tomllib.loads(pyproject)["project"]["optional-dependencies"]["dev"]
    (extras,) = filter(None, map(EXTRAS.fullmatch, lines))
    return extras[1].split(",")


def make_constraints(which: str) -> list[str]:
    """Return the lines of a constraints file of pip."""
    tested = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line
    )
    pins = read_floors((ROOT / "pyproject.toml").read_text()) if which == "lowest" else {}
    pins |= {name: tested[name] for name in ("torch", *TEST_TOOLS)}
    return [f"{name}=={version}" for name, version in pins.items()]


def main(which: str, arguments: list[str]) -> int:
    directory = ROOT / "build" / "versions" / which
    shutil.rmtree(directory, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", directory / "venv"], check=True)
    python = directory / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*install, "--upgrade", "pip"], check=True)
    wheel_command = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", directory, ROOT]
    subprocess.run(wheel_command, check=True)
    (wheel,) = directory.glob("*.whl")
    constraints = directory / "constraints.txt"
    constraints.write_text("\n".join(make_constraints(which)) + "\n")
    print(f"{which}: {', '.join(constraints.read_text().split())}", flush=True)
    print("torch's floor is not tried: it is the version of constraints.txt", flush=True)
    extras = read_extras((ROOT / "pyproject.toml").read_text())
    if which == "lowest":
        extras = [extra for extra in extras if extra not in NEEDS_NEWER]
    wanted = [f"{wheel}[{','.join(extras)}]", *TEST_TOOLS, *TEST_IMPORTS]
    subprocess.run([*install, "-c", constraints, *wanted], check=True)
    # Without it `python -m` in the repository would import the tree in place of the wheel.
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "CI": ""}
    probe = [python, "-c", "import ratchet; print(ratchet.__file__)"]
    imported = subprocess.run(
        probe, env=environment, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    assert str(directory) in imported, f"{imported} is not of the wheel"
    tests = [python, "-m", "pytest", "-m", "not slow", *(arguments or ["-n", "2"])]
    return subprocess.run(tests, env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    if sys.argv[1:2] not in (["lowest"], ["newest"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
