"""The real vLLM, on a CPU. Each engine has a process of its own, a fork of one that has imported
vLLM (`vllm_play.py`)."""

import json

import pytest
from command_line import TRAINING_MODULES, call_in_fork, ratchet
from rewards.spoken_judge import write_judge

PRELOAD = (*TRAINING_MODULES, "support.vllm_preload")
pytestmark = [pytest.mark.slow, pytest.mark.needs("vllm")]


@pytest.mark.parametrize(
    "play",
    [
        "conforms sync",
        "conforms async spawned",
        "pushes sync tied",
        "pushes async untied tensor_parallel=2",
        "pushes async untied data_parallel=2",
        "pushes_through_memory async",
        "pushes_experts",
        "adapters sync",
        "several_adapters async",
        "pushes_in_flight sync keep_kv",
        "pushes_in_flight async",
        "fails_to_start sync",
        "trains_as_the_engine_does",
        "takes_turns",
        "routes",
        "is_killed",
    ],
)
def test_play(play):
    run_play("vllm_play", play)


def run_play(module, play):
    done = call_in_fork(
        f"generators.{module}:run", play.split(), environment={}, timeout=400, preload=PRELOAD
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
        "speculates sync mtp",
        "keeps_the_same_tokens",
        "filters sync",
        "follows_grammars sync",
        "trains_with_filters",
    ],
)
def test_sampling_play(play):
    run_play("vllm_sampling_play", play)


def test_check_refuses_what_vllm_does_not_know(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "{model: {preset: tiny}, tokenizer: {kind: characters}, algorithm: {kind: grpo},"
        " environment: {kind: sorting}, device: cpu,"
        " generator: {kind: vllm, arguments: {kv_cache_dtyp: fp8}}}"
    )
    done = ratchet("check", recipe, preload=PRELOAD)
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
    # The worker imports vLLM anew, and so would each process of an engine of the other kind.
    worker = {"kind": "workers", "workers": 1, "worker": {**vllm, "engine": "sync"}}
    generators = {"here": vllm, "apart": worker}
    # The judge always replies "Score: 7". vLLM on a CPU needs heads of this size.
    judge = write_judge(tmp_path / "judge", head_dim=32)
    judges = [
        {"name": name, "path": str(judge), "generator": generator}
        for name, generator in generators.items()
    ]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({**JUDGED, "judges": judges}))
    run = tmp_path / "run"
    trained = call_in_fork(
        "support.vllm_preload:run_command",
        ["train", str(recipe), f"run_dir={run}"],
        environment={},
        timeout=300,
        preload=PRELOAD,
    )
    assert trained.returncode == 0, trained.stderr[-3000:]
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    for name in generators:
        # An answer that was cut off earns 0 without a question.
        assert 0 < last[f"rollout/reward/by_tag/{name}/judge"] <= (7 - 1) / (10 - 1) + 1e-6
