"""The filter of system calls on each machine, by a simulation of the kernel's interpreter."""

import re
import struct
from pathlib import Path

import pytest

from ratchet.sandbox.inside import seccomp
from ratchet.sandbox.inside.syscall_numbers import NUMBERS_BY_MACHINE

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
PID = 4242
# Arguments that the filter looks into: own and other process ids, flags, commands, signals.
ARGUMENTS = [
    (a, b, c)
    for a in (0, 1, 15, PID, 0x11, 0x10F00)
    for b in (0, 1, 6, 9, 0x5413)
    for c in (0, 9, 0o101)
]
ARGUMENTS += [(flag, 0, 0) for flag in (0x10000000, 0x40000000, 0x80)]

WITH_ARGUMENTS = {
    "clone",
    "fcntl",
    "ioctl",
    "prctl",
    "socketpair",
    "prlimit64",
    "kill",
    "tgkill",
    "openat",
}


def run_filter(code, machine, number, arguments):
    """Return the action of a filter for a system call."""
    words = [number, seccomp.ARCHITECTURES[machine], 0, 0]
    words += [half for value in (*arguments, 0, 0, 0) for half in (value, 0)]
    instructions = list(struct.iter_unpack("HBBI", code))
    accumulator = position = 0
    while True:
        kind, yes, no, value = instructions[position]
        position += 1
        if kind == seccomp.RETURN:
            return value
        if kind == seccomp.LOAD:
            accumulator = words[value // 4]
        elif kind == seccomp.BIT_AND:
            accumulator &= value
        else:
            holds = {
                seccomp.JUMP_EQUAL: accumulator == value,
                seccomp.JUMP_SET: accumulator & value,
                seccomp.JUMP_GE: accumulator >= value,
            }[kind]
            position += yes if holds else no


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_are_those_of_the_kernels_header(machine):
    if not HEADERS[machine].exists():
        pytest.skip("the headers of the kernel are not installed")
    text = HEADERS[machine].read_text()
    numbers = {m[1]: int(m[2]) for m in re.finditer(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    numbers.setdefault("newfstatat", numbers.get("fstatat"))
    known = NUMBERS_BY_MACHINE[machine]
    assert {name: numbers.get(name) for name in known} == known


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("can_fork", [False, True])
def test_both_machines_allow_the_same_calls(level, can_fork):
    codes = {
        machine: seccomp.build_filter_template(level, can_fork, machine).replace(
            struct.pack("I", seccomp.OWN_PID), struct.pack("I", PID)
        )
        for machine in HEADERS
    }
    x86, arm = NUMBERS_BY_MACHINE["x86_64"], NUMBERS_BY_MACHINE["aarch64"]
    for name in arm:
        for arguments in ARGUMENTS if name in WITH_ARGUMENTS else ARGUMENTS[:1]:
            actions = [
                run_filter(codes[machine], machine, numbers[name], arguments)
                for machine, numbers in (("x86_64", x86), ("aarch64", arm))
            ]
            assert actions[0] == actions[1], (name, arguments)
    refused = seccomp.FAIL | 1
    for number in set(range(600)) - set(arm.values()):
        assert run_filter(codes["aarch64"], "aarch64", number, (0, 0, 0)) == refused, number
    assert run_filter(codes["aarch64"], "x86_64", x86["read"], (0, 0, 0)) == seccomp.KILL_PROCESS
