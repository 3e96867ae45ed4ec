"""The promise: whatever kills a save, and whatever happens to the files, what is loaded is whole,
or nothing is loaded."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ratchet.errors import CheckpointError
from ratchet.runs.checkpoints import Checkpoint, CheckpointStore
from ratchet.utils import failpoints


def write(directory: Path) -> None:
    """Two files, one of them deeper, with a failpoint between: what a learner and a loop write."""
    (directory / "run.json").write_text('{"position": 7}')
    failpoints.point("test.between_files")
    (directory / "policy").mkdir()
    (directory / "policy" / "state.safetensors").write_bytes(bytes(range(256)) * 40)


def save(store: CheckpointStore, step: int) -> Path:
    return store.save(step, write, {"step": step, "seconds": 0.1 + 0.2, "tags": ["a", None]})


def assert_whole(checkpoint: Checkpoint | None, step: int) -> None:
    assert checkpoint is not None
    assert checkpoint.step == step
    assert checkpoint.meta == {"step": step, "seconds": 0.1 + 0.2, "tags": ["a", None]}
    assert (checkpoint.path / "run.json").read_text() == '{"position": 7}'
    assert (checkpoint.path / "policy" / "state.safetensors").read_bytes() == bytes(range(256)) * 40


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.disarm()


# --- saving and loading


def test_a_save_comes_back(root: Path) -> None:
    store = CheckpointStore(root)
    assert save(store, 120) == root / "step-00000120"
    assert_whole(store.latest(), 120)
    assert_whole(CheckpointStore(root).load(120), 120)
    assert names(root) == {"step-00000120"}


def test_without_checkpoints_there_is_none(root: Path) -> None:
    store = CheckpointStore(root)
    assert store.latest() is None
    assert store.steps() == []
    assert not root.exists()  # a reader creates nothing
    with pytest.raises(CheckpointError, match=r"step 3 .*none"):
        store.load(3)


def test_only_the_newest_stay(root: Path) -> None:
    store = CheckpointStore(root, keep=2)
    for step in (5, 10, 99_999_999, 100_000_000):
        save(store, step)
    assert store.steps() == [99_999_999, 100_000_000]
    assert_whole(store.latest(), 100_000_000)
    with pytest.raises(CheckpointError, match=r"step 5 .*\[99999999, 100000000\]"):
        store.load(5)


def test_the_best_and_every_so_many_stay_too(root: Path) -> None:
    store = CheckpointStore(root, keep=1, keep_best=2, keep_every=4)
    scores = {1: 0.5, 2: 0.9, 3: None, 4: 0.1, 5: 0.9, 6: 0.2, 7: None, 8: 0.3, 9: 0.4}
    for step, score in scores.items():
        store.save(step, write, {"score": score})
    assert store.steps() == [2, 4, 5, 8, 9]


def test_a_damaged_one_does_not_count_as_kept(root: Path) -> None:
    store = CheckpointStore(root, keep=2)
    save(store, 1)
    (save(store, 2) / "run.json").unlink()
    save(store, 3)
    # two whole ones, and the damaged one is left for its owner to see
    assert store.steps() == [1, 2, 3]


def test_a_step_is_saved_once(root: Path) -> None:
    store = CheckpointStore(root)
    save(store, 1)
    with pytest.raises(CheckpointError, match="saved before"):
        save(store, 1)
    assert_whole(store.latest(), 1)


def test_replaced_metadata_leave_the_checkpoint_whole(root: Path) -> None:
    store = CheckpointStore(root)
    final = save(store, 1)
    store.replace_meta(1, {"score": 0.5})
    checkpoint = CheckpointStore(root).latest()
    assert checkpoint is not None
    assert checkpoint.meta == {"score": 0.5}
    assert (checkpoint.path / "run.json").read_text() == '{"position": 7}'
    assert names(root) == {final.name}
    with pytest.raises(CheckpointError, match="step-00000002"):
        store.replace_meta(2, {})


def test_meta_must_survive_json(root: Path) -> None:
    store = CheckpointStore(root)
    for meta in ({"pair": (1, 2)}, {"deep": [{"numbers": {1: 2}}]}, {"x": {1}}):
        with pytest.raises(AssertionError):
            store.save(1, write, meta)
    assert not root.exists()
    store.save(1, write, {"accuracy": float("nan"), "big": 2**100})
    meta = store.load(1).meta
    assert math.isnan(meta["accuracy"])
    assert meta["big"] == 2**100


def test_what_kills_left_is_swept_by_the_next_save_but_not_by_readers(root: Path) -> None:
    for name in (".tmp-3-abc", ".del-1-abc"):
        (root / name / "deep").mkdir(parents=True)
    store = CheckpointStore(root)
    assert store.latest() is None
    # it could be the draft of a run that is saving right now
    assert names(root) == {".tmp-3-abc", ".del-1-abc"}
    save(store, 4)
    assert names(root) == {"step-00000004"}


# --- crash points: a save of step 3 over steps 1 and 2, killed at each point that it passes

SAVING = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_checkpoints import save
from ratchet.utils import failpoints
from ratchet.runs.checkpoints import CheckpointStore
store = CheckpointStore(Path(sys.argv[2]), keep=2)
for step in range(1, int(sys.argv[4])):
    save(store, step)
failpoints.arm(sys.argv[3])
save(store, int(sys.argv[4]))
"""


def killed_save(root: Path, spec: str, *, step: int = 3) -> int:
    command = [sys.executable, "-c", SAVING, str(Path(__file__).parent), str(root), spec, str(step)]
    return subprocess.run(
        command, capture_output=True, check=False, stdin=subprocess.DEVNULL
    ).returncode


def crash_points() -> list[str]:
    return [
        "checkpoint.begin",
        "test.between_files",
        "checkpoint.after_write",
        "checkpoint.after_manifest",
        "checkpoint.after_sync",
        "checkpoint.after_rename",
        "checkpoint.published",
        "checkpoint.prune_renamed",
        "checkpoint.pruned",
    ]


def test_the_crash_points_are_all_that_a_save_passes(root: Path) -> None:
    store = CheckpointStore(root, keep=2)
    save(store, 1)
    save(store, 2)
    with failpoints.record() as passed:
        save(store, 3)
    assert passed == crash_points()
    assert max(Counter(passed).values()) == 1


@pytest.mark.medium
@pytest.mark.parametrize("point", crash_points())
def test_killed_anywhere_the_previous_or_the_new_one_is_whole(root: Path, point: str) -> None:
    assert killed_save(root, f"{point}:kill") == -9
    published = crash_points().index(point) >= crash_points().index("checkpoint.after_rename")
    store = CheckpointStore(root, keep=2)
    assert_whole(store.latest(), 3 if published else 2)
    save(store, 4)
    assert_whole(store.latest(), 4)
    assert names(root) == {"step-00000004", "step-00000003" if published else "step-00000002"}


def test_killed_in_the_first_save_there_is_none(root: Path) -> None:
    assert killed_save(root, "checkpoint.after_sync:kill", step=1) == -9
    assert [name[:5] for name in names(root)] == [".tmp-"]
    assert CheckpointStore(root).latest() is None


def test_the_saving_script_saves_when_nothing_is_armed(root: Path) -> None:
    assert killed_save(root, "") == 0
    assert_whole(CheckpointStore(root).latest(), 3)


def test_everything_is_flushed_before_it_gets_its_name_and_the_name_after(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill can't show a missing flush, only a power cut could; so the order of the calls is held
    here."""
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def flushing(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def renaming(path: Path, target: Path) -> Path:
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", flushing)
    monkeypatch.setattr(Path, "rename", renaming)
    save(CheckpointStore(root), 1)
    draft = next(Path(event) for event in events if Path(event).name.startswith(".tmp-"))
    files = [draft / name for name in ("manifest.json", "run.json", "policy/state.safetensors")]
    cut = events.index("rename")
    assert sorted(events[:3]) == sorted(map(str, files))
    assert events[3:cut] == [str(draft / "policy"), str(draft)]
    assert events[cut + 1 :] == [str(root)]


# --- a full disk, a bug


@pytest.mark.parametrize("point", crash_points()[:5])
@pytest.mark.parametrize(
    ("action", "error"), [("enospc", CheckpointError), ("raise", failpoints.InjectedFault)]
)
@pytest.mark.fault("P10")
def test_a_save_that_fails_leaves_nothing_and_harms_nothing(
    root: Path, point: str, action: str, error: type[Exception]
) -> None:
    store = CheckpointStore(root, keep=1)
    save(store, 1)
    failpoints.arm(f"{point}:{action}")
    with pytest.raises(error):
        save(store, 2)
    assert names(root) == {"step-00000001"}
    assert_whole(store.latest(), 1)
    save(store, 2)  # there is room again
    assert_whole(store.latest(), 2)


def test_a_full_disk_is_named(root: Path) -> None:
    failpoints.arm("checkpoint.after_write:enospc")
    with pytest.raises(CheckpointError, match=r"step 7 .*No space left"):
        save(CheckpointStore(root), 7)


def test_failing_to_prune_costs_nothing(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(root, keep=1)
    save(store, 1)
    failpoints.arm("checkpoint.prune_renamed:enospc")
    save(store, 2)
    assert "can't be deleted" in caplog.text
    assert_whole(store.latest(), 2)
    save(store, 3)
    assert names(root) == {"step-00000003"}


def test_a_root_that_cannot_be_made_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="can't be written"):
        save(CheckpointStore(tmp_path / "file" / "checkpoints"), 1)


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "x.pkl", "weights"])
@pytest.mark.fault("S1")
def test_formats_that_could_execute_are_refused_when_written(root: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="allowed formats"):
        CheckpointStore(root).save(1, lambda directory: (directory / name).touch(), {})
    assert names(root) == set()


def test_links_are_refused_when_written(root: Path) -> None:
    with pytest.raises(CheckpointError, match="link"):
        CheckpointStore(root).save(
            1, lambda directory: (directory / "a.json").symlink_to("/etc/hostname"), {}
        )


# --- damage


def flip_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def edit_manifest(step: Path, change: Callable[[dict], None], *, reseal: bool = True) -> None:
    """Changes the manifest's body; resealed, as an attacker would, with a fitting checksum."""
    path = step / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest["body"])
    if reseal:
        manifest["sha256"] = hashlib.sha256(
            json.dumps(manifest["body"], sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()
    path.write_text(json.dumps(manifest))


def rename_listed(old: str, new: str) -> Callable[[dict], None]:
    def change(body: dict) -> None:
        body["files"][new] = body["files"].pop(old)

    return change


def link_file(step: Path) -> None:
    shutil.move(step / "run.json", step.parent / "elsewhere.json")
    (step / "run.json").symlink_to(step.parent / "elsewhere.json")


def link_folder(step: Path) -> None:
    shutil.move(step / "policy", step.parent / "elsewhere")
    (step / "policy").symlink_to(step.parent / "elsewhere")


def link_step(step: Path) -> None:
    step.rename(step.parent / "elsewhere")
    step.symlink_to(step.parent / "elsewhere")


def fifo(step: Path) -> None:
    (step / "run.json").unlink()
    os.mkfifo(step / "run.json")


WEIGHTS = Path("policy") / "state.safetensors"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (lambda step: flip_bit(step / WEIGHTS, 5000), "checksum does not match"),
    "truncated": (lambda step: os.truncate(step / WEIGHTS, 100), "100 bytes instead of 10240"),
    "missing file": (lambda step: (step / "run.json").unlink(), "lacks run.json"),
    "unlisted file": (
        lambda step: (step / "more.json").write_text("{}"),
        "does not list: more.json",
    ),
    "pickle": (
        lambda step: (step / "model.pt").write_bytes(b"\x80"),
        "'model.pt' has none of the allowed",
    ),
    "no manifest": (lambda step: (step / "manifest.json").unlink(), "has no manifest.json"),
    "empty manifest": (lambda step: (step / "manifest.json").write_text(""), "is not JSON"),
    "manifest of another shape": (
        lambda step: (step / "manifest.json").write_text("[]"),
        "malformed",
    ),
    "manifest nested too deep": (
        lambda step: (step / "manifest.json").write_text("[" * 10**5),
        "is not JSON",
    ),
    "huge manifest": (
        lambda step: os.truncate(step / "manifest.json", 2**40),
        "not a plain file of at most",
    ),
    "flipped bit in meta": (
        lambda step: edit_manifest(step, lambda b: b["meta"].update(step=9), reseal=False),
        "own checksum",
    ),
    "other step": (lambda step: edit_manifest(step, lambda b: b.update(step=9)), "of step 9"),
    "later format": (lambda step: edit_manifest(step, lambda b: b.update(format=99)), "format 99"),
    "files is a list": (
        lambda step: edit_manifest(step, lambda b: b.update(files=list(b["files"]))),
        "malformed",
    ),
    "leads outside": (
        lambda step: edit_manifest(step, rename_listed("run.json", "../../x.json")),
        "could lead outside",
    ),
    "absolute": (
        lambda step: edit_manifest(step, rename_listed("run.json", "/etc/passwd")),
        "could lead outside",
    ),
    "linked file": (link_file, "'run.json' is a link"),
    "linked folder": (link_folder, "'policy' is a link"),
    "linked checkpoint": (
        link_step,
        "is a link, which another program may redirect: put the directory",
    ),
    "fifo": (fifo, "'run.json' is a link or a device"),
    "empty directory": (lambda step: (shutil.rmtree(step), step.mkdir()), "has no manifest.json"),
    "a file instead": (
        lambda step: (shutil.rmtree(step), step.write_text("")),
        "is not a directory",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.fault("P12", "S1", "S2")
def test_a_damaged_newest_is_passed_over_with_its_reason(
    root: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, reason = DAMAGE[kind]
    store = CheckpointStore(root, keep=2)
    save(store, 1)
    damaged = save(store, 2)
    damage(damaged)
    with caplog.at_level(logging.WARNING):
        assert_whole(store.latest(), 1)
    (record,) = caplog.records
    assert str(damaged) in record.getMessage()
    assert reason in record.getMessage()
    assert os.path.lexists(damaged)
    with pytest.raises(CheckpointError, match=r"step-00000002"):
        store.load(2)


def test_a_rejected_one_survives_later_saves_under_another_name(root: Path) -> None:
    first = CheckpointStore(root, keep=1)
    save(first, 1)
    failpoints.arm("checkpoint.prune_renamed:raise")
    with pytest.raises(failpoints.InjectedFault):
        save(first, 2)
    next(root.glob(".del-1-*")).rename(root / "step-00000001")
    flip_bit(root / "step-00000002" / WEIGHTS, 0)

    resumed = CheckpointStore(root, keep=1)
    assert_whole(resumed.latest(), 1)
    save(resumed, 2)  # the run comes to step 2 again
    save(resumed, 3)
    (rejected,) = root.glob("rejected-*")
    assert names(root) == {"step-00000003", rejected.name}
    assert rejected.name.startswith("rejected-00000002-")
    assert (rejected / WEIGHTS).read_bytes()[0] == 1


def test_hidden_entries_of_a_user_neither_go_nor_stop_a_save(root: Path) -> None:
    for name in (".tmp-mine", ".del-mine", ".tmp-3", ".tmp-5-mine"):
        (root / name).mkdir(parents=True)
    (root / ".tmp-6-abc").write_text("mine")
    (root / ".del-7-abc").symlink_to(root / ".tmp-mine")
    before = names(root)
    save(CheckpointStore(root), 4)
    assert names(root) == before | {"step-00000004"}


def test_tidying_removes_what_a_killed_save_left_and_never_what_is_still_needed(root: Path) -> None:
    generous = CheckpointStore(root, keep=3)
    for step in (1, 2, 3):
        save(generous, step)
    flip_bit(root / "step-00000003" / WEIGHTS, 0)  # of the right size: only its hash tells
    for leftover in (".tmp-4-0a1b", ".del-0-0a1b"):
        (root / leftover).mkdir()

    resumed = CheckpointStore(root, keep=1)
    assert_whole(resumed.latest(), 2)
    resumed.tidy()
    assert names(root) == {"step-00000002", "step-00000003"}
    assert_whole(resumed.latest(), 2)


def test_a_damaged_one_in_the_way_is_set_aside_even_if_nobody_looked(root: Path) -> None:
    (root / "step-00000002").mkdir(parents=True)
    store = CheckpointStore(root)
    save(store, 2)
    assert_whole(store.latest(), 2)
    assert len(list(root.glob("rejected-00000002-*"))) == 1


@pytest.mark.fault("P13")
def test_when_all_are_damaged_it_does_not_start_again_at_zero(root: Path) -> None:
    store = CheckpointStore(root, keep=2)
    for step in (1, 2):
        flip_bit(save(store, step) / WEIGHTS, 1)
    for reader in (store, CheckpointStore(root)):
        with pytest.raises(
            CheckpointError,
            match=r"damaged \(step-00000001, step-00000002\)\. The newest: .*step-00000002.*checksum",
        ):
            reader.latest()
    assert store.steps() == [1, 2]


def test_what_was_set_aside_still_counts_as_damaged(root: Path) -> None:
    (root / "rejected-00000002-0a1b2c3d").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="rejected-00000002-0a1b2c3d"):
        CheckpointStore(root).latest()


def test_other_names_are_no_checkpoints(root: Path) -> None:
    for name in ("step-1", "step-00000001x", "step_00000001", "xstep-00000001"):
        (root / name).mkdir(parents=True)
    assert CheckpointStore(root).steps() == []
    assert CheckpointStore(root).latest() is None
