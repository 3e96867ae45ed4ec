"""The real vLLM, on a CPU. Each engine has a process of its own (`vllm_play.py`)."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import ratchet

PLAY = Path(__file__).parent / "vllm_play.py"
SAMPLING_PLAY = Path(__file__).parent / "vllm_sampling_play.py"
pytestmark = [pytest.mark.slow, pytest.mark.needs("vllm")]


@pytest.mark.parametrize(
    "play",
    [
        "conforms sync",
        "conforms async",
        "pushes sync tied",
        "pushes async untied tensor_parallel=2",
        "pushes async untied data_parallel=2",
        "pushes_experts",
        "adapters sync",
        "adapters async",
        "several_adapters sync",
        "several_adapters async",
        "pushes_in_flight sync keep_kv",
        "pushes_in_flight async",
        "fails_to_start sync",
        "fails_to_start async",
        "trains_as_the_engine_does",
        "takes_turns",
    ],
)
def test_play(play):
    run_play(PLAY, play)


def run_play(script, play):
    done = subprocess.run(
        [sys.executable, str(script), *play.split()], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout.endswith("fine\n")


@pytest.mark.needs("numba")
@pytest.mark.parametrize(
    "play",
    [
        "knows_the_refused_arguments",
        "takes_arguments async",
        "speculates sync ngram",
        "speculates async ngram",
        "speculates sync draft_model",
        "keeps_the_same_tokens",
        "filters sync",
        "filters async",
        "follows_grammars sync",
        "trains_with_filters",
    ],
)
def test_sampling_play(play):
    run_play(SAMPLING_PLAY, play)


def test_check_refuses_what_vllm_does_not_know(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "{model: {preset: tiny}, tokenizer: {kind: characters}, algorithm: {kind: grpo},"
        " environment: {kind: sorting}, device: cpu,"
        " generator: {kind: vllm, arguments: {kv_cache_dtyp: fp8}}}"
    )
    done = ratchet("check", recipe)
    assert done.returncode == 2
    assert "did you mean 'kv_cache_dtype'" in done.stderr


def test_no_process_outlives_a_killed_driver():
    driver = subprocess.Popen(
        [sys.executable, str(PLAY), "is_killed"], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    pids = next(json.loads(line) for line in driver.stdout if line.startswith("["))
    assert len(pids) >= 2
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 60
    while any(map(runs, pids)):
        assert time.monotonic() < deadline, "vLLM's processes outlive the one that started them"
        time.sleep(0.2)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
