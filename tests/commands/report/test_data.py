"""What the page is given: metrics by column, the table of rollouts, details of some, and a sample
of them for a file."""

import json
import math
import os

import numpy as np
import pytest
from commands.report.made_runs import grow, make_run

from ratchet.commands.report.metrics import MetricsFile
from ratchet.commands.report.predicted import compare_with_plan
from ratchet.commands.report.runs import RunReader, find_runs, flatten, open_runs
from ratchet.commands.report.texts import TokenTexts
from ratchet.commands.report.wire_format import pack
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer, character_tokenizer
from ratchet.errors import DataError, RunDirectoryError

DTYPES = {
    "u1": "uint8",
    "u2": "uint16",
    "i4": "int32",
    "u4": "uint32",
    "f4": "float32",
    "f8": "float64",
}


@pytest.fixture
def reader(tmp_path):
    return RunReader(make_run(tmp_path / "run").path)


def unpacked(data):
    length = int.from_bytes(data[:4], "little")
    header = json.loads(data[4 : 4 + length])
    arrays = {
        name: np.frombuffer(data, DTYPES[kind], count, 4 + length + offset)
        for name, (kind, offset, count) in header.pop("arrays").items()
    }
    return header, arrays


def test_arrays_are_packed_where_typed_arrays_may_begin():
    arrays = {
        "a": np.array([1, 2, 3], np.uint8),
        "b": np.array([1.5, math.nan]),
        "c": np.array([], np.int32),
    }
    packed = pack({"x": "ü"}, arrays)
    header, found = unpacked(packed)
    assert header == {"x": "ü"}
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    length = int.from_bytes(packed[:4], "little")
    assert (4 + length) % 8 == 0
    assert all(place[1] % 8 == 0 for place in json.loads(packed[4 : 4 + length])["arrays"].values())


# --- a run


def test_what_was_predicted_stands_beside_what_was_measured(tmp_path):
    planned = {"steps": 3, "step_s": 2.0, "processor_s": 1.0}
    plan = {
        "peak_bytes": 3 * 2**20,
        "stages": [{"stage": "sft", **planned}, {"stage": "rl", "steps": 9}],
    }
    seconds = [9.0, 4.0, 2.0, 7.0]  # the first warms up; the last is of the other stage
    rows = [
        {"step": step, "time/step_s": s, "time/processor_s": s / 2}
        for step, s in enumerate(seconds, 1)
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"step": 0}, *rows]))
    memory, step, processor = compare_with_plan(
        plan, MetricsFile(path).read_times(), {"peak_mib": 4.0}
    )
    assert memory == {"what": "peak memory", "unit": "MiB", "predicted": 3.0, "measured": 4.0}
    assert step == {"what": "sft: a step", "unit": "s", "predicted": 2.0, "measured": 3.0}
    assert (processor["predicted"], processor["measured"]) == (1.0, 1.5)
    empty = MetricsFile(tmp_path / "none").read_times()
    assert [line["measured"] for line in compare_with_plan(plan, empty, None)] == [None] * 3


def test_a_recipe_is_flat_and_its_stages_go_by_name():
    config = {
        "seed": 0,
        "stages": [{"name": "rl", "optimizer": {"lr": 1}}],
        "list": [1, 2],
        "empty": {},
    }
    expected = {
        "seed": 0,
        "stages.rl.name": "rl",
        "stages.rl.optimizer.lr": 1,
        "list": [1, 2],
        "empty": {},
    }
    assert flatten(config) == expected


def test_a_run_is_finished_running_or_stopped(reader):
    directory = reader.directory
    assert reader.read_state() == "stopped"
    directory.status.write_text(
        json.dumps({"pid": os.getpid(), "host": os.uname().nodename, "socket": ""})
    )
    assert reader.read_state() == "running"
    directory.status.write_text(
        json.dumps({"pid": 2**22 + 1, "host": os.uname().nodename, "socket": ""})
    )
    assert reader.read_state() == "stopped"
    directory.status.write_text(json.dumps({"pid": 1, "host": "elsewhere", "socket": ""}))
    assert reader.read_state() == "running"
    directory.summary.write_text("{}")
    assert reader.read_state() == "finished"


def test_what_became_of_prompts(reader):
    assert reader.count_prompts() == {"issued": 3, "trained": 1}
    with reader.directory.ledger.open("a") as file:
        file.write('{"event": "trained", "id": "\\"event\\": \\"again\\""}\n{"event": "filt')
    assert reader.count_prompts() == {"issued": 3, "trained": 2}
    with reader.directory.ledger.open("a") as file:
        file.write('ered", "id": "x"}\n')
    assert reader.count_prompts() == {"issued": 3, "trained": 2, "filtered": 1}
    # cut where a checkpoint was
    reader.directory.ledger.write_text('{"event": "issued", "id": "x"}\n')
    assert reader.count_prompts() == {"issued": 1}


def test_what_sentinels_said(reader):
    assert reader.read_facts()["alarms"] == [
        {"step": 3, "sentinel": "entropy", "message": "step 3: good"}
    ]
    (reader.directory.sentinels / "step-00000004-x.json").write_text("{")  # just being written
    assert len(reader.read_alarms()) == 1


def test_runs_are_found_and_named(tmp_path):
    for place in ("a", "more/b", "more/a"):
        make_run(tmp_path / place, steps=1)
    assert [run.name for run in find_runs(tmp_path)] == ["a", "more/a", "more/b"]
    assert [run.name for run in find_runs(tmp_path / "a")] == ["a"]
    paths = [tmp_path / "a", tmp_path / "more" / "a", tmp_path / "more" / "b"]
    assert [run.name for run in open_runs(paths)] == [str(paths[0]), str(paths[1]), "b"]
    with pytest.raises(RunDirectoryError, match="holds no run"):
        open_runs([tmp_path / "more"])
    with pytest.raises(RunDirectoryError, match="there is no directory"):
        find_runs(tmp_path / "nothing")


def test_a_version_changes_with_the_run(reader):
    before = reader.read_version()
    assert reader.read_version() == before
    grow(reader.directory, [7])
    after = reader.read_version()
    assert after["metrics"] > before["metrics"]
    assert after["record"] != before["record"]


# --- the table of rollouts


def test_every_rollout_has_its_numbers_and_words(reader):
    header, arrays = unpacked(reader.rollouts.pack_columns())
    assert header["after"] == 0
    assert header["steps"]["6"] == [8, 2, 2, {"policy": "weights 6"}]
    assert len(arrays["step"]) == 48
    outcomes = [header["words"]["outcome"][code] for code in arrays["outcome"][:8]]
    assert outcomes == ["scored", "scored", "failed", "truncated"] + ["scored"] * 4
    assert [header["words"]["tag"][code] for code in arrays["tag"][[0, 4]]] == ["easy", "hard"]
    assert header["words"]["failure"][arrays["failure"][0]] == ""
    np.testing.assert_array_equal(
        arrays["reward"][:5], np.array([1, 0, math.nan, 0, 0], np.float32)
    )
    np.testing.assert_array_equal(arrays["truncated"][:4], [0, 0, 0, 1])
    assert {arrays[name].dtype.name for name in ("step", "length", "task", "outcome")} == {"uint8"}
    assert arrays["reward"].dtype == np.float32


@pytest.mark.medium
def test_only_new_files_are_sent_to_who_knows_the_others(reader):
    known = unpacked(reader.rollouts.pack_columns())[0]["files"]
    grow(reader.directory, [7, 8])
    header, arrays = unpacked(reader.rollouts.pack_columns(known))
    assert header["after"] == 1
    assert sorted(set(arrays["step"])) == [7, 8]
    # which was removed meanwhile
    header, arrays = unpacked(reader.rollouts.pack_columns(["00000001-00000099.parquet"]))
    assert header["after"] == 0
    assert len(arrays["step"]) == 64


def test_of_a_long_run_every_few_steps(reader):
    _, arrays = unpacked(reader.rollouts.pack_columns(every=4))
    assert sorted(set(arrays["step"])) == [1, 5]


def test_a_run_without_a_record(tmp_path):
    directory = make_run(tmp_path / "run", steps=1)
    for path in directory.steps.iterdir():
        path.unlink()
    rollouts = RunReader(directory.path).rollouts
    header, arrays = unpacked(rollouts.pack_columns())
    assert (header["files"], len(arrays["task"])) == ([], 0)
    assert rollouts.sample(10, 1000) == []
    assert rollouts.search("x", limit=5) == ([], None)


def test_a_damaged_file_is_named(reader):
    path = next(reader.directory.steps.glob("*.parquet"))
    path.write_bytes(b"nothing")
    with pytest.raises(DataError, match=f"{path.name} can't be read"):
        reader.rollouts.pack_columns()


# --- one rollout


def test_details_of_a_rollout(reader):
    first, failed = reader.rollouts.read_details(3, [0, 2])
    tokens = first["tokens"]
    assert "".join(tokens["text"]) == "add 0good 3.0"
    written = [i for i, owner in enumerate(tokens["owner"]) if owner == 1]
    assert [tokens["ratio"][i] for i in written] == pytest.approx(
        [math.exp(0.1)] * len(written), rel=1e-4
    )
    assert {tokens["version"][i] for i in written} == {2}
    assert [message["role"] for message in first["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert first["messages"][2]["tool_calls"][0]["name"] == "calculator"
    assert first["reward_parts"] == {"right": 1.0, "form": 0.0}
    assert failed["failure_detail"] == "Traceback"
    assert failed["tokens"]["trained"] == [False] * len(failed["tokens"]["id"])
    assert "advantage" not in failed["tokens"]
    json.dumps([first, failed], allow_nan=False)


def test_loss_shares_of_a_step_sum_to_one(reader):
    details = reader.rollouts.read_details(3, list(range(8)))
    assert sum(sum(detail["tokens"].get("share", [0])) for detail in details) == pytest.approx(
        1.0, rel=1e-3
    )


def test_what_is_not_in_the_record_is_refused(reader):
    with pytest.raises(DataError, match="step 9 is not in the record"):
        reader.rollouts.read_details(9, [0])
    with pytest.raises(DataError, match="8 rollouts"):
        reader.rollouts.read_details(3, [8])


def test_search_finds_messages_the_newest_first(reader):
    grow(reader.directory, [7], say="rare")
    assert reader.rollouts.search("RARE 7.1", limit=9) == ([(7, 1), (7, 5)], None)
    assert reader.rollouts.search("good 4.2", limit=9) == ([(4, 2), (4, 6)], None)
    assert reader.rollouts.search("add 0", limit=3) == ([(7, 0), (7, 1), (7, 2)], 7)


@pytest.mark.medium
def test_a_sample_is_whole_groups_of_the_same_tasks(tmp_path):
    runs = [RunReader(make_run(tmp_path / name).path) for name in "ab"]
    samples = [run.rollouts.sample(12, 10**6) for run in runs]
    chosen = [
        [(d["facts"]["step"], d["row_index"], d["facts"]["task"]) for d in sample]
        for sample in samples
    ]
    assert chosen[0] == chosen[1]
    # the first, the last and one between
    assert sorted({step for step, _, _ in chosen[0]}) == [1, 3, 6]
    assert len({task for _, _, task in chosen[0]}) == 1
    assert all(sum(1 for s, _, _ in chosen[0] if s == step) == 4 for step in (1, 3, 6))


@pytest.mark.medium
def test_a_sample_has_no_more_tokens_than_it_may(reader):
    length = sum(len(detail["tokens"]["id"]) for detail in reader.rollouts.sample(100, 120))
    assert 0 < length <= 120


# --- texts of tokens


def test_texts_of_tokens_join_to_the_text():
    tokenizer = byte_tokenizer()
    text = " a\u00fc\U0001f600b"
    texts = TokenTexts(tokenizer)(tokenizer.encode(text))
    assert "".join(texts) == text
    assert texts == [" ", "a", "\u00fc", "", "\U0001f600", "", "", "", "b"]


def test_a_broken_character_and_a_special_token_are_shown():
    tokenizer = byte_tokenizer()
    assert tokenizer.eos_ids
    shown = TokenTexts(tokenizer)(
        [*tokenizer.encode("\u00fc")[:1], *tokenizer.encode("x"), tokenizer.eos_ids[0]]
    )
    assert shown == ["\ufffd", "x", "<eos>"]


def test_an_alphabet_without_letters_and_no_tokenizer_at_all():
    digits = character_tokenizer("+=")
    assert TokenTexts(digits)(digits.encode("+=+")) == ["+", "=", "+"]
    assert TokenTexts(None)([3, 14]) == ["[3]", "[14]"]
