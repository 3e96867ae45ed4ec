"""What a rank is sent is its share: with ranks, it shrinks; with the batch and the ranks, it
stays."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "scale.py"


@pytest.fixture(scope="module")
def scale():
    spec = spec_from_file_location("benchmarks_scale", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_rank_receives_its_share(scale):
    few, many, twice = (scale.measure(*case) for case in ((4, 512, 1), (16, 512, 1), (16, 2048, 1)))
    assert many.rank_mib < 0.4 * few.rank_mib
    assert twice.rank_mib / many.rank_mib == pytest.approx(twice.tokens / many.tokens, rel=0.3)
    peers = scale.measure(16, 512, 4)
    # four data ranks, whose four ranks get the same
    assert peers.rank_mib == pytest.approx(few.rank_mib, rel=0.05)
    assert peers.microbatches == 4 * few.microbatches
    assert scale.table([few, peers]).count("\n") == 3
