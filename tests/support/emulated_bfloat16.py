"""Emulates the processor's products in bfloat16 where it has none, so that tests of
`precision: bfloat16` run on every machine.

The product of two numbers in bfloat16 is exact in float32, so a float32 product of rounded operands
whose result is rounded differs from the instructions in the order of its sums alone. The compiled
decoding step has no emulation: there the engine decodes by PyTorch's operations.
"""

from __future__ import annotations

import command_line
import pytest
from torch import Tensor

from ratchet.kernels import bfloat16
from ratchet.kernels.build import has_bfloat16_instructions


def emulate_where_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process turn on products in bfloat16 on any processor."""
    if not has_bfloat16_instructions():
        monkeypatch.setattr(bfloat16, "has_bfloat16_instructions", lambda: True)
        monkeypatch.setattr(bfloat16, "_multiply", multiply)


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T in bfloat16. Both are in bfloat16."""
    return (x.float() @ weight.float().t()).bfloat16()


def run_command(words: list[str]) -> None:
    """Run the command line in this process, which may compute so."""
    emulate_where_missing(pytest.MonkeyPatch())
    command_line.run_command(words)
