"""Programs with several tries: after each that fails, the policy is shown what went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ratchet.config.resolve import construct
from ratchet.environments.code.config import CodeRepairConfig
from ratchet.environments.tool_use.python import failure
from ratchet.protocols import Environment, Step
from ratchet.rewards.code.extract_program import program_of, right_output
from ratchet.rewards.code.function_tests import FunctionTask
from ratchet.rewards.code.reward import Code, given_tests, io_tests
from ratchet.types import Message, Split, Task

SHOWN_CHARS = 500  # of an input, an output, or what was expected


class CodeRepair:
    """The last try's reward, as the reward `code` gives it, times `discount` for each before. That
    reward judges; the error is found by running the program once more, together with its tests: it
    is a hint, and decides nothing."""

    replayable = True
    judges = True

    def __init__(self, config: CodeRepairConfig) -> None:
        """Raises SandboxError where the machine isolates programs less than the judge asks for."""
        self.config = config
        self.problems: Environment = construct(config.problems)
        self._code = Code(config.judge)
        self._task: Task | None = None
        self._tries = 0

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        return self.problems.tasks(split, seed=seed, start=start)

    def demonstration(self, task: Task) -> Sequence[Message]:
        return self.problems.demonstration(task)

    async def reset(self, task: Task) -> Sequence[Message]:
        self._task, self._tries = task, 0
        return task.messages

    async def step(self, message: Message) -> Step:
        """Raises DataError for a task with broken tests, SandboxError where the sandbox failed."""
        assert self._task is not None, "step before reset"
        self._tries += 1
        verdict = await self._code.grade(message.text, self._task)
        passed = verdict.parts["passed"] == 1.0
        if passed or self._tries >= self.config.tries:
            reward = verdict.reward * self.config.discount ** (self._tries - 1)
            return Step(
                reward=reward,
                done=True,
                metrics={"programs": 1, "repaired": float(passed and self._tries > 1)},
            )
        error = await self._error(message.text, self._task)
        return Step(messages=(Message("user", error),), reward=0.0, metrics={"programs": 1})

    async def close(self) -> None:
        return None

    async def _error(self, text: str, task: Task) -> str:
        judge = self.config.judge
        program = program_of(text, judge.blocks, require_block=judge.require_block)
        if program is None:
            return "There is no program in your answer: write it between ```python and ```."
        tests = given_tests(task)
        if isinstance(tests, FunctionTask):
            return await self._traceback(program, tests)
        for stdin, expected in io_tests(tests["tests"], task.id):
            result = await self._code.sandbox.run(program, stdin, self._code.limits)
            if result.ok and right_output(result, expected, judge.compare, judge.tolerance):
                continue
            given = f"For the input\n{_short(stdin.decode('utf-8', 'replace'))}\n"
            if not result.ok:
                return given + self._end_of(failure(result))
            said = _short(result.stdout.decode("utf-8", "replace"))
            return f"{given}your program prints\n{said}\nand this is expected:\n{_short(expected)}"
        return "Your program does not pass its tests every time."

    async def _traceback(self, program: str, task: FunctionTask) -> str:
        whole = f"def {task.entry_point}(" in program
        script = f"{task.prompt}\n{program}" if whole else task.prompt + program
        script += f"\n\n{task.test}\n\ncheck({task.entry_point})\n"
        result = await self._code.sandbox.run(script, limits=self._code.limits)
        return (
            "Your program does not pass its tests." if result.ok else self._end_of(failure(result))
        )

    def _end_of(self, error: str) -> str:
        kept = (
            error
            if len(error) <= self.config.error_chars
            else f"...{error[-self.config.error_chars :]}"
        )
        return f"Your program does not pass its tests:\n{kept}"


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
