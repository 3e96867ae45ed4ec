"""The record of what became of every prompt."""

import pytest
from experience.ledger_faults import find_ledger_faults

from ratchet.errors import CheckpointError
from ratchet.experience.sources.prompt_ledger import PromptLedger, read_ledger


def test_it_is_cut_where_a_checkpoint_ends_and_goes_on_there(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = PromptLedger(path)
    ledger.note("issued", ["s/0", "s/1"], version=0)
    ledger.note("trained", ["s/0"], step=0)
    offset = ledger.sync()
    ledger.note("trained", ["s/1"], step=1)
    ledger.close()
    again = PromptLedger(path)
    again.cut(offset)
    again.note("filtered", ["s/1"], reason="no training signal")
    again.close()
    assert [(line["event"], line["id"]) for line in read_ledger(path)] == [
        ("issued", "s/0"),
        ("issued", "s/1"),
        ("trained", "s/0"),
        ("filtered", "s/1"),
    ]
    assert not find_ledger_faults(read_ledger(path), max_staleness=0)
    with pytest.raises(
        CheckpointError, match=r"the checkpoint expects 1000000: it was changed\. Restore it"
    ):
        PromptLedger(path).cut(10**6)


def test_a_line_that_a_crash_cut_off_is_none(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"event": "issued", "id": "s/0", "version": 0}\n{"event": "tra')
    assert [line["id"] for line in read_ledger(path)] == ["s/0"]


def test_what_must_not_be_is_found(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = PromptLedger(path)
    ledger.note("issued", ["s/0", "s/1"], version=1)
    ledger.note("trained", ["s/0"], step=1)
    ledger.note("trained", ["s/0"], step=2)
    ledger.note("trained", ["s/1"], step=5)
    ledger.note("trained", ["s/9"], step=5)
    ledger.close()
    assert find_ledger_faults(read_ledger(path), max_staleness=2) == [
        "s/1 was issued at version 1 and trained on at step 5",
        "s/9 was trained and never issued",
        "s/0 ended 2 times",
    ]


def test_what_was_deferred_must_be_issued_again(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = PromptLedger(path)
    ledger.note("issued", ["s/0", "s/1"], version=0)
    ledger.note("deferred", ["s/0", "s/1"], step=0)
    ledger.note("issued", ["s/0"], version=3)
    ledger.note("trained", ["s/0", "s/1"], step=3)
    ledger.close()
    assert find_ledger_faults(read_ledger(path), max_staleness=0) == [
        "s/1 was trained and never issued"
    ]


def test_replayed_is_no_end_and_has_a_bound_of_its_own(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = PromptLedger(path)
    ledger.note("issued", ["s/0", "s/1"], version=0)
    ledger.note("trained", ["s/0"], step=0)
    ledger.note("replayed", ["s/0"], step=2, version=0)
    ledger.note("replayed", ["s/0"], step=3, version=0)
    ledger.note("replayed", ["s/1"], step=1, version=0)
    ledger.close()
    assert find_ledger_faults(read_ledger(path), max_staleness=0, max_age=2) == [
        "s/0 was drawn by version 0 and replayed at step 3",
        "s/1 was replayed before it was trained on",
    ]


def test_without_a_file_nothing_is_kept():
    ledger = PromptLedger()
    ledger.note("issued", ["s/0"], version=0)
    assert ledger.sync() == 0
    ledger.cut(7)
    ledger.close()
