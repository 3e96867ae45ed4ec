"""Whatever a run stands on, a signal finishes its step and saves: Ray, torchrun, engines, trackers
and servers, all real.

A terminal sends its signals (Ctrl-C, SIGHUP as it closes) to all processes of the run's group; a
scheduler sends SIGTERM to the run alone. Both happen here as the run trains.
"""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

RECIPE = {
    "name": "probe",
    "threads": 1,
    "device": "cpu",
    "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "environment": {"kind": "sorting", "digits": 2},
    "sampling": {"max_new_tokens": 3},
    "evaluation": {"tasks": 0},
    "checkpoint": {"every": 100_000, "keep": 2},
    "logging": {"progress": "off"},
    "algorithm": {"kind": "grpo", "group_size": 4},
    "steps": 100_000,
    "batch_size": 2,
}
AGENT = """
from openai import AsyncOpenAI

async def solve(task, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": m.role, "content": m.text} for m in task.messages]
        answer = await client.chat.completions.create(model="policy", messages=messages)
        return answer.choices[0].message.content
"""
TEMPLATE = "{%- for message in messages -%}{{- message.content or '' -}}{%- endfor -%}"
TRACKERS = [
    {"kind": "wandb", "mode": "offline"},
    {"kind": "mlflow"},
    {"kind": "swanlab", "mode": "offline"},
    {"kind": "trackio"},
    {"kind": "prometheus", "port": 9466},
]
WORKERS = {"kind": "workers", "worker": {"kind": "engine"}}
PROXIED = {
    "model": {
        **RECIPE["model"],
        "overrides": {"hidden_size": 32, "n_layers": 1, "max_positions": 256},
    },
    "tokenizer": {"kind": "bytes", "template": "template.jinja"},
    "environment": {"kind": "arithmetic", "digits": 1},
    "agent": {"kind": "my_agent:solve"},
}
RUNS = {
    "trackers, Ctrl-C": (signal.SIGINT, {"logging": {"progress": "off", "sinks": TRACKERS}}),
    "proxy, closed terminal": (signal.SIGHUP, PROXIED),
    "ray, workers, SIGTERM": (
        signal.SIGTERM,
        {"cluster": {"kind": "ray", "object_store_mib": 100}, "generator": WORKERS},
    ),
    "ray, closed terminal": (
        signal.SIGHUP,
        {"cluster": {"kind": "ray", "object_store_mib": 100}, "generator": WORKERS},
    ),
    "workers, Ctrl-C": (signal.SIGINT, {"generator": WORKERS}),
}
ON_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")


class Training:
    """`ratchet train` as the leader of a session, with temporary files in a folder of its own."""

    def __init__(
        self,
        keys: dict,
        folder: Path,
        launcher: tuple[str, ...] = (),
        terminal: int | None = None,
        options: tuple[str, ...] = (),
    ) -> None:
        self.run, self.temporary = folder / "run", folder / "tmp"
        self.temporary.mkdir()
        (folder / "my_agent.py").write_text(AGENT)
        (folder / "template.jinja").write_text(TEMPLATE)
        (folder / "token").write_text("0" * 64)
        (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, **keys}))
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(folder),
            "TMPDIR": str(self.temporary),
            "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
            "TRACKIO_DIR": str(folder / "trackio"),
        }
        arguments = ["-m", *launcher, "ratchet", "train", "recipe.yaml", "--run-dir", str(self.run)]
        arguments += options
        streams = (
            {"stdout": subprocess.PIPE}
            if terminal is None
            else {"stdin": terminal, "stdout": terminal}
        )
        self.process = subprocess.Popen(
            [sys.executable, *arguments] if terminal is None else [sys.executable, "-c", ON_TERMINAL, *arguments],
            env=environment, cwd=folder, stderr=subprocess.STDOUT, text=True, start_new_session=True, **streams,
        )  # fmt: skip

    def wait_for_steps(self, count: int = 3, *, read_from: int | None = None) -> None:
        """read_from: a terminal, which would stop the run where nothing is read."""
        while self.last_step() < count:
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.05)
            if read_from is not None:
                with suppress(BlockingIOError):
                    os.read(read_from, 2**16)

    def last_step(self) -> int:
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return json.loads(lines[-1])["step"] if lines else 0

    def end(self, number: signal.Signals) -> str:
        """Send the signal as its usual sender does. Returns what the run wrote."""
        if number is signal.SIGTERM:
            self.process.send_signal(number)
        else:
            os.killpg(self.process.pid, number)
        return self.process.communicate(timeout=200)[0]

    def assert_saved(self, number: signal.Signals) -> None:
        log = (self.run / "run.log").read_text()
        assert f"{number.name}: finishing this step, then saving" in log
        assert "Traceback" not in log
        saved = [path.name for path in (self.run / "checkpoints").iterdir()]
        assert saved == [f"step-{self.last_step():08d}"], log
        assert not [
            entry for entry in os.listdir(self.temporary) if entry.startswith(("ratchet", "ray"))
        ]


@pytest.fixture
def start(tmp_path):
    """`start(keys)`: a training, which ends with the test."""
    trainings = []

    def start(keys, launcher=(), terminal=None, options=()):
        trainings.append(Training(keys, tmp_path, launcher, terminal, options))
        return trainings[-1]

    yield start
    for training in trainings:
        training.process.kill()


@pytest.mark.slow
@pytest.mark.fault("P8", "P24")
@pytest.mark.needs(
    "ray", "wandb", "mlflow", "swanlab", "trackio", "prometheus_client", "fastapi", "openai"
)
@pytest.mark.parametrize("name", RUNS)
def test_a_signal_saves_on_every_executor_generator_and_tracker(name, start):
    number, keys = RUNS[name]
    training = start(keys)
    training.wait_for_steps()
    output = training.end(number)
    assert training.process.returncode == 128 + number, output
    assert f"ratchet train --resume {training.run}" in output
    training.assert_saved(number)


@pytest.mark.slow
@pytest.mark.fault("P8")
def test_a_terminal_that_closes_does_not_cost_a_step(start):
    """Writing to it fails from then on: the live progress is not a reason to end."""
    ours, theirs = pty.openpty()
    training = start({"logging": {"progress": "live"}}, (), theirs)
    os.close(theirs)
    os.set_blocking(ours, False)
    training.wait_for_steps(read_from=ours)
    os.close(ours)
    assert training.process.wait(200) == 128 + signal.SIGHUP
    training.assert_saved(signal.SIGHUP)


@pytest.mark.slow
@pytest.mark.fault("P8")
def test_a_signal_to_a_supervised_run_and_its_parent_saves(start):
    """Service managers signal both at once."""
    training = start({}, options=("--supervise", "1"))
    training.wait_for_steps()
    parent = training.process.pid
    run = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0]
    os.kill(int(run), signal.SIGTERM)
    output = training.end(signal.SIGTERM)
    assert training.process.returncode == 128 + signal.SIGTERM, output
    training.assert_saved(signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.fault("P8")
def test_a_run_whose_supervisor_is_killed_saves(start):
    training = start({}, options=("--supervise", "1"))
    training.wait_for_steps()
    # The run keeps the pipe of the output open until it ends.
    output = training.end(signal.SIGKILL)
    assert training.process.returncode == -signal.SIGKILL
    assert f"ratchet train --resume {training.run}" in output
    training.assert_saved(signal.SIGTERM)
    assert "`ratchet train --supervise` has ended" in (training.run / "run.log").read_text()


@pytest.mark.slow
@pytest.mark.fault("P8", "P24")
def test_a_signal_saves_under_torchrun(start):
    """A closed terminal reaches torchrun alone, which sends the signal on to both ranks."""
    training = start({"learner": {"kind": "dtensor", "dp_shard": 2}}, TORCHRUN)
    training.wait_for_steps()
    training.end(signal.SIGHUP)
    training.assert_saved(signal.SIGHUP)


@pytest.mark.slow
@pytest.mark.fault("P8", "P24")
@pytest.mark.needs("vllm")
def test_a_signal_saves_with_vllm(start):
    generator = {"kind": "vllm", "engine": "sync", "kv_cache_gib": 0.05, "enforce_eager": True}
    training = start({"generator": generator})
    training.wait_for_steps()
    output = training.end(signal.SIGTERM)
    assert training.process.returncode == 143, output
    training.assert_saved(signal.SIGTERM)
