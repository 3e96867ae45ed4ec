"""Convert tests in other forms than HumanEval's to tests of a function (`FunctionTask`).

The forms are those of ROLL's code data (roll/pipeline/rlvr/rewards/code_sandbox_reward_worker.py),
by the column `case_type`: "assert" statements, "pytest" functions, "check_based" tests, and "text"
tests of the answer itself. So the tests and the judged program stay in separate processes, whatever
the form.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

from ratchet.errors import DataError
from ratchet.rewards.code import pytest_shim
from ratchet.rewards.code.function_tests import FunctionTask
from ratchet.rewards.code.program_runner import defines_name

# Names that programs for such tests use without importing them, as in ROLL and LiveCodeBench.
USUAL_IMPORTS = """\
import bisect, collections, copy, datetime, functools, heapq, itertools, json, math, operator
import random, re, statistics, string
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""
MAX_TASKS = 1024  # maximum number of tasks whose tests are kept for the next attempt
CASE_TYPES = ("assert", "pytest", "check_based", "text")
MODULE = "solution"  # the module that tests import the judged function from
TEXT_FUNCTION = "response"  # stands for the answer in text tests
TEXT_PLACEHOLDER = "{response}"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Attributes of the values that a program can return (see `plain_values`).
PLAIN_ATTRIBUTES = frozenset(
    name
    for value in (None, True, 0, 0.0, 0j, "", b"", [], (), set[int](), {}, range(0), iter(()))
    for name in dir(value)
)
# Functions that take a class or several, by their last name, and the place of that argument.
CLASS_ARGUMENTS = {
    "raises": 0,
    "assertRaises": 0,
    "assertRaisesRegex": 0,
    "isinstance": 1,
    "issubclass": 1,
    "assertIsInstance": 1,
}
CALL_FUNCTION = "_call_function"  # calls one of several functions of a program
CALL_PROGRAM = f"""

def {CALL_FUNCTION}(name, *arguments, **keywords):
    if name not in globals():
        raise NameError(f"name {{name!r}} is not defined")
    return globals()[name](*arguments, **keywords)
"""
CALL_TEST = f"""
def {{name}}(*arguments, **keywords):
    return {CALL_FUNCTION}({{name!r}}, *arguments, **keywords)
{{name}}.__test__ = False
"""


def convert_tests(case_type: str, cases: Sequence[Any], label: str) -> FunctionTask:
    """Return the tests of a row with `case_type` and `test_cases`.

    Raises DataError for an unknown case type, and for tests that can't be read as one function's.

    Args:
        cases: Texts of tests, or objects with `assert_code`.
        label: The task's name, for messages.
    """
    if case_type not in CASE_TYPES:
        raise DataError(
            f"task '{label}': case_type={case_type!r:.40} is not known, must be one of input, "
            f"{', '.join(CASE_TYPES)}"
        )
    sources = [_read_source(case, label) for case in cases]
    if not sources:
        raise DataError(f"task '{label}': test_cases is empty: leave the row out")
    if case_type == "check_based":
        return _convert_checks(cases, sources, label)
    if case_type == "text":
        return _convert_text_tests(sources, label)
    return _convert_sources(tuple(sources), label)


@lru_cache(maxsize=MAX_TASKS)
def _convert_sources(sources: tuple[str, ...], label: str) -> FunctionTask:
    _check_definitions(sources, label)
    return convert_source("\n".join(sources), label)


def convert_source(source: str, label: str) -> FunctionTask:
    """Return tests that are `assert` statements, pytest functions, or both.

    The tests call the functions that they import from the module, or else those that they do not
    define.
    """
    tree = _parse(source, label)
    tree.body = [statement for statement in tree.body if not _is_main_block(statement)]
    functions = _find_functions(tree, label)
    _check_pytest(tree, label)
    tree = _ImportRewriter(label).visit(tree)
    tests = _list_tests(tree)
    has_asserts = any(isinstance(node, ast.Assert) for node in _walk_module(tree))
    if not has_asserts and not _may_have_tests(tree):
        raise DataError(
            f"task '{label}': its tests have neither an assert nor a function test_...: they test "
            "nothing"
        )
    # Loose assertions stay where they are, because the variables that they read may change later.
    statements = ast.unparse(tree)
    # Without this word there are neither tests nor pytest nor unittest. Even a text for `exec` may
    # define a test.
    if "test" in statements.lower():
        shim = files("ratchet.rewards.code").joinpath("pytest_shim.py").read_text(encoding="utf-8")
        arguments = ", ".join([*tests, f"must_run={not tests and not has_asserts}"])
        check = _write_check([f"_run_tests({arguments})"], label)
        text = f"{shim}\n{statements}\n\n{check}"
    else:
        text = f"{statements}\n\n{_write_check(['pass'], label)}"
    return _make_task(USUAL_IMPORTS, functions, text, label)


def _make_task(prompt: str, functions: Sequence[str], text: str, label: str) -> FunctionTask:
    """Return tests that call these functions."""
    if len(functions) == 1:
        return FunctionTask(prompt, functions[0], text, label)
    stubs = "".join(CALL_TEST.format(name=name) for name in functions)
    return FunctionTask(prompt, CALL_FUNCTION, stubs + text, label, functions=tuple(functions))


def write_text_program(answer: str) -> str:
    """Return the program that stands for an answer in text tests: it returns the answer."""
    return f"def {TEXT_FUNCTION}():\n    return {answer!r}\n"


def _read_source(case: Any, label: str) -> str:
    source = case.get("assert_code") if isinstance(case, Mapping) else case
    if not isinstance(source, str):
        raise DataError(
            f"task '{label}': a test case must be text, or have the text assert_code, not "
            f"{case!r:.80}"
        )
    return source


def _convert_checks(cases: Sequence[Any], sources: Sequence[str], label: str) -> FunctionTask:
    """Return tests whose functions `check` take the function that they judge.

    Several cases, of one function or of several, are judged together.
    """
    functions: list[str] = []
    prompt = USUAL_IMPORTS
    for case in cases:
        values: Mapping[str, Any] = case if isinstance(case, Mapping) else {}
        name = values.get("entry_point", "candidate")
        prefix = values.get("import_prefix", "")
        if not isinstance(name, str) or not name.isidentifier() or not isinstance(prefix, str):
            raise DataError(
                f"task '{label}': entry_point and import_prefix of a check-based test must be text"
            )
        functions.append(name)
        prompt += f"{prefix}\n"
    if len(cases) == 1:
        return FunctionTask(prompt, functions[0], sources[0], label)
    parts = [_wrap_check(source, f"_check_{index}", label) for index, source in enumerate(sources)]
    calls = [f"_check_{index}({name})" for index, name in enumerate(functions)]
    text = "\n".join([*parts, _write_check(calls, label)])
    return _make_task(prompt, list(dict.fromkeys(functions)), text, label)


def _convert_text_tests(sources: Sequence[str], label: str) -> FunctionTask:
    """Return tests of the answer's text, where the placeholder stands for it.

    Raises DataError if the placeholder is within a text, where it would stand for itself.
    """
    lines = [source.replace(TEXT_PLACEHOLDER, f"{TEXT_FUNCTION}()") for source in sources]
    check = _write_check(lines, label)
    texts = [
        node.value for node in ast.walk(_parse(check, label)) if isinstance(node, ast.Constant)
    ]
    if any(isinstance(text, str) and f"{TEXT_FUNCTION}()" in text for text in texts):
        raise DataError(
            f"task '{label}': {TEXT_PLACEHOLDER} stands in a text of its tests: write it without "
            "quotes"
        )
    return FunctionTask(USUAL_IMPORTS, TEXT_FUNCTION, check, label, judges_text=True)


def _wrap_check(source: str, name: str, label: str) -> str:
    """Return a function that defines the test's `check` for itself, and calls it."""
    body = [*_parse(source, label).body, *_parse("check(candidate)", label).body]
    return _write_function(name, body)


def _write_check(lines: Sequence[str], label: str) -> str:
    body = _parse("\n".join(lines), label).body
    if not body:
        raise DataError(f"task '{label}': its tests are empty: leave the row out")
    return _write_function("check", body)


def _write_function(name: str, body: list[ast.stmt]) -> str:
    """Return the source of a function of `candidate`, the judged function."""
    arguments = ast.arguments([], [ast.arg("candidate")], None, [], [], None, [])
    return ast.unparse(ast.fix_missing_locations(ast.FunctionDef(name, arguments, body, [])))


def _parse(source: str, label: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"task '{label}': its tests are not Python: {error}") from error


def _walk_module(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs with a module, also in blocks, and definitions without what is in them."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, DEFINITIONS):
            yield from _walk_module(child)


def _list_tests(tree: ast.Module) -> list[str]:
    """Return the names of the test functions and test classes: `test...`, or of unittest."""
    test_cases = {
        "TestCase",
        "IsolatedAsyncioTestCase",
    }  # the last parts of the names of unittest's classes
    names: list[str] = []
    for node in _walk_module(tree):
        if not isinstance(node, DEFINITIONS):
            continue
        bases = node.bases if isinstance(node, ast.ClassDef) else []
        is_test_case = any(ast.unparse(base).split(".")[-1] in test_cases for base in bases)
        if is_test_case:
            test_cases.add(node.name)
        if is_test_case or node.name.lower().startswith("test"):
            names.append(node.name)
    return list(dict.fromkeys(names))


def _may_have_tests(tree: ast.Module) -> bool:
    """True if tests are defined, or may be without a definition: by assignment, or by a class."""
    return bool(_list_tests(tree)) or any(
        (isinstance(node, ast.Name) and _is_stored_test(node))
        or (isinstance(node, ast.ClassDef) and node.bases)
        for node in _walk_module(tree)
    )


def _is_stored_test(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store) and node.id.lower().startswith("test")


def _check_definitions(sources: Sequence[str], label: str) -> None:
    """Raise DataError if two test cases define the same name: the first would be lost.

    Cases without test functions may, because their assertions run before the next definitions.
    """
    trees = [_parse(source, label) for source in sources]
    if not any(map(_may_have_tests, trees)):
        return
    definitions: dict[str, str] = {}
    for tree in trees:
        case_definitions: dict[str, str] = {}
        for node in tree.body:
            names: list[str] = []
            if isinstance(node, DEFINITIONS):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            case_definitions |= dict.fromkeys(names, ast.dump(node))
        for name, definition in case_definitions.items():
            if definitions.setdefault(name, definition) != definition:
                raise DataError(
                    f"task '{label}': two of its test cases define {name}: rename one of them"
                )


def _is_main_block(statement: ast.stmt) -> bool:
    """True for `if __name__ == "__main__":`, as before `pytest.main()`. It does not run."""
    if not isinstance(statement, ast.If) or statement.orelse:
        return False
    return ast.unparse(statement.test) == "__name__ == '__main__'"


def _check_pytest(tree: ast.Module, label: str) -> None:
    """Raise DataError if the tests use something of pytest that the sandbox does not have.

    Where the tests run, it would show only after the program has answered, as a wrong answer.
    """
    nodes = list(ast.walk(tree))
    aliases = {"pytest"}
    for node in nodes:
        if isinstance(node, ast.Import):
            aliases |= {a.asname for a in node.names if a.name == "pytest" and a.asname}
    for node in nodes:
        names: list[str] = []
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in aliases:
                names = [name]
            case ast.ImportFrom(module="pytest", names=imported):
                names = [alias.name for alias in imported]
            case ast.Attribute(attr="skipTest" | "SkipTest"):
                names = ["skip"]
            case _:
                pass
        for name in names:
            if not hasattr(pytest_shim.pytest, name):
                raise DataError(
                    f"task '{label}': its tests use pytest's {name}, which is not supported: "
                    "write them without it, or leave the row out"
                )


class _ImportRewriter(ast.NodeTransformer):
    """A transformer that removes imports of the judged module and of pytest.

    The names of both are global; assignments define others for them.
    """

    def __init__(self, label: str) -> None:
        self.label = label

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt] | ast.stmt:
        if node.module not in (MODULE, "pytest"):
            return node
        source = "pytest." if node.module == "pytest" else ""
        return self._assign(
            {alias.asname or alias.name: source + alias.name for alias in node.names}
        )

    def visit_Import(self, node: ast.Import) -> list[ast.stmt] | ast.stmt:
        if any(alias.name == MODULE for alias in node.names):
            raise DataError(
                f"task '{self.label}': its tests import the module {MODULE}: write from {MODULE} "
                "import FUNCTION"
            )
        others = [alias for alias in node.names if alias.name != "pytest"]
        if len(others) == len(node.names):
            return node
        names = {alias.asname: "pytest" for alias in node.names if alias.name == "pytest"}
        return [*([ast.Import(others)] if others else []), *self._assign(names)]

    def _assign(self, names: Mapping[str | None, str]) -> list[ast.stmt]:
        lines = [
            f"{name} = {value}" for name, value in names.items() if name not in (None, value, "*")
        ]
        return _parse("\n".join(lines or ["pass"]), self.label).body


def _find_functions(tree: ast.Module, label: str) -> list[str]:
    """Return the functions that the tests import from the module, or call without defining them.

    Raises DataError if they use constants, classes or functions that return functions: the tests
    get plain values from the program, so that every answer would fail them.
    """
    aliases = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == MODULE
        for alias in node.names
        if alias.name != "*"
    }
    imported = list(aliases.values())
    if not imported:
        defined_names = {*vars(builtins), *_list_bound_names(tree)}
        called = [
            node.func.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        ]
        imported = [
            name
            for name in called
            if name not in defined_names and not defines_name(USUAL_IMPORTS, name)
        ]
    names = list(dict.fromkeys(imported))
    if not names:
        raise DataError(
            f"task '{label}': its tests must call a function of the program, and they call none"
        )
    _check_are_functions(tree, aliases or {name: name for name in names}, label)
    return names


def _check_are_functions(tree: ast.Module, names: Mapping[str, str], label: str) -> None:
    """Raise DataError unless the tests use names of the program as functions of plain values.

    names: The program's names, by the tests' names for them.
    """
    nodes = list(ast.walk(tree))

    def find_called(node: ast.AST) -> str | None:
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in names:
                return name
        return None

    results: dict[str, str] = {}  # the function whose results a variable holds
    assigned: list[str] = []
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=variable)], value=value):
                if name := find_called(value):
                    results[variable] = name
                    assigned.append(variable)
    bound = list(_list_bound_names(tree))
    # A variable that holds other values as well says nothing.
    results = {
        variable: name
        for variable, name in results.items()
        if bound.count(variable) == assigned.count(variable)
    }
    called = {find_called(node) for node in nodes}
    for node in nodes:
        reason, name = "", None
        if isinstance(node, ast.Attribute):
            variable = node.value.id if isinstance(node.value, ast.Name) else ""
            name = find_called(node.value) or results.get(variable)
            # A name with a capital is that of a class, whose `pop` is not that of a list.
            if name and (node.attr not in PLAIN_ATTRIBUTES or names[name][:1].isupper()):
                reason = f"use .{node.attr} of what it returns"
        elif isinstance(node, ast.Call) and (name := find_called(node.func)):
            reason = "call what it returns"
        elif name := min(_list_classes(node) & names.keys(), default=None):
            reason = "use it as a class"
        elif isinstance(node, ast.Compare | ast.BinOp | ast.Subscript):
            operands = {
                part.id for part in ast.iter_child_nodes(node) if isinstance(part, ast.Name)
            }
            name = min(operands & names.keys() - called, default=None)
            reason = "use it as a value"
        if name and reason:
            raise DataError(
                f"task '{label}': its tests can't judge {names[name]}, because they {reason}: they "
                "must call functions that return plain values"
            )


def _list_classes(node: ast.AST) -> set[str]:
    """Return the names that a node uses as classes, such as an error in `raises(error)`."""
    match node:
        case ast.ExceptHandler(type=ast.expr() as classes):
            pass
        case ast.Call(func=ast.Name(id=function) | ast.Attribute(attr=function), args=arguments):
            place = CLASS_ARGUMENTS.get(function, len(arguments))
            if place >= len(arguments):
                return set()
            classes = arguments[place]
        case _:
            return set()
    parts = classes.elts if isinstance(classes, ast.Tuple) else [classes]
    return {part.id for part in parts if isinstance(part, ast.Name)}


def _list_bound_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.alias(name=name, asname=alias):
                yield (alias or name).split(".")[0]
