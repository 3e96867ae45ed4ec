"""List the edits of a node of the syntax tree: nodes that may replace it, by kind.

- sign: a minus is added or removed, + and - are exchanged, a comparison or an extremum is reversed.
- mask: a `where`, `&`, `~`, clamp or mask column has no effect.
- denominator: a division is dropped, `correction` is ignored, or a sum replaces a mean.
- factor: one side of a product is dropped.
- detach: the gradient flows through.
- index: 0 replaces 1 in subscripts, dimensions and offsets, an order is reversed, or arguments are
  exchanged.
- constant: another number.
- branch: a condition is negated.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass

KINDS = ("sign", "mask", "denominator", "factor", "detach", "index", "constant", "branch")
Edit = tuple[str, ast.AST]

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPPOSITES = {"minimum": "maximum", "amin": "amax", "min": "max", "cummin": "cummax", "fmin": "fmax"}
OPPOSITES |= {v: k for k, v in OPPOSITES.items()}
EVEN = {"square", "abs"}  # functions f with f(-x) = f(x)
MASKS = {"trainable_T", "predicted_T", "train_S", "scored_S", "truncated_S", "cut_S"}
REDUCTIONS = {
    "sum",
    "mean",
    "cumsum",
    "logsumexp",
    "softmax",
    "log_softmax",
    "gather",
    "all",
    "any",
    "amin",
    "amax",
    "index_add",
}
REDUCTIONS |= {"flip", "unsqueeze", "squeeze", "cat", "stack", "scatter_reduce", "scatter_add"}
REDUCTIONS |= {"index_select", "size"}
# Calls that an edit replaces by their object, or by their first argument; with the edit's kind.
DROPPED = {
    "detach": "detach",
    "masked_fill": "mask",
    "nan_to_num": "mask",
    "clamp": "mask",
    "abs": "sign",
    "flip": "index",
}
DROPPED |= {"reversed": "index", "expm1": "constant", "log1p": "constant"}
# Functions whose first two arguments are not exchanged: the order does not matter, or (`where`) the
# function has its own edits.
UNORDERED = {"minimum", "maximum", "logaddexp", "where"}
SHAPE_SUFFIX = re.compile(r"_[A-Z]+$")
SMALL = 1e-3  # smaller constants only prevent numerical errors


@dataclass(frozen=True)
class Place:
    """The position of a node in the tree.

    above: its ancestors, from the module down.
    name, index: the parent's field that holds it, and its index if the field is a list.
    """

    node: ast.AST
    above: tuple[ast.AST, ...]
    name: str
    index: int | None

    @property
    def parent(self) -> ast.AST:
        return self.above[-1]

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.name, node)
        else:
            getattr(self.parent, self.name)[self.index] = node


def edits(place: Place) -> Iterator[Edit]:
    """Yield (kind, new node) of each edit of the node at a place."""
    node = place.node
    if isinstance(node, ast.UnaryOp):
        yield from _unary(node, place)
    elif isinstance(node, ast.BinOp):
        yield from _binary(node, place)
    elif isinstance(node, ast.AugAssign):
        yield from _augmented(node)
    elif isinstance(node, ast.Compare):
        yield from _compare(node)
    elif isinstance(node, ast.Call):
        yield from _call(node)
    elif isinstance(node, ast.Attribute):
        yield from _attribute(node, place)
    elif isinstance(node, ast.Name):
        yield from _name(node, place)
    elif isinstance(node, ast.Constant):
        yield from _constant(node, place)
    elif isinstance(node, ast.BoolOp):
        yield from (("branch", deepcopy(value)) for value in node.values)
    if (
        isinstance(node, ast.expr)
        and place.name == "test"
        and not isinstance(node, (ast.Compare, ast.UnaryOp))
    ):
        yield "branch", ast.UnaryOp(ast.Not(), deepcopy(node))
    if (
        isinstance(node, ast.expr)
        and _is_number(place)
        and not isinstance(node, (ast.UnaryOp, ast.Constant))
    ):
        yield "sign", ast.UnaryOp(ast.USub(), deepcopy(node))


def _with(node: ast.AST, **fields: object) -> ast.AST:
    copy = deepcopy(node)
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy


def _unary(node: ast.UnaryOp, place: Place) -> Iterator[Edit]:
    # A dimension keeps its sign: of two dimensions, -1 and 1 are the same one.
    if isinstance(node.op, ast.USub) and not (
        isinstance(node.operand, ast.Constant) and _is_dimension(place)
    ):
        yield "sign", deepcopy(node.operand)
    elif isinstance(node.op, ast.Invert):
        yield "mask", deepcopy(node.operand)
    elif isinstance(node.op, ast.Not):
        yield "branch", deepcopy(node.operand)


def _binary(node: ast.BinOp, place: Place) -> Iterator[Edit]:
    left, right = deepcopy(node.left), deepcopy(node.right)
    if isinstance(node.op, (ast.Add, ast.Sub)):
        yield "sign", _with(node, op=ast.Sub() if isinstance(node.op, ast.Add) else ast.Add())
        if isinstance(node.op, ast.Sub) and not _is_even(place.parent) and not _is_number(place):
            yield "sign", ast.BinOp(right, ast.Sub(), left)
        if isinstance(node.right, ast.Constant):
            yield ("denominator" if _in_divisor(place) else "index"), left
    elif isinstance(node.op, (ast.Div, ast.FloorDiv)):
        yield "denominator", left
    elif isinstance(node.op, ast.Mult):
        yield "factor", left
        yield "factor", right
    elif isinstance(node.op, (ast.BitAnd, ast.BitOr)) and not isinstance(node.right, ast.Dict):
        yield "mask", left
        yield "mask", right


def _is_even(node: ast.AST) -> bool:
    """Return True for `x.square()`, `x.abs()` and `abs(x)`, which do not depend on x's sign."""
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else _called(node)
        if isinstance(node, ast.Call)
        else ""
    ) in EVEN


def _augmented(node: ast.AugAssign) -> Iterator[Edit]:
    if isinstance(node.op, (ast.Add, ast.Sub)):
        yield "sign", _with(node, op=ast.Sub() if isinstance(node.op, ast.Add) else ast.Add())
    kind = {ast.Div: "denominator", ast.Mult: "factor", ast.BitAnd: "mask", ast.BitOr: "mask"}.get(
        type(node.op)
    )
    if kind:
        yield kind, ast.Pass()


def _compare(node: ast.Compare) -> Iterator[Edit]:
    if len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield "sign", _with(node, ops=[COMPARISONS[type(node.ops[0])]()])


def _call(node: ast.Call) -> Iterator[Edit]:
    name = _called(node)
    if name == "where" and len(node.args) == 3:
        yield from (("mask", deepcopy(x)) for x in node.args[1:] if not isinstance(x, ast.Constant))
    if (
        name not in UNORDERED
        and len(shapes := [_shape(x) for x in node.args[:2]]) > 1
        and shapes[0]
        and len(set(shapes)) == 1
    ):
        yield "index", _with(node, args=deepcopy([node.args[1], node.args[0], *node.args[2:]]))
    if name not in DROPPED or _guards_division(node):
        return
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    is_method = owner is not None and not (
        isinstance(owner, ast.Name) and owner.id in ("torch", "F", "math")
    )
    if is_method or node.args:
        yield DROPPED[name], deepcopy(owner if is_method and owner else node.args[0])


def _shape(node: ast.AST) -> str:
    """Return the shape suffix of a name, or "". Arguments of equal shape may be confused."""
    match = SHAPE_SUFFIX.search(node.id) if isinstance(node, ast.Name) else None
    return match.group() if match else ""


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _attribute(node: ast.Attribute, place: Place) -> Iterator[Edit]:
    if node.attr in MASKS and isinstance(node.ctx, ast.Load) and not _is_dropped(place):
        yield "mask", ast.BinOp(deepcopy(node), ast.BitOr(), ast.Constant(True))
    is_called = isinstance(place.parent, ast.Call) and place.name == "func"
    if node.attr in OPPOSITES and is_called:
        yield "sign", _with(node, attr=OPPOSITES[node.attr])
    if node.attr in ("sum", "mean") and is_called:
        yield "denominator", _with(node, attr="mean" if node.attr == "sum" else "sum")
    if node.attr == "no_grad":
        yield "detach", _with(node, attr="enable_grad")


def _is_dropped(place: Place) -> bool:
    """Return True if another edit drops the node: under `&`, or as the condition of a `where`."""
    if isinstance(place.parent, ast.Call):
        return _called(place.parent) == "where" and place.index == 0
    return isinstance(place.parent, ast.BinOp) and isinstance(place.parent.op, ast.BitAnd)


def _name(node: ast.Name, place: Place) -> Iterator[Edit]:
    if node.id in ("min", "max") and isinstance(place.parent, ast.Call) and place.name == "func":
        yield "sign", _with(node, id=OPPOSITES[node.id])


def _constant(node: ast.Constant, place: Place) -> Iterator[Edit]:
    value = node.value
    if isinstance(value, bool):
        yield "constant", ast.Constant(not value)
    elif isinstance(value, str) and value in OPPOSITES:
        yield "sign", ast.Constant(OPPOSITES[value])
    elif isinstance(value, (int, float)) and not (
        isinstance(place.parent, ast.keyword) and _guards_division(place.above[-2])
    ):
        if _in_subscript(place) or _is_dimension(place):
            yield "index", ast.Constant(1 if value == 0 else value - 1)
        elif abs(value) < SMALL:
            yield "constant", ast.Constant(type(value)(1))
        else:
            yield "constant", ast.Constant(value * 2)


def _guards_division(node: ast.AST) -> bool:
    """Return True for `x.clamp(min=1)` and `x.clamp(min=tiny)` without other arguments."""
    if not (
        isinstance(node, ast.Call)
        and _called(node) == "clamp"
        and not node.args
        and len(node.keywords) == 1
    ):
        return False
    bound = node.keywords[0]
    value = bound.value.value if isinstance(bound.value, ast.Constant) else None
    return (
        bound.arg == "min" and isinstance(value, (int, float)) and (value == 1 or 0 < value < SMALL)
    )


def _is_number(place: Place) -> bool:
    """Return True for a whole numerical value.

    It is assigned to a name with a shape suffix, or returned by a function whose return type is a
    tensor or a number.
    """
    if isinstance(
        place.node,
        (ast.Compare, ast.Tuple, ast.List, ast.Dict, ast.ListComp, ast.BoolOp, ast.Lambda),
    ):
        return False
    if (
        isinstance(place.node, ast.UnaryOp)
        or place.name not in ("value", "elts")
        or _is_mask(place.node)
    ):
        return False
    if isinstance(place.node, ast.Call) and _called(place.node).startswith("zeros"):
        return False
    if isinstance(place.parent, ast.Assign):
        target = place.parent.targets[0]
        return isinstance(target, ast.Name) and bool(SHAPE_SUFFIX.search(target.id))
    returns = next(
        (a.returns for a in reversed(place.above) if isinstance(a, ast.FunctionDef)), None
    )
    return_type = ast.unparse(returns) if returns else ""
    if isinstance(place.parent, ast.Return):
        return return_type in ("Tensor", "float", "int")
    is_first = (
        isinstance(place.parent, ast.Tuple)
        and isinstance(place.above[-2], ast.Return)
        and place.index == 0
    )
    return is_first and return_type.startswith("tuple[Tensor")


def _is_mask(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, (ast.BitAnd, ast.BitOr))
    return isinstance(node, ast.Attribute) and node.attr in MASKS


def _in_divisor(place: Place) -> bool:
    chain = itertools.pairwise([*place.above, place.node])
    return any(
        isinstance(a, ast.BinOp) and isinstance(a.op, ast.Div) and b is a.right for a, b in chain
    )


def _in_subscript(place: Place) -> bool:
    """Return True inside a subscript, also in an offset, but not inside a call in the subscript."""
    chain = [*place.above, place.node]
    for child, parent in itertools.pairwise(reversed(chain)):
        if isinstance(parent, ast.Subscript):
            return child is parent.slice
        if not isinstance(parent, (ast.BinOp, ast.UnaryOp, ast.Slice, ast.Tuple)):
            return False
    return False


def _is_dimension(place: Place) -> bool:
    """Return True for `dim=-1`, and for a positional argument of a reduction."""
    above = place.above[:-1] if isinstance(place.parent, ast.UnaryOp) else place.above
    child = place.parent if isinstance(place.parent, ast.UnaryOp) else place.node
    parent = above[-1]
    if isinstance(parent, ast.keyword):
        return parent.arg in ("dim", "dims")
    return (
        isinstance(parent, ast.Call)
        and getattr(parent.func, "attr", "") in REDUCTIONS
        and child in parent.args
    )
