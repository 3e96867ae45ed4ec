"""Models of Megatron-core itself that were filled by the maps, against transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from learners.ranks import run_ranks
from models.convert.cases import MODELS, MTP
from models.convert.ranks import sample
from packaging.version import Version
from safetensors.torch import load_file
from support.transformers_version import TRANSFORMERS

from ratchet.commands.convert.command import convert
from ratchet.commands.convert.megatron_format import MegatronFiles
from ratchet.errors import ModelError
from ratchet.models.convert.dimensions import Dimensions
from ratchet.models.weights.hf_weights import read_config


def _by_transformers(directory):
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return (
            AutoModelForCausalLM.from_pretrained(directory).eval()(sample()[None]).logits[0].numpy()
        )


@pytest.fixture(scope="module")
def by_megatron(written):
    """All in one process, which has to import Megatron."""
    return run_ranks(
        1, "models.convert.ranks:logits_alone", [str(written(name)) for name in MODELS]
    )[0]


@pytest.mark.medium
@pytest.mark.needs("megatron")
@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_transformers(written, by_megatron, model):
    if model == "gpt_oss" and Version("5.18") > TRANSFORMERS:
        pytest.skip("before 5.18 transformers takes 7 for swiglu_limit, whatever it is")
    found, expected = by_megatron[str(written(model))], _by_transformers(written(model))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.slow
@pytest.mark.needs("megatron")
def test_mtp_layers_of_megatron_predict_what_those_of_transformers_do(written):
    """Also whether both multiply the embedding and the hidden state by the same halves."""
    from models.convert.mtp_reference import compute_mtp_states, load_mtp
    from transformers import AutoModelForCausalLM

    directories = {name: str(written(name)) for name in MTP}
    (found,) = run_ranks(1, "models.convert.ranks:mtp_logits_alone", directories)
    for name, directory in directories.items():
        mtp = load_mtp(directory)
        model = AutoModelForCausalLM.from_pretrained(directory).eval()
        with torch.no_grad():
            hidden_Td = model.model(sample()[None]).last_hidden_state[0]
            states = compute_mtp_states(mtp, model.model.embed_tokens, hidden_Td, sample())
            expected = [model.lm_head(state).numpy() for state in states]
        assert len(found[name]) == len(expected) == MTP[name]
        for mine, theirs in zip(found[name], expected, strict=True):
            atol = 1e-5 * np.abs(theirs).max()
            np.testing.assert_allclose(mine[: len(theirs)], theirs, atol=atol, rtol=0)


def test_latent_attention_is_mapped_and_our_models_refuse_it(written):
    """The decoder whose shape the learner's Megatron models are built from has no such
    attention."""
    Dimensions.from_hf(json.loads((written("deepseek_v3") / "config.json").read_text()))
    with pytest.raises(ModelError, match="can't represent this model: model_type 'deepseek_v3'"):
        read_config(written("deepseek_v3"))


SPREAD = {
    ("qwen3", "TP2 x PP2"): ({"tensor": 2, "pipeline": 2}, 4),
    ("qwen2", "TP2 with sequence parallelism"): ({"tensor": 2, "sequence": True}, 2),
    ("llama", "PP2"): ({"pipeline": 2}, 2),
    ("qwen3_moe-dense-first", "EP2"): ({"experts": 2}, 2),
}


@pytest.mark.slow
@pytest.mark.needs("megatron")
@pytest.mark.parametrize(("model", "division"), SPREAD)
def test_ranks_are_filled_compute_and_give_back_what_they_were_given(
    written, tmp_path, model, division
):
    """Megatron's own checkpoints are read, and read ours, at another division than they were
    written."""
    sizes, world = SPREAD[model, division]
    convert(
        str(written(model)),
        tmp_path / "ours",
        to="megatron",
        config=None,
        verify=False,
        say=lambda line: None,
    )
    theirs = tmp_path / "theirs"
    results = run_ranks(
        world,
        "models.convert.ranks:round_trip",
        str(written(model)),
        str(tmp_path / "ours"),
        str(theirs),
        sizes,
    )
    rows = [logits for logits, _, _ in results if logits is not None][: sizes.get("tensor", 1)]
    expected = _by_transformers(written(model))
    np.testing.assert_allclose(
        np.concatenate(rows, axis=1), expected, atol=1e-5 * np.abs(expected).max(), rtol=0
    )
    assert all(same for _, same, _ in results)
    hf = load_file(written(model) / "model.safetensors")
    seen = {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in hf.items()}
    for name, shape, offsets, block in (given for _, _, own in results for given in own):
        at = tuple(slice(a, a + n) for a, n in zip(offsets, block.shape, strict=True))
        assert torch.equal(hf[name][at], torch.from_numpy(block))
        assert tuple(hf[name].shape) == shape
        seen[name][at] = True
    assert all(mask.all() for mask in seen.values())
    config = json.loads((written(model) / "config.json").read_text())
    files = MegatronFiles(theirs, Dimensions.from_hf(config))
    for name, tensor in hf.items():
        assert torch.equal(files.block(name, (0,) * tensor.dim(), tensor.shape), tensor)
