"""Compare the peak memory of a GRPO step of Ratchet and TRL, for a tiny model with a vocabulary of
150,000.

A step has 4 prompts of 16 tokens x 8 samples of 32 new tokens.

    python benchmarks/memory.py [--size T] [--vocabulary 150000] [--rounds 5]
    [--python PEERS/bin/python]
"""

from __future__ import annotations

from dataclasses import replace

from grpo_step import DEFAULTS, OURS, TUNED
from side_by_side import MEMORY, Case, compare, options

if __name__ == "__main__":
    parser = options(__doc__ or "")
    parser.add_argument("--vocabulary", default="150000")
    parser.set_defaults(size="T", steps="2")
    chosen = parser.parse_args()
    case = Case(
        f"Peak memory of a GRPO step, vocabulary {int(chosen.vocabulary):,}, 4 prompts x 8 "
        "samples, 32 new tokens",
        (OURS, TUNED, DEFAULTS),
        ("--prompts", "4", "--group-size", "8", "--warmup", "1"),
        measure=MEMORY,
        target=2.0,
        maker=replace(Case.maker, arguments=("--vocabulary", chosen.vocabulary)),
    )
    compare(case, chosen)
