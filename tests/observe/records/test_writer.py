"""What a record holds, that it comes back bit for bit, and that nothing that happens to a process
or a disk harms it."""

import json
import logging
import os
from base64 import b64encode
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from ratchet.allowed_tokens import AllowedTokens
from ratchet.config.schema import RecordConfig
from ratchet.data.packing import pack
from ratchet.errors import DataError
from ratchet.observe.records import writer as recording
from ratchet.observe.records.groups import read_groups
from ratchet.observe.records.json_text import format_json
from ratchet.observe.records.media import (
    MEDIA,
    collect_sources,
    parse_placeholder,
    restore_value,
    shorten_value,
)
from ratchet.observe.records.reader import INDEX, Record, RecordFile, StepFacts
from ratchet.observe.records.schema import SCALARS, SCHEMA
from ratchet.observe.records.table import build_table
from ratchet.observe.records.writer import MAX_STEPS, Recorder
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.types import (
    Cancelled,
    Failed,
    Group,
    Medium,
    Message,
    Part,
    PlacedMedium,
    Scored,
    Task,
    ToolCall,
    Truncated,
    Turn,
    Unjudged,
)


def some_groups() -> list[Group]:
    """One of everything that a group can hold."""
    said = (
        Message("user", (Part("text", "look"), Part("image", "sha256:1"))),
        Message(
            "assistant",
            "half \ud83d a character",
            (ToolCall("c1", "search", {"query": "ü", "n": 2}),),
        ),
        Message("tool", "found", tool_call_id="c1"),
    )
    turns = (
        Turn(2, 3, 0.1, "s", False, cut=True),
        Turn(4, 5, None, "", True, malformed_call=True, malformed_thinking=False),
    )
    first = replace(
        make_trajectory([1, 2], [3, 4, 5], reward=0.1, logprobs=[-0.1, -0.2, -1e-8], version=3),
        turns=turns,
        messages=said,
        metrics={"turns": 2.0, "nan": float("nan")},
        extras={"odd": {1, 2}},
        media=(PlacedMedium(0, Medium("xxh3:1", "image", 1, {}, b"x")),),
        log_kept_mass=np.asarray([0, 0, -0.5, 0, 0], np.float32),
        routes=np.arange(20, dtype=np.int16).reshape(5, 2, 2),
        allowed=AllowedTokens(
            np.asarray([-1, -1, 1, 0, 1], np.int32), np.asarray([[1, 2], [3, 255]], np.uint8)
        ),
    )
    ends = (
        Scored(0.3, {"a": 0.1, "b": 0.2}),
        Truncated(None),
        Truncated(0.5, {"a": 0.5}),
        Failed("timeout", "Traceback\n..."),
        Cancelled("late"),
        Unjudged(truncated=True),
        None,
    )
    rows = [
        make_trajectory([1], [7] * (1 + i), outcome=end, attempt=1 + i, version=2)
        for i, end in enumerate(ends)
    ]
    greedy = make_trajectory([1], [9], reward=1.0, use="baseline", temperature=0.5)
    task = Task(
        "t",
        (Message("user", "look"),),
        answer=["x", 1],
        environment="maze",
        seed=7,
        tag="b",
        meta={"level": 2},
    )
    return [
        make_group("g/0", [make_trajectory([6], [], outcome=Failed("x"))]),
        Group("g/1", task, (first, *rows, greedy), n_uses=2),
        make_group("g/2", [make_trajectory([1, 2, 3], [4], reward=2.0, version=4)], tag="a"),
    ]


def columned(groups):
    batch = pack(groups)
    ramp = torch.arange(batch.n_tokens, dtype=torch.float64)
    return batch.fill_tokens(
        advantages=ramp / 3, old_logprobs=-ramp.float(), teacher_ids=torch.zeros(batch.n_tokens, 2)
    )


def ones(batch):
    return torch.ones(batch.n_tokens, dtype=torch.float64)


def table(step=5, groups=None, **more):
    groups = some_groups() if groups is None else groups
    batch = columned(groups)
    return build_table(step, "rl", groups, batch, ones(batch).numpy(), **more)


def assert_same_batch(a, b):
    for name in (
        "tokens_T",
        "turn_rewards_T",
        "state_T",
        "trainable_T",
        "rollout_logprobs_T",
        "log_kept_mass_T",
        "versions_T",
    ):
        assert torch.equal(getattr(a, name).nan_to_num(-9), getattr(b, name).nan_to_num(-9)), name
    assert torch.equal(a.rewards_S.nan_to_num(-9), b.rewards_S.nan_to_num(-9))
    assert (a.group_ids, a.tags) == (b.group_ids, b.tags)
    assert {k: v.nan_to_num(-9).tolist() for k, v in a.sequence_columns.items()} == {
        k: v.nan_to_num(-9).tolist() for k, v in b.sequence_columns.items()
    }
    assert torch.equal(a.need("routes"), b.need("routes"))
    assert torch.equal(a.need("allowed"), b.need("allowed"))
    assert torch.equal(a.masks_MB, b.masks_MB)


def test_groups_come_back_as_they_were():
    groups = some_groups()
    back = read_groups(table(), collect_sources(groups, range(len(groups))))
    assert_same_batch(pack(groups), pack(back))
    for was, found in zip(groups, back, strict=True):
        assert (found.id, found.task, found.n_uses) == (was.id, was.task, was.n_uses)
        for a, b in zip(was.trajectories, found.trajectories, strict=True):
            assert (a.attempt, a.use, a.temperature, a.turns, a.outcome) == (
                b.attempt,
                b.use,
                b.temperature,
                b.turns,
                b.outcome,
            )
            assert repr(a.metrics) == repr(b.metrics)
            assert b.extras == json.loads(format_json(dict(a.extras)))
            for name in ("tokens", "owner", "trainable", "rollout_logprobs", "versions"):
                assert getattr(a, name).dtype == getattr(b, name).dtype
    said = back[1].trajectories[0].messages
    assert said[0] == groups[1].trajectories[0].messages[0]
    assert said[1].text == "half \\ud83d a character"
    assert said[1].tool_calls == (ToolCall("c1", "search", {"query": "ü", "n": 2}),)


class Unspeakable:
    def __repr__(self):
        raise RuntimeError("no")


def test_any_result_of_an_agent_can_be_recorded():
    cycle: list = []
    cycle.append(cycle)
    deep: dict = {}
    for _ in range(100_000):
        deep = {"deeper": deep}
    results = {
        "cycle": cycle,
        "digits": 10**5000,
        "tuple": {(1, 2): 3},
        "deep": deep,
        "odd": Unspeakable(),
        ("a", 1): "é",
    }
    for name, result in results.items():
        assert isinstance(json.loads(format_json({name: result, "other": [1.5]})), dict)
        json.loads(format_json(result))
    described = json.loads(format_json(results))
    assert described["cycle"] == "[[...]]"
    assert described["digits"] == "<int>"
    assert described["tuple"] == "{(1, 2): 3}"
    assert described["odd"] == "<Unspeakable>"
    assert described["('a', 1)"] == "é"


def test_each_row_has_what_the_learner_made_of_it_and_nothing_where_it_counts_for_nothing():
    rows = table().to_pylist()
    by_outcome = {row["outcome"]: row for row in rows if row["group"] == "g/1"}
    first, failed = rows[1], by_outcome["failed"]
    assert first["advantages"] == [np.float32(i / 3) for i in range(5)]
    assert first["advantage"] == pytest.approx((2 + 3 + 4) / 9)
    assert (first["trained_tokens"], first["weight"], first["old_logprobs"][:2]) == (
        3,
        5.0,
        [-0.0, -1.0],
    )
    assert (first["oldest_version"], first["newest_version"], first["generated_tokens"]) == (
        3,
        3,
        3,
    )
    assert first["values"] is None
    assert first["extras"] == '{"odd": "{1, 2}"}'
    assert failed["advantages"] is None
    assert (failed["failure"], failed["failure_detail"]) == ("timeout", "Traceback\n...")
    # Rows that count follow one another in the batch, whatever lies between them.
    assert rows[-1]["advantages"][0] == np.float32((columned(some_groups()).n_tokens - 4) / 3)


def test_a_sample_of_the_groups_has_its_own_columns():
    whole, some = table().to_pylist(), table(group_indices=[2]).to_pylist()
    assert repr(some) == repr(whole[-1:])


def record(directory, steps, config=None, *, keep_through=0, groups=None, in_background=True):
    made = Recorder(
        config or RecordConfig(),
        directory,
        seed=3,
        keep_through=keep_through,
        in_background=in_background,
    )
    for step in steps:
        made.add(step, "rl", groups or some_groups(), columned(groups or some_groups()), ones, {})
    made.close()
    return Record(directory)


@pytest.mark.medium
def test_the_bytes_are_the_same_whoever_makes_the_tables(tmp_path):
    """Of more steps than a file has."""
    for name, in_background in {"thread": True, "training": False}.items():
        record(tmp_path / name, range(1, MAX_STEPS + 3), in_background=in_background)
    thread, training = (
        {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in (tmp_path / name).rglob("*")
            if path.is_file()
        }
        for name in ("thread", "training")
    )
    assert (
        len([path for path in thread if path.parent.name != MEDIA and path.suffix == ".parquet"])
        == 2
    )
    assert thread == training


def test_any_arrow_tool_reads_the_files(tmp_path):
    record(tmp_path, [1, 2])
    (file,) = tmp_path.glob("*.parquet")
    assert pq.read_schema(file).equals(SCHEMA)
    assert pq.read_table(file, columns=["step", "reward"]).num_rows == 22


def test_scalars_of_all_steps_and_all_of_one(tmp_path):
    found = record(tmp_path, range(1, 4))
    assert found.table().schema.names == list(SCALARS)
    assert found.table(["step"]).column("step").to_pylist() == [
        step for step in (1, 2, 3) for _ in range(11)
    ]
    assert repr(found.step(2).to_pylist()) == repr(table(step=2).to_pylist())
    assert len(found.groups(2)) == 3
    with pytest.raises(DataError, match=r"step 9 is not in the record .* it has 1-3"):
        found.groups(9)


def test_a_file_that_lacks_a_column_is_refused(tmp_path):
    whole = record(tmp_path, [1])
    (file,) = tmp_path.glob("*.parquet")
    pq.write_table(pq.read_table(file).drop_columns(["reward"]), file)
    with pytest.raises(DataError, match=r"parquet lacks column reward"):
        whole.table()


@pytest.mark.medium
def test_a_run_that_goes_on_has_the_bytes_of_one_that_was_not_interrupted(tmp_path):
    def session(directory, steps, after=0):
        made = Recorder(RecordConfig(), directory, seed=3, keep_through=after)
        for step in steps:
            made.add(step, "rl", some_groups(), columned(some_groups()), ones, {})
            if step % 2 == 0:
                made.flush()  # as before a checkpoint
        made.close()

    session(tmp_path / "whole", range(1, 6))
    session(tmp_path / "broken", range(1, 4))  # and its file of step 3 is not a checkpoint's
    (tmp_path / "broken" / ".00000004-00000004.parquet.partial").write_bytes(b"PAR1 torn")
    (tmp_path / "broken" / "00000009-00000009.parquet").write_bytes(b"never indexed")
    with (tmp_path / "broken" / INDEX).open("a") as index:
        index.write('{"name": "torn')
    session(tmp_path / "broken", range(3, 6), after=2)
    (tmp_path / "broken" / MEDIA / "00000009-00000009.parquet").write_bytes(b"never indexed either")
    session(tmp_path / "broken", range(6, 7), after=5)
    session(tmp_path / "whole", range(6, 7), after=5)
    files = [files_in(tmp_path / name) for name in ("whole", "broken")]
    assert files[0] == files[1]
    assert sum(path.parent.name == MEDIA for path in files[0]) == 4


def test_an_index_that_is_lost_under_a_run_is_written_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recording, "MAX_STEPS", 1)
    whole = record(tmp_path / "whole", range(1, 5))
    made = Recorder(RecordConfig(), tmp_path / "run", seed=0, in_background=False)
    for step in range(1, 5):
        made.add(step, "rl", some_groups(), columned(some_groups()), ones, {})
        made.flush()
        if step == 2:
            (tmp_path / "run" / INDEX).unlink()
    made.close()
    assert (tmp_path / "run" / INDEX).read_bytes() == (tmp_path / "whole" / INDEX).read_bytes()
    assert list(whole.steps) == [1, 2, 3, 4]
    assert caplog.text.count("was changed or deleted by another program") == 1


@pytest.mark.parametrize("n_kept_lines", [0, 2])
def test_no_resumption_removes_steps_of_which_the_index_lost_its_lines(
    n_kept_lines, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(recording, "MAX_STEPS", 1)
    record(tmp_path, range(1, 6))
    before = files_in(tmp_path)
    lines = (tmp_path / INDEX).read_text().splitlines(keepends=True)
    (tmp_path / INDEX).write_text("".join(lines[5 - n_kept_lines :]))
    Recorder(RecordConfig(), tmp_path, seed=0, keep_through=4).close()
    lost = [path for path in before if path.name[:8] == "00000005" or path.name == INDEX]
    after = files_in(tmp_path)
    assert {path: after.get(path) for path in before if path not in lost} == {
        path: content for path, content in before.items() if path not in lost
    }
    assert not any(path.name[:8] == "00000005" for path in after)
    assert "has lost its lines of 00000001-00000001.parquet" in caplog.text


def test_tables_of_a_user_beside_the_record_stay(tmp_path):
    Recorder(RecordConfig(), tmp_path, seed=3).close()
    for name in ("mine.parquet", "mine.partial"):
        (tmp_path / name).write_text("mine")
    Recorder(RecordConfig(), tmp_path, seed=3, keep_through=1).close()
    assert {path.name for path in tmp_path.iterdir()} == {"mine.parquet", "mine.partial", INDEX}


def files_in(directory):
    return {
        path.relative_to(directory): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def picture(number, size=1):
    """(part, medium) of the same source, which is not an image: nothing here looks into it."""
    source = bytes([number]) * size
    part = Part("image", f"data:image/png;base64,{b64encode(source).decode()}")
    return part, Medium(
        f"{number} prepared", "image", 2, {"pixel_values": np.ones((4, 3), np.float32)}, source
    )


def with_pictures(size=1):
    """Two attempts at a task with one image, of which the second was shown another; and one of an
    image in a file."""
    (first, cat), (second, dog), (_, far) = (picture(number, size) for number in (1, 2, 3))
    asked = Message("user", (Part("text", "what?"), first))
    rows = [
        replace(
            make_trajectory([1, 7, 7, 2], [3], reward=1.0, attempt=0, version=1),
            messages=(asked, Message("assistant", "a")),
            media=(PlacedMedium(1, cat),),
        ),
        replace(
            make_trajectory([1, 7, 7, 2, 7, 7], [3], reward=0.0, attempt=1, version=1),
            messages=(asked, Message("assistant", "a"), Message("user", (second,))),
            media=(PlacedMedium(1, cat), PlacedMedium(4, dog)),
        ),
    ]
    filed = replace(
        make_trajectory([7, 7], [3], reward=1.0, version=1),
        messages=(Message("user", (Part("image", "far/away.png"),)),),
        media=(PlacedMedium(0, far),),
    )
    return [Group("g/0", Task("t/0", (asked,)), tuple(rows)), make_group("g/1", [filed])]


def recorded_pictures(directory, steps=1, *, size=1, **keys):
    recorder = Recorder(RecordConfig(**keys), directory, seed=0)
    for step in range(1, steps + 1):
        recorder.add(step, "rl", with_pictures(size), columned(with_pictures(size)), ones, {})
        recorder.flush()
    recorder.close()
    return Record(directory)


def test_media_are_kept_once_as_they_came_and_come_back(tmp_path):
    found, was = recorded_pictures(tmp_path), with_pictures()
    assert sorted(found.media(1).values()) == [b"\1", b"\2", b"\3"]
    back = found.groups(1)
    for a, b in zip(was, back, strict=True):
        # which has no messages of its own
        assert a.task.messages == b.task.messages or a.id == "g/1"
        for one, other in zip(a.trajectories, b.trajectories, strict=True):
            assert one.messages == other.messages
            assert [(p.start, p.medium.key, p.medium.span, p.medium.source) for p in one.media] == [
                (p.start, p.medium.key, p.medium.span, p.medium.source) for p in other.media
            ]
    first, second = back[0].trajectories
    assert first.media[0].medium is second.media[0].medium
    row = found.step(1).to_pylist()[1]
    assert [part["value"] for message in row["messages"] for part in message["parts"] or ()][
        1
    ].startswith("media:")
    assert [(one["start"], one["span"], one["kind"]) for one in row["media"]] == [
        (1, 2, "image"),
        (4, 2, "image"),
    ]


def test_a_medium_that_is_gone_or_was_changed_says_so(tmp_path):
    found = recorded_pictures(tmp_path)
    (file,) = (tmp_path / MEDIA).iterdir()
    content = file.read_bytes()
    file.write_bytes(content.replace(b"\1", b"\4", 1))
    with pytest.raises(DataError, match="was changed since it was recorded"):
        found.groups(1)
    file.unlink()
    with pytest.raises(DataError, match=r"media/00000001-00000001\.parquet can.t be read"):
        found.groups(1)
    with pytest.raises(
        DataError, match=r"medium \w+ is not in the record: copy the run's steps/media/ too"
    ):
        read_groups(found.step(1))
    assert found.table(["reward"]).num_rows == 3  # what has no need of them goes on


@pytest.mark.medium
def test_media_go_with_the_oldest_files(tmp_path):
    found = recorded_pictures(tmp_path, 5, size=2**20, max_gib=8 / 2**10)
    assert [file.name for file in found.files] == [
        "00000004-00000004.parquet",
        "00000005-00000005.parquet",
    ]
    assert sorted(path.name for path in (tmp_path / MEDIA).iterdir()) == [
        file.name for file in found.files
    ]
    assert all(file.media_size > 3 * 2**20 for file in found.files)


def test_a_step_without_media_has_no_file_of_them(tmp_path):
    made = Recorder(RecordConfig(), tmp_path, seed=0)
    plain = [make_group("g/0", [make_trajectory([1], [2], reward=1.0)])]
    made.add(1, "rl", plain, pack(plain), ones, {})
    made.close()
    assert Record(tmp_path).media(1) == {}
    assert "media" not in (tmp_path / INDEX).read_text()
    assert not (tmp_path / MEDIA).exists()


def test_only_a_url_that_comes_back_the_same_is_taken_out():
    for value in (
        "data:image/png;base64,AA",
        "data:image/png;base64,A A=",
        "data:image/png,raw",
        "data:",
        "media:a;b/c",
        "x.png",
    ):
        assert shorten_value(Part("image", value)) == value
    assert shorten_value(Part("text", "data:image/png;base64,AQ==")) == "data:image/png;base64,AQ=="
    short = shorten_value(Part("image", "data:image/png;base64,AQ=="))
    assert (
        restore_value("image", short, {parse_placeholder(short): b"\1"})
        == "data:image/png;base64,AQ=="
    )


@pytest.mark.parametrize("name", [INDEX, "00000001-00000003.parquet"])
def test_a_pipe_in_a_record_is_not_waited_for(tmp_path, name, caplog):
    record(tmp_path, range(1, 4))
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    for read in (Record.table, lambda found: found.step(1)):
        with pytest.raises(DataError, match="it is a pipe"):
            read(Record(tmp_path))
    Recorder(RecordConfig(), tmp_path, seed=0, keep_through=3).close()
    assert ("no longer recorded" in caplog.text) == (name == INDEX)


def test_a_bit_that_changed_is_found(tmp_path):
    found = record(tmp_path, [1, 2])
    (file,) = tmp_path.glob("*.parquet")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match="was changed since it was recorded"):
        found.step(1)
    index = tmp_path / INDEX
    index.write_bytes(index.read_bytes().replace(b'"rows": 11', b'"rows": 12', 1))
    with pytest.raises(DataError, match="line 1 was changed"):
        Record(tmp_path)


def test_an_index_that_names_a_file_elsewhere_is_refused(tmp_path, caplog):
    (tmp_path / "mine.parquet").write_text("mine")
    facts = (StepFacts(1, "rl", 1, 1, 1),)
    entries = (
        RecordFile(name, 2**40, "", facts)
        for name in ("../mine.parquet", "00000001-00000001.parquet")
    )
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / INDEX).write_text("".join(entry.line() for entry in entries))
    recorder = Recorder(RecordConfig(max_gib=1), tmp_path / "steps", seed=3, keep_through=9)
    recorder.add(10, "rl", some_groups(), columned(some_groups()), ones, {})
    recorder.close()
    assert "'../mine.parquet' is not a name of a record file" in caplog.text
    assert (tmp_path / "mine.parquet").read_text() == "mine"


def test_a_sample_is_the_same_each_time_and_is_no_whole_step(tmp_path):
    config = RecordConfig(groups=1)
    a, b = (record(tmp_path / name, range(1, 9), config) for name in "ab")
    assert a.table(["group"]) == b.table(["group"])
    assert len(set(a.table(["group"]).column("group").to_pylist())) > 1
    assert (a.steps[1].groups, a.steps[1].drawn) == (1, 3)
    with pytest.raises(DataError, match=r"1 of its 3 groups in the record \(record.groups\)"):
        a.groups(1)


def test_every_so_many_steps_or_none(tmp_path):
    assert list(record(tmp_path / "a", range(1, 8), RecordConfig(every=3)).steps) == [3, 6]
    record(tmp_path / "b", range(1, 8), RecordConfig(every=0))
    assert not (tmp_path / "b").exists()


def test_a_record_keeps_within_its_size_and_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "MAX_STEPS", 1)
    size = record(tmp_path / "one", [1]).files[0].size
    found = record(tmp_path / "all", range(1, 8), RecordConfig(max_gib=3.5 * size / 2**30))
    assert list(found.steps) == [5, 6, 7]
    assert len(list((tmp_path / "all").glob("*.parquet"))) == 3
    assert list(record(tmp_path / "few", range(1, 4), RecordConfig(max_gib=1e-9)).steps) == [3]


def test_a_disk_that_fails_ends_the_record_with_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recording, "MAX_STEPS", 1)

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recording, "sync", full)
    with caplog.at_level(logging.WARNING):
        assert record(tmp_path, range(1, 5)).files == []
    assert len([entry for entry in caplog.records if "no longer recorded" in entry.message]) == 1


def test_a_step_without_trajectories_is_a_step(tmp_path):
    made = Recorder(RecordConfig(), tmp_path, seed=0)
    for step, groups in ((1, []), (2, some_groups())):
        made.add(step, "rl", groups, columned(groups), ones, {})
    made.close()
    assert Record(tmp_path).groups(1) == []
    assert len(Record(tmp_path).groups(2)) == 3
