"""Read a task directory: instruction, files, image, tests and solution."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ratchet.environments.harbor.manifest import (
    MANIFEST,
    Machine,
    Manifest,
    Waiver,
    fill_template,
    read_manifest,
)
from ratchet.errors import DataError

DOCKERFILE = "Dockerfile"
CANARY_LINE = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
MAX_FILE_BYTES = 64 << 20
# Directories that the tests get from the task alone, never from the agent.
RESERVED = ("tests", "solution", "logs/verifier")


@dataclass(frozen=True)
class TaskImage:
    """The image of a session.

    A TaskImage without name and folder is falsy: the task has no image.
    """

    name: str = ""
    """Name of an existing image; "": none."""
    folder: Path | None = None
    """Folder whose Dockerfile the image is built from; None: it is not built."""

    def __bool__(self) -> bool:
        return bool(self.name) or self.folder is not None


@dataclass(frozen=True)
class TaskDirectory:
    """A task in Harbor's format."""

    path: Path
    manifest: Manifest
    instruction: str
    default_workdir: str
    """Absolute path of the working directory if the task names none."""

    @property
    def name(self) -> str:
        return self.manifest.name or self.path.name

    @property
    def environment_folder(self) -> Path:
        return self.path / "environment"

    @cached_property
    def workdir(self) -> str:
        """Return the working directory, relative to the root."""
        task_workdir = self.manifest.environment.workdir or self._dockerfile_workdir
        workdir = posixpath.normpath(task_workdir or self.default_workdir).lstrip("/")
        if workdir in ("", ".") or any(_overlap(workdir, path) for path in RESERVED):
            raise DataError(
                f"{self.path / MANIFEST}: the working directory is /{workdir.lstrip('.')}, whose "
                "files can't be given to the tests. Set workdir in [environment], such as /app."
            )
        return workdir

    @cached_property
    def image(self) -> TaskImage:
        """Return the image of the agent's session; empty if the task has none."""
        if name := self.manifest.environment.docker_image:
            return TaskImage(name)
        folder = self.environment_folder
        return TaskImage(folder=folder) if (folder / DOCKERFILE).is_file() else TaskImage()

    @cached_property
    def verifier_image(self) -> TaskImage:
        """Return the image of the tests' session: their own in separate mode, else the agent's."""
        verifier = self.manifest.verifier
        if not verifier.is_separate:
            return self.image
        if verifier.environment is not None and verifier.environment.docker_image:
            return TaskImage(verifier.environment.docker_image)
        tests = self.path / "tests"
        return TaskImage(folder=tests) if (tests / DOCKERFILE).is_file() else self.image

    @property
    def has_own_verifier_image(self) -> bool:
        return self.verifier_image != self.image

    @property
    def build_timeout_s(self) -> float:
        return self.manifest.environment.build_timeout_sec

    @cached_property
    def kept_paths(self) -> tuple[str, ...]:
        """Return the paths, relative to the root, whose files the tests get from the agent.

        The tests get /logs/artifacts, the task's artifacts and, unless in separate mode, the
        working directory.
        """
        paths = ["logs/artifacts"] if self.manifest.verifier.is_separate else [self.workdir]
        paths.append("logs/artifacts")
        for artifact in self.manifest.artifacts:
            source = artifact if isinstance(artifact, str) else str(artifact.get("source", ""))
            path = posixpath.normpath(posixpath.join("/", self.workdir, source)).lstrip("/")
            if not path or any(_overlap(path, other) for other in RESERVED):
                raise DataError(
                    f"{self.path / MANIFEST}: artifact {source!r} can't be given to the tests. "
                    "Name a path apart from /, /tests, /solution and /logs/verifier."
                )
            paths.append(path)
        return tuple(dict.fromkeys(paths))

    def get_variables(self, phase: str) -> dict[str, str]:
        """Return the environment variables of the phase "agent", "verifier" or "solution"."""
        manifest, path = self.manifest, self.path / MANIFEST
        machine: Machine = manifest.environment
        phase_variables = {"verifier": manifest.verifier.env, "solution": manifest.solution.env}
        if phase == "verifier" and manifest.verifier.environment is not None:
            machine = manifest.verifier.environment
        return fill_template({**machine.env, **phase_variables.get(phase, {})}, path)

    def read_files(self) -> dict[str, bytes]:
        """Return the files to copy into a sandbox, by path relative to the root.

        They replace the task's image if the sandbox can't use it, or if there is none. Only
        WORKDIR, COPY and ADD of a Dockerfile are followed. Without a Dockerfile, the whole folder
        is the working directory.
        """
        if not (self.environment_folder / DOCKERFILE).is_file():
            files = read_tree(self.environment_folder)
            return {f"{self.workdir}/{name}": data for name, data in files.items()}
        files: dict[str, bytes] = {}
        for sources, target in self._copies:
            for name, path in _list_copied(self.environment_folder, sources, target):
                files[name] = _read_file(path)
        return files

    def read_tests(self) -> dict[str, bytes]:
        return {f"tests/{name}": data for name, data in read_tree(self.path / "tests").items()}

    def read_solution(self) -> dict[str, bytes]:
        return read_tree(self.path / "solution")

    @cached_property
    def _instructions(self) -> list[tuple[str, str]]:
        """Return (instruction, arguments) of the Dockerfile's last stage."""
        path = self.environment_folder / DOCKERFILE
        if not path.is_file():
            return []
        text = re.sub(r"^\s*#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
        pairs = [line.partition(" ") for line in lines if line]
        instructions = [(name.upper(), arguments.strip()) for name, _, arguments in pairs]
        starts = [i for i, (name, _) in enumerate(instructions) if name == "FROM"]
        return instructions[starts[-1] + 1 if starts else 0 :]

    @property
    def _dockerfile_workdir(self) -> str:
        folder = ""
        for name, arguments in self._instructions:
            if name == "WORKDIR":
                folder = posixpath.join(folder or "/", arguments.strip("\"'"))
        return folder

    @property
    def _copies(self) -> Iterator[tuple[Sequence[str], str]]:
        """Yield (sources, absolute target) of each COPY or ADD from the environment's folder."""
        folder = "/"
        for name, arguments in self._instructions:
            if name == "WORKDIR":
                folder = posixpath.join(folder, arguments.strip("\"'"))
            words = shlex.split(arguments.strip("[]").replace('",', '" '))
            # --from copies from another stage or image.
            if name not in ("COPY", "ADD") or any(word.startswith("--from") for word in words):
                continue
            *sources, target = [word for word in words if not word.startswith("--")]
            is_folder = target.endswith(("/", ".")) or len(sources) > 1
            yield sources, posixpath.join(folder, target) + ("/" if is_folder else "")


def read_task_directory(
    path: Path, waived: frozenset[Waiver], default_workdir: str
) -> TaskDirectory:
    """Return a task. Raises DataError if a file is missing, malformed or not supported."""
    manifest = read_manifest(path, waived)
    script = path / "tests" / "test.sh"
    has_tests_in_image = manifest.verifier.is_separate and (path / "tests" / DOCKERFILE).is_file()
    if not script.is_file() and not has_tests_in_image:
        raise DataError(f"{path} has no tests/test.sh, which judges the task.")
    try:
        text = (path / "instruction.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path / 'instruction.md'} can't be read: {error}") from None
    lines = text.split("\n")
    while lines and CANARY_LINE.fullmatch(lines[0].strip()):
        lines.pop(0)
    instruction = "\n".join(lines).strip()
    if not instruction:
        raise DataError(f"{path / 'instruction.md'} is empty: write what the agent must do.")
    return TaskDirectory(path, manifest, instruction, default_workdir)


def list_task_directories(path: Path) -> list[Path]:
    """Return the task directories in `path`, sorted by name; only `path` if it is a task itself.

    Raises DataError if there are none.
    """
    if (path / MANIFEST).is_file():
        return [path]
    directories = sorted(file.parent for file in path.glob(f"*/{MANIFEST}"))
    if not directories:
        raise DataError(f"{path} has no task directories: each has a {MANIFEST}.")
    return directories


def read_tree(folder: Path) -> dict[str, bytes]:
    """Return the files in a folder, by relative path; {} if the folder does not exist.

    Raises DataError for a link, which could lead out of the task.
    """
    return {
        path.relative_to(folder).as_posix(): _read_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def _read_file(path: Path) -> bytes:
    if path.is_symlink():
        raise DataError(f"{path} is a link, and tasks can't have links: put a copy there.")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise DataError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB.")
    return path.read_bytes()


def _list_copied(folder: Path, sources: Sequence[str], target: str) -> Iterator[tuple[str, Path]]:
    """Yield (path relative to the root, file) for the files that a COPY line copies."""
    for source in sources:
        relative = posixpath.normpath(source.lstrip("/") or ".")
        if relative.startswith(".."):
            raise DataError(f"{folder / DOCKERFILE} copies {source}, which is outside {folder}.")
        is_pattern = "*" in relative
        matches = sorted(folder.glob(relative)) if is_pattern else [folder / relative]
        for path in matches:
            if path.is_dir():
                below = (file for file in sorted(path.rglob("*")) if file.is_file())
                pairs = [(f"{target}/{file.relative_to(path).as_posix()}", file) for file in below]
            elif path.is_file():
                is_folder = target.endswith("/") or is_pattern
                pairs = [(f"{target}/{path.name}" if is_folder else target, path)]
            else:
                raise DataError(f"{folder / DOCKERFILE} copies {source}, which is not there.")
            for name, file in pairs:
                yield posixpath.normpath(name).lstrip("/"), file


def _overlap(path: str, other: str) -> bool:
    """True if two relative paths are equal, or one is below the other."""
    return path == other or path.startswith(f"{other}/") or other.startswith(f"{path}/")
