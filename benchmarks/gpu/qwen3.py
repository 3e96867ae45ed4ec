"""Measure decoding, training on packed rows, and a whole GRPO step on one accelerator.

The model has random weights in the shapes of Qwen3.

    python benchmarks/gpu/qwen3.py [--size qwen3-0.6b | qwen3-1.7b] [--rounds 5]
    python benchmarks/gpu/qwen3.py --device cpu --size T --rounds 1 --steps 1

The second command only tries the script on a CPU, with a 16th of the lengths (`--shrink`). Needs PyTorch,
transformers, the dependencies of `import ratchet`, and this checkout, which need not be installed;
TRL's rows need TRL. The floor of decoding is set by the memory's measured bandwidth, that of training
by the measured rate of matrix products in bfloat16.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from generate import DRIVERS as DECODING
from grpo_step import OURS
from sft import DRIVERS as SFT
from side_by_side import RATES, Case, Driver, compare, options, rate

GROUPS = {"--prompts": 32, "--group-size": 16, "--prompt-tokens": 128, "--new-tokens": 512}
CASES = ("decoding", "training", "grpo")
MICRO_BATCH = 32  # rows of TRL; the logits of all 512 rows at once would take 160 GB in float32
PACKED = {"--rows": 16, "--shortest": 4096, "--longest": 4096}


def make_arguments(sizes: dict[str, int], divisor: int) -> tuple[str, ...]:
    """Return command-line arguments of the sizes, each divided by `divisor`."""
    return tuple(
        text for name, number in sizes.items() for text in (name, str(max(2, number // divisor)))
    )


def main() -> None:
    parser = options(__doc__ or "")
    parser.set_defaults(device="cuda", size="qwen3-0.6b")
    parser.add_argument(
        "--shrink",
        type=int,
        help="try the script: divide all lengths by this number; default: 16 on a CPU, else 1",
    )
    parser.add_argument("--case", choices=CASES, help="measure only this one; default: all")
    chosen = parser.parse_args()
    if chosen.device != "cpu" and not torch.cuda.is_available():
        sys.exit(
            "PyTorch finds no CUDA accelerator here, so there is nothing to measure. Use --device "
            "cpu --size T to try the script."
        )
    divisor = chosen.shrink or (16 if chosen.device == "cpu" else 1)
    rates = RATES
    if divisor > 1 and chosen.device != "cpu":
        sizes = {"--side": 8192, "--copy-mib": 1024}
        rates = replace(RATES, arguments=make_arguments(sizes, divisor))
    vocabulary = replace(Case.maker, arguments=("--vocabulary", str(151936 // divisor)))
    groups, packed = make_arguments(GROUPS, divisor), make_arguments(PACKED, divisor)
    micro_batch = ("--micro-batch", str(min(MICRO_BATCH, int(groups[1]) * int(groups[3]))))
    trl = Driver("TRL (bfloat16 autocast)", "peers/trl_grpo.py", micro_batch)
    trl_vllm = Driver("TRL with vLLM", "peers/trl_grpo.py", (*micro_batch, "--vllm"))
    cases = (
        Case(
            "Decoding, 32 prompts x 16 samples, 512 new tokens",
            DECODING,
            groups,
            rate("tokens"),
            vocabulary,
        ),
        Case(
            "Training, 16 rows of 4,096 tokens",
            SFT,
            ("--algorithm", "sft", *packed),
            rate("tokens"),
            vocabulary,
        ),
        Case(
            "GRPO step, 32 prompts x 16 samples, 512 new tokens",
            (OURS, trl_vllm, trl),
            groups,
            maker=vocabulary,
            target=6.0,
        ),
    )
    for name, case in zip(CASES, cases, strict=True):
        if chosen.case not in (None, name):
            continue
        compare(
            case
            if divisor == 1
            else replace(case, name=f"{case.name}, all divided by {divisor}", target=None),
            chosen,
            rates,
            peers_may_fail=True,
        )


if __name__ == "__main__":
    main()
