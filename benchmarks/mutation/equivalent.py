"""Mutants that change nothing, each with the reason, by file, function and the edit as it is printed.

Add one only with a proof: that no test fails is what has to be explained, and is no explanation.
"""

from __future__ import annotations

EQUIVALENT: dict[tuple[str, str, str], str] = {}
