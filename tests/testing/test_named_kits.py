"""`ratchet check my_pkg.my_mod:Thing` for environments and rewards."""

import pytest
from typer.testing import CliRunner

from ratchet.cli.main import app
from ratchet.environments.single_turn import Problem, Procedural
from ratchet.types import Scored


class Echo(Procedural):
    name = "echo"

    def sample(self, rng):
        n = rng.randrange(10**6)
        return Problem(f"{n}=", str(n))


class Untyped(Echo):
    async def step(self, message):
        return {"done": True}


class Rude(Echo):
    async def step(self, message):
        raise KeyError("no such room")


def brief(trajectory, task, limit: int = 3):
    return float(len(trajectory.messages[-1].text) < limit)


class Halves:
    async def score(self, trajectories, task):
        return [Scored(0.5) for _ in trajectories][:1]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "words", "status", "said"),
    [
        ("Echo", [], 0, ["an environment", "close releases", "holds"]),
        (
            "Untyped",
            [],
            1,
            [
                "episodes and shapes",
                "fails  step in 'echo/train/0' gives dict, not Step",
                "n/a    an earlier check failed",
            ],
        ),
        ("Rude", [], 1, ["KeyError: 'no such room'"]),
        ("brief", ["limit=5"], 0, ["a reward", "faults are no rewards", "holds"]),
        ("Halves", [], 1, ["1 outcomes for 3 trajectories"]),
    ],
)
def test_what_holds_is_shown_and_the_command_ends_with_1_where_something_fails(
    name, words, status, said
):
    result = CliRunner().invoke(app, ["check", f"{__name__}:{name}", *words])
    assert result.exit_code == status, result.output
    assert all(text in result.output for text in said), result.output
