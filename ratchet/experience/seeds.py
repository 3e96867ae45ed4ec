"""Derive seeds from names.

Every random draw has a seed derived from its purpose (such as step, group and attempt). So resuming
and replaying a run need no state of a random number generator.
"""

from __future__ import annotations

import hashlib


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends on the text of every part and on nothing else."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
