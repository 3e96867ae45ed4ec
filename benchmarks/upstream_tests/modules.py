"""Modules that stand in for NeMo RL, verl and ROLL: names that are here, and placeholders for others.

A test that uses a placeholder while it runs is skipped, with the name that is not here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

PACKAGES = ("nemo_rl", "verl", "roll")
# Packages that upstream's test files import, and the tests that count do not use.
UNUSED = ("omegaconf", "torchdata", "wandb", "nemo_gym", "megatron", "hydra", "swanlab", "mlflow")


class Placeholder(type):
    """The class of names that are not here. While tests are collected, calls return placeholders."""

    collecting = True

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if Placeholder.collecting:
            return args[0] if len(args) == 1 and callable(args[0]) else cls
        pytest.skip(f"not here: {cls.__name__}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_placeholder(f"{cls.__name__}.{name}")

    def __getitem__(cls, item: Any) -> Any:
        return cls


def make_placeholder(name: str) -> Any:
    return Placeholder(name, (), {})


class _Module(ModuleType):
    """A module of an upstream package."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_placeholder(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    """It finds every module of the upstream packages."""

    def __init__(self, names: Mapping[str, Mapping[str, Any]]) -> None:
        self.names = names
        self.installed = {name for name in UNUSED if find_spec(name) is not None}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        if fullname.startswith("ray."):
            return ModuleSpec(fullname, self, is_package=True)
        package = fullname.partition(".")[0]
        is_absent = package in UNUSED and package not in self.installed
        if package in PACKAGES or is_absent:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Module(spec.name)
        for prefix, names in self.names.items():
            if spec.name == prefix or spec.name.startswith(f"{prefix}."):
                vars(module).update(names)
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def install(names: Mapping[str, Mapping[str, Any]]) -> None:
    """Stand in for the upstream packages.

    Args:
        names: By module, the names that are here. They are also in the modules below it.
    """
    sys.meta_path.insert(0, _Finder(names))
