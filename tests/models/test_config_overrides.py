"""`model.overrides` for a model of a directory: what changes, and what is refused."""

import json
import shutil

import pytest
import torch
from pictures import model_directory

from ratchet.commands.convert.run import _find_start_config
from ratchet.config.model_shape.presets import get_preset
from ratchet.config.schema import ModelConfig
from ratchet.errors import ConfigError, ModelError
from ratchet.models import load
from ratchet.models.config_overrides import override_config
from ratchet.models.load import init_policy, load_policy
from ratchet.models.model_source import ModelSource

YARN = {"rope_type": "yarn", "factor": 4.0}
LONGER = {"max_position_embeddings": 512, "rope_parameters": YARN}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    init_policy(get_preset("tiny", 50, max_positions=128, init_std=0.2), 0).save(directory)
    return directory


@pytest.fixture(scope="module")
def gemma(reference, tmp_path_factory):
    directory = tmp_path_factory.mktemp("gemma")
    reference("gemma2", head_dim=8, sliding_window=4).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def layered(reference, tmp_path_factory):
    """Each kind of layer has its own rotary section."""
    directory = tmp_path_factory.mktemp("gemma3")
    kinds = ["sliding_attention", "full_attention"]
    reference("gemma3_text", head_dim=8, sliding_window=4, layer_types=kinds).save_pretrained(
        directory
    )
    return directory


def read(directory):
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize("backend", ["ratchet", "transformers"])
def test_yarn_computes_what_transformers_does(saved, ragged, tmp_path, backend):
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens, positions, lengths = ragged
    config = AutoConfig.from_pretrained(saved)
    config.max_position_embeddings = 512
    config.rope_parameters = {
        **YARN,
        "rope_theta": config.rope_parameters["rope_theta"],
        "original_max_position_embeddings": 128,
    }
    reference = AutoModelForCausalLM.from_pretrained(saved, config=config)
    policy = load_policy(saved, backend=backend, overrides=LONGER)
    plain = load_policy(saved, backend=backend)
    assert policy.max_positions == 512
    with torch.no_grad():
        expected = torch.cat(
            [reference(input_ids=row[None]).logits[0] for row in tokens.split(lengths)]
        )
        torch.testing.assert_close(
            policy.logits(policy.hidden(tokens, positions, lengths)),
            expected,
            rtol=1e-5,
            atol=1e-5,
        )
        unchanged = plain.logits(plain.hidden(tokens, positions, lengths))
    assert (unchanged - expected).abs().max() > 1e-3
    # The model that a run leaves has them in its own config.json.
    policy.save(tmp_path / "again")
    again = load_policy(tmp_path / "again", backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(
            again.logits(again.hidden(tokens, positions, lengths)), expected, rtol=1e-5, atol=1e-5
        )


def test_a_model_of_transformers_gets_them_too(gemma, ragged):
    plain, changed = (
        load_policy(gemma, overrides=overrides)
        for overrides in ({}, {"final_logit_softcapping": 0.5})
    )
    assert changed.text_config.final_logit_softcapping == 0.5
    with torch.no_grad():
        logits = changed.logits(changed.hidden(*ragged))
        assert logits.abs().max() <= 0.5 < plain.logits(plain.hidden(*ragged)).abs().max()


def test_each_kind_of_layer_keeps_its_own_rotary_section(layered):
    before = read(layered)["rope_parameters"]
    overrides = {"rope_scaling": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}
    after = load_policy(layered, overrides=overrides).text_config.rope_parameters
    assert after["sliding_attention"] == before["sliding_attention"]
    assert after["full_attention"]["rope_type"] == "linear"
    assert after["full_attention"]["rope_theta"] == before["full_attention"]["rope_theta"] != 1e4


@pytest.mark.medium
def test_a_scaled_rotary_section_divides_dimensions_as_before():
    overrides = {"text_config": {"rope_parameters": YARN}}
    policy = load_policy(model_directory("qwen2_5_vl"), overrides=overrides)
    rope = policy.text_config.rope_parameters
    assert (rope["rope_type"], rope["mrope_section"]) == ("yarn", [2, 1, 1])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_theta": 5.0}, "Set model.overrides.rope_parameters.full_attention.rope_theta"),
        ({"rope_parameters": YARN}, "must have a section for a kind of layer (full_attention, "),
        ({"rope_parameters": None}, "must have a section for a kind of layer (full_attention, "),
        ({"rope_parameters": {"full": YARN}}, "must have a section for a kind of layer (full_"),
        ({"rope_parameters": {"full_attention": 4}}, "rope_parameters.full_attention=4 must be a"),
    ],
)
def test_a_rotary_section_that_no_layer_reads_is_refused(layered, overrides, message):
    with pytest.raises(ModelError) as caught:
        load_policy(layered, overrides=overrides)
    assert message in str(caught.value)


def test_transformers_reads_fields_that_the_decoder_does_not(saved):
    policy = load_policy(saved, backend="transformers", overrides={"max_window_layers": 1})
    assert policy.text_config.max_window_layers == 1
    assert policy.model.config._name_or_path == str(saved)


@pytest.mark.parametrize("backend", ["ratchet", "transformers"])
def test_the_end_of_sequences_is_refused_where_another_file_decides(saved, tmp_path, backend):
    overrides = {"eos_token_id": 3}
    directory = shutil.copytree(saved, tmp_path / "model")
    assert load_policy(directory, backend=backend, overrides=overrides).eos_ids == (3,)
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert load_policy(directory, backend=backend).eos_ids == (7, 8)
    with pytest.raises(ModelError, match=r"no effect, because .*generation_config.json says .*7"):
        load_policy(directory, backend=backend, overrides=overrides)


def test_ranks_read_the_same_shape(saved):
    shape = ModelSource(path=str(saved), overrides=LONGER).read_decoder_shape()
    assert shape.max_positions == 512
    assert shape.rope["original_max_position_embeddings"] == 128
    assert ModelSource(path=str(saved), backend="transformers").read_decoder_shape() is None


def test_an_override_may_take_the_model_to_transformers(saved):
    overrides = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    assert ModelSource(path=str(saved), overrides=overrides).read_decoder_shape() is None


ROPE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        ({"rope_theta": 1e6}, YARN, {"rope_parameters": {**YARN}}),
        ({"rope_scaling": ROPE}, {**YARN, "factor": 2.0}, {"rope_scaling": {"factor": 2.0}}),
        ({"rope_parameters": ROPE}, {"type": "yarn", "factor": 2.0}, {"rope_parameters": {}}),
        ({"rope_parameters": {**ROPE, **YARN}}, None, {"rope_parameters": ROPE}),
        ({"rope_parameters": ROPE}, {"rope_theta": 5.0}, {"rope_parameters": {"rope_theta": 5.0}}),
        ({"original_max_position_embeddings": 64}, YARN, {"original_max_position_embeddings": 64}),
    ],
)
def test_a_rotary_section_keeps_what_the_weights_were_trained_with(
    saved, config, overrides, expected
):
    before = {key: value for key, value in read(saved).items() if not key.startswith("rope")}
    before |= {"rope_theta": 1e4, **config}
    changed = override_config(before, {"rope_scaling": overrides}, saved)
    key = next(iter(config)) if next(iter(config)) in ("rope_scaling", "rope_parameters") else None
    section = changed[key or "rope_parameters"]
    assert ("rope_scaling" in changed) + ("rope_parameters" in changed) == 1
    for name, value in expected.items():
        if isinstance(value, dict):
            assert value.items() <= section.items(), name
        else:
            assert changed[name] == value
    if section["rope_type"] == "yarn":
        original = before.get("original_max_position_embeddings", 128)
        assert section["original_max_position_embeddings"] == original


REFUSED = [
    ({"max_position_embedding": 9}, "no field 'max_position_embedding'; did you mean 'max_posi"),
    ({"hidden_size": 128}, "hidden_size changes the names or shapes of the saved weights"),
    ({"num_hidden_layers": 1, "rms_norm_eps": 1e-5}, "num_hidden_layers changes the names or"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings changes the names or shapes"),
    (
        {"model_type": "llama"},
        "model_type can't be changed, because it follows from the saved weights",
    ),
    ({"dtype": "bfloat16"}, "dtype can't be changed, because it follows from the precision of"),
    ({"attention_dropout": 0.1}, "attention_dropout has no effect"),
    ({"max_window_layers": 1}, "max_window_layers=1 changes nothing in the built-in decoder"),
    ({"rope_theta": "much"}, "rope_theta='much', must be a number: correct model.overrides"),
    ({"rope_scaling": {"rope_type": "yarm"}}, "no such scaling; did you mean 'yarn'?"),
    ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type=['yarn']: there is no such scaling"),
    ({"rope_scaling": YARN, "rope_parameters": YARN}, "names of one section: remove one"),
    ({"rms_norm_eps": None}, "rms_norm_eps=null, must be a number: correct model.overrides"),
    ({"rope_scaling": 4}, "rope_parameters=4 must be a section, such as {rope_type: yarn}"),
    ({"num_attention_heads": 5}, "makes a configuration that no model has: "),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_can_not_be_overridden_is_named(saved, overrides, message):
    with pytest.raises(ModelError) as caught:
        load_policy(saved, overrides=overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"intermediate_size": 64}, "intermediate_size changes the names or shapes"),
        ({"num_hidden_layers": 10**9}, "says num_hidden_layers=1e+09, which no model has"),
        ({"final_logit_softcaping": 1.0}, "did you mean 'final_logit_softcapping'?"),
        ({"sliding_window": "wide"}, "model.overrides makes a configuration that no model has: "),
    ],
)
def test_nor_of_a_model_of_transformers(gemma, overrides, message):
    with pytest.raises(ModelError) as caught:
        load_policy(gemma, overrides=overrides)
    assert message in str(caught.value)


def test_a_conversion_of_a_run_writes_the_changed_file(saved, tmp_path):
    start = ModelConfig(path=str(saved), overrides=LONGER)
    assert _find_start_config(ModelConfig(path=str(saved)), tmp_path / "same") == str(saved)
    assert _find_start_config(start, tmp_path / "export") == str(tmp_path / "export")
    assert read(tmp_path / "export") == override_config(read(saved), LONGER, saved)


@pytest.mark.parametrize("name", ["mine", "config.json"])
def test_a_conversion_leaves_what_it_did_not_write(saved, tmp_path, name):
    start = ModelConfig(path=str(saved), overrides=LONGER)
    export = tmp_path / ".made.source"
    export.mkdir()
    (export / name).write_text("mine")
    with pytest.raises(ConfigError, match=r"\.made\.source .* holds other files: move them away"):
        _find_start_config(start, export)
    assert [path.name for path in export.iterdir()] == [name]
    assert (export / name).read_text() == "mine"


def test_a_changed_file_is_not_mixed_with_another_export(saved, tmp_path):
    start = ModelConfig(path=str(saved), overrides=LONGER)
    for name, text in ((".checkpoint", "another checkpoint"), ("model.safetensors", "its weights")):
        (tmp_path / name).write_text(text)
    _find_start_config(start, tmp_path)
    assert (tmp_path / ".checkpoint").read_text() == ""
    assert not (tmp_path / "model.safetensors").exists()


def test_a_conversion_finds_the_start_model_of_the_hub(saved, tmp_path, monkeypatch):
    downloads = []
    monkeypatch.setattr(load, "_download", lambda *args: downloads.append(args) or saved)
    start = ModelConfig(path="org/name", revision="v2")
    assert _find_start_config(start, tmp_path) == str(saved)
    assert downloads == [("org/name", "v2", False)]
