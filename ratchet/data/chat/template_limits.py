"""Limit the work of Jinja chat templates.

Templates come with models, so they may be written to hang or to fill memory. Each loop pass, call,
operation and filter spends steps of a budget, more for long values. Operations that would multiply
lengths are refused before they run. The count depends only on the template and its input, never on
a clock. Constant folding is disabled where it could take long, because the compiler's work is not
counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_NAMESPACE, DEFAULT_TESTS
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.utils import _PassArg as PassArg
from jinja2.visitor import NodeTransformer

BUDGET_VARIABLE = "\0work"  # variable that holds a rendering's StepBudget; no template can write it
# Names of the filters that `_StepCounter` inserts into templates to count steps.
SPEND_STEPS, SPEND_READING = "ratchet.tick", "ratchet.weigh"

BASE_STEPS = 500_000  # a long published template takes about 300 per message
STEPS_PER_MESSAGE = 1_000
CHARS_A_STEP = 32  # characters of text that one step reads, because C code is fast
STEPS_A_CALL = 10
STEPS_AN_ITEM = 20  # for an item of a list, in a filter that loops in Python
MAX_CHARS = 1 << 26  # characters of a text, or items of a list, that one operation creates
MAX_BITS = 4096  # size of an integer
# Maximum sum of the widths in a format string. Also the maximum argument of a filter or method of
# GROWING_FUNCTIONS that is applied to something other than text.
MAX_WIDTH = 1 << 20

TEXT_TYPES = (str, bytes)
CONTAINER_TYPES = (list, tuple, dict, set, frozenset)

# Filters that only pass on their value or take its length. They do not read nested values.
SHALLOW_FILTERS = frozenset(
    (
        *(
            "length",
            "count",
            "first",
            "last",
            "list",
            "map",
            "select",
            "reject",
            "selectattr",
            "rejectattr",
            "items",
        ),
        "reverse",
        "default",
        "d",
        "attr",
        "batch",
        "slice",
        "safe",
    )
)
# Tests of Jinja that compare values, and so may read all nested values.
COMPARING_TESTS = frozenset(
    (
        "in",
        "eq",
        "equalto",
        "==",
        "ne",
        "!=",
        "lt",
        "le",
        "gt",
        "ge",
        "<",
        "<=",
        ">",
        ">=",
        "lessthan",
        "greaterthan",
    )
)
# Filters and text methods whose result grows with the value or the length of an argument.
GROWING_FUNCTIONS = frozenset(
    (
        "indent",
        "wordwrap",
        "expandtabs",
        "center",
        "ljust",
        "rjust",
        "zfill",
        "batch",
        "slice",
        "round",
        "to_bytes",
    )
)


# Filters that loop over characters or items in Python.
SLOW_FILTERS = frozenset(
    [
        "title",
        "urlize",
        "wordwrap",
        "striptags",
        "wordcount",
        "pprint",
        "xmlattr",
        "sort",
        "groupby",
        "unique",
        "dictsort",
        "sum",
        "batch",
    ]
)


class StepBudget:
    """The step budget of one rendering."""

    __slots__ = ("remaining", "total")

    def __init__(self, n_messages: int, n_chars: int) -> None:
        self.total = self.remaining = BASE_STEPS + STEPS_PER_MESSAGE * n_messages + n_chars

    def spend(self, steps: int) -> None:
        """Take steps from the budget. Raises TemplateRuntimeError if too few are left."""
        self.remaining -= steps
        if self.remaining < 0:
            _refuse(
                f"it takes more than {self.total:,} steps, more than any sane template needs for "
                "so few messages"
            )

    def spend_reading(self, value: Any, *, deep: bool = True) -> None:
        """Spend the steps of reading `value`.

        Args:
            deep: True to count nested values too, at each occurrence.
        """
        if isinstance(value, TEXT_TYPES):
            self.spend(len(value) // CHARS_A_STEP)
        elif not deep:
            self.spend(len(value) if isinstance(value, (*CONTAINER_TYPES, range)) else 0)
        elif isinstance(value, CONTAINER_TYPES):
            self._spend_reading_nested(value)
        elif isinstance(value, range):
            self.spend(len(value))

    def _spend_reading_nested(self, value: Any) -> None:
        pending = [value]
        while pending:
            inner = pending.pop()
            if isinstance(inner, CONTAINER_TYPES):
                self.spend(1 + len(inner))
                if isinstance(inner, dict):
                    pending += inner.keys()
                    inner = inner.values()
                pending += (
                    item for item in inner if isinstance(item, (*CONTAINER_TYPES, *TEXT_TYPES))
                )
            elif isinstance(inner, TEXT_TYPES):
                self.spend(len(inner) // CHARS_A_STEP)


def _refuse(reason: str) -> NoReturn:
    raise jinja2.TemplateRuntimeError(reason)


# --- spend nodes, which are compiled into a template


class _StepCounter(NodeTransformer):
    """A transformer of a template's syntax tree that inserts spend nodes: filters that spend steps.

    Steps are counted in each loop, and before each operator (+, ~, comparison, subscript, dict key)
    that reads its operands, since `MeteredEnvironment.call` does not see it.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:
        spend_node = _make_spend_node(node)
        self.generic_visit(node)
        if node.test is not None:  # skipped items never reach the body
            node.test = nodes.And(spend_node, node.test, lineno=node.lineno)
        else:
            node.body.insert(0, nodes.ExprStmt(spend_node, lineno=node.lineno))
        return node

    def _visit_body(self, node: Any) -> nodes.Node:
        spend_node = _make_spend_node(node)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(spend_node, lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _visit_body

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        self.generic_visit(node)
        for side in ("left", "right"):
            operand = getattr(node, side)
            if not isinstance(operand, nodes.Const | nodes.Add):
                setattr(node, side, _apply_filter(operand, SPEND_READING, nodes.Const(False)))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        is_constant = isinstance(node.expr, nodes.Const)
        for operand in node.ops:
            if operand.op in ("in", "notin") or not (
                is_constant or isinstance(operand.expr, nodes.Const)
            ):
                operand.expr = _spend_before_reading(operand.expr)
            is_constant = isinstance(operand.expr, nodes.Const)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_spend_before_reading(part) for part in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _apply_filter(node.node, SPEND_READING, nodes.Const(False))
        else:
            node.arg = _spend_before_reading(node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _spend_before_reading(node.key)
        return node


def _make_spend_node(node: nodes.Node) -> nodes.Expr:
    """Return a node that spends the steps of one pass through a body with its literal texts.

    Its value is always True.
    """
    texts = [
        *(literal.data for literal in node.find_all(nodes.TemplateData)),
        *(literal.value for literal in node.find_all(nodes.Const)),
    ]
    n_chars = sum(len(text) for text in texts if isinstance(text, str))
    base_steps = STEPS_A_CALL if isinstance(node, nodes.For) and node.recursive else 1
    return _apply_filter(nodes.Const(base_steps + n_chars // CHARS_A_STEP), SPEND_STEPS)


def _spend_before_reading(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _apply_filter(node, SPEND_READING)


def _apply_filter(node: nodes.Expr, name: str, *arguments: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)


@pass_context
def _spend_steps(context: Context, steps: int) -> bool:
    context.parent[BUDGET_VARIABLE].spend(steps)
    return True


@pass_context
def _spend_reading(context: Context, value: Any, deep: bool = True) -> Any:
    """Spend the steps of reading a value, and return it. Jinja also calls it on all output."""
    if type(value) is not str or len(value) >= CHARS_A_STEP:
        context.parent[BUDGET_VARIABLE].spend_reading(value, deep=deep)
    return value


# --- the environment of renderings


class _OpaqueNamespace(Namespace):
    """A namespace whose repr omits its content, which may contain the namespace itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _get_owner(called: Any) -> Any:
    """Return the object whose method is called, also through a wrapper; None for a function."""
    for method in (called, getattr(called, "__wrapped__", None)):  # only wrappers have __wrapped__
        # A template may call any object, and only methods have an owner.
        if (owner := getattr(method, "__self__", None)) is not None:
            return owner
    return None


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """A Jinja sandbox that counts the steps of its templates.

    Templates need a `StepBudget` among their variables, under the name BUDGET_VARIABLE.
    """

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, finalize=_spend_reading, **options)
        self.filters = {
            name: _count_filter_steps(name, function) for name, function in DEFAULT_FILTERS.items()
        }
        # The prompt of a task must be the same in all attempts, and in a resumed run.
        self.filters.pop("random", None)
        self.filters |= {SPEND_STEPS: _spend_steps, SPEND_READING: _spend_reading}
        self.tests = {
            name: _count_test_steps(name, function) for name, function in DEFAULT_TESTS.items()
        }
        self.globals["namespace"] = _OpaqueNamespace
        for name in DEFAULT_NAMESPACE.keys() & {"lipsum"}:  # it makes random text of any length
            del self.globals[name]

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add a function as a filter whose steps are counted."""
        self.filters[name] = _count_filter_steps(name, function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _StepCounter().visit(super()._parse(source, name, filename))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Count the steps of a call in a template, check the growth of its result, and run it."""
        budget = __context.parent[BUDGET_VARIABLE]
        budget.spend(STEPS_A_CALL)
        owner = _get_owner(__obj)
        if isinstance(owner, (*TEXT_TYPES, int, float)):
            budget.spend_reading(owner)
            for argument in (*args, *kwargs.values()):
                budget.spend_reading(argument)
            if __obj.__name__ == "join" and args:
                args = (_to_sized(args[0]), *args[1:])
            _check_growth(__obj.__name__, owner, args, kwargs)
        elif isinstance(owner, CONTAINER_TYPES):
            budget.spend_reading(owner, deep=False)
        result = super().call(__context, __obj, *args, **kwargs)
        budget.spend_reading(result, deep=False)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check and compute *, ** or %, which can make long values of short ones."""
        budget = context.parent[BUDGET_VARIABLE]
        if operator == "**":
            if (
                isinstance(left, int)
                and isinstance(right, int)
                and left.bit_length() * right > MAX_BITS
            ):
                _refuse("a power has more digits than a template needs")
        elif operator == "%" and isinstance(left, TEXT_TYPES):
            _check_format(left)
            budget.spend_reading(right)
        elif operator == "*":
            _check_product(left, right)
        result = super().call_binop(context, operator, left, right)
        budget.spend_reading(result, deep=False)
        return result


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_BITS:
            _refuse("a product has more digits than a template needs")
        return
    for sequence, count in ((left, right), (right, left)):
        if (
            isinstance(sequence, (*TEXT_TYPES, list, tuple))
            and isinstance(count, int)
            and len(sequence) * count > MAX_CHARS
        ):
            _refuse(f"a repetition makes more than {MAX_CHARS:,} characters or items")


def _check_growth(name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise TemplateRuntimeError if a filter's or method's result would be very long."""
    values = (*args, *kwargs.values())
    if name in ("format", "format_map") and isinstance(value, TEXT_TYPES):
        _check_format(value)
    elif name == "translate":
        _refuse("translate() is not for templates: use replace")
    elif (
        name == "replace"
        and isinstance(value, TEXT_TYPES)
        and len(values) >= 2
        and all(isinstance(argument, type(value)) for argument in values[:2])
    ):
        if value.count(values[0]) * len(values[1]) > MAX_CHARS:
            _refuse(f"a replacement makes more than {MAX_CHARS:,} characters")
    elif name == "join":
        argument = values[0] if values else ""
        items, separator = (argument, value) if isinstance(value, TEXT_TYPES) else (value, argument)
        if (
            isinstance(items, Sized)
            and isinstance(separator, TEXT_TYPES)
            and len(items) * len(separator) > MAX_CHARS
        ):
            _refuse(f"join() makes more than {MAX_CHARS:,} characters")
    elif name in GROWING_FUNCTIONS:
        n_insertions = (
            1 + len(value)
            if isinstance(value, (*TEXT_TYPES, *CONTAINER_TYPES))
            and name not in ("center", "ljust", "rjust")
            else 1
        )
        largest = max(map(_get_magnitude, values), default=0)
        if n_insertions * largest > MAX_CHARS or (
            not isinstance(value, TEXT_TYPES) and largest > MAX_WIDTH
        ):
            _refuse(f"{name}() makes more than {MAX_CHARS:,} characters or items")


def _get_magnitude(value: Any) -> int:
    """Return the absolute value of an integer, or the length of a text."""
    if isinstance(value, int):
        return abs(value)
    return len(value) if isinstance(value, TEXT_TYPES) else 0


def _to_sized(items: Any) -> Any:
    """Return a generator's items as a list, so that they can be counted before they are joined."""
    return items if isinstance(items, Sized) or not isinstance(items, Iterable) else list(items)


def _check_format(format_text: Any) -> None:
    """Raise TemplateRuntimeError for too large widths in a format, or widths from its values."""
    text = format_text if isinstance(format_text, str) else format_text.decode("latin-1")
    has_variable_widths = (
        "*" in text or re.search(r"\{[^{}]*\{", text.replace("{{", "")) is not None
    )
    widths = [
        min(int(digits[-9:]), MAX_WIDTH + 1) if len(digits) < 10 else MAX_WIDTH + 1
        for digits in re.findall(r"[0-9]+", text)
    ]
    if has_variable_widths or sum(widths) > MAX_WIDTH:
        _refuse("a format has wider fields than a template needs")


def _count_filter_steps(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter whose steps are counted. It is never folded into a constant."""
    pass_arg = PassArg.from_obj(function)
    is_deep, is_slow = name not in SHALLOW_FILTERS, name in SLOW_FILTERS
    can_grow = name in GROWING_FUNCTIONS or name in ("format", "replace", "join")

    @pass_context
    def counted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = context.parent[BUDGET_VARIABLE]
        budget.spend(1)
        if name == "join":
            value = _to_sized(value)
        budget.spend_reading(value, deep=is_deep)
        if is_slow and isinstance(value, Sized):
            budget.spend(len(value) * (1 if isinstance(value, str) else STEPS_AN_ITEM))
        if args or kwargs:
            for argument in (*args, *kwargs.values()):
                budget.spend_reading(argument)
            if can_grow:
                _check_growth(name, value, args, kwargs)
        result = function(*_get_passed_arguments(pass_arg, context), value, *args, **kwargs)
        budget.spend_reading(result, deep=False)
        return result

    return counted


def _count_test_steps(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a test whose steps are counted if it compares its values."""
    if name not in COMPARING_TESTS:
        return function

    @pass_context
    def counted(context: Context, value: Any, *args: Any) -> Any:
        for argument in (value, *args):
            context.parent[BUDGET_VARIABLE].spend_reading(argument)
        return function(value, *args)

    return counted


def _get_passed_arguments(pass_arg: PassArg | None, context: Context) -> tuple[Any, ...]:
    """Return what Jinja passes to a filter before its value.

    That is the context, the evaluation context or the environment, or nothing.
    """
    match pass_arg:
        case PassArg.context:
            return (context,)
        case PassArg.eval_context:
            return (context.eval_ctx,)
        case PassArg.environment:
            return (context.environment,)
        case _:
            return ()
