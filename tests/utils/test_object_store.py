"""Files behind an address, on fsspec's own memory and on this machine's disk."""

import sys
import uuid

import fsspec
import pytest
from broken_store import Broken, contents, telling

from ratchet.errors import DataError, MissingDependency
from ratchet.utils import object_store
from ratchet.utils.object_store import (
    Store,
    explain_bad_address,
    fetch_directory,
    get_cached_path,
    put_directory,
    stays_inside,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "RETRY_WAIT_S", 0.0)
    object_store.configure_cache({"RATCHET_CACHE": str(tmp_path / "cache")})
    yield tmp_path / "cache"
    object_store.configure_cache({})


@pytest.fixture(
    params=["memory://{id}", "file://{tmp}/{id}", "local://{tmp}/{id}", "broken://{id}"]
)
def address(request, tmp_path):
    return request.param.format(id=uuid.uuid4().hex, tmp=tmp_path)


def test_files_come_back_as_they_were(address, tmp_path):
    store = Store(address)
    assert store.entries() == {}
    with pytest.raises(FileNotFoundError):
        store.read("a.json")
    (tmp_path / "here").write_bytes(b"12345")
    store.write("a.json", b"{}")
    store.put(tmp_path / "here", "deep/er/b")
    assert {name: entry.size for name, entry in store.entries().items()} == {
        "a.json": 2,
        "deep/er/b": 5,
    }
    assert list(store.entries("deep")) == ["deep/er/b"]
    before = store.entries()["deep/er/b"]
    (tmp_path / "here").write_bytes(b"54321")
    store.put(tmp_path / "here", "deep/er/b")  # in place of the one there
    assert store.entries()["deep/er/b"] != before
    store.get("deep/er/b", tmp_path / "new" / "b")
    assert (tmp_path / "new" / "b").read_bytes() == b"54321"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["b"]
    assert store.read("a.json") == b"{}"
    with pytest.raises(OSError, match="more than 1 bytes"):
        store.read("a.json", max_bytes=1)
    for _ in range(2):  # what is gone is gone
        store.remove("a.json")
    assert list(store.entries()) == ["deep/er/b"]


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "", "a\\b", "a\0b"])
def test_no_name_leads_outside(name, tmp_path):
    assert not stays_inside(name)
    store = Store("memory://inside")
    for use in (
        store.read,
        store.remove,
        lambda n: store.write(n, b""),
        lambda n: store.get(n, tmp_path / "x"),
    ):
        with pytest.raises(OSError, match="could lead outside"):
            use(name)


def test_what_fails_is_asked_for_again_and_what_is_refused_is_not(caplog):
    store, asked = Store("broken://again"), []

    def fails(error, times):
        asked.clear()

        def told(operation, path):
            asked.append(operation)
            if len(asked) <= times:
                raise error

        return told

    with telling(fails(ValueError("of the client's own"), 2)):
        store.write("a", b"whole")
    assert contents("broken://again") == {"a": b"whole"}
    assert asked == ["write"] * 3
    assert "of the client's own; trying again" in caplog.text
    with (
        telling(fails(ConnectionError("gone"), 3)),
        pytest.raises(OSError, match=r"broken://again: writing a: .*gone"),
    ):
        store.write("a", b"other")
    with (
        telling(fails(PermissionError("read-only"), 3)),
        pytest.raises(PermissionError, match="read-only"),
    ):
        store.write("a", b"other")
    assert asked == ["write"]


def test_what_arrives_short_is_an_error(monkeypatch):
    monkeypatch.setattr(
        Broken,
        "pipe_file",
        lambda self, path, value: super(Broken, self).pipe_file(path, value[:-1]),
    )
    with pytest.raises(OSError, match="4 of 5 bytes arrived"):
        Store("broken://short").write("a", b"whole")


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("s4://bucket/run", "nothing reads s4://"),
        ("zip://a::s3://bucket/run", "chains several stores"),
        ("s3://", "names no bucket or directory"),
        ("s3://bucket/*", "a pattern or leads upwards"),
        ("s3://bucket/../other", "a pattern or leads upwards"),
        ("https://host/run", "a web server can't list a directory"),
    ],
)
def test_what_is_no_place_for_a_run_is_said(address, why):
    assert why in explain_bad_address(address)


@pytest.mark.parametrize(
    "address", ["s3://bucket/run", "gs://b/r", "hf://org/name", "memory://x", "file:///tmp/x"]
)
def test_what_is_one_is_not(address):
    assert explain_bad_address(address) is None


def test_a_missing_package_and_an_unknown_store_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(
        MissingDependency,
        match=r"reading s3:// needs the package 's3fs': pip install 'ratchet-rl\[stores\]'",
    ):
        Store("s3://bucket/run")
    with pytest.raises(DataError, match="nothing reads nowhere://"):
        Store("nowhere://bucket/run")


def test_a_store_that_can_not_even_be_named_is_said(monkeypatch):
    def fails(self, *arguments, **options):
        raise RuntimeError("no credentials")

    monkeypatch.setattr(Broken, "__init__", fails)
    Broken.clear_instance_cache()
    with pytest.raises(
        DataError, match="broken://a/b: its store can't be used: RuntimeError: no credentials"
    ):
        Store("broken://a/b")


def test_the_cache_lies_where_the_variables_say(tmp_path):
    object_store.configure_cache({"RATCHET_CACHE": "/a", "XDG_CACHE_HOME": "/b"})
    first = get_cached_path("runs", "s3://bucket/run/")
    assert first.is_relative_to("/a/runs")
    assert first.name == "run"
    assert (
        get_cached_path("runs", "s3://bucket/run")
        == first
        != get_cached_path("runs", "s3://other/run")
    )
    object_store.configure_cache({"XDG_CACHE_HOME": "/b"})
    assert get_cached_path("runs", "s3://bucket/run").is_relative_to("/b/ratchet/runs")


def test_a_directory_is_fetched_once_and_only_what_changed_again(address, tmp_path, monkeypatch):
    made = tmp_path / "made"
    (made / "deep").mkdir(parents=True)
    for name, text in {
        "config.json": "{}",
        "a.safetensors": "weights",
        "pickle.bin": "no",
        "deep/b.json": "1",
    }.items():
        (made / name).write_text(text)
    put_directory(made, address, last="config.json")
    fetched, get = [], Store.get
    monkeypatch.setattr(
        Store, "get", lambda self, name, target: (fetched.append(name), get(self, name, target))
    )
    patterns = ("*.json", "*.safetensors")
    copy = fetch_directory(address, patterns, deep=False)
    assert sorted(path.name for path in copy.iterdir()) == [
        ".fetched.json",
        "a.safetensors",
        "config.json",
    ]
    assert fetch_directory(address, patterns, deep=False) == copy
    assert fetched == ["a.safetensors", "config.json"]
    Store(address).write("a.safetensors", b"WEIGHTS")  # as long as before
    assert (fetch_directory(address) / "a.safetensors").read_text() == "WEIGHTS"
    assert fetched[2:] == ["a.safetensors", "deep/b.json", "pickle.bin"]
    Store(address).remove("a.safetensors")
    (copy / "config.json").write_text("cut")
    fetch_directory(address, patterns)
    assert not (copy / "a.safetensors").exists()
    assert (copy / "config.json").read_text() == "{}"


def test_the_last_file_comes_last(tmp_path):
    for name in ("config.json", "a.json", "z.json"):
        (tmp_path / name).write_text(name)
    order = []
    with telling(lambda operation, path: order.append(path.rpartition("/")[2])):
        put_directory(tmp_path, "broken://ordered", last="config.json")
    assert order == ["a.json", "z.json", "config.json"]


def test_a_store_that_lists_what_lies_outside_gets_no_file_here(tmp_path, cache):
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pipe_file("/hostile/model/config.json", b"{}")
    file = memory.store.pop("/hostile/model/config.json")
    memory.store["/hostile/model/../../../../escaped.json"] = file
    with pytest.raises(OSError, match="could lead outside"):
        fetch_directory("memory://hostile/model")
    assert not list(tmp_path.rglob("escaped.json"))
