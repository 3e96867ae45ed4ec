"""A run's directory kept at an address: whatever the store does, what is there is whole, and what
is here is untouched."""

import json
import logging
import shutil
import threading
import uuid
from pathlib import Path

import fsspec
import pytest
import yaml
from broken_store import Broken, contents, telling

from ratchet.checkpoint.manifest import MANIFEST, hash_body, seal
from ratchet.errors import CheckpointError, RunDirectoryError
from ratchet.runs.checkpoints import CheckpointStore
from ratchet.runs.remote_run import INDEX, MirroredRun, MirrorIndex, find_newest_step
from ratchet.runs.remote_sync import Mirror, get_mirror_work_dir
from ratchet.runs.run_dir import RunDirectory
from ratchet.utils import object_store

RECIPE = {"stages": [{"checkpoint": {"keep_best": 1}}]}


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Which machine this is: each has a cache of its own."""
    monkeypatch.setattr(object_store, "RETRY_WAIT_S", 0.0)

    def be(name):
        object_store.configure_cache({"RATCHET_CACHE": str(tmp_path / name)})

    be("one")
    yield be
    object_store.configure_cache({})


@pytest.fixture
def address():
    return f"broken://{uuid.uuid4().hex}/run"


class Run:
    """What a training does to its directory, without one."""

    def __init__(self, address, *, keep=2, keep_best=0):
        self.directory = RunDirectory(get_mirror_work_dir(address))
        self.directory.path.mkdir(parents=True, exist_ok=True)  # as its lock does
        self.store = CheckpointStore(self.directory.checkpoints, keep, keep_best=keep_best)
        self.mirror = Mirror(address, self.directory, self.store)

    def begin(self):
        self.mirror.check_empty()
        self.directory.config.write_text(yaml.safe_dump(RECIPE))
        self.mirror.begin()
        return self

    def take_up(self):
        self.mirror.resume()
        self.mirror.begin()
        return self

    @property
    def path(self) -> Path:
        return self.directory.path

    def step(self, step, *, push=True, score=None, beside=False):
        for name in ("metrics.jsonl", "ledger.jsonl", "run.log"):
            with (self.path / name).open("a") as file:
                file.write(f'{{"step": {step}}}\n')
        (self.path / "steps").mkdir(exist_ok=True)
        (self.path / "steps" / f"{step}.parquet").write_bytes(b"%d" % step * 99)
        (self.path / "provenance.json").write_text(str(step))
        noted = self.mirror.take_snapshot()

        def write(draft):
            (draft / "policy").mkdir()
            (draft / "policy" / "state.safetensors").write_bytes(b"%d" % step * 1000)
            (draft / "source.json").write_text(str(step))

        self.store.save(step, write, {"step": step, "score": score})
        if push:
            self.mirror.push(noted, in_background=beside)
        return self

    def files(self):
        everything = [path for path in self.path.rglob("*") if path.is_file()]
        names = {path.relative_to(self.path).as_posix(): path for path in everything}
        return {name: path.read_bytes() for name, path in names.items() if not name.startswith(".")}


def without_index(address):
    return {name: content for name, content in contents(address).items() if name != INDEX}


def edit(address, name, change):
    system, root = fsspec.core.url_to_fs(address)
    MirroredRun(address).store.write(name, change(system.cat_file(f"{root}/{name}")))


def flip(content):
    return bytes([content[0] ^ 1]) + content[1:]


@pytest.mark.parametrize(
    "where", ["broken://{id}/run", "memory://{id}/run", "file://{tmp}/run", "local://{tmp}/run"]
)
def test_what_is_there_is_what_is_here(where, tmp_path):
    address = where.format(id=uuid.uuid4().hex, tmp=tmp_path / "store")
    run = Run(address).begin()
    for step in (1, 2, 3):
        run.step(step)
        assert without_index(address) == run.files()
    assert run.store.steps() == [2, 3]
    (run.path / "steps" / "1.parquet").unlink()  # the recorder keeps to its size
    (run.path / ".hidden").write_text("no")
    (run.path / "link").symlink_to(run.path / "run.log")
    assert run.mirror.finish()
    there = without_index(address)
    assert "steps/1.parquet" not in there
    assert not {".hidden", "link", ".mirror.json"} & there.keys()


def test_files_come_first_and_a_manifest_last_and_first_when_it_goes(address):
    run, said = Run(address, keep=1).begin().step(1), []
    with telling(lambda operation, path: said.append((operation, path.partition("/run/")[2]))):
        run.step(2)
    writes = [name for operation, name in said if operation == "write"]
    order = [
        writes.index(name)
        for name in ("metrics.jsonl", "checkpoints/step-00000002/policy/state.safetensors")
    ]
    manifest = writes.index("checkpoints/step-00000002/manifest.json")
    assert writes[0] == writes[-1] == INDEX
    assert order == sorted(order)
    assert manifest == len(writes) - 2 > max(order)
    assert "config.yaml" not in writes  # it is there
    removed = [name for operation, name in said if operation == "remove"]
    assert removed[0] == f"checkpoints/step-00000001/{MANIFEST}"
    assert len(removed) == 3


class Died(BaseException):
    """The process, in the middle of whatever it did."""


@pytest.mark.medium
def test_wherever_an_upload_ends_what_is_there_can_be_gone_on_from(machine):
    """At each operation of a save's upload, with the half-written file that the store is left
    with."""
    for ends_at in range(1, 40):
        address, passed = f"broken://{uuid.uuid4().hex}/run", []

        def told(operation, path, passed=passed, ends_at=ends_at):
            if operation in ("write", "remove"):
                passed.append(path)
                if len(passed) == ends_at:
                    raise Died

        machine(f"first-{ends_at}")
        run = Run(address, keep=1).begin().step(1)
        (run.path / "steps" / "1.parquet").unlink()
        with telling(told):
            try:
                run.step(2)
                done = True
            except Died:
                done = False
        machine(f"other-{ends_at}")
        other = Run(address, keep=1)
        other.mirror.resume()
        step = find_newest_step(other.directory)
        assert step in (1, 2)
        assert step == 2 or not done
        checkpoint = other.store.latest()
        assert (
            checkpoint.path / "policy" / "state.safetensors"
        ).read_bytes() == b"%d" % step * 1000
        steps = [
            json.loads(line)["step"]
            for line in (other.path / "metrics.jsonl").read_text().splitlines()
        ]
        assert steps[:step] == list(range(1, step + 1))
        if done:
            break
    assert done
    assert ends_at > 12


def test_on_a_disk_a_file_is_replaced_as_a_whole(machine, tmp_path, monkeypatch):
    address = f"file://{tmp_path}/store/run"
    Run(address).begin().step(1)
    run = Run(address)
    run.mirror.resume()
    monkeypatch.setattr(
        type(run.mirror.remote.store._filesystem), "mv", lambda *paths: (_ for _ in ()).throw(Died)
    )
    with pytest.raises(Died):
        run.step(2)
    monkeypatch.undo()
    machine("other")
    assert find_newest_step(Run(address).take_up().directory) == 1


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "checkpoints/step-00000002/policy/state.safetensors", INDEX]
)
def test_a_store_that_fails_costs_nothing_and_gets_all_of_it_later(name, address, caplog):
    run = Run(address).begin().step(1)

    def told(operation, path):
        if operation == "write" and path.endswith(name):
            raise OSError("out of order")

    with telling(told):
        run.step(2)
    assert "can't upload the save" in caplog.text
    assert "out of order" in caplog.text
    assert sorted(MirroredRun(address).list_checkpoints()[0]) == [1]
    assert run.store.load(2)
    run.step(3)
    assert run.mirror.incomplete_reason is None
    assert without_index(address) == run.files()


def test_at_the_end_it_is_said_what_is_missing_and_where_it_lies(address, caplog, machine):
    run = Run(address).begin().step(1)

    def told(operation, path):
        if operation == "write" and "step-00000002" in path:
            raise OSError("out of order")

    with telling(told):
        run.step(2)
        caplog.clear()
        assert not run.mirror.finish()
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "out of order" in said
    assert "Missing: checkpoints/step-00000002" in said
    assert str(run.path) in said
    assert f"--resume {address}" in said
    again = Run(address).take_up()
    assert "newer than" in again.mirror.notes[0]
    assert sorted(MirroredRun(address).list_checkpoints()[0]) == [1, 2]


def test_a_store_that_can_not_be_written_is_known_before_anything_is_trained(address):
    def told(operation, path):
        if operation == "write":
            raise PermissionError("read-only")

    with (
        telling(told),
        pytest.raises(
            RunDirectoryError, match=r"can't be written: .*read-only; choose another --run-dir$"
        ),
    ):
        Run(address).begin()


def test_a_run_begins_only_where_nothing_is(address):
    Run(address).begin()
    with pytest.raises(
        RunDirectoryError, match=f"holds a run. Continue it with --resume {address}"
    ):
        Run(address).mirror.check_empty()
    MirroredRun(f"{address}2").store.write("a.txt", b"")
    with pytest.raises(RunDirectoryError, match="holds other files"):
        Run(f"{address}2").mirror.check_empty()
    with pytest.raises(RunDirectoryError, match="holds no run"):
        Run(f"{address}3").take_up()


# --- going on


def test_another_machine_gets_all_that_the_run_had(address, machine):
    run = Run(address, keep_best=1).begin()
    for step, score in enumerate((0.5, 0.9, 0.1, 0.2), 1):
        run.step(step, score=score)
    run.mirror.finish()
    machine("two")
    other = Run(address, keep_best=1).take_up()
    kept = {name: content for name, content in run.files().items() if "step-00000003" not in name}
    # the best one, and the newest two, of which one is enough
    assert run.store.steps() == [2, 3, 4]
    assert other.files() == kept
    assert other.mirror.notes == [
        f"{address} continues after step 4: it was fetched into {other.path}"
    ]
    other.step(5)  # by the same rules there, though this machine has fewer
    assert sorted(MirroredRun(address).list_checkpoints()[0]) == [2, 4, 5]


def test_of_two_copies_the_newer_goes_on_and_it_is_said(address, machine):
    first = Run(address).begin().step(1)
    machine("two")
    second = Run(address).take_up().step(2)
    machine("one")
    again = Run(address).take_up()
    assert (
        f"continues after step 2: it was fetched into {again.path}, which was older (step 1)"
        in again.mirror.notes[0]
    )
    assert again.path == first.path
    again.step(3, push=False)
    ahead = Run(address).take_up()
    assert (
        f"the local copy in {first.path} continues: with step 3 it is newer than {address} (step 2)"
        in ahead.mirror.notes
    )
    assert ahead.files().items() <= without_index(address).items()
    machine("two")
    behind = Run(address).take_up()
    assert behind.path == second.path
    assert behind.store.latest().step == 3


def test_a_local_copy_whose_address_was_emptied_goes_on(address):
    run = Run(address).begin().step(1)
    Broken.store.clear()
    again = Run(address).take_up()
    assert again.mirror.notes == [
        f"{address} holds nothing of this run: the local copy in {run.path} continues after step 1"
    ]
    assert without_index(address) == run.files()


def test_a_local_copy_of_another_run_is_left_alone(address):
    run = Run(address).begin().step(1)
    before = run.files()
    Broken.store.clear()
    moved = run.path.with_name("moved")
    run.path.rename(moved)
    Run(address).begin().step(1)
    shutil.rmtree(run.path)
    moved.rename(run.path)
    with pytest.raises(RunDirectoryError, match="belongs to another run: move it away"):
        Run(address).take_up()
    assert run.files() == before


def test_a_store_that_can_not_be_read_names_the_local_copy(address):
    run = Run(address).begin().step(1)

    def told(operation, path):
        raise ConnectionError("no network")

    with (
        telling(told),
        pytest.raises(
            RunDirectoryError, match=f"no network.*. To resume without it, use --resume {run.path}"
        ),
    ):
        Run(address).take_up()


def test_of_two_that_write_at_once_the_first_stops(address, machine):
    first = Run(address).begin().step(1)
    machine("two")
    second = Run(address).take_up().step(2)
    first.step(2)
    assert "another process continues this run" in first.mirror.incomplete_reason
    assert not first.mirror.finish()
    second.step(3)
    assert second.mirror.finish()
    assert without_index(address) == second.files()


# --- what is damaged there

STATE = "checkpoints/step-00000002/policy/state.safetensors"


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        (STATE, flip, "its checksum does not match"),
        (STATE, lambda content: content[:-1], "has 999 bytes instead of 1000"),
        (
            f"checkpoints/step-00000002/{MANIFEST}",
            lambda content: content.replace(b'"score"', b'"score "'),
            "was changed",
        ),
        (f"checkpoints/step-00000002/{MANIFEST}", lambda content: content[:-9], "is not JSON"),
        (f"checkpoints/step-00000002/{MANIFEST}", lambda content: b"[]", "malformed"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_made_good(
    name, change, why, address, machine, caplog
):
    Run(address).begin().step(1).step(2)
    edit(address, name, change)
    machine("two")
    other = Run(address).take_up()
    assert why in caplog.text
    assert other.store.steps() == [1]
    other.step(2)
    machine("three")
    assert Run(address).take_up().store.steps() == [2]


def test_where_all_are_damaged_nothing_begins_anew(address, machine):
    Run(address, keep=1).begin().step(2)
    edit(address, STATE, flip)
    machine("two")
    with pytest.raises(CheckpointError, match=r"all checkpoints at .* are damaged"):
        Run(address).take_up()


@pytest.mark.parametrize("change", [flip, lambda content: content[:-1]])
def test_what_a_run_needs_must_be_as_it_was_and_all_else_is_left_out(
    change, address, machine, caplog
):
    Run(address).begin().step(1)
    edit(address, "provenance.json", change)
    machine("two")
    assert not (Run(address).take_up().path / "provenance.json").exists()
    assert "provenance.json is damaged" in caplog.text
    edit(address, "metrics.jsonl", change)
    machine("three")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl is damaged"):
        Run(address).take_up()


def test_a_file_that_has_grown_since_is_what_it_was_when_it_was_listed(address, machine):
    run = Run(address).begin().step(1)
    edit(address, "metrics.jsonl", lambda content: content + b'{"step": 2}\n')
    machine("two")
    assert (Run(address).take_up().path / "metrics.jsonl").read_bytes() == (
        run.path / "metrics.jsonl"
    ).read_bytes()


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "/x", ".lock", "checkpoints/step-00000009/x.json", ".mirror.json"]
)
def test_no_list_leads_outside(name, address, machine, tmp_path):
    Run(address).begin().step(1)
    index = MirrorIndex.from_bytes(address, MirroredRun(address).store.read(INDEX))
    hostile = MirrorIndex(
        index.run, index.writer, {**index.files, name: index.files["metrics.jsonl"]}
    )
    edit(address, INDEX, lambda content: hostile.to_bytes())
    machine("two")
    with pytest.raises(CheckpointError, match="which is not a file of a run directory"):
        Run(address).take_up()
    assert not list(tmp_path.rglob("x"))


@pytest.mark.parametrize("name", ["../../x.json", "/x.json", "run.pkl", "policy/weights.bin"])
def test_no_manifest_does_either_nor_brings_what_could_execute(
    name, address, machine, caplog, tmp_path
):
    Run(address).begin().step(1)

    def hostile(content):
        body = json.loads(content)["body"]
        body["files"][name] = body["files"].pop("source.json")
        assert json.loads(seal(body))["sha256"] == hash_body(body)
        return seal(body).encode()

    edit(address, f"checkpoints/step-00000001/{MANIFEST}", hostile)
    machine("two")
    with pytest.raises(CheckpointError, match="all checkpoints at"):
        Run(address).take_up()
    assert "could lead outside" in caplog.text or "none of the allowed formats" in caplog.text
    assert not list((tmp_path / "two").rglob("*.pkl"))


@pytest.mark.parametrize("lines", [[], [None], [["1", "a"]], [[-1, "a"]], [[1]], [7], 7])
def test_a_malformed_list_is_said(lines, address, machine):
    Run(address).begin().step(1)

    def malformed(content):
        body = json.loads(content)["body"]
        return seal({**body, "files": {"metrics.jsonl": lines}}).encode()

    edit(address, INDEX, malformed)
    machine("two")
    with pytest.raises(CheckpointError, match=r"mirror\.json is malformed"):
        Run(address).take_up()


# --- beside the training


def test_a_slow_store_holds_nobody_up_and_reads_what_is_pruned_meanwhile(address):
    run, goes_on, reached = Run(address, keep=1).begin(), threading.Event(), threading.Event()

    def told(operation, path):
        if operation == "write" and "step-00000001" in path:
            reached.set()
            assert goes_on.wait(60)

    with telling(told):
        run.step(1, beside=True)
        assert reached.wait(60)
        run.step(2, beside=True).step(3, beside=True)  # while the first is still being written
        assert run.store.steps() == [1, 3]  # it is held
        goes_on.set()
        assert run.mirror.finish()
    assert run.store.steps() == [3]
    assert without_index(address) == run.files()


def test_what_fails_beside_is_said_and_made_up_for(address, caplog):
    run = Run(address).begin()

    def told(operation, path):
        if operation == "write" and "step-00000001" in path:
            raise OSError("out of order")

    with telling(told):
        run.step(1, beside=True)
        run.mirror._background.wait()
    assert "out of order" in run.mirror.incomplete_reason
    run.step(2, beside=True)
    assert run.mirror.finish()
    assert without_index(address) == run.files()


def test_a_file_that_grows_or_goes_while_it_is_sent_is_no_failure(address, machine):
    run = Run(address).begin().step(1)
    noted = run.mirror.take_snapshot()
    (run.path / "steps" / "1.parquet").unlink()
    (run.path / "run.log").write_text("")
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write("more\n")
    (run.path / "provenance.json").write_text("new")
    run.mirror.push(noted | {"gone.json": noted["run.log"]}, in_background=False)
    assert run.mirror.incomplete_reason is None
    machine("two")
    assert (Run(address).take_up().path / "metrics.jsonl").read_text() == '{"step": 1}\n'
