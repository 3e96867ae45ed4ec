"""Runs programs that nobody has read: model-written code, untrusted tools.

    async with LocalSandbox() as sandbox:
        result = await sandbox.run("print(int(input()) * 2)", stdin=b"21", limits=Limits(wall_s=2))
    passed(result, expected=b"42")          # the expected output never enters

`base` holds the protocols and their values, `local` the pool of this machine, `docker` containers,
`remote` a service, `inside` what runs in the sandboxed processes (standard library only, never
imported by the trainer), `judge` the comparison. Threat model: docs/sandbox.md.
"""

from __future__ import annotations

from ratchet.sandbox.base import Isolation as Isolation
from ratchet.sandbox.base import Limits as Limits
from ratchet.sandbox.base import Reason as Reason
from ratchet.sandbox.base import Result as Result
from ratchet.sandbox.base import Sandbox as Sandbox
from ratchet.sandbox.base import SandboxError as SandboxError
from ratchet.sandbox.base import Session as Session
from ratchet.sandbox.base import Strength as Strength
from ratchet.sandbox.compare_output import passed as passed
from ratchet.sandbox.local import LocalSandbox as LocalSandbox
