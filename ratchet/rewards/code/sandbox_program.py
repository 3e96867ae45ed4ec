"""What runs in the sandbox to judge a function: `program()` beside the code that is judged,
`tests()` beside the tests.

Never in one process. The program gets the arguments of calls and hands back values; it never sees a
test or an expected value. The tests get plain values rebuilt from text, never the program's
objects, so nothing in them can be patched, and an `__eq__` that is always true stays where it was
written. Standard library only: the sandbox has no Ratchet.

A test calls a stand-in of the function. Where the answer to a call is known, it is given; at the
first call that was not answered yet the tests go on with `Anything`, only to learn which calls are
likely to follow, so that one execution answers them all. No verdict is ever made of such a run.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

MAX_ITEMS = 100_000  # of an iterator that a program returns
MAX_CALLS = 5000  # looked ahead
LOOKAHEAD_S = 1.0  # of processor time
SMALL = 1 << 53


class Unplain(Exception):
    """The value is not made of None, bool, numbers, text, bytes, lists, tuples, sets, dicts, ranges
    and iterators."""


# --- plain values as text. A subclass goes as its built-in base: what it overrides stays behind.


def encode(value: Any) -> Any:
    """JSON in which None, bool, str and small int stand for themselves, all else is [type,
    content]. Raises Unplain."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        whole = int.__int__(value)
        return whole if -SMALL < whole < SMALL else ["int", hex(whole)]
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, complex):
        return ["complex", [float.hex(value.real), float.hex(value.imag)]]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(item)] for key, item in dict.items(value)]]
    if isinstance(value, range):
        return ["range", [encode(number) for number in (value.start, value.stop, value.step)]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            walk: Any = kind.__iter__  # not the subclass's own
            items = [encode(item) for item in walk(value)]
            # Equal sets are the same text: a call is recognised by its text.
            return [
                kind.__name__,
                sorted(items, key=json.dumps) if kind in (set, frozenset) else items,
            ]
    if hasattr(type(value), "__next__"):
        items = [encode(item) for item in itertools.islice(value, MAX_ITEMS + 1)]
        if len(items) <= MAX_ITEMS:
            return ["iterator", items]
    raise Unplain(type(value).__name__)


REBUILT: dict[str, Callable[[Any], Any]] = {
    "int": lambda content: int(content, 16),
    "float": float.fromhex,
    "complex": lambda content: complex(*map(float.fromhex, content)),
    "bytes": bytes.fromhex,
    "dict": lambda content: {decode(key): decode(item) for key, item in content},
    "range": lambda content: range(*map(decode, content)),
    "list": lambda content: [decode(item) for item in content],
    "tuple": lambda content: tuple(decode(item) for item in content),
    "set": lambda content: {decode(item) for item in content},
    "frozenset": lambda content: frozenset(decode(item) for item in content),
    "iterator": lambda content: iter([decode(item) for item in content]),
}


def decode(said: Any) -> Any:
    """Raises whatever it meets in text that `encode` didn't write; what it returns is plain all the
    same."""
    if said is None or isinstance(said, bool | str | int):
        return said
    kind, content = said
    return REBUILT[kind](content)


def take_stdout() -> int:
    """A channel of our own. What is printed goes to stderr, out of its way."""
    channel = os.dup(1)
    os.dup2(2, 1)
    return channel


def send(channel: int, text: str) -> None:
    left = memoryview(text.encode("ascii"))
    while left:
        left = left[os.write(channel, left) :]


# --- beside the program


def program() -> NoReturn:
    """Reads {"prompt", "entry_point", "text", "calls"}; writes a line for each call that ended.
    Whatever the judged code does to this process, all that it can reach are its own answers."""
    leave = os._exit
    channel = take_stdout()
    request = json.load(sys.stdin.buffer)
    function = load(**{name: request[name] for name in ("prompt", "entry_point", "text")})
    for call in request["calls"]:
        send(channel, answer(function, call) + "\n")
    leave(0)


def load(prompt: str, entry_point: str, text: str) -> Any:
    """The function that `text` defines: a whole program where it parses alone and defines it, else
    what continues `prompt`."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    if defines(text, entry_point):
        parts = [valid(prompt), compile(text, "solution", "exec", dont_inherit=True)]
    else:
        parts = [
            valid(prompt + text)
            or compile(prompt + "\n" + text, "solution", "exec", dont_inherit=True)
        ]
    for part in filter(None, parts):
        exec(part, module.__dict__)
    return module.__dict__[entry_point]


def valid(source: str) -> Any:
    """`source` compiled; None where it is no Python."""
    try:
        return compile(source, "solution", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None


def defines(source: str, name: str) -> bool:
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):
        return False
    for statement in statements:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        aliases = statement.names if isinstance(statement, ast.Import | ast.ImportFrom) else []
        named = {
            getattr(statement, "name", None),
            *(getattr(target, "id", None) for target in targets),
        }
        if name in named | {alias.asname or alias.name for alias in aliases}:
            return True
    return False


def answer(function: Any, call: str) -> str:
    arguments, named = (decode(part) for part in json.loads(call))
    try:
        value = function(*arguments, **named)
    except BaseException as error:
        return json.dumps({"raised": described(error)})
    try:
        return json.dumps({"value": encode(value)})
    except BaseException:
        return json.dumps({"opaque": type(value).__name__})


def described(error: BaseException) -> list[Any]:
    """Return the names of the exception's classes, its own first, and the arguments to rebuild it
    by.

    These are its own where a built-in exception of them has the same text, else the text alone.
    """
    kinds = type(error).__mro__
    builtin = next(kind for kind in kinds if kind.__module__ == "builtins")
    arguments = encode([str(error)[:500]])
    with contextlib.suppress(Unplain, TypeError, ValueError):
        if str(builtin(*error.args)) == str(error):
            arguments = encode(list(error.args))
    return [[kind.__name__ for kind in kinds], arguments]


# --- beside the tests


def tests() -> NoReturn:
    """Reads {"prompt", "entry_point", "test", "calls", "answers", "share"}; writes how the tests
    ended, see `Judge.run`."""
    channel = take_stdout()
    request = json.load(sys.stdin.buffer)
    send(channel, json.dumps(Judge(**request).run()))
    os._exit(0)


class Anything:
    """Stands for an answer that nobody has given yet: whatever is done with it succeeds."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __iter__(self) -> Any:
        return iter(())

    def __hash__(self) -> int:
        return 0


SELF = (
    "call getitem add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow "
    "rpow abs neg round and or"
)
for _words, _result in (
    (SELF, None),
    ("eq ne lt le gt ge bool contains", True),
    ("len int index", 0),
    ("float", 0.0),
):
    for _word in _words.split():
        setattr(
            Anything,
            f"__{_word}__",
            lambda self, *_, result=_result: self if result is None else result,
        )


class Stop(BaseException):
    """Enough was learned of the calls to come."""


class Unusable(Exception):
    """The tests themselves are broken, whatever the program."""


class Evaluated(BaseException):
    """The tests were about to run an answer as code. Not an Exception, which they might catch."""


class ProgramError(Exception):
    """The program gave no value, or an exception that has no built-in name."""


class CountAsserts(ast.NodeTransformer):
    """`assert` reports to the judge, which says whether a broken one ends the tests. One that can't
    break is no test."""

    WRAPPED = (
        "try:\n  pass\nexcept Exception as _ratchet_error:\n  if "
        "_ratchet_judge.broke(_ratchet_error): raise\n"
    )
    WRAPPED += "else:\n  _ratchet_judge.held += 1\n"

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        if isinstance(node.test, ast.Constant) and node.test.value:
            return ast.copy_location(ast.Pass(), node)
        wrapped = ast.parse(self.WRAPPED).body[0]
        assert isinstance(wrapped, ast.Try)
        wrapped.body = [node]
        return ast.copy_location(wrapped, node)


class Judge:
    """calls: those that the program was asked, as text. answers: to the first of them; where they
    are fewer, the program ended before it gave the next. share: go on after an assertion that
    breaks."""

    def __init__(
        self,
        prompt: str,
        entry_point: str,
        test: str,
        calls: list[str],
        answers: list[str],
        share: bool,
    ) -> None:
        self.prompt, self.entry_point, self.test, self.share = prompt, entry_point, test, share
        self.calls, self.answers = calls, answers
        self.asked: list[str] = []
        self.sure: int | None = None  # calls before the first that nobody was asked
        self.lost = False
        self.given = self.heard_text = False  # an answer was given; one that is more than a number
        self.evaluated = ""  # what the tests were about to do with it
        self.held = self.broken = 0
        self.programs: list[BaseException] = []  # exceptions that came from the program

    def run(self) -> dict[str, Any]:
        """end: "passed", "wrong" or "crashed" (the program's answer, or what it raised, broke
        them), "lost" (no answer came), "unknown" (ask the program `calls`, of which the first
        `sure` are certain) or "unusable" (`why`)."""
        try:
            self._run()
            end, why = ("wrong" if self.broken else "passed"), ""
        except BaseException as error:
            end, why = (
                ("crashed" if error in self.programs else "wrong"),
                f"{type(error).__name__}: {error}",
            )
            if self._own(error):
                end = "unusable"
            self.broken += self.share or not self.broken
        if self.evaluated:
            end, why = "unusable", self.evaluated
        if self.sure is not None and end != "unusable":
            return {"end": "unknown", "calls": self.asked, "sure": self.sure}
        if not self.asked and end == "passed":
            end, why = "unusable", f"the tests never call {self.entry_point}"
        if self.lost and end != "unusable":
            end = "lost"
        return {"end": end, "why": why[:2000], "held": self.held, "broken": self.broken}

    def _run(self) -> None:
        random.seed(0)  # the tests run more than once, and must ask the same
        namespace: dict[str, Any] = {"__name__": "tests", "_ratchet_judge": self}
        stub = valid(self.prompt) or valid(self.prompt + "\n    pass\n")
        if stub is not None:  # what the tests use of it: imports, helper functions
            exec(stub, namespace)
        namespace[self.entry_point] = self.call
        self.guard()
        tree = ast.fix_missing_locations(CountAsserts().visit(ast.parse(self.test)))
        exec(compile(tree, "tests", "exec", dont_inherit=True), namespace)
        check = namespace.get("check")
        if not callable(check):
            raise Unusable("the tests define no function check(candidate)")
        check(self.call)

    def guard(self) -> None:
        """Have the interpreter refuse to run code that an answer may be part of.

        Beside the tests it could make them hold. Once an answer was given that may hold text, only
        three things are run: code without any name (that of "1 + 1", say, reaches nothing), texts
        of the tests themselves, and what the library compiles for itself.
        """

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event not in RUNNING or not self.heard_text or compiled_by_library(sys._getframe(1)):
                return
            code = arguments[0] if event in TAKING_CODE else None
            if isinstance(code, types.CodeType) and (nameless(code) or code in literals(self.test)):
                return
            self.evaluated = (
                f"they evaluate what {self.entry_point} returned ({event}); compare "
                "its value instead"
            )
            raise Evaluated

        sys.addaudithook(hook)

    def call(self, *arguments: Any, **named: Any) -> Any:
        """The stand-in of the judged function."""
        try:
            text = json.dumps([encode(list(arguments)), encode(named)])
        except Unplain as error:
            if self.sure is not None:
                raise Stop from None
            raise Unusable(
                f"the tests pass a value of type {error} to {self.entry_point}; only plain values "
                "can travel"
            ) from None
        index = len(self.asked)
        self.asked.append(text)
        if self.sure is None and (
            self.lost or (index < len(self.calls) and self.calls[index] == text)
        ):
            if self.lost or index >= len(self.answers):
                self.lost = self.given = True
                raise self._from_program(ProgramError("the program ended without an answer"))
            return self._given(self.answers[index])
        if self.sure is None:
            self.sure = index
            signal.signal(signal.SIGVTALRM, _stop)
            signal.setitimer(signal.ITIMER_VIRTUAL, LOOKAHEAD_S)
        if len(self.asked) >= MAX_CALLS + self.sure:
            raise Stop
        return Anything()

    def _given(self, line: str) -> Any:
        """Rebuilt from what the program's process wrote, which may be anything."""
        before, self.given, self.heard_text = self.heard_text, True, True
        try:
            said = json.loads(line)
            if "raised" in said:
                kinds, arguments = said["raised"]
                error = raised([str(kind) for kind in kinds], list(decode(arguments)))
            elif "opaque" in said:
                error = ProgramError(
                    f"it returned a value of type {said['opaque']}, which can't travel"
                )
            else:
                value = decode(said["value"])
                self.heard_text = before or not isinstance(value, int | float | complex | None)
                return value
        except Exception as problem:
            error = ProgramError(f"its answer can't be read: {problem}")
        raise self._from_program(error)

    def _from_program(self, error: Exception) -> Exception:
        self.programs.append(error)
        return error

    def _own(self, error: BaseException) -> bool:
        """True if the tests are at fault: they lack a name or a module, or are broken source.

        After the first answer such an error may be the answer's doing, so that it is a wrong one:
        no program may turn its 0 into a failed attempt.
        """
        # which `Anything` in place of an answer does not bring about
        lacking = NameError | ModuleNotFoundError
        kinds = lacking if self.sure is not None else lacking | SyntaxError | ImportError
        broken = isinstance(error, kinds) and not isinstance(error, UnboundLocalError)
        return isinstance(error, Unusable) or (broken and not self.given)

    def broke(self, error: Exception) -> bool:
        self.broken += 1
        return self._own(error) or not (self.share or self.sure is not None)


# audit events
RUNNING = ("exec", "function.__new__", "code.__new__", "marshal.loads", "pickle.find_class")
TAKING_CODE = ("exec", "function.__new__")
# of the library; they check the names that they are given
COMPILING = ("collections/__init__.py", "dataclasses.py")


def compiled_by_library(frame: types.FrameType | None) -> bool:
    """True if a module is being imported, or a class of the library is made by source."""
    if (
        frame is not None
        and frame.f_code.co_filename.startswith("/")
        and frame.f_code.co_filename.endswith(COMPILING)
    ):
        return True
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def literals(source: str) -> Iterator[types.CodeType]:
    """What the texts that stand in `source` compile to."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for mode in ("eval", "exec"):
                with contextlib.suppress(SyntaxError, ValueError):
                    yield compile(node.value, "<string>", mode, dont_inherit=True)


def nameless(code: types.CodeType) -> bool:
    """True if `code` uses no variable, attribute or module, so that it only combines constants."""
    return not code.co_names and all(
        nameless(part) for part in code.co_consts if isinstance(part, types.CodeType)
    )


def _stop(*_: object) -> NoReturn:
    raise Stop


def raised(kinds: list[str], arguments: list[Any]) -> Exception:
    """Return the exception that a program raised, as the nearest built-in class of it.

    One that ends a loop silently could make `all(map(candidate, ...))` true, and is none of them.
    """
    classes = [getattr(builtins, kind, None) for kind in kinds]
    nearest = next(
        (kind for kind in classes if isinstance(kind, type) and issubclass(kind, BaseException)),
        None,
    )
    silent = (StopIteration, StopAsyncIteration)
    if nearest is not None and issubclass(nearest, Exception) and not issubclass(nearest, silent):
        # Some classes refuse arguments that others take.
        with contextlib.suppress(TypeError, ValueError):
            return nearest(*arguments)
    return ProgramError(f"{kinds[:1]}: {arguments}")
