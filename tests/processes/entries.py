"""What the tests run in child processes."""

import os
import re
import signal
import subprocess
import sys
import time

from ratchet.processes.frames import FrameKind, dump_json


def echo(connection, *arguments):
    """Answer each frame with its content, and print, which must disturb nothing."""
    while True:
        sys.stdout.write("chatter\n")
        frame = connection.receive()
        connection.send(FrameKind.RESULT, frame.number, frame.parcel)


def echo_forked(connection, log, *arguments):
    sys.stdout.write("last words\n")
    echo(connection)


def raise_error(connection):
    raise ValueError("not today")


def leave(connection):
    sys.exit("left")


def die(connection, how):
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.Signals[how])


def start_program(connection, *log):
    """Start a program, report its process ID and that of this process, and wait."""
    program = subprocess.Popen(["sleep", "600"])
    connection.send(FrameKind.HELLO, 0, dump_json([os.getpid(), program.pid]))
    time.sleep(600)


def hold_the_interpreter(connection):
    connection.send(FrameKind.HELLO, 0, dump_json([os.getpid()]))
    re.match(r"(a+)+$", "a" * 60 + "b")
