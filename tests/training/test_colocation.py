"""Learner and generator take turns on an accelerator: never both, whatever asks whom, and to the
same result."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from support.offloadable_engine import KIND as OFFLOADABLE
from support.offloadable_engine import OffloadableEngine

from ratchet.algorithms.base import AlgoState
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.resolve import build, resolve
from ratchet.config.schema import OptimizerConfig, RunConfig
from ratchet.data.packing import pack
from ratchet.errors import ConfigError, DataError
from ratchet.experience.async_rollouts.resumable_generator import ResumableGenerator
from ratchet.experience.async_rollouts.tail_batching import (
    CURRENT_COUNTER,
    AbortableGenerator,
    TokenCounter,
)
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.learners.wrapper import LearnerWrapper
from ratchet.models.load import init_policy
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.testing.fakes import FakeGenerator, FakeLearner, FakeWeightSync
from ratchet.training.colocation import GENERATOR, LEARNERS, AcceleratorLock, colocate
from ratchet.training.from_config import build_policy
from ratchet.training.loop import train
from ratchet.training.stage_from_config import build_run
from ratchet.types import Sampling


class Device:
    """Who is on it, and what happened there."""

    def __init__(self):
        self.on, self.events = set(), []

    def work(self, who, what):
        assert self.on == {who}, f"{who} does {what} while {self.on} are on the device"
        self.events.append(what)


class OnDevice:
    can_offload = True

    def place(self, device, who):
        self.device, self.who, self.broken = device, who, False
        device.on.add(who)
        return self

    async def onload(self):
        await asyncio.sleep(0)
        self.device.on.add(self.who)

    async def offload(self):
        await asyncio.sleep(0)
        if self.broken:
            raise RuntimeError("it does not let go")
        self.device.on.discard(self.who)


class PlacedLearner(OnDevice, FakeLearner):
    async def score(self, batch, output_names, *, top_k=0):
        self.device.work(LEARNERS, "score")
        await asyncio.sleep(0)
        return await super().score(batch, output_names, top_k=top_k)

    async def update(self, mini, terms):
        self.device.work(LEARNERS, "update")
        return {}


class PlacedGenerator(OnDevice, FakeGenerator):
    async def generate(self, tokens, sampling, media=()):
        self.device.work(GENERATOR, "generate")
        await asyncio.sleep(0)
        made = await super().generate(tokens, sampling, media)
        self.device.work(GENERATOR, "generated")
        return made


class PlacedWeightSync(FakeWeightSync):
    def __init__(self, device):
        super().__init__()
        self.device = device

    async def push(self, version):
        self.device.work(GENERATOR, "push")
        await super().push(version)

    async def audit(self):
        self.device.work(GENERATOR, "audit")
        return ["a"]


BATCH = pack([make_group("g", [make_trajectory([1], [2, 3])])])


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def parts(device):
    learners = {"policy": PlacedLearner(5).place(device, LEARNERS)}
    generator = PlacedGenerator(lambda tokens, sampling: [3]).place(device, GENERATOR)
    return learners, generator, PlacedWeightSync(device)


def test_never_both_whoever_asks(device, parts):
    learners, generator, link = colocate(*parts)

    async def ask():
        await asyncio.gather(
            *(generator.generate([1], Sampling(max_new_tokens=1)) for _ in range(3))
        )
        await learners["policy"].update(BATCH, [])
        await link.push(1)
        # At once: an order that nobody chose.
        await asyncio.gather(
            learners["policy"].score(BATCH, ["logprobs"]),
            generator.generate([1], Sampling(max_new_tokens=1)),
            learners["policy"].score(BATCH, ["logprobs"]),
            link.push(2),
        )
        assert await link.audit() == ["a"]

    asyncio.run(ask())
    assert sorted(device.events[:6]) == ["generate"] * 3 + ["generated"] * 3
    assert device.events[6:8] == ["update", "push"]
    assert sorted(device.events[8:]) == ["audit", "generate", "generated", "push", "score", "score"]


def test_attempts_that_were_cut_off_hold_up_no_learner(device, parts):
    learners, generator, _ = colocate(*parts)
    asked = AbortableGenerator(generator)

    async def ask():
        CURRENT_COUNTER.set(TokenCounter())
        late = asyncio.create_task(asked.generate([1], Sampling(max_new_tokens=1)))
        while not device.events:
            await asyncio.sleep(0)
        await asked.abort_requests()
        await learners["policy"].update(BATCH, [])
        assert not late.done()
        late.cancel()

    asyncio.run(ask())
    assert device.events == ["generate", "generated", "update"]


def test_attempts_that_were_interrupted_go_on_with_the_new_weights(device):
    """One draws, and one asks while the learner works. An evaluation meanwhile has its turn."""
    shape = DecoderConfig(31, 16, 2, 4, 2, 8, 24)
    engine = OffloadableEngine(OffloadableEngine.Config(), init_policy(shape, seed=0))
    learner = PlacedLearner(5).place(device, LEARNERS)
    learners, generator, _ = colocate({"policy": learner}, engine, FakeWeightSync())
    asked = ResumableGenerator(generator)

    async def ask():
        await learners["policy"].score(BATCH, ["logprobs"])
        request = Sampling(max_new_tokens=20)
        begun = asyncio.create_task(asked.generate([1], request))
        while engine.computed_tokens < 4:
            await asyncio.sleep(0)
        await asked.interrupt_running()
        late = asyncio.create_task(asked.generate([3], request))
        await asyncio.wait_for(learners["policy"].update(BATCH, []), 5)
        assert engine.is_away
        assert (await generator.generate([4], request)).versions.tolist() == [0] * 20
        await engine.commit(1)
        assert not begun.done()
        assert not late.done()
        asked.resume_requests()
        return await asyncio.gather(begun, late)

    begun, late = asyncio.run(ask())
    versions = begun.versions.tolist()
    n_before = versions.count(0)
    assert 0 < n_before < 20
    assert versions == [0] * n_before + [1] * (20 - n_before)
    assert set(late.versions.tolist()) == {1}


def test_the_learners_have_the_last_turn(device, parts):
    _, generator, link = colocate(*parts)

    async def ask():
        await generator.generate([1], Sampling(max_new_tokens=1))
        await link.close()

    asyncio.run(ask())
    assert device.on == {LEARNERS}


def test_a_turn_that_could_not_begin_begins_anew(device, parts):
    learners, generator, _ = colocate(*parts)
    parts[0]["policy"].broken = True

    async def ask():
        with pytest.raises(RuntimeError, match="does not let go"):
            await generator.generate([1], Sampling(max_new_tokens=1))
        parts[0]["policy"].broken = False
        await generator.generate([1], Sampling(max_new_tokens=1))
        await learners["policy"].score(BATCH, ["logprobs"])

    asyncio.run(ask())
    assert device.events == ["generate", "generated", "score"]


def test_an_error_or_a_cancelled_wait_ends_the_turn(device, parts):
    learners, generator, _ = colocate(*parts)

    async def ask():
        with pytest.raises(DataError, match="empty prompt"):
            await generator.generate([], Sampling(max_new_tokens=1))
        waiting = asyncio.create_task(generator.generate([1], Sampling(max_new_tokens=1)))
        await asyncio.sleep(0)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(learners["policy"].update(BATCH, []), 5)

    asyncio.run(ask())
    assert device.events[-1] == "update"


def test_who_cannot_leave_is_refused():
    generator = FakeGenerator(lambda tokens, sampling: [3])
    with pytest.raises(
        ConfigError, match=r"cluster\.colocated=true .* but FakeGenerator can't be offloaded"
    ):
        AcceleratorLock({GENERATOR: [generator]})


DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_a_learner_that_left_goes_on_with_the_same_bits(device, tmp_path):
    """Weights, moments and a scalar head; saved and loaded while away too."""
    shape = DecoderConfig(23, 16, 2, 4, 2, 8, 24, init_std=0.3)
    algorithm = build(resolve("algorithm", {"kind": "sft"}))

    def run(*, leaves):
        learner = LocalLearner(
            LocalConfig(),
            init_policy(shape, seed=0, device=torch.device(device)),
            optimizer=OptimizerConfig(),
        )
        before = [id(parameter) for parameter in learner.model.parameters()]

        async def steps():
            for step in range(3):
                if leaves:
                    await learner.offload()
                    await learner.offload()
                    assert {p.device.type for p in learner.model.parameters()} == {"cpu"}
                    learner.save(tmp_path / str(step))
                    learner.load(tmp_path / str(step))
                    await learner.onload()
                weighed = algorithm.weigh(BATCH, AlgoState())
                await learner.update(weighed, algorithm.losses["policy"])

        asyncio.run(steps())
        assert before == [id(parameter) for parameter in learner.model.parameters()]
        return {shard.name: shard.tensor.cpu() for shard in learner.weights()}

    stayed, left = run(leaves=False), run(leaves=True)
    assert all(torch.equal(stayed[name], left[name]) for name in stayed)


@pytest.mark.medium
def test_attempts_of_a_run_that_takes_turns_go_on_in_later_steps():
    """Some have tokens of several versions, and each is trained on in time."""
    config = RunConfig.model_validate({
        "threads": 1,
        "device": "cpu",
        "model": {"preset": "tiny", "overrides": {"hidden_size": 16, "n_layers": 1}},
        "tokenizer": {"kind": "characters"},
        "cluster": {"colocated": True},
        "stages": [{
            "name": "rl",
            "algorithm": {"kind": "decoupled_ppo", "group_size": 2},
            "environment": {"kind": "sorting"},
            "generator": {"kind": OFFLOADABLE},
            "sampling": {"max_new_tokens": 60, "stop": ["0"]},
            "evaluation": {"every": 2, "tasks": 2},
            "rollouts": {"max_staleness": 2, "order": "ready"},
            "steps": 5,
            "batch_size": 1,
        }],
    })  # fmt: skip
    policy = build_policy(config)
    generator = policy.generator
    assert isinstance(generator, OffloadableEngine)
    taken = []

    class Taken(LearnerWrapper):
        async def update(self, mini, terms):
            assert generator.is_away
            return await super().update(mini, terms)

    def keep(step, stage, groups, *others):
        taken.extend((step - 1, row) for group in groups for row in group.trajectories)

    async def run():
        run = build_run(
            config,
            0,
            policy,
            recorder=SimpleNamespace(add=keep, flush=lambda: None),
            wrap_roles=[lambda roles: {name: Taken(role) for name, role in roles.items()}],
        )
        await train(run)
        await run.close()

    asyncio.run(run())
    versions = [(step, set(row.versions[row.versions >= 0].tolist())) for step, row in taken]
    assert len(versions) == 5 * 2
    assert all(step - 2 <= min(drew) and max(drew) <= step for step, drew in versions)
    assert any(len(drew) > 1 for _, drew in versions)
