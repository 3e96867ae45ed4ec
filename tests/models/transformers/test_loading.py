"""Model directories of others: sizes that none has, files that are none, and models beyond this
machine's memory."""

import json

import hostile
import pytest
import torch

from ratchet.config.model_shape.config_json import SIZE_RANGES
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.model_shape.presets import get_preset
from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.errors import ModelError
from ratchet.models import memory
from ratchet.models.load import init_policy, load_policy
from ratchet.models.transformers.loading import require_plausible, translate_errors


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    tokenizer = character_tokenizer("0123456789")
    folder = tmp_path_factory.mktemp("model") / "base"
    init_policy(
        get_preset("tiny", vocab_size=tokenizer.vocab_size, n_layers=1, hidden_size=32), seed=0
    ).save(folder)
    tokenizer.save(folder)
    return folder


@pytest.mark.fault("M13")
@pytest.mark.parametrize(
    "name", [name for name in hostile.MODELS if name.startswith(("config", "weights", "index"))]
)
def test_a_hostile_directory_is_no_model(name, base, tmp_path):
    with pytest.raises(ModelError) as error:
        load_policy(hostile.write_model(tmp_path / "model", base, name), backend="ratchet")
    assert len(str(error.value)) < 1000


@pytest.mark.fault("M13")
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in hostile.MODELS
        if name.startswith(("tokenizer", "generation", "config.json: eos"))
    ],
)
def test_a_hostile_directory_has_no_tokenizer(name, base, tmp_path):
    with pytest.raises(ModelError) as error:
        load_tokenizer(hostile.write_model(tmp_path / "model", base, name))
    assert len(str(error.value)) < 1000


def test_a_template_in_the_configuration_must_be_text(base, tmp_path):
    folder = hostile.write_model(tmp_path / "model", base, "generation_config.json: ids")
    (folder / "generation_config.json").unlink()
    (folder / "chat_template.jinja").unlink()
    for wrong in ([1], 7, [{"name": "default", "template": 5}], [{"name": "default"}]):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": wrong}))
        with pytest.raises(
            ModelError, match=r"chat_template of tokenizer_config\.json must be a text"
        ):
            load_tokenizer(folder)


@pytest.mark.fault("M13")
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_model_beyond_memory_is_refused_by_arithmetic(device, monkeypatch):
    shape = get_preset("tiny", vocab_size=2**20)
    monkeypatch.setattr(memory, "memory_bytes", lambda device: 256 << 20)
    with pytest.raises(
        ModelError, match=r"weights take 0\.3 GiB in float32, and cpu has 0\.2 GiB of memory"
    ):
        init_policy(shape, seed=0, device=device)
    monkeypatch.undo()
    assert memory.memory_bytes(torch.device("meta")) is None
    assert memory.memory_bytes(torch.device("cpu")) > 256 << 20


def test_the_largest_sizes_do_not_reach_an_allocation():
    largest = {name: most for name, (_, most) in SIZE_RANGES.items() if "expert" not in name}
    shape = DecoderConfig(**largest)
    with pytest.raises(ModelError, match="weights take"):
        init_policy(shape, seed=0)


@pytest.mark.fault("M13")
def test_sizes_of_other_families_are_bounded(tmp_path):
    for wrong in (
        {"n_layer": 10**9},
        {"text_config": {"hidden_size": 2**40}},
        {"vision_config": {"depth": -1}},
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **wrong}))
        with pytest.raises(ModelError, match="which no model has"):
            require_plausible(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 12, "initializer_range": 0.02})
    )
    require_plausible(tmp_path)
    hostile.place(tmp_path / "vocab.txt", hostile.PIPE)
    with pytest.raises(ModelError, match="it is a pipe"):
        require_plausible(tmp_path)


def test_any_error_of_the_library_is_a_model_error(tmp_path):
    with (
        pytest.raises(ModelError, match=r"transformers can't load a model from .*: first"),
        translate_errors(tmp_path, "a model"),
    ):
        raise AssertionError("\nfirst\nsecond")
    with (
        pytest.raises(ModelError, match="ZeroDivisionError"),
        translate_errors(tmp_path, "a model"),
    ):
        raise ZeroDivisionError


@pytest.mark.fault("M14")
@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_no_file_has_are_refused(tied, tmp_path):
    from safetensors.torch import load_file, save_file
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path / "model"
    GPT2LMHeadModel(
        GPT2Config(
            vocab_size=8, n_positions=16, n_embd=8, n_layer=2, n_head=2, tie_word_embeddings=tied
        )
    ).save_pretrained(folder)
    load_policy(folder, backend="transformers")
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if ".h.1." in name]:
        del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks the weights transformer\.h\.1\..* and \d+ more"):
        load_policy(folder, backend="transformers")
