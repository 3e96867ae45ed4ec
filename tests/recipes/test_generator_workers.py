"""A run samples the same tokens and takes the same steps wherever its generators and its learner
live, whatever link lies between them."""

import asyncio

import pytest
from pydantic import ValidationError

from ratchet.config.checks.stages import conflicts
from ratchet.config.resolve import resolve
from ratchet.config.schema import RunConfig
from ratchet.errors import ConfigError
from ratchet.executors.config import LocalClusterConfig
from ratchet.executors.freeze import freeze
from ratchet.executors.local import LocalExecutor
from ratchet.training.from_config import build_policy, check_stages, start_processes
from ratchet.training.loop import train
from ratchet.training.stage_from_config import build_run

pytestmark = pytest.mark.slow

RECIPE = {
    "name": "probe",
    "threads": 1,
    "device": "cpu",
    "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
}
STAGE = {
    "environment": {"kind": "sorting", "digits": 2},
    "sampling": {"max_new_tokens": 3},
    "evaluation": {"tasks": 8},
    "optimizer": {"lr": 1e-3},
    "parity": {"every": 1, "threshold": 1e-5},
    "batch_size": 8,
}
SFT = {"name": "sft", "algorithm": {"kind": "sft"}, "steps": 10}
GRPO = {
    "name": "grpo",
    "algorithm": {"kind": "grpo", "group_size": 4, "kl": {"coef": 0.01}},
    "steps": 3,
}
RANKS = {"learner": {"kind": "dtensor", "dp_shard": 2, "micro_batch_tokens": 64}}
WORKERS = {"kind": "workers", "worker": {"kind": "engine", "kv_cache_gib": 0.01}}
LINKS = [
    {"kind": "auto"},
    {"kind": "shared_memory"},
    {"kind": "collective"},
    {"kind": "files"},
    {"kind": "delta", "dtype": None},
    {"kind": "delta", "dtype": None, "through": "shared_memory"},
    {"kind": "delta", "dtype": None, "through": "collective"},
]


def config(**keys):
    stages = [{**STAGE, **own, **keys} for own in (SFT, GRPO)]
    return freeze(RunConfig.model_validate({**RECIPE, "stages": stages}))


def metrics_of(settings, executor, directory, *, ledger=None):
    """Of every step, without those that are times."""
    found = []

    def observe(step, metrics):
        found.append(
            {
                name: value
                for name, value in metrics.items()
                if not name.startswith(("time/", "system/"))
            }
        )

    policy = start_processes(settings, executor, build_policy(settings))

    async def play():
        try:
            for index in range(len(settings.stages)):
                run = build_run(
                    settings,
                    index,
                    policy,
                    directory=directory,
                    observers=(observe,),
                    ledger=ledger,
                )
                await train(run)
                await run.close()
        finally:
            await policy.close()

    try:
        asyncio.run(play())
    finally:
        if policy.ranks is not None:
            policy.ranks.close()
    return found


@pytest.fixture(scope="module")
def executor():
    made = LocalExecutor(LocalClusterConfig(), threads=1, device="cpu")
    yield made
    made.close()


@pytest.fixture(scope="module")
def on_ranks(executor, tmp_path_factory):
    """The learner in two processes, the generator in this one."""
    return metrics_of(config(**RANKS), executor, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    "weight_sync",
    LINKS,
    ids=lambda section: "-".join(filter(None, (section["kind"], section.get("through")))),
)
def test_every_weight_sync_serves_several_generators(executor, on_ranks, tmp_path, weight_sync):
    assert len(on_ranks) == 13
    assert (
        metrics_of(config(**RANKS, generator=WORKERS, weight_sync=weight_sync), executor, tmp_path)
        == on_ranks
    )
    assert not any(tmp_path.rglob("*.safetensors"))


def test_one_generator_alone_or_beside_a_learner_of_this_process(executor, on_ranks, tmp_path):
    assert (
        metrics_of(config(**RANKS, generator={**WORKERS, "workers": 1}), executor, tmp_path)
        == on_ranks
    )
    embedded = metrics_of(config(), executor, tmp_path)
    assert metrics_of(config(generator=WORKERS), executor, tmp_path) == embedded


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_play_whole_groups(executor, tmp_path, workers):
    """With a reward, and a greedy baseline beside the attempts; groups don't divide evenly. Several
    stages begin there."""
    algorithm = {"kind": "remax", "group_size": 3}
    stages = [
        {**STAGE, **SFT},
        {**STAGE, **GRPO, "rewards": [{"kind": "exact_match", "weight": 2.0}]},
        {
            **STAGE,
            "name": "again",
            "algorithm": algorithm,
            "steps": 2,
            "environment": {"kind": "sorting", "digits": 3},
        },
    ]

    def settings(**keys):
        return freeze(
            RunConfig.model_validate({**RECIPE, "stages": [{**stage, **keys} for stage in stages]})
        )

    groups = {**WORKERS, "workers": workers, "worker_runs": "groups"}
    assert metrics_of(settings(generator=groups), executor, tmp_path) == metrics_of(
        settings(), executor, tmp_path
    )


def test_what_can_not_be_played_elsewhere_is_refused():
    groups = {**WORKERS, "worker_runs": "groups"}
    for key, value in (
        ("max_staleness", 1),
        ("dynamic_sampling", True),
        ("group_filter", {"kind": "reward_std", "above": 0.1}),
        ("redundant_attempts", 1),
        ("tail_batching", 1),
    ):
        found = [
            conflict.message
            for conflict in conflicts(config(generator=groups, rollouts={key: value}))
        ]
        assert any(
            f"rollouts.{key} is not supported: remove it, or set generator.worker_runs=completions"
            in said
            for said in found
        )
    assert not any(
        "worker_runs" in conflict.message for conflict in conflicts(config(generator=groups))
    )
    with pytest.raises(ValidationError, match="set recovery=none, or worker_runs=completions"):
        config(generator={**groups, "recovery": "restart"})


def test_media_need_a_processor_here():
    settings = config(generator={**WORKERS, "worker_runs": "groups"})
    policy = build_policy(settings)
    policy.renderer.processor = object()
    with pytest.raises(ConfigError, match=r"Set generator\.worker_runs=completions"):
        check_stages(settings, policy)


def test_a_model_of_transformers(executor, tmp_path):
    policy = build_policy(config())
    policy.model.save(tmp_path / "model")
    policy.tokenizer.save(tmp_path / "model")

    def settings(generator):
        stages = [{**STAGE, **GRPO, "steps": 2, "batch_size": 2, "generator": generator}]
        model = {"path": str(tmp_path / "model"), "backend": "transformers"}
        return freeze(RunConfig.model_validate({**RECIPE, "model": model, "stages": stages}))

    embedded = metrics_of(settings({"kind": "hf"}), executor, tmp_path)
    workers = {"kind": "workers", "worker": {"kind": "hf"}, "workers": 1}
    for ours, theirs in zip(
        metrics_of(settings(workers), executor, tmp_path), embedded, strict=True
    ):
        # a row of its batches depends on the others, in the last bits
        assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"generator": WORKERS}, r"Set learner\.kind=dtensor"),
        (
            {**RANKS, "generator": {"kind": "workers", "worker": {"kind": "vllm"}}},
            "vLLM starts its own processes",
        ),
        (
            {**RANKS, "generator": {**WORKERS, "recovery": "restart"}},
            "can't restart processes under torchrun",
        ),
    ],
)
def test_what_torchrun_cannot_give(executor, keys, said):
    settings = config(**keys).model_copy(
        update={"cluster": resolve("cluster", {"kind": "torchrun"})}
    )
    with pytest.raises(ConfigError, match=said):
        start_processes(settings, executor, build_policy(settings))
