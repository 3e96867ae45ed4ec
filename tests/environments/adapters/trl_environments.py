"""Environment classes as users of TRL write them. TRL's own trainer runs this file too."""

import asyncio


class Counter:
    """Counts up to a target."""

    def __init__(self):
        self.episodes = 0

    def reset(self, target=3, **kwargs):
        self.episodes += 1
        self.value, self.target = 0, target
        return f" Reach {target}."

    def add(self, amount: int) -> int:
        """
        Adds to the counter.

        Args:
            amount: How much to add.
        """
        self.value += amount
        return self.value

    async def show(self) -> str:
        """
        Shows the counter.
        """
        await asyncio.sleep(0)
        return f"at {self.value}"

    def fail(self) -> str:
        """
        Always fails.
        """
        raise ValueError("out of order")

    def get_reward(self) -> float:
        return 1.0 if self.value == self.target else -abs(self.target - self.value) / 10

    def _helper(self):
        raise AssertionError("not a tool")


class Silent:
    """Has no reward and no observation."""

    def reset(self, **kwargs):
        self.row = kwargs
        self.said = []

    def say(self, word: str) -> str:
        """
        Says a word.

        Args:
            word: The word.
        """
        self.said.append(word)
        return "ok"


def words_said(environments, completions, log_metric=None, **kwargs):
    return [float(len(environment.said)) for environment in environments]


class NoReset:
    def add(self, amount: int) -> int:
        """
        Adds.

        Args:
            amount: How much.
        """
        return amount


class Untyped:
    def reset(self, **kwargs):
        return None

    def add(self, amount):
        """Adds."""
        return amount


class Slow:
    def reset(self, **kwargs):
        return None

    async def wait(self) -> str:
        """
        Waits for ever.
        """
        await asyncio.Event().wait()
        return "never"
