"""Judge a function by tests that call it, such as HumanEval's (arXiv:2107.03374).

Tests and program run in separate sandboxes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import marshal
from collections import OrderedDict
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from ratchet.errors import DataError
from ratchet.rewards.code.eval_in_tests import find_evaluated_answer
from ratchet.rewards.code.plain_values import AWAITED_MARK
from ratchet.rewards.deadline import ProgramRunner, can_share, wait_for_shared
from ratchet.sandbox import Limits, Reason, Result, Sandbox

log = logging.getLogger(__name__)

MAX_ROUNDS = 512  # maximum number of rounds: each runs the program, then the tests
# Maximum number of answered calls whose arguments come from earlier answers.
MAX_FOLLOW_UP_CALLS = 5000
# Maximum wall time of the program in all rounds, as a multiple of one execution's limit; also that
# of the tests, which a program's answers can make slow.
MAX_WALL_MULTIPLE = 30
MAX_PLANS = 1024  # maximum number of tasks whose calls are remembered
TESTS_CPU_S, TESTS_OUTPUT_KIB = 10.0, 16384
LIMIT_REASONS = (Reason.WALL, Reason.CPU, Reason.MEMORY, Reason.OUTPUT)


@dataclass(frozen=True)
class FunctionTask:
    """A task in HumanEval's columns."""

    prompt: str
    entry_point: str
    test: str
    label: str
    """The task's name in messages."""
    judges_text: bool = False
    """True if the tests judge the answer's text, which the function returns."""
    functions: tuple[str, ...] = ()
    """Names of several functions that the tests call; `entry_point` is then the function that calls
    one of them by its name."""


@dataclass(frozen=True)
class CodeVerdict:
    """The verdict of the tests on a function."""

    end: str
    """"passed", "wrong", "crashed" or "limit"."""
    n_passed: float = 0
    """Number of assertions that passed; see `AssertionJudge._compute_shares`."""
    n_broken: float = 1
    """Number of assertions that failed."""
    call: str = ""
    """The call after which the first assertion failed, as text; "" if none is known."""


@dataclass(frozen=True)
class CallPlan:
    """The calls that tests are likely to make."""

    calls: list[str]
    """The calls as text."""
    n_ahead: int | None
    """Number of calls that the tests make when no answer is known; None if they did not come to
    their end without answers."""


@dataclass(frozen=True)
class CallExplanation:
    """The result of one call, which may be shown to the policy."""

    call: str
    """The call in Python syntax; "" if it isn't known."""
    returned: str | None
    """The returned value in Python syntax; None if there is none."""
    result: Result
    """The result, without its stdout, of a process that received only this call."""


def _build_script(module: str, entry: str, *, compiled: bool) -> str:
    """Return a script that creates the modules `plain_values` and `module`, and calls `entry`.

    Args:
        compiled: True to compile both modules in this process, for a sandbox with the same version
            of Python. That saves 4 ms, as much as the rest of an execution takes. No compiled code
            is ever read back from the sandbox.
    """
    lines = ["import marshal, sys, types"]
    names = {part: f"ratchet.rewards.code.{part}" for part in ("plain_values", module)}
    for part, name in names.items():
        source = files("ratchet.rewards.code").joinpath(f"{part}.py").read_text(encoding="utf-8")
        code = f"compile({source!r}, 'ratchet', 'exec')"
        if compiled:
            compiled_source = marshal.dumps(compile(source, "ratchet", "exec", dont_inherit=True))
            code = f"marshal.loads({compiled_source!r})"
        lines.append(f"sys.modules[{name!r}] = types.ModuleType({name!r})")
        lines.append(f"exec({code}, sys.modules[{name!r}].__dict__)")
    return "\n".join([*lines, f"sys.modules[{names[module]!r}].{entry}()\n"])


class FunctionJudge:
    """A judge of functions.

    In each round it runs the program on the tests' calls, then the tests on the program's answers,
    until the tests end.

    Args:
        share: True to continue the tests after a failed assertion.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits, *, share: bool) -> None:
        self.sandbox = sandbox
        self.limits = limits
        self.share = share
        is_same_python = sandbox.has_same_python
        self._answer_script, self._explain_script = (
            _build_script("program_runner", entry, compiled=is_same_python)
            for entry in ("answer_calls", "explain")
        )
        self._tests_script = _build_script("sandbox_program", "run_tests", compiled=is_same_python)
        self._tests_limits = Limits(
            wall_s=6 * TESTS_CPU_S, cpu_s=TESTS_CPU_S, output_kib=TESTS_OUTPUT_KIB
        )
        self._plans: OrderedDict[FunctionTask, asyncio.Future[CallPlan]] = OrderedDict()
        self._warned_tasks: set[str] = set()

    async def judge(self, text: str, task: FunctionTask) -> CodeVerdict:
        """Return the tests' verdict on a program.

        Raises DataError if the tests can judge no program, SandboxError if the sandbox failed.
        """
        plan = await self._get_plan(task)
        calls = plan.calls
        answers = []
        n_certain = 0
        n_follow_up_calls = 0
        runner, tests_runner = (
            ProgramRunner(self.sandbox, MAX_WALL_MULTIPLE * self.limits.wall_s) for _ in range(2)
        )
        for _ in range(MAX_ROUNDS):
            request = {**_get_program_columns(task), "text": text, "calls": calls}
            result = await runner.run(self._answer_script, _encode_request(request), self.limits)
            # Answers that the tests have already used stay, whatever the program returns this time.
            answers = answers[:n_certain] + _get_complete_lines(result)[n_certain : len(calls)]
            outcome = await self._run_tests(task, calls, answers, tests_runner)
            # These answers made the tests run out of time or memory.
            if outcome is None:
                return CodeVerdict("limit")
            if outcome["end"] == "unknown":
                # Each round makes at least one more call certain: the first call after the certain
                # ones depends on their answers alone, and this round answered it. If the tests did
                # not make it again, they draw their calls at random.
                if outcome["n_certain"] <= n_certain:
                    raise DataError(
                        f"task '{task.label}': its tests call {task.entry_point} differently each "
                        "time. Seed their random numbers, and let them read no clock."
                    )
                n_follow_up_calls += sum(
                    AWAITED_MARK in call for call in calls[n_certain : outcome["n_certain"]]
                )
                calls, n_certain = outcome["calls"], outcome["n_certain"]
                if runner.has_expired or tests_runner.has_expired:
                    return CodeVerdict("limit")
                if n_follow_up_calls > MAX_FOLLOW_UP_CALLS:
                    break
                continue
            end = outcome["end"]
            if end == "lost":
                end = "limit" if result.reason in LIMIT_REASONS else "crashed"
            return CodeVerdict(end, outcome["held"], outcome["broken"], outcome["call"])
        return self._judge_endless_calls(task, plan)

    def _judge_endless_calls(self, task: FunctionTask, plan: CallPlan) -> CodeVerdict:
        """Return the verdict on a program whose answers led to ever more calls.

        Raises DataError if the tests make that many calls whatever the program answers. Otherwise
        the program's answers keep a loop of the tests running, and an error would spare the program
        the reward of 0.
        """
        limit = (
            f"too many calls that follow from each other's answers ({MAX_ROUNDS} rounds, or "
            f"{MAX_FOLLOW_UP_CALLS} calls)"
        )
        if plan.n_ahead is not None and plan.n_ahead > MAX_ROUNDS:
            raise DataError(f"task '{task.label}': its tests make {limit}. Let them make fewer.")
        if task.label not in self._warned_tasks:
            self._warned_tasks.add(task.label)
            log.warning(
                "task '%s': answers of a program led its tests to make %s. The program earns 0, as "
                "if it ran out of time. Let the tests make fewer, if a correct program may need as "
                "many.",
                task.label,
                limit,
            )
        return CodeVerdict("limit")

    async def explain(self, text: str, task: FunctionTask, call: str) -> CallExplanation:
        """Run the program on this one call, in a process that never sees a test."""
        request = {**_get_program_columns(task), "text": text, "call": call}
        result = await ProgramRunner(self.sandbox).run(
            self._explain_script, _encode_request(request), self.limits
        )
        lines = [_decode_text(line) for line in _get_complete_lines(result)[:2]]
        return CallExplanation(
            lines[0] if lines else "",
            lines[1] if len(lines) > 1 else None,
            replace(result, stdout=b""),
        )

    async def _get_plan(self, task: FunctionTask) -> CallPlan:
        """Return the calls that the tests are likely to make.

        The first attempt of a group computes them, and the other attempts share them.
        """
        plan = self._plans.get(task)
        if not can_share(plan):
            plan = asyncio.ensure_future(self._make_plan(task))
            self._plans[task] = plan
            while len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
        return await wait_for_shared(plan)

    async def _make_plan(self, task: FunctionTask) -> CallPlan:
        if evaluation := find_evaluated_answer(task.test, task.entry_point):
            raise DataError(
                f"task '{task.label}': its tests evaluate what {task.entry_point} returned: "
                f"{evaluation}. Compare the value instead, because a program could make such tests "
                "pass."
            )
        outcome = await self._run_tests(task, [], [], ProgramRunner(self.sandbox))
        if outcome is None:
            raise DataError(
                f"task '{task.label}': its tests ended before their first verdict, or ran out of "
                "time or memory"
            )
        if outcome["end"] != "unknown":
            reason = outcome["why"] or "they end without calling it"
            raise DataError(
                f"task '{task.label}': its tests can't judge {task.entry_point}: {reason}"
            )
        return CallPlan(outcome["calls"], outcome["n_ahead"])

    async def _run_tests(
        self, task: FunctionTask, calls: list[str], answers: list[str], runner: ProgramRunner
    ) -> dict[str, Any] | None:
        """Return the result of `AssertionJudge.run`; None if the tests did not end."""
        request = {
            **_get_program_columns(task),
            "test": task.test,
            "calls": calls,
            "answers": answers,
            "share": self.share,
        }
        result = await runner.run(self._tests_script, _encode_request(request), self._tests_limits)
        if not result.ok or not result.stdout:
            return None
        outcome = json.loads(result.stdout)
        if outcome["end"] == "unusable":
            raise DataError(
                f"task '{task.label}': its tests can't judge {task.entry_point}: {outcome['why']}"
            )
        return outcome


def _encode_request(request: dict[str, Any]) -> bytes:
    return json.dumps(request).encode("ascii")


def _get_program_columns(task: FunctionTask) -> dict[str, str]:
    return {"prompt": task.prompt, "entry_point": task.entry_point}


def _get_complete_lines(result: Result) -> list[str]:
    """Return the complete lines of stdout: a line that was cut off is not an answer."""
    return [line.decode("utf-8", "replace") for line in result.stdout.split(b"\n")[:-1]]


def _decode_text(line: str) -> str:
    """Return the text in a line of JSON, or "" if there is none: the program may write anything."""
    try:
        text = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    return text if isinstance(text, str) else ""
