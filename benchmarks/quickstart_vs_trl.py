"""Compare how long Ratchet and TRL train until they solve 90 % of the quick-start's held-out tasks.

Both start from the same weights, those after the quick-start's supervised stage, and use its
settings for GRPO. Measured are the seconds of training, without evaluation, until the first
evaluation that reaches the target.

    python benchmarks/quickstart_vs_trl.py [--target 0.9] [--threads 2] [--rounds 5]
    [--python PEERS/bin/python]
"""

from __future__ import annotations

from dataclasses import replace

from side_by_side import SECONDS, Case, Driver, compare_precisions, options

START = Driver("start", "ours/sorting_start.py", peer=False)
DRIVERS = (
    Driver("Ratchet", "ours/ratchet_sorting.py", peer=False),
    Driver("TRL tuned", "peers/trl_sorting.py"),
)
AUTOCAST = Driver("TRL tuned, bfloat16 autocast", "peers/trl_sorting.py", ("--bf16",))

if __name__ == "__main__":
    parser = options(__doc__ or "")
    parser.add_argument("--target", default="0.9", help="share of held-out tasks to solve")
    parser.add_argument(
        "--start-steps", default="48", help="steps of the supervised stage before it"
    )
    chosen = parser.parse_args()
    case = Case(
        f"Quick-start to {100 * float(chosen.target):.0f} % held-out",
        DRIVERS,
        ("--target", chosen.target),
        measure=SECONDS,
        target=5.0,
        maker=replace(START, arguments=("--steps", chosen.start_steps)),
        made_by_size=False,
    )
    compare_precisions(case, chosen, (AUTOCAST,))
