"""The kit's invariances and properties on batches that hypothesis draws, of every built-in
algorithm: a batch that breaks one is shrunk to its seed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.config.registry import KINDS
from ratchet.testing.algorithms import CHECKS, INVARIANCES, Case
from ratchet.testing.check_command import build_builtin
from ratchet.testing.synthetic import Draw

pytestmark = pytest.mark.slow
DRAWS = st.builds(Draw, seed=st.integers(0, 2**32 - 1), longest=st.sampled_from([0, 0, 16]))


@pytest.mark.parametrize("kind", KINDS["algorithm"])
@settings(max_examples=settings.default.max_examples // 4)
@given(draw=DRAWS)
def test_invariances_hold_on_any_batch(kind: str, draw: Draw):
    case = Case(build_builtin(kind), draw)
    for check in INVARIANCES.values():
        check(case)


@pytest.mark.parametrize("kind", KINDS["algorithm"])
@settings(max_examples=settings.default.max_examples // 6)
@given(draw=DRAWS)
def test_claimed_properties_hold_on_any_batch(kind: str, draw: Draw):
    algorithm = build_builtin(kind)
    for name in ("isolated", "equal_rewards", "lone_attempt"):
        if name not in algorithm.exempt:
            CHECKS[name](algorithm, [draw])
