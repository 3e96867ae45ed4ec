"""Compare the generation throughput of Ratchet's engine, transformers and vLLM.

All use the same model and token counts. Even case: 8 prompts x 16 samples, 32 new tokens. Ragged
case: 256 prompts of 8 to 16 tokens, 8 to 96 new tokens, 64 at a time.

    python benchmarks/generate.py [--size S] [--threads 2] [--rounds 5] [--python PEERS/bin/python]
"""

from __future__ import annotations

from side_by_side import Case, Driver, compare_precisions, options, rate

DRIVERS = (
    Driver("Ratchet", "ours/ratchet_generate.py", peer=False),
    Driver("transformers generate", "peers/hf_generate.py"),
    Driver("transformers continuous batching", "peers/hf_continuous.py"),
    Driver("vLLM", "peers/vllm_generate.py"),
)
BFLOAT16 = (
    Driver("transformers generate, bfloat16", "peers/hf_generate.py", ("--bf16",)),
    Driver("vLLM, bfloat16", "peers/vllm_generate.py", ("--bf16",)),
)
RAGGED = (
    "--ragged",
    "--prompts",
    "256",
    "--group-size",
    "1",
    "--new-tokens",
    "96",
    "--slots",
    "64",
)
CASES = (
    Case(
        "Generation, 8 prompts x 16 samples, 32 new tokens",
        DRIVERS,
        measure=rate("tokens"),
        target=5.0,
    ),
    Case(
        "Ragged generation, 256 prompts, 8 to 96 new tokens, 64 slots",
        DRIVERS,
        RAGGED,
        rate("tokens"),
        target=5.0,
    ),
)

if __name__ == "__main__":
    chosen = options(__doc__ or "").parse_args()
    for case in CASES:
        compare_precisions(case, chosen, BFLOAT16)
