"""Checkpoints, models, tokenizers, data and recipes whose authors want to run code here: they get
an error, or are text."""

import asyncio
import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest

from ratchet.config.loader import load_config
from ratchet.config.model_shape.presets import get_preset
from ratchet.config.schema import LoggingConfig
from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.data.jsonl import read_jsonl
from ratchet.environments.datasets.gsm8k import GSM8K, GSM8KConfig
from ratchet.errors import CheckpointError, ConfigError, DataError, ModelError
from ratchet.models.load import init_policy, load_policy
from ratchet.rewards.answers.numeric import read_number
from ratchet.runs.checkpoints import CheckpointStore
from ratchet.types import Message


class Touch:
    """What unpickles as a call of the shell."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def canary(tmp_path):
    """A path that no test may leave a file at; the payloads below do where somebody runs them."""
    path = tmp_path / "canary"
    pickle.loads(pickle.dumps(Touch(path)))
    assert path.exists()
    path.unlink()
    yield path
    assert not path.exists(), "the payload ran"


def code(canary: Path) -> str:
    return f"open({str(canary)!r}, 'w').close()\n"


# --- checkpoints


def sealed(step: Path) -> None:
    """A manifest that fits what lies there now, as whoever planted it would write."""
    manifest = json.loads((step / "manifest.json").read_text())
    names = [
        path for path in sorted(step.rglob("*")) if path.is_file() and path.name != "manifest.json"
    ]
    manifest["body"]["files"] = {
        path.relative_to(step).as_posix(): {
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in names
    }
    canonical = json.dumps(manifest["body"], sort_keys=True, separators=(",", ":"))
    manifest["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    (step / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.fault("S1")
@pytest.mark.parametrize(
    "name", ["state.safetensors", "state.json", "state.pt", "data.pkl", "state"]
)
def test_a_pickle_in_a_checkpoint_under_any_name(name, canary, tmp_path):
    from ratchet.checkpoint.serialization import load_state, save_state

    store = CheckpointStore(tmp_path / "checkpoints")
    step = store.save(1, lambda folder: save_state(folder / "policy", {"steps": 1}), {})
    (step / "policy" / name).write_bytes(pickle.dumps(Touch(canary)))
    sealed(step)
    with pytest.raises(CheckpointError):
        load_state(store.load(1).path / "policy")


# --- models and tokenizers


@pytest.fixture
def model(tmp_path):
    tokenizer = character_tokenizer("0123456789")
    folder = tmp_path / "model"
    init_policy(
        get_preset("tiny", vocab_size=tokenizer.vocab_size, n_layers=1, hidden_size=32), seed=0
    ).save(folder)
    tokenizer.save(folder)
    return folder


@pytest.mark.fault("S1")
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pickle_in_place_of_weights(name, canary, model):
    (model / "model.safetensors").unlink()
    (model / name).write_bytes(pickle.dumps(Touch(canary)))
    for backend in ("ratchet", "transformers"):
        with pytest.raises(ModelError):
            load_policy(model, backend=backend)


@pytest.mark.fault("S8")
def test_a_tokenizer_that_brings_code(canary, model):
    (model / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "evil.py").write_text(code(canary))
    with pytest.raises(ModelError):
        load_tokenizer(model)


@pytest.mark.fault("S8")
@pytest.mark.parametrize(
    "expression",
    [
        "cycler.__init__.__globals__.os.popen('touch {canary}').read()",
        "''.__class__.__mro__[1].__subclasses__()",
        "messages.__class__.__init__.__globals__['__builtins__']['open']('{canary}', 'w')",
        "lipsum.__globals__['os'].system('touch {canary}')",
    ],
)
def test_a_chat_template_that_reaches_for_the_shell(expression, canary, model):
    template = (
        "{{ "
        + expression.format(canary=canary)
        + " }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    (model / "chat_template.jinja").write_text(template)
    with pytest.raises(DataError):
        Renderer(load_tokenizer(model)).prompt([Message("user", "1")])


# --- data


@pytest.mark.fault("D4", "S11")
def test_data_that_are_a_pickle(canary, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(pickle.dumps(Touch(canary)))
    with pytest.raises(DataError):
        list(read_jsonl(tmp_path / "rows.jsonl"))


@pytest.mark.fault("S11")
@pytest.mark.parametrize(
    "payload",
    [
        "__import__('os').system('touch {canary}')",
        "{{{{ cycler.__init__.__globals__.os.system('touch {canary}') }}}}",
        "'''\n{code}'''",
        "!!python/object/apply:os.system ['touch {canary}']",
        "\\x1b]0;x\x07$(touch {canary})`touch {canary}`",
    ],
)
def test_rows_and_answers_are_text_and_nothing_else(payload, canary, tmp_path):
    text = payload.format(canary=canary, code=code(canary))
    row = {"question": text, "answer": f"{text}\n#### 7"}
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({**row, "question": f"{n} {text}"}) for n in range(30))
    )
    environment = GSM8K(GSM8KConfig(train=tmp_path / "rows.jsonl"))
    task = next(iter(environment.tasks("train", seed=0)))
    assert text in asyncio.run(environment.reset(task))[-1].text
    tokenizer = character_tokenizer("".join(sorted(set(text + "0123456789 "))))
    assert text in tokenizer.decode(Renderer(tokenizer, "plain").prompt([Message("user", text)]))
    read_number(text)  # whatever number it finds, it only reads


# --- recipes


@pytest.mark.fault("S8")
@pytest.mark.parametrize(
    "line",
    [
        "name: !!python/object/apply:os.system ['touch {canary}']",
        "seed: !!python/object/new:os.system ['touch {canary}']",
        "model: {{preset: !!python/name:os.system }}",
        "logging: !!python/object:ratchet.config.schema.LoggingConfig {{tensorboard: false}}",
    ],
)
def test_a_recipe_that_makes_objects(line, canary, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"{line.format(canary=canary)}\nalgorithm: {{kind: sft}}\nenvironment: {{kind: sorting}}\n"
    )
    try:
        config = load_config(path)
    except ConfigError:
        return
    # the tag is passed over: what it holds is read as if it were not there
    assert type(config.logging) is LoggingConfig


@pytest.mark.parametrize(
    "override", ["seed=__import__('os').system('touch {canary}')", "seed=!!python/name:os.system"]
)
def test_an_override_that_is_an_expression(override, canary, tmp_path):
    shutil.copy(
        Path(__file__).parent.parent / "ratchet" / "recipes" / "quickstart.yaml",
        tmp_path / "r.yaml",
    )
    with pytest.raises(ConfigError):
        load_config(tmp_path / "r.yaml", [override.format(canary=canary)])
