"""Compare the time of one GRPO step of Ratchet and TRL on the same model.

A step has 8 prompts of 16 tokens x 16 samples of 32 new tokens. Where the processor multiplies in
bfloat16, Ratchet in bfloat16 is also compared with TRL in bfloat16, float32 and its defaults.

    python benchmarks/grpo_step.py [--size S] [--threads 2] [--rounds 5] [--python PEERS/bin/python]
"""

from __future__ import annotations

from side_by_side import Case, Driver, compare_precisions, options

OURS = Driver("Ratchet", "ours/ratchet_grpo.py", peer=False)
TUNED = Driver("TRL tuned (float32, one micro-batch)", "peers/trl_grpo.py")
AUTOCAST = Driver("TRL tuned, bfloat16 autocast", "peers/trl_grpo.py", ("--bf16",))
DEFAULTS = Driver("TRL, its defaults", "peers/trl_grpo.py", ("--defaults",))
TARGETS = {"S": 3.0, "M": 4.0}

if __name__ == "__main__":
    chosen = options(__doc__ or "").parse_args()
    name = "GRPO step, 8 prompts x 16 samples, prompt 16, 32 new tokens"
    case = Case(name, (OURS, TUNED), target=TARGETS.get(chosen.size))
    compare_precisions(case, chosen, (AUTOCAST, DEFAULTS))
