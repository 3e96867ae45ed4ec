"""Limit the work of Jinja templates: they come with models, so they may be written to hang or to
fill memory.

Each loop pass, call, operation and filter spends steps of a budget, more for long values.
Operations that would multiply lengths are refused before they run. The count depends on the
template and its input alone, never on a clock. Constants are not folded where that could take long,
since the compiler's work is not counted.
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

WORK = "\0work"  # variable that holds the rendering's TemplateWork; no template can write it
TICK, WEIGH = "ratchet.tick", "ratchet.weigh"

BASE_STEPS = 500_000  # a long published template takes about 300 per message
STEPS_PER_MESSAGE = 1_000
CHARS_A_STEP = 32  # of texts, since C code reads these fast
STEPS_A_CALL = 10
STEPS_AN_ITEM = 20  # of a list, in a filter that loops over it in Python
MAX_CHARS = 1 << 26  # of a text, or items of a list, that one operation creates
MAX_BITS = 4096  # of an integer
# The maximum sum of a format's widths, and argument to a GROWING filter if the value is not text.
MAX_WIDTH = 1 << 20

Text = (str, bytes)
Container = (list, tuple, dict, set, frozenset)

# Filters that pass their value on, or take its length, without reading nested values.
SHALLOW = frozenset(
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
        *("reverse", "default", "d", "attr", "batch", "slice", "safe"),
    )
)
# Tests of Jinja that compare values, and so may read all nested values.
COMPARING = frozenset(
    (
        *("in", "eq", "equalto", "==", "ne", "!=", "lt", "le"),
        *("gt", "ge", "<", "<=", ">", ">=", "lessthan", "greaterthan"),
    )
)
# Filters and text methods whose result grows with the value or the length of an argument.
GROWING = frozenset(
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
SLOW = frozenset(
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


class TemplateWork:
    """The step budget of one rendering."""

    __slots__ = ("allowed", "left")

    def __init__(self, messages: int, chars: int) -> None:
        self.allowed = self.left = BASE_STEPS + STEPS_PER_MESSAGE * messages + chars

    def spend(self, steps: int) -> None:
        """Take steps from the budget. Raises TemplateRuntimeError if too few are left."""
        self.left -= steps
        if self.left < 0:
            _refuse(
                f"it takes more than {self.allowed:,} steps, which so few messages need in no sane "
                "template"
            )

    def weigh(self, value: Any, *, deep: bool = True) -> None:
        """Spend the steps of reading `value`. deep: also count nested values, at each
        occurrence."""
        if isinstance(value, Text):
            self.spend(len(value) // CHARS_A_STEP)
        elif not deep:
            self.spend(len(value) if isinstance(value, (*Container, range)) else 0)
        elif isinstance(value, Container):
            self._weigh_within(value)
        elif isinstance(value, range):
            self.spend(len(value))

    def _weigh_within(self, value: Any) -> None:
        waiting = [value]
        while waiting:
            inner = waiting.pop()
            if isinstance(inner, Container):
                self.spend(1 + len(inner))
                if isinstance(inner, dict):
                    waiting += inner.keys()
                    inner = inner.values()
                waiting += (item for item in inner if isinstance(item, (*Container, *Text)))
            elif isinstance(inner, Text):
                self.spend(len(inner) // CHARS_A_STEP)


def _refuse(why: str) -> NoReturn:
    raise jinja2.TemplateRuntimeError(why)


# --- counts that are compiled into a template


class _Counting(NodeTransformer):
    """A transformer that inserts a count into each loop, and before each operation that reads its
    operands without a call."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        tick = _tick_for(node)
        self.generic_visit(node)
        if node.test is not None:  # skipped items never reach the body
            node.test = nodes.And(tick, node.test, lineno=node.lineno)
        else:
            node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def _visit_called(self, node: Any) -> nodes.Node:
        tick = _tick_for(node)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _visit_called

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        self.generic_visit(node)
        for side in ("left", "right"):
            operand = getattr(node, side)
            if not isinstance(operand, nodes.Const | nodes.Add):
                setattr(node, side, _filtered(operand, WEIGH, nodes.Const(False)))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        constant = isinstance(node.expr, nodes.Const)
        for operand in node.ops:
            if operand.op in ("in", "notin") or not (
                constant or isinstance(operand.expr, nodes.Const)
            ):
                operand.expr = _weighed(operand.expr)
            constant = isinstance(operand.expr, nodes.Const)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_weighed(part) for part in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, WEIGH, nodes.Const(False))
        else:
            node.arg = _weighed(node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _weighed(node.key)
        return node


def _tick_for(node: nodes.Node) -> nodes.Expr:
    """Return a node that spends the cost of one pass through a body, its literal texts included."""
    texts = [*node.find_all(nodes.TemplateData), *node.find_all(nodes.Const)]
    chars = sum(
        len(text)
        for each in texts
        if isinstance(text := getattr(each, "data", getattr(each, "value", None)), str)
    )
    each = STEPS_A_CALL if getattr(node, "recursive", False) else 1
    return _filtered(nodes.Const(each + chars // CHARS_A_STEP), TICK)


def _weighed(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filtered(node, WEIGH)


def _filtered(node: nodes.Expr, name: str, *arguments: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)


@pass_context
def _tick(context: Context, steps: int) -> bool:
    context.parent[WORK].spend(steps)
    return True


@pass_context
def _weigh(context: Context, value: Any, deep: bool = True) -> Any:
    """Weigh a value and return it. Jinja also calls this for all that a template writes."""
    if type(value) is not str or len(value) >= CHARS_A_STEP:
        context.parent[WORK].weigh(value, deep=deep)
    return value


# --- the environment of renderings


class _Opaque(Namespace):
    """A namespace whose repr omits its contents, since they may contain the namespace."""

    def __repr__(self) -> str:
        return "<Namespace>"


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates need a `TemplateWork` among their variables, under the name
    WORK."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, finalize=_weigh, **options)
        self.filters = {
            name: _metered(name, function) for name, function in DEFAULT_FILTERS.items()
        }
        self.filters |= {TICK: _tick, WEIGH: _weigh}
        self.tests = {
            name: _metered_test(name, function) for name, function in DEFAULT_TESTS.items()
        }
        self.globals["namespace"] = _Opaque
        for name in DEFAULT_NAMESPACE.keys() & {"lipsum"}:
            del self.globals[name]

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add a function as a filter; its value is weighed."""
        self.filters[name] = _metered(name, function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counting().visit(super()._parse(source, name, filename))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Count and run a template's call; methods of texts and numbers are checked first."""
        work = __context.parent[WORK]
        work.spend(STEPS_A_CALL)
        owner = getattr(__obj, "__self__", None)
        if owner is None:
            owner = getattr(getattr(__obj, "__wrapped__", None), "__self__", None)
        if isinstance(owner, (*Text, int, float)):
            work.weigh(owner)
            for argument in (*args, *kwargs.values()):
                work.weigh(argument)
            if __obj.__name__ == "join" and args:
                args = (_sized(args[0]), *args[1:])
            _check_growth(__obj.__name__, owner, args, kwargs)
        elif isinstance(owner, Container):
            work.weigh(owner, deep=False)
        result = super().call(__context, __obj, *args, **kwargs)
        work.weigh(result, deep=False)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check and compute an operation that can make long values of short ones."""
        work = context.parent[WORK]
        if operator == "**":
            if (
                isinstance(left, int)
                and isinstance(right, int)
                and left.bit_length() * right > MAX_BITS
            ):
                _refuse("a power has more digits than a template needs")
        elif operator == "%" and isinstance(left, Text):
            _check_format(left, (right,))
            work.weigh(right)
        elif operator == "*":
            _check_product(left, right)
        result = super().call_binop(context, operator, left, right)
        work.weigh(result, deep=False)
        return result


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_BITS:
            _refuse("a product has more digits than a template needs")
        return
    for one, other in ((left, right), (right, left)):
        if (
            isinstance(one, (*Text, list, tuple))
            and isinstance(other, int)
            and len(one) * other > MAX_CHARS
        ):
            _refuse(f"a repetition makes more than {MAX_CHARS:,} characters or items")


def _check_growth(name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise TemplateRuntimeError if a filter's or method's result would be far longer than its
    inputs."""
    values = (*args, *kwargs.values())
    if name in ("format", "format_map") and isinstance(value, Text):
        _check_format(value, values)
    elif name == "translate":
        _refuse("translate() is not for templates: use replace")
    elif (
        name == "replace"
        and isinstance(value, Text)
        and len(values) >= 2
        and all(isinstance(g, type(value)) for g in values[:2])
    ):
        if value.count(values[0]) * len(values[1]) > MAX_CHARS:
            _refuse(f"a replacement makes more than {MAX_CHARS:,} characters")
    elif name == "join":
        other = values[0] if values else ""
        items, separator = (other, value) if isinstance(value, Text) else (value, other)
        if (
            isinstance(items, Sized)
            and isinstance(separator, Text)
            and len(items) * len(separator) > MAX_CHARS
        ):
            _refuse(f"join() makes more than {MAX_CHARS:,} characters")
    elif name in GROWING:
        times = (
            1 + len(value)
            if isinstance(value, (*Text, *Container)) and name not in ("center", "ljust", "rjust")
            else 1
        )
        largest = max(
            (
                abs(g) if isinstance(g, int) else len(g) if isinstance(g, Text) else 0
                for g in values
            ),
            default=0,
        )
        if times * largest > MAX_CHARS or (not isinstance(value, Text) and largest > MAX_WIDTH):
            _refuse(f"{name}() makes more than {MAX_CHARS:,} characters or items")


def _sized(items: Any) -> Any:
    """Return a generator's items as a list, so that they can be counted before they are joined."""
    return items if isinstance(items, Sized) or not isinstance(items, Iterable) else list(items)


def _check_format(form: Any, given: tuple[Any, ...]) -> None:
    """Raise TemplateRuntimeError if a format states too large widths, or takes widths from its
    values."""
    text = form if isinstance(form, str) else form.decode("latin-1")
    taken = "*" in text or re.search(r"\{[^{}]*\{", text.replace("{{", "")) is not None
    widths = [
        min(int(digits[-9:]), MAX_WIDTH + 1) if len(digits) < 10 else MAX_WIDTH + 1
        for digits in re.findall(r"[0-9]+", text)
    ]
    if taken or sum(widths) > MAX_WIDTH:
        _refuse("a format states wider fields than a template needs")


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that is counted, and never folded into a constant."""
    takes, deep, slow = PassArg.from_obj(function), name not in SHALLOW, name in SLOW
    grows = name in GROWING or name in ("format", "replace", "join")

    @pass_context
    def counted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        work = context.parent[WORK]
        work.spend(1)
        if name == "join":
            value = _sized(value)
        work.weigh(value, deep=deep)
        if slow and isinstance(value, Sized):
            work.spend(len(value) * (1 if isinstance(value, str) else STEPS_AN_ITEM))
        if args or kwargs:
            for argument in (*args, *kwargs.values()):
                work.weigh(argument)
            if grows:
                _check_growth(name, value, args, kwargs)
        result = function(*_first(takes, context), value, *args, **kwargs)
        work.weigh(result, deep=False)
        return result

    return counted


def _metered_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a test that is counted if it compares its values."""
    if name not in COMPARING:
        return function

    @pass_context
    def counted(context: Context, value: Any, *args: Any) -> Any:
        for each in (value, *args):
            context.parent[WORK].weigh(each)
        return function(value, *args)

    return counted


def _first(takes: PassArg | None, context: Context) -> tuple[Any, ...]:
    match takes:
        case PassArg.context:
            return (context,)
        case PassArg.eval_context:
            return (context.eval_ctx,)
        case PassArg.environment:
            return (context.environment,)
        case _:
            return ()
