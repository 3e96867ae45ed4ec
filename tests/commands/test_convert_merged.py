"""`ratchet convert BASE DST --merge-lora ADAPTER`: a conversion like any other, of weights with an
adapter in them."""

import shutil

import pytest
import torch
from commands.convert.test_command import run as convert
from models.lora.test_decoder import LENGTHS, SHAPE, TOKENS, adapted, logits
from safetensors.torch import load_file, save_file

from ratchet.commands.convert.formats import FORMATS
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.errors import CheckpointError, ConfigError, ModelError
from ratchet.models.load import init_policy, load_policy
from ratchet.models.lora.files import WEIGHTS, load_adapter, save_adapter

pytestmark = pytest.mark.needs("peft")


@pytest.fixture
def files(tmp_path):
    policy = adapted(rslora=True)
    policy.save(tmp_path / "base")
    character_tokenizer("0123").save(tmp_path / "base")
    save_adapter(
        tmp_path / "adapter",
        policy.adapter,
        policy.resolve_adapter_layers(policy.adapter.lora),
        dict(policy.adapter_weights()),
    )
    return tmp_path


@torch.no_grad()
def check_merged(directory):
    expected = logits(adapted(rslora=True))
    assert len(expected) == sum(LENGTHS) == len(TOKENS)
    torch.testing.assert_close(
        logits(load_policy(directory)), expected, rtol=0, atol=1e-6 * float(expected.abs().max())
    )


def test_the_merged_model_computes_what_both_did_together(files):
    (files / "base" / "tokenizer.model").write_bytes(b"pieces of sentences")
    heard = convert(files / "base", files / "merged", "hf", adapter=files / "adapter")
    check_merged(files / "merged")
    assert "weights have the checksums of the source" in heard
    assert "logits of 16 tokens" in heard
    assert (
        load_tokenizer(files / "merged").fingerprint == load_tokenizer(files / "base").fingerprint
    )
    assert (files / "merged" / "tokenizer.model").read_bytes() == b"pieces of sentences"
    with pytest.raises(ConfigError, match="exists"):
        convert(files / "base", files / "merged", "hf", adapter=files / "adapter")


@pytest.mark.medium
@pytest.mark.needs("megatron")
@pytest.mark.parametrize(
    ("before", "after"), [("hf", "megatron"), ("hf", "dcp"), ("megatron", "dcp")]
)
def test_the_merge_is_of_any_form_into_any(files, before, after):
    convert(files / "base", files / "before", before, verify=False)
    heard = convert(files / "before", files / "merged", after, adapter=files / "adapter")
    assert "logits of 16 tokens" in heard
    convert(files / "merged", files / "back", "hf", verify=False)
    check_merged(files / "back")


@pytest.mark.medium
def test_weights_keep_their_dtype_and_are_added_up_in_float32(files):
    half = adapted(rslora=True).to(torch.bfloat16)
    half.save(files / "half")
    convert(files / "half", files / "merged", "dcp", adapter=files / "adapter")
    convert(files / "merged", files / "back", "hf")
    found = dict(load_policy(files / "back", dtype=torch.bfloat16).canonical_weights())
    stored, name = load_adapter(files / "adapter"), "model.layers.1.self_attn.k_proj"
    a, b = (stored.weights[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
    weight = dict(half.canonical_weights())[f"{name}.weight"]
    assert torch.equal(
        found[f"{name}.weight"],
        (weight.float() + stored.adapter.lora.scale * (b @ a)).to(torch.bfloat16),
    )


def test_what_was_interrupted_goes_on_with_the_same_adapter_alone(files, monkeypatch):
    form, write, made = type(FORMATS["dcp"]), type(FORMATS["dcp"]).write, []

    def write_two(self, path, entries):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(path)
        return write(self, path, entries)

    monkeypatch.setattr(form, "write", write_two)
    with pytest.raises(KeyboardInterrupt):
        convert(files / "base", files / "merged", "dcp", adapter=files / "adapter")
    monkeypatch.setattr(form, "write", write)
    stored = load_adapter(files / "adapter")
    save_adapter(
        files / "other",
        stored.adapter,
        stored.target_modules,
        {name: 2 * weight for name, weight in stored.weights.items()},
    )
    for other in (files / "other", None):
        with pytest.raises(
            CheckpointError, match="belongs to an interrupted conversion with another source"
        ):
            convert(files / "base", files / "merged", "dcp", adapter=other)
    heard = convert(files / "base", files / "merged", "dcp", adapter=files / "adapter")
    assert "continuing: 2 of" in heard
    assert "weights have the checksums of the source" in heard


def test_a_base_of_another_shape_is_refused(files):
    init_policy(DecoderConfig(29, 16, 2, 4, 2, 8, 32), seed=1).save(files / "wider")
    with pytest.raises(
        ModelError,
        match=r"down_proj.lora_A.weight' has shape \(2, 24\), but the base model needs \(2, 32\)",
    ):
        convert(files / "wider", files / "merged", "hf", adapter=files / "adapter")
    init_policy(DecoderConfig(29, 16, 1, 4, 2, 8, 24), seed=1).save(files / "lower")
    with pytest.raises(ModelError, match="the adapter belongs to another base model"):
        convert(files / "lower", files / "merged", "hf", adapter=files / "adapter")
    assert SHAPE.n_layers == 2
    assert not (files / "merged").exists()


def test_the_model_of_a_run_has_its_adapter_already(files):
    """An adapter of another run, trained on top of this one's model, is not in it yet."""
    (files / "config.yaml").touch()
    shutil.copytree(files / "base", files / "model")
    copied = shutil.copytree(files / "adapter", files / "copied")
    for source in (files, files / "model"):
        for adapter in (files / "adapter", copied):
            with pytest.raises(ConfigError, match=r"which is merged in .* already: name the base"):
                convert(source, files / "merged", "hf", adapter=adapter)
    other = files / "other"
    (files / "adapter").rename(other)
    shutil.copytree(other, files / "adapter")
    own_weights = files / "adapter" / WEIGHTS
    save_file({name: w + 1 for name, w in load_file(own_weights).items()}, own_weights)
    convert(files, files / "merged", "hf", adapter=other)
    check_merged(files / "merged")
