"""The command `ratchet new`: write small starter files, which run unchanged, for users to edit."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Template

from ratchet.errors import ConfigError

RECIPE = """\
# Say here what it is for. `ratchet check $name.yaml` shows its batch arithmetic.
name: $name
# Random weights; a trained model is {path: Qwen/Qwen3-0.6B}, without the tokenizer below.
model: {preset: tiny}
tokenizer: {kind: characters, alphabet: "0123456789="}
# Your own, by `ratchet new environment`: {kind: "my_module:MyEnvironment"}
environment: {kind: sorting, digits: 3}
sampling: {temperature: 0.7, max_new_tokens: 4}
evaluation: {tasks: 64}
stages:
  # Random weights earn no reward before some supervised steps; a trained model may skip them.
  - name: sft
    algorithm: {kind: sft}
    steps: 30
    batch_size: 64
    optimizer: {lr: 2e-3, warmup_steps: 5}
  - name: grpo
    algorithm: {kind: grpo, group_size: 8, equal_rewards: drop}
    steps: 20
    batch_size: 32
    optimizer: {lr: 3e-4, warmup_steps: 5}
"""

ENVIRONMENT = '''\
"""An environment: guess a number from hints.

A recipe names it `environment: {kind: "$name:$thing", tries: 5}`.
"""

from ratchet.environments.single_turn import Problem, Procedural
from ratchet.protocols import Step
from ratchet.types import Message


class $thing(Procedural):
    name = "$name"

    def __init__(self, most: int = 1000, tries: int = 8):  # keys of a recipe
        self.most, self.tries = most, tries

    def sample(self, rng):
        """Draw one task with `rng` alone: the prompt, the answer for rewards, data for `reset`."""
        low = rng.randint(1, self.most)
        secret = rng.randint(low, low + self.most)
        return Problem(f"from {low} to {low + self.most}", str(secret), {"secret": secret})

    def demonstration(self, task):
        """Return a right answer for supervised training; remove this method if there is none."""
        return (Message("assistant", str(task.answer)),)

    async def reset(self, task):
        """Begin an attempt: set what belongs to it alone."""
        self.secret, self.left = task.meta["secret"], self.tries
        return task.messages

    async def step(self, message):
        """Answer the policy. It may write anything: unreadable text earns 0 and never raises."""
        guess = message.text.strip()
        self.left -= 1
        if not (guess.isascii() and guess.isdigit() and len(guess) < 10):
            return Step(reward=0.0, done=True, metrics={"unreadable": 1.0})
        if int(guess) == self.secret:
            return Step(reward=1.0, done=True)
        hint = Message("user", "higher" if int(guess) < self.secret else "lower")
        return Step((hint,), reward=0.0, done=self.left == 0)
'''

ENVIRONMENT_TEST = '''\
from $name import $thing

from ratchet.testing import check_environment


def test_it_keeps_the_contract():
    """Hold it to the contract; `ratchet check $name:$thing` shows it as a table."""
    check_environment($thing(), n=5)


def test_tries_are_a_key():
    check_environment($thing(tries=1), n=5)
'''

REWARD = '''\
"""A reward: 1 for a right answer, and a little more for a brief one.

A recipe names it `rewards: [{kind: "$name:$thing", limit: 4}]`.
"""

from ratchet.rewards.base import answer_text


def $thing(trajectory, task, limit: int = 8):  # parameters after the first two are recipe keys
    """Return named parts, which sum to the reward and are logged by name.

    An answer may hold anything: never run it, and return 0 if it is wrong. Raise only for a broken
    task.
    """
    text = answer_text(trajectory).strip()  # the last message; trajectory.messages has all
    right = float(text == str(task.answer))
    return {"right": right, "brief": 0.1 * right * (len(text) <= limit)}
'''

REWARD_TEST = '''\
from $name import $thing

from ratchet.rewards.base import as_reward
from ratchet.testing import check_reward
from ratchet.types import Message, Task

TASK = Task("task/0", (Message("user", "2+3="),), answer="5")


def test_it_keeps_the_contract():
    """What every reward must do; `ratchet check $name:$thing` shows it as a table."""
    check_reward(as_reward($thing), TASK, good="5", bad="6")
'''


def _module(name: str) -> str:
    """Return the name as a name of a Python module: MyMaze and my-maze become my_maze.

    Raises ConfigError if the result is no valid module name.
    """
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    if not module.isidentifier() or keyword.iskeyword(module):
        raise ConfigError(
            f"'{name}' can't name a file of Python: use letters, digits and _, say "
            f"my_{re.sub(r'[^a-z0-9]+', '_', module)}"
        )
    return module


def _recipe(name: str) -> tuple[Mapping[str, str], str]:
    """Return the text of a recipe by file name, and the next command."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
        raise ConfigError(f"'{name}' can't name a recipe: use letters, digits and _ . + -")
    return {f"{name}.yaml": _fill(RECIPE, name=name)}, f"ratchet train {name}.yaml"


def _environment(name: str) -> tuple[Mapping[str, str], str]:
    """Return an environment and its test as text by file name, and the next command."""
    module = _module(name)
    names = {"name": module, "thing": "".join(word.capitalize() for word in module.split("_"))}
    files = {
        f"{module}.py": _fill(ENVIRONMENT, **names),
        f"test_{module}.py": _fill(ENVIRONMENT_TEST, **names),
    }
    return files, f"ratchet check {module}:{names['thing']}"


def _reward(name: str) -> tuple[Mapping[str, str], str]:
    """Return a reward and its test as text by file name, and the next command."""
    module = _module(name)
    names = {"name": module, "thing": module}
    files = {
        f"{module}.py": _fill(REWARD, **names),
        f"test_{module}.py": _fill(REWARD_TEST, **names),
    }
    return files, f"ratchet check {module}:{module}"


def _fill(text: str, **names: str) -> str:
    """Return the template text with its $name placeholders replaced."""
    return Template(text).substitute(names)


# Each function returns the texts of its files by file name, and the command to run next.
KINDS: Mapping[str, Callable[[str], tuple[Mapping[str, str], str]]] = {
    "recipe": _recipe,
    "environment": _environment,
    "reward": _reward,
}


def scaffold(kind: str, name: str, directory: Path = Path()) -> tuple[list[Path], str]:
    """Write the starter files of a kind; return their paths and the command to run next.

    Raises ConfigError if the name is invalid or a file exists already. Then nothing is written.
    """
    files, command = KINDS[kind](name)
    texts = {directory / file: text for file, text in files.items()}
    for path in texts:
        if path.exists():
            raise ConfigError(
                f"{path} is there already, and is not overwritten: choose another name"
            )
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts), command
