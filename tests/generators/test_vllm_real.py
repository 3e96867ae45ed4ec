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
from rewards.spoken_judge import write_judge

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
        "several_adapters async",
        "pushes_in_flight sync keep_kv",
        "pushes_in_flight async",
        "fails_to_start sync",
        "trains_as_the_engine_does",
        "takes_turns",
        "routes",
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
        "speculates sync draft_model",
        "keeps_the_same_tokens",
        "filters sync",
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


JUDGED = {
    "threads": 1,
    "device": "cpu",
    "model": {"preset": "tiny"},
    "tokenizer": {"kind": "characters"},
    "algorithm": {"kind": "grpo", "group_size": 4},
    "environment": {
        "kind": "mixture",
        "parts": [{"kind": "arithmetic", "tag": name} for name in ("here", "apart")],
    },
    "rewards": [
        {
            "kind": "by_tag",
            "domains": {
                name: [{"kind": "judge", "judge": name, "prompt": "{response}"}]
                for name in ("here", "apart")
            },
        }
    ],
    "sampling": {"max_new_tokens": 60},
    "steps": 1,
    "batch_size": 2,
    "evaluation": {"tasks": 0},
}


def test_judges_of_a_run_answer_in_its_process_and_in_a_worker(tmp_path):
    vllm = {"kind": "vllm", "kv_cache_gib": 0.05, "enforce_eager": True, "max_running": 8}
    generators = {"here": vllm, "apart": {"kind": "workers", "workers": 1, "worker": vllm}}
    # The judge always replies "Score: 7". vLLM on a CPU needs heads of this size.
    judge = write_judge(tmp_path / "judge", head_dim=32)
    judges = [
        {"name": name, "path": str(judge), "generator": generator}
        for name, generator in generators.items()
    ]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({**JUDGED, "judges": judges}))
    run = tmp_path / "run"
    trained = ratchet("train", recipe, f"run_dir={run}")
    assert trained.returncode == 0, trained.stderr[-3000:]
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    for name in generators:
        # An answer that was cut off earns 0 without a question.
        assert 0 < last[f"rollout/reward/by_tag/{name}/judge"] <= (7 - 1) / (10 - 1) + 1e-6


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
