"""A reward for programs: the answer runs in a sandbox, and is judged outside of that sandbox."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny, field_validator

from ratchet.config.base import Section
from ratchet.config.resolve import Slot, build
from ratchet.errors import DataError
from ratchet.rewards.base import AnswerReward
from ratchet.rewards.code.compiled import COMPILE_COMMANDS, Compiler
from ratchet.rewards.code.convert_tests import CALL_PROGRAM, convert_tests, write_text_program
from ratchet.rewards.code.extract_program import (
    LANGUAGE_MARKS,
    extract_program,
    find_language,
    has_expected_output,
    read_language,
)
from ratchet.rewards.code.function_tests import LIMIT_REASONS, FunctionJudge, FunctionTask
from ratchet.rewards.deadline import ProgramRunner
from ratchet.sandbox import Isolation, Limits, Result, Sandbox
from ratchet.sandbox.config import local_sandbox
from ratchet.types import Scored, Task
from ratchet.utils.safe_read import parse_json


class CodeConfig(Section):
    """A reward of 1 if the answer's program passes the task's tests in a sandbox."""

    builds: ClassVar[str] = "ratchet.rewards.code.reward:Code"

    credit: Literal["all", "share"] = "all"
    """all: 1 if all tests pass, else 0; share: the share that passes."""
    compare: Literal["tokens", "lines"] = "tokens"
    """tokens: compare words separated by white space; lines: compare lines without the spaces at
    their ends."""
    tolerance: float | None = Field(None, gt=0)
    """Absolute or relative difference up to which numbers are equal; null: the text must be the
    same."""
    blocks: Literal["last", "first", "all"] = "last"
    """Fenced block of the answer that is the program; all: all blocks, joined."""
    require_block: bool = False
    """True: an answer without a fenced block earns 0. False: the whole answer is then the
    program."""
    language: Literal["python", "cpp", "go", "block", "column"] = "python"
    """Language of the programs. block: as the answer marks its block, as in ROLL; column: the row's
    column `language`. Tests of functions are of Python alone."""
    block_languages: list[Literal["python", "cpp", "go"]] = Field(
        ["python", "cpp", "go"], min_length=1
    )
    """Languages that an answer's block may have with language=block; an answer in another one earns
    0, and one without a marked block is Python, if that is listed, or else the first. Leave out a
    language without a compiler in the sandbox: while it is listed, its answers fail."""
    compilers: dict[Literal["cpp", "go"], str] = Field(
        default_factory=dict[Literal["cpp", "go"], str],
        description="Command of each compiler in the sandbox, by language; left out: "
        f"'{COMPILE_COMMANDS['cpp']}' for cpp and '{COMPILE_COMMANDS['go']}' for go. The names of "
        "the files are appended.",
    )
    compile_timeout_s: float = Field(30.0, gt=0)
    """Processor time limit of each of a compiler's processes, in seconds. The wall time limit is
    three times as long."""
    compile_memory_mib: int = Field(2048, ge=64)
    """Memory limit of a compiler, in MiB."""
    timeout_s: float = Field(4.0, gt=0)
    """Processor time limit of one test, in seconds (rounded up to whole ones). The wall time limit
    is three times as long."""
    memory_mib: int = Field(512, ge=64)
    """Memory limit (address space) of the program, in MiB."""
    output_kib: int = Field(1024, gt=0)
    """Limit on the output of the program in one test, in KiB."""
    workers: int = Field(2, gt=0)
    """Maximum number of programs that run at once."""
    isolation: Literal["kernel", "namespaces", "landlock", "seccomp"] = "landlock"
    """Weakest isolation allowed; the strongest available is used."""
    sandbox: Annotated[SerializeAsAny[Section], Slot("sandbox")] = Field(
        default_factory=local_sandbox
    )
    """Sandbox of the programs: local, docker or remote, and its keys."""

    def check_keys(self) -> None:
        if self.tolerance is not None and self.compare == "lines":
            raise ValueError(
                f"tolerance={self.tolerance:g} is read only with compare=tokens: set "
                "compare=tokens, or remove tolerance"
            )
        language = self.language
        if language != "block" and "block_languages" in self.changed:
            raise ValueError(
                f"block_languages is not read with language={language}: set language=block, or "
                "remove block_languages"
            )
        if language == "python":
            unread = [name for name in COMPILER_KEYS if name in self.changed]
            unread += ["compilers"] if self.compilers else []
            fix = f"set language=cpp, go, block or column, or remove {' and '.join(unread)}"
        else:
            compiled = set(COMPILE_COMMANDS) & {language} or set(COMPILE_COMMANDS)
            unread = [f"compilers.{name}" for name in self.compilers if name not in compiled]
            fix = f"set language=block or column, or remove {' and '.join(unread)}"
        if unread:
            verb = "is" if len(unread) == 1 else "are"
            raise ValueError(f"{', '.join(unread)} {verb} not read with language={language}: {fix}")

    @field_validator("compilers")
    @classmethod
    def _check_compilers(
        cls, compilers: dict[Literal["cpp", "go"], str]
    ) -> dict[Literal["cpp", "go"], str]:
        for language, command in compilers.items():
            try:
                words = shlex.split(command)
            except ValueError:
                words = []
            if not words:
                raise ValueError(
                    f"compilers.{language}={command!r} is no command. Set compilers.{language}="
                    f"'{COMPILE_COMMANDS[language]}'"
                )
        return compilers


COMPILER_KEYS = ("compile_timeout_s", "compile_memory_mib")
VERDICT_ENDS = ("passed", "wrong", "crashed", "limit")
FUNCTION_COLUMNS = ("prompt", "entry_point", "test")
WALL_PER_CPU = 3  # a correct program must not time out because the machine is busy


class Code(AnswerReward):
    """A reward that runs the answer's program on the task's tests.

    The tests are `tests` ([{"stdin", "stdout"}]), HumanEval's `prompt`, `entry_point` and `test`,
    or ROLL's `case_type` and `test_cases`, in the task's `meta` or else in its answer.

    The reward parts are the shares of tests that passed, were wrong, crashed or hit a limit. With
    credit "all", tests after the first failure are not run and count in no part.
    """

    name = "code"
    bounds = (0.0, 1.0)

    def __init__(self, config: CodeConfig) -> None:
        """Build the sandbox. Raises SandboxError if it isolates less than `isolation` requires."""
        self.config = config
        isolation = Isolation[config.isolation.upper()]
        self.sandbox: Sandbox = build(config.sandbox, slots=config.workers, at_least=isolation)
        self.limits = Limits(
            wall_s=WALL_PER_CPU * config.timeout_s,
            cpu_s=config.timeout_s,
            memory_mib=config.memory_mib,
            output_kib=config.output_kib,
        )
        self.function_judge = FunctionJudge(
            self.sandbox, self.limits, share=config.credit == "share"
        )
        compile_limits = Limits(
            wall_s=WALL_PER_CPU * config.compile_timeout_s,
            cpu_s=config.compile_timeout_s,
            memory_mib=config.compile_memory_mib,
        )
        self.compiler = Compiler(
            self.sandbox, {**COMPILE_COMMANDS, **config.compilers}, compile_limits, self.limits
        )

    async def grade(self, text: str, task: Task) -> Scored:
        """Return the reward of the program in `text`.

        A test fails if the program crashes, hits a limit or prints wrong output; so do all tests
        of a program that does not compile. Raises DataError if the task has no tests or broken
        ones, SandboxError if the sandbox failed or lacks the compiler.
        """
        row = get_tests(task)
        tests = row if isinstance(row, FunctionTask) else parse_io_tests(row["tests"], task.id)
        language = self.choose_language(text, tests, task)
        program = self.read_program(text, tests, language)
        if program is None:
            return self._make_outcome({"wrong": 1}, 1)
        if isinstance(tests, FunctionTask):
            verdict = await self.function_judge.judge(program, tests)
            if self.config.credit == "share" and verdict.end != "passed":
                return self._make_outcome(
                    {"passed": verdict.n_passed, verdict.end: verdict.n_broken},
                    verdict.n_passed + verdict.n_broken,
                )
            return self._make_outcome({verdict.end: 1}, 1)
        return await self._run(program, tests, language)

    def choose_language(self, text: str, tests: Any, task: Task) -> str:
        """Return the language of the program in an answer.

        Raises DataError if the task's column `language` is missing or unknown, or if tests of
        functions are to be run in another language than Python.
        """
        language = self.config.language
        if language == "block":
            return (
                "python"
                if isinstance(tests, FunctionTask)
                else find_language(text, self.config.blocks, self.config.block_languages)
            )
        if language == "column":
            name = task.meta.get("language", _parse_row(task.answer).get("language"))
            language = read_language(name) if isinstance(name, str) else None
            if language is None:
                raise DataError(
                    f"task '{task.id}': language={name!r:.40} is not known, must be one of "
                    f"{', '.join(LANGUAGE_MARKS)}"
                )
        if language != "python" and isinstance(tests, FunctionTask):
            raise DataError(
                f"task '{task.id}' has tests of a function, which are run in Python, and its "
                f"language is {language}: give it tests=[{{stdin, stdout}}]"
            )
        return language

    def read_program(self, text: str, tests: Any, language: str = "python") -> str | None:
        """Return the program that the tests run; None if the answer lacks a required block."""
        if isinstance(tests, FunctionTask) and tests.judges_text:
            return write_text_program(text.rpartition("</think>")[2].strip())
        program = extract_program(
            text,
            self.config.blocks,
            require_block=self.config.require_block,
            language=language,
        )
        calls_several = isinstance(tests, FunctionTask) and bool(tests.functions)
        return program + CALL_PROGRAM if program is not None and calls_several else program

    async def prepare(
        self, program: str, language: str, runner: ProgramRunner
    ) -> tuple[str, Limits] | Result:
        """Return the program to run and its limits; the compiler's result if it failed.

        Raises SandboxError if the sandbox failed or lacks the compiler.
        """
        if language == "python":
            return program, self.limits
        compiled = await self.compiler.compile(program, language, runner)
        if compiled.runner is None:
            return compiled.result
        return compiled.runner, self.compiler.get_run_limits(language)

    async def _run(self, program: str, tests: Sequence[tuple[bytes, str]], language: str) -> Scored:
        counts: dict[str, int] = {}
        runner = ProgramRunner(self.sandbox)
        prepared = await self.prepare(program, language, runner)
        if isinstance(prepared, Result):
            is_limit = prepared.reason in LIMIT_REASONS
            return self._make_outcome({"limit" if is_limit else "crashed": 1}, 1)
        program, limits = prepared
        for index, (stdin, expected) in enumerate(tests):
            if runner.has_expired:
                counts["limit"] = counts.get("limit", 0) + len(tests) - index
                break
            end = self._classify(await runner.run(program, stdin, limits), expected)
            counts[end] = counts.get(end, 0) + 1
            if end != "passed" and self.config.credit == "all":
                break
        return self._make_outcome(counts, len(tests))

    def _classify(self, result: Result, expected: str) -> str:
        if result.reason in LIMIT_REASONS:
            return "limit"
        if not result.ok:
            return "crashed"
        return (
            "passed"
            if has_expected_output(result, expected, self.config.compare, self.config.tolerance)
            else "wrong"
        )

    def _make_outcome(self, counts: Mapping[str, float], total: float) -> Scored:
        parts = {end: counts.get(end, 0) / total for end in VERDICT_ENDS}
        return Scored(
            parts["passed"]
            if self.config.credit == "share"
            else float(counts.get("passed", 0) == total),
            parts,
        )


def get_tests(task: Task) -> FunctionTask | Mapping[str, Any]:
    """Return the row that holds the task's tests. Raises DataError if there is none.

    An empty column is a missing one: in files with rows of several kinds every row has all columns.
    """
    for row in (task.meta, _parse_row(task.answer)):
        if row.get("tests") is not None:
            return row
        if row.get("case_type"):
            return _read_cases(row, task.id)
        if row.get("test") is not None or row.get("entry_point") is not None:
            values = {name: row.get(name) for name in FUNCTION_COLUMNS}
            for name, value in values.items():
                if not isinstance(value, str):
                    raise DataError(
                        f"task '{task.id}' has tests of a function, but its {name} is {value!r}: "
                        "it must be text"
                    )
            # No program defines such a name, so each would earn 0.
            if not str(values["entry_point"]).isidentifier():
                raise DataError(
                    f"task '{task.id}': entry_point={values['entry_point']!r:.80} must be the name "
                    "of a function, such as 'solve'"
                )
            return FunctionTask(**values, label=task.id)  # pyright: ignore[reportArgumentType]
    raise DataError(
        f"task '{task.id}' has no tests, in its meta or its answer: give it tests=[{{stdin, "
        f"stdout}}], or {', '.join(FUNCTION_COLUMNS)}, or case_type and test_cases"
    )


def _read_cases(row: Mapping[str, Any], label: str) -> FunctionTask | Mapping[str, Any]:
    """Return the tests in ROLL's columns `case_type` and `test_cases`."""
    cases = _parse_if_text(row.get("test_cases"))
    if not isinstance(cases, Sequence) or isinstance(cases, str) or not cases:
        raise DataError(
            f"task '{label}': test_cases must be a list of tests with at least one, or its JSON "
            f"text, not {row.get('test_cases')!r:.80}"
        )
    if row["case_type"] != "input":
        return convert_tests(row["case_type"], cases, label)
    pairs = [
        _read_io_test(case, f"task '{label}', test_cases[{index}]", "expected_stdout")
        for index, case in enumerate(cases)
    ]
    return {"tests": [{"stdin": stdin, "stdout": stdout} for stdin, stdout in pairs]}


def parse_io_tests(tests: Any, label: str) -> list[tuple[bytes, str]]:
    """Return the (stdin, expected stdout) of each test. Raises DataError if they are malformed."""
    parsed = _parse_if_text(tests)
    if not isinstance(parsed, Sequence) or isinstance(parsed, str) or not parsed:
        raise DataError(
            f"task '{label}': tests must be a list of {{stdin, stdout}} with at least one, or its "
            f"JSON text, not {tests!r:.100}"
        )
    pairs: list[tuple[bytes, str]] = []
    for index, test in enumerate(parsed):
        stdin, stdout = _read_io_test(test, f"task '{label}', tests[{index}]", "stdout")
        pairs.append((stdin.encode("utf-8", "surrogatepass"), stdout))
    return pairs


def _read_io_test(test: Any, place: str, output: str) -> tuple[str, str]:
    """Return the (stdin, expected stdout) of a test, whose key for the latter is `output`."""
    if not isinstance(test, Mapping):
        raise DataError(f"{place} must be {{stdin, {output}}}, not {test!r:.100}")
    if test.get(output) is None:
        raise DataError(
            f"{place} has no {output}, the output that is expected: it must be "
            f"{{stdin, {output}}}, not {test!r:.100}"
        )
    stdin = "" if test.get("stdin") is None else test["stdin"]
    for name, value in (("stdin", stdin), (output, test[output])):
        if not isinstance(value, str):
            fix = f": write '{value}'" if isinstance(value, int | float) else ""
            raise DataError(f"{place}.{name} must be text, not {value!r:.100}{fix}")
    return stdin, test[output]


def _parse_row(answer: Any) -> Mapping[str, Any]:
    answer = _parse_if_text(answer)
    return answer if isinstance(answer, Mapping) else {}


def _parse_if_text(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return parse_json(value)
        except ValueError:
            return None
    return value
