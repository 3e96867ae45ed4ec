import copy

import pytest
import torch
from torch import nn

from ratchet.config.resolve import build, resolve
from ratchet.config.schema import OptimizerConfig
from ratchet.errors import CheckpointError
from ratchet.learners.optim.adamw import AdamW

CONFIG = OptimizerConfig(lr=1.0, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)


def parameters():
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (3, 4), "vector": (4,), "down_proj_bias": (2, 3), "late": (2, 2)}
    return [
        (name, nn.Parameter(torch.randn(shape, generator=generator)))
        for name, shape in shapes.items()
    ]


def give_gradients(named, step):
    """The last parameter gets none in the first steps."""
    for i, (name, p) in enumerate(named):
        p.grad = None if name == "late" and step < 2 else torch.sin(p.detach() * (i + 1) + step)


def test_it_takes_the_steps_of_torchs_own_bit_for_bit():
    ours, theirs = parameters(), parameters()
    groups = [
        {"params": [theirs[i][1] for i in (0, 3)], "weight_decay": CONFIG.weight_decay},
        {"params": [theirs[i][1] for i in (1, 2)], "weight_decay": 0.0},
    ]
    expected = torch.optim.AdamW(groups, betas=CONFIG.betas, eps=CONFIG.eps, fused=True)
    made = AdamW(CONFIG, ours)
    for step in range(6):
        lr = 0.1 / (step + 1)
        for group in expected.param_groups:
            group["lr"] = lr
        give_gradients(ours, step)
        give_gradients(theirs, step)
        made.step(lr)
        expected.step()
        for (name, a), (_, b) in zip(ours, theirs, strict=True):
            assert torch.equal(a, b), f"{name} after step {step}"


def test_it_goes_on_from_its_state_as_if_nothing_had_been():
    whole, resumed = parameters(), parameters()
    first, second = AdamW(AVERAGING, whole), AdamW(AVERAGING, resumed)
    for step in range(6):
        if step == 3:
            state = copy.deepcopy(first.state)
            for (_, a), (_, b) in zip(whole, resumed, strict=True):
                b.data.copy_(a)
            second.load(state)
            state["matrix"]["exp_avg"].zero_()  # it keeps a copy
        give_gradients(whole, step)
        first.step(0.01)
        if step >= 3:
            give_gradients(resumed, step)
            second.step(0.01)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(whole, resumed, strict=True))
    assert all(
        torch.equal(first.state[name][key], kept)
        for name, m in second.state.items()
        for key, kept in m.items()
    )
    second.zero_grad()
    assert all(p.grad is None for _, p in resumed)


def test_a_parameter_without_a_gradient_has_no_state():
    named = parameters()
    made = AdamW(CONFIG, named)
    give_gradients(named, 0)
    made.step(0.01)
    assert set(made.state) == {"matrix", "vector", "down_proj_bias"}


AVERAGING = CONFIG.model_copy(update={"ema_decay": 0.75})


def test_the_average_is_the_weighted_sum_of_what_the_weights_have_been():
    """e_n = d^n w_0 + (1 - d) sum_i d^(n - i) w_i; of a parameter from the step before its first
    gradient on."""
    named = parameters()
    made = AdamW(AVERAGING, named)
    been = {name: [] for name, _ in named}
    for step in range(5):
        give_gradients(named, step)
        for name, p in named:
            been[name] += [p.detach().double()] if p.grad is not None else []
        made.step(0.1)
    for name, p in named:
        course = [*been[name], p.detach().double()]
        n = len(course) - 1
        expected = 0.75**n * course[0] + sum(
            0.25 * 0.75 ** (n - i) * course[i] for i in range(1, n + 1)
        )
        torch.testing.assert_close(
            made.state[name]["average"].double(), expected, rtol=1e-6, atol=1e-6
        )
        assert made.state[name]["average"].dtype == torch.float32


def test_the_average_takes_the_place_of_the_weights_and_gives_it_back():
    named = parameters()
    made = AdamW(AVERAGING, named)
    give_gradients(named, 0)
    made.step(0.1)
    weights = {name: p.detach().clone() for name, p in named}
    averages = {name: moments["average"].clone() for name, moments in made.state.items()}
    with made.use_averages():
        assert all(torch.equal(p, averages.get(name, weights[name])) for name, p in named)
    assert all(torch.equal(p, weights[name]) for name, p in named)
    assert all(
        torch.equal(moments["average"], averages[name]) for name, moments in made.state.items()
    )


def test_a_checkpoint_without_the_average_is_refused():
    named = parameters()
    made = AdamW(CONFIG, named)
    give_gradients(named, 0)
    made.step(0.1)
    with pytest.raises(CheckpointError, match="no 'average' of 'matrix'"):
        AdamW(AVERAGING, parameters()).load(made.state)


class SignConfig(OptimizerConfig):
    builds = f"{__name__}:Sign"
    scale: float = 1.0


class Sign(AdamW):
    def update_parameters(self, given, lr):
        for _, p in given:
            p.sub_(p.grad.sign(), alpha=lr * self.config.scale)


def test_an_optimizer_of_somebody_elses_is_named_by_the_path_of_its_section():
    section = resolve("optimizer", {"kind": f"{__name__}:SignConfig", "scale": 0.5})
    named = [("matrix", nn.Parameter(torch.zeros(1, 2)))]
    named[0][1].grad = torch.tensor([[3.0, -0.1]])
    build(section, named, matrices={}).step(0.5)
    assert named[0][1].tolist() == [[-0.25, 0.25]]


def test_the_state_of_other_parameters_is_refused():
    with pytest.raises(CheckpointError, match=r"optimizer state of '0'.*older version"):
        AdamW(CONFIG, parameters()).load({0: {}})
