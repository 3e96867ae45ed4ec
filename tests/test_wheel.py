"""The wheel as a user has it: in an environment without the checkout, the quick-start trains by its
name, and a new project passes its tests and trains. `make wheel` does the same with pip and an
index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from support.programs import run_program

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
Shell = Callable[[str], str]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A shell in an empty directory, in an environment that has the wheel and the packages of the
    tests' environment. The wheel is built without a repository, as from a source distribution."""
    folder = tmp_path_factory.mktemp("wheel")
    source, venv, work = folder / "source", folder / "venv", folder / "work"
    shutil.copytree(ROOT / "ratchet", source / "ratchet")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-c", BUILD, folder], cwd=source, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/*/site-packages")
    (wheel,) = folder.glob("ratchet_rl-*.whl")
    zipfile.ZipFile(wheel).extractall(packages)
    # Its .pth files are not read, so a checkout that is installed there is not seen.
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "others.pth").write_text("\n".join(others))
    (metadata,) = packages.glob("ratchet_rl-*.dist-info")
    (entry,) = PathDistribution(metadata).entry_points
    script = venv / "bin" / entry.name
    script.write_text(
        f"#!{venv}/bin/python3\nfrom {entry.module} import {entry.attr}\n\n{entry.attr}()\n"
    )
    script.chmod(0o755)
    work.mkdir()
    environment = {name: text for name, text in os.environ.items() if "PYTHON" not in name}
    environment["PATH"] = f"{venv / 'bin'}:{environment['PATH']}"

    def run(command: str) -> str:
        return run_program("sh", "-c", command, cwd=work, env=environment)

    return run


@pytest.mark.slow
@pytest.mark.needs("setuptools_scm")
def test_the_quickstart_trains_by_its_name(shell: Shell) -> None:
    assert str(ROOT) not in shell("python3 -c 'import ratchet; print(ratchet.__file__)'")
    assert shell("ratchet --version") == "ratchet 0.1.0.dev0\n"
    shown = shell("ratchet train quickstart --try-steps 2 evaluation.tasks=8")
    assert "Held-out accuracy" in shown
    assert "runs/quickstart" in shown


@pytest.mark.slow
@pytest.mark.needs("setuptools_scm", "make")
def test_a_new_project_passes_its_tests_and_learns(shell: Shell) -> None:
    shown = shell("ratchet new project my && cd my && make test && ratchet train recipe.yaml")
    assert "reward:judge gives a demonstration 1.0" in shown
    before, after = (
        float(cell.removesuffix(" %"))
        for row in shown.splitlines()
        if "grpo " in row and "%" in row
        for cell in map(str.strip, row.split("│")[4:6])
    )
    assert before > 40
    assert after > before
