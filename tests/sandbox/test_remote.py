"""The remote sandbox against a service that speaks SandboxFusion's API: an error on the way is
never a verdict."""

from __future__ import annotations

import asyncio
import os

import pytest
from sandbox.fake_remote import FakeRemote

from ratchet.config.resolve import build, resolve
from ratchet.sandbox import Isolation, Limits, Reason, SandboxError, output_matches
from ratchet.sandbox.config import RemoteSandboxConfig
from ratchet.sandbox.remote import RemoteSandbox
from ratchet.testing import answered
from ratchet.types import Failed, Message, Task

pytestmark = pytest.mark.needs("httpx2")
PATIENT = Limits(wall_s=60)


@pytest.fixture
def service():
    service = FakeRemote()
    yield service
    service.close()


def made(service, at_least=Isolation.NAMESPACES, **keys):
    keys = {
        "address": service.address,
        "offers": "namespaces",
        "retry_wait_s": 0.001,
        "retries": 2,
        **keys,
    }
    return RemoteSandbox(RemoteSandboxConfig(**keys), at_least=at_least)


@pytest.fixture
def sandbox(service):
    sandbox = made(service)
    yield sandbox
    sandbox.close()


def run(sandbox, program, stdin=b"", limits=PATIENT):
    return asyncio.run(asyncio.wait_for(sandbox.run(program, stdin, limits), 60))


@pytest.mark.medium
def test_programs_and_commands_run(service, sandbox):
    assert output_matches(run(sandbox, "print(int(input()) * 2)", b"21\n"), "42")
    said = run(sandbox, "import sys; print('out'); sys.exit('why')")
    assert (said.exit, said.stdout, said.stderr, said.reason) == (
        1,
        b"out\n",
        b"why\n",
        Reason.EXIT,
    )
    assert run(sandbox, ["printf", "%s|", "a b", "$c"]).stdout == b"a b|$c|"
    assert run(sandbox, "print(input())", "grüße".encode()).stdout == "grüße\n".encode()
    asked = service.asked[-1]
    assert (asked["language"], asked["run_timeout"], asked["memory_limit_MB"]) == (
        "python",
        60,
        512,
    )


@pytest.mark.medium
def test_ends_of_every_kind(sandbox):
    assert run(sandbox, "while True: pass", limits=Limits(wall_s=0.5)).reason is Reason.WALL
    assert run(sandbox, "import os; os.kill(os.getpid(), 11)").signal == 11
    assert run(sandbox, ["sh", "-c", "kill -9 $$"]).signal == 9
    flood = run(sandbox, "print('x' * 5000)", limits=Limits(output_kib=4, wall_s=60))
    assert (flood.reason, len(flood.stdout)) == (Reason.OUTPUT, 4096)
    assert (
        run(sandbox, "print('x' * 2**20)", limits=Limits(output_kib=4096, wall_s=60)).reason
        is Reason.OUTPUT
    )
    assert not run(sandbox, r"import sys; sys.stdout.buffer.write(b'\xff')").ok


@pytest.mark.parametrize(
    "fault", ["500", "502", "429", "sandbox", "pod", "drop", "short", "garbage", "deep", "text"]
)
def test_what_breaks_is_tried_again_and_what_stays_broken_is_no_verdict(service, sandbox, fault):
    service.faults = [fault, fault]
    assert run(sandbox, "print('again')").stdout == b"again\n"
    service.faults = [fault, fault, fault]
    with pytest.raises(SandboxError):
        run(sandbox, "print('never')")


def test_a_request_that_is_at_fault_is_not_repeated(service, sandbox):
    before = len(service.asked)
    service.faults = ["422"]
    with pytest.raises(SandboxError, match="does it speak SandboxFusion's API"):
        run(sandbox, "pass")
    assert len(service.asked) == before + 1
    with pytest.raises(SandboxError, match="not UTF-8"):
        run(sandbox, "pass", b"\xff")


@pytest.mark.medium
@pytest.mark.parametrize("fault", ["hang", "drip"])
def test_a_service_that_hangs_is_given_up(service, fault):
    sandbox = made(service, retries=0, timeout_s=20)
    service.faults = [fault]
    object.__setattr__(sandbox.config, "timeout_s", 0.1)
    with pytest.raises(SandboxError, match=r"no answer within 0\.2 s"):
        run(sandbox, "pass", limits=Limits(wall_s=0.1))
    sandbox.close()


@pytest.mark.medium
def test_absent_and_weak_services_are_refused_at_once(service, tmp_path):
    with pytest.raises(SandboxError, match="by landlock only, weaker than the declared namespaces"):
        made(service, offers="landlock")
    service.shared = str(tmp_path)
    with pytest.raises(
        SandboxError, match=r"offers=namespaces is wrong: .* can read files of an earlier program"
    ):
        made(service)
    made(service, at_least=Isolation.SECCOMP, offers="seccomp").close()
    service.faults = ["500"] * 3
    with pytest.raises(SandboxError, match="answered 500"):
        made(service)
    address, retries = service.address, 0
    service.close()
    with pytest.raises(SandboxError, match="no sandbox service answers at"):
        made(service, address=address, retries=retries)


def test_the_token_comes_from_a_file(service, tmp_path):
    tmp_path.joinpath("token").write_text("secret\n")
    made(service, token_file=tmp_path / "token").close()
    assert service.headers == ["Bearer secret"] * 2
    with pytest.raises(SandboxError, match="can't be read"):
        made(service, token_file=tmp_path / "absent")


@pytest.mark.medium
def test_a_session_keeps_files_directory_and_variables(sandbox):
    async def main():
        session = await sandbox.open(limits=PATIENT)
        await session.put({"in/a": b"alpha"})
        assert (
            await session.run(
                "cat in/a; mkdir deep; cd deep; export B='x y'; echo one > f; touch /dev/null", 30
            )
        ).exit == 0
        said = await session.run('echo "$B"; cat f; basename "$PWD"; exit 3', 30)
        assert (said.exit, said.stdout) == (3, b"x y\none\ndeep\n")
        slow = await session.run("echo kept > g; echo begun; sleep 1000", 0.5)
        assert (slow.reason, slow.stdout) == (Reason.WALL, b"begun\n")
        assert await session.get("deep") == {"deep/f": b"one\n", "deep/g": b"kept\n"}
        assert (await session.run("head -c 600000 /dev/zero > large", 30)).reason is Reason.OUTPUT
        assert set(await session.get()) == {"in/a", "deep/f", "deep/g"}
        await session.close()
        with pytest.raises(SandboxError, match="closed"):
            await session.get()
        with pytest.raises(SandboxError, match="it runs no images"):
            await sandbox.open("python:3.11")

    asyncio.run(main())


@pytest.mark.slow
def test_the_code_reward_runs_there_and_a_broken_service_is_a_failure_not_a_zero(service):
    section = {"kind": "remote", "address": service.address, "offers": "namespaces", "retries": 0}
    keys = {"timeout_s": 20, "memory_mib": 1024, "language": "block"}
    reward = build(resolve("rewards", {"kind": "code", "sandbox": section, **keys}))
    task = Task(
        "double",
        (Message("user", "Double it."),),
        meta={"tests": [{"stdin": "21", "stdout": "42"}]},
    )

    def judge(text):
        return asyncio.run(reward.score([answered(task, text)], task))[0]

    assert [judge(f"print(int(input()) * {n})").reward for n in (2, 3)] == [1.0, 0.0]
    cpp = (
        "```cpp\n#include <iostream>\nint main() { int n; std::cin >> n; std::cout << 2 * n; }\n```"
    )
    assert judge(cpp).reward == 1.0
    service.faults = ["sandbox"]
    assert isinstance(judge("print(int(input()) * 2)"), Failed)
    reward.sandbox.close()


def test_nothing_of_the_environment_is_sent(service, sandbox, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert run(sandbox, "print(1)").ok
    assert os.environ["HTTP_PROXY"] not in str(service.asked)


def test_it_may_be_collected_in_one_of_its_own_threads(sandbox):
    sandbox._threads.submit(sandbox.close).result(60)
    with pytest.raises(SandboxError, match="closed"):
        run(sandbox, "pass")
