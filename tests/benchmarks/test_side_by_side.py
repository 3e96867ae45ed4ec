"""The benchmarks: their arithmetic by hand, and our side of each at its smallest. The peers' side
runs in `make bench`."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ratchet.commands.plan.command import read_shape
from ratchet.config.loader import load_config
from ratchet.kernels import build
from ratchet.models.flops import DecoderCost

pytestmark = pytest.mark.slow

SMALL = ("--size", "T", "--rounds", "1", "--steps", "1", "--threads", "1", "--ours")
GIVEN = ("--rows", "4", "--longest", "32")


@pytest.fixture
def benchmark(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules of benchmarks/, which is not a package, by name."""
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    return importlib.import_module


@pytest.fixture(scope="module")
def model(repository: Path, warm_environment: dict[str, str], tmp_path_factory: Any) -> Path:
    directory = tmp_path_factory.mktemp("model")
    run(repository, "peers/make_model.py", str(directory), "--size", "T", env=warm_environment)
    return directory


def run(
    repository: Path, script: str, *arguments: str, env: Mapping[str, str] | None = None
) -> list[str]:
    command = [sys.executable, str(repository / "benchmarks" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# --- the arithmetic


def test_a_prompt_is_computed_once_for_its_answers(benchmark):
    arithmetic = benchmark("arithmetic")
    # prompt of 2: 1 + 2 pairs. An answer of 3 feeds 2 tokens, which attend to 3 and 4; one of 1
    # feeds none.
    assert arithmetic.tree(2, [3, 1]) == arithmetic.Work(tokens=4, pairs=3 + 3 + 4, predicted=4)
    assert arithmetic.forest([(2, [3, 1])] * 2) == arithmetic.Work(tokens=8, pairs=20, predicted=8)


def test_flops_of_a_layer(benchmark):
    shape = SimpleNamespace(
        vocab_size=11,
        hidden_size=3,
        n_layers=2,
        n_heads=2,
        n_kv_heads=1,
        head_dim=5,
        intermediate_size=7,
    )
    work = benchmark("arithmetic").Work
    # queries, output, keys and values, feed-forward
    layer = 3 * 10 + 10 * 3 + 2 * 3 * 5 + 3 * 3 * 7
    assert work(tokens=1).forward_gflop(shape) * 1e9 == pytest.approx(2 * 2 * layer)
    # scores, and the sum of values
    assert work(pairs=1).forward_gflop(shape) * 1e9 == pytest.approx(2 * 2 * (10 + 10))
    assert work(predicted=1).forward_gflop(shape) * 1e9 == pytest.approx(2 * 3 * 11)
    read = work(pairs=4).decoding_gbytes(shape, reads=0.5, bytes_each=2)
    assert read * 1e9 == pytest.approx(2 * (0.5 * (2 * layer + 3 * 11) + 4 * 2 * 2 * 5))


# --- workload and result


@pytest.mark.parametrize("answers", [1, 2])
def test_conversations_have_the_lengths_asked_for(benchmark, answers):
    protocol = benchmark("side_by_side") and benchmark("protocol")
    chosen = argparse.Namespace(rows=5, shortest=16, longest=48, warmup=1, steps=2, seed=3)
    made = protocol.conversations(chosen, answers=answers)
    assert made == protocol.conversations(chosen, answers=answers)
    assert len(made) == 15
    for step in (made[:5], made[5:10], made[10:]):
        for answer in range(1, answers + 1):
            assert sorted(len(row[0]) + len(row[answer]) + 3 for row in step) == [
                16,
                24,
                32,
                40,
                48,
            ]


def test_more_than_one_is_better_in_every_measure(benchmark):
    side_by_side = benchmark("side_by_side")
    assert side_by_side.TIME.ratio(ours=1.0, theirs=3.0) == 3.0
    assert side_by_side.MEMORY.ratio(ours=100.0, theirs=300.0) == 3.0
    assert side_by_side.rate("tokens").ratio(ours=300.0, theirs=100.0) == 3.0


def test_ratios_are_of_one_round(benchmark):
    side_by_side = benchmark("side_by_side")
    ours: list[Any] = [{"median_s": seconds, "peak_rss_mib": 7} for seconds in (1.0, 2.0, 1.0)]
    theirs = [{**ours[0], "median_s": 3.0}, None, {**ours[0], "median_s": 5.0}]
    rows = side_by_side._rows(
        side_by_side.TIME, ours, {"ours": ours, "theirs": theirs, "none": [None] * 3}
    )
    assert rows["theirs"] == {
        "median": 4000.0,
        "ratio": 4.0,
        "ratio_range": [3.0, 5.0],
        "peak_mib": 7,
    }
    assert rows["ours"]["ratio"] == 1.0
    assert "none" not in rows


def test_the_floor_is_what_takes_longer_arithmetic_or_reading(benchmark):
    side_by_side = benchmark("side_by_side")
    line = {"gflop": 6.0, "gbytes": 8.0, "work": 100}
    assert side_by_side._floor(side_by_side.SECONDS, [line], [{"gflops": 2.0}]) == 3.0
    assert (
        side_by_side._floor(side_by_side.SECONDS, [line], [{"gflops": 2.0, "gbytes_per_s": 1.0}])
        == 8.0
    )
    assert (
        side_by_side._floor(
            side_by_side.rate("tokens"), [line], [{"gflops": 2.0, "gbytes_per_s": 4.0}]
        )
        == 33.33
    )
    rates = {"gflops": 2.0, "bfloat16_gflops": 4.0}
    assert side_by_side._floor(side_by_side.SECONDS, [{**line, "bf16": True}], [rates]) == 1.5
    assert side_by_side._floor(side_by_side.MEMORY, [line], [{"gflops": 2.0}]) is None


def test_table(benchmark):
    record = {
        "case": "Work",
        "command": "python benchmarks/work.py",
        "size": "S",
        "unit": "ms",
        "target": 2.5,
        "floor": 12.3,
        "rows": {
            "Ratchet": {
                "median": 1250.0,
                "ratio": 1.0,
                "ratio_range": [1.0, 1.0],
                "peak_mib": 1024,
            },
            "TRL": {"median": 2500.0, "ratio": 2.0, "ratio_range": [1.9, 2.1], "peak_mib": 2048},
        },
        "missing": {"vLLM": "not installed"},
    }
    table = benchmark("table")
    assert table.read(["noise", json.dumps(record), '{"scaling": "batch"}']) == [record]
    assert table.markdown([record]).splitlines()[2:] == [
        "| Work, size S | 2.5x | 1,250 ms | TRL: 2,500 ms | 2.00 (1.90 to 2.10) | 12.3 ms | 1,024 "
        "/ 2,048 "
        "| `python benchmarks/work.py --size S` |",
        "| same |  |  | vLLM: not installed |  |  |  |  |",
    ]


def test_growth_is_held_against_the_works(benchmark):
    scaling = benchmark("scaling")
    keys = dict.fromkeys((*scaling.HOST, "mib", "gflop"), 1.0)
    linear = [{**keys, "factor": f, "step": 100.0 * f, "gflop": f} for f in (1, 2, 4)]
    assert scaling.exponent(linear, "step") == pytest.approx(1)
    assert scaling.marks(linear) == []
    square = [{**point, "pack": point["factor"] ** 2} for point in linear]
    assert scaling.marks(square) == ["pack grows as factor^2.00, the work as factor^1.00"]
    large = [{**point, "rewards": 0.2 * point["step"]} for point in linear]
    assert scaling.marks(large) == ["rewards takes 20% of a step"]


# --- our drivers


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("ours/ratchet_grpo.py", ("--prompts", "2", "--group-size", "2", "--new-tokens", "4")),
        (
            "ours/ratchet_generate.py",
            ("--ragged", "--prompts", "4", "--group-size", "1", "--slots", "2"),
        ),
        ("ours/ratchet_given.py", ("--algorithm", "sft", *GIVEN)),
        ("ours/ratchet_given.py", ("--algorithm", "dpo", *GIVEN)),
    ],
)
def test_driver(repository, warm_environment, model, script, arguments):
    shared = ("--model", str(model), "--steps", "1", "--warmup", "1", "--threads", "1")
    line = json.loads(run(repository, script, *shared, *arguments, env=warm_environment)[-1])
    assert line["peer"] == "ratchet"
    assert len(line["seconds"]) == 1
    assert min(line["median_s"], line["peak_rss_mib"], line["gflop"]) > 0
    if "phases_s" in line:
        assert sum(line["phases_s"].values()) <= 1.01 * line["median_s"]


ALONE = ["Ratchet"]
GRPO_STEPS = [ALONE, ["Ratchet, bfloat16"]] if build.has_bfloat16_instructions() else [ALONE]


@pytest.mark.parametrize(
    ("script", "arguments", "records"),
    [
        ("grpo_step.py", (), GRPO_STEPS),
        ("prefix.py", ("--prompts", "1"), [ALONE] * 2),
        ("memory.py", ("--vocabulary", "5000"), [ALONE]),
        ("sft.py", (), [ALONE]),
        ("dpo.py", (), [ALONE]),
        ("generate.py", (), [ALONE] * 2),
        ("evaluation.py", ("--rows", "20"), [ALONE]),
        ("quickstart_vs_trl.py", ("--target", "0", "--start-steps", "1"), [ALONE]),
    ],
)
def test_our_side_of_a_comparison(repository, warm_environment, script, arguments, records):
    check_our_side(run(repository, script, *SMALL, *arguments, env=warm_environment), records)


def test_our_side_of_starts(repository):
    """Interpreters start here, as that is what it measures."""
    rows = ["Ratchet", "Ratchet, evaluated before", "import torch"]
    check_our_side(run(repository, "startup.py", *SMALL), [rows])


def check_our_side(lines, records):
    """Each record has the rows that need no peer, each with a figure."""
    printed = [json.loads(line) for line in lines if line.startswith("{")]
    assert [list(record["rows"]) for record in printed] == records
    for record in printed:
        assert all(row["median"] > 0 for row in record["rows"].values())


def test_scaling(repository, warm_environment):
    knobs = ["--knobs", "length", "model"]
    lines = run(repository, "scaling.py", *SMALL, "--doublings", "1", *knobs, env=warm_environment)
    points = {
        record["scaling"]: record["points"]
        for record in map(json.loads, (x for x in lines if x.startswith("{")))
    }
    assert list(points) == ["length", "model"]
    for first, second in points.values():
        assert 1.5 < second["gflop"] / first["gflop"] < 2.5


def test_without_an_accelerator_the_gpu_benchmark_says_so(repository):
    command = [sys.executable, str(repository / "benchmarks/gpu/qwen3.py"), "--device", "cuda"]
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one here")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no CUDA accelerator" in done.stderr


# --- the peers' side of the command for a GPU, with the parts that are not installed played

VLLM = """
from types import SimpleNamespace
__version__ = "0"

class SamplingParams:
    def __init__(self, *, max_tokens, ignore_eos, detokenize):
        assert ignore_eos and not detokenize
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, model, *, dtype, max_num_seqs, seed, max_model_len):
        assert dtype == "float32" and max_num_seqs == 8 and max_model_len == 1203

    def generate(self, prompts, sampling_params, *, use_tqdm):
        assert all(prompt["prompt_token_ids"] for prompt in prompts)
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * params.max_tokens)])
            for params in sampling_params
        ]
"""


def test_vllms_driver_asks_for_the_workload(repository, model, tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert generate_with_vllm(repository, model)["version"] == "0"


@pytest.mark.needs("vllm")
def test_the_real_vllm_generates_the_workload(repository, model, monkeypatch):
    # One import of vLLM takes long enough, and nothing is timed here.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert generate_with_vllm(repository, model)["version"] != "0"


def generate_with_vllm(repository, model):
    """Return the result of vLLM's driver, which checks the lengths of what vLLM generates."""
    sizes = {"prompts": 2, "group-size": 4, "prompt-tokens": 1200, "new-tokens": 3, "steps": 1}
    words = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    words += ["--model", str(model), "--threads", "1", "--ragged"]
    result = json.loads(run(repository, "peers/vllm_generate.py", *words)[-1])
    assert result["peer"] == "vllm"
    assert result["rate_per_s"] > 0
    return result


def test_a_peer_that_fails_does_not_take_the_other_results_along(benchmark, monkeypatch, capsys):
    side_by_side = benchmark("side_by_side")

    played = []

    def play(driver, arguments, python):
        played.append(driver.name)
        if driver.name == "broken":
            raise SystemExit("peers/broken.py failed with status 1:\nCUDA out of memory")
        return {"median_s": 2.0, "peak_rss_mib": 1, "gflops": 1.0}

    monkeypatch.setattr(side_by_side, "run", play)
    monkeypatch.setattr(sys, "argv", [str(Path(side_by_side.__file__))])
    drivers = [side_by_side.Driver("Ratchet", "", peer=False), side_by_side.Driver("broken", "")]
    chosen = side_by_side.options("").parse_args(["--rounds", "2"])
    case = side_by_side.Case("a case", drivers)
    with pytest.raises(SystemExit, match="out of memory"):
        side_by_side.compare(case, chosen)
    played.clear()
    side_by_side.compare(case, chosen, peers_may_fail=True)
    assert played == ["model", "rates", "Ratchet", "broken", "rates", "Ratchet"]
    record = json.loads(capsys.readouterr().out.splitlines()[0])
    assert list(record["rows"]) == ["Ratchet"]
    assert "out of memory" in record["missing"]["broken"]
    table = benchmark("gpu.run").make_table({"grpo": {**record, "floor": 1.0, "seconds": 3}})
    assert "| grpo | 3 | Ratchet 2000 ms, share of the floor 0%, broken peers/broken.py" in table


@pytest.mark.parametrize("multiplies", [True, False])
def test_each_driver_runs_once_a_round_in_both_precisions(
    multiplies, benchmark, monkeypatch, capsys
):
    side_by_side = benchmark("side_by_side")
    played = []

    def play(driver, arguments, python):
        played.append(driver.name)
        return {"median_s": 2.0, "peak_rss_mib": 1, "gflops": 1.0, "bfloat16_gflops": 1.0}

    monkeypatch.setattr(side_by_side, "run", play)
    monkeypatch.setattr(side_by_side, "has_bfloat16_instructions", lambda: multiplies)
    monkeypatch.setattr(sys, "argv", [str(Path(side_by_side.__file__))])
    drivers = [side_by_side.Driver("Ratchet", "", peer=False), side_by_side.Driver("float32", "")]
    case = side_by_side.Case("a case", drivers, target=3.0)
    chosen = side_by_side.options("").parse_args(["--rounds", "1"])
    side_by_side.compare_precisions(case, chosen, [side_by_side.Driver("autocast", "")])
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[:1] == "{"]
    tables = [(record["case"], record["target"], list(record["rows"])) for record in records]
    if multiplies:
        assert played == ["model", "rates", "Ratchet", "float32", "Ratchet, bfloat16", "autocast"]
        assert tables == [
            ("a case, float32", None, ["Ratchet", "float32"]),
            ("a case, bfloat16", 3.0, ["Ratchet, bfloat16", "autocast", "float32"]),
        ]
    else:
        assert played == ["model", "rates", "Ratchet", "float32", "autocast"]
        assert tables == [("a case", 3.0, ["Ratchet", "float32", "autocast"])]


def test_every_placement_of_the_command_for_a_gpu_is_a_recipe(benchmark, tmp_path):
    gpu = benchmark("gpu.run")
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(gpu.make_recipe("qwen3-0.6b")))
    recipes = [load_config(path, words) for words in gpu.PLACEMENTS.values()]
    assert [recipe.cluster.takes_turns for recipe in recipes] == [False, False, True]
    # vLLM refuses to start if its cache has no room for the longest sequence.
    generator = recipes[-1].stages[0].generator
    context = generator.max_context or read_shape(recipes[-1]).max_positions
    cache_bytes = context * DecoderCost(read_shape(recipes[-1])).kv_bytes(2)
    assert cache_bytes <= generator.kv_cache_gib * 2**30
