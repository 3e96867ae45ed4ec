"""Learner and generator on the same accelerators: what can't be is refused when the recipe is read,
and what can be is placed."""

from types import SimpleNamespace

import pytest

from ratchet.config.loader import load_config
from ratchet.errors import ConfigError
from ratchet.training.from_config import start_processes

RECIPE = """
model: {preset: tiny}
tokenizer: {kind: characters}
environment: {kind: sorting}
algorithm: {kind: grpo}
device: cuda
rollouts: {max_staleness: 1}
"""
WORKERS = "generator={kind: workers, workers: 1}"
RESIDENT, TURNS = "cluster.colocated=resident", "cluster.colocated=true"
WRONG = [
    ([TURNS], "generator.kind=engine never frees its accelerator: set generator.kind=vllm; with "
     "generator.kind=workers, cluster.colocated=resident leaves both there"),
    ([RESIDENT], "generator.kind=engine has none: set generator.kind=workers, or remove cluster"),
    ([RESIDENT, WORKERS, "weight_sync={kind: collective, backend: nccl}"],
     "which NCCL can't connect: set weight_sync.kind=auto"),
    ([RESIDENT, "generator={kind: workers, worker: {kind: vllm, weight_transfer: ipc}}",
      "weight_sync={kind: collective, backend: nccl}"],
     "can't connect two on one accelerator: set generator.worker.weight_transfer=auto"),
    (["cluster.colocated=sometimes"], "cluster.colocated: 'sometimes' must be"),
]  # fmt: skip


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize(("overrides", "message"), WRONG)
def test_what_can_not_share_an_accelerator_is_refused(overrides, message, recipe):
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides)
    assert message in str(caught.value)


class Planned(Exception):
    pass


@pytest.mark.parametrize(
    ("overrides", "shares", "takes_turns"),
    [
        (["generator={kind: workers, worker: {kind: vllm}}", TURNS], True, True),
        ([WORKERS, RESIDENT], True, False),
        ([WORKERS], False, False),
    ],
)
def test_workers_are_placed_on_the_learner_s_accelerators(overrides, shares, takes_turns, recipe):
    config = load_config(recipe, overrides)
    assert config.cluster.takes_turns == takes_turns

    def plan(requests):
        raise Planned(requests)

    with pytest.raises(Planned) as caught:
        start_processes(config, SimpleNamespace(plan=plan), SimpleNamespace(model=None))
    learner, generator = caught.value.args[0]
    assert generator.colocated_with == (learner.role if shares else None)
