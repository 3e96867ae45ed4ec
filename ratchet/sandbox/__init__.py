"""Run untrusted programs: model-written code, and commands of tools.

    async with LocalSandbox() as sandbox:
        result = await sandbox.run("print(int(input()) * 2)", stdin=b"21", limits=Limits(wall_s=2))
    output_matches(result, expected=b"42")  # outside the sandbox

`base` holds the protocols and their values, `local` the pool of this machine, `docker` containers,
`remote` a service, `inside` what runs in the sandboxed processes (standard library only, never
imported by the trainer), `compare_output` the comparison. Threat model: docs/sandbox.md.
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
from ratchet.sandbox.compare_output import output_matches as output_matches
from ratchet.sandbox.local import LocalSandbox as LocalSandbox
