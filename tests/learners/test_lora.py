"""The local learner trains an adapter: the reference below it, checkpoints of it alone, dropout
that can be repeated."""

import asyncio
from dataclasses import replace

import pytest
import torch
from learners.test_local import ALGORITHMS, EXPERTS, VOCAB, groups, prepared
from torch import nn

from ratchet.algorithms.config.named_policy_gradients import PPOConfig
from ratchet.algorithms.config.policy_losses import KLConfig
from ratchet.algorithms.config.preference import DPOConfig
from ratchet.algorithms.policy_gradient import build_policy_gradient
from ratchet.algorithms.preference import build_pairs
from ratchet.checkpoint.serialization import load_state
from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.schema import OptimizerConfig
from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.data.packing import pack
from ratchet.errors import CheckpointError
from ratchet.learners.compute.forward import Forward
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.learners.lora_reference import LoRAReference
from ratchet.models.load import init_policy, load_policy
from ratchet.models.lora.decoder import Adapter, is_adapter_parameter
from ratchet.models.weights.weight_layout import PEFT_PREFIX, cut_blocks, list_pieces
from ratchet.training.roles import make_roles

SHAPE = DecoderConfig(VOCAB, 16, 2, 2, 1, 8, 24, init_std=0.3)
SPARSE = replace(SHAPE, **EXPERTS)
LORA = LoRAConfig(rank=2, alpha=4.0)


def policy(adapter=None, *, seed=0, dtype=torch.float32, shape=SHAPE):
    made = init_policy(shape, seed=seed, dtype=dtype)
    if adapter is not None:
        made.attach(adapter)
    return made


def learner(net=None, *, lora=LORA, config=None, **options):
    net = net or policy(Adapter(lora, seed=5))
    optimizer = options.pop("optimizer", OptimizerConfig(lr=1e-2))
    return LocalLearner(
        config or LocalConfig(), net, optimizer=optimizer, total_steps=10, **options
    )


def logprobs(made):
    return asyncio.run(made.score(pack(groups()), ["logprobs"]))["logprobs"]


def test_the_first_scores_are_the_bases_and_stay_those_of_the_view():
    made, base = learner(), logprobs(LocalLearner(LocalConfig(), policy()))
    assert torch.equal(logprobs(made), base)
    batch, terms = prepared(ALGORITHMS["grpo"])
    asyncio.run(made.update(batch, terms))
    assert not torch.allclose(logprobs(made), base, atol=1e-3)
    assert torch.equal(logprobs(LoRAReference(made)), base)


@pytest.mark.parametrize("workers", [1, 2])
def test_only_the_adapter_has_gradients_and_moments(workers):
    made = learner(config=LocalConfig(workers=workers, micro_batch_tokens=20))
    before = {name: parameter.detach().clone() for name, parameter in made.model.named_parameters()}
    batch, terms = prepared(ALGORITHMS["grpo"])
    found = asyncio.run(made.update(batch, terms))
    assert found["grad_norm"] > 0
    assert all(map(is_adapter_parameter, made.optimizer.state))
    for name, parameter in made.model.named_parameters():
        assert parameter.requires_grad == is_adapter_parameter(name)
        assert torch.equal(parameter, before[name]) or is_adapter_parameter(name), name
    view = logprobs(LoRAReference(made))
    assert torch.equal(view, logprobs(LocalLearner(made.config, policy())))


def test_the_gradient_is_that_of_the_merged_matrix():
    """dL/dA = scale B^T G and dL/dB = scale G A^T, where G is the gradient of the whole matrix."""
    batch, terms = prepared(ALGORITHMS["sft"])
    net = policy(Adapter(LORA, seed=5), dtype=torch.float64)
    with torch.no_grad():
        for _, parameter in net.trained_parameters():
            parameter.add_(0.1)
    made = learner(net)
    whole = policy(dtype=torch.float64)
    for (_, to), weight in zip(
        whole.canonical_weights(), made.model.merged_weights().values(), strict=True
    ):
        to.copy_(weight.to("cpu", torch.float64, copy=True))
    full = learner(whole)
    for each in (made, full):
        each._accumulate(batch, terms)
    linear, matrix = (
        net.decoder.layers["1"].self_attn.qkv_proj,
        whole.decoder.layers["1"].self_attn.qkv_proj.weight,
    )
    for span, (a, b), grad_a in zip(
        linear.adapter.spans,
        linear.adapter.factors(),
        linear.adapter.lora_A.grad.split(2),
        strict=True,
    ):
        expected = LORA.scale * b.T @ matrix.grad[span.start : span.stop]
        torch.testing.assert_close(grad_a, expected, rtol=1e-9, atol=1e-12)
        assert a.shape == grad_a.shape


def test_steps_with_experts_are_those_of_the_low_rank_parametrisation_written_out():
    """Every matrix, an expert's too, is W + scale B A: gradients of A and B by autograd from those
    of the whole matrices, steps by PyTorch's AdamW."""
    batch, terms = prepared(ALGORITHMS["grpo"])
    net = policy(Adapter(LORA, seed=5), dtype=torch.float64, shape=SPARSE)
    base = {name: weight.clone() for name, weight in net.canonical_weights()}
    factors = {
        name: nn.Parameter(weight.clone().add_(0.1)) for name, weight in net.adapter_weights()
    }
    for name, weight in net.adapter_weights():
        weight.copy_(factors[name].detach())
    optimizer = OptimizerConfig(lr=1e-2, max_grad_norm=None)
    made, whole = learner(net, optimizer=optimizer), policy(dtype=torch.float64, shape=SPARSE)
    full = learner(whole, optimizer=optimizer)
    steps = torch.optim.AdamW(
        factors.values(),
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
    )
    layout = list_pieces(whole.decoder)
    for _ in range(3):
        merged = {
            name: weight
            + LORA.scale * factors[f"{path}.lora_B.weight"] @ factors[f"{path}.lora_A.weight"]
            for name, weight in base.items()
            if f"{(path := PEFT_PREFIX + name.removesuffix('.weight'))}.lora_A.weight" in factors
        }
        with torch.no_grad():
            for name, weight in whole.canonical_weights():
                weight.copy_(merged.get(name, weight))
        whole.zero_grad()
        full._accumulate(batch, terms)
        slopes = {
            block.name: block.tensor
            for name, parameter in whole.decoder.named_parameters()
            for block in cut_blocks(layout[name], parameter.grad)
        }
        steps.param_groups[0]["lr"] = asyncio.run(made.update(batch, terms))["lr"]
        steps.zero_grad()
        sum((weight * slopes[name]).sum() for name, weight in merged.items()).backward()
        steps.step()
    assert sum(".experts." in name for name in factors) == 2 * 3 * 4 * 2
    for name, weight in net.adapter_weights():
        torch.testing.assert_close(weight, factors[name].detach(), rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("shape", [SHAPE, SPARSE], ids=["dense", "experts"])
def test_a_checkpoint_holds_the_adapter_alone_and_goes_on_bit_for_bit(shape, dropout, tmp_path):
    lora = LORA.model_copy(update={"dropout": dropout})
    batch, terms = prepared(ALGORITHMS["grpo"])
    made = learner(policy(Adapter(lora, seed=5), shape=shape))
    asyncio.run(made.update(batch, terms))
    made.save(tmp_path)
    assert all(map(is_adapter_parameter, load_state(tmp_path)["parameters"]))
    asyncio.run(made.update(batch, terms))
    again = learner(policy(Adapter(lora, seed=5), shape=shape))
    again.load(tmp_path)
    asyncio.run(again.update(batch, terms))
    for (name, ours), (_, theirs) in zip(
        made.model.named_parameters(), again.model.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_a_checkpoint_of_another_base_is_refused(tmp_path):
    learner().save(tmp_path)
    with pytest.raises(CheckpointError, match="another base model"):
        learner(policy(Adapter(LORA), seed=1)).load(tmp_path)


@pytest.mark.parametrize("shape", [SHAPE, SPARSE], ids=["dense", "experts"])
def test_activations_that_are_computed_again_drop_the_same(shape):
    lora = LORA.model_copy(update={"dropout": 0.5})
    batch, terms = prepared(ALGORITHMS["grpo"])
    made = [
        learner(
            policy(Adapter(lora, seed=5), shape=shape),
            config=LocalConfig(activation_checkpointing=on),
        )
        for on in (False, True)
    ]
    for each in made:
        each._accumulate(batch, terms)
    for (name, a), (_, b) in zip(
        made[0].model.trained_parameters(), made[1].model.trained_parameters(), strict=True
    ):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


def test_export_writes_the_merged_model_the_base_and_the_adapter(tmp_path):
    made = learner(optimizer=OptimizerConfig(lr=1e-2, ema_decay=0.5))
    batch, terms = prepared(ALGORITHMS["sft"])
    asyncio.run(made.update(batch, terms))
    made.export(tmp_path / "all")
    made.export(tmp_path / "average", averaged=True)
    made.export(tmp_path / "base", part="base")
    made.export(tmp_path / "adapter", part="adapter")
    merged, average = (
        LocalLearner(LocalConfig(), load_policy(tmp_path / name)) for name in ("all", "average")
    )
    torch.testing.assert_close(logprobs(merged), logprobs(made), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(logprobs(average), logprobs(made), atol=1e-3)
    assert torch.equal(
        logprobs(LocalLearner(LocalConfig(), load_policy(tmp_path / "base"))),
        logprobs(LoRAReference(made)),
    )
    assert sorted(path.name for path in (tmp_path / "adapter").glob("adapter_*")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def roles(algorithm, net, adapter=None):
    return make_roles(
        net,
        character_tokenizer("0123456789=+abcd"),
        algorithm,
        section=LocalConfig(),
        optimizer=OptimizerConfig(lr=1e-2),
        steps=5,
        adapter=adapter,
    )


def test_roles_share_the_base():
    """The reference of DPO is a view; the critic of PPO trains an adapter and a head of its own."""
    net, adapter = policy(), Adapter(LORA, seed=5)
    made = roles(build_pairs(DPOConfig()), net, adapter)
    assert isinstance(made["reference"], LoRAReference)
    net = policy()
    made = roles(build_policy_gradient(PPOConfig(kl=KLConfig(coef=0.1))), net, adapter)
    critic = made["critic"]
    assert isinstance(made["reference"], LoRAReference)
    own = dict(net.named_parameters())
    for name, parameter in critic.model.named_parameters():
        assert (parameter is own[name]) == (not is_adapter_parameter(name)), name
    assert [
        name for name, _ in critic.forwards[0].parameters() if not is_adapter_parameter(name)
    ] == ["head.weight"]


def test_another_stage_begins_with_what_the_one_before_has_learned():
    net = policy()
    made = roles(ALGORITHMS["sft"], net, Adapter(LORA, seed=5))["policy"]
    batch, terms = prepared(ALGORITHMS["sft"])
    asyncio.run(made.update(batch, terms))
    learned = logprobs(made)
    after = roles(build_pairs(DPOConfig()), net, Adapter(replace_rank(LORA, 3), seed=6))
    torch.testing.assert_close(logprobs(after["policy"]), learned, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logprobs(after["reference"]), learned, rtol=1e-5, atol=1e-6)
    last = roles(ALGORITHMS["sft"], net)["policy"]
    assert net.adapter is None
    assert all(parameter.requires_grad for parameter in net.parameters())
    torch.testing.assert_close(logprobs(last), learned, rtol=1e-5, atol=1e-6)


def replace_rank(lora, rank):
    return lora.model_copy(update={"rank": rank})


@pytest.mark.parametrize("workers", [1, 2])
def test_no_two_micro_batches_drop_the_same(workers, monkeypatch):
    """Steps of 15, 4, 6 and 3 rows: neither the step's size nor the row decides what is dropped."""
    seeds, plain = [], Forward.forward_backward
    monkeypatch.setattr(
        Forward,
        "forward_backward",
        lambda self, *args, seed: seeds.append(seed) or plain(self, *args, seed=seed),
    )
    lora = LORA.model_copy(update={"dropout": 0.3})
    made = learner(lora=lora, config=LocalConfig(workers=workers, micro_batch_tokens=8))
    batch, terms = prepared(ALGORITHMS["sft"])
    for rows in (15, 4, 6, 3):
        asyncio.run(made.update(batch.take(range(rows)), terms))
    assert len(seeds) > 8
    assert len(set(seeds)) == len(seeds)
