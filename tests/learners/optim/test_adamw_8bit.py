"""AdamW with means of 8 bits: near AdamW, a quarter of its bytes, and quantised again to the same
bits."""

import asyncio
import copy

import pytest
import torch
from learners.ranks import run_ranks
from learners.test_local import learner, model, prepared
from torch import nn

from ratchet.algorithms.config.sft import SFTConfig
from ratchet.algorithms.sft import build_sft
from ratchet.config.schema import OptimizerConfig
from ratchet.errors import CheckpointError
from ratchet.learners.optim import adamw_8bit
from ratchet.learners.optim.adamw import AdamW
from ratchet.learners.optim.adamw_8bit import BLOCK_SIZE, AdamW8bit, MomentCodes
from ratchet.learners.optim.config import AdamW8bitConfig
from ratchet.testing.conformance import check_learner

pytestmark = pytest.mark.needs("bitsandbytes")
CONFIG = AdamW8bitConfig(lr=1.0, betas=(0.9, 0.99), weight_decay=0.1, ema_decay=0.5)
# the second is not whole blocks
SHAPES = {"matrix": (70, 100), "odd": (3, 41, 43), "vector": (5000,), "small": (8, 8)}


def parameters(shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [
        (name, nn.Parameter(torch.randn(shape, generator=generator)))
        for name, shape in shapes.items()
    ]


def give_gradients(named, step):
    """Of magnitudes from 1e-4 to 1 in one block."""
    for i, (_, p) in enumerate(named):
        scale = torch.logspace(-4, 0, 97).repeat(-(-p.numel() // 97))[: p.numel()].view_as(p)
        p.grad = torch.sin(p.detach() * (i + 1) + step) * scale


def test_what_was_restored_is_quantised_to_the_same_bits():
    codes, generator = MomentCodes(), torch.Generator().manual_seed(1)
    numbers = torch.randn(40 * BLOCK_SIZE + 17, generator=generator)
    numbers[:BLOCK_SIZE] = 0
    numbers[BLOCK_SIZE : 2 * BLOCK_SIZE] = -numbers[BLOCK_SIZE : 2 * BLOCK_SIZE].abs()
    for key, given in (("mean", numbers), ("root", numbers.abs())):
        quantised, scales = codes.quantise(given, key)
        assert quantised.dtype == torch.uint8
        restored = codes.restore(quantised, scales, key)
        # codes are dense around zero: the largest gap of either map is 1/64 of the scale
        within = given.abs().view(-1)
        assert (restored - given).abs().max() <= scales.abs().max() / 64 < within.max()
        again, same = codes.quantise(restored, key)
        assert torch.equal(quantised, again)
        assert torch.equal(scales, same)
        assert not restored[given == 0].any()
    root = codes.restore(*codes.quantise(numbers.abs(), "root"), "root")
    assert torch.equal((root * root).sqrt(), root)


def test_steps_are_near_those_of_adamw():
    """Within a sixth of the way, where gradients of a block lie orders apart: those that quantise
    the square itself, and all of it, leave it by many times its length."""
    ours, theirs = parameters(), parameters()
    made, expected = AdamW8bit(CONFIG, ours), AdamW(CONFIG, theirs)
    begun = {name: p.detach().clone() for name, p in ours}
    for step in range(20):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        made.step(1e-2)
        expected.step(1e-2)
    for (name, a), (_, b) in zip(ours, theirs, strict=True):
        way = (b - begun[name]).norm()
        assert (a - b).norm() <= (way / 6 if name != "small" else 0), name


def test_runs_of_a_large_matrix_are_taken_one_by_one(monkeypatch):
    whole, parts = parameters(), parameters()
    first, second = AdamW8bit(CONFIG, whole), AdamW8bit(CONFIG, parts)
    for step in range(3):
        give_gradients(whole, step)
        give_gradients(parts, step)
        first.step(0.01)
        with monkeypatch.context() as patched:
            patched.setattr(adamw_8bit, "CHUNK_SIZE", 2 * BLOCK_SIZE)
            second.step(0.01)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(whole, parts, strict=True))
    assert first.state["matrix"]["step"] == second.state["matrix"]["step"] == 3


def test_the_means_take_a_quarter():
    def kept(kind):
        named = parameters({"matrix": (512, 256)})
        made = kind(CONFIG.model_copy(update={"ema_decay": None}), named)
        give_gradients(named, 0)
        made.step(0.01)
        return sum(moment.nbytes for moment in made.state["matrix"].values())

    assert kept(AdamW8bit) / kept(AdamW) == pytest.approx(0.25, abs=0.01)


def test_it_goes_on_from_its_state_as_if_nothing_had_been():
    whole, resumed, moved = parameters(), parameters(), parameters()
    first, second, third = (AdamW8bit(CONFIG, named) for named in (whole, resumed, moved))
    for step in range(4):
        if step == 2:
            for (_, a), (_, b), (_, c) in zip(whole, resumed, moved, strict=True):
                b.data.copy_(a)
                c.data.copy_(a)
            second.load(copy.deepcopy(first.state))
            for name, p in moved:  # by plain numbers, as ranks do
                third.init_state(name, p)["step"].fill_(2)
                plain = third.get_moments(name)
                assert all(value.shape == p.shape for value in plain.values())
                for key, value in first.get_moments(name).items():
                    plain[key].copy_(value)
                third.store(name, plain)
        give_gradients(whole, step)
        first.step(0.01)
        for named, made in ((resumed, second), (moved, third)) if step >= 2 else ():
            give_gradients(named, step)
            made.step(0.01)
    for made in (second, third):
        assert all(
            torch.equal(kept, made.state[name][key])
            for name, m in first.state.items()
            for key, kept in m.items()
        )
    for (_, a), (_, b), (_, c) in zip(whole, resumed, moved, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize(("saved", "loads"), [(AdamW, AdamW8bit), (AdamW8bit, AdamW)])
def test_a_state_of_the_other_kind_is_refused(saved, loads):
    named = parameters()
    made = saved(CONFIG, named)
    give_gradients(named, 0)
    made.step(0.1)
    with pytest.raises(CheckpointError, match="saved with another optimizer section"):
        loads(CONFIG, parameters()).load(made.state)


# --- in a learner


@pytest.fixture
def all_quantised(monkeypatch):
    monkeypatch.setattr(adamw_8bit, "MIN_QUANTISED_SIZE", 1)


def test_conformance(tmp_path, all_quantised):
    batch, terms = prepared(build_sft(SFTConfig()))
    make = lambda: learner(net=model(dtype=torch.float32), optimizer=AdamW8bitConfig(lr=1e-2))  # noqa: E731
    asyncio.run(check_learner(make, batch, terms, tmp_path / "state"))


@pytest.mark.slow
def test_it_learns_a_few_rows_by_heart_as_adamw_does(all_quantised):
    batch, terms = prepared(build_sft(SFTConfig()))
    losses = []
    for section in (OptimizerConfig, AdamW8bitConfig):
        made = learner(net=model(dtype=torch.float32), optimizer=section(lr=2e-2))
        losses.append([asyncio.run(made.update(batch, terms))["loss"] for _ in range(40)])
    plain, quantised = losses
    assert plain[-1] < 0.6 * plain[0]
    assert quantised[-1] < 0.6 * plain[0]
    assert quantised == pytest.approx(plain, rel=0.1)


@pytest.mark.slow
def test_ranks_go_on_from_what_they_saved_bit_by_bit(tmp_path):
    options = (str(tmp_path), AdamW8bitConfig(lr=1e-2))
    for rank in run_ranks(2, "learners.state_cases:goes_on", *options):
        assert "mean_codes" in rank["keys"]["layers.0.self_attn.qkv_proj.weight"]
        assert all(rank["same"])
