"""An environment of programs with several tries. The policy sees the error of a failed try."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar

from pydantic import Field, SerializeAsAny

from ratchet.config.base import Section
from ratchet.config.resolve import Slot
from ratchet.config.sections import EnvironmentConfig
from ratchet.environments.build import build_environment
from ratchet.environments.tool_use.python import describe_failure
from ratchet.protocols import Environment, Step
from ratchet.rewards.code.extract_program import has_expected_output
from ratchet.rewards.code.function_tests import FunctionTask
from ratchet.rewards.code.reward import Code, CodeConfig, get_tests, parse_io_tests
from ratchet.rewards.deadline import ProgramRunner
from ratchet.sandbox import Result
from ratchet.types import Message, Split, Task


class CodeRepairConfig(EnvironmentConfig):
    """An environment of programs: the policy sees the error of a failed try, and tries again."""

    builds: ClassVar[str] = "ratchet.environments.code.repair:CodeRepair"

    problems: Annotated[SerializeAsAny[Section], Slot("problems")]
    """Environment that provides the tasks and their tests, for example {kind: programs}."""
    judge: CodeConfig = CodeConfig.model_validate({})
    """Settings for running and judging a program."""
    tries: int = Field(3, ge=1)
    """Maximum number of programs in one episode."""
    discount: float = Field(1.0, gt=0, le=1)
    """The reward is multiplied by this for each failed try."""
    error_chars: int = Field(800, gt=0)
    """The policy sees at most this many characters, from the end of an error."""


# Maximum characters of an input, an output or an expected output in a hint.
SHOWN_CHARS = 500


class CodeRepair(Environment):
    """An environment of programs with several tries.

    The reward is the score of the last try by `code`, times `discount` for each earlier try.

    After a failed try the program runs again to produce a hint, which does not change the reward.
    This run contains only the input of one test, or the arguments of one call, so all that the
    program prints can be shown without leaking other tests. All hints of an episode together show
    the expected output of at most one input. An expected output is shown only if a program that
    copies it can't earn a reward: all tests must be required, and other inputs must be tested too.
    """

    replayable = True

    def __init__(self, config: CodeRepairConfig) -> None:
        """Raise SandboxError if this machine can't isolate programs as the judge requires."""
        self.config = config
        self.problems = build_environment(config.problems)
        self._code = Code(config.judge)
        self._task: Task | None = None
        self._tries = 0
        # The input whose expected output was shown in this episode.
        self._shown_input: bytes | None = None

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        return self.problems.tasks(split, seed=seed, start=start)

    def task_count(self) -> int | None:
        return self.problems.task_count()

    def demonstration(self, task: Task) -> Sequence[Message]:
        return self.problems.demonstration(task)

    async def reset(self, task: Task) -> Sequence[Message]:
        self._task = task
        self._tries = 0
        self._shown_input = None
        return task.messages

    async def step(self, message: Message) -> Step:
        """Judge a program. End the episode if it passes or was the last try, else give a hint.

        Raises DataError for a task with broken tests, SandboxError if the sandbox failed.
        """
        assert self._task is not None, "step before reset"
        self._tries += 1
        verdict = await self._code.grade(message.text, self._task)
        has_passed = verdict.parts["passed"] == 1.0
        if has_passed or self._tries >= self.config.tries:
            reward = verdict.reward * self.config.discount ** (self._tries - 1)
            return Step(
                reward=reward,
                done=True,
                metrics={"programs": 1, "repaired": float(has_passed and self._tries > 1)},
            )
        hint = await self._make_hint(message.text, self._task)
        return Step(messages=(Message("user", hint),), reward=0.0, metrics={"programs": 1})

    async def _make_hint(self, text: str, task: Task) -> str:
        judge = self.config.judge
        tests = get_tests(task)
        language = self._code.choose_language(text, tests, task)
        program = self._code.read_program(text, tests, language)
        if program is None:
            return f"There is no program in your answer: write it between ```{language} and ```."
        if isinstance(tests, FunctionTask):
            return await self._make_call_hint(program, tests)
        pairs = parse_io_tests(tests["tests"], task.id)
        prepared = await self._code.prepare(program, language, ProgramRunner(self._code.sandbox))
        if isinstance(prepared, Result):
            return self._shorten_error(describe_failure(prepared))
        program, limits = prepared
        for stdin, expected in pairs:
            result = await ProgramRunner(self._code.sandbox).run(program, stdin, limits)
            if result.ok and has_expected_output(result, expected, judge.compare, judge.tolerance):
                continue
            heading = f"For the input\n{_shorten(stdin.decode('utf-8', 'replace'))}\n"
            if not result.ok:
                return heading + self._shorten_error(describe_failure(result))
            output_text = (
                f"{heading}your program "
                f"prints\n{_shorten(result.stdout.decode('utf-8', 'replace'))}\n"
            )
            if not self._may_show_output(stdin, pairs):
                return f"{output_text}which is not expected."
            return f"{output_text}and this is expected:\n{_shorten(expected)}"
        return "Your program does not pass its tests every time."

    def _may_show_output(self, stdin: bytes, pairs: Sequence[tuple[bytes, str]]) -> bool:
        """True if a hint may show the expected output of an input. Remember the input if so."""
        if self.config.judge.credit != "all" or all(other == stdin for other, _ in pairs):
            return False
        if self._shown_input is None:
            self._shown_input = stdin
        return self._shown_input == stdin

    async def _make_call_hint(self, program: str, task: FunctionTask) -> str:
        verdict = await self._code.function_judge.judge(program, task)
        if verdict.end == "passed":
            return "Your program does not pass its tests every time."
        if not verdict.call:
            return "Your program does not pass its tests."
        explanation = await self._code.function_judge.explain(program, task, verdict.call)
        heading = f"For the call\n{explanation.call}\n"
        if not explanation.result.ok:
            return heading + self._shorten_error(describe_failure(explanation.result))
        if verdict.end == "limit":
            return (
                "Your program does not pass its tests: the calls together take too much time "
                "or memory."
            )
        if explanation.returned is None:
            return f"{heading}your program ends without an answer."
        return (
            f"{heading}your program returns\n{explanation.returned}\n"
            "and a test that makes this call fails."
        )

    def _shorten_error(self, error: str) -> str:
        shortened = (
            error
            if len(error) <= self.config.error_chars
            else f"...{error[-self.config.error_chars :]}"
        )
        return f"Your program does not pass its tests:\n{shortened}"


def _shorten(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
