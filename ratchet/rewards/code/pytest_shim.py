"""The part of pytest that tests of one function use, for the sandbox, which has no pytest.

Its source is put before the tests. It imports only the standard library.
"""

import contextlib
import inspect
import itertools
import math
import re


class _Marks(type):
    def __getattr__(cls, name):
        def mark(*arguments, **_):
            is_bare = len(arguments) == 1 and callable(arguments[0])
            return arguments[0] if is_bare else lambda function: function

        return mark


class _Mark(metaclass=_Marks):
    @staticmethod
    def parametrize(names, cases, **_):
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names

        def mark(function):
            values = [case if len(names) > 1 else [case] for case in cases]
            rows = [dict(zip(names, row, strict=True)) for row in values]
            function.parameters = [*vars(function).get("parameters", []), rows]
            return function

        return mark


class pytest:
    """`raises`, `approx`, `mark.parametrize`, `fixture`, `param`; other marks do nothing."""

    fixtures = {}  # noqa: RUF012

    class raises:
        def __init__(self, expected, match=None):
            self.expected = expected
            self.match = match
            self.value = None

        def __enter__(self):
            return self

        def __exit__(self, kind, error, trace):
            if error is None:
                raise AssertionError(f"it did not raise {self.expected}")
            if not isinstance(error, self.expected):
                return False
            self.value, self.type = error, kind
            if self.match is not None and not re.search(self.match, str(error)):
                raise AssertionError(f"{error!r} does not match {self.match!r}")
            return True

    class approx:
        def __init__(self, expected, rel=None, abs=None):
            self.expected = expected
            self.rel = rel
            self.abs = abs

        def __eq__(self, actual):
            expected = self.expected
            if isinstance(expected, dict):
                return (
                    isinstance(actual, dict)
                    and actual.keys() == expected.keys()
                    and all(self.is_close(actual[key], expected[key]) for key in expected)
                )
            if isinstance(expected, list | tuple):
                return (
                    isinstance(actual, list | tuple)
                    and len(actual) == len(expected)
                    and all(map(self.is_close, actual, expected))
                )
            return self.is_close(actual, expected)

        __hash__ = None  # pyright: ignore[reportAssignmentType]

        def is_close(self, actual, expected):
            numbers = (int, float, complex)
            if not isinstance(actual, numbers) or not isinstance(expected, numbers):
                return actual == expected
            if actual == expected:
                return True
            if math.isinf(abs(expected)):  # no other number is close to infinity
                return False
            relative = (1e-6 if self.rel is None else self.rel) * abs(expected)
            if self.abs is not None and self.rel is None:
                relative = 0
            tolerance = max(relative, 1e-12 if self.abs is None else self.abs)
            return abs(actual - expected) <= tolerance

    mark = _Mark

    @staticmethod
    def param(*values, **_):
        return values if len(values) != 1 else values[0]

    @staticmethod
    def fail(reason=""):
        raise AssertionError(reason)

    @classmethod
    def fixture(cls, function=None, **_):
        if function is None:
            return cls.fixture
        cls.fixtures[function.__name__] = function
        return function


def _make_fixture(name, stack):
    function = pytest.fixtures[name]
    arguments = {
        name: _make_fixture(name, stack) for name in inspect.signature(function).parameters
    }
    value = function(**arguments)
    if inspect.isgenerator(value):
        generator = value
        value = next(generator)
        stack.callback(lambda: next(generator, None))
    return value


def _run_test(test):
    """Run a test function, or the methods test... of a class, with parameters and fixtures."""
    if isinstance(test, type):
        for name, method in list(vars(test).items()):
            if name.startswith("test") and callable(method):
                instance = test()
                for set_up in ("setUp", "setup_method"):
                    if hasattr(instance, set_up):
                        getattr(instance, set_up)()
                _run_function(getattr(instance, name), vars(method).get("parameters", []))
        return
    _run_function(test, vars(test).get("parameters", []))


def _run_function(function, parameters):
    for rows in itertools.product(*parameters):
        values = {name: value for row in rows for name, value in row.items()}
        with contextlib.ExitStack() as stack:
            for name in inspect.signature(function).parameters:
                if name not in values:
                    values[name] = _make_fixture(name, stack)
            function(**values)
