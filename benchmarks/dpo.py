"""Compare the DPO throughput of Ratchet and TRL, in pairs per second.

A step has 32 pairs. A prompt and one of its answers have 16 to 96 tokens together.

    python benchmarks/dpo.py [--size S] [--threads 2] [--rounds 5] [--python PEERS/bin/python]
"""

from __future__ import annotations

from side_by_side import Case, Driver, compare_precisions, options, rate

DRIVERS = (
    Driver("Ratchet", "ours/ratchet_given.py", peer=False),
    Driver("TRL tuned (float32, one micro-batch)", "peers/trl_given.py", ("--micro-batch", "32")),
    Driver("TRL tuned, micro-batches of 8", "peers/trl_given.py"),
)
AUTOCAST = (
    Driver("TRL tuned, bfloat16 autocast", "peers/trl_given.py", ("--micro-batch", "32", "--bf16")),
)
WORKLOAD = ("--algorithm", "dpo", "--rows", "32", "--longest", "96")

if __name__ == "__main__":
    case = Case(
        "DPO, 32 pairs, conversations of 16 to 96 tokens",
        DRIVERS,
        WORKLOAD,
        rate("pairs"),
        target=3.0,
    )
    compare_precisions(case, options(__doc__ or "").parse_args(), AUTOCAST)
