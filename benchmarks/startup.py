"""Compare the seconds from the start of a process to the end of the quick-start's first step.

The rows are `ratchet train` as a user calls it, a minimal TRL script on the same model and task, and
`import torch` alone. The TRL script does not evaluate, so Ratchet's evaluation is off in the first
row. Another row includes the evaluation of 512 tasks that the recipe makes before its first step.

    python benchmarks/startup.py [--threads 2] [--rounds 5] [--python PEERS/bin/python]
"""

from __future__ import annotations

from quickstart_vs_trl import START
from side_by_side import SECONDS, Case, Driver, compare, options

DRIVERS = (
    Driver("Ratchet", "ours/first_step.py", peer=False),
    Driver("TRL", "peers/trl_first_step.py"),
    Driver("Ratchet, evaluated before", "ours/first_step.py", ("--evaluated",), peer=False),
    Driver("import torch", "ours/import_torch.py", peer=False),
)

if __name__ == "__main__":
    case = Case(
        "First optimizer step of the quick-start",
        DRIVERS,
        measure=SECONDS,
        maker=START,
        made_by_size=False,
        target=3.0,
    )
    compare(case, options(__doc__ or "").parse_args())
