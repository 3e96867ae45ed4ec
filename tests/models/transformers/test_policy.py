from functools import partial

import pytest
import torch
from packaging.version import Version
from support.transformers_version import TRANSFORMERS
from torch import nn

from ratchet.config.lora import LoRAConfig
from ratchet.errors import ModelError
from ratchet.learners.compute.forward import Forward
from ratchet.models.load import load_policy
from ratchet.models.lora.decoder import Adapter
from ratchet.models.transformers import packed_attention
from ratchet.models.transformers.policy import TransformersPolicy
from ratchet.utils.thread_pool import ThreadPool

GPT2 = {
    "vocab_size": 50,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPT = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 48,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 16,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
BLOOM = {"vocab_size": 50, "hidden_size": 32, "n_layer": 2, "n_head": 4}

# name -> (model_type, shape (None: the common one), fields, whether sequences can share a forward)
ARCHITECTURES = {
    "gpt2": ("gpt2", GPT2, {}, True),
    "gemma2": (
        "gemma2",
        None,
        {
            "head_dim": 8,
            "pad_token_id": 0,
            "final_logit_softcapping": 0.7,
            "query_pre_attn_scalar": 8,
            "sliding_window": 4,
        },
        True,
    ),
    "granite": ("granite", None, {"logits_scaling": 3.0, "embedding_multiplier": 2.0}, True),
    "cohere": ("cohere", None, {"logit_scale": 0.3, "pad_token_id": 0}, True),
    "mixtral": ("mixtral", None, {"num_local_experts": 4, "sliding_window": None}, True),
    "qwen3": ("qwen3", None, {"head_dim": 8}, True),
    # positions come from a mask, and the backbone lies one module deeper
    "opt": ("opt", OPT, {}, False),
    "bloom": ("bloom", BLOOM, {}, False),  # takes no positions
}


@pytest.fixture(params=ARCHITECTURES)
def loaded(request, reference, tmp_path):
    """(reference model, our policy of its directory, whether it packs)"""
    model_type, shape, fields, packs = ARCHITECTURES[request.param]
    model = reference(model_type, shape=shape, **fields)
    model.save_pretrained(tmp_path)
    return model, load_policy(tmp_path, backend="transformers"), packs


def test_packed_logits_are_the_model_s_own(loaded, reference_logits, ragged):
    model, policy, packs = loaded
    assert policy.packs is packs
    tokens, positions, lengths = ragged
    with torch.no_grad():
        expected = reference_logits(model, tokens, lengths)
        found = policy.logits(policy.hidden(tokens, positions, lengths))
    assert expected.std() > 0.05
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(
    Version("5.19") > TRANSFORMERS, reason="rotary embeddings were products, as experts were"
)
def test_a_token_s_work_is_that_of_the_products(loaded):
    """Of fused attention and of products grouped by experts the counter knows nothing; bloom
    attends by plain products."""
    from torch.utils.flop_counter import FlopCounterMode

    _, policy, _ = loaded
    work, config = policy.token_cost, policy.text_config
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hidden = policy.hidden(torch.arange(7), torch.arange(7), [7])
        policy.logits(hidden)
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    assert work.query_dims == layers * heads * (
        getattr(config, "head_dim", None) or config.hidden_size // heads
    )
    # two experts a token, of three matrices
    grouped = layers * 2 * (3 * 32 * 48) if config.model_type == "mixtral" else 0
    seen = 7 if config._attn_implementation == "eager" or config.model_type == "bloom" else 0
    assert work.forward_flop(7, seen) == counter.get_total_flops() + 7 * 2 * grouped


@pytest.mark.medium
def test_an_adapter_is_no_part_of_the_work(reference):
    policy = TransformersPolicy(reference("qwen3", head_dim=8))
    before = policy.token_cost
    policy.attach(Adapter(LoRAConfig(rank=2)))
    assert policy.token_cost == before


def test_the_work_of_what_does_more_than_attend_is_unknown(reference):
    mamba = reference(
        "mamba",
        shape={"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    )
    assert TransformersPolicy(mamba).token_cost is None


def test_twins_in_two_threads_each_have_the_gradients_of_one(loaded, ragged):
    _, policy, _ = loaded
    tokens, positions, lengths = ragged
    own = Forward(policy, None, chunk_mib=1, autocast=False, shared_vocab=None)

    def backward(hand):
        hand.model.logits(hand.model.hidden(tokens, positions, lengths)).logsumexp(
            -1
        ).mean().backward()
        found = [None if p.grad is None else p.grad.clone() for _, p in hand.parameters()]
        hand.model.zero_grad()
        return found

    expected = backward(own)
    for found in ThreadPool(2).run(
        [partial(backward, hand) for hand in (own, own.copy_with_own_gradients())]
    ):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_gradients_are_the_model_s_own(loaded, reference_logits, ragged):
    model, policy, _ = loaded
    tokens, positions, lengths = ragged
    policy.logits(policy.hidden(tokens, positions, lengths)).logsumexp(-1).mean().backward()
    model.zero_grad()
    reference_logits(model, tokens, lengths).logsumexp(-1).mean().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in policy.model.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(
                parameter.grad,
                expected[name],
                rtol=1e-3,
                atol=1e-6,
                msg=lambda m, n=name: f"{n}: {m}",
            )


def test_softcapping_bounds_the_logits(reference, ragged):
    fields = ARCHITECTURES["gemma2"][2]
    policy = TransformersPolicy(reference("gemma2", **fields))
    with torch.no_grad():
        logits = policy.logits(100 * policy.hidden(*ragged))
    assert 0.6 < logits.abs().max() <= 0.7


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_a_neighbour_changes_nothing_at_all(name, reference, ragged):
    model_type, shape, fields, _ = ARCHITECTURES[name]
    policy = TransformersPolicy(reference(model_type, shape=shape, **fields))
    tokens, positions, lengths = ragged
    own = slice(lengths[0], lengths[0] + lengths[1])
    other = (tokens + 1) % 50
    other[own] = tokens[own]
    with torch.no_grad():
        before, after = (policy.hidden(row, positions, lengths) for row in (tokens, other))
    assert torch.equal(before[own], after[own])
    assert not torch.equal(before, after)


WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.mark.parametrize(
    ("name", "windows", "masked_layers"), [("granite", {}, 0), ("qwen3", WINDOWS, 1)]
)
def test_only_sliding_windows_get_a_mask(
    name, windows, masked_layers, reference, monkeypatch, ragged
):
    """granite scales scores in its own way."""
    model_type, shape, fields, _ = ARCHITECTURES[name]
    policy = TransformersPolicy(reference(model_type, shape=shape, **fields, **windows))
    assert policy.packs_by_lengths
    masks, attend = [], packed_attention.sdpa_attention_forward

    def record(module, query, key, value, mask, **arguments):
        masks.append(mask)
        return attend(module, query, key, value, mask, **arguments)

    monkeypatch.setattr(packed_attention, "sdpa_attention_forward", record)
    by_lengths = policy.hidden(*ragged)
    assert [mask is not None for mask in masks] == [True] * masked_layers
    policy.packs_by_lengths = False
    packed_attention.set_packed_attention(policy.model, enabled=False)
    torch.testing.assert_close(by_lengths, policy.hidden(*ragged), rtol=1e-5, atol=1e-5)


def test_a_model_that_can_t_attend_by_lengths_keeps_its_mask(reference, monkeypatch, ragged):
    model_type, shape, fields, _ = ARCHITECTURES["qwen3"]
    model = reference(model_type, shape=shape, **fields)
    expected = TransformersPolicy(model).hidden(*ragged)
    monkeypatch.setattr(packed_attention, "ARGUMENT", "an_argument_that_attention_ignores")
    policy = TransformersPolicy(model)
    assert (policy.packs, policy.packs_by_lengths) == (True, False)
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(policy.hidden(*ragged), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_a_leak_is_found_and_packing_given_up(name, dtype, reference, monkeypatch, ragged):
    """Without its look at the positions, transformers' causal mask spans all sequences."""
    monkeypatch.setattr(
        "transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None
    )
    model_type, shape, fields, _ = ARCHITECTURES[name]
    model = reference(model_type, shape=shape, **fields).to(dtype)
    policy = TransformersPolicy(model)
    assert policy.packs is False
    tokens, positions, lengths = ragged
    with torch.no_grad():
        apart = policy.hidden(tokens, positions, lengths)
        policy.packs = True
        assert (policy.hidden(tokens, positions, lengths) - apart).abs().max() > 0.1
    monkeypatch.undo()
    assert TransformersPolicy(model).packs is True


def test_the_head_is_float32(reference, tmp_path, ragged):
    reference("gpt2", shape=GPT2).save_pretrained(tmp_path)
    policy = load_policy(tmp_path, backend="transformers", dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden = policy.hidden(*ragged)
        logits = policy.logits(hidden)
    assert (hidden.dtype, logits.dtype, policy.packs) == (torch.bfloat16, torch.float32, True)
    exact = hidden.double() @ policy.model.lm_head.weight.double().T
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)


def test_dropout_is_off_even_where_transformers_trains(reference, tmp_path, ragged):
    reference("gpt2", shape=GPT2, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5).save_pretrained(
        tmp_path
    )
    policy = load_policy(tmp_path)
    plain = policy.hidden(*ragged)
    policy.checkpointing = True
    assert policy.checkpointing
    assert policy.model.training
    recomputed = policy.hidden(*ragged)
    assert torch.equal(plain, recomputed)
    gradients = []
    for hidden in (plain, recomputed):
        policy.zero_grad()
        hidden.square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in policy.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))
    policy.checkpointing = False
    assert not policy.checkpointing


def test_checkpointing_recomputes_layers(reference, ragged):
    policy = TransformersPolicy(reference("gpt2", shape=GPT2))
    calls = []
    policy.model.transformer.h[0].attn.register_forward_hook(lambda *_: calls.append(1))
    policy.checkpointing = True
    policy.hidden(*ragged).sum().backward()
    assert len(calls) == 2


def test_saved_with_the_configuration_it_came_with(reference, tmp_path, ragged):
    reference("gpt2", shape=GPT2, attn_pdrop=0.25).save_pretrained(
        tmp_path / "start", max_shard_size="20KB"
    )
    policy = load_policy(tmp_path / "start")
    policy.save(tmp_path / "start")
    assert len(list((tmp_path / "start").glob("*.safetensors"))) == 1
    again = load_policy(tmp_path / "start")
    assert again.saved_config.attn_pdrop == 0.25
    assert not list((tmp_path / "start").glob(".*"))
    with torch.no_grad():
        assert torch.equal(again.hidden(*ragged), policy.hidden(*ragged))


def test_buffers_of_files_are_saved_with_given_weights(reference, tmp_path):
    """The bias of a router is no parameter, so a learner's weights lack it."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    model = reference(
        "glm4_moe", head_dim=8, first_k_dense_replace=1, moe_intermediate_size=12, **experts
    )
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(name).copy_(torch.arange(4.0))
    policy = TransformersPolicy(model)
    policy.save(tmp_path, dict(policy.canonical_weights()))
    saved = TransformersPolicy.load(tmp_path).model
    assert torch.equal(saved.get_buffer(name), torch.arange(4.0))


def test_what_a_learner_reads(reference):
    policy = TransformersPolicy(reference("gpt2", shape=GPT2))
    assert (policy.vocab_size, policy.hidden_size, policy.max_positions, policy.eos_ids) == (
        50,
        32,
        128,
        (2,),
    )
    names = dict(policy.canonical_weights())
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names  # tied
    names["transformer.wte.weight"].fill_(3.0)
    assert (policy.model.lm_head.weight == 3.0).all()


def test_a_head_that_reads_more_than_hidden_states_is_refused(reference):
    model = reference("gpt2", shape=GPT2)

    class Shifted(type(model)):
        def forward(self, input_ids, **kwargs):
            out = super().forward(input_ids=input_ids, **kwargs)
            out.logits = out.logits + nn.functional.one_hot(input_ids, 50)
            return out

    model.__class__ = Shifted
    with pytest.raises(ModelError, match="depend on more than"):
        TransformersPolicy(model)


def test_a_directory_that_transformers_can_t_read(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ModelError, match="transformers can't load"):
        load_policy(tmp_path)
