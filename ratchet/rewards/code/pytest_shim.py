"""The part of pytest that tests of functions use, for the sandbox, which has no pytest.

Its source is put before the tests. It imports only the standard library.
"""

import contextlib
import inspect
import itertools
import math
import re


class UnsupportedPytest(NameError):
    """An error for what this part of pytest lacks. A NameError is a fault of the tests."""


class _Mark:
    """A mark, which is bare or has arguments. It decorates a function or a class."""

    def __init__(self, name, arguments=(), keywords=None):
        self.name = name
        self.arguments = arguments
        self.keywords = keywords or {}

    def __call__(self, *arguments, **keywords):
        if len(arguments) == 1 and callable(arguments[0]) and not keywords:
            target = arguments[0]
            marks = [*_list_marks(target), self]
            target._pytest_marks = marks  # pyright: ignore[reportFunctionMemberAccess]
            return target
        return _Mark(self.name, arguments, keywords)

    def excludes(self):
        """True if the mark's test does not count: it is skipped, or may fail."""
        if self.name not in ("skip", "skipif", "xfail"):
            return False
        if self.keywords.get("strict"):
            raise UnsupportedPytest("mark.xfail(strict=True)")
        conditions = [*self.arguments]
        if "condition" in self.keywords:
            conditions.append(self.keywords["condition"])
        if self.name == "skip" or (self.name == "xfail" and not conditions):
            return True
        if any(isinstance(condition, str) for condition in conditions):
            raise UnsupportedPytest(f"mark.{self.name} with a text as its condition")
        return any(conditions)

    def list_rows(self):
        """Return the arguments of each case of mark.parametrize, as dictionaries."""
        bound = inspect.signature(_take_parameters).bind(*self.arguments, **self.keywords)
        names, cases = bound.arguments["argnames"], bound.arguments["argvalues"]
        if bound.arguments.get("indirect"):
            raise UnsupportedPytest("mark.parametrize(indirect=...)")
        is_single = False
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",") if name.strip()]
            is_single = len(names) == 1
        rows = []
        for case in cases:
            if isinstance(case, _Param):
                if any(mark.excludes() for mark in case.marks):
                    continue
                values = case.values
            else:
                values = [case] if is_single else case
            rows.append(dict(zip(names, values, strict=True)))
        return rows


def _take_parameters(argnames, argvalues, indirect=False, ids=None, scope=None):
    """Has the signature of mark.parametrize."""


def _list_marks(target):
    return list(getattr(target, "__dict__", {}).get("_pytest_marks", []))


class _Marks:
    def __getattr__(self, name):
        return _Mark(name)


class _Param:
    def __init__(self, values, marks):
        self.values = values
        self.marks = marks if isinstance(marks, list | tuple) else [marks]


class _Fixture:
    def __init__(self, function, autouse, scope):
        self.function = function
        self.autouse = autouse
        self.is_shared = scope in ("module", "package", "session")


class pytest:
    """`raises`, `approx`, `mark`, `fixture`, `param` and `fail`.

    The marks parametrize, usefixtures, skip, skipif and xfail count; others do nothing.
    """

    fixtures = {}  # noqa: RUF012

    class raises:
        def __init__(self, expected, *call, match=None, **keywords):
            self.expected = expected
            self.pattern = match
            self.value = None
            if call:
                with self:
                    call[0](*call[1:], **keywords)
            elif keywords:
                raise UnsupportedPytest(f"raises({', '.join(keywords)}=...)")

        def __enter__(self):
            return self

        def __exit__(self, kind, error, trace):
            if error is None:
                raise AssertionError(f"it did not raise {self.expected}")
            if not isinstance(error, self.expected):
                return False
            self.value, self.type = error, kind
            self.typename = kind.__name__
            return self.pattern is None or self.match(self.pattern)

        def match(self, pattern):
            if not re.search(pattern, str(self.value)):
                raise AssertionError(f"{self.value!r} does not match {pattern!r}")
            return True

    class approx:
        def __init__(self, expected, rel=None, abs=None, nan_ok=False):
            self.expected = expected
            self.rel = rel
            self.abs = abs
            self.nan_ok = nan_ok

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
            if self.nan_ok and actual != actual and expected != expected:
                return True
            if math.isinf(abs(expected)):  # no other number is close to infinity
                return False
            relative = (1e-6 if self.rel is None else self.rel) * abs(expected)
            if self.abs is not None and self.rel is None:
                relative = 0
            tolerance = max(relative, 1e-12 if self.abs is None else self.abs)
            return abs(actual - expected) <= tolerance

    mark = _Marks()

    @staticmethod
    def param(*values, marks=(), **_):
        return _Param(values, marks)

    @staticmethod
    def fail(reason=""):
        raise AssertionError(reason)

    @classmethod
    def fixture(cls, function=None, *, name=None, autouse=False, scope="function", params=None):
        if params is not None or scope == "class" or callable(scope):
            raise UnsupportedPytest("fixture(params=...), or one of scope='class'")
        if function is None:
            return lambda later: cls.fixture(later, name=name, autouse=autouse, scope=scope)
        cls.fixtures[name or function.__name__] = _Fixture(function, autouse, scope)
        return function


class _Case:
    """A test function with the arguments of one case, and a class if it is a method."""

    def __init__(self, name, function, owner, values, extra_fixtures):
        self.name = name
        self.function = function
        self.owner = owner
        self.values = values
        autouse = [name for name, fixture in pytest.fixtures.items() if self.uses(fixture)]
        self.fixtures = [*autouse, *extra_fixtures]
        self.names = [name for name in _list_needed(function, owner) if name not in values]
        for needed in [*self.fixtures, *self.names]:
            self.check_fixture(needed, ())

    def uses(self, fixture):
        name = fixture.function.__name__
        is_method = next(iter(inspect.signature(fixture.function).parameters), "") == "self"
        is_own = getattr(self.owner, name, None) is fixture.function
        return fixture.autouse and (is_own or not is_method)

    def check_fixture(self, name, path):
        if name in self.values:
            return
        if name not in pytest.fixtures or name in path:
            raise UnsupportedPytest(f"the fixture {name}")
        for needed in _list_needed(pytest.fixtures[name].function, self.owner):
            self.check_fixture(needed, (*path, name))

    def run(self, shared):
        """Run the test with fixtures of its own, and those of wider scopes in `shared`."""
        instance = self.owner and self.owner()
        with contextlib.ExitStack() as stack:
            hooks = globals() if self.owner is None else _AttributeMap(instance)
            starts = ("setup_function",) if self.owner is None else ("setup_method", "setUp")
            ends = ("teardown_function",) if self.owner is None else ("tearDown", "teardown_method")
            for end in reversed(ends):
                stack.callback(_call_hook, hooks, end, self.function)
            for start in starts:
                _call_hook(hooks, start, self.function)
            values = dict(self.values)
            for name in [*self.fixtures, *self.names]:
                self.make_fixture(name, instance, values, shared, stack)
            function = self.function if instance is None else getattr(instance, self.name)
            function(**self.values, **{name: values[name] for name in self.names})

    def make_fixture(self, name, instance, values, shared, stack):
        if name in values:
            return values[name]
        if name in shared:
            return values.setdefault(name, shared[name])
        fixture = pytest.fixtures[name]
        arguments = {
            needed: self.make_fixture(needed, instance, values, shared, stack)
            for needed in _list_needed(fixture.function, self.owner)
        }
        if "self" in inspect.signature(fixture.function).parameters:
            arguments["self"] = instance
        value = fixture.function(**arguments)
        if inspect.isgenerator(value):
            generator = value
            value = next(generator)
            if not fixture.is_shared:
                stack.callback(lambda: next(generator, None))
        if fixture.is_shared:
            shared[name] = value
        values[name] = value
        return value


class _Module:
    """The module of the tests, for its setup_module."""

    def __getattr__(self, name):
        return globals()[name]

    def __setattr__(self, name, value):
        globals()[name] = value


class _AttributeMap:
    def __init__(self, target):
        self.target = target

    def get(self, name):
        return getattr(self.target, name, None)


def _call_hook(hooks, name, argument):
    hook = hooks.get(name)
    if hook is not None:
        hook(*[argument][: len(inspect.signature(hook).parameters)])


def _list_needed(function, owner):
    """Return the names of the arguments that fixtures give, without `self` of a method."""
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind in kinds
        and parameter.default is inspect.Parameter.empty
        and not (owner and parameter.name == "self")
    ]


def _collect_function(name, function, owner, class_marks):
    marks = [*class_marks, *_list_marks(function)]
    is_skipped = getattr(function, "__unittest_skip__", False)
    if is_skipped or getattr(function, "__unittest_expecting_failure__", False):
        return
    if any(mark.excludes() for mark in marks):
        return
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise UnsupportedPytest(f"{name}, a coroutine or a generator")
    fixtures = [name for mark in marks if mark.name == "usefixtures" for name in mark.arguments]
    tables = [mark.list_rows() for mark in marks if mark.name == "parametrize"]
    for rows in itertools.product(*tables):
        values = {key: value for row in rows for key, value in row.items()}
        yield _Case(name, function, owner, values, fixtures)


def _collect_class(test):
    """Yield the cases of a class's methods and of the test classes in it."""
    if getattr(test, "__unittest_skip__", False):
        return
    is_unittest = hasattr(test, "assertEqual")
    if not is_unittest and test.__init__ is not object.__init__:
        raise UnsupportedPytest(f"the test class {test.__name__} with a method __init__")
    ancestors = test.__mro__[::-1]
    names = dict.fromkeys(name for ancestor in ancestors for name in vars(ancestor))
    marks = [mark for ancestor in ancestors for mark in _list_marks(ancestor)]
    for name in names:
        function = getattr(test, name)
        if inspect.isclass(function):
            if name.startswith("Test"):
                yield from _collect_class(function)
        elif name.startswith("test") and callable(function):
            yield from _collect_function(name, function, test, marks)


def _run_tests(*tests):
    """Run test functions and test classes.

    All of them are collected before the first runs, so that what is not supported is found
    whatever the judged program answers.
    """
    fixtures = [fixture.function for fixture in pytest.fixtures.values()]
    groups = [
        list(
            _collect_class(test)
            if isinstance(test, type)
            else _collect_function(test.__name__, test, None, [])
        )
        for test in tests
        if test not in fixtures
    ]
    shared = {}
    hooks = globals()
    for start in ("setup_module", "setUpModule"):
        _call_hook(hooks, start, _Module())
    for cases in groups:
        for owner, owner_cases in itertools.groupby(cases, lambda case: case.owner):
            hooks = _AttributeMap(owner)
            for start in ("setup_class", "setUpClass"):
                _call_hook(hooks, start, owner)
            for case in owner_cases:
                case.run(shared)
            for end in ("tearDownClass", "teardown_class"):
                _call_hook(hooks, end, owner)
