import asyncio
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ratchet.algorithms.base import Algorithm, AlgorithmTerm, AlgoState
from ratchet.algorithms.config.advantages import GroupRelative
from ratchet.algorithms.config.named_policy_gradients import GRPOConfig
from ratchet.algorithms.config.policy_losses import KLConfig
from ratchet.algorithms.config.sft import SFTConfig
from ratchet.algorithms.loss_aggregation import token_mean
from ratchet.algorithms.losses.common import entropy_bonus, nll, value_loss
from ratchet.algorithms.policy_gradient import build_policy_gradient
from ratchet.algorithms.scoring import fill_columns
from ratchet.algorithms.sft import build_sft
from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.resolve import build, resolve
from ratchet.config.schema import OptimizerConfig
from ratchet.data.packing import pack
from ratchet.errors import CheckpointError, TrainingError
from ratchet.learners.compute.microbatching import select_weighted_rows
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.models.decoder import Decoder
from ratchet.models.load import load_policy
from ratchet.models.lora.decoder import Adapter
from ratchet.models.policy import DecoderPolicy
from ratchet.models.scalar_head import ScalarHead
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.testing.conformance import check_learner

VOCAB = 23


EXPERTS = {
    "family": "qwen3_moe",
    "n_experts": 4,
    "experts_per_token": 2,
    "expert_intermediate_size": 12,
}


def model(seed=0, dtype=torch.float64, **fields):
    config = replace(DecoderConfig(VOCAB, 16, 2, 2, 1, 8, 24, init_std=0.3), **fields)
    return DecoderPolicy(Decoder(config).init_weights(seed).to(dtype))


def groups(seed=0, n=5, attempts=3, longest=6):
    """Ragged: an empty completion, a lone token, equal rewards in one group."""
    rng = torch.Generator().manual_seed(seed)
    draw = lambda low, high, size=(): torch.randint(low, high, size, generator=rng)  # noqa: E731
    made = []
    for g in range(n):
        prompt = draw(0, VOCAB, (int(draw(1, 4)),)).tolist()
        rows = []
        for a in range(attempts):
            length = int(draw(0, longest)) if (g, a) != (0, 0) else 0
            reward = 1.0 if g == 1 else float(draw(0, 2))
            completion = draw(0, VOCAB, (length,)).tolist()
            rows.append(
                make_trajectory(
                    prompt, completion, reward=reward, attempt=a, temperature=0.5 + 0.5 * (g % 2)
                )
            )
        made.append(make_group(f"g{g}", rows))
    return made


def learner(config=None, *, net=None, optimizer=None, **options):
    optimizer = optimizer or OptimizerConfig(lr=1e-2, max_grad_norm=None)
    return LocalLearner(
        config or LocalConfig(), net or model(), optimizer=optimizer, total_steps=10, **options
    )


def prepared(algorithm, made=None):
    batch = algorithm.advantage(pack(made or groups()), AlgoState())
    batch = batch.fill_tokens(
        ref_logprobs=torch.full((batch.n_tokens,), -2.0, dtype=torch.float64) * batch.trainable_T
    )
    return algorithm.weigh(batch, AlgoState()), next(iter(algorithm.losses.values()))


def gradient(made, batch, terms):
    sums = made._accumulate(batch.take(select_weighted_rows(batch, terms)), terms)
    return torch.cat(
        [p.grad.flatten() for p in made.model.parameters() if p.grad is not None]
    ), sums


ALGORITHMS = {
    "sft": build_sft(SFTConfig()),
    "grpo": build_policy_gradient(
        GRPOConfig(group_size=3, kl=KLConfig(coef=0.1), entropy_coef=0.01)
    ),
    "dr_grpo": build_policy_gradient(
        GRPOConfig(
            group_size=3,
            advantage=GroupRelative(scale="none"),
            weighting="fixed_length",
            fixed_length=6,
        )
    ),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("tokens", [1, 7, 20])
def test_gradient_and_metrics_do_not_depend_on_the_micro_batches(name, tokens):
    batch, terms = prepared(ALGORITHMS[name])
    whole, sums = gradient(learner(LocalConfig(micro_batch_tokens=10_000)), batch, terms)
    split, split_sums = gradient(learner(LocalConfig(micro_batch_tokens=tokens)), batch, terms)
    assert whole.abs().max() > 0
    torch.testing.assert_close(split, whole, rtol=1e-10, atol=1e-13)
    for key in sums:
        torch.testing.assert_close(split_sums[key], sums[key], rtol=1e-10, atol=1e-12)


def test_gradients_are_computed_though_user_code_turned_them_off():
    batch, terms = prepared(ALGORITHMS["sft"])
    expected, _ = gradient(learner(), batch, terms)
    with torch.no_grad():
        assert torch.equal(gradient(learner(), batch, terms)[0], expected)


def test_gradient_of_experts_does_not_depend_on_the_micro_batches():
    """Of which some have no token for some expert."""
    batch, terms = prepared(ALGORITHMS["grpo"])
    whole, _ = gradient(learner(net=model(**EXPERTS)), batch, terms)
    split, _ = gradient(
        learner(LocalConfig(micro_batch_tokens=1), net=model(**EXPERTS)), batch, terms
    )
    torch.testing.assert_close(split, whole, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradient_does_not_depend_on_order_or_head_chunks(name):
    made = groups()
    batch, terms = prepared(ALGORITHMS[name], made)
    shuffled = [made[i] for i in (3, 0, 4, 2, 1)]
    other, _ = prepared(ALGORITHMS[name], shuffled)
    whole, _ = gradient(learner(), batch, terms)
    reordered, _ = gradient(learner(), other, terms)
    torch.testing.assert_close(reordered, whole, rtol=1e-10, atol=1e-13)


def test_chunks_of_the_head_change_nothing(monkeypatch):
    batch, terms = prepared(ALGORITHMS["grpo"])
    whole, _ = gradient(learner(), batch, terms)
    monkeypatch.setattr("ratchet.learners.compute.forward.count_rows_per_chunk", lambda *_: 3)
    chunked, _ = gradient(learner(), batch, terms)
    torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("fields", [{}, EXPERTS], ids=["dense", "sparse"])
def test_checkpointing_changes_nothing(fields):
    batch, terms = prepared(ALGORITHMS["grpo"])
    whole, _ = gradient(learner(net=model(**fields)), batch, terms)
    again, _ = gradient(
        learner(LocalConfig(activation_checkpointing=True), net=model(**fields)), batch, terms
    )
    torch.testing.assert_close(again, whole, rtol=1e-12, atol=1e-14)


def test_scores_are_logprobs_of_each_sequence_alone_under_its_temperature():
    net, made = model(), groups()
    batch = pack(made)
    columns = asyncio.run(
        learner(LocalConfig(micro_batch_tokens=9), net=net).score(batch, ["logprobs", "entropy"])
    )
    start = 0
    for trajectory in (t for group in made for t in group.trajectories):
        tokens = torch.from_numpy(trajectory.tokens)
        with torch.no_grad():
            hidden = net.hidden(tokens, torch.arange(len(tokens)), [len(tokens)])
            table = (
                hidden.double() @ net.decoder.head_weight.T / trajectory.temperature
            ).log_softmax(-1)
        for t in range(len(tokens)):
            trains = bool(trajectory.trainable[t])
            logprob = table[t - 1, tokens[t]] if trains else torch.zeros(())
            entropy = -(table[t - 1].exp() * table[t - 1]).sum() if trains else torch.zeros(())
            assert float(columns["logprobs"][start + t]) == pytest.approx(float(logprob), abs=1e-12)
            assert float(columns["entropy"][start + t]) == pytest.approx(float(entropy), abs=1e-12)
        start += len(tokens)


def test_greedy_rows_are_scored_under_temperature_one():
    one, zero = (
        pack([make_group("g", [make_trajectory([1, 2], [3, 4], reward=0.0, temperature=t)])])
        for t in (1.0, 0.0)
    )
    scored = [
        asyncio.run(learner().score(batch, ["logprobs"]))["logprobs"] for batch in (one, zero)
    ]
    assert torch.equal(*scored)


def test_values_and_scores_read_the_states_they_should():
    net, batch = model(), pack(groups())
    head = ScalarHead(16).double()
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(1))
    columns = asyncio.run(learner(net=net, head=head).score(batch, ["values", "scores"]))
    with torch.no_grad():
        scalars = head(net.hidden(batch.tokens_T, batch.positions_T, batch.lengths_S.tolist()))
    for t in range(batch.n_tokens):
        expected = float(scalars[t - 1]) if batch.trainable_T[t] else 0.0
        assert float(columns["values"][t]) == pytest.approx(expected, abs=1e-12)
    last = batch.starts_S + batch.lengths_S - 1
    torch.testing.assert_close(columns["scores"], scalars[last], rtol=1e-12, atol=1e-12)


def test_the_first_update_is_adamw_by_hand():
    """Step one of AdamW moves every coordinate by lr * g / (|g| + eps), after weight decay on
    matrices."""
    batch, terms = prepared(ALGORITHMS["sft"])
    made = learner(
        optimizer=OptimizerConfig(
            lr=0.01, eps=1e-8, weight_decay=0.1, max_grad_norm=None, warmup_steps=2
        )
    )
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    gradient(made, batch, terms)
    grads = {name: p.grad.clone() for name, p in made.model.named_parameters()}
    made.optimizer.zero_grad()
    metrics = asyncio.run(made.update(batch, terms))
    assert metrics["lr"] == pytest.approx(0.005)
    for name, p in made.model.named_parameters():
        decayed = before[name] * (1 - 0.005 * (0.1 if p.dim() >= 2 else 0.0))
        expected = decayed - 0.005 * grads[name] / (grads[name].abs() + 1e-8)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-9, atol=1e-12)


def test_clipping_scales_the_whole_gradient():
    batch, terms = prepared(ALGORITHMS["sft"])
    made = learner(optimizer=OptimizerConfig(lr=0.01, max_grad_norm=0.5))
    seen = {}
    step = made.optimizer.step
    made.optimizer.step = lambda lr: (
        seen.update(norm=torch.cat([p.grad.flatten() for p in made.model.parameters()]).norm())
        or step(lr)
    )
    metrics = asyncio.run(made.update(batch, terms))
    assert metrics["grad_norm"] > 0.5
    assert float(seen["norm"]) == pytest.approx(0.5, rel=1e-5)


def test_a_step_without_weight_is_skipped_and_said():
    algorithm = ALGORITHMS["grpo"]
    silent = [
        make_group("g", [make_trajectory([1], [], reward=float(i), attempt=i) for i in range(2)])
    ]
    batch, terms = prepared(algorithm, silent)
    made = learner()
    before = [p.detach().clone() for p in made.model.parameters()]
    metrics = asyncio.run(made.update(batch, terms))
    assert metrics["skipped_empty"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))


def test_dropping_groups_without_signal_is_training_on_the_others_alone():
    made = groups()
    drop, keep = (
        build_policy_gradient(GRPOConfig(group_size=3, kl=KLConfig(coef=0.1), equal_rewards=how))
        for how in ("drop", "keep")
    )
    rewards = [[t.reward for t in group.trajectories] for group in made]
    others = [group for group, r in zip(made, rewards, strict=True) if max(r) > min(r)]
    assert 0 < len(others) < len(made)
    dropped, _ = gradient(learner(), *prepared(drop, made))
    alone, _ = gradient(learner(), *prepared(keep, others))
    torch.testing.assert_close(dropped, alone, rtol=1e-10, atol=1e-13)
    kept, _ = gradient(learner(), *prepared(keep, made))
    assert not torch.allclose(kept, alone)


@pytest.mark.fault("R6")
def test_all_equal_rewards_give_no_gradient():
    equal = [
        make_group("g", [make_trajectory([1], [2, 3], reward=0.1, attempt=i) for i in range(3)])
    ]
    batch, terms = prepared(build_policy_gradient(GRPOConfig(group_size=3)), equal)
    found, _ = gradient(learner(), batch, terms)
    assert not found.any()
    batch, terms = prepared(
        build_policy_gradient(GRPOConfig(group_size=3, equal_rewards="drop")), equal
    )
    assert asyncio.run(learner().update(batch, terms))["skipped_empty"] == 1.0


@pytest.mark.fault("M4", "M5")
def test_non_finite_steps_change_nothing_and_stop_the_run_in_the_end():
    batch, terms = prepared(ALGORITHMS["grpo"])
    poisoned = batch.fill_tokens(advantages=torch.where(batch.trainable_T, torch.inf, 0.0).double())
    made = learner(LocalConfig(max_bad_steps=3))
    before = [p.detach().clone() for p in made.model.parameters()]
    for _ in range(2):
        assert asyncio.run(made.update(poisoned, terms))["skipped_nonfinite"] == 1.0
    # a good one in between resets the count
    assert asyncio.run(made.update(batch, terms))["skipped_nonfinite"] == 0.0
    after = [p.detach().clone() for p in made.model.parameters()]
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for _ in range(2):
        asyncio.run(made.update(poisoned, terms))
    with pytest.raises(TrainingError, match=r"3 optimizer steps in a row were not .* Lower opti"):
        asyncio.run(made.update(poisoned, terms))
    assert all(torch.equal(a, b) for a, b in zip(after, made.model.parameters(), strict=True))
    with pytest.raises(TrainingError, match="No step was finite before: look for weights"):
        asyncio.run(learner(LocalConfig(max_bad_steps=1)).update(poisoned, terms))


def test_the_average_follows_the_steps_that_were_taken_and_is_exported_beside_the_weights(tmp_path):
    batch, terms = prepared(ALGORITHMS["sft"])
    made = learner(
        net=model(dtype=torch.float32), optimizer=OptimizerConfig(lr=1e-2, ema_decay=0.75)
    )
    embedding = lambda net: dict(net.canonical_weights())["model.embed_tokens.weight"].clone()  # noqa: E731
    before = embedding(made.model)
    asyncio.run(made.update(batch, terms))
    asyncio.run(made.update(batch.take([]), terms))  # skipped
    after = embedding(made.model)
    made.export(tmp_path / "model")
    made.export(tmp_path / "average", averaged=True)
    assert torch.equal(embedding(load_policy(tmp_path / "model")), after)
    average = embedding(load_policy(tmp_path / "average"))
    torch.testing.assert_close(average, 0.75 * before + 0.25 * after, rtol=1e-6, atol=1e-7)
    assert torch.equal(embedding(made.model), after)


def test_with_one_update_a_batch_old_logprobs_are_the_updates_own():
    """The dropped pass and the explicit one give the same gradient."""
    batch, terms = prepared(ALGORITHMS["grpo"])
    made = learner()
    scored = asyncio.run(made.score(batch, ["logprobs"]))["logprobs"]
    own, _ = gradient(made, batch, terms)
    explicit, _ = gradient(learner(), batch.fill_tokens(old_logprobs=scored), terms)
    torch.testing.assert_close(explicit, own, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", ["sft", "grpo"])
def test_conformance(name, tmp_path):
    algorithm = ALGORITHMS[name]
    batch, terms = prepared(algorithm)
    make = lambda: learner(net=model(dtype=torch.float32), optimizer=OptimizerConfig(lr=1e-2))  # noqa: E731
    asyncio.run(check_learner(make, batch, terms, tmp_path / "state"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 8}, r"is \d+x16 there, and \d+x8 in this model"),
        ({"n_layers": 3}, "is absent there, and"),
        ({"n_layers": 1}, "there, and absent in this model"),
    ],
)
def test_a_checkpoint_of_another_shape_is_named_and_changes_nothing(fields, message, tmp_path):
    saved, loading = learner(), learner(net=model(**fields))
    saved.save(tmp_path)
    before = loading.fingerprint()
    with pytest.raises(CheckpointError, match=message):
        loading.load(tmp_path)
    assert loading.fingerprint() == before


def test_autocast_computes_in_bfloat16_and_keeps_float32_masters():
    batch, terms = prepared(ALGORITHMS["sft"])
    exact = learner(net=model(dtype=torch.float32))
    rounded = learner(net=model(dtype=torch.float32), autocast=True)
    a, b = (asyncio.run(made.score(batch, ["logprobs"]))["logprobs"] for made in (exact, rounded))
    assert a.dtype == b.dtype == torch.float32
    assert 0 < float((a - b).abs().max()) < 0.3  # another arithmetic, the same model
    assert asyncio.run(rounded.update(batch, terms))["grad_norm"] > 0
    assert {p.dtype for p in rounded.model.parameters()} == {torch.float32}


class CountedCasts(TorchDispatchMode):
    """Counts the casts of matrices of `shapes` to bfloat16."""

    def __init__(self, shapes):
        super().__init__()
        self.shapes, self.count = shapes, 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function is torch.ops.aten._to_copy.default:
            is_cast = (options or {}).get("dtype") is torch.bfloat16
            self.count += is_cast and arguments[0].shape in self.shapes
        return function(*arguments, **options or {})


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("adapter", [None, Adapter(LoRAConfig(rank=2, alpha=4.0), seed=5)])
def test_an_update_casts_each_weight_once_and_has_the_same_bits(
    checkpointing, adapter, monkeypatch
):
    batch, terms = prepared(ALGORITHMS["grpo"])
    config = LocalConfig(micro_batch_tokens=7, activation_checkpointing=checkpointing)
    results, counts = [], []
    for keeps in (True, False):
        if not keeps:
            monkeypatch.setattr("ratchet.learners.local.keep_casts", nullcontext)
        made = learner(config, net=model(dtype=torch.float32, n_layers=2), autocast=True)
        if adapter is not None:
            made.model.attach(adapter)
            made = learner(config, net=made.model, autocast=True)
        linears = [m for m in made.model.modules() if isinstance(m, nn.Linear)]
        shapes = [linear.weight.shape for linear in linears]
        with CountedCasts(shapes) as casts:
            results.append(gradient(made, batch, terms)[0])
        counts.append(casts.count)
    assert torch.equal(*results)
    assert results[0].dtype == torch.float32
    assert counts[0] == len(shapes) <= counts[1] / 3


def test_a_frozen_role_scores_and_has_no_optimizer():
    frozen = LocalLearner(LocalConfig(), model())
    batch = pack(groups())
    assert asyncio.run(frozen.score(batch, ["logprobs"]))["logprobs"].shape == (batch.n_tokens,)
    algorithm = Algorithm("x", {"policy": (AlgorithmTerm("nll", nll, token_mean),)}, source="rows")
    with pytest.raises(AssertionError, match="frozen"):
        asyncio.run(frozen.update(algorithm.weigh(batch, AlgoState()), algorithm.losses["policy"]))


def test_entropy_alone_needs_no_logprobs():
    algorithm = Algorithm(
        "x",
        {
            "policy": (
                AlgorithmTerm("entropy", entropy_bonus, token_mean, needs=frozenset({"entropy"})),
            )
        },
        source="rows",
    )
    batch = algorithm.weigh(pack(groups()), AlgoState())
    before = asyncio.run(learner().update(batch, algorithm.losses["policy"]))
    assert 0 < before["entropy/entropy"] < 3.2  # ln 23 = 3.135
    assert replace(algorithm, minibatches=2).updates_per_batch == 2


@pytest.mark.parametrize("tokens", [5, 10_000])
def test_an_entropy_that_no_loss_uses_is_measured_without_gradient(tokens):
    measuring = build_policy_gradient(GRPOConfig(group_size=3, weighting="token_mean"))
    batch, terms = prepared(measuring)
    made = learner(LocalConfig(micro_batch_tokens=tokens))
    slopes, sums = gradient(made, batch, terms)
    alone, others = gradient(learner(), batch, [term for term in terms if term.name != "entropy"])
    torch.testing.assert_close(slopes, alone, rtol=1e-12, atol=1e-14)
    assert set(sums) - set(others) == {"entropy/entropy"}
    found = asyncio.run(made.score(batch, ["entropy"]))["entropy"]
    assert float(sums["entropy/entropy"]) == pytest.approx(
        float(found[batch.trainable_T].mean()), rel=1e-12
    )
    micro = batch.take(select_weighted_rows(batch, terms))
    hand = made.forwards[0]
    assert hand.outputs(micro, hand.hidden(micro), {"entropy"}).need("entropy").requires_grad
    assert (
        not hand.outputs(micro, hand.hidden(micro), {"entropy"}, measured={"entropy"})
        .need("entropy")
        .requires_grad
    )


@pytest.mark.parametrize("top_k", [0, 1, 4, VOCAB, VOCAB + 9])
@pytest.mark.parametrize("tokens", [5, 10_000])
def test_the_likeliest_tokens_and_the_rest_of_the_mass(top_k, tokens):
    batch = pack(groups())
    made = learner(LocalConfig(micro_batch_tokens=tokens))
    found = asyncio.run(made.score(batch, ["topk_ids", "topk_logprobs"], top_k=top_k))
    k = VOCAB if top_k in (0, VOCAB + 9) else top_k
    assert found["topk_ids"].shape == (batch.n_tokens, k)
    assert found["topk_logprobs"].shape == (batch.n_tokens, k + (k < VOCAB))
    before = softmax_before(made.model, batch).detach()
    for t in batch.predicted_T.nonzero()[:, 0].tolist():
        ids, logprobs = found["topk_ids"][t], found["topk_logprobs"][t]
        assert len(set(ids.tolist())) == k
        assert logprobs.exp().sum().item() == pytest.approx(1, abs=1e-12)
        torch.testing.assert_close(logprobs[:k], before[t][ids], rtol=1e-10, atol=1e-12)
        assert set(before[t].topk(k).indices.tolist()) == set(ids.tolist())


@pytest.mark.parametrize("rows", [3, 10_000])
def test_distillation_through_the_learner_is_the_kl_of_the_two_models(rows, monkeypatch):
    """Forward KL over the whole vocabulary and over the likeliest tokens, by the models' own
    softmax; value and gradient."""
    monkeypatch.setattr("ratchet.learners.compute.forward.count_rows_per_chunk", lambda *_: rows)
    batch, teacher = pack(groups()), learner(net=model(seed=4))
    for top_k, all_of_it in ((0, True), (3, False)):
        algorithm = build(
            resolve(
                "algorithm", {"kind": "distill_off_policy", "teacher": "x", "top_k": top_k or None}
            )
        )
        filled = asyncio.run(fill_columns(batch, algorithm, {"teacher": teacher}))
        weighed = algorithm.weigh(filled, AlgoState())
        made = learner()
        found, sums = gradient(made, weighed, algorithm.losses["policy"])
        net = model()
        log_q, log_p = (softmax_before(m, batch) for m in (net, teacher.model))
        mask = batch.trainable_T
        if all_of_it:
            kl_T = (log_p.exp() * (log_p - log_q)).sum(-1)
        else:
            ids = log_p.topk(3).indices
            p, q = ((m.gather(1, ids).exp()) for m in (log_p, log_q))
            rest_p, rest_q = 1 - p.sum(-1), 1 - q.sum(-1)
            kl_T = (p * (p / q).log()).sum(-1) + rest_p * (rest_p / rest_q).log()
        loss = kl_T[mask].mean()
        loss.backward()
        assert sums["loss"].item() == pytest.approx(loss.item(), rel=1e-9)
        expected = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)


def softmax_before(net, batch):
    """log p of every token of the vocabulary at each place, [T, V], under the rows'
    temperatures."""
    hidden = net.hidden(batch.tokens_T, batch.positions_T, batch.lengths_S.tolist())
    temperature_T = batch.temperature_S[batch.sequence_T][:, None]
    return (net.logits(hidden) / temperature_T).log_softmax(-1).roll(1, 0)


@pytest.mark.parametrize("name", ["values", "token_scores"])
def test_gradients_reach_the_head_and_the_body(name):
    batch = pack(groups())
    head = ScalarHead(16).init_weights(1, std=0.5).double()
    made = learner(head=head)
    returns = torch.linspace(-1, 1, batch.n_tokens, dtype=torch.float64)
    algorithm = build(resolve("algorithm", {"kind": "ppo"}))
    weighed = algorithm.weigh(
        batch.fill_tokens(
            returns=returns, values=torch.zeros_like(returns), valued=batch.trainable_T
        ),
        AlgoState(),
    )
    term = replace(
        algorithm.losses["critic"][0], fn=squared_gap if name == "token_scores" else value_loss
    )
    term = replace(term, needs=frozenset({name}))
    found, _ = gradient(made, weighed, [term])
    net, own = model(), ScalarHead(16).init_weights(1, std=0.5).double()
    scalars = own(net.hidden(batch.tokens_T, batch.positions_T, batch.lengths_S.tolist()))
    seen = scalars.roll(1, 0) if name == "values" else scalars
    loss = ((seen - returns)[batch.trainable_T].square() / 2).mean()
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(head.weight.grad, own.weight.grad, rtol=1e-8, atol=1e-12)


def squared_gap(out, batch):
    return (out.need("token_scores") - batch.need("returns")).square() / 2, {}


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_clipped_steps_are_torchs_own_in_float64(kind):
    """A norm that is rounded to float32 would be off by 1e-8."""
    options = OptimizerConfig(lr=1e-2, max_grad_norm=0.05, weight_decay=0.1)
    made, reference = learner(optimizer=options), learner(optimizer=options)
    named = list(reference.forwards[0].parameters())
    decayed = [[p for _, p in named if p.dim() >= 2], [p for _, p in named if p.dim() < 2]]
    sets = [
        {"params": ps, "weight_decay": decay} for ps, decay in zip(decayed, (0.1, 0.0), strict=True)
    ]
    theirs = torch.optim.AdamW(sets, lr=1e-2, betas=options.betas, eps=options.eps, fused=True)
    batch, terms = prepared(ALGORITHMS[kind])
    for _ in range(4):
        gradients, _ = reference.gradient(batch.take(select_weighted_rows(batch, terms)), terms)
        for (_, parameter), gradient in zip(named, gradients, strict=True):
            parameter.grad = gradient.clone()
        norm = nn.utils.clip_grad_norm_([p for _, p in named], 0.05)
        metrics = asyncio.run(made.update(batch, terms))
        for group in theirs.param_groups:
            group["lr"] = metrics["lr"]
        theirs.step()
        theirs.zero_grad()
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-14, abs=0)
        assert metrics["grad_norm"] > 0.05
        for (name, ours), (_, other) in zip(made.forwards[0].parameters(), named, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-15, atol=1e-15, msg=name)
