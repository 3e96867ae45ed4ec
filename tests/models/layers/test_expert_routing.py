"""Replay: the learner sends tokens where the sampler sent them. Balance: a number of each sequence,
however batches are cut."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.config.named_policy_gradients import GRPOConfig
from ratchet.algorithms.config.policy_gradient import RouterConfig
from ratchet.algorithms.policy_gradient import build_policy_gradient
from ratchet.batch import ROUTES
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.schema import OptimizerConfig
from ratchet.data.packing import pack
from ratchet.errors import DataError
from ratchet.experience.rollout.episode_state import TokenRecord
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.models.decoder import Decoder
from ratchet.models.layers.expert_routing import RouterMonitor, Routing
from ratchet.models.layers.prefix_tree import PrefixTree, compute_path_keys
from ratchet.models.policy import DecoderPolicy
from ratchet.testing.builders import make_group
from ratchet.types import Owner, Sampling, Scored

VOCAB = 23
QWEN = {
    "family": "qwen3_moe",
    "n_experts": 8,
    "experts_per_token": 2,
    "expert_intermediate_size": 12,
    "dense_layers": (1,),
}
MIXTRAL = {
    "family": "mixtral",
    "n_experts": 8,
    "experts_per_token": 2,
    "expert_intermediate_size": 24,
    "qk_norm": False,
}
SHAPES = {"qwen3_moe": QWEN, "mixtral": MIXTRAL}


def model(seed=0, dtype=torch.float32, shape=QWEN):
    """Routers whose experts are all but tied: the least noise chooses others."""
    decoder = (
        Decoder(DecoderConfig(VOCAB, 16, 3, 2, 1, 8, 24, init_std=0.3, **shape))
        .init_weights(seed)
        .to(dtype)
    )
    noise = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for weight in routers(decoder):
            weight.copy_(weight[:1] + 1e-6 * torch.randn(weight.shape, generator=noise))
    return DecoderPolicy(decoder)


def routers(decoder):
    return [
        parameter for name, parameter in decoder.named_parameters() if name.endswith("gate.weight")
    ]


def shaken(policy, scale=1e-6):
    """The same policy, as far as floats can tell, which routes otherwise."""
    noise = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in routers(policy.decoder):
            weight.add_(scale * torch.randn(weight.shape, generator=noise))
    return policy


def sampled(policy, *, prompts=4, attempts=3, routes=True):
    """Groups of answers to equal prompts, as an episode of one turn records them."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, VOCAB, 5 + 3 * i).tolist() for i in range(prompts)]
    asked = [(g, a) for g in range(prompts) for a in range(attempts)]
    samplings = [
        Sampling(max_new_tokens=4 + 5 * a, seed=10 * g + a, routes=routes) for g, a in asked
    ]
    completions = EmbeddedEngine(EngineConfig(), policy).generate_all(
        [rows[g] for g, _ in asked], samplings
    )
    made = [[] for _ in rows]
    for (g, a), completion in zip(asked, completions, strict=True):
        record = TokenRecord()
        record.add(Owner.PROMPT, rows[g])
        record.add(Owner.POLICY, completion.tokens, completion)
        made[g].append(record.trajectory(attempt=a, outcome=Scored(float(a % 2))))
    return [make_group(f"g{g}", rows) for g, rows in enumerate(made)]


def learner(policy, **options):
    config = options.pop("config", LocalConfig())
    return LocalLearner(
        config,
        policy,
        optimizer=OptimizerConfig(lr=1e-3, max_grad_norm=None),
        total_steps=5,
        **options,
    )


def gap(policy, batch, **options):
    """Largest difference of the learner's logprobs from the sampler's."""
    found = asyncio.run(learner(policy, **options).score(batch, ["logprobs"]))["logprobs"]
    return float((found - batch.rollout_logprobs_T)[batch.predicted_T].abs().max())


@pytest.mark.medium
@pytest.mark.parametrize("shape", list(SHAPES))
def test_with_replay_the_learner_agrees_with_the_sampler_though_its_routers_would_choose_otherwise(
    shape,
):
    batch = pack(sampled(model(shape=SHAPES[shape])))
    routes = batch.need(ROUTES)
    assert routes.dtype == torch.int16
    assert routes.shape == (batch.n_tokens, 2 if shape == "qwen3_moe" else 3, 2)
    last = batch.starts_S + batch.lengths_S - 1
    assert (routes[last] == -1).all()
    assert int((routes[:, 0, 0] < 0).sum()) == batch.n_sequences
    # noise that changes the weights of the same experts by less than the bound
    noise = 5e-7
    assert gap(shaken(model(shape=SHAPES[shape]), noise), batch) > 0.01
    assert gap(shaken(model(shape=SHAPES[shape]), noise), batch, replays_routes=True) < 1e-5
    assert gap(model(shape=SHAPES[shape]), batch, replays_routes=True) < 1e-5
    small = LocalConfig(micro_batch_tokens=1)
    found = gap(shaken(model(shape=SHAPES[shape]), noise), batch, replays_routes=True, config=small)
    assert found < 1e-5


def weighed(batch, **router):
    algorithm = build_policy_gradient(GRPOConfig(group_size=3, router=RouterConfig(**router)))
    batch = algorithm.advantage(batch, AlgoState())
    return algorithm.weigh(batch, AlgoState()), algorithm.losses["policy"]


def gradients(made, batch, terms):
    sums = made._accumulate(batch, terms)
    return {name: p.grad for name, p in made.forwards[0].parameters() if p.grad is not None}, sums


def test_gradients_reach_the_router_under_replay_and_are_those_of_the_given_experts():
    batch, terms = weighed(pack(sampled(model())), replay=True, measure=False)
    found, _ = gradients(learner(shaken(model()), replays_routes=True), batch, terms)
    plain, _ = gradients(learner(model(), replays_routes=True), batch, terms)
    gates = [name for name in found if name.endswith("gate.weight")]
    assert len(gates) == 2
    for name in gates:
        assert found[name].abs().max() > 1e-4
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5)


def test_measures_say_what_replay_has_changed():
    batch, terms = weighed(pack(sampled(model())), replay=True)
    for policy, least, most in ((shaken(model()), 0.3, 1.0), (model(), 0.0, 0.2)):
        _, sums = gradients(learner(policy, replays_routes=True), batch, terms)
        assert least <= float(sums["router/rerouted"]) <= most
        assert float(sums["router/entropy"]) == pytest.approx(np.log(8), abs=1e-3)
        assert 1 < float(sums["router/max_load"]) <= 4
        assert "router" not in sums  # it has no coefficient


def test_routes_of_another_model_are_refused():
    batch = pack(sampled(model()))
    other = model(shape={**QWEN, "dense_layers": ()})
    with pytest.raises(DataError, match="but the model has"):
        gap(other, batch, replays_routes=True)


# --- columns


def test_rows_keep_their_routes_when_batches_are_cut_and_rows_without_are_unknown():
    policy = model()
    recorded, plain = sampled(policy), sampled(policy, routes=False)
    assert all(t.routes is None for group in plain for t in group.trajectories)
    assert not pack(plain).has(ROUTES)
    batch = pack([recorded[1], plain[0]])
    column = batch.need(ROUTES)
    three = recorded[1].trajectories
    assert (
        column[: sum(map(len, three))].tolist()
        == np.concatenate([t.routes for t in three]).tolist()
    )
    assert (column[sum(map(len, three)) :] == -1).all()
    assert (
        batch.take([2, 0]).need(ROUTES).tolist()
        == np.concatenate([three[2].routes, three[0].routes]).tolist()
    )
    assert batch.to("cpu", torch.float64).need(ROUTES).dtype == torch.int16


def test_paths_part_where_routes_do():
    rows = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8]]
    tokens = torch.tensor([token for row in rows for token in row])
    routes = torch.zeros(14, 2, 2, dtype=torch.int16)
    assert compute_path_keys(tokens).tolist() == tokens.tolist()
    shared = PrefixTree.from_sequences(compute_path_keys(tokens, routes), [7, 7])
    assert len(shared.token_index_U) == 8
    routes[7 + 5, 1, 0] = 3
    assert (
        len(PrefixTree.from_sequences(compute_path_keys(tokens, routes), [7, 7]).token_index_U) == 9
    )
    routes[7 + 1, 1, 0] = -1
    assert (
        len(PrefixTree.from_sequences(compute_path_keys(tokens, routes), [7, 7]).token_index_U)
        == 14
    )


def test_shared_beginnings_replay_as_sequences_alone_do():
    policy, generator = model(dtype=torch.float64), torch.Generator().manual_seed(3)
    rows = [[1, 2, 3, 4, 5, 6, 7, 0], [1, 2, 3, 4, 5, 6, 8], [1, 2, 3, 4, 5, 6, 7, 2, 2], [9]]
    tokens = torch.tensor([token for row in rows for token in row])
    lengths = [len(row) for row in rows]
    positions = torch.cat([torch.arange(n) for n in lengths])
    beginning = torch.randint(0, 8, (9, 2, 2), generator=generator, dtype=torch.int16)
    routes = torch.cat([beginning[:n].clone() for n in lengths])
    # a branch of its own, one token before its token differs
    routes[8 + 5] = torch.tensor([[7, 6], [5, 4]])
    routes[-1] = -1
    with torch.no_grad():
        together = policy(tokens, positions, lengths, Routing(routes))
        feed = policy.pack_inputs(tokens, positions, lengths, Routing(routes))
        assert len(feed.tokens_U) < len(tokens) - 8
        start = 0
        for n in lengths:
            span = slice(start, start + n)
            alone = policy(tokens[span], positions[span], [n], Routing(routes[span]))
            torch.testing.assert_close(together[span], alone, rtol=1e-9, atol=1e-10)
            start += n
        assert (together - policy(tokens, positions, lengths)).abs().max() > 1e-3


# --- balance


def plain_balance(policy, row, shape=QWEN):
    """arXiv:2412.19437 eq. 17-20 and arXiv:2202.08906 eq. 5 of one sequence, from the logits of
    each router."""
    watch = RouterMonitor()
    policy(torch.tensor(row), torch.arange(len(row)), [len(row)], Routing(monitor=watch))
    balances, zs = [], []
    for seen in watch.layers.values():
        shares = seen.logits_TE.softmax(-1)
        f = torch.zeros(8, dtype=shares.dtype)
        for chosen in seen.used_TK.tolist():
            for expert in chosen:
                f[expert] += 8 / (2 * len(row))
        balances.append(sum(f[i] * shares[:, i].mean() for i in range(8)))
        zs.append(seen.logits_TE.logsumexp(-1).square().mean())
    return sum(balances) / len(balances), sum(zs) / len(zs)


def uneven(dtype=torch.float64):
    decoder = (
        Decoder(DecoderConfig(VOCAB, 16, 3, 2, 1, 8, 24, init_std=0.3, **QWEN))
        .init_weights(3)
        .to(dtype)
    )
    return DecoderPolicy(decoder)


@pytest.mark.medium
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tokens", [1, 40, 10_000])
def test_the_balance_loss_is_the_same_however_micro_batches_are_cut(tokens, checkpointing):
    """10,000: one micro-batch, whose equal beginnings are computed once; 1: a sequence at a
    time."""
    batch, terms = weighed(
        pack(sampled(uneven(torch.float32), routes=False)), balance_coef=0.3, z_coef=0.1
    )
    terms = [term for term in terms if term.name in ("router", "router_z")]
    policy = uneven()
    rows = batch.tokens_T.split(batch.lengths_S.tolist())
    plain = [plain_balance(policy, row.tolist()) for row in rows]
    balance, z = (sum(values) / len(rows) for values in zip(*plain, strict=True))
    (0.3 * balance + 0.1 * z).backward()
    balance, z = float(balance.detach()), float(z.detach())
    expected = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    config = LocalConfig(micro_batch_tokens=tokens, activation_checkpointing=checkpointing)
    found, sums = gradients(learner(uneven(), config=config), batch, terms)
    assert float(sums["router"]) == pytest.approx(0.3 * balance, rel=1e-9)
    assert float(sums["router_z"]) == pytest.approx(0.1 * z, rel=1e-9)
    assert float(sums["router/balance"]) == pytest.approx(balance, rel=1e-9)
    assert any(name.endswith("gate.weight") for name in expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-12)


@pytest.mark.medium
def test_even_routing_has_balance_one_and_the_loss_lowers_the_load_of_the_busiest():
    batch, terms = weighed(pack(sampled(uneven(torch.float32), routes=False)), balance_coef=1.0)
    made = LocalLearner(
        LocalConfig(),
        uneven(),
        optimizer=OptimizerConfig(lr=0.02, max_grad_norm=None, warmup_steps=0),
        total_steps=20,
    )
    only = [term for term in terms if term.name == "router"]
    metrics = [asyncio.run(made.update(batch, only)) for _ in range(10)]
    assert metrics[0]["router/balance"] > 1.05
    assert metrics[-1]["router/balance"] < metrics[0]["router/balance"] - 0.03
    assert metrics[-1]["router/max_load"] < metrics[0]["router/max_load"]
    seen = RouterMonitor()
    logits = torch.zeros(4, 4)
    even = torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3]])
    Routing(even[:, None].to(torch.int16), seen)(0, logits, even.flip(0))
    ((balance, z, entropy, most, rerouted),) = seen.measure(
        torch.zeros(4, dtype=torch.int64), 1
    ).tolist()
    assert (balance, most) == (pytest.approx(1), pytest.approx(1))
    assert z == pytest.approx(np.log(4) ** 2)
    assert entropy == pytest.approx(np.log(4))
    assert rerouted == pytest.approx(0.5)


def test_tokens_without_a_route_are_routed_by_the_learner():
    (group, *_) = sampled(uneven(torch.float32))
    row = group.trajectories[1]
    cut = replace(row, routes=np.where(np.arange(len(row))[:, None, None] < 6, -1, row.routes))
    assert (
        gap(uneven(torch.float32), pack([replace(group, trajectories=(cut,))]), replays_routes=True)
        < 1e-5
    )
