"""Kernels, copies and synchronisations of decoding and training, counted on a pretended accelerator.

Counts of one step, layer or micro-batch are differences between two runs of the same code, of which
one has more of them. `main` prints the table of docs/accelerators.md:

    PYTHONPATH=tests/support/pretend_cuda/startup:tests .venv/bin/python tests/rehearsal/device_counts.py
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from support.pretend_cuda.counting import DeviceEvents, counting

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.config.named_policy_gradients import GRPOConfig
from ratchet.algorithms.policy_gradient import build_policy_gradient
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.schema import OptimizerConfig
from ratchet.data.packing import pack
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.kernels import bfloat16
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.models.load import init_policy
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.types import Sampling

DEVICE = torch.device("cuda:0")
VOCAB = 64
REQUESTS = 128
ROWS = 8  # attempts of a micro-batch, which share a prompt
PROMPT = 16
COMPLETION = 16
KINDS = ("kernel", "copy", "sync")


@dataclass(frozen=True)
class Counts:
    """The counts of a part of the work."""

    kernel: int
    copy: int
    sync: int


def subtract(larger: DeviceEvents, smaller: DeviceEvents, parts: int = 1) -> Counts:
    """Return what each of `parts` further parts of the work adds."""
    return Counts(*((larger.count(kind) - smaller.count(kind)) // parts for kind in KINDS))


def make_policy(layers: int):
    shape = DecoderConfig(VOCAB, 32, layers, 4, 2, 8, 64, init_std=0.2)
    return init_policy(shape, seed=0, device=DEVICE)


def count_events(work: Callable[[], object]) -> DeviceEvents:
    with counting() as events:
        work()
    return events


def decode(
    tokens: int, *, layers: int = 2, captures: bool = False, **sampling: object
) -> DeviceEvents:
    """Count what generating this many tokens takes for every one of 128 requests at once.

    captures: True to replay steps from the third token on, as an engine on CUDA does.
    """
    bfloat16.set_enabled(True, on_cpu=False)  # as in a run
    engine = EmbeddedEngine(EngineConfig(max_running=REQUESTS), make_policy(layers))
    if not captures:
        engine.core.graphs = None
    prompts = [[i % VOCAB] * PROMPT for i in range(REQUESTS)]
    samplings = [Sampling(max_new_tokens=tokens, seed=seed, **sampling) for seed in range(REQUESTS)]
    completions = []
    events = count_events(lambda: completions.extend(engine.generate_all(prompts, samplings)))
    assert {len(completion.tokens) for completion in completions} == {tokens}, "a request ended"
    return events


def make_rows(micro_batches: int):
    """Return a weighed batch of that many groups of equal shape, and its loss terms."""
    algorithm = build_policy_gradient(GRPOConfig(group_size=ROWS))
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    groups = []
    for index in range(micro_batches):
        prompt = draw(PROMPT)
        rows = [
            make_trajectory(prompt, draw(COMPLETION), reward=float(attempt % 2), attempt=attempt)
            for attempt in range(ROWS)
        ]
        groups.append(make_group(f"group-{index}", rows))
    batch = algorithm.advantage(pack(groups), AlgoState())
    return algorithm.weigh(batch, AlgoState()), algorithm.losses["policy"]


def update(micro_batches: int, *, layers: int = 2) -> DeviceEvents:
    """Count what one optimizer step takes, after a first one that has made the optimizer's state."""
    learner = LocalLearner(
        LocalConfig(micro_batch_tokens=PROMPT + ROWS * COMPLETION),
        make_policy(layers),
        optimizer=OptimizerConfig(),
        autocast=True,
    )
    batch, terms = make_rows(micro_batches)
    asyncio.run(learner.update(batch, terms))
    return count_events(lambda: asyncio.run(learner.update(batch, terms)))


def measure() -> dict[str, Counts]:
    """Return the rows of the table, by what they count."""
    # Greedy, and with a token that is never drawn.
    stop_ids = {"stop_ids": (VOCAB - 1,), "temperature": 0.0}
    filters = {"top_p": 0.9, "top_k": 8, "min_p": 0.01}
    long, one, two, one_deep = decode(6), update(1), update(2), update(1, layers=3)
    micro_batch = subtract(two, one)
    deep_micro_batch = subtract(update(2, layers=3), one_deep)
    return {
        "Decoding step of 128 requests, 2 layers": subtract(long, decode(2), 4),
        "the same with stop ids": subtract(decode(6, **stop_ids), decode(2, **stop_ids), 4),
        "the same with top-p, top-k and min-p": subtract(
            decode(6, **filters), decode(2, **filters), 4
        ),
        "each further layer": subtract(decode(6, layers=3), long, 6),
        "A replayed step": subtract(decode(10, captures=True), decode(6, captures=True), 4),
        "a replayed step with stop ids": subtract(
            decode(10, captures=True, **stop_ids), decode(6, captures=True, **stop_ids), 4
        ),
        "GRPO update of one micro-batch, 2 layers": subtract(one, DeviceEvents()),
        "each further micro-batch": micro_batch,
        "each further layer of a micro-batch": Counts(
            deep_micro_batch.kernel - micro_batch.kernel,
            deep_micro_batch.copy - micro_batch.copy,
            deep_micro_batch.sync - micro_batch.sync,
        ),
    }


def make_table(rows: dict[str, Counts]) -> str:
    """Return the table of docs/accelerators.md."""
    lines = ["| Work | Kernels | Copies | Waits |", "|---|---|---|---|"]
    lines += [f"| {name} | {x.kernel} | {x.copy} | {x.sync} |" for name, x in rows.items()]
    return "\n".join(lines)


def main(works: list[str]) -> None:
    """Print the table; with "decode" or "update", the lines of code that the counts come from."""
    for work in works:
        events = {"decode": lambda: decode(6), "update": lambda: update(2)}[work]()
        for kind in KINDS:
            sys.stdout.write(f"{kind}\n{events.describe(kind)}\n")
    if not works:
        sys.stdout.write(f"{make_table(measure())}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
