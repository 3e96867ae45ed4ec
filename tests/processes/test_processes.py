"""Child processes: frames, starts, and the end of whole groups, however it comes."""

import asyncio
import contextlib
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ratchet.errors import WorkerError
from ratchet.executors.env_vars import inherit_environment
from ratchet.processes.exit_status import describe_exit
from ratchet.processes.fork_server_client import ForkServer
from ratchet.processes.frames import (
    Connection,
    FrameKind,
    Parcel,
    PeerGone,
    dump_json,
    receive_async,
)
from ratchet.processes.process_group import kill_group
from ratchet.processes.spawn import SpawnedProcess

TESTS = Path(__file__).parents[1]
LIMIT_S = 60.0


@pytest.fixture
def spawn():
    started = []

    def start(entry, *arguments, **options):
        process = SpawnedProcess(f"processes.entries:{entry}", arguments, **options)
        process.connection.socket.settimeout(LIMIT_S)
        started.append(process)
        return process

    yield start
    for process in started:
        process.end()
        process.connection.socket.close()


@pytest.fixture
def fork_server():
    server = ForkServer((), inherit_environment())
    yield server
    server.close()


def wait_for_end(pids):
    """Wait until none of the processes, which may be children of any other, runs."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            poll = select.poll()
            poll.register(os.pidfd_open(pid), select.POLLIN)
            assert poll.poll(1000 * LIMIT_S), f"{pid} still runs"


# --- frames


@pytest.mark.parametrize("reader", ["thread", "event loop"])
def test_frames_arrive_whole_and_in_order(reader):
    sizes = [(0, ()), (5, (0, 7)), (2**16, (2**16 - 1,)), (300_000, (2**20, 3))]
    parcels = [
        Parcel(bytes(body), tuple(memoryview(os.urandom(size)) for size in buffers))
        for body, buffers in sizes
    ] * 3
    one, other = socket.socketpair()
    sender = Connection(one)

    def send():
        for number, parcel in enumerate(parcels):
            sender.send(FrameKind.CALL, number, parcel)
        one.close()

    async def receive():
        stream, _ = await asyncio.open_connection(sock=other)
        return [await receive_async(stream) for _ in parcels]

    thread = threading.Thread(target=send)
    thread.start()
    if reader == "event loop":
        arrived = asyncio.run(receive())
    else:
        receiver = Connection(other)
        arrived = [receiver.receive() for _ in parcels]
        with pytest.raises(PeerGone):
            receiver.receive()
    thread.join()
    other.close()
    assert [(frame.kind, frame.number) for frame in arrived] == [
        (FrameKind.CALL, number) for number in range(len(parcels))
    ]
    assert [frame.parcel for frame in arrived] == parcels
    assert not any(buffer.readonly for frame in arrived for buffer in frame.parcel.buffers)


# --- a new interpreter


def test_what_a_process_prints_does_not_reach_its_connection(spawn):
    process = spawn("echo", stderr=subprocess.DEVNULL)
    for number, value in enumerate(["a", {"b": [1, None]}, "x" * 200_000]):
        process.connection.send(FrameKind.CALL, number, dump_json(value))
        kind, answered, parcel = process.connection.receive()
        assert (kind, answered, parcel.load_json()) == (FrameKind.RESULT, number, value)
    assert process.poll() is None


@pytest.mark.parametrize(
    ("entry", "message"),
    [("raise_error", "ValueError: not today"), ("leave", "SystemExit: left"), ("none", "'none'")],
)
def test_an_error_of_the_entry_arrives_with_its_traceback(spawn, entry, message):
    process = spawn(entry)
    kind, number, parcel = process.connection.receive()
    assert (kind, number) == (FrameKind.RAISED, 0)
    assert message in parcel.load_json()
    with pytest.raises(PeerGone):
        process.connection.receive()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("exit", "exit status 3"),
        ("SIGSEGV", "SIGSEGV"),
        ("SIGPROF", "SIGPROF"),
        ("SIGKILL", "SIGKILL, sent by another process, or by the kernel because memory ran out"),
    ],
)
def test_a_death_has_its_own_cause(spawn, how, says):
    process = spawn("die", how)
    with pytest.raises(PeerGone):
        process.connection.receive()
    assert describe_exit(process.end())[0] == says


def test_a_silent_process_is_a_timeout(spawn):
    process = spawn("echo", stderr=subprocess.DEVNULL)
    process.connection.socket.settimeout(0.01)
    with pytest.raises(TimeoutError):
        process.connection.receive()


def test_a_process_ends_with_all_that_it_started(spawn):
    process = spawn("start_program")
    pids = process.connection.receive().parcel.load_json()
    assert process.end() == -signal.SIGKILL
    wait_for_end(pids)


# --- a fork server


def test_a_forked_process_keeps_its_log_and_its_status(fork_server):
    process = fork_server.start("a", "processes.entries:echo_forked", [])
    process.connection.send(FrameKind.CALL, 7, dump_json("hello"))
    assert process.connection.receive().parcel.load_json() == "hello"
    assert "last words" in process.read_log_tail()
    process.kill()
    assert process.describe_end()[1] == "SIGKILL"


def test_a_killed_fork_server_takes_its_processes_along(fork_server):
    process = fork_server.start("a", "processes.entries:start_program", [])
    pids = process.connection.receive().parcel.load_json()
    os.kill(fork_server._server.result().pid, signal.SIGKILL)
    wait_for_end(pids[:1])
    assert "the fork server ended: SIGKILL" in process.describe_end()[0]
    os.kill(pids[1], signal.SIGKILL)  # only the server could have known it
    with pytest.raises(WorkerError, match="b can't start: the fork server has ended"):
        fork_server.start("b", "processes.entries:echo_forked", [])
    assert fork_server.has_ended


# --- the end of the driver


DRIVER = """
import sys
from ratchet.executors.env_vars import inherit_environment
from ratchet.processes.fork_server_client import ForkServer
from ratchet.processes.spawn import SpawnedProcess
server = ForkServer((), inherit_environment())
processes = [
    SpawnedProcess("processes.entries:start_program"),
    SpawnedProcess("processes.entries:hold_the_interpreter"),
    server.start("a", "processes.entries:start_program", []),
]
pids = [process.connection.receive().parcel.load_json() for process in processes]
sys.stdout.write(f"{[*pids[0][:1], *pids[1], *pids[2], server._server.result().pid]}\\n")
sys.stdout.write(f"{pids[0][1]}\\n{server.folder}\\n")
sys.stdout.flush()
sys.stdin.read()
sys.exit(7)
"""


@pytest.mark.medium
@pytest.mark.parametrize("end", ["kill", "exit"])
def test_no_child_outlives_the_driver(end):
    environment = inherit_environment(PYTHONPATH=os.pathsep.join([str(TESTS.parent), str(TESTS)]))
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], text=True, env=environment, **pipes
    ) as driver:
        pids = [int(word) for word in driver.stdout.readline().strip("[]\n").split(",")]
        orphan, folder = int(driver.stdout.readline()), Path(driver.stdout.readline().strip())
        assert len(pids) == 5
        if end == "kill":
            driver.kill()
        driver.communicate()
        wait_for_end(pids)
        os.kill(orphan, signal.SIGKILL)
    assert driver.returncode == (-signal.SIGKILL if end == "kill" else 7)
    assert not folder.exists()


def test_a_killed_group_leaves_nothing_in_shared_memory(tmp_path):
    """What its processes alone have mapped goes, and what is named for it; what others have mapped
    stays, and so do a user's files."""
    folder = Path(f"/dev/shm/model-{os.getpid()}")
    folder.mkdir()
    names = [f"/dev/shm/psm_{os.getpid()}-{i}" for i in range(2)]
    names += [str(folder / "psm_0"), f"/dev/shm/{os.getpid()}.safetensors"]
    code = (
        "import mmap, sys, time\n"
        "files = [open(name, 'w+b') for name in sys.argv[1:]]\n"
        "[file.truncate(4096) for file in files]\n"
        "maps = [mmap.mmap(file.fileno(), 0) for file in files]\n"
        "sys.stdout.write('.\\n'); sys.stdout.flush(); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, *names], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout.readline() == b".\n"
        named = Path(f"/dev/shm/ratchet-test-{process.pid}-x")
        named.mkdir()
        with open(names[1], "r+b") as file, mmap.mmap(file.fileno(), 0):
            kill_group(process.pid)
    assert process.returncode == -signal.SIGKILL
    assert [os.path.exists(path) for path in [*names, named]] == [False, True, True, True, False]
    for name in names[1:]:
        os.unlink(name)
    folder.rmdir()
