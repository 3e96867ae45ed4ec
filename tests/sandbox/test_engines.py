"""The docker sandbox on real engines: Docker's daemon, and Podman's service with Docker's API."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import ratchet
from environments.harbor.task_directories import write_task

from ratchet.sandbox import Limits, Reason
from ratchet.sandbox.config import DockerSandboxConfig
from ratchet.sandbox.docker import DockerSandbox
from ratchet.sandbox.docker_api import DockerEngine

pytestmark = [pytest.mark.slow, pytest.mark.needs("httpx2")]

PLACE = Path(__file__).parents[2] / ".venv" / "engines"
PROGRAMS = {"podman": PLACE / "bin" / "podman", "docker": PLACE / "bin" / "dockerd"}
IMAGE = "localhost/busybox:1"
TOOLS = ("cat", "dd", "env", "id", "kill", "ls", "printf", "sh", "sleep", "tr", "wc")
LIMITS = Limits(wall_s=30, cpu_s=10, disk_mib=2, memory_mib=64)


def pack_image() -> bytes:
    """Return the files of an image with busybox alone, as a tar archive."""
    busybox = (PLACE / "root" / "bin" / "busybox").read_bytes()
    archived = io.BytesIO()
    with tarfile.open(fileobj=archived, mode="w") as archive:
        for name in ("bin", "tmp", "app"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            archive.addfile(folder)
        program = tarfile.TarInfo("bin/busybox")
        program.size, program.mode = len(busybox), 0o755
        archive.addfile(program, io.BytesIO(busybox))
        for name in TOOLS:
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
    return archived.getvalue()


def write_command(engine: str, place: Path) -> list[str | Path]:
    """Return the command that serves an engine whose files are below `place`."""
    socket = f"unix://{place}/engine.sock"
    if engine == "podman":
        command = [PROGRAMS[engine], "--root", place / "root", "--runroot", place / "run"]
        command += ["--tmpdir", place / "tmp", "--storage-driver", "vfs"]
        return [*command, "system", "service", "--time", "0", socket]
    command = [PROGRAMS[engine], "--data-root", place / "root", "--exec-root", place / "run"]
    command += ["--pidfile", place / "pid", "--storage-driver", "vfs", "-H", socket]
    return [*command, "--iptables=false", "--ip6tables=false", "--bridge=none"]


@pytest.fixture(scope="module", params=list(PROGRAMS))
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Start an engine with an image, and yield its address."""
    import httpx2

    if not PROGRAMS[request.param].exists():
        pytest.skip("no engines were unpacked: make .venv/engines/installed, where apt-get is")
    # The path of a socket may have 107 characters.
    place = Path(tempfile.mkdtemp(prefix="engine-"))
    log_path = place / "log"
    with (
        log_path.open("wb") as log,
        subprocess.Popen(write_command(request.param, place), stdout=log, stderr=log) as service,
    ):
        try:
            for _ in range(600):
                if (place / "engine.sock").exists() or service.poll() is not None:
                    break
                time.sleep(0.05)
            if service.poll() is not None:
                pytest.skip(f"{request.param} does not start here: {log_path.read_text()[-300:]}")
            transport = httpx2.HTTPTransport(uds=str(place / "engine.sock"))
            with httpx2.Client(transport=transport, base_url="http://engine", timeout=60) as client:
                query = {"fromSrc": "-", "repo": IMAGE} if request.param == "podman" else {}
                query = query or {"fromSrc": "-", "repo": "localhost/busybox", "tag": "1"}
                headers = {"Content-Type": "application/x-tar"}
                client.post(
                    "/v1.41/images/create", params=query, content=pack_image(), headers=headers
                ).raise_for_status()
            yield f"unix://{place}/engine.sock"
        finally:
            service.terminate()
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def sandbox(address: str) -> Iterator[DockerSandbox]:
    sandbox = DockerSandbox(DockerSandboxConfig(address=address, image=IMAGE))
    yield sandbox
    sandbox.close()
    engine = DockerEngine(address, None, 30)
    assert engine.json("GET", "/containers/json", all="true") == []
    engine.close()


def run(sandbox: DockerSandbox, script: str, stdin: bytes = b"", limits: Limits = LIMITS):
    return asyncio.run(sandbox.run(["sh", "-c", script], stdin, limits))


def test_programs_get_their_input_and_give_both_outputs(sandbox: DockerSandbox) -> None:
    result = run(sandbox, "tr a-z A-Z; echo no >&2; exit 3", b"abc")
    assert (result.exit, result.stdout, result.stderr) == (3, b"ABC", b"no\n")
    assert run(sandbox, "kill -SEGV $$").signal == 11


def test_programs_are_confined(sandbox: DockerSandbox) -> None:
    script = "id -u; ls /sys/class/net; echo x >/app/x || echo refused"
    assert run(sandbox, script).stdout == b"65534\nlo\nrefused\n"
    written = run(sandbox, "dd if=/dev/zero of=/tmp/big bs=1M count=8; wc -c </tmp/big")
    assert written.stdout.strip() == b"2097152", "only disk_mib can be written"


def test_limits_end_programs(sandbox: DockerSandbox) -> None:
    slept = run(sandbox, "echo 1; sleep 1000", limits=Limits(wall_s=1))
    assert (slept.reason, slept.stdout) == (Reason.WALL, b"1\n")
    assert run(sandbox, "while :; do :; done", limits=Limits(wall_s=30, cpu_s=1)).reason in (
        Reason.CPU,
        Reason.SIGNAL,
    )


def test_a_session_keeps_its_files_and_variables(address: str) -> None:
    config = DockerSandboxConfig(
        address=address, image=IMAGE, read_only=False, user="0:0", workdir="/app"
    )

    async def scene() -> None:
        async with DockerSandbox(config) as sandbox:
            session = await sandbox.open(limits=LIMITS)
            await session.put({"a/b.txt": b"data"})
            await session.run("export NAME=value; cat a/b.txt >copy", 20)
            result = await session.run("printf $NAME; cat copy", 20)
            assert (result.exit, result.stdout) == (0, b"valuedata")
            assert await session.get("copy") == {"copy": b"data"}
            await session.close()

    asyncio.run(scene())


SUM = "total=0; while read -r n; do total=$((total + n)); done <numbers.txt; echo $total >sum.txt\n"
JUDGE = """#!/bin/sh
[ "$(cat /app/sum.txt)" = 3 ] && reward=1 || reward=0
echo $reward >/logs/verifier/reward.txt
"""


@pytest.mark.parametrize(("solution", "reward"), [(SUM, 1.0), ("", 0.0)], ids=["solved", "empty"])
def test_a_harbor_task_is_built_and_judged(
    address: str, tmp_path: Path, solution: str, reward: float
) -> None:
    files = {
        "environment/Dockerfile": f"FROM {IMAGE}\nWORKDIR /app\nCOPY numbers.txt ./\n",
        "solution/solve.sh": f"#!/bin/sh\n{solution}",
        "tests/test.sh": JUDGE,
    }
    write_task(tmp_path / "task", **files)
    sandbox = {"kind": "docker", "address": address, "image": IMAGE}
    sandbox |= {"read_only": False, "user": "0:0", "workdir": "/app"}
    done = ratchet(
        *("eval", "oracle", "--on", "harbor", f"test={tmp_path / 'task'}"),
        *("--out", tmp_path / "out", f"sandbox={json.dumps(sandbox)}"),
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    attempt = results["prompts"][0]["greedy"]
    assert (attempt["end"], attempt["reward"]) == ("scored", reward)
