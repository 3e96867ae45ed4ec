"""Compiled once, for this machine; where that fails the run says so, or does without."""

import subprocess
import sys

import pytest
import yaml

from ratchet.commands.doctor import list_fixes, report
from ratchet.config.loader import load_config
from ratchet.errors import ConfigError
from ratchet.executors.freeze import freeze, has_compiled_kernels, use_kernels
from ratchet.kernels import build, cpu
from ratchet.training.from_config import build_policy

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Nothing is compiled yet."""
    build.load_library.cache_clear()
    monkeypatch.setattr("ratchet.utils.object_store._cache", tmp_path / "cache")
    yield
    build.load_library.cache_clear()


@pytest.mark.needs("cc")
def test_it_is_compiled_once_and_found_again(tmp_path, monkeypatch):
    build.load_library()
    (made,) = (tmp_path / "cache" / "kernels").iterdir()
    assert made.suffix == ".so"
    build.load_library.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("it was there"))
    build.load_library()


@pytest.mark.needs("cc")
def test_another_source_is_compiled_anew(tmp_path, monkeypatch):
    build.load_library()
    other = tmp_path / "kernels.c"
    other.write_text(build.SOURCES[0].read_text() + "\n/* changed */\n")
    (tmp_path / "rows.h").write_text((build.HERE / "rows.h").read_text())
    monkeypatch.setattr(build, "SOURCES", (other, *build.SOURCES[1:]))
    build.load_library.cache_clear()
    build.load_library()
    assert len(list((tmp_path / "cache" / "kernels").iterdir())) == 2


def recipe(tmp_path, **keys):
    path = tmp_path / "recipe.yaml"
    known = {
        "device": "cpu",
        "threads": 1,
        "model": {"preset": "tiny"},
        "tokenizer": {"kind": "characters"},
        "environment": {"kind": "sorting"},
        "steps": 1,
    }
    path.write_text(yaml.safe_dump(known | {"algorithm": {"kind": "grpo"}} | keys))
    return load_config(path)


def test_without_a_compiler_pytorch_does_it(tmp_path, monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert not has_compiled_kernels()
    notes = []
    assert freeze(recipe(tmp_path), notes).kernels == "torch"
    (note,) = notes
    assert "no C compiler is on the PATH): a step of a small model takes about 1.5 times" in note
    with pytest.raises(
        ConfigError, match="no C compiler is on the PATH; install gcc, or set kernels: torch"
    ):
        use_kernels(True)


@pytest.mark.needs("cc")
def test_a_run_with_ranks_computes_by_pytorchs_operations_everywhere(tmp_path):
    """Driver, ranks and generators must agree, and config.yaml say how."""
    assert freeze(recipe(tmp_path, learner={"kind": "dtensor"})).kernels == "torch"
    with pytest.raises(
        ConfigError,
        match="kernels=compiled, but a distributed learner computes with PyTorch's operations: set kernels: auto or torch",
    ):
        recipe(tmp_path, learner={"kind": "dtensor"}, kernels="compiled")


@pytest.mark.needs("cc")
def test_doctor_says_which_it_will_be(monkeypatch, capsys):
    report()
    assert "kernels: compiled for this processor" in capsys.readouterr().out
    build.load_library.cache_clear()
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    report()
    assert "no C compiler is on the PATH; install gcc" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(build.shutil, "which", lambda name: name if name == "dnf" else None)
    fixes = list_fixes()
    assert fixes[-2].startswith("# no compiled kernels")
    assert fixes[-1] == "sudo dnf install gcc"


@pytest.mark.needs("cc")
def test_a_model_is_computed_as_its_frozen_recipe_says(tmp_path):
    """One that says "auto" was never frozen: a run from before there were kernels goes on without
    them."""
    config = recipe(tmp_path)
    for kernels, expected in (
        ("compiled", True),
        ("torch", False),
        ("compiled", True),
        ("auto", False),
    ):
        build_policy(config.model_copy(update={"kernels": kernels}))
        assert cpu.is_enabled() is expected


@pytest.mark.needs("cc")
def test_with_one_it_is_a_fact_of_the_run(tmp_path):
    assert freeze(recipe(tmp_path)).kernels == "compiled"
    assert freeze(recipe(tmp_path, kernels="torch")).kernels == "torch"


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "COMPILERS", (sys.executable,))
    with pytest.raises(OSError, match="failed: "):
        build.load_library()
    assert not list((tmp_path / "cache" / "kernels").iterdir())


@pytest.mark.needs("cc")
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_one_that_is_not_whole_is_never_loaded(share, tmp_path):
    """The first could not be read; the second would kill the process."""
    build.load_library()
    (made,) = (tmp_path / "cache" / "kernels").iterdir()
    whole, torn = made.read_bytes(), tmp_path / "torn"
    torn.write_bytes(whole[: int(share * len(whole))])
    torn.replace(made)  # as the library that this process has loaded must stay
    build.load_library.cache_clear()
    build.load_library()
    assert any(map(build._is_complete, (tmp_path / "cache" / "kernels").iterdir()))


def test_what_two_compile_at_once_lies_apart(tmp_path, monkeypatch):
    """Containers that share a cache have processes of one number."""
    drafts = []

    def fails(command, **_):
        drafts.append(command[command.index("-o") + 1])
        return subprocess.CompletedProcess(command, 1, "", "")

    monkeypatch.setattr(subprocess, "run", fails)
    for _ in range(2):
        with pytest.raises(OSError, match="cc failed"):
            build._compile("cc", tmp_path, "key")
    assert len(set(drafts)) == 2


def test_a_compiler_may_say_what_is_no_text(tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_bytes(b"#!/bin/sh\nprintf 'kaputt \\344\\n' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "COMPILERS", (str(compiler),))
    with pytest.raises(OSError, match="failed: kaputt"):
        build.load_library()


@pytest.mark.needs("cc")
def test_a_user_without_a_home_is_told_where_to_keep_it(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("ratchet.utils.object_store._cache", None)
    monkeypatch.setattr("ratchet.utils.object_store.Path.home", nowhere)
    assert not has_compiled_kernels()
    with pytest.raises(ConfigError, match="set RATCHET_CACHE"):
        use_kernels(True)
