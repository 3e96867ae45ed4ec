"""By what code and of which data a run was made, and where either changed."""

import json

import pytest

from ratchet.observe import provenance
from ratchet.observe.provenance import get_code_version, read_start_model, record_provenance


def test_it_is_noted_once_for_the_same_code_and_data(tmp_path):
    path = tmp_path / "provenance.json"
    record_provenance(path, after_step=0, data={"a.jsonl": "1"})
    record_provenance(path, after_step=8, data={"a.jsonl": "1"})
    (start,) = json.loads(path.read_text())
    assert start == {"after_step": 0, "code": get_code_version(), "data": {"a.jsonl": "1"}}


def test_a_run_that_goes_on_with_others_says_from_where(tmp_path, monkeypatch):
    path = tmp_path / "provenance.json"
    record_provenance(path, after_step=0, data={})
    record_provenance(path, after_step=8, data={"a.jsonl": "2"})
    monkeypatch.setattr(provenance, "get_code_version", lambda: {"ratchet": "9"})
    record_provenance(path, after_step=9, data={"a.jsonl": "2"})
    assert [(start["after_step"], start["data"]) for start in json.loads(path.read_text())] == [
        (0, {}),
        (8, {"a.jsonl": "2"}),
        (9, {"a.jsonl": "2"}),
    ]
    assert json.loads(path.read_text())[-1]["code"] == {"ratchet": "9"}


def test_the_start_model_is_noted_only_at_the_start(tmp_path):
    path = tmp_path / "provenance.json"
    assert read_start_model(path) is None
    record_provenance(path, after_step=0, data={}, model="1")
    record_provenance(path, after_step=8, data={"a.jsonl": "2"}, model="3")
    assert read_start_model(path) == "1"
    assert len(json.loads(path.read_text())) == 2
    record_provenance(path, after_step=0, data={}, model="3")
    assert read_start_model(path) == "3"


def test_a_directory_without_room_is_a_warning(tmp_path, caplog):
    record_provenance(tmp_path / "missing" / "provenance.json", after_step=0, data={})
    assert "so the run's provenance is not recorded" in caplog.text


def test_a_run_that_begins_anew_forgets_what_was_there(tmp_path):
    path = tmp_path / "provenance.json"
    record_provenance(path, after_step=8, data={"a": "1"})
    record_provenance(path, after_step=0, data={"a": "2"})
    assert [start["data"] for start in json.loads(path.read_text())] == [{"a": "2"}]


@pytest.mark.parametrize(
    "text", ["[{", "{}", "[1]", '[{"changes": 5, "after_step": 1}]', '[{"data": {}}]']
)
def test_a_damaged_file_is_no_hindrance(tmp_path, text):
    path = tmp_path / "provenance.json"
    path.write_text(text)
    record_provenance(path, after_step=8, data={})
    assert len(json.loads(path.read_text())) == 1


def test_the_sources_decide_the_version():
    version = get_code_version()
    assert len(version["sources"]) == 64
    assert {"ratchet", "torch", "python", "commit"} <= set(version)
