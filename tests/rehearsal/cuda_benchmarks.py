"""The benchmark of one GPU runs whole, at toy size, so that nothing is first tried on a real one."""

import json
import subprocess
import sys


def test_the_gpu_benchmark_measures_all_its_cases(repository):
    sizes = ["--size", "T", "--shrink", "64", "--rounds", "1", "--steps", "1", "--threads", "1"]
    benchmark = subprocess.run(
        [sys.executable, str(repository / "benchmarks/gpu/qwen3.py"), "--ours", *sizes],
        capture_output=True,
        text=True,
        check=False,
    )
    assert benchmark.returncode == 0, benchmark.stderr
    records = [json.loads(x) for x in benchmark.stdout.splitlines() if x.startswith("{")]
    assert [record["unit"] for record in records] == ["tokens/s", "tokens/s", "ms"]
    for record in records:
        assert record["rows"]["Ratchet"]["median"] > 0
        assert record["floor"] > 0
        assert not record["missing"]
