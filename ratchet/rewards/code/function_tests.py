"""A function judged by tests that call it, as HumanEval's do (arXiv:2107.03374), tests and program
in separate sandboxes."""

from __future__ import annotations

import asyncio
import json
import marshal
from collections import OrderedDict
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ratchet.errors import DataError
from ratchet.rewards.code.eval_in_tests import evaluated_answer
from ratchet.sandbox import Limits, Reason, Result, Sandbox

MAX_ROUNDS = 128  # executions in which answers lead to calls that were not foreseen
MAX_PLANS = 1024  # tasks whose calls are remembered
TESTS_CPU_S, TESTS_OUTPUT_KIB = 10.0, 16384
LIMITED = (Reason.WALL, Reason.CPU, Reason.MEMORY, Reason.OUTPUT)


@dataclass(frozen=True)
class FunctionTask:
    """HumanEval's columns. `label` names the task in messages."""

    prompt: str
    entry_point: str
    test: str
    label: str


@dataclass(frozen=True)
class Verdict:
    """end: "passed", "wrong", "crashed" or "limit". held, broken: assertions that were reached."""

    end: str
    held: int = 0
    broken: int = 1


def _script(entry: str, *, compiled: bool) -> str:
    """`code_inside` with a call of `entry` at its end, compiled here once where the sandbox runs
    this very Python: 4 ms, as much as the rest of an execution. Nothing is ever read back."""
    source = f"{files('ratchet.rewards.code').joinpath('sandbox_program.py').read_text(encoding='utf-8')}\n\n{entry}()\n"
    if not compiled:
        return source
    code = compile(source, "ratchet", "exec", dont_inherit=True)
    return f"import marshal\nexec(marshal.loads({marshal.dumps(code)!r}))"


class FunctionJudge:
    """Runs the program on the calls that the tests make, then the tests on its answers, until the
    tests have an end."""

    def __init__(self, sandbox: Sandbox, limits: Limits, *, share: bool) -> None:
        self.sandbox, self.limits, self.share = sandbox, limits, share
        self._program, self._tests = (
            _script(entry, compiled=sandbox.same_python) for entry in ("program", "tests")
        )
        self._tests_limits = Limits(
            wall_s=6 * TESTS_CPU_S, cpu_s=TESTS_CPU_S, output_kib=TESTS_OUTPUT_KIB
        )
        self._plans: OrderedDict[FunctionTask, asyncio.Future[list[str]]] = OrderedDict()

    async def judge(self, text: str, task: FunctionTask) -> Verdict:
        """Raises DataError where the tests are broken whatever the program, SandboxError where the
        sandbox is."""
        calls, answers, sure = await self._plan(task), [], 0
        for _ in range(MAX_ROUNDS):
            result = await self._run(
                self._program, {**_program_columns(task), "text": text, "calls": calls}, self.limits
            )
            # Answers that the tests have already used stay, whatever the program says this time.
            answers = answers[:sure] + _lines(result)[sure : len(calls)]
            found = await self._try(task, calls, answers)
            if found is None:  # plain values that take the tests for ever, or all the memory
                return Verdict("limit")
            if found["end"] == "unknown":
                # The call after the sure ones follows from their answers, and was answered. Not
                # asked again, it was drawn.
                if found["sure"] <= sure:
                    raise DataError(
                        f"task '{task.label}': its tests call {task.entry_point} differently each "
                        "time. "
                        "Seed what they draw, and let them read no clock."
                    )
                calls, sure = found["calls"], found["sure"]
                continue
            end = found["end"]
            if end == "lost":
                end = "limit" if result.reason in LIMITED else "crashed"
            return Verdict(end, found["held"], found["broken"])
        return Verdict("limit")

    async def _plan(self, task: FunctionTask) -> list[str]:
        """The calls that the tests seem to make. The attempts of a group ask at once, and one of
        them finds out."""
        plan = self._plans.get(task)
        if (
            plan is None
            or plan.get_loop() is not asyncio.get_running_loop()
            or plan.cancelled()
            or _failed(plan)
        ):
            plan = asyncio.ensure_future(self._foresee(task))
            self._plans[task] = plan
            while len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
        return await asyncio.shield(plan)

    async def _foresee(self, task: FunctionTask) -> list[str]:
        if evaluation := evaluated_answer(task.test, task.entry_point):
            raise DataError(
                f"task '{task.label}': its tests evaluate what {task.entry_point} returned: "
                f"{evaluation}. "
                "Compare the value instead, as a program could make such tests pass."
            )
        found = await self._try(task, [], [])
        if found is None:
            raise DataError(
                f"task '{task.label}': its tests ended before their first verdict, or ran out of "
                "time or memory"
            )
        if found["end"] != "unknown":
            why = found["why"] or "they end without calling it"
            raise DataError(f"task '{task.label}': its tests can't judge {task.entry_point}: {why}")
        return found["calls"]

    async def _try(
        self, task: FunctionTask, calls: list[str], answers: list[str]
    ) -> dict[str, Any] | None:
        """What `Judge.run` says; None where the tests did not come to an end."""
        request = {
            **_program_columns(task),
            "test": task.test,
            "calls": calls,
            "answers": answers,
            "share": self.share,
        }
        result = await self._run(self._tests, request, self._tests_limits)
        if not result.ok or not result.stdout:
            return None
        found = json.loads(result.stdout)
        if found["end"] == "unusable":
            raise DataError(
                f"task '{task.label}': its tests can't judge {task.entry_point}: {found['why']}"
            )
        return found

    async def _run(self, script: str, request: dict[str, Any], limits: Limits) -> Result:
        return await self.sandbox.run(script, json.dumps(request).encode("ascii"), limits)


def _program_columns(task: FunctionTask) -> dict[str, str]:
    return {"prompt": task.prompt, "entry_point": task.entry_point}


def _lines(result: Result) -> list[str]:
    """Complete lines only: what was cut off is no answer."""
    return [line.decode("utf-8", "replace") for line in result.stdout.split(b"\n")[:-1]]


def _failed(plan: asyncio.Future[list[str]]) -> bool:
    return plan.done() and plan.exception() is not None
