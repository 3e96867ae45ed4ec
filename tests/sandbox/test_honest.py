"""What a decent program may expect: it behaves as under `python main.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from ratchet.sandbox import Isolation, Limits, LocalSandbox, Reason, Result, output_matches
from ratchet.sandbox.fork_server_client import ENVIRONMENT

PATIENT = Limits(wall_s=60, cpu_s=30)


@pytest.fixture(scope="module", params=["strongest", "landlock"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[LocalSandbox]:
    at_most = Isolation.NAMESPACES if request.param == "strongest" else Isolation.LANDLOCK
    sandbox = LocalSandbox(slots=1, at_most=at_most)
    yield sandbox
    sandbox.close()


def run(
    sandbox: LocalSandbox, program: str | list[str], stdin: bytes = b"", limits: Limits = PATIENT
) -> Result:
    return asyncio.run(sandbox.run(program, stdin, limits))


HONEST = {
    "input and print": ("print(int(input()) * 2)", b"21\n", "42"),
    "all of stdin": ("import sys; print(sum(map(int, sys.stdin)))", b"1\n2\n3\n", "6"),
    "bytes": (
        "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])",
        b"\xff\x00a",
        b"a\x00\xff",
    ),
    "unicode": ("print(input().upper())", "grüße ☃\n".encode(), "GRÜSSE ☃"),
    "main guard": ("if __name__ == '__main__': print('main')", b"", "main"),
    "classes": (
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nprint(A(1))",
        b"",
        "A(x=1)",
    ),
    "pickling": (
        "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
        b"",
        "True",
    ),
    "late imports": ("import sqlite3, zlib, ssl, xml.etree, decimal, bz2; print('ok')", b"", "ok"),
    "deep recursion": (
        "import resource, sys\nsys.setrecursionlimit(10**5)\n"
        "resource.setrlimit(resource.RLIMIT_STACK, (2**29, resource.RLIM_INFINITY))\n"
        "def f(n): return n and 1 + f(n - 1)\nprint(f(50000))",
        b"",
        "50000",
    ),
    "threads": (
        "import threading\nout = []\nts = [threading.Thread(target=out.append, args=(i,)) for i in "
        "range(8)]\n"
        "[t.start() for t in ts]; [t.join() for t in ts]\nprint(sorted(out))",
        b"",
        "[0, 1, 2, 3, 4, 5, 6, 7]",
    ),
    "a thread that outlives main": (
        "import threading\nthreading.Timer(0.01, print, ('late',)).start()",
        b"",
        "late",
    ),
    "exit handlers": (
        "import atexit\natexit.register(print, 'bye')\nprint('hello')",
        b"",
        "hello\nbye",
    ),
    "asyncio": (
        "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return "
        "3\nprint(asyncio.run(f()))",
        b"",
        "3",
    ),
    "executors": (
        "from concurrent.futures import *\nwith ThreadPoolExecutor(2) as e: print(list(e.map(abs, "
        "[-1, 2])))",
        b"",
        "[1, 2]",
    ),
    "alarms": (
        "import signal\nsignal.signal(signal.SIGALRM, lambda *a: "
        "print('rang'))\nsignal.setitimer(0, .01)\nsignal.pause()",
        b"",
        "rang",
    ),
    "signals to itself": (
        "import os, signal\nsignal.signal(10, lambda *a: print('got'))\nos.kill(os.getpid(), 10)",
        b"",
        "got",
    ),
    "exit with zero": ("print('done'); exit(0)", b"", "done"),
    "handled errors": (
        "try: 1 / 0\nexcept ZeroDivisionError as e: print(e)",
        b"",
        "division by zero",
    ),
    "source of itself": (
        "import inspect\ndef f(): return 1\nprint(inspect.getsource(f))",
        b"",
        "def f(): return 1",
    ),
    "null device": ("import os\nprint('x', file=open(os.devnull, 'w')); print('ok')", b"", "ok"),
    "windows line ends": ("print(1)\r\nprint(2)\r\n", b"", "1\n2"),
    "time": (
        "import time, datetime; print(time.time() > 1e9, datetime.datetime.now().year > 2000)",
        b"",
        "True True",
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_pass(sandbox: LocalSandbox, name: str) -> None:
    source, stdin, expected = HONEST[name]
    result = run(sandbox, source, stdin)
    assert output_matches(result, expected), result


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("", 0),
        ("import sys; sys.exit(3)", 3),
        ("raise SystemExit", 0),
        ("exit('so long')", 1),
        ("1 / 0", 1),
        ("import os; os._exit(7)", 7),
    ],
)
def test_exit_codes_are_those_of_python(sandbox: LocalSandbox, source: str, code: int) -> None:
    result = run(sandbox, source)
    assert (result.exit, result.signal, result.reason, result.ok) == (
        code,
        None,
        Reason.EXIT,
        code == 0,
    )


def test_an_exception_shows_its_traceback_with_the_source_and_without_the_sandbox(
    sandbox: LocalSandbox,
) -> None:
    result = run(sandbox, "def f(x):\n    return 1 / x\nprint('before')\nf(0)\n")
    assert result.stdout == b"before\n"
    lines = result.stderr.decode().splitlines()
    assert "           ~~^~~" in lines
    # Python 3.13 marks the call too.
    assert [line for line in lines if line.strip(" ~^")] == [
        "Traceback (most recent call last):",
        '  File "main.py", line 4, in <module>',
        "    f(0)",
        '  File "main.py", line 2, in f',
        "    return 1 / x",
        "ZeroDivisionError: division by zero",
    ]


def test_a_syntax_error_shows_where(sandbox: LocalSandbox) -> None:
    result = run(sandbox, "x = 1\nif x\n    pass")
    assert result.exit == 1
    assert result.stderr.decode().splitlines() == [
        '  File "main.py", line 2',
        "    if x",
        "        ^",
        "SyntaxError: expected ':'",
    ]


def test_a_segmentation_fault_is_told_by_its_signal(sandbox: LocalSandbox) -> None:
    result = run(sandbox, "import ctypes; ctypes.string_at(0)")
    assert (result.exit, result.signal, result.reason) == (None, 11, Reason.SIGNAL)


def test_the_environment_is_fixed(sandbox: LocalSandbox) -> None:
    result = run(sandbox, f"import os, sys; print(dict(os.environ) == {ENVIRONMENT!r}, sys.argv)")
    assert result.stdout == b"True ['main.py']\n"


def test_executions_share_no_state_and_no_secrets(sandbox: LocalSandbox) -> None:
    leave = (
        "import os, sys, builtins, json\nprint(hasattr(builtins, 'left'), hasattr(json, "
        "'left'), os.urandom(8))\n"
    )
    leave += "builtins.left = json.left = 1\ntry: open('left', 'x')\nexcept PermissionError: pass"
    first, second = run(sandbox, leave), run(sandbox, leave)
    assert first.ok
    assert second.ok
    assert first.stdout.startswith(b"False False")
    assert second.stdout.startswith(b"False False")
    assert first.stdout != second.stdout


@pytest.mark.medium
def test_limits_say_which_of_them_stopped_a_program(sandbox: LocalSandbox) -> None:
    def reason(source: str, limits: Limits) -> Reason:
        return run(sandbox, source, b"", limits).reason

    assert reason("while True: pass", Limits(wall_s=0.2)) is Reason.WALL
    assert reason("while True: pass", Limits(wall_s=60, cpu_s=1)) is Reason.CPU
    assert reason("while True: print('x')", Limits(wall_s=60, output_kib=4)) is Reason.OUTPUT


@pytest.mark.fault("R8")
def test_output_is_cut_at_its_limit_and_none_is_lost_below(sandbox: LocalSandbox) -> None:
    below = run(sandbox, "print('x' * 70000, end='')", b"", Limits(wall_s=60, output_kib=128))
    above = run(sandbox, "print('x' * 200000, end='')", b"", Limits(wall_s=60, output_kib=128))
    assert (below.reason, len(below.stdout)) == (Reason.EXIT, 70000)
    assert (above.reason, len(above.stdout), above.exit) == (Reason.OUTPUT, 128 << 10, None)


def test_a_scratch_directory_is_there_with_namespaces_and_nothing_is_writable_without(
    sandbox: LocalSandbox,
) -> None:
    source = (
        "open('a', 'w').write('1')\nimport os, tempfile\nprint(os.listdir('.'), "
        "tempfile.gettempdir())"
    )
    if sandbox.isolation is Isolation.NAMESPACES:
        assert run(sandbox, source).stdout == b"['a'] /tmp\n"
        assert run(sandbox, "import os; print(os.listdir('.'))").stdout == b"[]\n"
    else:
        assert b"PermissionError" in run(sandbox, source).stderr
