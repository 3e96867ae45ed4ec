"""Run the tests of a function in the sandbox, on answers that the judged program gave earlier.

This module imports only the standard library and `plain_values`, and never shares a process with
the judged code (`program_runner`). The tests get plain values built from text, never the program's
objects. So the program can't patch the tests, and an object whose `__eq__` is always true has no
effect.

The tests call a stand-in for the function, which returns known answers. At the first call without
an answer the tests continue with `Anything`, only to find which calls are likely to follow, so that
one execution of the program answers them all. Such a run never leads to a verdict.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import os
import random
import signal
import sys
import types
from collections.abc import Iterator
from typing import Any, NoReturn

from ratchet.rewards.code.plain_values import (
    AWAITED_MARK,
    Anything,
    Awaited,
    NotPlainError,
    compile_if_valid,
    decode,
    encode,
    fill_in_answers,
    send,
    take_stdout,
)

MAX_CALLS = 5000  # maximum number of calls to foresee
# Maximum number of further calls to count in the first round, which finds how many calls the tests
# make by themselves.
MAX_COUNTED = 50_000
LOOKAHEAD_S = 1.0  # limit on the processor time of the look-ahead
# Minimum of the limit on foreseen calls whose arguments contain awaited answers.
MIN_AWAITED_LIMIT = 16


def run_tests() -> NoReturn:
    """Run the tests of a request on stdin, and write the result of `AssertionJudge.run` to stdout.

    The request has "prompt", "entry_point", "test", "calls", "answers" and "share".
    """
    channel = take_stdout()
    request = json.load(sys.stdin.buffer)
    send(channel, json.dumps(AssertionJudge(**request).run()))
    os._exit(0)


class LookAheadEnd(BaseException):
    """A signal to end the look-ahead: enough calls are foreseen, or the time limit is reached."""


class UnusableTests(Exception):
    """An error for tests that can't judge any program."""


class AnswerEvaluated(BaseException):
    """An error for tests that would run an answer as code.

    It does not derive from Exception, because the tests might catch one.
    """


class ProgramError(Exception):
    """An error for a program that gave no value, or raised an exception without a built-in name."""


class AssertTransformer(ast.NodeTransformer):
    """A transformer that makes each `assert` report to the judge.

    The judge decides whether a failed assertion ends the tests. An `assert` of a true constant is
    removed, because it tests nothing.
    """

    # {0} is the number of the assertion, which takes the place of `pass`.
    WRAPPED = (
        "try:\n  pass\nexcept Exception as _ratchet_error:\n  if "
        "_ratchet_judge.record_broken(_ratchet_error, {0}): raise\n"
    )
    WRAPPED += "else:\n  _ratchet_judge.record({0}, True)\n"

    def __init__(self) -> None:
        self.count = 0  # number of assertions so far, and the number of the next assertion

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        if isinstance(node.test, ast.Constant) and node.test.value:
            return ast.copy_location(ast.Pass(), node)
        # Drop the message: it is never shown, and a fault in it, such as a missing import, would
        # show only at a wrong answer.
        node.msg = None
        wrapped = ast.parse(self.WRAPPED.format(self.count)).body[0]
        self.count += 1
        assert isinstance(wrapped, ast.Try)
        wrapped.body = [node]
        return ast.copy_location(wrapped, node)


class AssertionJudge:
    """A judge that runs the tests on the program's answers and counts assertions.

    Args:
        calls: The calls sent to the program, as text.
        answers: The answers to the first of them. If there are fewer, the program ended before it
            gave the next one.
        share: True to continue after a broken assertion.
    """

    def __init__(
        self,
        prompt: str,
        entry_point: str,
        test: str,
        calls: list[str],
        answers: list[str],
        share: bool,
    ) -> None:
        self.prompt = prompt
        self.entry_point = entry_point
        self.test = test
        self.share = share
        self.calls, self.answers = calls, answers
        self.calls_made: list[str] = []
        self.n_certain: int | None = None  # calls before the first without an answer
        self.n_unforeseen = 0  # later calls that were counted but not foreseen
        self.is_cut_off = False  # True if the look-ahead was cut off
        self.break_index = 0  # the call after which the first assertion broke or the tests ended
        self.is_lost = False  # True if the program ended without an answer
        # has_answered: True once the tests got an answer. has_seen_text: True once they got one
        # that is not a number, and so may hold text.
        self.has_answered = self.has_seen_text = False
        self.evaluated = ""  # error message if the tests tried to run an answer as code
        self.n_broken = 0
        self.n_statements = 0  # number of assertions in the source of the tests
        # For each assertion, by the number of calls before it: True if all its executions held.
        self.verdicts: dict[int, dict[int, bool]] = {}
        self.program_errors: list[BaseException] = []  # exceptions that came from the program

    def run(self) -> dict[str, Any]:
        """Run the tests and return a result, whose "end" is one of these.

        "passed".
        "wrong": an answer broke the tests.
        "crashed": an exception of the program broke the tests.
        "lost": the program ended without an answer.
        "unknown": run the program on "calls" first. The first "n_certain" follow from known
          answers alone, the others are foreseen. "n_ahead" is the number of calls if the tests
          came to their end, else None.
        "unusable": the tests are broken, see "why".
        """
        has_ended = False
        try:
            self._run()
            end = "wrong" if self.n_broken else "passed"
            reason = ""
            has_ended = True
        except BaseException as error:
            end = "crashed" if error in self.program_errors else "wrong"
            reason = f"{type(error).__name__}: {error}"
            if self._is_tests_fault(error):
                end = "unusable"
            # Without `share`, a failed assertion ends the tests here, and is counted already.
            self._count_broken(1 if self.share or not self.n_broken else 0)
        if self.evaluated:
            end, reason = "unusable", self.evaluated
        if self.n_certain is not None and end != "unusable":
            n_ahead = None if self.is_cut_off else len(self.calls_made) + self.n_unforeseen
            return {
                "end": "unknown",
                "calls": self.calls_made,
                "n_certain": self.n_certain,
                "n_ahead": n_ahead,
            }
        if not self.calls_made and end == "passed":
            end, reason = "unusable", f"the tests never call {self.entry_point}"
        if self.is_lost and end != "unusable":
            end = "lost"
        call = self.calls_made[self.break_index] if self.break_index < len(self.calls_made) else ""
        held, broken = self._compute_shares(has_ended)
        return {"end": end, "why": reason[:2000], "held": held, "broken": broken, "call": call}

    def _compute_shares(self, has_ended: bool) -> tuple[float, float]:
        """Return the numbers of assertions that held and that failed.

        An assertion counts once, however often a loop executes it: as the share of its executions
        that held. Executions without a call between them count as one execution. Otherwise the
        answers, which can decide how long a loop is, could fill it with assertions that hold
        easily. If an error ended the tests, the error and all assertions that were not executed
        count as failed.
        """
        held = sum(
            sum(held_by_position.values()) / len(held_by_position)
            for held_by_position in self.verdicts.values()
        )
        reached = len(self.verdicts)
        return held, reached - held + (0 if has_ended else 1 + self.n_statements - reached)

    def _run(self) -> None:
        random.seed(0)  # the tests run more than once, and must make the same calls
        namespace: dict[str, Any] = {"__name__": "tests", "_ratchet_judge": self}
        stub = compile_if_valid(self.prompt) or compile_if_valid(self.prompt + "\n    pass\n")
        if stub is not None:  # the tests may use its imports and helper functions
            exec(stub, namespace)
        namespace[self.entry_point] = self.call
        self.guard()
        transformer = AssertTransformer()
        tree = ast.fix_missing_locations(transformer.visit(ast.parse(self.test)))
        self.n_statements = transformer.count
        exec(compile(tree, "tests", "exec", dont_inherit=True), namespace)
        check = namespace.get("check")
        if not callable(check):
            raise UnusableTests("the tests define no function check(candidate)")
        check(self.call)

    def guard(self) -> None:
        """Make the interpreter refuse to run code that may contain part of an answer.

        In the tests' process such code could make them pass. After an answer that may hold text,
        only three kinds of code run: code without any name (such as "1 + 1"), string literals of
        the tests themselves, and code that the standard library compiles for itself.
        """

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if (
                event not in CODE_EVENTS
                or not self.has_seen_text
                or is_compiled_by_library(sys._getframe(1))
            ):
                return
            code = arguments[0] if event in CODE_OBJECT_EVENTS else None
            if isinstance(code, types.CodeType) and (
                is_nameless(code) or code in compile_literals(self.test)
            ):
                return
            self.evaluated = (
                f"they evaluate what {self.entry_point} returned ({event}); compare "
                "its value instead"
            )
            raise AnswerEvaluated

        sys.addaudithook(hook)

    def call(self, *arguments: Any, **keywords: Any) -> Any:
        """Stand in for the judged function: return the answer, or look ahead without one."""
        try:
            text = json.dumps([encode(list(arguments)), encode(keywords)])
        except NotPlainError as error:
            if self.n_certain is not None:
                return self._look_ahead(None)
            raise UnusableTests(
                f"the tests pass a value of type {error} to {self.entry_point}; only plain values "
                "can travel"
            ) from None
        if self.n_certain is not None:
            return self._look_ahead(text)
        index = len(self.calls_made)
        if self.is_lost or (
            index < len(self.calls) and fill_in_answers(self.calls[index], self.answers) == text
        ):
            self.calls_made.append(text)
            if self.is_lost or index >= len(self.answers):
                self.break_index = self.break_index if self.is_lost else index
                self.is_lost = self.has_answered = True
                raise self._record_program_error(
                    ProgramError("the program ended without an answer")
                )
            return self._read_answer(self.answers[index])
        self.n_certain = index
        signal.signal(signal.SIGVTALRM, self._stop)
        signal.setitimer(signal.ITIMER_VIRTUAL, LOOKAHEAD_S)
        return self._look_ahead(text)

    def _look_ahead(self, text: str | None) -> Any:
        """Record a call without a known answer, or only count it if its arguments are unknown.

        The number of calls whose arguments contain awaited answers is limited, because a loop that
        only an answer ends would never stop during look-ahead. The limit about doubles with each
        round.
        """
        assert self.n_certain is not None
        n_foreseen = len(self.calls_made) - self.n_certain
        limit = (
            max(MIN_AWAITED_LIMIT, self.n_certain)
            if text is not None and AWAITED_MARK in text
            else MAX_CALLS
        )
        if text is None or self.n_unforeseen or n_foreseen >= limit:
            self.n_unforeseen += 1
            if self.has_answered or self.n_unforeseen > MAX_COUNTED:
                self._stop()
            return Anything()
        self.calls_made.append(text)
        return Awaited(len(self.calls_made) - 1)

    def _stop(self, *_: object) -> NoReturn:
        self.is_cut_off = True
        raise LookAheadEnd

    def _read_answer(self, line: str) -> Any:
        """Return, or raise, the answer in a line from the program, which may hold anything."""
        had_seen_text = self.has_seen_text
        self.has_answered = True
        self.has_seen_text = True
        try:
            answer = json.loads(line)
            if "raised" in answer:
                kinds, arguments = answer["raised"]
                error = rebuild_exception([str(kind) for kind in kinds], list(decode(arguments)))
            elif "opaque" in answer:
                error = ProgramError(
                    f"it returned a value of type {answer['opaque']}, which can't travel"
                )
            else:
                value = decode(answer["value"])
                self.has_seen_text = had_seen_text or not isinstance(
                    value, int | float | complex | None
                )
                return value
        except Exception as decode_error:
            error = ProgramError(f"its answer can't be read: {decode_error}")
        raise self._record_program_error(error)

    def _record_program_error(self, error: Exception) -> Exception:
        self.program_errors.append(error)
        return error

    def _is_tests_fault(self, error: BaseException) -> bool:
        """True if the tests are at fault: they lack a name or a module, or are broken source.

        After the first answer, the answer may have caused such an error, so it counts as wrong: no
        program may turn its reward of 0 into a failed attempt.
        """
        # During look-ahead only these count, because `Anything` does not cause them.
        missing_kinds = NameError | ModuleNotFoundError
        kinds = (
            missing_kinds
            if self.n_certain is not None
            else missing_kinds | SyntaxError | ImportError
        )
        is_broken_source = isinstance(error, kinds) and not isinstance(error, UnboundLocalError)
        return isinstance(error, UnusableTests) or (is_broken_source and not self.has_answered)

    def _count_broken(self, count: int) -> None:
        if not self.n_broken and not self.is_lost:
            self.break_index = max(0, len(self.calls_made) - 1)
        self.n_broken += count

    def record(self, statement: int, held: bool) -> None:
        """Record that assertion number `statement` of the tests' source held or failed."""
        held_by_position = self.verdicts.setdefault(statement, {})
        held_by_position[len(self.calls_made)] = (
            held_by_position.get(len(self.calls_made), True) and held
        )

    def record_broken(self, error: Exception, statement: int) -> bool:
        """Record a failed assertion. Return True if its error must end the tests."""
        self.record(statement, False)
        self._count_broken(1)
        return self._is_tests_fault(error) or not (self.share or self.n_certain is not None)


# Audit events that run or build code.
CODE_EVENTS = ("exec", "function.__new__", "code.__new__", "marshal.loads", "pickle.find_class")
# Events whose first argument is a code object.
CODE_OBJECT_EVENTS = ("exec", "function.__new__")
# Library files that compile source. They check the names that they put into it.
COMPILING_FILES = ("collections/__init__.py", "dataclasses.py")


def is_compiled_by_library(frame: types.FrameType | None) -> bool:
    """True if a module is being imported, or the standard library compiles code of its own."""
    if (
        frame is not None
        and frame.f_code.co_filename.startswith("/")
        and frame.f_code.co_filename.endswith(COMPILING_FILES)
    ):
        return True
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def compile_literals(source: str) -> Iterator[types.CodeType]:
    """Yield the code that the string literals in `source` compile to."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for mode in ("eval", "exec"):
                with contextlib.suppress(SyntaxError, ValueError):
                    yield compile(node.value, "<string>", mode, dont_inherit=True)


def is_nameless(code: types.CodeType) -> bool:
    """Return True if `code` has no variable, attribute or module: it only combines constants."""
    return not code.co_names and all(
        is_nameless(part) for part in code.co_consts if isinstance(part, types.CodeType)
    )


def rebuild_exception(kinds: list[str], arguments: list[Any]) -> Exception:
    """Return the exception that a program raised, as its nearest built-in class.

    An exception that ends a loop silently becomes a ProgramError, because it could make
    `all(map(candidate, ...))` true.
    """
    classes = [getattr(builtins, kind, None) for kind in kinds]
    nearest = next(
        (kind for kind in classes if isinstance(kind, type) and issubclass(kind, BaseException)),
        None,
    )
    loop_ending = (StopIteration, StopAsyncIteration)
    if (
        nearest is not None
        and issubclass(nearest, Exception)
        and not issubclass(nearest, loop_ending)
    ):
        # Some classes refuse arguments that others take.
        with contextlib.suppress(TypeError, ValueError):
            return nearest(*arguments)
    return ProgramError(f"{kinds[:1]}: {arguments}")
