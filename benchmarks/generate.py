"""Generation, even (8 prompts x 16 samples, 32 new tokens) and ragged (16 prompts x 16, up to 96 new tokens): Ratchet's
embedded engine and transformers' `generate` in turn on the same model and token counts.

    python benchmarks/generate.py [--size S] [--threads 2] [--rounds 5] [--python PEERS/bin/python]
"""

from __future__ import annotations

import sys

from side_by_side import Driver, compare, options

DRIVERS = (Driver("Ratchet", "ours/ratchet_generate.py", peer=False), Driver("transformers generate", "peers/hf_generate.py"))
RAGGED = ["--ragged", "--prompts", "16", "--new-tokens", "96"]

if __name__ == "__main__":
    chosen = options(__doc__ or "").parse_args()
    sys.exit(compare("generation, even", DRIVERS, chosen, []) or compare("generation, ragged", DRIVERS, chosen, RAGGED))
