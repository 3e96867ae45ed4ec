"""Run the cells of a code interpreter, one after the other in one namespace, inside the sandbox.

The sandbox gets this source with a call of `main` appended, so it imports only the standard
library. stdin is a JSON request: `cells` (their source) and `max_chars`. stdout is a JSON report on
the last cell: what it printed, the value of its last expression, its error.
"""

import ast
import io
import json
import os
import pprint
import random
import sys

FILENAME = "<cell>"


def run_cell(source, namespace):
    """Run a cell, and return (printed text, value of its last expression or None, error).

    The error is the exception, or None. The definitions before it stay.
    """
    printed = io.StringIO()
    sys.stdout = printed
    try:
        tree = ast.parse(source, FILENAME)
        ends_with_expression = bool(tree.body) and isinstance(tree.body[-1], ast.Expr)
        last = ast.Expression(tree.body.pop().value) if ends_with_expression else None
        exec(compile(tree, FILENAME, "exec", dont_inherit=True), namespace)
        value = None
        if last is not None:
            value = eval(compile(last, FILENAME, "eval", dont_inherit=True), namespace)
        return printed.getvalue(), None if value is None else pprint.pformat(value), None
    except BaseException as error:
        return printed.getvalue(), None, repr_error(error)


def repr_error(error):
    try:
        return repr(error)
    except BaseException:  # a class of the cell whose `__repr__` fails
        return type(error).__name__


def cut(text, max_chars):
    """Return the text, cut to a character more than `max_chars`, so that the cut can be seen."""
    return None if text is None else text[: max_chars + 1]


def main():
    channel = os.dup(1)
    os.dup2(2, 1)  # what a cell writes to the file descriptor is not a report
    leave = os._exit
    request = json.load(sys.stdin)
    random.seed(0)
    namespace = {"__name__": "__main__"}
    outcome = ("", None, None)
    for source in request["cells"]:
        outcome = run_cell(source, namespace)
    report = json.dumps([cut(text, request["max_chars"]) for text in outcome])
    unsent = memoryview(report.encode("ascii"))
    while unsent:
        unsent = unsent[os.write(channel, unsent) :]
    leave(0)
