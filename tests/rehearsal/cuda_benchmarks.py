"""The benchmark of one GPU runs whole, at toy size, so that nothing is first tried on a real one."""

import json
import subprocess
import sys


def run(repository, results, limit_s):
    command = [sys.executable, repository / "benchmarks" / "gpu" / "run.py", "--toy"]
    command += ["--results", results, "--limit-s", str(limit_s)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_stops_at_its_limit_and_goes_on_there(repository, tmp_path):
    results = tmp_path / "gpu.json"
    stopped = run(repository, results, 1)
    assert stopped.returncode == 1
    assert "not finished: correctness, decoding T" in stopped.stderr
    assert "stopped" in json.loads(results.read_text())["correctness"]
    done = run(repository, results, 3000)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(results.read_text())
    assert parts["correctness"]["passes"], parts["correctness"]
    for name, unit in (("decoding", "tokens/s"), ("training", "tokens/s"), ("grpo", "ms")):
        record = parts[f"{name} T"]
        assert record["unit"] == unit
        assert record["rows"]["Ratchet"]["median"] > 0
        assert record["floor"] > 0
    assert parts["push tiny"]["in_process_s"] > 0
    assert parts["memory"]["after_all_mib"] <= 1.01 * parts["memory"]["after_3_mib"]
    assert parts["run: one process"]["steps"] == parts["run: split"]["steps"] == 4
    assert "| correctness |" in done.stdout
