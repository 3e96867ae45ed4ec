"""Compare the seconds of an evaluation by `ratchet eval` and by lm-evaluation-harness.

Each runs as a command, from the start of its process to its results: greedy answers of at most
32 tokens to 10,000 tasks of 8 to 64 tokens, judged by exact match. The harness runs the model by
transformers, in batches of either of two sizes.

    python benchmarks/evaluation.py [--size S] [--rows 10000] [--threads 2] [--rounds 5]
    [--python PEERS/bin/python]
"""

from __future__ import annotations

from side_by_side import SECONDS, Case, Driver, compare, options

OURS = Driver("Ratchet", "ours/ratchet_eval.py", peer=False)
HARNESS = tuple(
    Driver(
        f"lm-evaluation-harness, batches of {size}",
        "peers/lm_eval_generate.py",
        ("--batch-size", size),
    )
    for size in ("256", "64")
)

if __name__ == "__main__":
    parser = options(__doc__ or "")
    parser.add_argument("--rows", default="10000", help="number of tasks")
    chosen = parser.parse_args()
    case = Case(
        f"Evaluation of {int(chosen.rows):,} tasks of 8 to 64 tokens, 32 new tokens",
        (OURS, *HARNESS),
        ("--rows", chosen.rows),
        SECONDS,
    )
    compare(case, chosen)
