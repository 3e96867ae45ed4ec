"""Programs that start at once (tests/support/warm_python) end as programs of their own do."""

import signal
import subprocess
import sys

import pytest
from support.warm_python import warm_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs start as ever there")


@pytest.fixture(scope="module")
def warm():
    with warm_python(["json", "graphlib"]) as environment:
        yield environment


def run(warm, *words, **options):
    return subprocess.run(
        [sys.executable, *words], env=warm, capture_output=True, text=True, timeout=60, **options
    )


@pytest.mark.medium
def test_it_has_the_modules_the_arguments_and_the_status(warm, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "print('graphlib' in sys.modules, sys.argv[1:], sys.path[0], os.getcwd(), input())\n"
        "sys.exit('no')\n"
    )
    done = run(warm, script, "word", cwd=tmp_path, input="line")
    assert done.stdout.split() == ["True", "['word']", str(tmp_path), str(tmp_path), "line"]
    assert (done.returncode, done.stderr) == (1, "no\n")
    assert (
        run(warm, "-m", "json.tool", input='{"a":  1}', cwd=tmp_path).stdout == '{\n    "a": 1\n}\n'
    )


def test_an_error_and_a_signal_end_it(warm):
    failed = run(warm, "-c", "1 / 0")
    assert failed.returncode == 1
    assert failed.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert run(warm, "-c", "import os; os.kill(os.getpid(), 15)").returncode == -signal.SIGTERM


def test_it_dies_with_the_one_that_started_it(warm):
    """And so does what it started itself: the pipe closes, which both of them hold."""
    inner = "import time; print('on', flush=True); time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", code], env=warm, stdout=subprocess.PIPE) as outer:
        assert outer.stdout.readline() == b"on\n"
        outer.kill()
        assert outer.stdout.read() == b""
