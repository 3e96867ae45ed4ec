"""`ratchet push`, against a hub on loopback."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands.hub import Hub, run_hub
from huggingface_hub import ModelCard, constants
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from ratchet.cli.main import app
from ratchet.commands.push.command import push_run
from ratchet.errors import ConfigError, RatchetError, RunDirectoryError, RunNotFound
from ratchet.training.start import start_run

RECIPE = """
name: my+run
threads: 1
model: {preset: tiny, overrides: {hidden_size: 32, n_layers: 1}}
tokenizer: {kind: bytes}
environment: {kind: dataset, train: PRIVATE/rows.jsonl, test_share: 0.25}
evaluation: {every: 2}
algorithm: {kind: sft}
eval_rewards: [{kind: exact_match}]
steps: 4
batch_size: 2
sampling: {max_new_tokens: 4}
checkpoint: {every: 2, keep: 9}
logging: {progress: "off", tensorboard: false}
"""
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("private-place")
    rows = [{"prompt": f"secret {i}", "answer": "x"} for i in range(8)]
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = place / "recipe.yaml"
    recipe.write_text(RECIPE.replace("PRIVATE", str(place)))
    assert start_run(recipe, [], place / "run", command="train") == 0
    return place / "run"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    # The other protocol of uploads needs a server of content-defined chunks.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")
    monkeypatch.setenv("HF_TOKEN", "hf_ada")
    with run_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        yield hub


def push(run: Path | str, to: str | None = None, **options: bool) -> list[str]:
    lines: list[str] = []
    push_run(str(run), to, say=lines.append, **options)
    return lines


@pytest.mark.medium
def test_the_card_has_the_figures_of_the_run(run: Path, hub: Hub) -> None:
    assert push(run)[0] == f"{hub.address}/ada/my-run"
    files = hub.repositories["ada/my-run"]
    assert set(files) == {"README.md", *(path.name for path in (run / "model").iterdir())}
    assert not hub.private
    card = ModelCard(files["README.md"].decode())
    assert card.data.tags == ["ratchet", "sft"]
    (result,) = card.data.eval_results or []
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert (result.dataset_name, result.metric_type) == ("dataset", "accuracy")
    assert result.metric_value == round(row["eval/accuracy"], 6)
    assert f"| 4 | {row['eval/accuracy']:.4g} | {row['eval/loss']:.4g} |" in card.text
    for named in ("| rows.jsonl |", "batch_size: 2", "| torch |", "## Versions"):
        assert named in card.text
    uploaded = b"".join(files.values())
    assert b"secret 0" not in uploaded
    assert str(run.parent).encode() not in uploaded


@pytest.mark.slow
def test_the_commands_of_the_page_push(run: Path, hub: Hub, repository: Path) -> None:
    page = (repository / "docs" / "integrations" / "hub.md").read_text(encoding="utf-8")
    lines = [line for line in page.split("```")[1].splitlines() if line.startswith("ratchet")]
    for line in lines:
        words = shlex.split(line.replace("my-lab", "ada"), comments=True)[1:]
        words = [word.replace("runs/my_run", str(run)).replace("@100", "@2") for word in words]
        done = CliRunner().invoke(app, words)
        # The run has no adapter, which the command for one says.
        is_refused = isinstance(done.exception, ConfigError) and "--adapter" in words
        assert is_refused or done.exit_code == 0, done.output
    assert len(lines) == 4
    assert set(hub.repositories) == {"ada/my-run", "ada/my-model"}


@pytest.mark.medium
def test_a_later_push_replaces_weights_and_keeps_other_files(run: Path, hub: Hub) -> None:
    sharded = {"model-00001-of-00002.safetensors": b"", "model.safetensors.index.json": b"{}"}
    hub.repositories["ada/other"] = {"LICENSE": b"mine", **sharded}
    push(f"{run}@2", "other", private=True)
    files = hub.repositories["ada/other"]
    assert files["LICENSE"] == b"mine"
    assert WEIGHTS in files
    assert not set(sharded) & set(files)
    assert not any(name.startswith(".") for name in files)
    assert files[WEIGHTS] != (run / "model" / WEIGHTS).read_bytes()
    card = files["README.md"].decode()
    assert "after step 2" in card
    assert "\n| 4 |" not in card
    push(run, "ada/new", private=True)
    assert hub.private == {"ada/new"}


@pytest.mark.medium
def test_an_adapter_needs_its_base_model_at_the_hub(run: Path, hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no adapter: leave out --adapter"):
        push(run, adapter=True)
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "adapter").mkdir()
    config = copy / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": str(run / "model")}))
    (copy / "adapter" / "adapter_model.safetensors").write_bytes(b"weights")
    with pytest.raises(ConfigError, match=r"which http.* does not have: leave out --adapter"):
        push(copy, adapter=True)
    assert not hub.repositories
    hub.repositories["org/base"] = {}
    config.write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    push(copy, adapter=True)
    files = hub.repositories["ada/my-run"]
    assert set(files) == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    card = ModelCard(files["README.md"].decode())
    assert (card.data.base_model, card.data.library_name) == ("org/base", "peft")
    with pytest.raises(ConfigError, match="step 2 is a checkpoint"):
        push(f"{copy}@2", adapter=True)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("to", "token", "message"),
    [
        ("m", "", "there is no token for http://.*: set HF_TOKEN"),
        ("carl/m", "hf_ada", "may not write to carl/m at .*set --to"),
        ("carl/taken", "hf_ada", "may not write to carl/taken"),
        ("a b", "hf_ada", "--to=ada/a b is not a name of a repository"),
    ],
)
def test_what_the_hub_refuses(
    run: Path, hub: Hub, to: str, token: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    hub.repositories["carl/taken"] = {"model.safetensors": b"theirs"}
    with pytest.raises(ConfigError, match=message):
        push(run, to)
    assert hub.repositories == {"carl/taken": {"model.safetensors": b"theirs"}}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("part", "status", "error", "message"),
    [
        ("whoami", 401, ConfigError, "does not know the token"),
        ("/commit/", 500, RatchetError, "failed for ada/my-run: out of order"),
        ("PUT /objects/", 400, RatchetError, "could not be used .*repeat the command"),
    ],
)
def test_a_hub_that_fails_is_named(
    run: Path, hub: Hub, part: str, status: int, error: type[RatchetError], message: str
) -> None:
    hub.failures[part] = status
    with pytest.raises(error, match=message):
        push(run)
    assert not any(hub.repositories.values())


@pytest.mark.medium
def test_no_run_and_no_checkpoint_are_refused(run: Path, hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="holds no run"):
        push(tmp_path / "typo")
    with pytest.raises(RunNotFound, match="hf upload"):
        push(run / "model")
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("model", "checkpoints"))
    with pytest.raises(RunDirectoryError, match="has no finished model yet"):
        push(tmp_path / "run")
    with pytest.raises(RatchetError, match="no checkpoint of step 3"):
        push(f"{run}@3")
    assert not hub.requests


@pytest.mark.slow
def test_a_model_of_the_command_loads_from_the_hub(run: Path, hub: Hub, tmp_path: Path) -> None:
    variables = {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(tmp_path),
        "HF_TOKEN": "hf_eve",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }

    def run_python(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = run_python("-m", "ratchet", "push", str(run), "--to", "eve/m")
    assert said.startswith(f"{hub.address}/eve/m\n  README.md\n")
    assert any("/info/lfs/" in request for request in hub.requests), "no large file"
    download = "import huggingface_hub; print(huggingface_hub.snapshot_download('eve/m'))"
    copy = run_python("-c", download).strip()
    ids = torch.tensor([AutoTokenizer.from_pretrained(copy).encode("secret")])
    logits, expected = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
        for path in (copy, run / "model")
    )
    assert torch.equal(logits, expected)
