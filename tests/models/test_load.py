import json
import subprocess
import sys

import pytest
import torch

from ratchet.config.model_shape.presets import get_preset
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.errors import ModelError
from ratchet.models import load
from ratchet.models.load import find_model, init_policy, load_policy
from ratchet.models.policy import DecoderPolicy


@pytest.fixture
def saved(tmp_path):
    init_policy(get_preset("tiny", 50), 0).save(tmp_path / "model")
    return tmp_path / "model"


def test_auto_takes_our_decoder_where_it_can(saved):
    assert isinstance(load_policy(saved), DecoderPolicy)
    assert isinstance(load_policy(str(saved), backend="ratchet"), DecoderPolicy)


def test_auto_takes_transformers_elsewhere(reference, tmp_path):
    from ratchet.models.transformers.policy import TransformersPolicy

    shape = {
        "vocab_size": 50,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    reference("gpt2", shape=shape).save_pretrained(tmp_path)
    assert isinstance(load_policy(tmp_path), TransformersPolicy)
    with pytest.raises(ModelError, match="model_type 'gpt2'"):
        load_policy(tmp_path, backend="ratchet")


def test_both_backends_agree(saved, ragged):
    policies = [load_policy(saved, backend=backend) for backend in ("ratchet", "transformers")]
    with torch.no_grad():
        ours, theirs = (policy.logits(policy.hidden(*ragged)) for policy in policies)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    names = [[name for name, _ in policy.canonical_weights()] for policy in policies]
    assert sorted(names[0]) == sorted(names[1])


def test_dtype(saved):
    assert next(load_policy(saved, dtype=torch.bfloat16).parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.jinja"])
def test_a_link_to_a_missing_file_is_no_absent_file(name, saved):
    """As after `cp -r` of a model in the cache of the Hub, whose files are links."""
    (saved / name).unlink(missing_ok=True)
    (saved / name).symlink_to("../../blobs/ab12")
    for read in (find_model, load_tokenizer):
        with pytest.raises(ModelError, match=rf"{name} is a link to a file that doesn't exist"):
            read(saved)


def no_download(*_, **__):
    raise AssertionError("tried to download")


@pytest.mark.parametrize(
    "name",
    [
        "./absent",
        "/absent/model",
        "../absent",
        "~/absent",
        "~nobody-here/absent",
        "a/b/c",
        "here/absent",
        "bad name",
    ],
)
@pytest.mark.fault("C8")
def test_what_looks_like_a_path_is_never_downloaded(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.setattr("huggingface_hub.snapshot_download", no_download)
    with pytest.raises(ModelError, match="no model directory"):
        load_policy(name)


def test_how_far_a_path_exists_is_said(saved):
    with pytest.raises(ModelError, match=f"as far as '{saved}'"):
        load_policy(saved / "checkpoints" / "step-5")
    with pytest.raises(ModelError, match=f"'{saved.parent}', which has '{saved.name}'"):
        load_policy(saved.parent / f"{saved.name}s")


def test_a_file_is_no_model(saved):
    with pytest.raises(ModelError, match="is a file"):
        load_policy(saved / "config.json")


def test_a_hub_id_is_downloaded(saved, monkeypatch):
    asked = []

    def download(name, *, revision, allow_patterns):
        asked.append((name, revision, "*.py" in allow_patterns, "*.bin" in allow_patterns))
        return str(saved)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_model("owner/model", revision="v2") == saved
    assert find_model("gpt2", with_code=True) == saved
    assert asked == [("owner/model", "v2", False, False), ("gpt2", None, True, False)]


def test_a_hub_id_that_is_nowhere_says_so(monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def absent(*_, **__):
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", absent)
    with pytest.raises(ModelError, match=r"not a local directory, and .* \(offline\)"):
        load_policy("owner/model", revision="v2")


def test_init_is_the_same_for_one_seed():
    one, two = (dict(init_policy(get_preset("tiny", 50), 1).named_parameters()) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.medium
def test_our_decoder_needs_no_transformers(saved):
    code = f"""
import sys
from pathlib import Path
from ratchet.models.load import load_policy
load_policy(Path({str(saved)!r})).save(Path({str(saved)!r}))
raise SystemExit("transformers" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_shapes_and_presets_need_no_torch():
    code = (
        "import sys, ratchet.config.model_shape.presets, ratchet.utils.atomic_files; raise "
        "SystemExit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.fault("S8")
def test_remote_code_is_off_unless_asked_for(saved):
    config = json.loads((saved / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "code.Mine", "AutoModelForCausalLM": "code.Mine"},
    }
    (saved / "config.json").write_text(json.dumps(config))
    (saved / "code.py").write_text("raise SystemExit('ran')\n")
    with pytest.raises(ModelError, match="transformers can't load"):
        load_policy(saved)
    assert load.HUB_FILES.count("*.py") == 0
