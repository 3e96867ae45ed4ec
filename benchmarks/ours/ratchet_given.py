"""Time Ratchet's optimizer steps on given text: SFT on conversations, DPO on pairs.

Steps run as in `ratchet train`. Arguments and output are those of ../peers/protocol.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import common
import protocol

options = common.start(protocol.given_arguments("SFT or DPO of Ratchet"))

from arithmetic import Work, tree

import ratchet as rt
from ratchet.algorithms.config.preference import DPOConfig
from ratchet.environments.single_turn import SingleTurn
from ratchet.types import Comparison


class Given(SingleTurn):
    """An environment of given conversations, in order; the first answer is the better one."""

    name = "given"

    def __init__(self, texts: Sequence[tuple[str, ...]]) -> None:
        self.texts = texts

    def tasks(self, split: str, *, seed: int, start: int = 0) -> Iterator[rt.Task]:
        for index, (question, answer, *_) in enumerate(self.texts[start:], start):
            yield rt.Task(f"given/{index}", (rt.Message("user", question),), answer=answer)

    def comparison(self, task: rt.Task) -> Comparison:
        chosen, rejected = self.texts[int(task.id.rpartition("/")[2])][1:]
        return Comparison((rt.Message("assistant", chosen),), (rt.Message("assistant", rejected),))


def work(texts: Sequence[tuple[str, ...]]) -> Work:
    """Return the work of all texts.

    The template adds two tokens to a question, and one to the end of each answer.
    """
    rows = [
        tree(len(question) + 2, [len(answer) + 1 for answer in answers])
        for question, *answers in texts
    ]
    return sum(rows, Work())


async def main() -> None:
    is_sft = options.algorithm == "sft"
    texts = protocol.conversations(options, answers=1 if is_sft else 2)
    # Work in units of a forward pass: forward 1, backward 2, and for DPO the reference's forward 1.
    algorithm, passes = (rt.SFTConfig(), 3) if is_sft else (DPOConfig(), 4)
    policy = common.make_policy(options)
    steps = await common.train(
        options, policy, rt.EnvSetup(Given(texts)), algorithm, groups=options.rows
    )
    tokens = sum(len(row[0]) + len(answer) + 3 for row in texts for answer in row[1:]) // (
        options.warmup + options.steps
    )
    assert all(numbers["rollout/tokens"] == tokens for numbers in steps.metrics)
    common.emit(
        options,
        steps.seconds,
        case=options.algorithm,
        work=tokens if is_sft else options.rows,
        gflop=passes
        * work(texts).forward_gflop(policy.model.decoder.config)
        / (options.warmup + options.steps),
        startup_s=round(steps.startup_s, 2),
    )


asyncio.run(main())
