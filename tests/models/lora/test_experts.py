"""Adapters of experts, against the dense formula W_e + scale B_e A_e of each expert in float64, and
the files that peft reads."""

from dataclasses import replace

import pytest
import torch
from models.layers.test_moe import layer, plainly, tokens
from models.lora.test_decoder import LENGTHS, SHAPE, TOKENS, logits, shaken

from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.lora_targets import resolve_decoder_targets
from ratchet.errors import ConfigError
from ratchet.models.load import init_policy, load_policy
from ratchet.models.lora.decoder import Adapter, count_adapter_parameters
from ratchet.models.lora.files import load_adapter, save_adapter
from ratchet.models.lora.layers import FusedLoRA

SPARSE = replace(
    SHAPE,
    family="qwen3_moe",
    n_experts=4,
    experts_per_token=2,
    expert_intermediate_size=12,
    dense_layers=(1,),
)
MIXTRAL = replace(
    SPARSE, family="mixtral", qk_norm=False, dense_layers=(), expert_intermediate_size=24
)
RANK, SCALE = 3, 0.7
# The rows of gate and up in the fused matrix, for the layer of test_moe.
GATE, UP = range(24), range(24, 48)


def adapt(mlp, spans_by_name):
    """Give the experts adapters with random factors, and return these by the matrix's name."""
    generator = torch.Generator().manual_seed(5)
    for name, spans in spans_by_name.items():
        weight = getattr(mlp.experts, name)
        made = FusedLoRA(weight, spans, rank=RANK, scale=SCALE, dropout=0.0, name="")
        with torch.no_grad():
            for factor in made.parameters():
                factor.normal_(0.0, 0.4, generator=generator)
        mlp.experts.adapters[name] = made
    return [factor for made in mlp.experts.adapters.values() for factor in made.parameters()]


def written_out(mlp):
    """The layer with the matrices W_e + scale B_e A_e, as functions of the factors, one expert and
    one part after the other."""
    experts = {"gate_up_proj": mlp.experts.gate_up_proj, "down_proj": mlp.experts.down_proj}
    for name, made in mlp.experts.adapters.items():
        whole = []
        for expert, weight in enumerate(experts[name]):
            change = torch.zeros_like(weight)
            for part, span in enumerate(made.spans):
                before = sum(len(earlier) for earlier in made.spans[:part])
                a = made.lora_A[expert, part * RANK : (part + 1) * RANK]
                b = made.lora_B[expert, before : before + len(span)]
                rows = torch.zeros(len(weight), len(span), dtype=weight.dtype)
                rows[list(span), range(len(span))] = 1.0
                change = change + rows @ (SCALE * b @ a)
            whole.append(weight + change)
        experts[name] = torch.stack(whole)

    class Plain:
        gate = mlp.gate

    Plain.experts = type("PlainExperts", (), experts)
    return Plain


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize(
    "spans",
    [
        {"gate_up_proj": (GATE, UP), "down_proj": (range(16),)},
        {"gate_up_proj": (UP,)},
        {"gate_up_proj": (GATE,), "down_proj": (range(16),)},
    ],
    ids=["all", "up", "gate and down"],
)
@pytest.mark.parametrize("count", [1, 2, 37])
def test_values_and_gradients_are_those_of_the_dense_formula(count, spans, multiple):
    mlp, slopes = layer(), tokens(count, seed=2)
    factors, x = adapt(mlp, spans), tokens(count).requires_grad_()
    wanted = [x, mlp.gate.weight, *factors]
    found, expected = mlp(x, multiple), plainly(written_out(mlp), x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad((y * slopes).sum(), wanted) for y in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    chosen = set(mlp.gate(x)[1].flatten().tolist())
    assert count > 2 or len(chosen) < 4, "every expert has a token"
    for gradient in ours[2:]:
        assert {i for i, part in enumerate(gradient) if part.any()} == chosen


def test_no_tokens():
    mlp = layer()
    factors = adapt(mlp, {"gate_up_proj": (GATE, UP), "down_proj": (range(16),)})
    mlp(tokens(0).requires_grad_()).sum().backward()
    assert all(factor.grad is not None and not factor.grad.any() for factor in factors)


def adapted(shape=SPARSE, **lora):
    policy = init_policy(shape, seed=1)
    policy.attach(Adapter(LoRAConfig(**{"rank": 2, "alpha": 3.0, **lora}), seed=7))
    return shaken(policy)


@torch.no_grad()
@pytest.mark.parametrize(
    ("shape", "lora"),
    [
        (SPARSE, {}),
        (SPARSE, {"base": "float8"}),
        (SPARSE, {"target_modules": ("v_proj", "down_proj"), "rslora": True}),
        (MIXTRAL, {"target_modules": ("w1", "w2", "q_proj")}),
    ],
)
def test_off_it_is_the_base_and_merged_it_computes_the_same(shape, lora, tmp_path):
    policy, base = adapted(shape, **lora), init_policy(shape, seed=1)
    beside = logits(policy)
    with policy.without_adapter():
        off = logits(policy)
    assert not torch.allclose(beside, off, atol=1e-2)
    if "base" not in lora:
        assert torch.equal(off, logits(base))
    close = {"rtol": 0, "atol": 2e-6 * float(beside.abs().max())}
    policy.save(tmp_path, policy.merged_weights())
    torch.testing.assert_close(logits(load_policy(tmp_path)), beside, **close)
    policy.merge()
    torch.testing.assert_close(logits(policy), beside, **close)
    assert not list(policy.adapter_weights())


def test_names_and_sizes_are_those_of_a_linear_layer_per_expert():
    policy = adapted()
    weights = dict(policy.adapter_weights())
    expert = "base_model.model.model.layers.0.mlp.experts.3"
    assert weights[f"{expert}.gate_proj.lora_A.weight"].shape == (2, 16)
    assert weights[f"{expert}.up_proj.lora_B.weight"].shape == (12, 2)
    assert weights[f"{expert}.down_proj.lora_A.weight"].shape == (2, 12)
    assert weights[f"{expert}.down_proj.lora_B.weight"].shape == (16, 2)
    assert len(weights) == 2 * ((4 + 3 * 4) + (4 + 3))
    assert count_adapter_parameters(
        dict(policy.canonical_weights()), policy.resolve_adapter_layers(LoRAConfig()), 2
    ) == sum(weight.numel() for weight in weights.values())
    names = {name.split(".")[-3] for name, _ in adapted(MIXTRAL).adapter_weights()}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3"}


def test_names_of_another_family_are_refused():
    assert resolve_decoder_targets(SPARSE, LoRAConfig(target_modules=("up_proj",))) == ("up_proj",)
    with pytest.raises(ConfigError, match="no linear layer of the model is called 'w1'"):
        resolve_decoder_targets(SPARSE, LoRAConfig(target_modules=("w1",)))
    with pytest.raises(ConfigError, match="no linear layer of the model is called 'up_proj'"):
        resolve_decoder_targets(MIXTRAL, LoRAConfig(target_modules=("up_proj",)))


@torch.no_grad()
@pytest.mark.needs("peft")
@pytest.mark.parametrize("shape", [replace(SPARSE, dense_layers=()), MIXTRAL], ids=["qwen", "mix"])
def test_peft_reads_what_was_written_and_computes_the_same(shape, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = adapted(shape)
    policy.save(tmp_path / "base")
    adapter = replace(policy.adapter, base_model=str(tmp_path / "base"))
    names = policy.resolve_adapter_layers(adapter.lora)
    save_adapter(tmp_path / "adapter", adapter, names, dict(policy.adapter_weights()))
    read = load_adapter(tmp_path / "adapter")
    assert set(read.target_modules) == set(names)
    assert all(torch.equal(read.weights[name], weight) for name, weight in policy.adapter_weights())
    read.check({name: tuple(weight.shape) for name, weight in policy.canonical_weights()})
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    rows = [theirs(input_ids=row[None]).logits[0] for row in TOKENS.split(LENGTHS)]
    torch.testing.assert_close(logits(policy), torch.cat(rows), rtol=0, atol=2e-5)
