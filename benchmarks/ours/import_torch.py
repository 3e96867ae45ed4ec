"""Seconds from the start of the process until `import torch` is done: what no trainer can
undercut."""

import time

import torch  # noqa: F401

DONE = time.time()

import common
import protocol

options = protocol.arguments("import torch").parse_known_args()[0]
common.emit(options, [protocol.since_spawn(DONE)], case="startup")
