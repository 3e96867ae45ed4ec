"""Deaths and silences: of workers, in calls and in collectives, and of the driver."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ratchet.errors import WorkerDied, WorkerError
from ratchet.executors.config import LocalClusterConfig
from ratchet.executors.local import LocalExecutor
from ratchet.executors.placement import ResourceRequest

COLLECTIVE = "executors.components:Collective"
TESTS = Path(__file__).parents[1]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    # the latter where it ends between opening and reading
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def until(condition, limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.mark.medium
@pytest.mark.fault("P4", "P21")
def test_a_dead_worker_is_named_with_its_last_words(start):
    group = start(2)
    pids = group.call_now("pid")
    with pytest.raises(WorkerDied) as caught:
        group.call_now("die", 1)
    error = caught.value
    assert (error.role, error.rank, error.host, error.signal) == (
        "learner",
        1,
        os.uname().nodename,
        "SIGKILL",
    )
    assert str(error).startswith(
        f"learner rank 1 of 2 on {os.uname().nodename} died (SIGKILL, sent by another process, or by the kernel"
    )
    assert "in 'die'" in str(error)
    assert error.tail.endswith("last words")
    until(lambda: not any(alive(pid) for pid in pids))  # rank 0 hung, and was ended with its group
    with pytest.raises(WorkerDied):
        group.call_now("pid")


def test_a_worker_that_dies_between_calls_is_named_at_once(start, caplog):
    group = start(2)
    os.kill(group.call_now("pid")[0], signal.SIGTERM)
    until(lambda: group.final_error is not None and caplog.messages)
    assert "rank 0 of 2" in caplog.messages[0]
    with pytest.raises(WorkerDied, match=r"rank 0 of 2 .* died \(SIGTERM\)"):
        group.call_now("pid")


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(3))
def test_death_at_any_point_of_a_call(start, seed):
    group = start(2)
    pid = group.call_now("pid")[1]
    calls = [group.submit("add", 1) for _ in range(300)]
    wanted = random.Random(seed).randrange(100)
    calls[wanted].result()
    os.kill(pid, signal.SIGKILL)
    hanging = group.submit("hang", 0)
    with pytest.raises(WorkerDied, match="rank 1 of 2"):
        hanging.result(timeout=20)
    for i, call in enumerate(calls):  # each has ended: with its result, or with the same death
        error = call.exception(timeout=1)
        assert error is None or (i > wanted and error.rank == 1)


@pytest.mark.slow
def test_death_in_a_collective(start):
    preload = ("torch", "torch.distributed")
    group = start(2, COLLECTIVE, preload=preload)
    assert [float(tensor[0]) for tensor in group.call_now("sum")] == [3.0, 3.0]
    with pytest.raises(WorkerDied, match=r"learner rank 1 of 2 .*SIGKILL"):
        group.call_now("sum", 200, (1, random.Random(0).randrange(200)))
    group = start(2, COLLECTIVE, preload=preload)
    hanging = group.submit("hang", 1)  # rank 0 waits for it in an all_reduce
    os.kill(group.members[1].process.pid.result(), signal.SIGKILL)
    with pytest.raises(WorkerDied, match="rank 1 of 2"):
        hanging.result(timeout=20)


@pytest.mark.slow
@pytest.mark.fault("P7")
def test_a_stopped_worker_is_noticed_named_and_killed(start, monkeypatch):
    group = start(2, silence_s=5.0)
    pids = group.call_now("pid")
    call = group.submit("hang")
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(
        WorkerDied,
        match=r"rank 1 of 2 .* was silent for 5 s \(it is stopped, for example by SIGSTOP\), and was "
        r"killed",
    ):
        call.result(timeout=30)
    until(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.medium
def test_closing_leaves_nothing(start):
    group = start(2)
    pids = [*group.call_now("pid"), *group.call_now("start_program")]
    group.close()
    until(lambda: not any(alive(pid) for pid in pids))


DRIVER = """
import sys, time
from ratchet.executors.placement import ResourceRequest
from ratchet.executors.config import LocalClusterConfig
from ratchet.executors.local import LocalExecutor
executor = LocalExecutor(LocalClusterConfig(), threads=2, device="cpu", preload=())
executor.plan([ResourceRequest("learner", 2)])
group = executor.group("learner")
group.build_now("executors.components:Tiny")
call = group.submit("start_program")
pids = [*group.call_now("pid"), *call.result(), executor._servers[-1]._server.result().pid]
group.submit("hang")
sys.stdout.write(" ".join(map(str, pids)) + "\\n")
sys.stdout.write(f"{executor._servers[-1].folder}\\n")
sys.stdout.flush()
time.sleep(60)
"""


@pytest.mark.medium
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.fault("P6")
def test_the_drivers_death_leaves_nothing(how):
    shared_before = set(os.listdir("/dev/shm"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as driver:
        pids = [int(word) for word in driver.stdout.readline().split()]
        folder = Path(driver.stdout.readline().strip())
        assert len(pids) == 5
        assert all(alive(pid) for pid in pids)
        driver.send_signal(how)
        driver.wait(timeout=60)
        until(lambda: not any(alive(pid) for pid in pids))
        until(lambda: not folder.exists())
    mine = {
        name
        for name in os.listdir("/dev/shm")
        if "ratchet-" in name and not name.startswith("ratchet-vllm")
    }
    assert mine <= shared_before


@pytest.mark.medium
@pytest.mark.parametrize("driver_too", [False, True], ids=["the fork server", "both"])
@pytest.mark.fault("P25")
def test_a_killed_fork_server_leaves_no_folder(driver_too, tmp_path):
    """The driver removes it at its end; where that is killed too, the next process that makes or
    sweeps one."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        "TMPDIR": str(tmp_path),
    }
    ends = DRIVER.replace("time.sleep(60)", "sys.stdin.read(); executor.close()")
    with subprocess.Popen(
        [sys.executable, "-c", ends],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
    ) as driver:  # fmt: skip
        pids = [int(word) for word in driver.stdout.readline().split()]
        folder = Path(driver.stdout.readline().strip())
        os.kill(pids[-1], signal.SIGSTOP)  # it is not to remove anything before it dies
        if driver_too:
            driver.kill()
        os.kill(pids[-1], signal.SIGKILL)
        workers, programs = pids[:2], pids[2:4]
        until(lambda: not any(alive(pid) for pid in (workers if driver_too else pids)))
        assert folder.is_dir()
        driver.communicate(timeout=60)
    if driver_too:
        for program in programs:  # of those that are left nothing else knows
            os.kill(program, signal.SIGKILL)
        sweep = "from ratchet.utils.temp_dirs import sweep; sweep()"
        subprocess.run([sys.executable, "-c", sweep], env=environment, check=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_workers_start_again_after_the_fork_server_was_killed():
    """With it all its workers die; those that are restarted come from a new one."""
    executor = LocalExecutor(LocalClusterConfig(), threads=2, device="cpu", preload=())
    try:
        executor.plan([ResourceRequest("generator", 2)])
        group = executor.group("generator", 0)
        group.build_now("executors.components:Tiny")
        os.kill(executor._servers[-1]._server.result().pid, signal.SIGKILL)
        for rank in 0, 1:
            for _ in range(3):  # as the pool of generators does
                with contextlib.suppress(WorkerError):
                    again = executor.group("generator", rank)
                    again.build_now("executors.components:Tiny")
                    break
            assert again.call_now("add", 2) == [2]
        with pytest.raises(WorkerDied):
            group.call_now("pid")
        assert len(executor._servers) == 2
    finally:
        executor.close()


RAY_DRIVER = """
import sys, time
from ratchet.executors.placement import ResourceRequest
from ratchet.executors.config import RayClusterConfig
from ratchet.executors.ray import RayExecutor
executor = RayExecutor(RayClusterConfig(object_store_mib=100), threads=2, device="cpu")
executor.plan([ResourceRequest("learner", 2)])
group = executor.group("learner")
group.build_now("executors.components:Tiny")
sys.stdout.write(" ".join(map(str, [*group.call_now("pid"), *group.call_now("start_program")])) + "\\n")
sys.stdout.write(f"{executor._temporary_folder.path}\\n")
sys.stdout.flush()
if not sys.stdin.readline():
    executor.close()
    sys.exit()
group.submit("hang")
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.needs("ray")
@pytest.mark.fault("P6", "P25")
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "ended"])
def test_the_end_of_a_driver_on_ray_leaves_nothing(killed, tmp_path):
    """The folder that Ray has logs and sockets in goes with the driver, or, where that is killed,
    with the next run."""
    token = tmp_path / "token"
    token.write_text("0" * 64)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        "RAY_AUTH_TOKEN_PATH": str(token),
    }
    with subprocess.Popen(
        [sys.executable, "-c", RAY_DRIVER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
    ) as driver:  # fmt: skip
        pids = [int(word) for word in driver.stdout.readline().split()]
        folder = Path(driver.stdout.readline().strip())
        assert len(pids) == 4
        assert list(folder.glob("session_*"))
        if killed:
            driver.kill()
        else:
            driver.stdin.close()
        until(lambda: not any(alive(pid) for pid in pids), limit_s=60.0)
        driver.wait(60)
    if killed:
        until(lambda: not processes_naming(folder), limit_s=60.0)
        sweep = (
            "from pathlib import Path; from ratchet.utils.temp_dirs import _sweep; "
            f"_sweep(Path({str(folder.parent)!r}))"
        )
        subprocess.run([sys.executable, "-c", sweep], env=environment, check=True)
    assert not folder.exists()


def processes_naming(folder: Path) -> list[str]:
    """Ray's own processes, which have the folder among their arguments."""
    naming = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            naming += [path.parent.name] * (str(folder).encode() in path.read_bytes())
    return naming
