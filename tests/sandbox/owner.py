"""A trainer to be killed: starts programs that would run for ever, forks a copy of itself, says
"ready", waits.

PYTHONPATH=.:tests python tests/sandbox/owner.py PROGRAMS LEVEL
"""

from __future__ import annotations

import asyncio
import os
import sys

from sandbox.corpus import descendants

from ratchet.sandbox import Isolation, Limits, LocalSandbox

SPIN = "while True: pass"
DAEMONS = (
    "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n     "
    " "
    "  break\ntime.sleep(1000)"
)


async def main(programs: int, level: Isolation) -> None:
    sandbox = LocalSandbox(slots=programs, at_most=level)
    # slots take turns, so now each has its fork server, and only programs are yet to come
    for _ in range(programs):
        await sandbox.run("pass")
    inside = level is Isolation.NAMESPACES
    limits = Limits(wall_s=1000, cpu_s=1000, processes=8 if inside else 1)
    runs = [
        asyncio.ensure_future(sandbox.run(DAEMONS if inside else SPIN, b"", limits))
        for _ in range(programs)
    ]
    # launcher, fork server, program, three daemons; or fork server, program
    each = 6 if inside else 2
    while len(descendants(os.getpid())) < programs * each:
        await asyncio.sleep(0.01)
    # a worker of the trainer's, say, that inherits every descriptor and outlives it
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.gather(*runs)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Isolation[sys.argv[2]]))
