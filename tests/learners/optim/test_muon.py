"""One step against the formulas of the post (Newton-Schulz) and of arXiv:2502.16982 (scale and
decay), in float64."""

import asyncio
import copy
import math

import numpy as np
import pytest
import torch
from learners.test_local import EXPERTS, learner, model, prepared
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ratchet.algorithms.config.sft import SFTConfig
from ratchet.algorithms.sft import build_sft
from ratchet.config.schema import OptimizerConfig
from ratchet.errors import ConfigError
from ratchet.learners.optim.adamw import AdamW
from ratchet.learners.optim.config import MuonConfig
from ratchet.learners.optim.muon import Muon, orthogonalise
from ratchet.models.transformers.policy import TransformersPolicy
from ratchet.testing.conformance import check_learner

CONFIG = MuonConfig(lr=1.0, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, momentum=0.9)
ROWS = {"square": [4], "tall": [7], "fused": [4, 2, 2], "experts": [3, 3, 3, 3]}
SHAPES = {
    "square": (4, 4),
    "tall": (7, 3),
    "fused": (8, 5),
    "experts": (2, 6, 5),
    "embedding": (9, 4),
    "norm": (4,),
}


def parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [
        (name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        for name, shape in SHAPES.items()
    ]


def give_gradients(named, step):
    for i, (_, p) in enumerate(named):
        p.grad = torch.sin(p.detach() * (i + 1) + step)


def newton_schulz(g):
    """As the post writes it: x <- a x + b (x x^T) x + c (x x^T)^2 x, five times, of g over its
    Frobenius norm."""
    x = g / np.sqrt((g**2).sum())
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    return x


def test_two_steps_are_those_of_the_papers():
    named = parameters()
    expected = {name: p.detach().numpy().reshape(-1, p.shape[-1]).copy() for name, p in named}
    momentum = {name: np.zeros_like(value) for name, value in expected.items()}
    made = Muon(CONFIG, named, matrices=ROWS)
    for step, lr in enumerate((0.1, 0.05)):
        give_gradients(named, step)
        gradients = {name: p.grad.numpy().reshape(-1, p.shape[-1]) for name, p in named}
        made.step(lr)
        for name, rows in ROWS.items():
            start = 0
            for height in rows:
                at, start = slice(start, start + height), start + height
                g, w = gradients[name][at], expected[name][at]
                momentum[name][at] = 0.9 * momentum[name][at] + g
                turned = newton_schulz(g + 0.9 * momentum[name][at])
                expected[name][at] = w - lr * (0.2 * math.sqrt(max(w.shape)) * turned + 0.1 * w)
    for name, p in named:
        if name in ROWS:
            found = p.detach().numpy().reshape(-1, p.shape[-1])
            np.testing.assert_allclose(found, expected[name], rtol=1e-10, atol=1e-12, err_msg=name)


def test_all_else_takes_the_steps_of_adamw():
    ours, theirs = parameters(), parameters()
    made, expected = Muon(CONFIG, ours, matrices=ROWS), AdamW(CONFIG, theirs)
    for step in range(3):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        made.step(0.01)
        expected.step(0.01)
    alike = {name for (name, a), (_, b) in zip(ours, theirs, strict=True) if torch.equal(a, b)}
    assert alike == {"embedding", "norm"}
    assert set(made.state["norm"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(made.state["tall"]) == {"momentum"}


def test_singular_values_come_near_1():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 16, 40, generator=generator)
    values = torch.linalg.svdvals(orthogonalise(x))
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    torch.testing.assert_close(orthogonalise(x.mT), orthogonalise(x).mT)
    assert not orthogonalise(torch.zeros(3, 4)).any()


def test_it_goes_on_from_its_state_as_if_nothing_had_been():
    config = CONFIG.model_copy(update={"ema_decay": 0.9})
    whole, resumed = parameters(torch.float32), parameters(torch.float32)
    first, second = Muon(config, whole, matrices=ROWS), Muon(config, resumed, matrices=ROWS)
    for step in range(4):
        if step == 2:
            for (_, a), (_, b) in zip(whole, resumed, strict=True):
                b.data.copy_(a)
            second.load(copy.deepcopy(first.state))
        give_gradients(whole, step)
        first.step(0.01)
        if step >= 2:
            give_gradients(resumed, step)
            second.step(0.01)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(whole, resumed, strict=True))
    assert all(
        torch.equal(kept, second.state[name][key])
        for name, m in first.state.items()
        for key, kept in m.items()
    )


@pytest.mark.parametrize("matrices", [{}, {"frozen": [4]}], ids=["none", "frozen"])
def test_a_model_without_trained_matrices_is_refused(matrices):
    with pytest.raises(ConfigError, match=r"no matrices.*Set optimizer.kind=adamw"):
        Muon(CONFIG, parameters(), matrices=matrices)


# --- which matrices


def test_the_decoders_matrices_are_those_of_its_files():
    net = model(**EXPERTS)
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters()}
    found = net.matrices()
    inside = {name for name, shape in shapes.items() if ".layers." in name and len(shape) > 1}
    assert set(found) == inside
    assert found["decoder.layers.0.self_attn.qkv_proj.weight"] == [16, 8, 8]
    # two of each of the four experts
    assert found["decoder.layers.0.mlp.experts.gate_up_proj"] == [12] * 8
    assert found["decoder.layers.1.mlp.experts.down_proj"] == [16] * 4


def test_the_matrices_of_a_transformers_model_are_those_of_its_layers():
    config = LlamaConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    found = TransformersPolicy(LlamaForCausalLM(config)).matrices()
    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    names = (*projections, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert set(found) == {f"model.model.layers.0.{name}.weight" for name in names}
    assert found["model.model.layers.0.self_attn.k_proj.weight"] == [8]


# --- in a learner


def test_conformance(tmp_path):
    batch, terms = prepared(build_sft(SFTConfig()))
    make = lambda: learner(net=model(dtype=torch.float32, **EXPERTS), optimizer=MuonConfig(lr=1e-2))  # noqa: E731
    asyncio.run(check_learner(make, batch, terms, tmp_path / "state"))


@pytest.mark.medium
@pytest.mark.parametrize("section", [OptimizerConfig, MuonConfig])
def test_it_learns_a_few_rows_by_heart_as_adamw_does(section):
    batch, terms = prepared(build_sft(SFTConfig()))
    made = learner(net=model(dtype=torch.float32), optimizer=section(lr=2e-2))
    losses = [asyncio.run(made.update(batch, terms))["loss"] for _ in range(40)]
    assert losses[-1] < 0.6 * losses[0]
