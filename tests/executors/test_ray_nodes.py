"""Ray on several nodes (`ray_nodes_play.py`)."""

import os
import sys
from pathlib import Path

import pytest
from support.programs import run_program

PLAY = Path(__file__).with_name("ray_nodes_play.py")


@pytest.mark.slow
@pytest.mark.needs("ray")
def test_learners_and_generators_on_nodes_of_which_one_is_lost_and_replaced(ray_token):
    paths = os.pathsep.join(map(str, (PLAY.parents[1], PLAY.parents[2])))
    tokens = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": ray_token}
    run_program(
        sys.executable, PLAY, env={**os.environ, **tokens, "PYTHONPATH": paths}, timeout=600
    )
