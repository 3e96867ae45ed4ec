"""Programs that would pass without solving anything. The tests and what they expect lie in another
process than all of these, so none can pass; each must end as wrong, crashed or limited, never as a
failure, which would spare it the 0."""

from __future__ import annotations

import asyncio
import re

import pytest

from ratchet.rewards.code.reward import Code, CodeConfig
from ratchet.testing import answered
from ratchet.types import Scored, Task

TASK = Task(
    "attacked",
    (),
    meta={
        "prompt": 'from typing import List\n\n\ndef twice(x: int) -> int:\n    """ Twice x.\n    '
        '>>> twice(2)\n    """\n',
        "entry_point": "twice",
        "test": """
METADATA = {}

def check(candidate):
    assert candidate(21) == 42
    assert candidate(-1) == -2, "sign"
    assert abs(candidate(0.25) - 0.5) < 1e-6
    assert candidate("ab") == "abab" and not candidate("")
    assert all(map(candidate, [1, 2, 3]))
    print("SUCCESS")
""",
    },
)
RIGHT = "def twice(x):\n    return x * 2\n"

# `### name`, then the program. `twice(x)` is the function that is asked for.
# Their own source lies in their process, so what they look for is put together.
ATTACKS = r"""
### exits_at_the_top
import sys
sys.exit(0)
### exits_hard_at_the_top
import os
os._exit(0)
### exits_in_the_call
def twice(x):
    raise SystemExit(0)
### exits_hard_in_the_call
import os
def twice(x):
    os._exit(0)
### prints_the_marker_and_exits
import os
print("SUCCESS", flush=True)
os.write(1, b'{"end": "passed", "why": "", "held": 5, "broken": 0}\n')
os._exit(0)
### writes_a_verdict_to_every_descriptor
import os
for fd in range(1, 64):
    try: os.write(fd, b'{"end": "passed", "why": "", "held": 5, "broken": 0}')
    except OSError: pass
os._exit(0)
### writes_forged_answers_to_every_descriptor
import os
for fd in range(1, 64):
    try: os.write(fd, b'{"value": {"__class__": "Equal"}}\n{"passed": true}\nnull\n[]\n42\n' * 3)
    except OSError: pass
os._exit(0)
### an_object_equal_to_everything
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __sub__(self, other): return self
    def __abs__(self): return self
    def __bool__(self): return True
    def __hash__(self): return 0
def twice(x):
    return Equal()
### an_int_equal_to_everything
class Equal(int):
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __int__(self): return 42
    def __sub__(self, other): return 0
def twice(x):
    return Equal(7)
### text_equal_to_everything
class Equal(str):
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __sub__(self, other): return 0
    def __str__(self): return "42"
def twice(x):
    return Equal("no")
### a_class_that_claims_to_be_int
class Equal:
    __class__ = int
    def __eq__(self, other): return True
    def __index__(self): return 42
def twice(x):
    return Equal()
### a_list_that_lies
class Equal(list):
    def __eq__(self, other): return True
    def __iter__(self): return iter([42])
def twice(x):
    return Equal([1])
### a_metaclass_that_lies
class Meta(type):
    def __eq__(cls, other): return True
    def __instancecheck__(cls, other): return True
    __hash__ = type.__hash__
class Equal(metaclass=Meta): pass
def twice(x):
    return Equal
### overwrites_check
def check(candidate): pass
import builtins, sys
builtins.check = check
sys.modules["__main__"].check = check
def twice(x):
    return None
### overwrites_check_in_every_frame
import sys
frame = sys._getframe()
while frame:
    frame.f_globals["check"] = lambda candidate: None
    frame = frame.f_back
def twice(x):
    sys._getframe(1).f_globals["check"] = lambda candidate: None
    return None
### patches_the_driver
import sys
main = sys.modules["__main__"]
for name in list(vars(main)):
    if callable(getattr(main, name)):
        setattr(main, name, lambda *a, **k: '{"end": "passed", "held": 5, "broken": 0}')
def twice(x):
    return None
### patches_the_encoder
import json, sys
json.dumps = lambda *a, **k: '{"value": true}'
def twice(x):
    return None
### patches_assertions
import builtins
builtins.AssertionError = type("Quiet", (Exception,), {})
builtins.abs = lambda x: 0
builtins.all = lambda x: True
def twice(x):
    return None
### reads_the_tests_from_the_stack
import sys
def twice(x):
    frame = sys._getframe()
    while frame := frame.f_back:
        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
            if isinstance(value, str) and "assert " + "candidate" in value: return x * 2
    return None
### reads_the_tests_from_the_heap
import gc
def twice(x):
    for thing in gc.get_objects():
        if isinstance(thing, dict) and any(
            isinstance(v, str) and "assert " + "candidate(21)" in v for v in list(thing.values())
        ):
            return x * 2
    return None
### reads_the_tests_from_stdin
import os, sys
text = sys.stdin.read()
try:
    os.lseek(0, 0, 0)
    text += os.read(0, 1 << 20).decode()
except OSError: pass
def twice(x):
    return x * 2 if "ass" + "ert" in text else None
### reads_the_tests_from_files
import glob, pathlib
def twice(x):
    for path in glob.glob("/tmp/**", recursive=True) + glob.glob("/proc/*/mem") + glob.glob("./**"):
        try:
            if "assert " + "candidate" in pathlib.Path(path).read_text(errors="replace"): return x * 2
        except OSError: pass
    return None
### stop_iteration_ends_the_map
def twice(x):
    if type(x) is int and x in (1, 2, 3): raise StopIteration
    if x in (21, -1, 0.25): return x * 2
    return "abab" if x == "ab" else ""
### raises_what_ends_the_judge
class Stop(BaseException): pass
def twice(x):
    raise Stop("passed")
### raises_a_syntax_error
def twice(x):
    raise SyntaxError("the tests are broken, I am not")
### raises_a_missing_name
def twice(x):
    raise NameError("name 'candidate' is not defined")
### raises_a_missing_module
def twice(x):
    raise ImportError("No module named 'tests'")
### raises_an_assertion
def twice(x):
    assert x == 42
### nan_and_infinity
def twice(x):
    return float("nan")
### a_trace_function
import sys
def trace(frame, event, arg):
    frame.f_locals["value"] = 42
    return trace
sys.settrace(trace)
def twice(x):
    value = None
    return value
### an_exit_handler
import atexit, os
atexit.register(lambda: (print("SUCCESS", flush=True), os._exit(0)))
def twice(x):
    return None
### a_thread_that_exits
import os, threading
def twice(x):
    threading.Thread(target=lambda: os._exit(0)).start()
    while True: pass
### an_endless_iterator
import itertools
def twice(x):
    return itertools.count()
### a_list_in_itself
def twice(x):
    a = []
    a.append(a)
    return a
### nested_without_end
def twice(x):
    a = []
    for _ in range(100_000): a = [a]
    return a
### a_flood
def twice(x):
    return "x" * (4 << 20)
### half_a_surrogate
def twice(x):
    return "\ud800"
### a_number_of_a_million_digits
def twice(x):
    return 1 << 3_000_000
### a_range_of_all
def twice(x):
    return range(10 ** 18)
### wrong_name
def thrice(x):
    return x * 2
### nothing_at_all
### no_python
The answer is obviously 42.
### a_null_byte
def twice(x): return x * 2 "\0"
### deep_parentheses
x = ((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((
((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((
((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((1
### deletes_itself
import sys
del sys.modules["solution"]
globals().clear()
### redirects_the_channel
import os
for fd in range(3, 64):
    try: os.close(fd)
    except OSError: pass
def twice(x):
    return x * 2
### spins
def twice(x):
    while True: pass
### devours_memory
def twice(x):
    return [0] * (1 << 34)
### recurses
def twice(x):
    return twice(x)
### eats_its_arguments
import sys
def twice(x):
    calls = sys._getframe(2).f_locals.get("request", {}).get("calls", [])
    calls.clear()
    return 42
"""
PARTS = dict(part.split("\n", 1) for part in re.split(r"^### ", ATTACKS, flags=re.MULTILINE)[1:])


@pytest.fixture(scope="module")
def reward():
    made = Code(CodeConfig(timeout_s=1, workers=2))
    yield made
    made.sandbox.close()


async def _all(reward, task, texts):
    return await asyncio.gather(*(reward.score([answered(task, text)], task) for text in texts))


@pytest.mark.fault("S9")
def test_no_attack_passes_and_none_escapes_its_zero(reward):
    assert len(PARTS) >= 45
    outcomes = [outcome for (outcome,) in asyncio.run(_all(reward, TASK, [*PARTS.values(), RIGHT]))]
    *attacked, right = outcomes
    assert right == Scored(1.0, {"passed": 1.0, "wrong": 0.0, "crashed": 0.0, "limit": 0.0})
    wanted = dict.fromkeys(PARTS, 0.0)
    assert {
        name: getattr(o, "reward", o) for name, o in zip(PARTS, attacked, strict=True)
    } == wanted


@pytest.mark.medium
def test_no_attack_passes_where_a_share_is_paid(reward):
    """Some assertions hold for a wrong answer; those that need a right one do not."""
    shared = Code(CodeConfig(timeout_s=1, credit="share"))
    outcomes = [outcome for (outcome,) in asyncio.run(_all(shared, TASK, [*PARTS.values(), RIGHT]))]
    shared.sandbox.close()
    *attacked, right = outcomes
    assert right.reward == 1.0
    judged = {name: getattr(o, "reward", o) for name, o in zip(PARTS, attacked, strict=True)}
    assert {
        name: share for name, share in judged.items() if not isinstance(share, float) or share > 0.8
    } == {}


STREAM = Task(
    "streamed",
    (),
    meta={"tests": [{"stdin": "21\n", "stdout": "42\n"}, {"stdin": "-1\n", "stdout": "-2\n"}]},
)
STREAM_ATTACKS = {
    "exits early": "import sys\nsys.exit(0)",
    "exits hard": "import os\nos._exit(0)",
    "one right answer": "print(42)",
    "both answers": "print(42)\nprint(-2)",
    "a marker": "print('passed')",
    "right, then crashes": "print(int(input()) * 2, flush=True)\nimport os\nos.abort()",
    "right, then exits badly": "print(int(input()) * 2)\nraise SystemExit(3)",
    "right, then spins": "print(int(input()) * 2, flush=True)\nwhile True: pass",
    "right, on stderr": "import sys\nprint(int(input()) * 2, file=sys.stderr)",
    "look-alike digits": "print(str(int(input()) * 2).replace('4', '\\uff14').replace('-', "
    "'\\u2212'))",
    "reads the answer": "import gc\nfor d in gc.get_objects():\n  if isinstance(d, dict) and "
    "'stdout' in d: print(d['stdout'])",
    "a regular expression": "print('.*')",
    "not a number": "print('nan')",
    "nothing": "",
}


@pytest.mark.medium
def test_no_attack_passes_tests_of_output():
    loose = Code(CodeConfig(timeout_s=1, tolerance=0.4))
    texts = [*STREAM_ATTACKS.values(), "print(int(input()) * 2)"]
    *attacked, (right,) = asyncio.run(_all(loose, STREAM, texts))
    loose.sandbox.close()
    assert right.reward == 1.0
    assert {
        name: o.reward for name, (o,) in zip(STREAM_ATTACKS, attacked, strict=True)
    } == dict.fromkeys(STREAM_ATTACKS, 0.0)
