"""Whole runs at an address: trained, broken off, gone on with on another machine, and read by every
command."""

import json
import shutil
import signal
import uuid

import fsspec
import pytest
import yaml
from broken_store import contents, telling
from command_line import ratchet
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from ratchet.cli.main import app
from ratchet.config.loader import load_config
from ratchet.errors import CheckpointError, ConfigError, ModelError, RunDirectoryError
from ratchet.models.load import load_policy
from ratchet.runs.remote_run import MirroredRun
from ratchet.runs.remote_sync import get_mirror_work_dir
from ratchet.training.session import NOT_MIRRORED
from ratchet.training.start import resume_run, start_run
from ratchet.utils import failpoints as faults
from ratchet.utils import object_store
from ratchet.utils.object_store import Store, put_directory

pytestmark = pytest.mark.slow

RECIPE = {
    "name": "probe",
    "threads": 1,
    "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "environment": {"kind": "sorting", "digits": 2},
    "sampling": {"max_new_tokens": 2},
    "evaluation": {"tasks": 4},
    "checkpoint": {"every": 2, "keep": 2},
    "optimizer": {"lr": 0.05},
    "logging": {"tensorboard": False, "progress": "off", "system": False},
    "stages": [
        {"name": "sft", "algorithm": {"kind": "sft"}, "steps": 3, "batch_size": 10, "examples": 10},
        {
            "name": "rl",
            "algorithm": {"kind": "grpo", "group_size": 4, "kl": {"coef": 0.01}},
            "steps": 3,
            "batch_size": 4,
        },
    ],
}


WEIGHTS = "model.safetensors"
MEMORY, FILES = "memory://{id}/run", "file://{tmp}/store/run"


@pytest.fixture(autouse=True)
def machine(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(object_store, "RETRY_WAIT_S", 0.0)

    def be_new():
        cache = tmp_path_factory.mktemp("cache")
        object_store.configure_cache({"RATCHET_CACHE": str(cache)})
        return cache

    be_new()
    yield be_new
    object_store.configure_cache({})


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "probe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """A run in a directory that nothing disturbed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert start_run(recipe, [], run, command="ratchet train") == 0
    return run


def numbers(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "system/"))} for row in rows
    ]


def assert_equal_runs(a, b):
    assert numbers(a) == numbers(b)
    for file in ("model/model.safetensors", "checkpoints/step-00000006/policy/state.safetensors"):
        first, second = load_file(a / file), load_file(b / file)
        assert first.keys() == second.keys()
        for name, weight in first.items():
            assert weight.tobytes() == second[name].tobytes(), name
    events = [
        [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
        for run in (a, b)
    ]
    assert events[0] == events[1]
    records = [sorted(path.name for path in (run / "steps").glob("*")) for run in (a, b)]
    assert records[0] == records[1]


# Any two of the three appear together.
@pytest.mark.parametrize(
    ("fault", "where", "background"),
    [
        ("step.update:2", MEMORY, False),
        ("step.update:2", FILES, True),
        ("step.update:4", MEMORY, True),
        ("step.update:4", FILES, False),
        ("mirror.checkpoint_file:7", MEMORY, False),
        ("mirror.checkpoint_file:7", FILES, True),
    ],
)
def test_on_another_machine_it_ends_with_the_same_bits(
    fault, where, background, whole, recipe, tmp_path, machine
):
    """Broken off before the first checkpoint, in the second stage, and in the middle of the second
    checkpoint's upload."""
    address = where.format(id=uuid.uuid4().hex, tmp=tmp_path)
    overrides = [f"checkpoint.background={str(background).lower()}"]
    faults.arm(f"{fault}:raise")
    try:
        with pytest.raises(faults.InjectedFault):
            start_run(recipe, overrides, address, command="ratchet train")
    finally:
        faults.arm("")
    machine()
    assert resume_run(address, command="ratchet train --resume") == 0
    assert_equal_runs(whole, get_mirror_work_dir(address))
    names = contents(address).keys()
    assert {
        "model/model.safetensors",
        "summary.json",
        "metrics.jsonl",
        "config.yaml",
        "run.log",
    } <= names
    assert sorted(MirroredRun(address).list_checkpoints()[0]) == [5, 6]


def test_a_store_that_breaks_in_the_middle_of_a_checkpoint_costs_no_step(
    recipe, whole, capsys, machine
):
    address, failed = f"broken://{uuid.uuid4().hex}/run", []

    def told(operation, path):
        if (
            operation == "write"
            and path.endswith("step-00000005/policy/state.safetensors")
            and len(failed) < 3
        ):
            failed.append(path)
            raise ConnectionError("reset by peer")

    with telling(told):
        assert start_run(recipe, ["checkpoint.keep=5"], address, command="ratchet train") == 0
    assert len(failed) == 3
    assert "can't upload the save" in capsys.readouterr().out
    assert_equal_runs(whole, get_mirror_work_dir(address))
    assert sorted(MirroredRun(address).list_checkpoints()[0]) == [2, 3, 5, 6]


def test_a_store_that_stays_broken_is_said_and_mended_later(recipe, whole, capsys):
    address = f"broken://{uuid.uuid4().hex}/run"

    def told(operation, path):
        if (
            operation == "write"
            and not path.endswith("mirror.json")
            and "step-00000002" not in path
            and "config" not in path
        ):
            raise ConnectionError("reset by peer")

    with telling(told):
        assert start_run(recipe, [], address, command="ratchet train") == NOT_MIRRORED
    local = get_mirror_work_dir(address)
    said = " ".join(capsys.readouterr().out.split())
    assert f"error: {address} lacks a part of the run" in said
    assert "reset by peer" in said
    assert f"The complete run is in {local}; `ratchet train --resume {address}` tries again" in said
    assert_equal_runs(whole, local)
    assert resume_run(address, command="ratchet train --resume") == 0
    assert "model/model.safetensors" in contents(address)


def test_a_read_only_store_is_known_before_the_first_step(recipe):
    address = f"broken://{uuid.uuid4().hex}/run"

    def told(operation, path):
        if operation == "write":
            raise PermissionError("read-only")

    with (
        telling(told),
        pytest.raises(RunDirectoryError, match="read-only; choose another --run-dir"),
    ):
        start_run(recipe, [], address, command="x")
    assert start_run(recipe, ["stages.sft.steps=1", "stages.rl.steps=1"], address, command="x") == 0


def test_the_recipe_may_name_the_address_and_a_run_begins_there_once(recipe, capsys):
    address = f"memory://{uuid.uuid4().hex}/run"
    short = [f"run_dir={address}", "stages.sft.steps=1", "stages.rl.steps=1"]
    assert start_run(recipe, short, None, command="x") == 0
    assert f"run      {address}" in capsys.readouterr().out
    assert "summary.json" in contents(address)
    with pytest.raises(
        RunDirectoryError, match=f"holds a run. Continue it with --resume {address}"
    ):
        start_run(recipe, short, None, command="x")


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("run_dir=s4://bucket/run", "nothing reads s4://"),
        ("run_dir=https://host/run", "a web server can't list a directory"),
        ("model={path: 's3://bucket/*'}", "a pattern or leads upwards"),
        (
            "model={path: 's3://bucket/model', revision: main}",
            "has no revisions: remove model.revision",
        ),
        ("tokenizer={kind: auto, path: 's3://'}", "names no bucket or directory"),
    ],
)
def test_what_is_no_address_is_refused_when_the_recipe_is_read(override, why, recipe):
    with pytest.raises(ConfigError, match=why):
        load_config(recipe, [override])
    key, _, place = override.partition("=")
    if key == "run_dir":
        with pytest.raises(ConfigError, match=why):
            start_run(recipe, [], place, command="x")
        with pytest.raises(ConfigError, match=why):
            resume_run(place, command="x")


def test_a_plan_for_an_address_goes_there_with_the_run(recipe):
    address = f"memory://{uuid.uuid4().hex}/run"
    short = ["stages.sft.steps=1", "stages.rl.steps=1"]
    command("plan", recipe, *short, "--run-dir", address)
    assert start_run(recipe, short, address, command="x") == 0
    assert "plan.json" in contents(address)


def test_an_address_without_a_run_is_no_run():
    with pytest.raises(RunDirectoryError, match="memory://nothing/here holds no run"):
        resume_run("memory://nothing/here", command="x")


# --- what commands read


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    address = "memory://finished/run"
    object_store.configure_cache({"RATCHET_CACHE": str(tmp_path_factory.mktemp("trained"))})
    assert start_run(recipe, [], address, command="ratchet train") == 0
    return address


def command(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_every_reading_command_takes_an_address(finished, recipe, machine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache, before = machine(), contents(finished)
    assert "attempts have a reward" in command("eval", finished, "--tasks", 4, "--samples", 0)
    assert (
        json.loads((tmp_path / "evals" / "sorting-1" / "results.json").read_text())["about"][
            "target"
        ]
        == finished
    )
    (copy,) = cache.glob("copies/*/run")
    assert not (copy / "checkpoints").exists()  # only what it needs
    assert not (copy / "metrics.jsonl").exists()
    command("eval", finished, "--step", 5, "--tasks", 4, "--samples", 0)
    command("eval", f"{finished}/checkpoints/step-00000005", "--tasks", 4, "--samples", 0)
    command("eval", f"{finished}/model", "--recipe", recipe, "--tasks", 4, "--samples", 0)
    command(
        "eval",
        f"{finished}/evals/rl/step-00000006",
        "--against",
        f"{finished}/evals/sft/step-00000003",
    )
    assert command("chat", finished, "--prompt", "7=").strip()
    assert command("report", finished).strip() == "report.html"
    assert "step 5: bit-equal" in command("replay", finished, "--step", 6)
    assert json.loads(command("explain", finished, "--step", 6, "--json"))["step"] == 6
    rows = json.loads(command("runs", "list", "memory://finished", "--json"))
    assert [(row["path"], row["state"], row["step"]) for row in rows] == [(finished, "finished", 6)]
    assert rows[0]["checkpoints"] == sum(
        len(content) for name, content in before.items() if name.startswith("checkpoints/")
    )
    assert command("runs", "list", finished)
    (compared,) = json.loads(command("runs", "compare", finished, finished, "--json"))
    assert (compared["a"], compared["first_different_step"]) == (finished, None)
    assert contents(finished) == before  # read-only


def test_what_is_fetched_is_fetched_once_and_again_when_it_was_changed(
    finished, machine, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    cache = machine()
    command("report", finished)
    fetched, get = [], object_store.Store.get
    monkeypatch.setattr(
        object_store.Store,
        "get",
        lambda self, name, target: (fetched.append(name), get(self, name, target)),
    )
    command("report", finished)
    assert fetched == []
    (metrics,) = cache.glob("copies/*/run/metrics.jsonl")
    content = metrics.read_bytes()
    metrics.write_bytes(b"[" + content[1:])
    command("report", finished)
    assert fetched == ["metrics.jsonl"]
    assert metrics.read_bytes() == content


def test_what_needs_the_run_itself_is_refused(finished):
    for words in (["runs", "prune", finished], ["status", finished]):
        with pytest.raises(
            ConfigError, match="is an address, and this command needs the directory"
        ):
            command(*words)
    with pytest.raises(
        CheckpointError,
        match=r"no complete checkpoint of step 1 at memory://finished/run: it has \[5, 6\]",
    ):
        command("eval", finished, "--step", 1)
    with pytest.raises(RunDirectoryError, match="holds no run"):
        command("report", "memory://nothing/here")
    with pytest.raises(ModelError, match="holds no model"):
        command("chat", "memory://nothing/here")


def test_a_run_without_a_model_yet_says_so(recipe):
    address = f"memory://{uuid.uuid4().hex}/run"
    faults.arm("step.update:4:raise")
    try:
        with pytest.raises(faults.InjectedFault):
            start_run(recipe, [], address, command="x")
    finally:
        faults.arm("")
    with pytest.raises(
        RunDirectoryError,
        match=f"has no finished model yet. Continue with `ratchet train --resume {address}`",
    ):
        command("chat", address)


# --- models and data


def test_a_model_goes_to_an_address_and_is_trained_from_there(whole, recipe, machine, tmp_path):
    address = f"memory://{uuid.uuid4().hex}/model"
    out = command("convert", whole, address)
    assert f"model is at {address}" in out
    # it is there now
    assert not list(
        object_store.get_cached_path("converted", "x").parent.parent.rglob("*.safetensors")
    )
    with pytest.raises(ConfigError, match="holds files: give another place"):
        command("convert", whole, address)
    machine()
    ours, theirs = load_policy(whole / "model").state_dict(), load_policy(address).state_dict()
    assert all((ours[name] == theirs[name]).all() for name in ours)
    tuned = {
        **RECIPE,
        "model": {"path": address},
        "tokenizer": {"kind": "auto"},
        "stages": RECIPE["stages"][:1],
    }
    (tmp_path / "tuned.yaml").write_text(yaml.safe_dump(tuned))
    assert (
        start_run(tmp_path / "tuned.yaml", ["stages.sft.steps=1"], tmp_path / "run", command="x")
        == 0
    )
    command("convert", address, tmp_path / "dcp", "--to", "dcp")
    with pytest.raises(ConfigError, match="nothing reads s4://"):
        command("convert", whole, "s4://bucket/model")


def test_a_conversion_that_did_not_arrive_is_sent_again(whole, capsys):
    address = f"broken://{uuid.uuid4().hex}/model"

    def told(operation, path):
        if operation == "write" and path.endswith("tokenizer.json"):
            raise ConnectionError("reset by peer")

    with (
        telling(told),
        pytest.raises(CheckpointError, match="reset by peer; the converted model is in"),
    ):
        command("convert", whole, address)
    with pytest.raises(ModelError, match="holds no model"):
        load_policy(address)
    assert "weights" not in command("convert", whole, address)  # not converted a second time
    assert load_policy(address)


def test_a_source_that_changed_before_its_upload_arrived_is_converted_again(whole, tmp_path):
    source, address = tmp_path / "model", f"broken://{uuid.uuid4().hex}/model"
    shutil.copytree(whole / "model", source)

    def refuse(operation, path):
        if operation == "write":
            raise ConnectionError("reset by peer")

    with telling(refuse), pytest.raises(CheckpointError, match="reset by peer"):
        command("convert", source, address)
    weights = {name: 2 * array for name, array in load_file(source / WEIGHTS).items()}
    save_file(weights, source / WEIGHTS)
    with pytest.raises(ConfigError, match="holds files: give another place"):
        command("convert", source, address)  # its files are of the older weights
    for name in Store(address).entries():
        Store(address).remove(name)
    command("convert", source, address)
    ours, theirs = load_policy(source).state_dict(), load_policy(address).state_dict()
    assert all((ours[name] == theirs[name]).all() for name in ours)


def test_answers_at_an_address_are_scored(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1", "response": "2", "answer": "2"}\n')
    put_directory(tmp_path, "memory://answers", last="a.jsonl")
    line = command(
        "score", "memory://answers/a.jsonl", "--reward", "exact_match", "--json", "--workers", 1
    )
    assert json.loads(line)["reward"] == 1.0


def test_a_killed_process_goes_on_on_another_machine(whole, recipe, tmp_path, monkeypatch):
    """Through the command line, by SIGKILL in the middle of a checkpoint's upload."""

    def on_machine(name, *arguments, faults=""):
        monkeypatch.setenv("RATCHET_CACHE", str(tmp_path / name))
        return ratchet(*arguments, faults=faults)

    address = f"file://{tmp_path}/store/run"
    killed = on_machine(
        "one", "train", recipe, "--run-dir", address, faults="mirror.checkpoint_file:8:kill"
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = on_machine("two", "train", "--resume", address)
    assert resumed.returncode == 0, resumed.stderr
    assert f"{address} continues after step 2" in resumed.stdout
    (run,) = (tmp_path / "two").glob("runs/*/run")
    assert_equal_runs(whole, run)
    fsspec.filesystem("file").rm(f"{tmp_path}/store/run/model", recursive=True)
    again = on_machine("two", "train", "--resume", address)
    assert "the local copy in" in again.stdout
