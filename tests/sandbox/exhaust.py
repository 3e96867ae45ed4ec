"""Programs that try to use up the machine: time, processes, memory, disk, descriptors, output. See
`attacks.py`."""

TEXT = r"""
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
"""
