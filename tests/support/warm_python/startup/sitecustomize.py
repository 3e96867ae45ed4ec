"""Hands a Python program that starts to a process that has imported what it will import.

An interpreter imports this module before anything else. See the package above.
"""

import os
import sys

ADDRESS = "WARM_PYTHON"
# Of an interpreter's options; those with a value take the next word.
PLAIN, VALUED = ("-u", "-B"), ("-X", "-W")
OF_ITS_PARENT = "ratchet.processes"  # code that ends with the process that started it


def find_program() -> list[str]:
    """Return the words from the script, `-m` or `-c` on; [] if there is no program to hand over."""
    words = sys.orig_argv[1:]
    while words and words[0] in (*PLAIN, *VALUED):
        words = words[2:] if words[0] in VALUED else words[1:]
    if words[:1] == ["-c"] and OF_ITS_PARENT in words[1]:
        return []
    if words and (words[0] in ("-m", "-c") or not words[0].startswith("-")):
        return words
    return []


def hand_over(program: list[str], address: str) -> None:
    """Have the program run elsewhere with this process's files, and end as it ends.

    Returns if nobody listens at the address.
    """
    import json
    import signal
    import socket

    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except OSError:
        return
    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    descriptors = [n for n in descriptors if n != connection.fileno() and is_open(n)]
    environment = dict(os.environ)
    job = [program, environment, os.getcwd(), sys.path, descriptors]
    text = json.dumps(job).encode()
    socket.send_fds(connection, [len(text).to_bytes(8, "big")], descriptors)
    connection.sendall(text)
    answer = connection.makefile().readline()
    if not answer:
        os.write(2, b"the process that runs programs at once has died\n")
        os._exit(1)
    if (status := int(answer)) < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:  # that of the listing
        return False
    return True


def start_as_ever() -> None:
    """Import the `sitecustomize` of the next folder on the path, if there is one."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]
    del sys.modules["sitecustomize"]
    try:
        import sitecustomize  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        if error.name != "sitecustomize":
            raise


if (address := os.environ.get(ADDRESS)) and (program := find_program()):
    hand_over(program, address)
start_as_ever()
