"""The README's example runs as it stands, and learns."""

import re
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_example_runs_and_learns(repository, tmp_path):
    readme = (repository / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 24
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    accuracy = [int(percent) for percent in re.findall(r": (\d+)% of held-out", done.stdout)]
    assert len(accuracy) == 2, done.stdout
    assert accuracy[0] > 40
    assert accuracy[1] > accuracy[0]
