"""What a GRPO step on a CPU costs beside its products: Python calls, PyTorch's operations, and bytes
that are allocated and copied.

Unlike times, these counts are the same on every machine. The count of one attempt is the difference
between two steps, divided by the attempts that one of them has more. A bound is today's count with
a fifth to spare.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ratchet.config.resolve import build, resolve
from ratchet.config.schema import EvaluationConfig, RunConfig
from ratchet.data.chat.renderer import Renderer
from ratchet.learners.config import LocalConfig
from ratchet.rewards.base import as_reward
from ratchet.training.build import make_run
from ratchet.training.from_config import build_policy
from ratchet.training.loop import train
from ratchet.training.stage import EnvSetup, StageSpec
from ratchet.types import Sampling, Task, Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.needs("cc")]
LAYERS = 2
GROUP_SIZE = 16
GROUPS = 4, 12  # of the two steps
ATTEMPTS = (GROUPS[1] - GROUPS[0]) * GROUP_SIZE
MICRO_BATCHES = 4  # that the larger step has more
CONFIG = {
    "threads": 1,
    "device": "cpu",
    "kernels": "compiled",
    "model": {"preset": "tiny", "overrides": {"n_layers": LAYERS}},
    "tokenizer": {"kind": "bytes"},
    "stages": [
        {
            "name": "count",
            "algorithm": {"kind": "grpo"},
            "environment": {"kind": "sorting"},
            "steps": 1,
            "batch_size": 1,
        }
    ],
}
PRODUCTS = ("mm", "addmm", "bmm")
COPIES = ("copy_", "clone", "_to_copy", "cat", "stack")


class NeverStops:
    """A renderer without stop ids, so that every answer has the same length on every machine."""

    stop_ids = ()

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)


def last_token_is_odd(trajectory: Trajectory, task: Task) -> float:
    return float(trajectory.tokens[-1] % 2)


class CountedOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        inputs = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        storages = {x.untyped_storage().data_ptr() for x in inputs}
        self.counts["operations"] += 1
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                is_new = x.untyped_storage().data_ptr() not in storages
                self.counts["allocated bytes"] += x.nbytes * is_new
                self.counts["copied bytes"] += x.nbytes * (name in COPIES)
        if name in PRODUCTS:
            self.counts["products"] += 1
            self.counts["products that copy an operand"] += not all(map(is_dense, inputs))
        return result


def is_dense(x: Tensor) -> bool:
    """True if a product reads this matrix, or its transpose, as it lies in memory."""
    return x.is_contiguous() or x.mT.is_contiguous()


@contextlib.contextmanager
def count_operations() -> Iterator[Counter[str]]:
    with CountedOperations() as operations:
        yield operations.counts


@contextlib.contextmanager
def count_python_calls() -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            counts[f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"] += 1

    sys.setprofile(note)
    try:
        yield counts
    finally:
        sys.setprofile(None)


def count_step(
    groups: int, count: Callable[[], AbstractContextManager[Counter[str]]]
) -> Counter[str]:
    """Return the counts of the second step of a run: the first one compiles and fills caches."""
    policy = build_policy(RunConfig.model_validate(CONFIG))
    spec = StageSpec(
        "count",
        3,
        groups,
        Sampling(max_new_tokens=8),
        learner=LocalConfig(micro_batch_tokens=400),
        evaluation=EvaluationConfig(tasks=0),
    )
    run = make_run(
        replace(policy, renderer=NeverStops(policy.renderer)),
        EnvSetup(build(resolve("environment", {"kind": "sorting"})), as_reward(last_token_is_odd)),
        build(resolve("algorithm", {"kind": "grpo", "group_size": GROUP_SIZE})),
        spec,
    )
    found: list[Counter[str]] = []
    with contextlib.ExitStack() as stack:

        def observe(step: int, numbers: object) -> None:
            if step == 1:
                found.append(stack.enter_context(count()))
            elif step == 2:
                stack.close()

        run.observers = (observe,)
        asyncio.run(train(run))
    return found[0]


def test_python_calls_of_an_attempt():
    few, many = (count_step(groups, count_python_calls) for groups in GROUPS)
    more = many - few
    calls = more.total() / ATTEMPTS
    most = "\n".join(f"{n / ATTEMPTS:.1f} {name}" for name, n in more.most_common(30))
    assert calls <= 430, f"{calls:.0f} Python calls an attempt:\n{most}"


def test_operations_of_a_micro_batch_and_bytes_of_an_attempt():
    few, many = (count_step(groups, count_operations) for groups in GROUPS)
    more = many - few
    products = LAYERS * 4 + 1  # queries with keys and values, output, gate with up, down; the head
    assert more["products"] == 3 * products * MICRO_BATCHES, "one forward, two backward"
    assert many["products that copy an operand"] == 0
    assert more["operations"] / MICRO_BATCHES <= 490
    assert more["allocated bytes"] / ATTEMPTS <= 470_000
    assert more["copied bytes"] / ATTEMPTS <= 9_700
