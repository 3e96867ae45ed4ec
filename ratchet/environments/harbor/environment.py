"""Play tasks in Harbor's format: the agent works in one session, the tests run in another.

The tests run in a new session of the task's image, which gets the agent's files: those of the
working directory, of /logs/artifacts and of the task's artifacts. So no process, no variable and
no other file of the agent can reach the tests, their files or the reward file. What Harbor counts
as an error of the verifier (no reward file, a reward that is not a number, a timeout) fails the
attempt.

Source: the package harbor 0.25.0, verifier/verifier.py and agents/oracle.py.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from ratchet.config.base import Section
from ratchet.environments.harbor.manifest import Waiver
from ratchet.environments.harbor.reward_file import VerifierError, read_reward
from ratchet.environments.harbor.task_directory import (
    TaskDirectory,
    TaskImage,
    list_task_directories,
    read_task_directory,
)
from ratchet.environments.single_turn import is_held_out
from ratchet.environments.tool_use.shell import Attempt, ShellConfig, ShellEnvironment
from ratchet.errors import DataError
from ratchet.sandbox.base import Reason, Result, SandboxError, Session, TooLarge
from ratchet.sandbox.config import DockerSandboxConfig, LocalSandboxConfig
from ratchet.sandbox.docker import DockerSandbox
from ratchet.sandbox.inside.rootfs import LINKED_PATHS
from ratchet.types import Message, Split, Task

SETUP_TIMEOUT_S = 30.0
MIN_MEMORY_MIB = 64  # the least that a sandbox accepts
# Directories that Harbor provides in each container. To create them, a placeholder file is put into
# each, because the sandbox then makes directories that any user may write to. A command in the
# session may lack the permission to make them.
LOG_FOLDERS = ("logs/agent", "logs/artifacts", "logs/verifier")
PLACEHOLDER = ".ratchet-empty"
REMOVED_AT_ONCE = 200  # paths of one `rm`, so that its command line stays short
SHOWN_OUTPUT = 2000  # characters of output in an error


class HarborConfig(ShellConfig):
    """Task directories in Harbor's format (docs/integrations/harbor.md).

    `train` and `test` are directories of tasks. Without `test`, a tenth of the tasks is held out.
    """

    builds: ClassVar[str] = "ratchet.environments.harbor.environment:Harbor"

    train: Path | None = None
    """Directory of task directories, or one task."""
    test: Path | None = None
    """Directory of the test split's tasks."""
    waive: tuple[Waiver, ...] = ()
    """Requirements of tasks to ignore: image (a local sandbox runs the machine's own programs),
    network (sandboxes have none), user (all commands run as one user), unknown_keys (of
    task.toml)."""
    workdir: str = Field("/app", pattern="^/.")
    """Working directory of tasks that name none."""
    reward: str = "reward"
    """Name of the reward if reward.json has several numbers; others are metrics."""

    def check_keys(self) -> None:
        if self.train is None and self.test is None:
            raise ValueError("has no tasks: set train or test")
        if not isinstance(self.sandbox, LocalSandboxConfig | DockerSandboxConfig):
            raise ValueError("needs absolute paths such as /app: set sandbox.kind=local or docker")


class Harbor(ShellEnvironment):
    """An environment of task directories in Harbor's format."""

    name = "harbor"

    def __init__(self, config: HarborConfig) -> None:
        super().__init__(config, _adapt_sandbox(config.sandbox))
        self.config = config

    @cached_property
    def _tasks(self) -> dict[str, list[TaskDirectory]]:
        return {"train": self._read(self.config.train), "test": self._read(self.config.test)}

    def _read(self, path: Path | None) -> list[TaskDirectory]:
        directories = [] if path is None else list_task_directories(path)
        tasks = [
            read_task_directory(directory, frozenset(self.config.waive), self.config.workdir)
            for directory in directories
        ]
        if isinstance(self.config.sandbox, LocalSandboxConfig):
            for task in tasks:
                _check_local(task, self.config.waive)
        return tasks

    def rows(self, split: Split) -> Sequence[Task]:
        """Return a split's tasks. Raises DataError if a task is malformed or not supported."""
        return self._rows[split]

    @cached_property
    def _rows(self) -> dict[Split, list[Task]]:
        train, test = self._tasks["train"], self._tasks["test"]
        if self.config.test is None:
            test = [task for task in train if is_held_out(task.name)]
            train = [task for task in train if not is_held_out(task.name)]
        instructions = self.config.instructions
        return {
            "train": [_make_task(task, "train", instructions) for task in train],
            "test": [_make_task(task, "test", instructions) for task in test],
        }

    @cached_property
    def _directories(self) -> dict[str, TaskDirectory]:
        return {str(task.path): task for tasks in self._tasks.values() for task in tasks}

    def _find_directory(self, task: Task) -> TaskDirectory:
        path = str(task.meta["directory"])
        if path not in self._directories:
            raise DataError(f"task '{task.id}' is in {path}, which is in neither train nor test")
        return self._directories[path]

    def demonstration(self, task: Task) -> Sequence[Message]:
        """Return one command that writes the task's solution/ and runs its solve.sh.

        Raises DataError if the task has no solution, or one that can't be written as a shell block.
        """
        directory = self._find_directory(task)
        files = directory.read_solution()
        if "solve.sh" not in files:
            raise DataError(f"task '{task.id}' has no solution/solve.sh")
        lines = [_write_command(f"/solution/{name}", data, task) for name, data in files.items()]
        variables = _write_exports(directory.get_variables("solution"))
        script = f"{_get_interpreter(files['solve.sh'])} /solution/solve.sh"
        block = "\n".join([*lines, f"({variables}{script})"])
        return (Message("assistant", f"```sh\n{block}\n```"), Message("assistant", "Done."))

    async def reset(self, task: Task) -> Sequence[Message]:
        """Open a session in the task's image, with the files of its environment/ folder."""
        await self.close()
        directory = self._find_directory(task)
        session = await self._open(directory, directory.image)
        self._attempt = Attempt(task, session)
        files = self._read_files(directory)
        folders = (directory.workdir, "solution", *LOG_FOLDERS)
        await self._prepare(session, directory, "agent", folders, files)
        return task.messages

    def get_remaining_s(self, attempt: Attempt) -> float:
        limit = self._find_directory(attempt.task).manifest.agent.timeout_sec
        command_timeout_s = self.config.command_timeout_s
        return (
            command_timeout_s if limit is None else min(command_timeout_s, limit - attempt.seconds)
        )

    async def judge(self, attempt: Attempt) -> tuple[float, Mapping[str, float]]:
        """Run the tests in a new session, with the agent's files.

        Raises VerifierError if the tests give no reward, SandboxError if the sandbox fails.
        """
        directory = self._find_directory(attempt.task)
        files: dict[str, bytes] = {}
        try:
            for path in directory.kept_paths:
                files |= await attempt.session.get(path)
        # The agent wrote too much. The reward is 0: if the attempt failed instead, the agent could
        # avoid a low reward by writing large files.
        except TooLarge:
            return 0.0, {"tests_refused": 1.0}
        files.pop(f"{directory.workdir}/{PLACEHOLDER}", None)
        await self.close()
        session = await self._open(directory, directory.verifier_image)
        try:
            tests = directory.read_tests()
            has_own_image = directory.has_own_verifier_image
            folders = (directory.workdir, *LOG_FOLDERS)
            start_files = {} if has_own_image else self._read_files(directory)
            await self._prepare(session, directory, "verifier", folders, {**start_files, **tests})
            try:
                if not has_own_image:
                    await _remove_missing(session, directory.kept_paths, files)
                await session.put(files)
            # The agent's files don't fit beside those of the tests. The reward is 0 as above.
            except TooLarge:
                return 0.0, {"tests_refused": 1.0}
            script = tests.get("tests/test.sh", b"")
            command = (
                f"({_get_interpreter(script)} /tests/test.sh) >/logs/verifier/test-stdout.txt 2>&1"
            )
            timeout_s = directory.manifest.verifier.timeout_sec
            result = await session.run(command, timeout_s)
            outputs = await session.get("logs/verifier")
        finally:
            await session.close()
        _check_tests_ended(attempt.task, result, outputs)
        return read_reward(attempt.task.id, outputs, tests, self.config.reward)

    @property
    def _has_images(self) -> bool:
        """True if sessions run in container images, not with the programs of this machine."""
        return isinstance(self.sandbox, DockerSandbox)

    def _read_files(self, directory: TaskDirectory) -> dict[str, bytes]:
        """Return the environment's files that the session's image lacks, by path from the root."""
        return {} if self._has_images and directory.image else directory.read_files()

    async def _open(self, directory: TaskDirectory, image: TaskImage) -> Session:
        """Open a session in an image, which is built first if it is a folder's."""
        limits = self.limits
        if memory_mib := directory.manifest.environment.memory_mib:
            limits = replace(limits, memory_mib=max(memory_mib, MIN_MEMORY_MIB))
        name = image.name
        if not self._has_images:
            return await self.sandbox.open("", limits)
        if image.folder is not None:
            assert isinstance(self.sandbox, DockerSandbox)
            name = await self.sandbox.build(image.folder, directory.build_timeout_s)
        return await self.sandbox.open(name, limits)

    async def _prepare(
        self,
        session: Session,
        directory: TaskDirectory,
        phase: str,
        folders: Sequence[str],
        files: Mapping[str, bytes],
    ) -> None:
        """Write the files, create the folders, set the variables, and enter the workdir.

        Args:
            session: A new session.
            directory: The task.
            phase: "agent" or "verifier", whose variables are set.
            folders: Paths relative to the root.
            files: Contents by path relative to the root.
        """
        placeholders = {f"{folder}/{PLACEHOLDER}": b"" for folder in folders}
        await session.put({**placeholders, **files})
        removal = shlex.join(["rm", "-f", *placeholders])
        variables = _write_exports(directory.get_variables(phase))
        workdir = shlex.quote(f"/{directory.workdir}")
        command = f"{removal} && {variables}cd {workdir}"
        result = await session.run(command, SETUP_TIMEOUT_S)
        if not result.ok:
            output = (result.stdout + result.stderr).decode("utf-8", "replace")[-SHOWN_OUTPUT:]
            raise SandboxError(f"the session of {directory.path} can't be set up: {output}")


async def _remove_missing(session: Session, paths: Sequence[str], files: dict[str, bytes]) -> None:
    """Remove the session's files below `paths` that are not in `files`: the agent removed them.

    Also delete from `files` each file that the session already has with the same content. It is
    then not written again, and keeps its mode in the image.
    """
    present: dict[str, bytes] = {}
    for path in paths:
        present |= await session.get(path)
    removed = [f"/{name}" for name in sorted(present.keys() - files.keys())]
    for start in range(0, len(removed), REMOVED_AT_ONCE):
        names = removed[start : start + REMOVED_AT_ONCE]
        result = await session.run(shlex.join(["rm", "-f", "--", *names]), SETUP_TIMEOUT_S)
        if not result.ok:
            output = result.stderr.decode("utf-8", "replace")[-SHOWN_OUTPUT:]
            raise SandboxError(
                f"files that the agent removed can't be removed for the tests: {output}. If they "
                "belong to root, set sandbox.user=0:0."
            )
    for name, data in present.items():
        if files.get(name) == data:
            del files[name]


def _check_tests_ended(task: Task, result: Result, outputs: Mapping[str, bytes]) -> None:
    """Raise VerifierError if a limit or a signal ended the tests.

    A program of the agent may then have killed the tests, and written the reward file itself.
    """
    if result.reason is Reason.EXIT and result.exit is not None and result.exit <= 128:
        return
    reason = result.reason.value if result.reason is not Reason.EXIT else f"code {result.exit}"
    text = outputs.get("logs/verifier/test-stdout.txt", result.stderr).decode("utf-8", "replace")
    raise VerifierError(
        f"the tests of task '{task.id}' did not end by themselves ({reason}): "
        f"{text[-SHOWN_OUTPUT:]}"
    )


def _make_task(directory: TaskDirectory, split: Split, instructions: str) -> Task:
    return Task(
        f"harbor/{split}/{directory.name}",
        (Message("user", directory.instruction + instructions),),
        environment="harbor",
        tag="harbor",
        meta={"directory": str(directory.path)},
    )


def _adapt_sandbox(section: Section) -> Section:
    """Return the sandbox's section, with Docker sessions that begin at / and may write anywhere."""
    if not isinstance(section, DockerSandboxConfig):
        return section
    return section.model_copy(update={"read_only": False, "workdir": "/"})


def _check_local(task: TaskDirectory, waived: Sequence[Waiver]) -> None:
    """Raise DataError if the task can't be played without a container."""
    if (task.image or task.verifier_image) and "image" not in waived:
        raise DataError(
            f"{task.path} has an image of its own, and the local sandbox runs this machine's "
            "programs. Set sandbox.kind=docker, or waive: [image] if the task needs only its files."
        )
    for path in (task.workdir, *task.kept_paths, *task.read_files()):
        if f"/{path.split('/')[0]}" not in LINKED_PATHS:
            raise DataError(
                f"{task.path} uses /{path}, and the local sandbox has only "
                f"{', '.join(LINKED_PATHS)}. Set sandbox.kind=docker."
            )


def _get_interpreter(script: bytes) -> str:
    """Return the command that runs a script: that of its #! line, else sh.

    The script is passed to its interpreter, because a sandbox may forbid executing the files that
    were put into it. An empty `script` means that the script is only in the image. The result is
    then "", so that the script itself is the command.
    """
    first_line = script.split(b"\n", 1)[0].decode("utf-8", "replace")
    return first_line[2:].strip() if first_line.startswith("#!") else "sh" if script else ""


def _write_exports(variables: Mapping[str, str]) -> str:
    """Return shell commands that set variables, each followed by `&&`."""
    return "".join(f"export {name}={shlex.quote(value)} && " for name, value in variables.items())


def _write_command(path: str, data: bytes, task: Task) -> str:
    """Return a shell command that writes a text file. Raises DataError for any other file."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "```" in text or "\0" in text or "\nEND_OF_FILE\n" in text:
        raise DataError(f"task '{task.id}': {path} can't be written in a shell block")
    folder = shlex.quote(posixpath.dirname(path))
    quoted = shlex.quote(path)
    newline = "" if text.endswith("\n") or not text else "\n"
    return f"mkdir -p {folder}\ncat >{quoted} <<'END_OF_FILE'\n{text}{newline}END_OF_FILE"
