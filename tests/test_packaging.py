"""What a user meets before any training: light imports, a command line that answers at once,
recipes and documents that are true; and the house rules of the library's source that no linter
knows.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

import ratchet
from ratchet.errors import DISTRIBUTION

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = sorted((ROOT / "ratchet").rglob("*.py"))
# Named by their files: `pkgutil.walk_packages` would import each package, Megatron too, in every
# process that collects tests.
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCES
]
RECIPES = sorted((ROOT / "ratchet" / "recipes").rglob("*.yaml"))
HEAVY = ("torch", "transformers")
LIGHT_PACKAGES = ("ratchet.config", "ratchet.environments", "ratchet.rewards")
LIGHT_MODULES = ("ratchet.types", "ratchet.errors", "ratchet.protocols")


def loaded_after(code: str) -> set[str]:
    """The heavy modules that a fresh interpreter holds after running `code`."""
    report = (
        f"import sys, json; print('\\n' + json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return set(
        json.loads(done.stdout.rpartition("\n[")[1].strip() + done.stdout.rpartition("\n[")[2])
    )


# --- imports


@pytest.mark.medium
def test_the_probe_sees_a_heavy_import() -> None:
    assert loaded_after("import torch") == {"torch"}


def test_import_ratchet_is_light() -> None:
    assert loaded_after("import ratchet") == set()


def test_help_is_light() -> None:
    code = """
import sys
from ratchet.cli.main import main
sys.argv = ["ratchet", "--help"]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
"""
    assert loaded_after(code) == set()


def test_configuration_environments_and_rewards_are_light() -> None:
    light = [
        m
        for m in MODULES
        if m in LIGHT_MODULES or any(m == p or m.startswith(f"{p}.") for p in LIGHT_PACKAGES)
    ]
    assert {*LIGHT_MODULES, *LIGHT_PACKAGES} <= set(light)
    assert loaded_after("\n".join(f"import {module}" for module in light)) == set()


@pytest.mark.parametrize(
    "module", [module for module in MODULES if not module.endswith("__main__")]
)
def test_module_imports(module: str, require: Callable[[str, str], None]) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in optional_packages():
            raise  # no extra of pyproject.toml brings it
        if package == "vllm":
            pytest.skip("vLLM is installed for the slow tests, whose engines load this module")
        require(package, f"{module} imports it")


def optional_packages() -> set[str]:
    """Import names that the extras bring, as far as they equal the distribution's name."""
    extras = PYPROJECT["project"]["optional-dependencies"]
    requirements = [line for name, lines in extras.items() if name != "dev" for line in lines]
    return {re.split(r"[\[<>=~! ]", line)[0].replace("-", "_").lower() for line in requirements}


# --- the library's source


def dotted(node: ast.expr) -> str:
    """`os.environ` of the expression os.environ; "" for anything but names and attributes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


RUNS_TEXT = {"eval", "exec", "__import__", "builtins.eval", "builtins.exec", "jinja2.Environment"}
UNPICKLES = {
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load",
}
FORBIDDEN_CALLS = {"print", "breakpoint"} | RUNS_TEXT | UNPICKLES
FORBIDDEN_IMPORTS = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "code",
}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}


def violations(source: str, *, may_read_environment: bool) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and dotted(node.func) in FORBIDDEN_CALLS:
            yield f"line {node.lineno}: {dotted(node.func)}("
        if (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and not _is_false(node.value)
        ):
            yield f"line {node.value.lineno}: allow_pickle"
        if isinstance(node, ast.keyword) and node.arg == "shell" and not _is_false(node.value):
            yield f"line {node.value.lineno}: shell"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = names if isinstance(node, ast.Import) else [node.module or ""]
            for name in FORBIDDEN_IMPORTS & {module.partition(".")[0] for module in modules}:
                yield f"line {node.lineno}: import {name}"
            if (
                isinstance(node, ast.ImportFrom)
                and {f"{node.module}.{name}" for name in names} & FORBIDDEN_CALLS
            ):
                yield f"line {node.lineno}: from {node.module} import {', '.join(names)}"
            reads = (
                isinstance(node, ast.ImportFrom)
                and {f"{node.module}.{name}" for name in names} & ENVIRONMENT
            )
            if reads and not may_read_environment:
                yield f"line {node.lineno}: from os import {', '.join(names)}"
        if (
            isinstance(node, ast.Attribute)
            and dotted(node) in ENVIRONMENT
            and not may_read_environment
        ):
            yield f"line {node.lineno}: {dotted(node)}"


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


@pytest.mark.parametrize(
    "source",
    [
        "print('x')",
        "eval('1')",
        "exec('1')",
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import yaml\nyaml.load('x', yaml.SafeLoader)",
        "from yaml import unsafe_load",
        "__import__('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "subprocess.run('x', shell=True)",
        "import os\nos.environ['A']",
        "import os\nos.getenv('A')",
        "from os import environ",
    ],
)
def test_the_source_rules_catch(source: str) -> None:
    assert list(violations(source, may_read_environment=False))


def test_the_source_rules_allow() -> None:
    source = (
        "import os\nmodel.eval()\nfingerprint('x')\nos.path.join('a')\nnp.load('x', "
        "allow_pickle=False)\nre.compile('x')"
    )
    assert list(violations(source, may_read_environment=False)) == []
    assert list(violations("import os\nos.environ['A']", may_read_environment=True)) == []


# Where the time of day is what is meant: files and answers that say when they were made.
DATED = {
    "data/chat/chat_templates.py",
    "experience/openai_proxy/answers.py",
    "experience/openai_proxy/responses_api/format.py",
    "observe/provenance.py",
    "observe/sinks.py",
    "observe/trackers.py",
    "observe/tracing/opentelemetry_sink.py",
    "observe/tracing/perfetto.py",
    "runs/run_dir.py",
    "sandbox/docker_api.py",
}


@pytest.mark.fault("P18")
def test_durations_and_deadlines_are_of_the_monotonic_clock() -> None:
    clocks = {
        "time.time",
        "time.time_ns",
        "datetime.now",
        "datetime.utcnow",
        "datetime.datetime.now",
    }
    reading = {
        path.relative_to(ROOT / "ratchet").as_posix()
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and dotted(node.func) in clocks
    }
    assert reading == DATED


# What runs in the sandbox executes untrusted programs; what it runs is compiled before it gets
# there, and never read here. Processes of one run, which trust each other, exchange pickles by
# sockets. Of what lies in files only the index of torch's distributed checkpoints is one: it is
# read by a list of what it may name, and the tensors with weights_only.
EXEMPT: dict[str, str | tuple[str, ...]] = {
    "executors/protocol.py": "import pickle",
    "commands/convert/dcp.py": ("import pickle", "torch.load(", "torch.save("),
    "commands/convert/megatron_format.py": "torch.save(",
    "sandbox/inside/child.py": "exec(",
    "sandbox/inside/launch.py": "__import__(",
    "rewards/code/sandbox_program.py": "exec(",
    "rewards/code/program_runner.py": "exec(",
    "environments/code/cells.py": ("exec(", "eval("),
    "rewards/code/function_tests.py": "import marshal",
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_source_keeps_the_house_rules(path: Path) -> None:
    inside = path.relative_to(ROOT / "ratchet")
    clears_it = inside.as_posix() == "sandbox/inside/child.py"  # before an untrusted program starts
    may_read_environment = inside.parts[0] == "cli" or inside.parts[0] == "executors" or clears_it
    found = list(
        violations(path.read_text(encoding="utf-8"), may_read_environment=may_read_environment)
    )
    exempt = EXEMPT.get(inside.as_posix())
    assert [line for line in found if exempt is None or not line.endswith(exempt)] == []


# --- recipes and version


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipe_loads_and_has_a_header(path: Path) -> None:
    from ratchet.config.loader import load_config

    header = path.read_text(encoding="utf-8").splitlines()[0]
    assert re.match(r"# \w", header), (
        f"{path.name} must open with a comment that says what it is and what it reached"
    )
    load_config(path)


def test_there_is_a_quickstart() -> None:
    assert "quickstart.yaml" in {path.name for path in RECIPES}


def test_the_version_is_that_of_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", {DISTRIBUTION: "1.2"}.__getitem__)
    assert ratchet.__version__ == "1.2"
    monkeypatch.undo()
    monkeypatch.setattr("ratchet.errors.DISTRIBUTION", "not-installed")
    assert ratchet.__version__ == "unknown"


# Another project owns the name `ratchet` in the package index: pip would install that one.
OTHER_NAME = re.compile(r"(?<![\w.-])ratchet\[\w|pip install (?:-\S+ )*['\"]?ratchet(?![\w-])")


@pytest.mark.medium
def test_the_distribution_has_one_name(require: Callable[[str, str], None]) -> None:
    assert PYPROJECT["project"]["name"] == DISTRIBUTION
    assert OTHER_NAME.search("pip install -U 'ratchet[lora]'")
    assert not OTHER_NAME.search(
        f"pip install -U '{DISTRIBUTION}[lora]'; pip install {DISTRIBUTION}"
    )
    require("git", "lists the tracked files")
    require(str(ROOT / ".git"), "lists the tracked files")
    assert [name for name, text in tracked_text() if OTHER_NAME.search(text)] == []


def test_dependencies_are_constrained() -> None:
    """Each direct dependency of the checks has its version in constraints.txt, so that a new
    release can't break them."""
    constrained = {
        line.partition("==")[0]
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    }
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = [*PYPROJECT["project"]["dependencies"]]
    for line in extras["dev"]:
        own = re.fullmatch(r"ratchet-rl\[([\w,]+)\]", line)
        names = own[1].split(",") if own else []
        wanted += [each for name in names for each in extras[name]] if own else [line]
    assert {re.split(r"[\[<>=~! ]", line)[0].lower() for line in wanted} <= constrained


# --- what is published


def tracked_text() -> Iterator[tuple[str, str]]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.is_file() and path != Path(__file__).resolve():
            yield name, path.read_bytes().decode("utf-8", errors="replace")


MACHINE = re.compile(
    r"(?<![\w.$\-/}*])/(?:work|root|opt|workspace|mnt|data|scratch)/[\w.]"
    r"|(?<![\w.$\-/}*])/(?:home|Users)/\w"
    r"|[A-Z]:\\\\?Users"
    r"|--(?:extra-)?index-url|--trusted-host|find-links"
    r"|\b(?:pypi\.org|pythonhosted\.org|registry\.npmjs\.org|download\.pytorch\.org)\b"
    r"|\b(?:artifactory|nexus|devpi)\.",
)


@pytest.mark.parametrize(
    "text",
    [
        "cd /work/main",
        "/home/ada/x",
        "'/opt/wheels'",
        "pip --index-url x",
        "https://pypi.org/simple",
        "(/root/.cache",
    ],
)
def test_the_machine_rule_catches(text: str) -> None:
    assert MACHINE.search(text)


@pytest.mark.parametrize(
    "text",
    [
        *("frame/work/x", "https://x.org/data/a", "runs/home/x", "recipes/opt/a.yaml"),
        *("$HOME/data/x", "servers/*/data/x"),
    ],
)
def test_the_machine_rule_allows(text: str) -> None:
    assert not MACHINE.search(text)


def test_no_machine_path_or_registry_host_is_tracked(require: Callable[[str, str], None]) -> None:
    require("git", "lists the tracked files")
    require(str(ROOT / ".git"), "lists the tracked files")
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in tracked_text()
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE.search(line)
    ]
    assert found == []


DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *RECIPES,
]
MAKE_CALL = re.compile(r"^(?:[$#] *)?make(?: +[A-Z_]+=\S+)* +([a-z][\w-]*)")
RATCHET_CALL = re.compile(r"^(?:[$#] *)?(?:\.venv/bin/)?ratchet +([a-z][\w-]*)")


def commands(text: str) -> Iterator[str]:
    """What a reader could paste: inline code, the lines of fenced blocks, and comment lines of
    recipes."""
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
        elif inside or line.startswith("#  "):
            yield line.strip()
        else:
            yield from re.findall(r"`([^`]+)`", line)


def called(pattern: re.Pattern[str], text: str) -> set[str]:
    return {match[1] for command in commands(text) if (match := pattern.match(command))}


def test_commands_are_found_in_documents() -> None:
    text = (
        "Use `make lint`, make haste.\n```\n$ ratchet train x.yaml\nimport ratchet\nmake "
        "CI=true test\n```\n#   ratchet check x"
    )
    assert called(MAKE_CALL, text) == {"lint", "test"}
    assert called(RATCHET_CALL, text) == {"train", "check"}


def make_targets() -> set[str]:
    return set(
        re.findall(
            r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
    )


def ratchet_commands() -> set[str]:
    import typer

    from ratchet.cli import main

    return set(typer.main.get_group(main.app).commands)


def test_documents_mention_only_make_targets_that_exist() -> None:
    known = make_targets()
    assert {"test", "test-slow", "lint", "demo", "bench", "peers", "clean"} <= known
    unknown = {
        path.name: called(MAKE_CALL, path.read_text(encoding="utf-8")) - known for path in DOCUMENTS
    }
    assert {name: calls for name, calls in unknown.items() if calls} == {}


@pytest.mark.medium
def test_documents_mention_only_commands_that_exist() -> None:
    known = ratchet_commands()
    unknown = {
        path.name: called(RATCHET_CALL, path.read_text(encoding="utf-8")) - known
        for path in DOCUMENTS
    }
    assert {name: calls for name, calls in unknown.items() if calls} == {}


def test_tests_use_require_and_not_importorskip() -> None:
    """A component that is missing must fail in CI; `importorskip` would hide it. See
    tests/conftest.py."""
    others = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if path.name not in (Path(__file__).name, "conftest.py")
    ]
    assert [
        path.name for path in others if "importorskip" in path.read_text(encoding="utf-8")
    ] == []
