"""What the library imports is declared, and what an error or `ratchet doctor` installs exists."""

import ast
import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest

from ratchet.commands import doctor
from ratchet.commands.doctor import PURPOSES
from ratchet.generators.vllm.generator import VERSION

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Import name -> distribution, where they differ.
DISTRIBUTIONS = {"yaml": "pyyaml", "PIL": "pillow", "gem": "gem-llm", "megatron": "megatron-core"}
# Imported only beside the package that brings it.
BROUGHT_BY = {"httpcore2": "httpx2", "anyio": "mcp", "sympy": "math-verify"}


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    return {normalise(re.split(r"[\[<>=!~ ;]", line)[0]) for line in requirements}


DECLARED = names(PROJECT["dependencies"]).union(
    *(names(lines) for extra, lines in EXTRAS.items() if extra not in ("dev", "docs", "peers"))
)


def imported() -> dict[str, str]:
    """The third-party packages that the library imports, each with a file that does."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "ratchet").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            for module in modules:
                found.setdefault(module.partition(".")[0], str(path.relative_to(ROOT)))
    return {
        name: path
        for name, path in found.items()
        if name not in sys.stdlib_module_names and name != "ratchet"
    }


@pytest.mark.slow
def test_every_import_is_declared():
    undeclared = {
        name: path
        for name, path in imported().items()
        if normalise(BROUGHT_BY.get(name, DISTRIBUTIONS.get(name, name))) not in DECLARED
    }
    assert not undeclared


def test_every_extra_that_an_error_names_exists():
    source = "\n".join(path.read_text() for path in (ROOT / "ratchet").rglob("*.py"))
    named = set(re.findall(r"""suggest_install\(["'](\w+)["']\)|extra="(\w+)",\s+needed""", source))
    extras = {a or b for a, b in named}
    assert len(extras) > 8
    assert extras <= EXTRAS.keys()
    documented = set()
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        documented |= set(re.findall(r"ratchet-rl\[(\w+)\]", path.read_text()))
    assert documented <= EXTRAS.keys()


@pytest.mark.parametrize("extra", [name for name in EXTRAS if name not in ("dev", "docs", "peers")])
def test_doctor_lists_a_package_of_each_extra(extra: str):
    assert names(EXTRAS[extra]) & {
        normalise(package) for package, (of, _) in PURPOSES.items() if of == extra
    }


def test_doctor_prints_one_command_for_each_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch):
    def find_version(package: str) -> str:
        if package in ("s3fs", "wandb", "swanlab"):
            raise doctor.PackageNotFoundError
        return "1"

    monkeypatch.setattr(doctor, "version", find_version)
    monkeypatch.setattr(doctor, "load_library", lambda: None)
    assert doctor.list_fixes() == [
        "# missing: s3fs (S3; gcsfs and adlfs for Google's and Azure's stores)",
        "pip install 'ratchet-rl[stores]'",
        "# missing: wandb (metrics in Weights & Biases), swanlab (metrics in SwanLab)",
        "pip install 'ratchet-rl[trackers]'",
    ]


def test_doctor_knows_which_packages_belong_to_the_base():
    base = {normalise(package) for package, (extra, _) in PURPOSES.items() if not extra}
    assert base <= names(PROJECT["dependencies"])


def test_the_extra_installs_the_release_of_vllm_that_is_tested():
    major, minor = map(int, VERSION.split("."))
    assert EXTRAS["vllm"] == [f"vllm>={VERSION},<{major}.{minor + 1}"]


def test_the_leg_of_lowest_versions_pins_every_base_dependency_at_its_floor():
    spec = importlib.util.spec_from_file_location("versions", ROOT / ".ci/versions.py")
    assert spec is not None
    assert spec.loader is not None
    versions = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(versions)
    floors = versions.read_floors((ROOT / "pyproject.toml").read_text())
    # pydantic pins its core.
    assert set(floors) == names(PROJECT["dependencies"]) - {"pydantic-core"}
    lowest, newest = map(versions.make_constraints, ("lowest", "newest"))
    assert {f"{name}=={floor}" for name, floor in floors.items() if name != "torch"} <= {*lowest}
    assert {line.split("==")[0] for line in newest} == {"torch", *versions.TEST_TOOLS}
    assert [line for line in lowest if line.startswith("torch==")] == newest[:1]
    extras = {*versions.read_extras((ROOT / "pyproject.toml").read_text())}
    assert {"ray", "openenv"} <= extras <= EXTRAS.keys()
