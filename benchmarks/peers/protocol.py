"""Functions that all drivers share: their arguments, their workload, and their result in one JSON
line.

    python benchmarks/peers/trl_grpo.py --model DIR --prompts 8 --group-size 16
        --prompt-tokens 16 --new-tokens 32 --threads 2 --steps 8 [--defaults]

A driver runs in a separate process, and can run in another environment. The runner
(../side_by_side.py) reads only its JSON line. All seconds are wall time; with BENCHMARK_CLOCK=processor
in the environment they are processor time, which other programs on the machine hardly change (with
`--threads 1`: threads that wait count too). This module does not import torch, because the runner
imports it too.
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
from pathlib import Path
from typing import Any, NoReturn

if os.environ.get("BENCHMARK_CLOCK") == "processor":
    time.perf_counter = time.process_time
STARTED = time.perf_counter()
UNAVAILABLE = 3  # exit status of a driver that can't run here
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"  # each is one token of make_model.py's tokenizer


@dataclass(frozen=True)
class Row:
    """One completion to generate: the prompt's token ids, and the number of new tokens."""

    prompt: tuple[int, ...]
    new_tokens: int


@dataclass
class Phases:
    """The seconds that timed functions take, by name and step."""

    steps: list[dict[str, float]] = field(default_factory=lambda: [{}])

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, with its time added to `name` of the current step."""

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
    parser.add_argument(
        "--model", required=True, help="Hugging Face model directory, with its tokenizer"
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16, help="completions per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=32, help="per completion, exactly")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument(
        "--warmup", type=int, default=2, help="steps before the timed ones, not reported"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda, which computes in bfloat16")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 on a CPU too")
    return parser


def is_bfloat16(options: argparse.Namespace) -> bool:
    """Return True if the driver computes in bfloat16, False for float32."""
    return options.bf16 or options.device != "cpu"


def generation_arguments(description: str) -> argparse.ArgumentParser:
    parser = arguments(description)
    parser.add_argument(
        "--ragged", action="store_true", help="prompts and completions of different lengths"
    )
    parser.add_argument(
        "--slots", type=int, help="number of completions generated at the same time; default: all"
    )
    return parser


def given_arguments(description: str) -> argparse.ArgumentParser:
    """Return the arguments for training on given text. Those about prompts are not used."""
    parser = arguments(description)
    parser.add_argument("--algorithm", choices=("sft", "dpo"), required=True)
    parser.add_argument(
        "--rows",
        type=int,
        default=64,
        help="number of conversations (sft) or pairs (dpo) in an optimizer step",
    )
    parser.add_argument(
        "--shortest", type=int, default=16, help="minimum number of tokens of a conversation"
    )
    parser.add_argument("--longest", type=int, default=256, help="maximum number of its tokens")
    return parser


def target_arguments(description: str) -> argparse.ArgumentParser:
    """Return the arguments for training to a target. Those about lengths and steps are not used."""
    parser = arguments(description)
    parser.add_argument(
        "--target", type=float, default=0.9, help="share of held-out tasks to solve"
    )
    parser.add_argument(
        "--every", type=int, default=10, help="number of batches between evaluations"
    )
    return parser


def evaluation_arguments(description: str) -> argparse.ArgumentParser:
    """Return the arguments for an evaluation. Those about groups and steps are not used."""
    parser = arguments(description)
    parser.add_argument("--rows", type=int, default=10_000, help="number of tasks")
    return parser


def write_tasks(options: argparse.Namespace, path: Path) -> None:
    """Write a file of `rows` tasks: a prompt of 8 to 64 random letters, and its first 8 letters as
    the answer."""
    rng = random.Random(options.seed)
    prompts = (rng.choices(LETTERS, k=rng.randint(8, 64)) for _ in range(options.rows))
    rows = ({"prompt": "".join(letters), "answer": "".join(letters[:8])} for letters in prompts)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


@dataclass
class Goal:
    """A target accuracy, and the evaluations so far.

    curve: (step, seconds of training, accuracy) of each evaluation.
    """

    target: float
    curve: list[tuple[int, float, float]] = field(default_factory=list)

    def is_reached(self, step: int, seconds: float, accuracy: float) -> bool:
        """Note an evaluation, and return True if it reaches the target."""
        self.curve.append((step, round(seconds, 2), round(accuracy, 4)))
        return accuracy >= self.target

    def seconds(self) -> float:
        """Return the seconds of the evaluation that reached the target. Exits if none did."""
        if not self.curve or self.curve[-1][2] < self.target:
            unavailable(
                f"{self.target:.0%} was not reached: (step, seconds, accuracy) {self.curve}"
            )
        return self.curve[-1][1]


def read_sorting_settings(model: str) -> dict[str, Any]:
    """Return the quick-start's tasks and settings, which ../ours/sorting_start.py wrote."""
    return json.loads((Path(model) / "sorting.json").read_text(encoding="utf-8"))


def quiet_offline(threads: int) -> None:
    """Set the number of threads, no downloads and few messages. Call it before importing torch."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    for name, value in {**defaults, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}.items():
        os.environ.setdefault(name, value)


def workload(
    usable: Sequence[int],
    *,
    prompts: int,
    group_size: int,
    prompt_tokens: int,
    new_tokens: int,
    ragged: bool,
    seed: int,
) -> list[Row]:
    """`prompts` x `group_size` rows, group by group; the prompts are random ids from `usable`.

    Ragged: prompt lengths are spread evenly over [1/2, 1] x prompt_tokens and completion lengths
    over [1/12, 1] x new_tokens, then shuffled. Equal arguments give equal rows, so that both sides
    of a comparison do the same work.
    """
    rng = random.Random(seed)
    rows = prompts * group_size
    prompt_lengths = (
        _spread(prompts, -(-prompt_tokens // 2), prompt_tokens)
        if ragged
        else [prompt_tokens] * prompts
    )
    new_lengths = _spread(rows, -(-new_tokens // 12), new_tokens) if ragged else [new_tokens] * rows
    rng.shuffle(prompt_lengths)
    rng.shuffle(new_lengths)
    workload_rows: list[Row] = []
    for length in prompt_lengths:
        prompt = tuple(rng.choice(usable) for _ in range(length))
        first = len(workload_rows)
        workload_rows += [Row(prompt, new_lengths[first + i]) for i in range(group_size)]
    return workload_rows


def conversations(options: argparse.Namespace, *, answers: int) -> list[tuple[str, ...]]:
    """Return (question, answer, ...) of random letters, for all rows of all steps.

    A question with one of its answers and the chat template's three tokens has from `shortest` to
    `longest` tokens. These lengths are spread evenly over the rows of a step, then shuffled. The
    question has a third of the letters of its shorter conversation.

    answers: number of answers to each question.
    """
    rng = random.Random(options.seed)
    texts: list[tuple[str, ...]] = []
    for _ in range(options.warmup + options.steps):
        lengths = [
            _spread(options.rows, options.shortest - 3, options.longest - 3) for _ in range(answers)
        ]
        for answer_lengths in lengths:
            rng.shuffle(answer_lengths)
        for row_lengths in zip(*lengths, strict=True):
            question = min(row_lengths) // 3
            texts.append(
                tuple(
                    "".join(rng.choices(LETTERS, k=n))
                    for n in (question, *(n - question for n in row_lengths))
                )
            )
    return texts


def generation_workload(options: argparse.Namespace, usable: Sequence[int]) -> list[Row]:
    keys = ("prompts", "group_size", "prompt_tokens", "new_tokens", "ragged", "seed")
    return workload(usable, **{key: getattr(options, key) for key in keys})


def _spread(count: int, low: int, high: int) -> list[int]:
    """Return `count` integers, spread evenly from `low` to `high`."""
    return (
        [high]
        if count == 1
        else [low + round((high - low) * i / (count - 1)) for i in range(count)]
    )


def emit_generation(
    options: argparse.Namespace, rows: Sequence[Row], generate: Callable[[], Any], **facts: Any
) -> None:
    """Time `generate`, which generates all rows, and print the result."""
    seconds: list[float] = []
    startup_s = 0.0
    for _ in range(options.warmup + options.steps):
        start = time.perf_counter()
        generate()
        seconds.append(time.perf_counter() - start)
        startup_s = startup_s or time.perf_counter() - STARTED
    n_new_tokens = sum(row.new_tokens for row in rows)
    emit(
        options,
        seconds[options.warmup :],
        case="generate",
        work=n_new_tokens,
        startup_s=round(startup_s, 2),
        **facts,
    )


def unavailable(reason: str) -> NoReturn:
    """Exit because the driver can't run here. The runner shows the reason and continues."""
    print(reason, file=sys.stderr)
    raise SystemExit(UNAVAILABLE)


def since_spawn(now: float) -> float:
    """Return the seconds from the runner's start of this process to `now` (time.time()).

    They include the start of the interpreter.
    """
    return now - float(os.environ["BENCHMARK_SPAWNED"])


def emit(options: argparse.Namespace, seconds: Sequence[float], **facts: Any) -> None:
    """Print the JSON line of the result.

    It has the options, the facts, the seconds of each timed step and their median, and the peak
    memory of this process or of the largest process that it started. If the facts have `work`, the
    units of a step or a list of those of each timed step, it also has the median rate.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    peak_bytes = unit * max(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    if work := facts.get("work"):
        work_by_step = work if isinstance(work, list) else [work] * len(seconds)
        facts["rate_per_s"] = round(
            statistics.median(n / s for n, s in zip(work_by_step, seconds, strict=True)), 2
        )
    if options.device != "cpu":
        import torch

        facts["peak_device_mib"] = round(torch.cuda.max_memory_allocated(options.device) / 2**20)
    result = {
        **facts,
        **{name: value for name, value in vars(options).items() if name != "seed"},
        "seconds": [round(value, 4) for value in seconds],
        "median_s": round(statistics.median(seconds), 4),
        "peak_rss_mib": round(peak_bytes / 2**20),
    }
    print(json.dumps(result), flush=True)
