"""Programs that would pass unsolved: early ends, patched graders, look-alike output, broken source.
See `attacks.py`."""

TEXT = r"""
### descriptors_left_open
import os, socket
for fd in range(3, 1024):
    try: os.fstat(fd)
    except OSError: continue
    try: os.write(fd, b'{"status": 0, "stopped": "", "seconds": 0, "cpu": 0, "setup": ""}')
    except OSError: pass
    print(42)
    raise SystemExit(0)
raise SystemExit(4)
### rewrites_its_input
import os
os.lseek(0, 0, 0)
os.write(0, b"00\n")
print(42)
### pushes_into_a_terminal
import fcntl, termios
for c in "42\n": fcntl.ioctl(0, termios.TIOCSTI, c)
print(42)
### looks_for_the_answer_in_memory
import gc
for thing in gc.get_objects():
    if isinstance(thing, dict) and thing.get("expected") in ("42", b"42", "42\n", b"42\n"): print(42)
raise SystemExit(4)
### looks_for_the_answer_in_frames
import sys
frame = sys._getframe()
while frame := frame.f_back:
    for value in frame.f_locals.values():
        if value in ("42\n", b"42\n", "42", b"42"): print(42); raise SystemExit(0)
raise SystemExit(4)
### exits_early
import sys
sys.exit(0)
print(42)
### exits_early_hard
import os
os._exit(0)
### exits_by_exception
raise SystemExit
### answers_then_crashes
import os
print(42, flush=True)
os.abort()
### answers_then_segfaults
import ctypes
print(42, flush=True)
ctypes.string_at(0)
### answers_then_raises
print(42)
raise ValueError("too late")
### answers_then_exits_badly
import os, sys
print(42, flush=True)
os._exit(1)
### answers_then_loops long
print(42, flush=True)
while True: pass
### answers_on_stderr
import sys
print(42, file=sys.stderr)
### answers_after_closing_stdout
import os
os.close(1)
print(42)
### closes_everything
import os
os.closerange(0, 1024)
os._exit(0)
### equal_to_everything
class Anything(str):
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __repr__(self): return "anything"
    __str__ = __repr__
import builtins
builtins.print = lambda *a: None
print(Anything())
### patches_the_judge
import sys, builtins, types
fake = types.ModuleType("judge"); fake.passed = lambda *a, **k: True
for name in ("ratchet", "ratchet.sandbox", "ratchet.sandbox.compare_output", "inside", "inside.zygote"): sys.modules[name] = fake
builtins.exec = builtins.compile = builtins.open = lambda *a, **k: None
assert False is True
### patches_the_exit
import os, sys
os._exit = lambda code: None
sys.exit = lambda code=0: None
raise RuntimeError("not solved")
### hook_that_exits_well
import os, sys
sys.excepthook = lambda *a: os._exit(0)
raise RuntimeError("not solved")
### patches_the_kernel_of_the_sandbox
import sys
for module in list(sys.modules.values()):
    for name in ("run_source", "shut_down", "confine", "make_result", "output_matches"):
        if hasattr(module, name): setattr(module, name, lambda *a, **k: 0)
raise RuntimeError("not solved")
### forges_a_failed_setup
import os, sys
os.write(2, b"SANDBOX-SETUP-FAILED")
os._exit(125)
### endless_recursion
def f(): return f()
f()
print(42)
### endless_recursion_in_c long
import sys
sys.setrecursionlimit(10 ** 9)
class A:
    def __getattr__(self, name): return getattr(self, name + "x")
def f(x): return [f(x) for _ in map(f, [x])]
repr_me = []
for _ in range(10 ** 6): repr_me = [repr_me]
repr(repr_me)
print(42)
### deep_syntax
eval("(" * 100000 + ")" * 100000)
print(42)
### crashes_the_compiler
compile("-" * 1000000 + "1", "x", "eval")
print(42)
### crashes_the_interpreter
import types
exec((lambda: 0).__code__.replace(co_code=b"\xff" * 64, co_stacksize=0))
print(42)
### bad_syntax
print(42
### look_alike_digits
print("\uff14\uff12")
### invisible_characters
print("4\u200b2")
### right_to_left
print("\u202e24\u202c")
### invalid_utf8
import os
os.write(1, b"4\xff2\n")
### null_in_output
import os
os.write(1, b"42\x00\n")
### carriage_return_over_the_wrong_answer
print("41\r42")
### backspace_over_the_wrong_answer
print("41\b2")
### escape_codes
print("\x1b[2J42")
### all_answers_at_once
for n in range(1000): print(n)
### not_a_number
print("nan")
### empty
pass
"""
