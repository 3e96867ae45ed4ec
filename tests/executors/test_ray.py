"""Groups as actors of Ray. All in one file: xdist then starts one Ray, for one of its workers."""

import os
import signal
from functools import cache

import numpy as np
import pytest
import torch
from experience.ledger_faults import find_ledger_faults
from recipes.replayed import TOPOLOGIES, after_sft, assert_alike, made
from recipes.test_generator_workers import (
    GRPO,
    RANKS,
    RECIPE,
    SFT,
    STAGE,
    WORKERS,
    config,
    metrics_of,
)
from support.rotation import todays

from ratchet.config.schema import RunConfig
from ratchet.errors import ConfigError, WorkerDied, WorkerError
from ratchet.executors.config import RayClusterConfig
from ratchet.executors.freeze import freeze
from ratchet.executors.placement import Accelerator, ClusterNode, ResourceRequest
from ratchet.experience.sources.prompt_ledger import PromptLedger, read_ledger
from ratchet.generators.workers.pool import GeneratorPool

pytestmark = [pytest.mark.needs("ray"), pytest.mark.slow]
COLLECTIVE = "executors.components:Collective"
TINY = "executors.components:Tiny"


@pytest.fixture(scope="module")
def executor(ray_token):
    """With four made-up accelerators. Ray's authentication is on, by a token of the tests' own.

    It ends with this file: Ray ends a driver without a word when its node was silent for
    `silence_s`, and this process has other files to test.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN_PATH", ray_token)
        from ratchet.executors import ray as module

        machine = ClusterNode("here", 4, tuple(map(Accelerator, range(4))))
        patch.setattr(module, "find_node", lambda threads, device: machine)
        config = RayClusterConfig(object_store_mib=128, silence_s=30, timeout_s=200)
        made = module.RayExecutor(config, threads=4, device="cpu")
        yield made
        made.close()


@pytest.fixture
def start(executor):
    made = []

    def start(ranks=2, factory=TINY, *, gpus=0):
        executor.plan([ResourceRequest("learner", ranks, cpus=0.25, gpus=gpus)])
        group = executor.group("learner")
        made.append(group)
        group.build_now(factory)
        return group

    yield start
    for group in made:
        group.close()


def test_calls_places_and_errors(start, executor):
    group = start(2)
    first, second = group.call_now("where")
    assert (first.rank, second.rank, second.local_rank, first.threads) == (0, 1, 1, 1)
    assert [call.result() for call in [group.submit("add", 1) for _ in range(3)]] == [
        [1, 1],
        [2, 2],
        [3, 3],
    ]
    assert group.submit_each("add_later", [(1,), (2,)]).result() == [4, 5]
    array = np.ones(300_000)
    for back in group.call_now("double", array):
        np.testing.assert_array_equal(back, array * 2)
        back += 1
    tensor = torch.arange(6, dtype=torch.bfloat16)
    assert torch.equal(group.call_now("double", tensor)[1], tensor * 2)
    with pytest.raises(KeyError, match="no such thing") as caught:
        group.call_now("fail", 1)
    assert "learner rank 1 of 2 on " in caught.value.__notes__[0]
    assert group.call_now("environ", "RAY_AUTH_MODE") != ["disabled"] * 2


def test_a_collective(start):
    group = start(2, COLLECTIVE)
    assert [float(tensor[0]) for tensor in group.call_now("sum")] == [3.0, 3.0]
    with pytest.raises(WorkerDied, match=r"learner rank 1 of 2 on .* died") as caught:
        group.call_now("sum", 50, (1, 20))
    assert caught.value.rank == 1
    with pytest.raises(WorkerDied):
        group.call_now("sum")


def test_last_words(start):
    group = start(2)
    with pytest.raises(WorkerDied, match="in 'die'") as caught:
        group.call_now("die", 1)
    assert caught.value.tail.endswith("last words")


@pytest.mark.slow  # it waits for the whole silence
def test_silence(start):
    group = start(2)
    pids = group.call_now("pid")
    call = group.submit("hang")
    os.kill(pids[0], signal.SIGSTOP)
    with pytest.raises(WorkerDied, match=r"rank 0 of 2 .* was silent for 30 s, and was killed"):
        call.result()


def test_accelerators_and_roles_beside_each_other(executor):
    needs = [
        ResourceRequest("learner", 2, gpus=1, cpus=0.25),
        ResourceRequest("generator", 2, gpus=2, colocated_with="learner"),
    ]
    executor.plan(needs)
    groups = [executor.group(need.role) for need in needs]
    for group in groups:
        group.build_now(TINY)
    learner, generator = groups
    assert learner.call_now("environ", "CUDA_VISIBLE_DEVICES") == ["0", "1"]
    assert generator.call_now("environ", "CUDA_VISIBLE_DEVICES") == ["0,1", "2,3"]
    assert [place.device for place in generator.call_now("where")] == ["cuda:0"] * 2
    for group in groups:
        group.close()


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """(the recipe, what one process made of it), by the kind of model."""

    @cache
    def of(kind):
        config = after_sft(kind, tmp_path_factory.mktemp(kind) / "model")
        return config, made(config)

    return of


@pytest.mark.parametrize("name", ["one worker", *todays(["pp2", "fsdp2 x tp2", "ep2"], 1)])
def test_the_quick_starts_steps_on_ray(name, executor, embedded):
    """As tests/recipes/test_ranks.py has them, where one process is meant too. What the ranks share
    out is tried there in all its forms each day, here in one."""
    kind, learner = TOPOLOGIES.get(name, ("dense", {}))
    config, wanted = embedded(kind)
    assert_alike(made(config, executor, wanted.groups, **learner), wanted)


def test_generators_on_ray(executor, tmp_path, monkeypatch):
    """Beside learners there, and beside one in the driver; one that dies is replaced."""
    wanted = metrics_of(config(**RANKS), executor, tmp_path)
    assert metrics_of(config(**RANKS, generator=WORKERS), executor, tmp_path) == wanted
    doomed = []

    def dies_once(router, *start):
        began(router, *start)
        doomed.append(router)
        os.kill(router.queues[1].process.members[0].pid, signal.SIGKILL)

    began = GeneratorPool.start
    monkeypatch.setattr(GeneratorPool, "start", dies_once)
    settings = config(generator={**WORKERS, "recovery": "restart"})
    found = metrics_of(settings, executor, tmp_path)
    assert sum(row.pop("generator/restarts", 0) for row in found) == doomed[0].n_restarts == 1
    assert found == metrics_of(config(), executor, tmp_path)


CHOSEN = {"examples": 12, "curriculum": {"memory": 0.2}}
REPLAY = {"groups": 3, "max_age": 2, "priority": "uniform"}


def test_a_curriculum_and_replay_on_ray(executor, tmp_path):
    """In step they choose the tasks and groups that they choose in one process; ahead of it they
    keep their bounds."""

    def played(name, rollouts, **keys):
        """The metrics of its steps, and what its ledger says."""
        chosen = {**CHOSEN, **keys, "rollouts": {"replay": REPLAY, **rollouts}}
        trained = {
            **GRPO,
            "algorithm": {"kind": "decoupled_ppo", "group_size": 4},
            "steps": 6,
            **chosen,
        }
        stages = [{**STAGE, **SFT}, {**STAGE, **trained}]
        ledger = PromptLedger(tmp_path / f"{name}.jsonl")
        settings = freeze(RunConfig.model_validate({**RECIPE, "stages": stages}))
        found = metrics_of(settings, executor, tmp_path, ledger=ledger)[SFT["steps"] :]
        ledger.close()
        lines = list(read_ledger(tmp_path / f"{name}.jsonl"))
        assert not find_ledger_faults(
            iter(lines), max_staleness=rollouts.get("max_staleness", 0), max_age=REPLAY["max_age"]
        )
        assert (
            sum(line["event"] == "trained" for line in lines)
            == (SFT["steps"] + 6) * STAGE["batch_size"]
        )
        assert [row["rollout/replay/share"] for row in found] == [0.0, *[3 / 11] * 5]
        assert (
            found[-1]["rollout/curriculum/tried_share"]
            > found[0]["rollout/curriculum/tried_share"]
            > 0
        )
        return found, lines

    assert played("ray", {}, generator=WORKERS) == played("here", {})
    found, _ = played("ahead", {"max_staleness": 1, "order": "ready"}, generator=WORKERS)
    assert max(row.get("rollout/staleness_max", 0) for row in found) == REPLAY["max_age"]


@pytest.mark.parametrize(
    ("rollouts", "staleness"),
    [
        ({"tail_batching": 2}, 0),
        (
            {"max_staleness": 2, "order": "ready", "adaptive": {"staleness": 0.5, "mismatch": 1.0}},
            2,
        ),
    ],
    ids=["tail_batching", "adaptive"],
)
def test_tail_batching_and_adaptive_concurrency_on_ray(rollouts, staleness, executor, tmp_path):
    """Each prompt is trained on once and in time, and none is begun for nothing."""
    algorithm = {"kind": "decoupled_ppo", "group_size": 2}
    trained = {
        **GRPO,
        "algorithm": algorithm,
        "steps": 6,
        "rollouts": rollouts,
        "sampling": {"max_new_tokens": 40},
    }
    ledger = PromptLedger(tmp_path / "ledger.jsonl")
    settings = freeze(
        RunConfig.model_validate(
            {**RECIPE, "stages": [{**STAGE, **SFT}, {**STAGE, **trained, "generator": WORKERS}]}
        )
    )
    found = metrics_of(settings, executor, tmp_path, ledger=ledger)[SFT["steps"] :]
    ledger.close()
    lines = list(read_ledger(tmp_path / "ledger.jsonl"))
    assert not find_ledger_faults(iter(lines), max_staleness=staleness)
    by_event = {
        event: {line["id"] for line in lines if line["event"] == event}
        for event in ("issued", "deferred", "trained")
    }
    assert by_event["issued"] == by_event["trained"]
    assert len(by_event["trained"]) == (SFT["steps"] + 6) * STAGE["batch_size"]
    assert bool(by_event["deferred"]) == ("tail_batching" in rollouts)
    assert sum(row.get("rollout/tails/deferred", 0) for row in found) == len(by_event["deferred"])
    assert all(row.get("rollout/adaptive/groups", 0) <= 3 * STAGE["batch_size"] for row in found)
    assert ("rollout/adaptive/waited" in found[0]) == ("adaptive" in rollouts)


def test_too_much_is_refused(executor, monkeypatch):
    with pytest.raises(ConfigError, match=r"learner +5 x 1 accelerator +4 of 5"):
        executor.plan([ResourceRequest("learner", 5, gpus=1)])
    executor.plan([ResourceRequest("learner", 3, gpus=1)])
    monkeypatch.setattr("ratchet.executors.ray.ROOM_S", 0.5)
    monkeypatch.setattr(executor, "release", lambda: None)  # what another job holds
    with pytest.raises(ConfigError, match="the cluster has these, but other jobs use them"):
        executor.plan([ResourceRequest("other", 2, gpus=1)])


def test_less_than_the_recipe_says(executor):
    from ratchet.executors.ray import RayExecutor

    with pytest.raises(ConfigError, match=r"cluster.nodes=2, but the Ray cluster has 1"):
        RayExecutor(RayClusterConfig(nodes=2), threads=1, device="cpu").plan(
            [ResourceRequest("learner", 1)]
        )
    with pytest.raises(ConfigError, match=r"cluster.gpus_per_node=9, but node .* has 4"):
        RayExecutor(RayClusterConfig(gpus_per_node=9), threads=1, device="cpu").plan(
            [ResourceRequest("learner", 1)]
        )


def test_a_ray_that_takes_too_long_to_start_is_no_bug(monkeypatch):
    """Ray raises a bare Exception then. --supervise starts the run again, as after any WorkerError."""
    from ratchet.executors import ray as module

    def time_out(**options):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(module.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(module.ray, "init", time_out)
    executor = module.RayExecutor(RayClusterConfig(), threads=1, device="cpu")
    with pytest.raises(WorkerError, match="Ray does not start: The current node timed out"):
        executor.plan([ResourceRequest("learner", 1)])
    executor.close()
