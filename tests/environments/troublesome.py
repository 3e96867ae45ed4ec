"""An environment that does what it is told, however bad: tests of worker processes play it."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress

from ratchet.errors import DataError
from ratchet.protocols import Step
from ratchet.rewards.deadline import CURRENT_DEADLINE, Deadline
from ratchet.types import Message, Task
from ratchet.utils.credentials import get_credential

HANGS = threading.Event()  # in the process: somebody hangs there
LEAKED = []
MEET = threading.Barrier(2)  # two attempts that block at once, in one process


class Troublesome:
    """broken: refuses to be made, except here, where the driver makes it. marker: dies at the first
    reset that finds none."""

    replayable = True

    def __init__(self, broken: bool = False, marker: str = ""):
        if broken and os.getsid(0) == os.getpid():
            raise OSError("no licence for this machine")
        self.marker = marker
        self.turns = 0

    def tasks(self, split, *, seed, start=0):
        return iter([self.task()])

    def task(self, **meta):
        return Task("t", (Message("user", "7"),), meta=meta)

    def demonstration(self, task):
        raise DataError("there is none")

    async def reset(self, task):
        self.turns = 0
        self.meta = task.meta
        if self.marker:
            with suppress(FileExistsError):
                os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
        return task.messages

    async def step(self, message):
        self.turns += 1
        word, _, rest = message.text.partition(" ")
        return await getattr(self, f"do_{word}")(rest)

    async def close(self):
        return None

    async def do_say(self, text):
        return says(text)

    async def do_end(self, _):
        return Step(reward=1.0, done=True)

    async def do_where(self, _):
        return says(f"{os.getpid()} {threading.get_ident()}")

    async def do_fork(self, _):
        """Comes back in two processes."""
        child = os.fork()
        return says(f"{os.getpid()} {'parent' if child else 'child'}")

    async def do_count(self, _):
        return says(str(self.turns))

    async def do_repr(self, _):
        return says(repr(self.meta))

    async def do_look(self, name):
        found = {
            "torch": "torch" in sys.modules,
            "threads": subprocess.run(
                ["printenv", "OMP_NUM_THREADS"], capture_output=True, text=True
            ).stdout.strip(),
            "stdout": os.path.sameopenfile(1, 2),
        }
        return says(str(found[name]))

    async def do_leak(self, count):
        """Leaves descriptors open, and ends."""
        LEAKED.extend(os.dup(1) for _ in range(int(count)))
        return Step(reward=1.0, done=True)

    async def do_raise(self, text):
        raise {"exit": SystemExit, "cancel": asyncio.CancelledError}.get(text, ValueError)(text)

    async def do_leave(self, _):
        """Exits in a task of its own."""

        async def leave():
            sys.exit(1)

        self.leaving = asyncio.ensure_future(leave())
        await asyncio.Event().wait()

    async def do_credential(self, name):
        return says(get_credential(name))

    async def do_return(self, text):
        return {"none": None, "object": Step(messages=(object(),))}[text]

    async def do_die(self, how):
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)

    async def do_await(self, _):
        await asyncio.Event().wait()

    async def do_hang(self, _):
        HANGS.set()
        threading.Event().wait()

    async def do_until(self, _):
        """Ends when somebody hangs."""
        HANGS.wait()
        return Step(done=True)

    async def do_judge(self, _):
        """Judges a program, which ends when somebody says so, within a tool's own deadline."""
        async with Deadline(1000):
            with CURRENT_DEADLINE.get().paused():
                await asyncio.to_thread(HANGS.wait)
        return says(str(CURRENT_DEADLINE.get().seconds))

    async def do_free(self, _):
        HANGS.set()
        return says("")

    async def do_hog(self, _):
        """Holds the interpreter's lock: no thread of the process runs any more."""
        sys.stdout.write("hogs\n")
        sys.stdout.flush()
        re.match(r"(a+)+$", "a" * 60 + "b")

    async def do_meet(self, _):
        return says(str(sorted([MEET.wait(60), 1])))


class Offering(Troublesome):
    """With tools, strings that end a turn, raw observations, and numbers."""

    raw_observations = True

    async def reward_cut_attempt(self, messages):
        return len(messages) / 4

    def tools(self, task):
        return [
            {
                "type": "function",
                "function": {"name": f"after_{self.turns}", "parameters": {"type": "object"}},
            }
        ]

    @property
    def stop_strings(self):
        return (f"stop_{self.turns}",)

    def measure(self, groups):
        return {"groups": float(len(groups))}


def says(text):
    return Step(messages=(Message("user", text),))
