"""The docker sandbox against an engine that speaks the real API: programs, sessions, refusals, and
everything that breaks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from sandbox.fake_docker import OURS, PYTHON, Container, FakeDocker

from ratchet.config.resolve import build, resolve
from ratchet.sandbox import Isolation, Limits, Reason, SandboxError, output_matches
from ratchet.sandbox.base import TooLarge
from ratchet.sandbox.config import DockerSandboxConfig
from ratchet.sandbox.docker import DockerSandbox
from ratchet.sandbox.docker_outputs import CommandOutputs
from ratchet.sandbox.reaper import OWNER_LABEL
from ratchet.testing import answered
from ratchet.types import Failed, Message, Task

pytestmark = [
    pytest.mark.needs("httpx2"),
    pytest.mark.needs("unshare"),
    pytest.mark.needs("nsenter"),
]
PATIENT = Limits(wall_s=60, cpu_s=30)
EXEC_START, EXEC_JSON = r"POST /exec/\w+/start", r"GET /exec/\w+/json"


@pytest.fixture
def engine():
    if subprocess.run(
        ["unshare", *OURS, "--mount", "--pid", "--fork", "true"], check=False, capture_output=True
    ).returncode:
        pytest.skip("this machine grants no namespaces to run the fake engine's containers in")
    engine = FakeDocker()
    yield engine
    engine.close()


@pytest.fixture
def sandbox(engine):
    sandbox = DockerSandbox(config(engine))
    yield sandbox
    sandbox.close()
    assert not engine.containers


def config(engine, **keys):
    return DockerSandboxConfig(**{"address": engine.address, "python": PYTHON, **keys})


def soon(work):
    return asyncio.run(asyncio.wait_for(work, 60))


def run(sandbox, program, stdin=b"", limits=PATIENT):
    return soon(sandbox.run(program, stdin, limits))


@pytest.mark.medium
def test_programs_and_commands_run_each_in_a_container_of_its_own(engine, sandbox):
    assert output_matches(run(sandbox, "print(int(input()) * 2)", b"21\n"), "42")
    said = run(sandbox, "import sys\nsys.stdout.write('out')\nsys.stderr.write('err')\nsys.exit(3)")
    assert (said.exit, said.stdout, said.stderr, said.reason) == (3, b"out", b"err", Reason.EXIT)
    assert run(sandbox, ["sh", "-c", "tr a-z A-Z"], b"abc").stdout == b"ABC"
    assert (
        run(
            sandbox,
            "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])",
            b"\xff\x00a",
        ).stdout
        == b"a\x00\xff"
    )
    run(sandbox, "open('/tmp/left', 'w')")
    assert run(sandbox, "import os; print(os.listdir('/tmp'))").stdout.count(b"left") == 0
    assert len(engine.created) == 6
    assert not engine.containers


def test_what_a_container_may_do_is_written_into_it(engine, sandbox):
    run(
        sandbox,
        "pass",
        limits=Limits(memory_mib=128, disk_mib=7, processes=3, threads=5, cpu_s=1.5),
    )
    (body,) = engine.created
    host = body["HostConfig"]
    assert host["Memory"] == host["MemorySwap"] == 128 << 20
    assert host["PidsLimit"] == 3 + 5 + 8
    assert (
        host["NetworkMode"],
        body["NetworkDisabled"],
        host["ReadonlyRootfs"],
        host["AutoRemove"],
    ) == (
        "none",
        True,
        True,
        True,
    )
    assert (host["CapDrop"], host["SecurityOpt"], body["User"]) == (
        ["ALL"],
        ["no-new-privileges"],
        "65534:65534",
    )
    assert host["Mounts"][0]["VolumeOptions"]["DriverConfig"]["Options"]["o"].startswith("size=7m,")
    assert {"Name": "cpu", "Soft": 2, "Hard": 3} in host["Ulimits"]
    assert "PYTHONHASHSEED=0" in body["Env"]
    assert "Privileged" not in host
    assert "Binds" not in host


@pytest.mark.slow
def test_ends_of_every_kind(engine, sandbox):
    assert run(sandbox, "import os; os.kill(os.getpid(), 11)").signal == 11
    assert (
        run(
            sandbox, "import time; print(1, flush=True); time.sleep(1000)", limits=Limits(wall_s=1)
        ).reason
        is Reason.WALL
    )
    flood = run(
        sandbox, "while True: print('x' * 1000)", limits=Limits(output_kib=4, wall_s=60, cpu_s=60)
    )
    assert (flood.reason, len(flood.stdout)) == (Reason.OUTPUT, 4096)
    assert (
        run(sandbox, "import os, signal; os.kill(os.getpid(), signal.SIGXCPU)").reason is Reason.CPU
    )
    engine.faults[r"GET /containers/\w+/json"] = ["oom"]
    assert run(sandbox, "import os; os.kill(os.getpid(), 9)").reason is Reason.MEMORY
    assert run(sandbox, "import os; os.kill(os.getpid(), 9)").signal == 9
    # a program that closes its outputs, or ends its shell, is not a failure of the engine
    assert run(sandbox, "import os; os.close(1); os.close(2)").exit == 0
    assert run(sandbox, "import os; os.kill(os.getppid(), 9)").signal == 9


BROKEN = [
    (r"POST /containers/create", "status:500"),
    (r"POST /containers/create", "status:409"),
    (r"POST /containers/\w+/start", "status:500"),
    (r"POST /containers/\w+/exec", "status:409"),
    (r"POST /containers/\w+/exec", "status:404"),
    (r"PUT /containers/\w+/archive", "drop"),
    (EXEC_START, "status:500"),
    (EXEC_START, "cut"),
    (EXEC_START, "quiet"),
    (EXEC_START, "garbage"),
    (EXEC_START, "drop"),
]


@pytest.mark.medium
@pytest.mark.parametrize(("request_", "fault"), BROKEN)
def test_what_breaks_once_is_tried_again_and_what_stays_broken_is_no_verdict(
    engine, sandbox, request_, fault
):
    engine.faults[request_] = [fault]
    assert run(sandbox, "print('again')").stdout == b"again\n"
    engine.faults[request_] = [fault, fault]
    with pytest.raises(SandboxError):
        run(sandbox, "print('never')")
    assert not engine.containers


@pytest.mark.medium
def test_an_engine_that_hangs_is_given_up(engine):
    with_patience = DockerSandbox(config(engine, timeout_s=0.3))
    engine.faults[r"POST /containers/\w+/exec"] = ["hang", "hang"]
    with pytest.raises(SandboxError, match="ReadTimeout"):
        run(with_patience, "pass")
    with_patience.close()


SHAPES = ["null", "[]", "3", '"x"', "{}", '{"Id": null}', '{"Id": "../x y"}', "[" * 100_000]
STATES = ['{"Running": false, "ExitCode": "a"}', '{"Running": false, "ExitCode": 4096}']


@pytest.mark.slow
@pytest.mark.parametrize(
    ("request_", "answers"),
    [
        ("POST /containers/create", SHAPES),
        (r"POST /containers/\w+/exec", SHAPES),
        (r"GET /exec/\w+/json", [*SHAPES, *STATES]),
    ],
)
def test_an_answer_of_another_shape_is_no_verdict(engine, sandbox, request_, answers):
    for answer in answers:
        engine.faults[request_] = [f"says:{answer}"] * 2
        with pytest.raises(SandboxError, match="the engine"):
            run(sandbox, "print('never')")
    assert not engine.containers


@pytest.mark.parametrize("answer", SHAPES[:4])
def test_an_engine_that_describes_itself_wrongly_is_refused(engine, answer):
    for route in ("GET /version", "GET /info", "GET /containers/json"):
        if (route, answer) != ("GET /containers/json", "[]"):  # which lists no container
            engine.faults[route] = [f"says:{answer}"]
            with pytest.raises(SandboxError, match="the engine"):
                DockerSandbox(config(engine))


@pytest.mark.medium
def test_an_answer_that_drips_is_given_up_after_the_time_limit(engine):
    impatient = DockerSandbox(config(engine, timeout_s=0.3))
    engine.faults["POST /containers/create"] = ["drip", "drip"]
    with pytest.raises(SandboxError, match="took longer than timeout_s"):
        run(impatient, "pass")
    impatient.close()


def test_a_container_that_is_not_removed_costs_no_result(engine, sandbox, caplog):
    engine.faults[r"DELETE /containers/\w+"] = ["status:403"]
    assert run(sandbox, "print('done')").stdout == b"done\n"
    assert "can't be removed" in caplog.text
    while engine.containers:  # each ends with its connection
        time.sleep(0.005)


def test_an_absent_image_is_named_with_the_fix_and_fetched_where_asked(engine):
    absent = DockerSandbox(config(engine, image="no/such:1"))
    with pytest.raises(
        SandboxError, match=r"has no image 'no/such:1': docker pull no/such:1, or set pull: true"
    ):
        run(absent, "pass")
    absent.close()
    fetching = DockerSandbox(config(engine, image="busybox", pull=True))
    engine.images.discard("busybox:latest")
    with pytest.raises(SandboxError, match="404"):  # the fake lists it under its full name only
        run(fetching, "pass")
    assert "POST /images/create" in engine.asked
    with pytest.raises(SandboxError, match="'no/such:1' could not be fetched: pull access denied"):
        soon(fetching.open("no/such:1"))
    assert asyncio.run(_said(fetching, "yes/such:1", "echo hi")) == b"hi\n"
    fetching.close()


async def _said(sandbox, image, command):
    session = await sandbox.open(image, PATIENT)
    result = await session.run(command, 60)
    await session.close()
    return result.stdout


@pytest.mark.medium
def test_no_engine_and_engines_that_are_too_old_or_too_weak_are_refused_at_once(engine, tmp_path):
    with pytest.raises(SandboxError, match=r"no Docker engine answers at unix://.*is it running"):
        DockerSandbox(DockerSandboxConfig(address=f"unix://{tmp_path}/nothing.sock"))
    engine.version = "1.24"
    with pytest.raises(SandboxError, match=r"speaks API 1\.24: 1\.41"):
        DockerSandbox(config(engine))
    engine.version = "1.47"
    with pytest.raises(
        SandboxError, match=r"by namespaces only, weaker than the declared kernel \(runtime"
    ):
        DockerSandbox(config(engine), at_least=Isolation.KERNEL)
    with pytest.raises(SandboxError, match="no runtime 'runsc', only runc"):
        DockerSandbox(config(engine, runtime="runsc"))
    engine.info["SecurityOptions"] = ["name=seccomp,profile=unconfined"]
    with pytest.raises(SandboxError, match="filters no system calls"):
        DockerSandbox(config(engine))
    engine.info["Runtimes"] = {"runc": {}, "runsc": {}}
    own = DockerSandbox(config(engine, runtime="runsc"), at_least=Isolation.KERNEL)
    assert own.isolation is Isolation.KERNEL
    own.close()


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"address": "tcp://host:2375"}, "not an address of an engine"),
        ({"address": "http://10.0.0.1:2375"}, "is root access"),
        ({"certificates": "/c"}, "only used with https://"),
        ({"workdir": "/testbed"}, "read_only: false"),
    ],
)
def test_settings_that_cannot_work_are_refused(keys, why):
    with pytest.raises(ValidationError, match=why):
        DockerSandboxConfig(**keys)


@pytest.mark.medium
def test_a_session_keeps_its_directory_variables_and_files(engine, sandbox):
    async def main():
        session = await sandbox.open(limits=PATIENT)
        await session.put({"in/a.txt": b"alpha", "b": b"\x00\xff"})
        assert (
            await session.run(
                "cat in/a.txt; export NAME='x y'; mkdir deep; cd deep; echo one > f", 60
            )
        ).stdout == b"alpha"
        said = await session.run('echo "$NAME"; pwd; false', 60)
        assert (said.stdout, said.exit) == (b"x y\n/tmp/deep\n", 1)
        assert (await session.run("exit 7", 60)).exit == 7
        assert (await session.run("if", 60)).exit == 2
        slow = await session.run("echo begun; sleep 1000", 1)
        assert (slow.reason, slow.stdout) == (Reason.WALL, b"begun\n")
        assert (await session.run("sleep 1000 & echo started", 60)).stdout == b"started\n"
        assert (await session.run("pwd; cat f", 60)).stdout == b"/tmp/deep\none\n"
        assert await session.get("b") == {"b": b"\x00\xff"}
        assert await session.get("deep") == {"deep/f": b"one\n"}
        assert await session.get() == {"b": b"\x00\xff", "deep/f": b"one\n", "in/a.txt": b"alpha"}
        await session.run("ln -s /etc/passwd /tmp/link", 60)
        assert await session.get("link") == await session.get("absent") == {}
        for path in ("/etc/passwd", "../x", "a/../../x"):
            with pytest.raises(SandboxError, match="inside the working directory"):
                await session.get(path)
        with pytest.raises(TooLarge, match="more than its 16 MiB"):
            await session.put({f"{n}": bytes(1 << 20) for n in range(17)})
        assert len(engine.containers) == 1
        await session.close()
        await session.close()
        assert not engine.containers
        with pytest.raises(SandboxError, match="session is closed"):
            await session.run("true", 60)

    soon(main())


def test_a_session_whose_stream_is_cut_is_no_verdict(engine, sandbox):
    async def main():
        session = await sandbox.open()
        for fault in ("cut", "quiet", "status:500"):
            engine.faults[EXEC_START] = [fault]
            with pytest.raises(SandboxError):
                await session.run("echo hello", 60)
        engine.drop(next(iter(engine.containers)))
        with pytest.raises(SandboxError, match="No such container"):
            await session.run("true", 60)
        await session.close()

    soon(main())


def test_a_cancelled_caller_leaves_no_container(engine, sandbox):
    async def main():
        running = asyncio.ensure_future(
            sandbox.run("import time; time.sleep(1000)", b"", Limits(wall_s=1000))
        )
        while not any(told["process"] for told in list(engine.execs.values())):
            await asyncio.sleep(0.005)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        while engine.containers:
            await asyncio.sleep(0.005)

    soon(main())


@pytest.mark.medium
def test_when_the_trainer_dies_its_containers_end_and_those_never_started_are_reaped(engine):
    script = (
        "import asyncio, sys\nfrom ratchet.sandbox.docker import DockerSandbox\n"
        "from ratchet.sandbox.config import DockerSandboxConfig\nfrom ratchet.sandbox.base import "
        "Limits\n"
        f"sandbox = DockerSandbox(DockerSandboxConfig(address={engine.address!r}))\n"
        "session = asyncio.run(sandbox.open())\nprint('ready', flush=True)\nsys.stdin.read()\n"
    )
    root = Path(__file__).resolve().parent.parent.parent
    command, environment = [sys.executable, "-c", script], {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as owner:
        assert owner.stdout.readline() == b"ready\n"
        assert len(engine.containers) == 1
        owner.kill()
    # the connection broke, the first process ended, the engine removed it
    assert asyncio.run(_gone(engine))
    owned = engine.created[-1]
    for number, label in enumerate([owned["Labels"], {OWNER_LABEL: "another-boot/1/1"}, {}]):
        engine.containers[f"x{number}"] = Container(owned | {"Labels": label})
    DockerSandbox(config(engine)).close()
    assert sorted(engine.containers) == ["x1", "x2"]  # another machine's, and somebody else's


async def _gone(engine):
    async def wait():
        while engine.containers:
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), 60)
    return True


@pytest.mark.medium
def test_the_code_reward_runs_there_and_a_broken_engine_is_a_failure_not_a_zero(engine):
    keys = {"kind": "docker", "address": engine.address, "python": PYTHON}
    reward = build(resolve("rewards", {"kind": "code", "sandbox": keys, "timeout_s": 20}))
    task = Task(
        "double",
        (Message("user", "Double it."),),
        meta={"tests": [{"stdin": "21", "stdout": "42"}]},
    )
    function = Task(
        "f",
        (),
        meta={"prompt": "", "entry_point": "f", "test": "def check(f):\n    assert f(2) == 4\n"},
    )

    def judge(text, task):
        return asyncio.run(reward.score([answered(task, text)], task))[0]

    assert judge("print(int(input()) * 2)", task).reward == 1.0
    assert judge("print(int(input()) * 3)", task).reward == 0.0
    assert judge("def f(x):\n    return x * 2", function).reward == 1.0
    assert judge("def f(x):\n    return x * 3", function).reward == 0.0
    engine.faults[EXEC_START] = ["cut", "cut"]
    assert isinstance(judge("print(int(input()) * 2)", task), Failed)
    reward.sandbox.close()
    assert not engine.containers


def test_it_may_be_collected_in_one_of_its_own_threads(sandbox):
    sandbox._threads.submit(sandbox.close).result(60)
    with pytest.raises(SandboxError, match="closed"):
        run(sandbox, "pass")


@pytest.mark.parametrize(("size", "reason"), [(10, None), (11, Reason.OUTPUT)])
def test_output_above_the_limit_without_its_end_is_told(size, reason):
    """The end of a command that was killed is missing, and its output is not short of the limit."""
    stream = SimpleNamespace(iter_frames=lambda deadline: iter([(1, b"x" * size)]))
    outputs = CommandOutputs(10, "END")
    assert outputs.read_to_end(stream, deadline=0.0) is reason
    assert outputs.get_truncated_texts() == (b"x" * 10, b"")
