"""Programs in C++ and Go: which language, what earns nothing, and what fails the attempt."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading

import pytest
from pydantic import ValidationError
from sandbox.test_attacks import need

from ratchet.config.resolve import resolve
from ratchet.errors import DataError
from ratchet.rewards.code.compiled import COMPILE_COMMANDS, PROBE_NUMBER, PROBES, Compiler
from ratchet.rewards.code.extract_program import find_language
from ratchet.rewards.code.reward import Code, CodeConfig
from ratchet.rewards.deadline import CURRENT_DEADLINE, ProgramRunner
from ratchet.sandbox import Isolation, Limits, Reason, Result, SandboxError
from ratchet.testing import answered
from ratchet.types import Failed, Message, Task

DOUBLE = [{"stdin": "21\n", "stdout": "42\n"}, {"stdin": "5", "stdout": "10"}]
TWICE = '#include <cstdio>\nint main() { int n; scanf("%d", &n); printf("%d", 2 * n); }'
HEAD = "#include <cstdio>\n#include <cstdlib>\n#include <unistd.h>\n"


def double(**meta):
    return Task("double", (Message("user", "Double it."),), meta={"tests": DOUBLE, **meta})


@pytest.fixture(scope="module")
def made():
    """`made(credit="share")`: the reward for C++ with these keys, closed at the end."""
    rewards = {}

    def make(**keys):
        need(Isolation.NAMESPACES)
        name = str(keys)
        if name not in rewards:
            rewards[name] = Code(CodeConfig(**{"language": "cpp", "timeout_s": 1, **keys}))
        return rewards[name]

    yield make
    for reward in rewards.values():
        reward.sandbox.close()


def judge(reward, text, task=None):
    task = double() if task is None else task
    return asyncio.run(reward.score([answered(task, text)], task))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "end"),
    [
        (TWICE, "passed"),
        (f"So:\n```cpp\n{TWICE}\n```\n```text\n42\n```", "passed"),
        (f"{HEAD}int main() {{ puts(\"42\"); }}", "wrong"),  # right for the first test alone
        ("int main() { return x; }", "crashed"),  # it does not compile
        ("print(int(input()) * 2)", "crashed"),
        ("", "crashed"),
        (f"{HEAD}int main() {{ abort(); }}", "crashed"),
        (f"{HEAD}int main() {{ char *volatile p = new char[1 << 30]; *p = 4; printf(\"42\"); }}", "crashed"),
        (f"{HEAD}int main() {{ for (;;); }}", "limit"),
        (f"{HEAD}int main() {{ for (;;) puts(\"42\"); }}", "limit"),
        (f"{HEAD}int main() {{ for (;;) fork(); }}", "limit"),
    ],
)  # fmt: skip
def test_a_program_in_cpp_is_compiled_and_run(made, program, end):
    outcome = judge(made(), program)
    assert outcome.reward == float(end == "passed")
    assert outcome.parts[end] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        'char data[1 << 25] = {1};\nint main() {}',  # an executable of 32 MiB
        "template <int n> struct A { A<n - 1> a; A<n - 2> b; int x[A<n - 3>().y]; };\nint main() { A<99> a; }",
        '#include "/dev/zero"\nint main() {}',
    ],
)  # fmt: skip
def test_a_compilation_has_limits_of_its_own(made, program):
    reward = made(compile_timeout_s=4, compile_memory_mib=400)
    outcome = judge(reward, program)
    assert outcome.reward == 0.0
    assert outcome.parts["limit"] + outcome.parts["crashed"] == 1.0


@pytest.mark.medium
def test_a_program_sees_neither_files_of_others_nor_the_network(made):
    program = f"""{HEAD}#include <sys/socket.h>
    int main() {{
        bool reads = fopen("/etc/passwd", "r") || fopen("kept", "r");
        bool reaches = socket(AF_INET, SOCK_STREAM, 0) >= 0;
        fputs("x", fopen("kept", "w"));
        printf("%d", reads || reaches ? 0 : 42);
    }}"""
    assert judge(made(credit="share"), program).reward == 0.5


@pytest.mark.medium
def test_a_missing_or_broken_compiler_fails_the_attempt(made):
    for command in ("no-such-compiler -O2", "true", "g++ --no-such-option"):
        outcome = judge(made(compilers={"cpp": command}), TWICE)
        assert isinstance(outcome, Failed)
        assert f"'{command}'" in outcome.detail
        assert "set compilers.cpp" in outcome.detail
    with pytest.raises(ValidationError, match=r"compilers\.cpp='' is no command"):
        resolve("rewards", {"kind": "code", "compilers": {"cpp": ""}})
    for keys, message in (
        ({"compilers": {"go": "go build"}}, "compilers is not read with language=python: set"),
        ({"compile_timeout_s": 9, "compile_memory_mib": 99}, "compile_memory_mib are not read"),
        (
            {"language": "cpp", "compilers": {"go": "gccgo"}},
            "compilers.go is not read with language",
        ),
    ):
        with pytest.raises(ValidationError, match=message):
            resolve("rewards", {"kind": "code", **keys})
    for language in ("cpp", "block", "column"):
        keys = {"language": language, "compilers": {"cpp": "clang++"}, "compile_timeout_s": 9}
        assert resolve("rewards", {"kind": "code", **keys}).compilers == {"cpp": "clang++"}


class CountedDeadline:
    seconds = 1.0
    n_pauses = 0

    @contextlib.contextmanager
    def paused(self):
        self.n_pauses += 1
        try:
            yield
        finally:
            self.n_pauses -= 1


def test_all_that_wait_for_a_compilers_check_pause_their_deadlines():
    deadlines = [CountedDeadline(), CountedDeadline()]
    seen = []

    class SandboxWithoutCompiler:
        async def run(self, program, stdin, limits):
            while len(callers) < 2:
                await asyncio.sleep(0)
            seen.append([deadline.n_pauses > 0 for deadline in deadlines])
            return Result(127, None, b"", b"sh: g++: not found", 0.1, Reason.EXIT)

    async def compile_with(compiler, deadline):
        CURRENT_DEADLINE.set(deadline)
        waiting = asyncio.ensure_future(
            compiler.compile(TWICE, "cpp", ProgramRunner(compiler.sandbox))
        )
        await asyncio.sleep(0)
        callers.append(deadline)
        await waiting

    async def scene():
        compiler = Compiler(SandboxWithoutCompiler(), COMPILE_COMMANDS, Limits(), Limits())
        calls = (compile_with(compiler, deadline) for deadline in deadlines)
        return await asyncio.gather(*calls, return_exceptions=True)

    callers = []
    assert [type(error) for error in asyncio.run(scene())] == [SandboxError] * 2
    assert seen == [[True, True]]
    assert [deadline.n_pauses for deadline in deadlines] == [0, 0]


def test_a_large_executable_does_not_hold_up_other_attempts(monkeypatch):
    threads = []

    class SandboxWithCompiler:
        async def run(self, program, stdin, limits):
            return Result(0, None, PROBE_NUMBER + b"==", b"", 0.1, Reason.EXIT)

    def compress(data, level):
        threads.append(threading.current_thread())
        return data

    monkeypatch.setattr("ratchet.rewards.code.compiled.zlib.compress", compress)
    sandbox = SandboxWithCompiler()
    compiler = Compiler(sandbox, COMPILE_COMMANDS, Limits(), Limits())
    program = asyncio.run(compiler._compile(TWICE, "cpp", ProgramRunner(sandbox)))
    assert program.runner is not None
    assert threads
    assert threading.main_thread() not in threads


def test_a_sandbox_without_processes_fails_the_attempt():
    reward = Code(CodeConfig.model_validate({"language": "cpp", "isolation": "seccomp"}))
    reward.sandbox.close()
    assert isinstance(judge(reward, TWICE), Failed)


@pytest.mark.medium
def test_go_is_run_where_it_is_installed_and_else_refused_by_name(made):
    reward = made(language="go")
    outcome = judge(reward, PROBES["go"].replace("Println(n)", "Println(2 * n)"))
    if shutil.which("go", path="/usr/local/go/bin:/usr/local/bin:/usr/bin"):
        assert outcome.reward == 1.0
        assert judge(reward, "package main\nfunc main() { x := 1 }").parts["crashed"] == 1.0
    else:
        assert isinstance(outcome, Failed)
        assert "go: not found" in outcome.detail
        assert "Install the compiler there, or set compilers.go" in outcome.detail


def test_a_language_that_blocks_may_not_have_earns_nothing_instead_of_failing(made):
    """A policy that marks its blocks so must not be spared the 0, where there is no compiler."""
    go, python = f"```go\n{PROBES['go']}\n```", "```python\nprint(int(input()) * 2)\n```"
    keys = {"language": "block", "compilers": {"go": "no-such-go build"}}
    allowed = made(block_languages=["python", "cpp"], **keys)
    assert judge(allowed, go).parts["crashed"] > 0
    assert judge(allowed, f"{python}\n{go}").reward == 1.0
    assert find_language("no block", "last", ["cpp", "go"]) == "cpp"
    with pytest.raises(ValidationError, match="block_languages is not read with language=cpp"):
        made(block_languages=["cpp"])


@pytest.mark.slow
def test_the_language_may_be_the_rows_or_the_answers(made):
    python = "```python\nprint(int(input()) * 2)\n```"
    marked = f"```c++\n{TWICE}\n```"
    column = made(language="column")
    assert judge(column, marked, double(language="C++")).reward == 1.0
    assert judge(column, python, double(language="python3")).reward == 1.0
    assert judge(column, python, double(language="cpp")).reward == 0.0
    for values in ({"language": "en"}, {}):
        outcome = judge(column, python, double(**values))
        assert isinstance(outcome, Failed)
        assert "must be one of python, cpp, go" in outcome.detail
    block = made(language="block")
    assert judge(block, f"{python}\n{marked}").reward == 1.0
    assert judge(block, f"{marked}\n{python}").reward == 1.0
    assert judge(block, "print(int(input()) * 2)").reward == 1.0
    assert find_language(f"{python}\n{marked}\n```sh\nls\n```", "last") == "cpp"
    assert find_language(f"{python}\n{marked}", "first") == "python"


@pytest.mark.medium
def test_tests_of_functions_are_of_python_alone(made):
    meta = {"prompt": "", "entry_point": "f", "test": "def check(c):\n    assert c(1) == 2"}
    task = Task("fun", (), meta=meta)
    assert judge(made(language="block"), "def f(x): return x + 1", task).reward == 1.0
    with pytest.raises(DataError, match="which are run in Python, and its language is cpp"):
        asyncio.run(made().grade("def f(x): return x + 1", task))
