"""Compare the SFT throughput of Ratchet and TRL, in tokens per second.

A step has 64 conversations of 16 to 256 tokens.

    python benchmarks/sft.py [--size S] [--threads 2] [--rounds 5] [--python PEERS/bin/python]

TRL runs in three layouts: packed rows of up to 512 tokens, the conversations of a micro-batch laid
end to end, and padded rows.
"""

from __future__ import annotations

from side_by_side import Case, Driver, compare_precisions, options, rate

DRIVERS = (
    Driver("Ratchet", "ours/ratchet_given.py", peer=False),
    Driver("TRL, packing", "peers/trl_given.py", ("--layout", "packing")),
    Driver("TRL, padding-free", "peers/trl_given.py", ("--layout", "padding-free")),
    Driver("TRL, padded", "peers/trl_given.py"),
)
AUTOCAST = (
    Driver(
        "TRL, packing, bfloat16 autocast", "peers/trl_given.py", ("--layout", "packing", "--bf16")
    ),
    Driver("TRL, padded, bfloat16 autocast", "peers/trl_given.py", ("--bf16",)),
)

if __name__ == "__main__":
    case = Case(
        "SFT, 64 conversations of 16 to 256 tokens",
        DRIVERS,
        ("--algorithm", "sft"),
        rate("tokens"),
        target=3.0,
    )
    compare_precisions(case, options(__doc__ or "").parse_args(), AUTOCAST)
