"""The part of pytest that tests of functions use, for the sandbox, which has no pytest.

Its source is put before the tests. It imports only the standard library.
"""

import contextlib
import functools
import inspect
import itertools
import math
import re
import sys


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
            marks = [*_list_marks(target.__dict__), self]
            target.pytestmark = marks  # pyright: ignore[reportFunctionMemberAccess]
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


def _list_marks(names):
    """Return the marks of a module, class or function, whose names are given as a dictionary."""
    marks = names.get("pytestmark", [])
    return list(marks) if isinstance(marks, list | tuple) else [marks]


class _Marks:
    def __getattr__(self, name):
        return _Mark(name)


class _Param:
    def __init__(self, values, marks):
        self.values = values
        self.marks = marks if isinstance(marks, list | tuple) else [marks]


class _Fixture:
    def __init__(self, function, name, autouse, scope):
        self.function = function
        self.name = name
        self.autouse = autouse
        self.is_shared = scope in ("module", "package", "session")


class pytest:
    """`raises`, `approx`, `mark`, `fixture`, `param` and `fail`.

    The marks parametrize, usefixtures, skip, skipif and xfail count; others do nothing.
    """

    class raises:
        def __init__(self, expected_exception, *call, match=None, **keywords):
            self.expected = expected_exception
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
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise UnsupportedPytest(f"the fixture {function.__name__}, a coroutine")
        function._pytest_fixture = _Fixture(function, name or function.__name__, autouse, scope)
        return function


def _get_fixture(value):
    """Return the fixture that a function defines; None if it defines none."""
    return vars(value).get("_pytest_fixture") if inspect.isfunction(value) else None


def _find_fixtures(owner):
    """Return the fixtures that a test can use by name, lists from the overriding to the first.

    They are those of the module, and those of the test's class, which override them.
    """
    values = [*globals().values()]
    if owner is not None:
        values += _get_attributes(owner).values()
    fixtures = {}
    for fixture in filter(None, map(_get_fixture, values)):
        fixtures.setdefault(fixture.name, []).insert(0, fixture)
    return fixtures


def _get_attributes(owner):
    """Return a class's attributes by name, those of its bases first. An Enum lacks some: None."""
    names = dict.fromkeys(name for kind in owner.__mro__[::-1] for name in vars(kind))
    return {name: getattr(owner, name, None) for name in names}


class _Case:
    """A test function with the arguments of one case, and a class if it is a method.

    A fixture is identified by its name and its level: 0, or for one that others of its name
    override their number.
    """

    def __init__(self, name, function, owner, values, extra_fixtures, available):
        self.name = name
        self.function = function
        self.owner = owner
        self.values = values
        self.available = available
        autouse = [
            name
            for name, fixtures in available.items()
            if any(fixture.autouse for fixture in fixtures)
        ]
        self.names = _list_needed(function, owner)
        self.fixtures = [*autouse, *extra_fixtures, *self.names]
        used = set()
        for needed in self.fixtures:
            self.check_fixture(needed, 0, (), used)
        if unused := values.keys() - used:
            raise UnsupportedPytest(f"mark.parametrize of {min(unused)}, which {name} lacks")

    def check_fixture(self, name, level, path, used):
        """Raise UnsupportedPytest for a fixture that can't be made. Add its values to `used`."""
        if level == 0 and name in self.values:
            used.add(name)
            return
        if (name, level) in path or level >= len(self.available.get(name, ())):
            raise UnsupportedPytest(f"the fixture {name}")
        for needed in self.list_needed(name, level):
            self.check_fixture(*needed, (*path, (name, level)), used)

    def list_needed(self, name, level):
        """Return the fixtures that a fixture needs. One of its own name is the overridden one."""
        needed = _list_needed(self.available[name][level].function, self.owner)
        return [(other, level + 1 if other == name else 0) for other in needed]

    def run(self, shared, module_stack):
        """Run the test with fixtures of its own, and those of wider scopes in `shared`.

        module_stack: The ExitStack with what is to be done after the last test.
        """
        instance = self.owner and self.owner()
        with contextlib.ExitStack() as stack:
            hooks = globals() if self.owner is None else _AttributeMap(instance)
            if _is_unittest(self.owner):
                instance.doCleanups = functools.partial(_run_cleanups, instance, "_cleanups")
                stack.callback(instance.doCleanups)
            starts = ("setup_function",) if self.owner is None else ("setup_method", "setUp")
            ends = ("teardown_function",) if self.owner is None else ("tearDown", "teardown_method")
            for end in reversed(ends):
                stack.callback(_call_hook, hooks, end, self.function)
            for start in starts:
                _call_hook(hooks, start, self.function)
            values = {(name, 0): value for name, value in self.values.items()}
            stacks = (stack, module_stack)
            for name in self.fixtures:
                self.make_fixture(name, 0, instance, values, shared, stacks)
            function = self.function if instance is None else getattr(instance, self.name)
            function(**{name: values[name, 0] for name in self.names})

    def make_fixture(self, name, level, instance, values, shared, stacks):
        if (name, level) in values:
            return values[name, level]
        fixture = self.available[name][level]
        if fixture in shared:
            return values.setdefault((name, level), shared[fixture])
        arguments = {
            needed: self.make_fixture(needed, other, instance, values, shared, stacks)
            for needed, other in self.list_needed(name, level)
        }
        if "self" in inspect.signature(fixture.function).parameters:
            arguments["self"] = instance
        value = fixture.function(**arguments)
        if inspect.isgenerator(value):
            generator = value
            value = next(generator)
            stacks[fixture.is_shared].callback(next, generator, None)
        if fixture.is_shared:
            shared[fixture] = value
        values[name, level] = value
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


def _is_unittest(owner):
    return hasattr(owner, "assertEqual")


def _run_cleanups(target, name):
    """Call what unittest's addCleanup and its like stored in this list, the last one first.

    unittest's own doCleanups would keep the errors to itself.
    """
    cleanups = getattr(target, name, [])
    while cleanups:
        function, arguments, keywords = cleanups.pop()
        function(*arguments, **keywords)


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


def _is_left_out(target):
    """True if a test function or class does not count for unittest, or has `__test__` false."""
    marks = ("__unittest_skip__", "__unittest_expecting_failure__")
    if any(getattr(target, mark, False) for mark in marks):
        return True
    return not getattr(target, "__test__", True)  # pytest sets no default


def _collect_function(name, function, owner, outer_marks):
    if _is_left_out(function) or _get_fixture(function):
        return
    marks = [*outer_marks, *_list_marks(function.__dict__)]
    if any(mark.excludes() for mark in marks):
        return
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise UnsupportedPytest(f"{name}, a coroutine or a generator")
    extra_fixtures = [
        name for mark in marks if mark.name == "usefixtures" for name in mark.arguments
    ]
    available = _find_fixtures(owner)
    tables = [mark.list_rows() for mark in marks if mark.name == "parametrize"]
    for rows in itertools.product(*tables):
        values = {key: value for row in rows for key, value in row.items()}
        yield _Case(name, function, owner, values, extra_fixtures, available)


def _collect_class(test, outer_marks):
    """Yield the cases of a class's methods, then those of the test classes in it."""
    if _is_left_out(test):
        return
    marks = [*outer_marks]
    for ancestor in test.__mro__[::-1]:
        marks += _list_marks(vars(ancestor))
    attributes = _get_attributes(test)
    is_unittest = _is_unittest(test)
    # Those of unittest's own classes, which are in another module, do nothing.
    for name in ("asyncSetUp", "asyncTearDown"):
        if inspect.isfunction(attributes.get(name)) and attributes[name].__module__ == __name__:
            raise UnsupportedPytest(f"{name}, a coroutine")
    methods = {
        name: value
        for name, value in attributes.items()
        if name.startswith("test") and callable(value) and not inspect.isclass(value)
    }
    if is_unittest and not methods and "runTest" in attributes:
        methods = {"runTest": test.runTest}
    if methods and not is_unittest and test.__init__ is not object.__init__:
        raise UnsupportedPytest(f"the test class {test.__name__} with a method __init__")
    for name, value in methods.items():
        yield from _collect_function(name, value, test, marks)
    for name, value in attributes.items():
        if inspect.isclass(value) and name.startswith("Test"):
            if any(map(_get_fixture, attributes.values())):
                raise UnsupportedPytest(f"fixtures of the class around the test class {name}")
            yield from _collect_class(value, marks)


def _is_own_test(name, value):
    """True if a value of the module is a test that the module made, in whatever way."""
    if inspect.isclass(value):
        is_test_class = name.startswith("Test") or _is_unittest(value)
        return is_test_class and value.__module__ == __name__
    function = value
    while isinstance(function, functools.partial):
        function = function.func
    is_function = inspect.isfunction(function) and function.__globals__ is globals()
    return is_function and name.startswith("test")


def _run_tests(*tests, must_run=False):
    """Run test functions and test classes, and those that the module made without a definition.

    All of them are collected before the first runs, so that what is not supported is found
    whatever the judged program answers.

    must_run: True to raise UnsupportedPytest if there is no test.
    """
    hooks = globals()
    marks = _list_marks(hooks)
    targets = [(test.__name__, test) for test in tests]
    for name, value in hooks.items():
        if _is_own_test(name, value) and not any(value is test for test in tests):
            targets.append((name, value))
    groups = [
        list(
            _collect_class(test, marks)
            if isinstance(test, type)
            else _collect_function(name, test, None, marks)
        )
        for name, test in targets
    ]
    if must_run and not any(groups):
        raise UnsupportedPytest("tests without any test function that runs")
    shared = {}
    with contextlib.ExitStack() as stack:
        stack.callback(_run_cleanups, sys.modules.get("unittest.case"), "_module_cleanups")
        for start, end in (("setup_module", "teardown_module"), ("setUpModule", "tearDownModule")):
            _call_hook(hooks, start, _Module())
            stack.callback(_call_hook, hooks, end, _Module())
        for cases in groups:
            for owner, owner_cases in itertools.groupby(cases, lambda case: case.owner):
                _run_class(owner, owner_cases, shared, stack)


def _run_class(owner, cases, shared, module_stack):
    """Run the cases of a class, or those of functions, whose owner is None."""
    hooks = _AttributeMap(owner)
    with contextlib.ExitStack() as stack:
        if _is_unittest(owner):
            stack.callback(_run_cleanups, owner, "_class_cleanups")
        for start in ("setup_class", "setUpClass"):
            _call_hook(hooks, start, owner)
        for case in cases:
            case.run(shared, module_stack)
        for end in ("tearDownClass", "teardown_class"):
            _call_hook(hooks, end, owner)
