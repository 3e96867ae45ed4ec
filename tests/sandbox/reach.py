"""Programs that reach for what is outside: files, the trainer, the network, the kernel. See
`attacks.py`."""

TEXT = r"""
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
### environment_of_the_trainer
import os
threads = {f"{name}_NUM_THREADS" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}
assert set(os.environ) - threads - {"PYTHONHASHSEED", "LC_ALL", "TZ", "PATH"}
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
"""
