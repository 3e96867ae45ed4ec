"""Times Ratchet's optimizer steps on given text, on the path that `ratchet train` takes: SFT on
conversations, DPO on pairs. Arguments and output are those of ../peers/protocol.py."""

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
    """Conversations, in order; the first answer is the better one."""

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
    """The question with the template's two tokens, then the answers, each with the token that ends
    it."""
    rows = [
        tree(len(question) + 2, [len(answer) + 1 for answer in answers])
        for question, *answers in texts
    ]
    return sum(rows, Work())


async def main() -> None:
    sft = options.algorithm == "sft"
    texts = protocol.conversations(options, answers=1 if sft else 2)
    # a reference's forward beside the policy's
    algorithm, passes = (rt.SFTConfig(), 3) if sft else (DPOConfig(), 4)
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
        work=tokens if sft else options.rows,
        gflop=passes
        * work(texts).forward_gflop(policy.model.decoder.config)
        / (options.warmup + options.steps),
        startup_s=round(steps.startup_s, 2),
    )


asyncio.run(main())
