"""The benchmark of one GPU runs whole, at toy size, so that nothing is first tried on a real one."""

import json
import sys

from support.programs import run_program


def test_the_gpu_benchmark_measures_all_its_cases(repository):
    sizes = ["--size", "T", "--shrink", "64", "--rounds", "1", "--steps", "1", "--threads", "1"]
    benchmark = repository / "benchmarks" / "gpu" / "qwen3.py"
    output = run_program(sys.executable, benchmark, "--ours", *sizes, timeout=None)
    records = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [record["unit"] for record in records] == ["tokens/s", "tokens/s", "ms"]
    for record in records:
        assert record["rows"]["Ratchet"]["median"] > 0
        assert record["floor"] > 0
        assert not record["missing"]
