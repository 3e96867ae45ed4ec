"""Run Megatron Core without CUDA, for tests and for the comparison of logits after a conversion.

Megatron's modules are rewritten as they are imported; torch is not changed.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

import torch

PACKAGE = "megatron.core"
STANDIN_NAME = "_cpu_for_cuda"  # name of the stand-in for torch.cuda in the rewritten modules
# Tensor methods whose calls are removed: x.cuda() becomes x.
REMOVED_METHODS = {"cuda", "record_stream"}


def install() -> None:
    """Rewrite all Megatron modules imported from now on. A second call has no effect."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    assert not any(name.startswith(PACKAGE) for name in sys.modules), (
        "megatron.core was imported before install(), so it is unpatched"
    )
    sys.meta_path.insert(0, _Finder())


class _NoOp:
    """A stand-in for a stream, event or graph: every call does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self

    def __enter__(self) -> _NoOp:
        return self

    def __exit__(self, *error: Any) -> None: ...


def _rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


# The functions that are replaced in the rewritten modules, by name.
REPLACED_FUNCTIONS = {"_get_cuda_rng_state": _rng_state, "_set_cuda_rng_state": _set_rng_state}


class _Standin(types.ModuleType):
    """A stand-in for `torch.cuda`.

    Attributes not defined here come from the real torch.cuda.
    """

    Stream = Event = _NoOp
    nvtx = _NoOp()
    replacements = types.SimpleNamespace(**REPLACED_FUNCTIONS)

    def __init__(self) -> None:
        super().__init__(STANDIN_NAME)
        self.random = self
        self.current_device = lambda: "cpu"
        self.device_count = lambda: 1
        self.is_available = lambda: False
        self.current_stream = self.default_stream = lambda *args, **kwargs: _NoOp()
        self.stream = self.device = lambda *args, **kwargs: nullcontext()
        self.memory_allocated = self.memory_reserved = self.max_memory_allocated = (
            lambda *args, **kwargs: 0
        )
        self.synchronize = self.set_device = self.empty_cache = self.set_stream = (
            lambda *args, **kwargs: None
        )
        self.manual_seed = torch.manual_seed
        self.get_rng_state = _rng_state
        self.set_rng_state = _set_rng_state

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


_CUDA_STANDIN = _Standin()


class _CudaRemover(ast.NodeTransformer):
    """A transformer of a module's syntax tree that replaces uses of CUDA."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name in REPLACED_FUNCTIONS:
            return ast.Assign(
                [ast.Name(node.name, ast.Store())],
                _make_attribute(STANDIN_NAME, "replacements", node.name),
            )
        self.generic_visit(node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.Name(STANDIN_NAME, ast.Load())
        # Megatron checks that tensors are on the accelerator, which is the CPU here.
        if node.attr == "is_cuda":
            return ast.Constant(True)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in REMOVED_METHODS:
            return node.func.value
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        self.generic_visit(node)
        if node.arg == "pin_memory":
            node.value = ast.Constant(False)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        value = node.value
        if value == "cuda":
            return ast.Constant("cpu")
        if isinstance(value, str) and value.startswith("torch.cuda.") and value.endswith("Tensor"):
            # Megatron compares this name with `tensor.type()`.
            return ast.Constant(value.replace("cuda.", ""))
        return node


def _make_attribute(first: str, *rest: str) -> ast.expr:
    """Return the expression `first.rest[0].rest[1]...`."""
    expression: ast.expr = ast.Name(first, ast.Load())
    for name in rest:
        expression = ast.Attribute(expression, name, ast.Load())
    return expression


class _Loader(SourceFileLoader):
    """A loader that rewrites a module's syntax tree."""

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        tree = _CudaRemover().visit(ast.parse(self.get_data(path), path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__[STANDIN_NAME] = _CUDA_STANDIN
        super().exec_module(module)


class _Finder(MetaPathFinder):
    """A finder that gives Megatron's modules the rewriting loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(PACKAGE):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec
