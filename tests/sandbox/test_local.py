"""The pool: levels and refusals, commands, many callers, and ends of every kind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sandbox.corpus import descendants, open_files
from sandbox.test_attacks import need

from ratchet.sandbox import Isolation, Limits, LocalSandbox, Reason, Result, Sandbox, SandboxError
from ratchet.sandbox.base import Strength
from ratchet.sandbox.inside import launch, rootfs, seccomp, zygote

T = TypeVar("T")
HERE = Path(__file__).resolve().parent
PATIENT = Limits(wall_s=60, cpu_s=30)
COMMANDS = Limits(wall_s=60, cpu_s=30, processes=16)
FOR_EVER = Limits(wall_s=1000, cpu_s=1000)


@pytest.fixture
def sandbox() -> Iterator[LocalSandbox]:
    sandbox = LocalSandbox(slots=1)
    yield sandbox
    sandbox.close()


def soon(work: Coroutine[Any, Any, T]) -> T:
    """A test that waits for what never comes must fail, not hang."""
    return asyncio.run(asyncio.wait_for(work, 60))


def run(
    sandbox: Sandbox, program: str | list[str], stdin: bytes = b"", limits: Limits = PATIENT
) -> Result:
    return asyncio.run(sandbox.run(program, stdin, limits))


@pytest.mark.medium
@pytest.mark.fault("S12")
def test_weaker_than_declared_is_refused_with_the_level_the_reason_and_the_fix() -> None:
    before = descendants(os.getpid())
    with pytest.raises(
        SandboxError,
        match=r"by seccomp only, weaker than the declared landlock.*at_least=Isolation\.SECCOMP",
    ):
        LocalSandbox(at_most=Isolation.SECCOMP)
    with pytest.raises(
        SandboxError, match=r"by landlock only, weaker than the declared namespaces"
    ):
        LocalSandbox(at_least=Isolation.NAMESPACES, at_most=Isolation.LANDLOCK)
    assert descendants(os.getpid()) == before


@pytest.mark.medium
def test_the_level_and_its_mechanisms_are_named(sandbox: LocalSandbox) -> None:
    assert sandbox.isolation >= Isolation.LANDLOCK
    assert {"seccomp", "resource limits", "no capabilities"} <= set(sandbox.strength.mechanisms)
    weaker = LocalSandbox(slots=1, at_least=Isolation.SECCOMP, at_most=Isolation.SECCOMP)
    weaker.close()
    assert weaker.isolation is Isolation.SECCOMP
    assert not any("Landlock" in name for name in weaker.strength.mechanisms)


def test_an_interpreter_that_cannot_start_is_refused_with_its_own_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(SandboxError, match="could not start the sandbox's interpreter"):
        LocalSandbox()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SandboxError, match="no sandbox on this machine"):
        LocalSandbox()


@pytest.mark.parametrize(
    "limits",
    [
        {"wall_s": 0},
        {"wall_s": True},
        {"cpu_s": -1},
        {"wall_s": float("nan")},
        {"memory_mib": 8},
        {"processes": 0},
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(SandboxError, match=f"Limits.{next(iter(limits))}"):
        Limits(**limits)  # type: ignore[arg-type]


@pytest.mark.medium
def test_commands_run_where_there_are_namespaces(sandbox: LocalSandbox) -> None:
    need(Isolation.NAMESPACES)
    assert (
        run(sandbox, ["sh", "-c", "tr a-z A-Z | rev; exit 3"], b"abc\n", COMMANDS).stdout
        == b"CBA\n"
    )
    assert run(sandbox, ["sh", "-c", "exit 3"], b"", COMMANDS).exit == 3
    assert b"PATH=/usr/local/sbin:" in run(sandbox, ["env"], b"", COMMANDS).stdout
    missing = run(sandbox, ["no-such-command"], b"", COMMANDS)
    assert (missing.exit, missing.stderr) == (127, b"no-such-command: No such file or directory\n")
    piped = run(
        sandbox,
        "import subprocess as s\nprint(s.run(['wc', '-c'], input=b'abc', "
        "capture_output=True).stdout)",
        b"",
        COMMANDS,
    )
    assert piped.stdout == b"b'3\\n'\n"


@pytest.mark.medium
def test_files_are_executed_where_the_limits_allow_it(sandbox: LocalSandbox) -> None:
    need(Isolation.NAMESPACES)
    copied = "import os, shutil\nshutil.copy('/bin/echo', 'e')\nos.execv('./e', ['e', 'hello'])"
    assert run(sandbox, copied, b"", replace(COMMANDS, executable=True)).stdout == b"hello\n"
    assert b"Permission denied" in run(sandbox, copied, b"", COMMANDS).stderr
    with pytest.raises(SandboxError, match=r"needs Limits\.processes above 1"):
        Limits(executable=True)


def test_commands_and_processes_are_refused_where_nobody_could_end_them_all() -> None:
    sandbox = LocalSandbox(slots=1, at_most=Isolation.LANDLOCK)
    with pytest.raises(SandboxError, match="need namespaces"):
        run(sandbox, ["true"])
    with pytest.raises(SandboxError, match="need namespaces"):
        run(sandbox, "pass", b"", COMMANDS)
    assert run(sandbox, "pass").ok  # and the fork server is none the worse
    sandbox.close()


@pytest.mark.medium
def test_memory_of_all_processes_together_is_bounded(sandbox: LocalSandbox) -> None:
    need(Isolation.NAMESPACES)
    hungry = (
        "import os, time\nfor _ in range(4):\n    if os.fork() == 0: break\nx = b'x' * (60 "
        "<< "
        "20)\ntime.sleep(1000)"
    )
    result = run(sandbox, hungry, b"", Limits(wall_s=60, cpu_s=30, memory_mib=128, processes=8))
    assert (result.reason, result.exit, result.signal) == (Reason.MEMORY, None, None)


def test_a_project_below_usr_is_hidden_from_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of its tasks lie there, as in images whose working directory is /usr/src/app."""
    need(Isolation.NAMESPACES)
    share = Path("/usr/share")
    project = next(
        (
            path
            for path in share.iterdir()
            if path.is_dir() and not path.is_symlink() and any(path.iterdir())
        ),
        None,
    )
    if project is None:
        pytest.skip("no directory below /usr to stand for a project")
    monkeypatch.chdir(project)
    listing = ["ls", "-A", str(project), "/usr/src", "/usr/local/src"]
    sandbox = LocalSandbox(slots=1)
    try:
        listed, shared = (run(sandbox, words) for words in (listing, ["ls", str(share)]))
    finally:
        sandbox.close()
    names = [line for line in listed.stdout.decode().split("\n") if line and line[0] != "/"]
    assert names == []
    assert project.name in shared.stdout.decode().split()


def test_what_the_system_or_python_needs_is_not_hidden() -> None:
    def hide(directory: str, *readable: str) -> list[str]:
        found = launch.list_hidden_paths(directory, ["/usr", sys.base_prefix], readable)
        return [path for path in found if path not in rootfs.SOURCE_PATHS]

    lib = sysconfig.get_path("stdlib")
    for needed in ("/usr", "/usr/bin", "/usr/local", sys.base_prefix, str(Path(lib).parent)):
        assert hide(needed) == []
    assert hide("/no/such/place") == hide("") == hide("/") == hide("/usr/src/app") == []
    assert hide("/usr/share/doc", "/usr/share/doc/python") == []


def test_processes_that_end_while_they_are_measured_leave_no_open_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fork server that kept them ran out of descriptors, and no program could start."""

    def read(file: int, size: int) -> bytes:
        raise ProcessLookupError

    proc = os.open("/proc", os.O_RDONLY)
    try:
        before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "read", read)
            assert zygote.measure_resident_kib(proc, ["self", "1"]) == 0
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        os.close(proc)


def test_readable_directories_can_be_read_and_imported_from_but_not_written(tmp_path: Path) -> None:
    tmp_path.joinpath("helper.py").write_text("ANSWER = 42")
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/tmp") and os.access(folder, os.W_OK) and folder.is_relative_to("/tmp"):
            folder.chmod(0o755)
    sandbox = LocalSandbox(slots=1, readable=[str(tmp_path)])
    assert run(sandbox, "import helper; print(helper.ANSWER)").stdout == b"42\n"
    assert not run(sandbox, f"open({str(tmp_path / 'new')!r}, 'w')").ok
    sandbox.close()
    assert os.listdir(tmp_path) == ["helper.py"]


@pytest.mark.medium
def test_many_callers_from_several_event_loops_get_their_own_answers() -> None:
    sandbox = LocalSandbox(slots=2)

    async def several(first: int) -> list[bytes]:
        runs = [
            sandbox.run("print(int(input()) ** 2)", str(n).encode(), PATIENT)
            for n in range(first, first + 10)
        ]
        return [result.stdout for result in await asyncio.gather(*runs)]

    for first in (0, 10):
        assert asyncio.run(several(first)) == [b"%d\n" % n**2 for n in range(first, first + 10)]
    sandbox.close()


@pytest.mark.medium
def test_large_programs_and_inputs_arrive_whole(sandbox: LocalSandbox) -> None:
    source = (
        "x = '" + "y" * 3_000_000 + "'\nimport sys\nprint(len(x), len(sys.stdin.buffer.read()))"
    )
    assert run(sandbox, source, b"z" * 5_000_000).stdout == b"3000000 5000000\n"


def test_a_cancelled_caller_stops_its_program_and_frees_the_slot(sandbox: LocalSandbox) -> None:
    async def main() -> Result:
        spinning = asyncio.ensure_future(sandbox.run("while True: pass", b"", FOR_EVER))
        while len(descendants(os.getpid())) == idle:
            await asyncio.sleep(0.001)
        spinning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await spinning
        return await sandbox.run("print('next')", b"", PATIENT)

    idle = len(descendants(os.getpid()))
    assert soon(main()).stdout == b"next\n"


@pytest.mark.medium
def test_a_fork_server_that_dies_is_replaced_and_the_program_runs_again(
    sandbox: LocalSandbox,
) -> None:
    assert run(sandbox, "pass").ok
    for pid in descendants(os.getpid()):
        os.kill(pid, signal.SIGKILL)
    assert run(sandbox, "print('again')").stdout == b"again\n"


def test_a_fork_server_that_dies_in_the_middle_is_no_verdict_on_the_program(
    sandbox: LocalSandbox,
) -> None:
    async def main() -> None:
        running = asyncio.ensure_future(sandbox.run("while True: pass", b"", FOR_EVER))
        while not running.done():  # the first try and the second one, whatever they are at
            for pid in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.01)
        with pytest.raises(SandboxError):
            await running

    soon(main())


def is_confined(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "Seccomp:\t2" in Path(f"/proc/{pid}/status").read_text()
    return False


@pytest.mark.medium
@pytest.mark.fault("R20")
def test_a_program_killed_from_outside_is_not_judged(sandbox: LocalSandbox) -> None:
    """The kernel does that where memory runs out, and to programs first."""

    async def main() -> None:
        assert (await sandbox.run("pass", b"", PATIENT)).ok
        idle = set(descendants(os.getpid()))
        running = asyncio.ensure_future(sandbox.run("while True: pass", b"", FOR_EVER))
        while not running.done():
            for pid in filter(is_confined, set(descendants(os.getpid())) - idle):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.001)
        # The second is said if the supervisor has not yet heard that the program is confined.
        with pytest.raises(SandboxError, match=r"killed from outside|died before it was confined"):
            await running

    soon(main())


@pytest.mark.parametrize("send", ["os.kill(os.getpid(), 9)", "signal.raise_signal(9)"])
def test_a_program_that_kills_itself_is_judged(send: str, sandbox: LocalSandbox) -> None:
    result = run(sandbox, f"import os, signal\n{send}")
    assert (result.reason, result.ok) == (Reason.SIGNAL, False)


@pytest.mark.fault("R20")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_to_a_whole_service_end_no_program(
    number: signal.Signals, sandbox: LocalSandbox
) -> None:
    program = f"""
import os, signal
os.kill(os.getpid(), {int(number)})
signal.signal({int(number)}, lambda *_: print("handled"))
os.kill(os.getpid(), {int(number)})
"""
    assert run(sandbox, program).stdout == b"handled\n"


@pytest.mark.medium
def test_closing_in_the_middle_is_no_verdict_and_leaves_no_process() -> None:
    before, files = descendants(os.getpid()), open_files()
    sandbox = LocalSandbox(slots=2)

    async def main() -> list[BaseException | Result]:
        idle = len(descendants(os.getpid()).keys() - before.keys())
        running = [
            asyncio.ensure_future(sandbox.run("while True: pass", b"", FOR_EVER)) for _ in range(2)
        ]
        while len(descendants(os.getpid()).keys() - before.keys()) < 2 * idle - 1:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(sandbox.close)
        return await asyncio.gather(*running, return_exceptions=True)

    assert all(isinstance(end, SandboxError) for end in soon(main()))
    assert descendants(os.getpid()) == before
    assert open_files() == files
    sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        run(sandbox, "pass")


def test_a_sandbox_that_is_forgotten_closes_itself() -> None:
    before = descendants(os.getpid())
    sandbox = LocalSandbox(slots=1)
    assert run(sandbox, "pass").ok
    del sandbox
    gc.collect()
    assert descendants(os.getpid()) == before


def test_it_may_be_collected_in_one_of_its_own_threads() -> None:
    before = descendants(os.getpid())
    sandbox = LocalSandbox(slots=1)
    sandbox._threads.submit(sandbox.close).result(60)
    assert descendants(os.getpid()) == before


@pytest.mark.medium
@pytest.mark.parametrize("level", [Isolation.NAMESPACES, Isolation.LANDLOCK])
def test_when_the_trainer_is_killed_everything_it_started_ends(level: Isolation) -> None:
    """Even while a process that it forked holds copies of all its descriptors, and programs have
    forked daemons."""
    need(level)
    environment = {"PYTHONPATH": f"{HERE.parent.parent}:{HERE.parent}"}
    command = [sys.executable, str(HERE / "owner.py"), "2", level.name]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as owner:
        assert owner.stdin
        assert owner.stdout
        assert owner.stdout.readline() == b"ready\n"
        started = [pid for pid, line in descendants(owner.pid).items() if "owner.py" not in line]
        handles = [os.pidfd_open(pid) for pid in started]
        owner.kill()
        outlived = [
            pid
            for pid, handle in zip(started, handles, strict=True)
            if not select.select([handle], [], [], 20)[0]
        ]
        owner.stdin.close()
    for handle in handles:
        os.close(handle)
    assert (len(started), outlived) == (12 if level is Isolation.NAMESPACES else 4, [])


@pytest.mark.skipif(not seccomp.is_available(), reason="no filter for this machine")
def test_the_filter_is_refused_on_machines_whose_call_numbers_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seccomp, "MACHINE", "riscv64")
    assert not seccomp.is_available()


def test_the_log_names_the_level_and_why_no_stronger_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="ratchet"):
        LocalSandbox(at_most=Isolation.LANDLOCK).close()
    assert "programs are isolated by landlock (resource limits" in caplog.text
    weak = Strength(Isolation.LANDLOCK, ("namespaces: Operation not permitted",), ("seccomp",))
    assert str(weak) == "landlock (seccomp; refused: namespaces: Operation not permitted)"
