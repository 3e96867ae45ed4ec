"""`ratchet convert`: every direction, interrupted and resumed, damaged and found out."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from learners.megatron_cases import SEED, SHAPES, alone
from learners.ranks import run_ranks
from models.conftest import reference as reference
from models.convert.cases import BASE, MODELS

# the fixture: models as transformers saves them
from models.convert.conftest import written as written
from safetensors.torch import load_file, save_file

from ratchet.checkpoint.sharded import save_blocks
from ratchet.cli.main import main
from ratchet.commands.convert import command as tool
from ratchet.commands.convert import run as convert_run
from ratchet.commands.convert.command import convert
from ratchet.commands.convert.formats import FORMATS, detect_format
from ratchet.commands.convert.run import convert_paths_or_addresses
from ratchet.config.model_shape.decoder_config import FAMILIES
from ratchet.errors import CheckpointError, ConfigError, ModelError
from ratchet.models.load import init_policy
from ratchet.protocols import Shard
from ratchet.utils import object_store

SMALL = 2000  # bytes of a file: some weights each


class Heard(list):
    def __contains__(self, text):
        return any(text in line for line in self)


def run(source, target, to, *, config=None, verify=True, file_bytes=SMALL, adapter=None):
    heard = Heard()
    more = {"verify": verify, "file_bytes": file_bytes, "adapter": adapter}
    convert(str(source), target, to=to, config=config, say=heard.append, **more)
    return heard


def assert_same_model(directory, original):
    found = {
        name: t for path in directory.glob("*.safetensors") for name, t in load_file(path).items()
    }
    expected = load_file(original / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert (directory / "config.json").read_bytes() == (original / "config.json").read_bytes()


@pytest.mark.needs("megatron")
@pytest.mark.parametrize(("before", "after"), [*itertools.product(FORMATS, FORMATS)])
def test_every_direction(written, tmp_path, before, after):
    original = written("qwen3_moe-dense-first")
    run(original, tmp_path / "before", before, verify=False)
    heard = run(tmp_path / "before", tmp_path / "after", after)
    assert "compared: all 77 weights have the checksums of the source" in heard
    assert "logits of 16 tokens, vocabulary 50: max difference" in heard
    assert detect_format(tmp_path / "after") == after
    run(tmp_path / "after", tmp_path / "back", "hf", verify=False, file_bytes=10**9)
    assert_same_model(tmp_path / "back", original)
    assert {path.name for path in tmp_path.iterdir()} == {"before", "after", "back"}, (
        "something was left behind"
    )


@pytest.mark.medium
@pytest.mark.needs("megatron")
@pytest.mark.parametrize("model", [name for name in MODELS if name != "qwen3_moe-dense-first"])
def test_every_family_goes_to_megatron_and_back(written, tmp_path, model):
    heard = run(written(model), tmp_path / "megatron", "megatron")
    family = MODELS[model][0]
    can_run = family in FAMILIES
    assert (
        "max difference" if can_run else f"can't run this model: model_type '{family}'"
    ) in heard
    run(tmp_path / "megatron", tmp_path / "back", "hf", verify=False)
    assert_same_model(tmp_path / "back", written(model))


@pytest.mark.medium
def test_what_was_interrupted_goes_on(written, tmp_path, monkeypatch):
    form, write, made = FORMATS["dcp"], type(FORMATS["dcp"]).write, []

    def write_three(self, path, entries):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(path)
        return write(self, path, entries)

    monkeypatch.setattr(type(form), "write", write_three)
    with pytest.raises(KeyboardInterrupt):
        run(written("llama"), tmp_path / "made", "dcp")
    assert not (tmp_path / "made").exists()
    before = {path: path.stat().st_mtime_ns for path in made}
    monkeypatch.setattr(type(form), "write", write)
    heard = run(written("llama"), tmp_path / "made", "dcp")
    assert "continuing: 3 of" in heard
    assert {path: (tmp_path / "made" / path.name).stat().st_mtime_ns for path in made} == before
    run(tmp_path / "made", tmp_path / "back", "hf")
    assert_same_model(tmp_path / "back", written("llama"))


@pytest.mark.medium
@pytest.mark.parametrize("to", FORMATS)
def test_a_corrupted_weight_is_found_and_written_again(written, tmp_path, monkeypatch, to):
    finish = type(FORMATS[to]).finish
    damaged = (
        load_file(written("llama") / "model.safetensors")["model.norm.weight"].numpy().tobytes()
    )

    def damage_and_finish(self, directory, records, config):
        (path,) = (
            path for path in directory.iterdir() if path.is_file() and damaged in path.read_bytes()
        )
        path.write_bytes(path.read_bytes().replace(damaged, b"\x01" + damaged[1:]))
        finish(self, directory, records, config)

    monkeypatch.setattr(type(FORMATS[to]), "finish", damage_and_finish)
    with pytest.raises(
        CheckpointError,
        match=r"weights in .* are not those of .*: model\.norm\.weight; repeat the command",
    ):
        run(written("llama"), tmp_path / "made", to)
    assert not (tmp_path / "made").exists()
    monkeypatch.setattr(type(FORMATS[to]), "finish", finish)
    heard = run(written("llama"), tmp_path / "made", to)
    assert "continuing: " in heard
    assert "compared: all" in heard


def test_logits_that_differ_are_an_error(written, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "TOLERANCE", -1.0)
    with pytest.raises(CheckpointError, match=r"the logits of .* differ by up to 0"):
        run(written("llama"), tmp_path / "made", "dcp")


def test_a_model_that_memory_does_not_hold_is_compared_by_checksums_alone(
    written, tmp_path, monkeypatch
):
    memory = SimpleNamespace(available=10 * 1024)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    heard = run(written("llama"), tmp_path / "made", "dcp")
    assert (
        "logits not compared: the model takes 0.0 GiB in float32, and this machine has less free memory"
        in heard
    )
    assert "compared: all" in heard


def test_what_was_begun_from_another_source_is_not_mixed(written, tmp_path, monkeypatch):
    shutil.copytree(written("llama"), tmp_path / "source")
    monkeypatch.setattr(type(FORMATS["dcp"]), "finish", lambda *arguments: sys.exit("killed"))
    with pytest.raises(SystemExit):
        run(tmp_path / "source", tmp_path / "made", "dcp")
    weights = load_file(tmp_path / "source" / "model.safetensors")
    save_file(
        {name: tensor + 1 for name, tensor in weights.items()},
        tmp_path / "source" / "model.safetensors",
    )
    with pytest.raises(
        CheckpointError,
        match="to an interrupted conversion with another source, adapter or --to, or the source has changed",
    ):
        run(tmp_path / "source", tmp_path / "made", "dcp")


@pytest.mark.medium
def test_a_trainers_own_checkpoint_is_read_beside_a_config(written, tmp_path):
    model = load_file(written("llama") / "model.safetensors")
    optimizer = {f"{name}.exp_avg": torch.zeros_like(tensor) for name, tensor in model.items()}
    torch_dcp.save(
        {"model": model, "optim": {"state": optimizer}},
        checkpoint_id=tmp_path / "dcp",
        no_dist=True,
    )
    with pytest.raises(
        ModelError,
        match=r"has no config.json: name a Hugging Face directory of this model by --config",
    ):
        run(tmp_path / "dcp", tmp_path / "made", "hf")
    run(tmp_path / "dcp", tmp_path / "made", "hf", config=written("llama"))
    assert_same_model(tmp_path / "made", written("llama"))


def test_the_checkpoint_of_a_learner_is_read_without_what_its_optimizer_keeps(written, tmp_path):
    model = load_file(written("llama") / "model.safetensors")
    for rank in (0, 1):
        blocks = []
        for name, tensor in model.items():
            start, part = rank * (len(tensor) // 2), tensor.chunk(2)[rank]
            at = (start, *(0,) * (tensor.dim() - 1))
            blocks += [
                Shard(name, tuple(tensor.shape), at, part),
                Shard(f"exp_avg/{name}", tuple(tensor.shape), at, part),
            ]
        save_blocks(tmp_path / "learner", rank, blocks, {"taken": 3})
    assert "(learner) ->" in run(
        tmp_path / "learner", tmp_path / "made", "hf", config=written("llama"), file_bytes=10**9
    )
    assert_same_model(tmp_path / "made", written("llama"))


def test_the_model_of_a_run_is_converted(written, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    shutil.copytree(written("llama"), tmp_path / "run" / "model")
    assert "(hf) ->" in run(tmp_path / "run", tmp_path / "made", "dcp")


@pytest.mark.medium
def test_layers_for_the_prediction_of_several_tokens_are_whole_or_named(written, tmp_path):
    shutil.copytree(written("deepseek_v3-full-queries"), tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    weights = load_file(file)
    first = f"model.layers.{BASE['num_hidden_layers']}"
    beyond = f"model.layers.{BASE['num_hidden_layers'] + 2}.eh_proj.weight"
    save_file({**weights, beyond: torch.zeros(2, 2)}, file)
    heard = run(tmp_path / "source", tmp_path / "made", "megatron")
    assert f"ignored: {beyond}" in heard
    head = f"{first}.shared_head.head.weight"
    save_file({**weights, head: weights[head] + 1}, file)
    with pytest.raises(
        ModelError, match=r"head.weight differs from lm_head.weight, which Megatron"
    ):
        run(tmp_path / "source", tmp_path / "again", "megatron")
    lacks = f"{first}.eh_proj.weight"
    save_file({name: tensor for name, tensor in weights.items() if name != lacks}, file)
    with pytest.raises(ModelError, match=f"weights are missing: {lacks}"):
        run(tmp_path / "source", tmp_path / "again", "megatron")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"score.weight": torch.zeros(1, 32)},
            "Megatron has no place for these weights: score.weight",
        ),
        (
            {"model.norm.weight": torch.zeros(31)},
            r"'model.norm.weight' has shape \(31,\), but config.json implies \(32,\)",
        ),
        ({"model.norm.weight": None}, "weights are missing: model.norm.weight"),
        ({"lm_head.weight": torch.zeros(50, 32)}, "lm_head.weight differs from the embedding"),
    ],
)
def test_weights_that_do_not_fit_are_refused(written, tmp_path, change, message):
    shutil.copytree(written("llama-tied"), tmp_path / "source")
    weights = {**load_file(tmp_path / "source" / "model.safetensors"), **change}
    save_file(
        {name: tensor for name, tensor in weights.items() if tensor is not None},
        tmp_path / "source/model.safetensors",
    )
    with pytest.raises(ModelError, match=message):
        run(tmp_path / "source", tmp_path / "made", "megatron")


def test_an_architecture_without_a_map_goes_to_dcp_and_not_to_megatron(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    save_file({"wte.weight": torch.randn(4, 4)}, tmp_path / "model.safetensors")
    assert "logits not compared" in run(tmp_path, tmp_path / "dcp", "dcp")
    with pytest.raises(ModelError, match="model_type 'gpt2' can't be converted"):
        run(tmp_path, tmp_path / "again", "megatron")
    run(tmp_path, tmp_path / "again", "dcp")  # nothing of the failure is in its way


def test_two_processes_do_not_write_to_one_place(written, tmp_path):
    with (
        tool._lock(tmp_path / ".made.partial"),
        pytest.raises(CheckpointError, match="another process is writing"),
    ):
        run(written("llama"), tmp_path / "made", "dcp")


@pytest.mark.parametrize("other_began", ["before", "after"])
def test_a_process_that_finishes_meanwhile_is_named(written, tmp_path, monkeypatch, other_began):
    """The other one renames its directory after this one has looked for the target."""
    partial_dir, target = tmp_path / ".made.partial", tmp_path / "made"
    lock, flock = partial_dir / tool.STATE_DIR / "lock", tool.fcntl.flock

    def finish_other(descriptor, operation):
        if other_began == "before":
            partial_dir.rename(target)
        else:  # it had ended before this one made its directory
            target.mkdir()
            (target / "config.json").touch()
        flock(descriptor, operation)

    monkeypatch.setattr(tool.fcntl, "flock", finish_other)
    error, message = {
        "before": (CheckpointError, "another process is writing"),
        "after": (ConfigError, "made exists: give another place"),
    }[other_began]
    with pytest.raises(error, match=message):
        run(written("llama"), target, "dcp")
    assert lock.exists() == (other_began == "after")


def test_an_address_that_another_process_fills_meanwhile_is_left_alone(
    written, tmp_path, monkeypatch
):
    monkeypatch.setattr(object_store, "_cache", tmp_path / "cache")
    target = tmp_path / "made"

    def convert_and_fill(*arguments, **options):
        convert(*arguments, **options)
        target.mkdir()
        (target / "config.json").write_text("of the other")

    monkeypatch.setattr(convert_run, "convert", convert_and_fill)
    with pytest.raises(ConfigError, match="holds files: give another place"):
        convert_paths_or_addresses(
            str(written("llama")), f"file://{target}", to="hf", config=None, verify=False, say=print
        )
    assert {path.name: path.read_text() for path in target.iterdir()} == {
        "config.json": "of the other"
    }


def test_places_and_forms_that_are_none_are_refused(written, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="exists: give another place"):
        run(written("llama"), tmp_path / "file", "dcp")
    with pytest.raises(
        ConfigError, match="--to onnx is not a format of weights: choose one of hf, megatron, dcp"
    ):
        run(written("llama"), tmp_path / "made", "onnx")
    with pytest.raises(
        CheckpointError, match=r"holds no weights of a model: neither model\.safetensors"
    ):
        run(tmp_path, tmp_path / "made", "hf")


def test_no_file_of_a_user_is_in_the_way(written, tmp_path):
    source = written("llama")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="link is a link: give the place that it names"):
        run(source, tmp_path / "link", "hf")
    assert not (tmp_path / "nowhere").exists()
    for name in (".made.partial", ".made.source"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("mine")
        (tmp_path / name / ".checkpoint").mkdir()  # no mark of an export, which is a file
    with pytest.raises(ConfigError, match=r"\.made\.partial is needed for this conversion"):
        run(source, tmp_path / "made", "hf")
    assert (tmp_path / ".made.partial/mine").read_text() == "mine"
    (tmp_path / ".made.partial").rename(tmp_path / "elsewhere")
    convert_paths_or_addresses(
        str(source), str(tmp_path / "made"), to="hf", config=None, verify=False, say=print
    )
    assert (tmp_path / ".made.source/mine").read_text() == "mine"


@pytest.mark.medium
def test_the_command_of_the_page_is_what_it_does(
    written, tmp_path, monkeypatch, capsys, repository
):
    """The lines of docs/convert.md, in a directory with a model."""
    shutil.copytree(written("qwen3"), tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    page = (repository / "docs" / "convert.md").read_text(encoding="utf-8")
    lines = [
        line
        for block in page.split("```")[1::2]
        for line in block.splitlines()
        if line.startswith("ratchet convert ")
    ]
    assert len(lines) >= 3
    for line in lines:
        monkeypatch.setattr(sys, "argv", line.split())
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0, capsys.readouterr().err
        out = capsys.readouterr().out
        assert "compared: all 46 weights" in out
        _, _, source, target, _, to = line.split()
        assert f"{source} (" in out
        assert f"-> {target} ({to}): 46 weights, files: 1" in out


@pytest.mark.slow
@pytest.mark.needs("megatron")
def test_the_checkpoint_of_a_megatron_learner_is_read(tmp_path):
    ranks = {"data_parallel": 2, "expert_parallel": 2}
    case = {
        "shape": "sparse",
        "kind": "grpo",
        "options": ranks,
        "steps": 1,
        "saved_to": str(tmp_path / "policy"),
    }
    results = [result for (result,) in run_ranks(2, "learners.megatron_cases:run", [case])]
    assert not any(isinstance(result, str) for result in results), results
    init_policy(SHAPES["sparse"], seed=SEED).save(tmp_path / "base")
    heard = run(
        tmp_path / "policy" / "megatron",
        tmp_path / "made",
        "hf",
        config=tmp_path / "base",
        file_bytes=10**9,
    )
    assert "logits of 16 tokens" in heard
    _, expected, _ = alone("sparse", "grpo", 1)
    found = load_file(tmp_path / "made" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
