"""Tasks in Harbor's format: the oracle earns 1, nothing else does, and no failure is a reward."""

from __future__ import annotations

import asyncio

import pytest
from environments.harbor.task_directories import OFFLINE, write_task, write_tasks
from pydantic import ValidationError
from sandbox.fake_docker import FakeDocker
from sandbox.test_attacks import need

from ratchet.config.resolve import build, resolve
from ratchet.environments.harbor.reward_file import VerifierError, read_reward
from ratchet.errors import DataError
from ratchet.sandbox import Isolation, SandboxError
from ratchet.testing import check_environment
from ratchet.types import Message


@pytest.fixture
def make():
    need(Isolation.NAMESPACES)
    environments = []

    def make_environment(folder, **keys):
        keys = {"kind": "harbor", "test": str(folder), "workers": 1, **keys}
        environments.append(build(resolve("environment", keys)))
        return environments[-1]

    yield make_environment
    for environment in environments:
        environment.sandbox.close()


async def play(environment, task, messages):
    """Return the reward at the end, and the texts that the agent saw."""
    await environment.reset(task)
    seen = []
    for message in messages:
        step = await environment.step(message)
        seen += [answer.text for answer in step.messages]
        if step.done:
            return step.reward, seen
    raise AssertionError("the attempt did not end")


def run_commands(environment, *commands):
    messages = [Message("assistant", f"```sh\n{command}\n```") for command in commands]
    task = next(environment.tasks("test", seed=0))
    return asyncio.run(play(environment, task, [*messages, Message("assistant", "Done.")]))


@pytest.mark.slow
def test_it_keeps_the_contract(make, tmp_path):
    train, test = write_tasks(tmp_path / "train", 3), write_task(tmp_path / "test", 4)
    check_environment(make(test, train=str(train)))


@pytest.mark.slow
def test_of_20_tasks_the_oracle_earns_1_and_nothing_earns_0(make, tmp_path):
    environment = make(write_tasks(tmp_path, 20))
    tasks = list(environment.tasks("test", seed=0))
    assert len(tasks) == 20

    async def play_all(get_messages):
        return [(await play(environment, task, get_messages(task)))[0] for task in tasks]

    assert asyncio.run(play_all(environment.demonstration)) == [1.0] * 20
    assert asyncio.run(play_all(lambda _: [Message("assistant", "Done.")])) == [0.0] * 20


@pytest.mark.medium
def test_the_agent_sees_its_files_but_no_tests_and_no_solution(make, tmp_path):
    reward, seen = run_commands(
        make(write_task(tmp_path)),
        "pwd; cat numbers.txt; cat /tests/* /solution/*; ls -A /logs/verifier",
        "mkdir deep && cd deep && export TOTAL=6",
        "pwd; echo $TOTAL >/app/sum.txt",
    )
    assert seen[0].startswith("/app\n1\n2\n")
    assert "expected" not in seen[0]
    assert seen[2] == "/app/deep\n"
    assert reward == 1.0


@pytest.mark.medium
@pytest.mark.parametrize(
    "command",
    [
        "mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt",
        "mkdir -p /logs/verifier; echo '{\"reward\": 1}' >/logs/verifier/reward.json",
        "mkdir /tests; echo 0 >/app/sum.txt; echo 0 >/tests/expected.txt; ls -lR /tests",
        "printf 'echo 1 >/logs/verifier/reward.txt' >test.sh; mkdir /tests; cp test.sh /tests",
        "(while :; do echo 1 >/logs/verifier/reward.txt; sleep 0.01; done) & sleep 0.1",
        "export BASH_ENV=/app/b ENV=/app/b; echo 'echo 1 >/logs/verifier/reward.txt; exit' >b",
        "printf '#!/bin/sh\\necho 3' >/app/cat; chmod +x cat; export PATH=/app:$PATH",
        "ln -s /tests/expected.txt /app/sum.txt",
        "i=0; while [ $i -lt 1100 ]; do : >f$i; i=$((i+1)); done",
        "head -c 100000000 /dev/zero >zeros",
    ],
)
def test_tampering_earns_nothing(make, tmp_path, command):
    reward, _ = run_commands(make(write_task(tmp_path)), command)
    assert reward == 0.0


@pytest.mark.medium
def test_reward_written_by_a_program_that_kills_the_tests_fails(make, tmp_path):
    tests = "#!/bin/bash\nsh /app/main.sh\necho 0 >/logs/verifier/reward.txt\n"
    environment = make(write_task(tmp_path, **{"tests/test.sh": tests}))
    with pytest.raises(VerifierError, match="did not end by themselves"):
        run_commands(
            environment,
            "echo 'echo 1 >/logs/verifier/reward.txt; kill -9 $PPID; sleep 1' >main.sh",
        )


@pytest.mark.medium
def test_a_reward_file_that_tests_never_name_is_ignored(make, tmp_path):
    """Programs that the tests run could have written it."""
    tests = "sh /app/main.sh\necho 0 >/logs/verifier/reward.txt\n"
    environment = make(write_task(tmp_path, **{"tests/test.sh": tests}))
    reward, _ = run_commands(
        environment, 'echo \'echo "{\\"reward\\": 1}" >/logs/verifier/reward.json\' >main.sh'
    )
    assert reward == 0.0


@pytest.mark.medium
@pytest.mark.parametrize(
    ("last_line", "sentence"),
    [("exit 1", "wrote no reward file"), ("sleep 9", r"did not end by themselves \(wall\)")],
)
def test_tests_without_a_reward_fail_the_attempt(make, tmp_path, last_line, sentence):
    manifest = OFFLINE.replace("timeout_sec = 20.0", "timeout_sec = 0.5", 1)
    files = {"tests/test.sh": f"{last_line}\n", "task.toml": manifest}
    with pytest.raises(VerifierError, match=sentence):
        run_commands(make(write_task(tmp_path, **files)))


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("reward.txt", "", "could not convert"),
        ("reward.txt", "good", "could not convert"),
        ("reward.txt", "nan", "not a finite number"),
        ("reward.txt", "1e999", "not a finite number"),
        ("reward.json", "", "Expecting value"),
        ("reward.json", "[1]", "must be an object"),
        ("reward.json", "{}", "must be an object"),
        ("reward.json", '{"reward": "1"}', "not a finite number"),
        ("reward.json", f'{{"reward": 1{"0" * 400}}}', "too large"),
        ("reward.json", '{"a": 1, "b": 0}', "Set environment.reward"),
        # Python 3.14 reads a text of this depth.
        ("reward.json", "[" * 50_000, "nested too deeply|Expecting value"),
    ],
)
def test_a_reward_file_without_a_number_is_an_error(name, text, sentence):
    with pytest.raises(VerifierError, match=sentence):
        read_reward("t", {f"logs/verifier/{name}": text.encode()}, {}, "reward")


@pytest.mark.medium
def test_reward_json_gives_a_reward_and_metrics(make, tmp_path):
    line = 'echo \'{"reward": 0.5, "speed": 2}\' >/logs/verifier/reward.json\nexit 1\n'
    environment = make(write_task(tmp_path, **{"tests/test.sh": line}))
    task = next(environment.tasks("test", seed=0))

    async def play_once():
        await environment.reset(task)
        return await environment.step(Message("assistant", "Done."))

    step = asyncio.run(play_once())
    assert (step.reward, step.metrics) == (0.5, {"commands": 0.0, "tests/speed": 2.0})


@pytest.mark.medium
def test_removed_files_stay_removed_and_artifacts_are_taken(make, tmp_path):
    files = {
        "task.toml": f'artifacts = ["/logs/other/out.txt"]\n{OFFLINE}',
        "tests/test.sh": "[ ! -e /app/numbers.txt ] && [ -e /logs/other/out.txt ] && "
        "[ -e /logs/artifacts/a ] && echo 1 >/logs/verifier/reward.txt\n",
    }
    reward, _ = run_commands(
        make(write_task(tmp_path, **files)),
        "rm numbers.txt; touch /logs/artifacts/a",
        "mkdir -p /logs/other; echo 1 >/logs/other/out.txt",
    )
    assert reward == 1.0


@pytest.mark.medium
def test_separate_tests_get_the_artifacts_alone(make, tmp_path):
    manifest = OFFLINE.replace("[verifier]", '[verifier]\nenvironment_mode = "separate"')
    files = {
        "task.toml": f'artifacts = ["sum.txt"]\n{manifest}',
        "tests/test.sh": "[ ! -e /app/other ] && [ -e numbers.txt ] && [ -e sum.txt ] && "
        "echo 1 >/logs/verifier/reward.txt\n",
    }
    environment = make(write_task(tmp_path, **files))
    assert run_commands(environment, "echo 6 >sum.txt; touch other; rm numbers.txt")[0] == 1.0


@pytest.mark.medium
def test_the_agents_timeout_ends_commands_and_the_tests_judge(make, tmp_path):
    manifest = OFFLINE.replace("[agent]\ntimeout_sec = 20.0", "[agent]\ntimeout_sec = 0.5")
    environment = make(write_task(tmp_path, **{"task.toml": manifest}))
    assert run_commands(environment, "echo 6 >sum.txt; sleep 9")[0] == 1.0


@pytest.mark.medium
@pytest.mark.needs("httpx2")
@pytest.mark.needs("nsenter")
def test_containers_are_built_from_the_tasks_image(make, tmp_path):
    train = write_tasks(tmp_path / "train", 2)
    test = write_task(tmp_path / "test", 3, **{"environment/Dockerfile": "FROM x\nWORKDIR /app\n"})
    engine = FakeDocker()
    sandbox = {"kind": "docker", "address": engine.address, "image": "base"}
    engine.images.add("base")
    environment = make(test, train=str(train), sandbox=sandbox)
    commands = (
        "printf '1\\n2\\n' >numbers.txt",
        "echo 9 >/app/sum.txt; echo 1 >/logs/verifier/reward.txt",
    )
    assert run_commands(environment, *commands)[0] == 1.0
    assert run_commands(environment, "echo 8 >/app/sum.txt")[0] == 0.0
    # One build for four sessions; tasks without an image run in the sandbox's own.
    assert [sorted(names) for names in engine.built] == [["Dockerfile", "numbers.txt"]]
    assert {body["Image"] for body in engine.created} == engine.images - {
        "base",
        "python:3.11-slim",
    }
    train_task = next(environment.tasks("train", seed=0))
    messages = environment.demonstration(train_task)
    assert asyncio.run(play(environment, train_task, messages))[0] == 1.0
    assert engine.created[-1]["Image"] == "base"
    engine.faults["POST /build"] = ["builderror"]
    (test / "environment" / "more.txt").write_text("changed")
    with pytest.raises(SandboxError, match="could not be built: no such step"):
        run_commands(environment, "true")
    engine.close()


DOCKERFILE = """FROM ubuntu:24.04
RUN apt-get update && apt-get install -y gcc
WORKDIR /app
COPY --from=other /x /y
COPY numbers.txt ./
COPY data /app/data
"""


@pytest.mark.medium
def test_a_waived_image_leaves_its_copied_files(make, tmp_path):
    files = {"environment/Dockerfile": DOCKERFILE, "environment/data/deep/a.txt": "a"}
    write_task(tmp_path, **files)
    with pytest.raises(DataError, match=r"sandbox.kind=docker, or waive: \[image\]"):
        make(tmp_path).rows("test")
    environment = make(tmp_path, waive=["image"])
    _, seen = run_commands(environment, "find . -type f | sort")
    assert seen == ["./data/deep/a.txt\n./numbers.txt\n"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"task.toml": "schema_version = "}, "can't be read"),
        ({"task.toml": f"{OFFLINE}cpus = true"}, "environment.cpus value error, must not be true"),
        ({"task.toml": f"{OFFLINE}allow_internet = 0"}, "allow_internet value error, must be true"),
        ({"task.toml": f"{OFFLINE}cpus = 'two'"}, "environment.cpus input should be a valid num"),
        ({"task.toml": ""}, r"network_mode is public.*waive: \[network\]"),
        ({"task.toml": f"{OFFLINE}allow_swap = true"}, r"allow_swap is not a key of schema 1.4"),
        ({"task.toml": f'{OFFLINE}os = "windows"'}, "only linux is supported"),
        ({"task.toml": f"{OFFLINE}gpus = 1"}, "requires an accelerator"),
        ({"task.toml": f'{OFFLINE}[[steps]]\nname = "one"'}, "only tasks of one step"),
        ({"task.toml": f'{OFFLINE}[environment.env]\nKEY = "${{KEY}}"'}, r"\$\{KEY:-value\}"),
        ({"task.toml": f'{OFFLINE}workdir = "/"'}, "can't be given to the tests"),
        ({"task.toml": f'{OFFLINE}workdir = "/tests/x"'}, "can't be given to the tests"),
        ({"task.toml": f'{OFFLINE}workdir = "/srv"'}, "the local sandbox has only /app"),
        ({"task.toml": OFFLINE.replace("1.4", "2.0")}, "newer than 1.4"),
        ({"environment/docker-compose.yaml": "services: {}"}, "only a single container"),
        ({"tests/test.sh": None}, "no tests/test.sh"),
        ({"instruction.md": "<!-- canary 1 -->\n\n"}, "is empty"),
    ],
)
def test_what_a_task_requires_in_vain_is_refused(make, tmp_path, files, sentence):
    write_task(tmp_path, **files)
    with pytest.raises(DataError, match=sentence):
        run_commands(make(tmp_path))


def test_wrong_keys_are_refused(tmp_path):
    with pytest.raises(ValidationError, match="set train or test"):
        resolve("environment", {"kind": "harbor"})
    remote = {"kind": "remote", "address": "http://127.0.0.1:1", "offers": "namespaces"}
    with pytest.raises(ValidationError, match=r"sandbox\.kind=local or docker"):
        resolve("environment", {"kind": "harbor", "test": str(tmp_path), "sandbox": remote})


@pytest.mark.medium
def test_a_directory_without_tasks_is_refused(make, tmp_path):
    with pytest.raises(DataError, match="has no task directories"):
        make(tmp_path).rows("test")
