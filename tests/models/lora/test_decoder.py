"""Adapters on our decoder: what they change, what they are called, and what peft makes of them."""

import json
from dataclasses import replace

import pytest
import torch

from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.errors import ConfigError, ModelError
from ratchet.models.load import init_policy, load_policy
from ratchet.models.lora.decoder import Adapter, count_adapter_parameters
from ratchet.models.lora.files import load_adapter, save_adapter
from ratchet.models.lora.layers import SeededDropout, derive_mask_seed, seed_dropout

SHAPE = DecoderConfig(29, 16, 2, 4, 2, 8, 24, init_std=0.3)
TOKENS = torch.tensor([1, 5, 9, 2, 28, 7, 7])
LENGTHS = [4, 3]


def logits(policy):
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    return policy.logits(policy.hidden(TOKENS, positions, LENGTHS))


def adapted(shape=SHAPE, dtype=torch.float32, *, seed=7, **lora):
    """With an adapter that has learned something."""
    policy = init_policy(shape, seed=1, dtype=dtype)
    policy.attach(Adapter(LoRAConfig(**{"rank": 2, "alpha": 3.0, **lora}), seed=seed))
    return shaken(policy)


def shaken(policy, seed=3):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in policy.trained_parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return policy


@torch.no_grad()
def test_a_fresh_adapter_changes_no_bit_and_nothing_else_trains():
    policy = init_policy(SHAPE, seed=1)
    before = logits(policy)
    policy.attach(Adapter(LoRAConfig(rank=2)))
    assert torch.equal(logits(policy), before)
    trains = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert trains == {name for name, _ in policy.trained_parameters()}
    assert len(trains) == 2 * 4 * SHAPE.n_layers


@torch.no_grad()
def test_switched_off_it_is_the_base_bit_for_bit():
    policy, base = adapted(), init_policy(SHAPE, seed=1)
    assert not torch.allclose(logits(policy), logits(base), atol=1e-2)
    with policy.without_adapter():
        assert torch.equal(logits(policy), logits(base))
    assert not torch.allclose(logits(policy), logits(base), atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize(
    "lora", [{}, {"target_modules": ("v_proj", "down_proj")}, {"rslora": True, "init": "gaussian"}]
)
def test_merged_computes_what_it_computed_beside(lora, tmp_path):
    policy = adapted(**lora)
    beside = logits(policy)
    policy.save(tmp_path / "merged", policy.merged_weights())
    torch.testing.assert_close(
        logits(load_policy(tmp_path / "merged")),
        beside,
        rtol=0,
        atol=1e-6 * float(beside.abs().max()),
    )
    policy.merge()
    torch.testing.assert_close(
        logits(policy), beside, rtol=0, atol=1e-6 * float(beside.abs().max())
    )
    assert not list(policy.adapter_weights())
    assert all(parameter.requires_grad for parameter in policy.parameters())


def test_what_is_saved_without_it_is_the_base(tmp_path):
    adapted().save(tmp_path)
    for (name, ours), (_, theirs) in zip(
        load_policy(tmp_path).canonical_weights(),
        init_policy(SHAPE, seed=1).canonical_weights(),
        strict=True,
    ):
        assert torch.equal(ours, theirs), name


def test_a_weight_begins_alike_wherever_it_lies():
    """By its name: other maps beside it, and another order, change nothing."""
    both = dict(adapted(target_modules=("q_proj", "v_proj")).adapter_weights())
    some = dict(adapted(target_modules=("v_proj",)).adapter_weights())
    fresh = Adapter(LoRAConfig(rank=2), seed=7)
    for name in some:
        assert both[name].shape == some[name].shape
        if ".lora_A." in name:
            assert (
                fresh.initial_weight(name, some[name].shape).abs().max() <= SHAPE.hidden_size**-0.5
            )


def test_names_and_sizes_are_those_of_peft():
    policy = adapted()
    weights = dict(policy.adapter_weights())
    q = "base_model.model.model.layers.1.self_attn.q_proj"
    assert weights[f"{q}.lora_A.weight"].shape == (2, 16)
    assert weights[f"{q}.lora_B.weight"].shape == (32, 2)
    assert len(weights) == 2 * 7 * 2
    count = count_adapter_parameters(
        dict(policy.canonical_weights()), policy.resolve_adapter_layers(LoRAConfig()), 2
    )
    assert count == sum(weight.numel() for weight in weights.values())


@torch.no_grad()
@pytest.mark.needs("peft")
def test_peft_reads_what_was_written_and_computes_the_same(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = adapted(rslora=True, target_modules=("q_proj", "o_proj", "up_proj", "down_proj"))
    policy.save(tmp_path / "base")
    adapter = replace(policy.adapter, base_model=str(tmp_path / "base"))
    save_adapter(
        tmp_path / "adapter",
        adapter,
        policy.resolve_adapter_layers(adapter.lora),
        dict(policy.adapter_weights()),
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    rows = [theirs(input_ids=row[None]).logits[0] for row in TOKENS.split(LENGTHS)]
    torch.testing.assert_close(logits(policy), torch.cat(rows), rtol=0, atol=1e-5)
    read = load_adapter(tmp_path / "adapter")
    assert read.adapter.lora.scale == pytest.approx(adapter.lora.scale)
    assert read.adapter.base_model == str(tmp_path / "base")
    assert all(torch.equal(read.weights[name], weight) for name, weight in policy.adapter_weights())


@torch.no_grad()
@pytest.mark.needs("peft")
def test_a_model_of_transformers_has_the_same_adapter(tmp_path):
    """Through peft's layers: the first values, names, merging, and the base below."""
    ours = init_policy(SHAPE, seed=1)
    ours.save(tmp_path / "base")
    theirs = load_policy(tmp_path / "base", backend="transformers")
    for policy in (ours, theirs):
        policy.attach(Adapter(LoRAConfig(rank=2, alpha=3.0), seed=7))
    start = dict(ours.adapter_weights())
    assert all(torch.equal(start[name], weight) for name, weight in theirs.adapter_weights())
    base = logits(theirs)
    for name, weight in dict(theirs.adapter_weights()).items():
        weight.add_(0.1)
        start[name].add_(0.1)
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=0, atol=1e-5)
    with theirs.without_adapter():
        assert torch.equal(logits(theirs), base)
    assert {name for name, p in theirs.named_parameters() if p.requires_grad} == {
        name for name, _ in theirs.trained_parameters()
    }
    theirs.save(tmp_path / "again")
    torch.testing.assert_close(logits(load_policy(tmp_path / "again")), base, rtol=0, atol=1e-5)
    theirs.save(tmp_path / "merged", theirs.merged_weights())
    torch.testing.assert_close(
        logits(load_policy(tmp_path / "merged")), logits(ours), rtol=0, atol=1e-5
    )
    theirs.merge()
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=0, atol=1e-5)


def test_dropout_is_a_function_of_its_seed():
    policy = adapted(dropout=0.5)
    plain = logits(policy)
    with seed_dropout(policy, 1):
        first, again = logits(policy), logits(policy)
    with seed_dropout(policy, 2):
        other = logits(policy)
    assert torch.equal(first, again)
    assert not torch.equal(first, plain)
    assert not torch.equal(first, other)
    assert torch.equal(logits(policy), plain)


@pytest.mark.fault("M10")
def test_masks_of_steps_micro_batches_and_places_differ():
    """Step 4,096 too: torch's generator on a CPU reads 32 bits of a seed."""
    steps = [0, 1, 2, 3, 255, 256, 4095, 4096, 8192, 1_000_003]
    masks, x = set(), torch.ones(64, 2)
    for step in steps:
        for number in range(16):
            for place in range(6):
                dropout = SeededDropout(0.5, place)
                dropout.seed = derive_mask_seed(step, number)
                masks.add(bytes((dropout(x) > 0).flatten().tolist()))
    assert len(masks) == len(steps) * 16 * 6


def test_unknown_maps_are_refused_and_experts_are_left_out_where_no_target_names_them():
    policy = init_policy(SHAPE, seed=1)
    with pytest.raises(ConfigError, match="'q_prj'; did you mean 'q_proj'"):
        policy.attach(Adapter(LoRAConfig(target_modules=("q_prj",))))
    shape = replace(
        SHAPE, family="qwen3_moe", n_experts=4, experts_per_token=2, expert_intermediate_size=12
    )
    sparse = init_policy(shape, seed=1)
    sparse.attach(Adapter(LoRAConfig(target_modules=("q_proj", "o_proj"))))
    assert len(list(sparse.adapter_weights())) == 2 * 2 * 2


@pytest.mark.needs("peft")
def test_an_adapter_that_is_more_than_lora_is_refused(tmp_path):
    """With PiSSA, for example, peft subtracts a part of each weight from the base."""
    policy = adapted()
    save_adapter(tmp_path, policy.adapter, ("q_proj",), dict(policy.adapter_weights()))
    path = tmp_path / "adapter_config.json"
    plain = json.loads(path.read_text())
    changes = {
        "use_dora": True,
        "init_lora_weights": "pissa",
        "alora_invocation_tokens": [1, 2],
        "kasa_config": {},
    }
    for key, value in changes.items():
        path.write_text(json.dumps({**plain, key: value}))
        with pytest.raises(ModelError, match=f"{key}=.*, which is not plain LoRA"):
            load_adapter(tmp_path)
    with pytest.raises(ModelError, match="not an adapter that peft can read"):
        load_adapter(tmp_path / "nowhere")
