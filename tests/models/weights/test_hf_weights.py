import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ratchet.config.model_shape.presets import get_preset
from ratchet.errors import ModelError
from ratchet.models.decoder import Decoder
from ratchet.models.policy import DecoderPolicy
from ratchet.models.weights.hf_weights import (
    canonical_weights,
    load_decoder,
    load_weights,
    read_config,
    save_decoder,
)
from ratchet.models.weights.tensor_files import save_tensors

VARIANTS = {
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe, a dense layer": (
        "qwen3_moe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [0],
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
}


def small(seed=0, **overrides):
    return Decoder(get_preset("tiny", 50, **overrides)).init_weights(seed)


def logits(decoder, tokens, positions, lengths):
    policy = DecoderPolicy(decoder)
    with torch.no_grad():
        return policy.logits(policy.hidden(tokens, positions, lengths))


# --- names and views


def test_canonical_weights_are_views_that_cover_every_parameter_once():
    decoder = small(tied=False)
    weights = dict(canonical_weights(decoder))
    assert sum(w.numel() for w in weights.values()) == sum(p.numel() for p in decoder.parameters())
    weights["model.layers.1.self_attn.k_proj.weight"].fill_(7.0)
    fused = decoder.layers["1"].self_attn.qkv_proj.weight.detach()
    # after 2 query heads of 32 rows
    assert (fused == 7).all(dim=1).nonzero()[:, 0].tolist() == list(range(64, 128))
    assert all(w.is_contiguous() and not w.requires_grad for w in weights.values())


@pytest.mark.parametrize(
    ("family", "up"),
    [("qwen3_moe", "mlp.experts.2.up_proj"), ("mixtral", "block_sparse_moe.experts.2.w3")],
)
def test_experts_have_views_of_their_own(family, up):
    shape = {"qk_norm": family == "qwen3_moe", "expert_intermediate_size": 192}
    decoder = Decoder(get_preset("tiny-moe", 50, family=family, **shape)).init_weights(0)
    weights = dict(canonical_weights(decoder))
    assert sum(w.numel() for w in weights.values()) == sum(p.numel() for p in decoder.parameters())
    weights[f"model.layers.1.{up}.weight"].fill_(7.0)
    fused = decoder.layers["1"].mlp.experts.gate_up_proj.detach()
    assert (fused == 7).all(dim=2).nonzero().tolist() == [[2, row] for row in range(192, 384)]
    assert all(w.is_contiguous() and not w.requires_grad for w in weights.values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_canonical_names_are_those_of_transformers(variant, reference, tmp_path):
    model_type, fields = VARIANTS[variant]
    model = reference(model_type, **fields)
    model.save_pretrained(tmp_path)
    found = dict(canonical_weights(load_decoder(tmp_path)))
    on_disk = load_file(tmp_path / "model.safetensors")
    assert found.keys() == on_disk.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, on_disk[name]), name


# --- round trips


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_what_transformers_saves_we_load(
    variant, shard, reference, reference_logits, ragged, tmp_path
):
    model_type, fields = VARIANTS[variant]
    model = reference(model_type, **fields)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    tokens, positions, lengths = ragged
    with torch.no_grad():
        expected = reference_logits(model, tokens, lengths)
    torch.testing.assert_close(
        logits(load_decoder(tmp_path), tokens, positions, lengths), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_what_we_save_transformers_loads(
    variant, shard_bytes, reference, reference_logits, ragged, tmp_path
):
    from transformers import AutoModelForCausalLM

    model_type, fields = VARIANTS[variant]
    reference(model_type, **fields).save_pretrained(tmp_path / "start")
    decoder = load_decoder(tmp_path / "start")
    save_decoder(decoder, tmp_path / "saved", max_shard_bytes=shard_bytes)
    assert (len(list((tmp_path / "saved").glob("*.safetensors"))) > 1) == (shard_bytes == 20_000)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.model_type == model_type
    assert model.generation_config.eos_token_id == 2
    tokens, positions, lengths = ragged
    with torch.no_grad():
        found = reference_logits(model.eval(), tokens, lengths)
    torch.testing.assert_close(
        found, logits(decoder, tokens, positions, lengths), rtol=1e-5, atol=1e-5
    )
    again = load_decoder(tmp_path / "saved")
    assert again.config == decoder.config
    for one, two in zip(again.parameters(), decoder.parameters(), strict=True):
        assert torch.equal(one, two)


def test_bfloat16_files(tmp_path):
    decoder = small()
    save_decoder(decoder, tmp_path, dtype=torch.bfloat16)
    config = tmp_path / "config.json"
    on_disk = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in on_disk.values()} == {torch.bfloat16}
    # safetensors would keep other users from reading it.
    assert (tmp_path / "model.safetensors").stat().st_mode == config.stat().st_mode
    assert json.loads(config.read_text())["dtype"] == "bfloat16"
    wide = load_decoder(tmp_path)
    assert torch.equal(wide.embed_tokens.weight, decoder.embed_tokens.weight.bfloat16().float())
    assert load_decoder(tmp_path, dtype=torch.bfloat16).embed_tokens.weight.dtype == torch.bfloat16


def test_a_second_save_leaves_no_shards_behind(tmp_path):
    save_decoder(small(0), tmp_path, max_shard_bytes=20_000)
    save_decoder(small(1), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert torch.equal(load_decoder(tmp_path).embed_tokens.weight, small(1).embed_tokens.weight)
    save_decoder(small(2), tmp_path, max_shard_bytes=20_000)
    assert not (tmp_path / "model.safetensors").exists()
    assert torch.equal(load_decoder(tmp_path).embed_tokens.weight, small(2).embed_tokens.weight)


def test_an_index_of_an_earlier_save_is_not_followed(tmp_path):
    """transformers' save_pretrained removes the shards of an earlier save, and not their index."""
    save_decoder(small(0), tmp_path, max_shard_bytes=20_000)
    shards = {path.name: path.read_bytes() for path in tmp_path.glob("model*")}
    save_decoder(small(1), tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    for name in sorted(shards):  # the index last
        (tmp_path / name).write_bytes(shards[name])
    with pytest.raises(ModelError, match=r"has both model.safetensors and the files of .*index"):
        load_decoder(tmp_path)
    for path in tmp_path.glob("model-*"):
        path.unlink()
    loaded = dict(canonical_weights(load_decoder(tmp_path)))
    assert all(loaded[name].equal(weight) for name, weight in expected.items())


def test_a_failed_save_leaves_the_old_file_and_no_partial_one(tmp_path, monkeypatch):
    save_decoder(small(0), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def broken(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("ratchet.models.weights.hf_weights.save_tensors", broken)
    with pytest.raises(OSError, match="no space"):
        save_decoder(small(1), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_end_ids_come_from_the_generation_config_which_is_saved_with_the_model(tmp_path):
    save_decoder(small(eos_ids=(5,)), tmp_path)
    assert read_config(tmp_path).eos_ids == (5,)
    generation = {"eos_token_id": [6, 5], "pad_token_id": 6, "temperature": 0.6, "top_p": 0.95}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_config(tmp_path).eos_ids == (6, 5)
    save_decoder(load_decoder(tmp_path), tmp_path / "trained")
    trained = json.loads((tmp_path / "trained" / "generation_config.json").read_text())
    assert trained == generation


# --- what is refused


def test_missing_unexpected_and_misshapen_weights_are_named():
    weights = dict(canonical_weights(small()))
    target = small(1)
    for change, words in [
        ({"model.norm.weight": None}, "missing: model.norm.weight"),
        ({"model.extra.weight": torch.zeros(1)}, "no place for: model.extra.weight"),
        (
            {"model.norm.weight": torch.zeros(63)},
            "'model.norm.weight' has shape 63, but the config says 64",
        ),
        ({"lm_head.weight": torch.zeros(50, 64)}, "no place for: lm_head.weight"),
    ]:
        changed = {
            name: tensor for name, tensor in (weights | change).items() if tensor is not None
        }
        with pytest.raises(ModelError, match=words):
            load_weights(target, changed.items())


def test_load_weights_changes_dtype():
    target = small(1)
    load_weights(target, ((name, tensor.double()) for name, tensor in canonical_weights(small(0))))
    assert torch.equal(target.embed_tokens.weight, small(0).embed_tokens.weight)
    assert target.embed_tokens.weight.requires_grad


def rewrite(directory, change):
    weights = load_file(directory / "model.safetensors")
    save_file(
        {name: t.contiguous() for name, t in (weights | change).items() if t is not None},
        directory / "model.safetensors",
    )


def test_a_tied_head_on_disk_must_be_the_embedding(tmp_path):
    decoder = small()
    save_decoder(decoder, tmp_path)
    rewrite(tmp_path, {"lm_head.weight": decoder.embed_tokens.weight.detach().clone()})
    assert torch.equal(load_decoder(tmp_path).head_weight, decoder.head_weight)
    rewrite(tmp_path, {"lm_head.weight": decoder.embed_tokens.weight.detach() + 1})
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        load_decoder(tmp_path)


def test_rotary_constants_of_old_checkpoints_are_ignored(tmp_path):
    save_decoder(small(), tmp_path)
    rewrite(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)})
    load_decoder(tmp_path)


def test_damaged_directories_are_named(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_decoder(tmp_path)
    save_decoder(small(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match="damaged"):
        load_decoder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin could run code"):
        load_decoder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        load_decoder(tmp_path)


def test_a_missing_shard_or_weight_names_the_directory(tmp_path):
    save_decoder(small(), tmp_path / "shards", max_shard_bytes=20_000)
    first = min((tmp_path / "shards").glob("*.safetensors"))
    first.unlink()
    with pytest.raises(ModelError, match=first.name):
        load_decoder(tmp_path / "shards")
    save_decoder(small(), tmp_path / "twice", max_shard_bytes=20_000)
    last = max((tmp_path / "twice").glob("*.safetensors"))
    copy = {"model.embed_tokens.weight": torch.zeros(50, small().config.hidden_size)}
    save_file({**load_file(last), **copy}, last)
    with pytest.raises(
        ModelError, match=rf"and {last.name} both hold 'model\.embed_tokens\.weight'"
    ):
        load_decoder(tmp_path / "twice")
    save_decoder(small(), tmp_path / "whole")
    rewrite(tmp_path / "whole", {"model.norm.weight": None})
    with pytest.raises(ModelError, match=r"whole: weights are missing: model\.norm\.weight"):
        load_decoder(tmp_path / "whole")


def test_a_file_that_can_not_be_written_is_named(tmp_path):
    """The library's own error has no path: a full disk was told without the file's name."""
    with pytest.raises(OSError, match=r"missing/a\.safetensors can't be written: .*No such file"):
        save_tensors({"a": torch.ones(2)}, tmp_path / "missing" / "a.safetensors")
