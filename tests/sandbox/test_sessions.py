"""Sessions of the local sandbox, as this user and as an unprivileged one: their files are kept
outside, and travel."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from sandbox.corpus import descendants
from sandbox.test_attacks import as_nobody, need

from ratchet.sandbox import (
    Isolation,
    Limits,
    LocalSandbox,
    Reason,
    SandboxError,
    fork_server_client,
)

PATIENT = Limits(cpu_s=30)


@pytest.fixture
def sandbox():
    need(Isolation.NAMESPACES)
    sandbox = LocalSandbox(slots=1)
    yield sandbox
    sandbox.close()


async def talk(sandbox):
    """What a session answers, by command."""
    session = await sandbox.open(limits=PATIENT)
    await session.put({"in/a": b"alpha"})
    commands = (
        "cat in/a",
        "mkdir deep; cd deep; export B='x y'; echo one > f",
        'echo "$B"; cat f; basename "$PWD"; exit 3',
    )
    said = {command: (await session.run(command, 30)) for command in commands}
    files = await session.get()
    await session.close()
    return {
        command: [result.exit, result.stdout.decode()] for command, result in said.items()
    }, sorted(files)


@pytest.mark.medium
def test_a_session_keeps_files_directory_and_variables(sandbox):
    said, files = asyncio.run(talk(sandbox))
    assert list(said.values()) == [[0, "alpha"], [0, ""], [3, "x y\none\ndeep\n"]]
    assert files == ["deep/f", "in/a"]


@pytest.mark.medium
def test_commands_that_end_badly_leave_the_session_usable(sandbox):
    async def main():
        session = await sandbox.open(limits=PATIENT)
        slow = await session.run("echo kept > f; echo begun; sleep 1000 & sleep 1000", 0.5)
        assert (slow.reason, slow.stdout) == (Reason.WALL, b"begun\n")
        assert (await session.run("head -c 200000 /dev/zero", 30)).reason is Reason.OUTPUT
        assert (await session.run("head -c 700000 /dev/zero > large", 30)).reason is Reason.OUTPUT
        assert (await session.run("kill -9 $$", 30)).signal == 9
        # ended its own end: undone
        assert (await session.run("rm f; kill -9 $PPID; sleep 1000", 30)).signal == 9
        assert (await session.run("cat f; ls -la", 30)).stderr == b""
        assert await session.get() == {"f": b"kept\n"}
        with pytest.raises(SandboxError, match="inside the working directory"):
            await session.put({"../f": b""})
        with pytest.raises(SandboxError, match="more than 512 KiB"):
            await session.put({"f": bytes(600_000)})
        with pytest.raises(SandboxError, match="has no images, such as 'debian'"):
            await sandbox.open("debian")

    asyncio.run(main())


@pytest.mark.medium
def test_one_session_sees_nothing_of_another(sandbox):
    async def main():
        first, second = await sandbox.open(), await sandbox.open()
        await first.run("echo secret > f", 30)
        assert (await second.run("ls", 30)).stdout == b""

    asyncio.run(main())


def test_where_commands_cannot_run_there_are_no_sessions():
    sandbox = LocalSandbox(slots=1, at_most=Isolation.LANDLOCK)
    with pytest.raises(
        SandboxError, match=r"sessions need isolation by namespaces.* by landlock only"
    ):
        asyncio.run(sandbox.open())
    sandbox.close()


@pytest.mark.slow
def test_an_unprivileged_user_has_the_same_sessions_or_is_told_why_not():
    need(Isolation.NAMESPACES)
    said = as_nobody(str(Path(__file__).resolve()), "NAMESPACES")
    assert (said["files"], said["level"]) == (["deep/f", "in/a"], "NAMESPACES")
    refused = as_nobody("--no-namespaces", str(Path(__file__).resolve()), "NAMESPACES")
    assert refused["level"] == "LANDLOCK"
    assert "sessions need isolation by namespaces" in refused["refused"]
    assert refused["ran"] == "42\n"


if __name__ == "__main__":
    chosen = LocalSandbox(slots=1)
    ran = asyncio.run(chosen.run("print(6 * 7)", limits=Limits(wall_s=60)))
    report = {"level": chosen.isolation.name, "ran": ran.stdout.decode()}
    try:
        report["files"] = asyncio.run(talk(chosen))[1]
    except SandboxError as error:
        report["refused"] = str(error)
    chosen.close()
    sys.stdout.write(json.dumps(report))


@pytest.mark.medium
def test_a_session_finds_programs_by_their_alternatives(sandbox):
    if not Path("/etc/alternatives/awk").exists():
        pytest.skip("this system has no alternatives")

    async def ask():
        session = await sandbox.open(limits=PATIENT)
        return await session.run("echo 20 22 | awk '{print $1 + $2}'", 30)

    result = asyncio.run(ask())
    assert result.stdout == b"42\n", result


@pytest.mark.medium
def test_signals_that_a_command_sends_arrive(sandbox):
    """The fork server ignores SIGTERM and SIGHUP, and what is ignored is inherited."""

    async def main():
        session = await sandbox.open(limits=PATIENT)
        for name, code in (("TERM", 143), ("HUP", 129), ("INT", 130)):
            # Shells start background jobs with SIGINT ignored, as POSIX asks.
            sleeper = "python3 -c 'import os; os.kill(os.getpid(), 2)'" if name == "INT" else ""
            command = sleeper or f"sleep 1000 & kill -{name} $!; wait $!"
            result = await session.run(command, 30)
            assert result.exit == code or result.signal == code - 128, (name, result)
        program = (
            "import subprocess\nchild = subprocess.Popen(['sleep', '1000'])\nchild.terminate()\n"
            "print(child.wait())"
        )
        result = await sandbox.run(program, limits=Limits(wall_s=30, processes=4))
        assert result.stdout == b"-15\n", result
        swept = await session.run("trap '' TERM; kill -TERM -1; echo on", 30)
        assert swept.stdout == b"on\n"
        await session.close()

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.fault("R20")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_whose_whole_service_is_stopped_runs_again(sandbox, number):
    async def main():
        session = await sandbox.open(limits=PATIENT)
        await session.put({"n": b"0"})
        # The signal ends `sleep`, and the shell would go on and fail.
        running = asyncio.ensure_future(
            session.run("trap '' TERM HUP; (trap - TERM HUP; exec sleep 2) && echo whole", 30)
        )
        while not any("sleep\x002" in command_line(pid) for pid in descendants(os.getpid())):
            await asyncio.sleep(0.01)
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        assert (await running).stdout == b"whole\n"
        own = await session.run("sh -c 'kill -TERM $$'; kill -TERM -1 $PPID; echo own; exit 1", 30)
        assert own.exit == 1 or own.signal == signal.SIGTERM  # its own deed is judged
        await session.close()

    asyncio.run(main())


def command_line(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


@pytest.mark.medium
@pytest.mark.fault("R20")
def test_a_command_beside_which_memory_ran_out_is_not_judged(sandbox, monkeypatch):
    kills = itertools.count()
    monkeypatch.setattr(fork_server_client, "count_oom_kills", lambda: next(kills) // 2)

    async def main():
        session = await sandbox.open(limits=PATIENT)
        assert (await session.run("exit 3", 30)).exit == 3
        monkeypatch.setattr(fork_server_client, "count_oom_kills", lambda: next(kills))
        with pytest.raises(SandboxError, match="because memory ran out"):
            await session.run("exit 3", 30)
        await session.close()

    asyncio.run(main())
    monkeypatch.undo()
    assert fork_server_client.count_oom_kills() >= 0
