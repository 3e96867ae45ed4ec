"""What is asked of the machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ratchet.executors.freeze import get_peak_memory


@pytest.mark.medium
def test_the_peak_is_this_processs_own() -> None:
    """Not what its parent had when it started it, and not what it has now."""
    large = bytearray(b"x") * 2**28
    assert get_peak_memory() >= len(large)
    code = "from ratchet.executors.freeze import get_peak_memory; print(get_peak_memory())"
    child = int(
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    )
    del large
    assert 2**23 < child < 2**28 < get_peak_memory()
