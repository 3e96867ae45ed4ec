"""Measure the seconds from the start of a process to the end of `import torch`.

It is a lower bound on the start of any trainer.
"""

import time

import torch  # noqa: F401

IMPORTED_AT = time.time()

import common
import protocol

options = protocol.arguments("import torch").parse_known_args()[0]
common.emit(options, [protocol.since_spawn(IMPORTED_AT)], case="startup")
