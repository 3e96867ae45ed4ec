"""One GRPO step, 8 prompts x 16 samples, prompt 16, 32 new tokens: Ratchet and TRL in turn on the same model.

python benchmarks/grpo_step.py [--size S] [--threads 2] [--rounds 5] [--python PEERS/bin/python]
"""

from __future__ import annotations

import sys

from side_by_side import Driver, compare, options

DRIVERS = (
    Driver("Ratchet", "ours/ratchet_grpo.py", peer=False),
    Driver("TRL, tuned (float32, one micro-batch)", "peers/trl_grpo.py"),
    Driver("TRL, tuned, under bfloat16 autocast", "peers/trl_grpo.py", ("--bf16",)),
    Driver("TRL, its defaults", "peers/trl_grpo.py", ("--defaults",)),
)

if __name__ == "__main__":
    sys.exit(compare("GRPO step", DRIVERS, options(__doc__ or "").parse_args(), []))
