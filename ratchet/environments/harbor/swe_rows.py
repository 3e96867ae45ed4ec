"""Write rows of SWE-bench's form as task directories in Harbor's format.

The agent gets the repository at the row's base commit, or the row's image. Before the tests run,
all files of `test_patch` and of the listed tests, and every conftest.py, are replaced by those of
the repository after `test_patch`; pytest is also configured by that repository. The reward is 1 if
all listed tests pass, else 0.

Source: the columns of the datasets of SWE-bench (package swebench 5.0.2).
"""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.data.jsonl import check_columns
from ratchet.data.tables import read_rows
from ratchet.errors import ConfigError, DataError
from ratchet.executors.env_vars import inherit_environment
from ratchet.utils.atomic_files import require_empty_directory

COLUMNS: Mapping[str, type] = dict.fromkeys(
    ("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch"), str
)
IMAGE_COLUMNS = ("image", "image_name", "docker_image")
NAME_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*")
COMMIT_PATTERN = re.compile(r"[0-9a-fA-F]{7,64}")
# A test as unittest names it. Since Python 3.11 it repeats the method: test_a (tests.b.C.test_a).
UNITTEST_PATTERN = re.compile(r"(\w+) \(([\w.]+?)\.(\w+)(?:\.\1)?\)", re.ASCII)
IMAGE_WORKDIR = "/testbed"  # the repository in the images of SWE-bench
SOURCE_WORKDIR = "/app"
# The files that may configure pytest, in the order in which it looks for them, and their section.
PYTEST_CONFIGS = {
    "pytest.ini": "",
    ".pytest.ini": "",
    "pyproject.toml": "[tool.pytest.ini_options]",
    "tox.ini": "[pytest]",
    "setup.cfg": "[tool:pytest]",
}

MANIFEST = """\
schema_version = "1.4"

[metadata]
repo = {repo}
base_commit = {base_commit}

[verifier]
timeout_sec = {timeout_s}

[environment]
workdir = {workdir}
network_mode = "no-network"
"""
TEST_SCRIPT = """\
#!/bin/bash
# The tests' own files replace those of the agent. Options of the repository (addopts) may ask for
# plugins that do not matter here.
find . -name conftest.py -delete
rm -rf -- {removed}
cp -r /tests/files/. .
{command} --rootdir=. -c /tests/config/{config} -o addopts= -p no:cacheprovider \\
  --junitxml=/logs/verifier/junit.xml {files}
python3 -I /tests/judge.py >/logs/verifier/reward.txt
"""
JUDGE = '''\
"""Print 1 if all tests of tests.json have passed, else 0."""

import json
import xml.etree.ElementTree


def name_case(test):
    """Return the name of a pytest id in junit.xml."""
    function, bracket, parameters = test.partition("[")
    path, *names = function.split("::")
    return ".".join([path.removesuffix(".py").replace("/", "."), *names]) + bracket + parameters


def has_passed(case):
    return all(
        part.tag not in ("failure", "error", "skipped") or part.get("type") == "pytest.xfail"
        for part in case
    )


with open("/tests/tests.json", encoding="utf-8") as file:
    listed = {name_case(test) for test in json.load(file)}
try:
    tree = xml.etree.ElementTree.parse("/logs/verifier/junit.xml")
except (OSError, xml.etree.ElementTree.ParseError):
    tree = None  # pytest did not end
results = {}
for case in tree.iter("testcase") if tree else ():
    name = f"{case.get('classname')}.{case.get('name')}"
    results[name] = results.get(name, True) and has_passed(case)
print(int(all(results.get(name, False) for name in listed)))
'''
SOLUTION = """\
#!/bin/bash
cd {workdir} && git apply --whitespace=nowarn /solution/gold.patch
"""


@dataclass(frozen=True)
class SweRow:
    """A row of SWE-bench's form, checked."""

    name: str
    repo: str
    base_commit: str
    problem: str
    patch: str
    test_patch: str
    tests: tuple[str, ...]
    """Ids of pytest of the tests that must pass, those of FAIL_TO_PASS first."""
    image: str
    """Name of the row's container image; "": none."""

    @classmethod
    def from_values(cls, values: Mapping[str, Any], where: str) -> SweRow:
        """Return a row. Raises DataError for a missing or malformed column."""
        check_columns(values, COLUMNS, where)
        name, base_commit = values["instance_id"], values["base_commit"]
        if not NAME_PATTERN.fullmatch(name):
            raise DataError(
                f"{where}: instance_id={name!r:.80} can't name a directory: use letters, digits "
                "and _ . -"
            )
        if not COMMIT_PATTERN.fullmatch(base_commit):
            raise DataError(f"{where}: base_commit={base_commit!r:.80} is not a commit's hash")
        fail_to_pass = _read_tests(values, "FAIL_TO_PASS", where)
        if not fail_to_pass:
            raise DataError(f"{where}: FAIL_TO_PASS lists no test, so nothing can be judged")
        tests = (*fail_to_pass, *_read_tests(values, "PASS_TO_PASS", where))
        image = next((str(values[name]) for name in IMAGE_COLUMNS if values.get(name)), "")
        return cls(
            name,
            values["repo"],
            base_commit,
            values["problem_statement"],
            values["patch"],
            values["test_patch"],
            tests,
            image,
        )


def _read_tests(values: Mapping[str, Any], column: str, where: str) -> list[str]:
    """Return the ids of a column: a list, or its JSON text as in the datasets of SWE-bench.

    Names of unittest become ids of pytest, which runs such tests too.
    """
    tests = values.get(column)
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
    except ValueError:
        tests = None
    if not isinstance(tests, list):
        raise DataError(f"{where}: {column} must be a list of tests, or its JSON text")
    tests = [_convert_test(test) for test in tests]
    for test in tests:
        path = test.partition("::")[0] if isinstance(test, str) else ""
        if not path or "::" not in test or path.startswith("/") or ".." in path.split("/"):
            raise DataError(
                f"{where}: {column} has {test!r:.100}, which is not an id of pytest such as "
                "tests/test_a.py::test_b, or a name of unittest such as test_b "
                "(tests.test_a.TestA); other test runners are not supported"
            )
    return tests


def _convert_test(test: Any) -> Any:
    """Return the id of pytest for a name of unittest, and anything else as it is."""
    match = UNITTEST_PATTERN.fullmatch(test) if isinstance(test, str) else None
    if match is None:
        return test
    method, module, class_name = match.groups()
    return f"{module.replace('.', '/')}.py::{class_name}::{method}"


def write_swe_tasks(
    rows: str, folder: Path, *, repositories: Path, command: str, timeout_s: float
) -> int:
    """Write a task directory for each row, and return their number.

    Args:
        rows: A data file, or its address.
        folder: Directory of the task directories; it must not exist yet, or be empty.
        repositories: Directory of the repositories' clones.
        command: The shell command that starts pytest.
        timeout_s: Time limit of a task's tests in seconds.

    Raises:
        ConfigError: `folder` has files, or is one.
        DataError: A row is malformed, or its repository is missing.
    """
    require_empty_directory(folder)
    count = 0
    for row in read_rows(rows):
        where = f"{rows}, {row.where}"
        swe_row = SweRow.from_values(row.values, where)
        task = folder / swe_row.name
        if task.exists():
            raise ConfigError(f"{where}: instance_id={swe_row.name} names two rows")
        write_swe_task(swe_row, repositories, task, command=command, timeout_s=timeout_s)
        count += 1
    return count


def write_swe_task(
    row: SweRow, repositories: Path, folder: Path, *, command: str, timeout_s: float
) -> None:
    """Write the task directory of a row.

    Args:
        repositories: Directory of the clones, each as owner/name or owner__name.
        folder: The task directory, which is created.
        command: The shell command that starts pytest.
        timeout_s: Time limit of the tests in seconds.

    Raises:
        DataError: The repository, its commit or a test's file is missing, or `test_patch` does not
            apply.
    """
    where = f"row {row.name}"
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch)
        _check_out(_find_repository(row.repo, repositories, where), row.base_commit, source, where)
        workdir = IMAGE_WORKDIR if row.image else SOURCE_WORKDIR
        manifest = MANIFEST.format(
            repo=json.dumps(row.repo),
            base_commit=json.dumps(row.base_commit),
            timeout_s=timeout_s,
            workdir=json.dumps(workdir),
        )
        if row.image:
            manifest += f"docker_image = {json.dumps(row.image)}\n"
        files: dict[str, bytes] = {
            "task.toml": manifest.encode(),
            "instruction.md": row.problem.encode(),
            "solution/gold.patch": row.patch.encode(),
            "solution/solve.sh": SOLUTION.format(workdir=workdir).encode(),
        }
        if not row.image:
            files |= {f"environment/{name}": data for name, data in _read_files(source)}
        test_files = _apply(row.test_patch, source, where)
        files |= _write_tests(row, source, test_files, command)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _find_repository(repo: str, repositories: Path, where: str) -> Path:
    candidates = [repositories / repo, repositories / repo.replace("/", "__")]
    inside = [path for path in candidates if path.resolve().is_relative_to(repositories.resolve())]
    for path in inside:
        if path.is_dir():
            return path
    raise DataError(
        f"{where}: {repositories} has no clone of {repo}: put one into {candidates[-1]}"
    )


def _check_out(repository: Path, commit: str, folder: Path, where: str) -> None:
    """Write the regular files of a commit into a folder."""
    archive = _run_git(["-C", str(repository), "archive", "--format=tar", commit], where)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        # A task directory can't hold links.
        tar.extractall(folder, [item for item in tar if not item.issym()], filter="data")


def _apply(patch: str, folder: Path, where: str) -> list[str]:
    """Apply a patch in a folder, and return the paths that it changes."""
    if not patch.strip():
        return []
    options = ["-C", str(folder), "apply", "--whitespace=nowarn"]
    changes = _run_git([*options, "--numstat", "-z"], where, patch)
    _run_git(options, where, patch)
    # Fields are "added<tab>removed<tab>path". A renamed file is an empty path, then both paths.
    fields = changes.decode("utf-8", "surrogateescape").split("\0")
    return [path for field in fields if (path := field.split("\t")[-1])]


def _write_tests(
    row: SweRow, source: Path, test_files: Sequence[str], command: str
) -> dict[str, bytes]:
    """Return the files of tests/, from the repository after the row's `test_patch`."""
    listed_files = list(dict.fromkeys(test.partition("::")[0] for test in row.tests))
    for name in listed_files:
        if not _is_regular(source / name):
            raise DataError(f"row {row.name}: the repository has no {name} after test_patch")
    replaced = sorted({*test_files, *listed_files})
    conftests = [path.relative_to(source).as_posix() for path in source.rglob("conftest.py")]
    kept = [name for name in {*replaced, *conftests} if _is_regular(source / name)]
    config, config_text = _find_pytest_config(source)
    script = TEST_SCRIPT.format(
        removed=shlex.join(replaced), command=command, config=config, files=shlex.join(listed_files)
    )
    return {
        "tests/test.sh": script.encode(),
        "tests/judge.py": JUDGE.encode(),
        "tests/tests.json": json.dumps(row.tests, indent=1).encode(),
        f"tests/config/{config}": config_text,
        **{f"tests/files/{name}": (source / name).read_bytes() for name in sorted(kept)},
    }


def _find_pytest_config(source: Path) -> tuple[str, bytes]:
    """Return the name and the content of the file that configures pytest."""
    for name, section in PYTEST_CONFIGS.items():
        path = source / name
        if _is_regular(path) and section.encode() in path.read_bytes():
            return name, path.read_bytes()
    return "pytest.ini", b"[pytest]\n"


def _read_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        if _is_regular(path):
            yield path.relative_to(folder).as_posix(), path.read_bytes()


def _is_regular(path: Path) -> bool:
    """True for a file that is not a link: a patch could make a link to a file of this machine."""
    return path.is_file() and not path.is_symlink()


def _run_git(arguments: Sequence[str], where: str, text: str | None = None) -> bytes:
    try:
        process = subprocess.run(
            ["git", *arguments],
            input=None if text is None else text.encode(),
            capture_output=True,
            # `git apply` would otherwise leave out a folder that lies in some repository.
            env=inherit_environment(GIT_CEILING_DIRECTORIES=tempfile.gettempdir()),
            check=False,
        )
    except FileNotFoundError:
        raise DataError(f"{where}: the program git is not installed") from None
    if process.returncode:
        message = process.stderr.decode("utf-8", "replace").strip()[-500:]
        raise DataError(f"{where}: git {arguments[2]} failed: {message}")
    return process.stdout
