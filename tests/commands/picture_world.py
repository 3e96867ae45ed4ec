"""An environment whose second turn shows another picture. Its rewards are a function of what was
said."""

import numpy as np
from PIL import Image

from ratchet.config.base import Section
from ratchet.data.formats.media import embed
from ratchet.protocols import Step
from ratchet.types import Message, Part, Task


def picture(seed):
    return embed(
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (32, 48, 3), dtype=np.uint8))
    )


class World:
    replayable = True

    class Config(Section):
        pass

    def __init__(self, config):
        self.turn = 0

    def tasks(self, split, *, seed, start=0):
        number = start
        while True:
            shown = Message("user", (picture(number), Part("text", "what?")))
            yield Task(f"{split}/{number}", (shown,), environment="world")
            number += 1

    async def reset(self, task):
        self.turn = 0
        return task.messages

    async def step(self, message):
        self.turn += 1
        reward = float(sum(map(ord, message.text)) % 3)
        if self.turn == 2:
            return Step(reward=reward, done=True)
        return Step(
            (Message("user", (Part("text", "and this?"), picture(1000 + len(message.text)))),),
            reward=reward,
        )

    async def close(self):
        pass
