"""An environment in the style of ROLL: draws from the process's generators, has instructions, a
suffix and metrics."""

import random

import numpy as np


class Doubling:
    def __init__(self, rounds=2):
        self.rounds = rounds

    def reset(self, seed=None):
        random.seed(seed)
        np.random.seed(seed)
        self.left = self.rounds
        return self._ask(), {"env_instruction": "Double what you are given.", "suffix": "Answer?"}

    def _ask(self):
        self.number = random.randrange(100) + int(np.random.randint(100))
        return f"Number: {self.number}"

    def step(self, action):
        right = action == str(2 * self.number)
        self.left -= 1
        info = {
            "suffix": "Answer?",
            "metrics": {"action_is_valid": action.isdigit(), "note": "text"},
        }
        return self._ask(), float(right), self.left == 0, action == "late", info


class Exhausted(Doubling):
    """An environment whose step asks an iterator that has ended."""

    def step(self, action):
        return next(iter([]))


class Textual(Doubling):
    """An environment whose reward is text."""

    def step(self, action):
        text, reward, *end = super().step(action)
        return text, str(reward), *end


class Chatty(Doubling):
    """An environment whose `info` holds what can be no metric."""

    def step(self, action):
        *step, _ = super().step(action)
        info = {"metrics": None, "best": float("inf"), "state": 10**400, 3: 4, "hits": np.int64(2)}
        return *step, info


class OldReset(Doubling):
    """An environment of gym's old interface: `reset` returns an observation of two characters."""

    def reset(self, seed=None):
        return super().reset(seed)[0][:2]


class OldStep(Doubling):
    """An environment of gym's old interface: `step` returns four values."""

    def step(self, action):
        observation, reward, done, _, info = super().step(action)
        return observation, reward, done, info
