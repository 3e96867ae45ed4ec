"""Compiled once, for this machine; where that fails the run says so, or does without."""

import subprocess
import sys

import pytest
import yaml

from ratchet.config.loader import load_config
from ratchet.errors import ConfigError
from ratchet.executors.machine import freeze, use_kernels
from ratchet.kernels import build, cpu


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Nothing is compiled yet."""
    build.library.cache_clear()
    monkeypatch.setattr("ratchet.stores._cache", tmp_path / "cache")
    yield
    build.library.cache_clear()


@pytest.mark.needs("cc")
def test_it_is_compiled_once_and_found_again(tmp_path, monkeypatch):
    build.library()
    (made,) = (tmp_path / "cache" / "kernels").iterdir()
    assert made.suffix == ".so"
    build.library.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("it was there"))
    build.library()


@pytest.mark.needs("cc")
def test_another_source_is_compiled_anew(tmp_path, monkeypatch):
    build.library()
    other = tmp_path / "kernels.c"
    other.write_text(build.SOURCE.read_text() + "\n/* changed */\n")
    monkeypatch.setattr(build, "SOURCE", other)
    build.library.cache_clear()
    build.library()
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
    assert not use_kernels("auto")
    assert not cpu.used()
    assert freeze(recipe(tmp_path)).kernels == "torch"
    with pytest.raises(ConfigError, match="no C compiler is on the PATH; install gcc, or set kernels: torch"):
        use_kernels("compiled")


@pytest.mark.needs("cc")
def test_with_one_it_is_a_fact_of_the_run(tmp_path):
    assert freeze(recipe(tmp_path)).kernels == "compiled"
    assert freeze(recipe(tmp_path, kernels="torch")).kernels == "torch"


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "COMPILERS", (sys.executable,))
    with pytest.raises(OSError, match="failed: "):
        build.library()
    assert not list((tmp_path / "cache" / "kernels").iterdir())
