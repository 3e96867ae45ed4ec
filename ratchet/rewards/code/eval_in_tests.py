"""Find tests that evaluate an answer as code, by static analysis of their source.

Such tests run code that the program returned, in the process of their own assertions. This code can
make all assertions pass. The tests are refused whatever a program returns: otherwise a program
could escape a reward of 0 by returning something that would be evaluated. Evaluation that this
analysis misses is stopped at run time by `sandbox_program.AssertionJudge.guard`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

EVALUATORS = frozenset(
    {"eval", "exec", "compile", "__import__", "import_module", "timeit", "sympify", "parse_expr"}
)
# Modules whose `loads` can run code in the data.
LOADING_MODULES = frozenset({"pickle", "marshal", "dill", "cloudpickle"})
PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def find_evaluated_answer(test: str, entry_point: str) -> str:
    """Return the source of a call in `test` that evaluates an answer of `entry_point`, or "".

    Control flow is not followed: a name that is assigned an answer anywhere in the tests counts as
    an answer everywhere.
    """
    try:
        tree = ast.parse(test)
        return next(_find_evaluations(tree, _find_tainted_names(tree, entry_point)), "")
    except PARSE_ERRORS:  # tests that don't parse are refused where they run
        return ""


def _find_tainted_names(tree: ast.Module, entry_point: str) -> set[str]:
    """Return the names that may hold the judged function or values derived from its answers."""
    functions = dict(_find_functions(tree))
    names = {entry_point, "candidate"}
    if "check" in functions:
        names |= set(_list_parameter_names(functions["check"]))
    while True:
        n_known = len(names)
        for node in ast.walk(tree):
            names |= set(_find_newly_tainted(node, names, functions))
        if len(names) == n_known:
            return names


def _find_newly_tainted(
    node: ast.AST, names: set[str], functions: dict[str, Function]
) -> Iterator[str]:
    """Yield the names to which `node` binds a value derived from `names`."""
    match node:
        case ast.Assign(targets=targets, value=value) if _mentions(value, names):
            for target in targets:
                yield from _iter_bound_names(target)
        case (
            ast.AnnAssign(target=target, value=value)
            | ast.AugAssign(target=target, value=value)
            | ast.NamedExpr(target=target, value=value)
        ) if value is not None and _mentions(value, names):
            yield from _iter_bound_names(target)
        case (
            ast.For(target=target, iter=values)
            | ast.AsyncFor(target=target, iter=values)
            | ast.comprehension(target=target, iter=values)
        ) if _mentions(values, names):
            yield from _iter_bound_names(target)
        case ast.withitem(context_expr=value, optional_vars=ast.expr() as target) if _mentions(
            value, names
        ):
            yield from _iter_bound_names(target)
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if any(
            isinstance(part, ast.Return | ast.Yield)
            and part.value is not None
            and _mentions(part.value, names)
            for part in ast.walk(node)
        ):
            yield name
        case ast.Call(func=function) if any(
            _mentions(argument, names) for argument in _list_arguments(node)
        ):
            if isinstance(function, ast.Lambda):
                yield from _list_parameter_names(function)
            elif isinstance(function, ast.Name) and function.id in functions:
                yield from _list_parameter_names(functions[function.id])
            elif isinstance(function, ast.Attribute):  # such as collected.append(candidate(1))
                yield from _iter_bound_names(function.value)


def _find_evaluations(tree: ast.Module, names: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        arguments = _list_arguments(node)
        # eval(source, ...) evaluates only its first argument. If eval itself is an argument, as in
        # map(eval, answers), any other argument may be evaluated.
        sources = (
            arguments[:1]
            if _is_evaluator(node.func)
            else arguments
            if any(map(_is_evaluator, arguments))
            else []
        )
        if any(_mentions(source, names) for source in sources):
            yield ast.unparse(node)[:200]


def _is_evaluator(function: ast.expr) -> bool:
    match function:
        case ast.Name(id=name):
            return name in EVALUATORS
        case ast.Attribute(value=ast.Name(id=module), attr="loads"):
            return module in LOADING_MODULES
        case ast.Attribute(value=ast.Name(id=module), attr="compile"):
            return module == "builtins"  # re.compile runs no code
        case ast.Attribute(attr=name):
            return name in EVALUATORS
    return False


def _find_functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda() as function):
                yield name, function


def _list_parameter_names(function: Function) -> list[str]:
    arguments = function.args
    extras = [extra for extra in (arguments.vararg, arguments.kwarg) if extra is not None]
    return [
        item.arg
        for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *extras)
    ]


def _list_arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _iter_bound_names(target: ast.expr) -> Iterator[str]:
    return (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def _mentions(value: ast.expr, names: set[str]) -> bool:
    return any(isinstance(node, ast.Name) and node.id in names for node in ast.walk(value))
