"""What the drivers of this folder share: the same arguments, the same workload, one JSON line as the result.

    python benchmarks/peers/trl_grpo.py --model DIR --prompts 8 --group-size 16 --prompt-tokens 16 --new-tokens 32 \
        --threads 2 --steps 8 [--defaults]

A driver runs alone in its own process (and, if wanted, in its own environment), so that a side-by-side runner needs nothing
of the peer but this line. All seconds are wall time. Free of torch, so that a runner can import it too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

STARTED = time.perf_counter()


@dataclass(frozen=True)
class Row:
    """One completion to make: the prompt's token ids, and how many tokens to add to it."""

    prompt: tuple[int, ...]
    new_tokens: int


@dataclass
class Phases:
    """Seconds of named functions, added up until the end of a step."""

    steps: list[dict[str, float]] = field(default_factory=lambda: [{}])

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.steps[-1][name] = self.steps[-1].get(name, 0.0) + time.perf_counter() - start

        return wrapped

    def next_step(self) -> None:
        self.steps.append({})

    def medians(self, warmup: int, steps: int) -> dict[str, float]:
        kept = self.steps[warmup : warmup + steps]
        return {name: statistics.median(step[name] for step in kept) for name in kept[0]}


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="Hugging Face model directory, with its tokenizer")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16, help="completions per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=32, help="per completion, exactly")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them, not reported")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def quiet_offline(threads: int) -> None:
    """Call before torch is imported."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    defaults = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    for name, value in {**defaults, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}.items():
        os.environ.setdefault(name, value)


def workload(
    usable: Sequence[int], *, prompts: int, group_size: int, prompt_tokens: int, new_tokens: int, ragged: bool, seed: int
) -> list[Row]:
    """`prompts` x `group_size` rows, group by group; the prompts are random ids from `usable`.

    Ragged: prompt lengths are spread evenly over [1/2, 1] x prompt_tokens and completion lengths over [1/8, 1] x
    new_tokens, then shuffled. Equal arguments give equal rows, so that both sides of a comparison do the same work.
    """
    rng = random.Random(seed)
    rows = prompts * group_size
    prompt_lengths = _spread(prompts, -(-prompt_tokens // 2), prompt_tokens) if ragged else [prompt_tokens] * prompts
    new_lengths = _spread(rows, -(-new_tokens // 8), new_tokens) if ragged else [new_tokens] * rows
    rng.shuffle(prompt_lengths)
    rng.shuffle(new_lengths)
    made: list[Row] = []
    for length in prompt_lengths:
        prompt = tuple(rng.choice(usable) for _ in range(length))
        made += [Row(prompt, new_lengths[len(made) + i]) for i in range(group_size)]
    return made


def _spread(count: int, low: int, high: int) -> list[int]:
    """`count` integers from `low` to `high`, evenly."""
    return [high] if count == 1 else [low + round((high - low) * i / (count - 1)) for i in range(count)]


def emit(options: argparse.Namespace, seconds: Sequence[float], **facts: Any) -> None:
    """Prints the one JSON line: what was run, each timed step's seconds, their median, memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    result = {
        **facts,
        **{name: value for name, value in vars(options).items() if name != "seed"},
        "seconds": [round(value, 4) for value in seconds],
        "median_s": round(statistics.median(seconds), 4),
        "peak_rss_mib": round(peak_bytes / 2**20),
    }
    print(json.dumps(result), flush=True)
