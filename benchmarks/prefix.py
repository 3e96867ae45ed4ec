"""Compare the time of a GRPO step with long prompts of Ratchet and TRL.

A step has 4 prompts of 128 or 512 tokens x 16 samples of 32 new tokens.

    python benchmarks/prefix.py [--size S] [--prompts 4] [--threads 2] [--rounds 5]
    [--python PEERS/bin/python]
"""

from __future__ import annotations

from grpo_step import AUTOCAST, OURS, TUNED
from side_by_side import Case, compare_precisions, options

if __name__ == "__main__":
    parser = options(__doc__ or "")
    parser.add_argument("--prompts", default="4")
    chosen = parser.parse_args()
    cases = [
        Case(
            f"GRPO step, {chosen.prompts} prompts x 16 samples, prompt {length}, 32 new tokens",
            (OURS, TUNED),
            ("--prompts", chosen.prompts, "--prompt-tokens", length),
            target=target if chosen.size == "S" else None,
        )
        for length, target in (("128", None), ("512", 10.0))
    ]
    for case in cases:
        compare_precisions(case, chosen, (AUTOCAST,))
