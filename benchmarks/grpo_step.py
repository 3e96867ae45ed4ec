"""Compare the time of one GRPO step of Ratchet and TRL on the same model.

A step has 8 prompts of 16 tokens x 16 samples of 32 new tokens.

    python benchmarks/grpo_step.py [--size S] [--threads 2] [--rounds 5] [--python PEERS/bin/python]
"""

from __future__ import annotations

from side_by_side import Case, Driver, compare, options

OURS = Driver("Ratchet", "ours/ratchet_grpo.py", peer=False)
TUNED = Driver("TRL tuned (float32, one micro-batch)", "peers/trl_grpo.py")
AUTOCAST = Driver("TRL tuned, bfloat16 autocast", "peers/trl_grpo.py", ("--bf16",))
DEFAULTS = Driver("TRL, its defaults", "peers/trl_grpo.py", ("--defaults",))
TARGETS = {"S": 3.0, "M": 2.5}

if __name__ == "__main__":
    chosen = options(__doc__ or "").parse_args()
    name = "GRPO step, 8 prompts x 16 samples, prompt 16, 32 new tokens"
    compare(Case(name, (OURS, TUNED, AUTOCAST, DEFAULTS), target=TARGETS.get(chosen.size)), chosen)
