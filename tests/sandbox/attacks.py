"""Programs that mean harm, or mean to pass without solving anything. The task is always: read a number, print its double.

Each would print the right answer, 42, if what it tries worked (or ends before it): so "passed" means that it got through. Words
in capitals are filled in: CANARY, a world-writable file of the trainer; PARENT, its process id; PORT, where it listens on
loopback; ABSTRACT, the same on an abstract unix socket; EXPECTED, a file with the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

STDIN, ANSWER = b"21\n", b"42\n"


@dataclass(frozen=True)
class Attack:
    """long: meant to run into the wall limit, so it gets a short one. processes: the limit, where the attack needs some."""

    name: str
    source: str
    long: bool = False
    processes: int = 1


def parse(text: str) -> tuple[Attack, ...]:
    """`### name [long] [processes=N]`, then the program."""
    found = []
    for part in re.split(r"^### ", text, flags=re.M)[1:]:
        title, _, source = part.partition("\n")
        name, *words = title.split()
        options = dict(word.split("=") for word in words if "=" in word)
        found.append(Attack(name, source, "long" in words, int(options.get("processes", 1))))
    return tuple(found)


ATTACKS = parse(r"""
### infinite_loop long
while True: pass
### sleeps_for_ever long
import time
time.sleep(1e6)
print(42)
### stops_itself long
import os, signal
os.kill(os.getpid(), signal.SIGSTOP)
### ignores_all_signals long
import signal
for n in range(1, 65):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
### catastrophic_regex long
import re
re.match(r"(a+)+$", "a" * 60 + "b")
print(42)
### huge_power long
x = 9 ** 9 ** 9 ** 9
print(42)
### huge_shift
x = 1 << (1 << 40)
print(42)
### huge_int_to_text
x = str(10 ** 5000)
print(42)
### factorial_of_a_trillion long
import math
math.factorial(10 ** 12)
print(42)
### waits_for_stdin_of_nobody
import sys
sys.stdin.read()
input()
print(42)
### deadlock long
import threading
a = threading.Lock(); a.acquire(); a.acquire()
### thread_that_never_ends long
import threading, time
def spin():
    while True: time.sleep(0.01)
threading.Thread(target=spin).start()
print(42)
### exit_handler_that_never_ends long
import atexit
@atexit.register
def spin():
    while True: pass
print(42)
### fork_bomb
import os
while True: os.fork()
### fork_bomb_allowed_to_fork long processes=8
import os
while True:
    try: os.fork()
    except OSError: pass
### shell_fork_bomb long processes=8
import subprocess
subprocess.run(["sh", "-c", "f() { f | f & }; f; sleep 100"])
### thread_bomb
import threading, time
for _ in range(2000): threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
print(42)
### spawn_by_subprocess
import subprocess
print(subprocess.run(["echo", "42"], capture_output=True, text=True, check=True).stdout)
### spawn_by_system
import os, sys
if os.system("true") != 0: sys.exit(3)
print(42)
### spawn_by_multiprocessing
import multiprocessing as m
p = m.get_context("fork").Process(target=print, args=(1,)); p.start(); p.join()
print(42)
### replaces_itself_by_exec
import os
os.execv("/bin/echo", ["echo", "42"])
### clone_by_ctypes
import ctypes
libc = ctypes.CDLL(None)
if libc.syscall(56, 17, 0, 0, 0, 0) < 0: raise SystemExit(4)
print(42)
### new_user_namespace
import ctypes
if ctypes.CDLL(None).unshare(0x10000000): raise SystemExit(4)
print(42)
### daemon_by_setsid processes=8
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for n in range(3): os.close(n)
        time.sleep(1000)
    os._exit(0)
os._exit(7)
### daemon_that_holds_stdout processes=8
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(1000)
os._exit(7)
### zombies_by_the_dozen processes=16
import os, time
for _ in range(12):
    if os.fork() == 0: os._exit(0)
os._exit(7)
### memory_of_many_processes processes=16 long
import os, time
for _ in range(10):
    if os.fork() == 0: break
data = bytearray(150 << 20)
for i in range(0, len(data), 4096): data[i] = 1
time.sleep(100)
### kills_everybody processes=8
import os, signal
os.kill(-1, signal.SIGKILL)
os.kill(1, signal.SIGKILL)
os._exit(7)
### memory
x = bytearray(8 << 30)
print(42)
### memory_bit_by_bit
x = []
while True: x.append(bytearray(1 << 20))
### memory_shared
import mmap
m = mmap.mmap(-1, 4 << 30)
print(42)
### memory_file
import os
fd = os.memfd_create("x")
os.ftruncate(fd, 1 << 30)
print(42)
### shared_memory_segment
import ctypes
if ctypes.CDLL(None).shmget(0, 1 << 26, 0o1600) < 0: raise SystemExit(4)
print(42)
### message_queue
import ctypes, os
if ctypes.CDLL(None).mq_open(b"/x", os.O_CREAT | os.O_RDWR, 0o600, None) < 0: raise SystemExit(4)
print(42)
### locks_memory
import ctypes, mmap
if ctypes.CDLL(None).mlockall(3): raise SystemExit(4)
print(42)
### fills_the_disk
with open("big", "wb") as f:
    for _ in range(1000): f.write(bytes(1 << 20))
print(42)
### fills_the_disk_with_many_files
for i in range(100000): open(f"f{i}", "w").write("x")
print(42)
### sparse_file
import os
fd = os.open("sparse", os.O_CREAT | os.O_RDWR)
os.ftruncate(fd, 1 << 40)
print(42)
### runs_out_of_descriptors
import os
held = []
while True: held.append(os.open("/dev/null", os.O_RDONLY))
### pipes_by_the_thousand
import os
held = [os.pipe() for _ in range(5000)]
print(42)
### floods_stdout
import sys
while True: sys.stdout.write("x" * 65536)
### floods_stderr
import sys
while True: sys.stderr.write("x" * 65536)
### floods_stdout_after_the_answer
import os
os.write(1, b"42\n")
while True: os.write(1, b"\n" * 65536)
### reads_the_passwords
print(42 if open("/etc/passwd").read() else 0)
### reads_the_shadow
print(42 if open("/etc/shadow").read() else 0)
### reads_a_file_of_the_trainer
print(42 if open("CANARY").read() else 0)
### reads_the_expected_answer
print(open("EXPECTED").read())
### writes_a_file_of_the_trainer
open("CANARY", "w").write("owned")
print(42)
### changes_a_mode_of_the_trainers_file
import os
os.chmod("CANARY", 0)
print(42)
### removes_a_file_of_the_trainer
import os
os.unlink("CANARY")
print(42)
### follows_a_symlink
import os
os.symlink("CANARY", "link")
print(42 if open("link").read() else 0)
### follows_a_symlink_to_the_root
import os
os.symlink("/", "up")
print(42 if os.listdir("up/etc") else 0)
### climbs_by_dots
print(42 if open("../" * 40 + "etc/passwd").read() else 0)
### hard_link_to_the_outside
import os
os.link("CANARY", "link")
print(42)
### leaves_through_the_old_root
import os
os.chroot(".")
for _ in range(100): os.chdir("..")
print(42 if os.listdir("etc") else 0)
### mounts_something
import ctypes
libc = ctypes.CDLL(None)
if libc.mount(b"none", b"/box", b"tmpfs", 0, None) and libc.mount(b"proc", b"/box", b"proc", 0, None): raise SystemExit(4)
print(42)
### makes_a_device_node
import os, stat
os.mknod("disk", 0o600 | stat.S_IFBLK, os.makedev(254, 0))
print(42 if open("disk", "rb").read(1) else 0)
### poisons_the_library
import json
open(json.__file__, "a").write("#")
print(42)
### poisons_the_bytecode
import json, os
open(os.path.join(os.path.dirname(json.__file__), "__pycache__", "x.pyc"), "w").write("#")
print(42)
### leaves_a_file_in_tmp
open("/tmp/left_by_attack", "w").write("x")
open("/var/tmp/left_by_attack", "w").write("x")
print(42)
### environment_of_the_parent
print(42 if open("/proc/PARENT/environ", "rb").read() else 0)
### memory_of_the_parent
import os
fd = os.open("/proc/PARENT/mem", os.O_RDWR)
print(42)
### descriptors_of_the_parent
import os
print(42 if os.listdir("/proc/PARENT/fd") else 0)
### own_environment
import os
assert os.environ or os.environb
print(42)
### own_proc
print(42 if open("/proc/self/maps").read() else 0)
### processes_of_the_machine
import os
print(42 if [p for p in os.listdir("/proc") if p.isdigit()] else 0)
### kills_the_parent
import os, signal
os.kill(PARENT, signal.SIGTERM)
print(42)
### kills_its_parent_and_its_group
import os, signal
os.kill(os.getppid(), signal.SIGKILL)
os.killpg(0, signal.SIGKILL)
print(42)
### signals_its_parent_by_thread
import ctypes, os
if ctypes.CDLL(None).syscall(234, os.getppid(), os.getppid(), 9): raise SystemExit(4)
print(42)
### signals_by_pidfd
import os, signal
signal.pidfd_send_signal(os.pidfd_open(PARENT), signal.SIGTERM)
print(42)
### traces_its_parent
import ctypes, os
if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) and ctypes.CDLL(None).ptrace(16, PARENT, 0, 0): raise SystemExit(4)
print(42)
### reads_memory_of_another_process
import ctypes, os
if ctypes.CDLL(None).syscall(310, PARENT, 0, 0, 0, 0, 0): raise SystemExit(4)
print(42)
### raises_its_limits
import resource
resource.setrlimit(resource.RLIMIT_NPROC, (10000, 10000))
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
print(42)
### raises_its_priority
import os
os.nice(-10)
print(42)
### becomes_root
import os
os.setuid(0)
print(42 if open("/etc/shadow").read() else 0)
### network_tcp
import socket
socket.create_connection(("127.0.0.1", PORT), 1)
print(42)
### network_udp
import socket
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", PORT))
print(42)
### network_listens
import socket
s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen()
print(42)
### network_raw
import socket
socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
print(42)
### network_netlink
import socket
socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
print(42)
### network_by_name
import urllib.request
urllib.request.urlopen("http://localhost:PORT/", timeout=1)
print(42)
### abstract_unix_socket
import socket
s = socket.socket(socket.AF_UNIX); s.connect("\0ABSTRACT")
print(42)
### datagram_pair_to_the_abstract
import socket
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
a.sendto(b"x", "\0ABSTRACT")
print(42)
### io_uring
import ctypes
if ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(256)) < 0: raise SystemExit(4)
print(42)
### kernel_interfaces
import ctypes
libc = ctypes.CDLL(None)
# bpf, userfaultfd, perf_event_open, keyctl, add_key, kexec_load, init_module, reboot, swapon
if all(libc.syscall(n, 0, 0, 0, 0, 0) < 0 for n in (321, 323, 298, 250, 248, 246, 175, 169, 167)): raise SystemExit(4)
print(42)
### other_calling_convention
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(b"\xb8\x02\x00\x00\x00\xcd\x80\xc3")  # mov eax, 2 (fork on i386); int 0x80; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
if ctypes.CFUNCTYPE(ctypes.c_int)(address)() < 0: raise SystemExit(4)
print(42)
### x32_calling_convention
import ctypes
if ctypes.CDLL(None).syscall(0x40000000 + 57) < 0: raise SystemExit(4)
print(42)
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
for name in ("ratchet", "ratchet.sandbox", "ratchet.sandbox.judge", "inside", "inside.zygote"): sys.modules[name] = fake
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
    for name in ("run_source", "finish", "confine", "judge_end", "passed"):
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
""")
HOSTILE_SOURCES = ("print(42)\0", "\ud800", "# coding: nonsense\nprint(42)", "print(4\u0032\u200b)")
ATTACKS += tuple(Attack(f"source_{n}", text) for n, text in enumerate(HOSTILE_SOURCES))
