"""`ratchet new`: small files that work as they stand, to be changed into one's own."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Template

from ratchet.errors import ConfigError

RECIPE = """\
# What it is for, in a sentence. `ratchet check $name.yaml` shows what it works out to; docs/ has every key.
name: $name
model: {preset: tiny}  # random weights; a trained model: {path: Qwen/Qwen3-0.6B}, without tokenizer below
tokenizer: {kind: characters, alphabet: "0123456789="}
environment: {kind: sorting, digits: 3}  # your own: {kind: "my_module:MyEnvironment"}, by `ratchet new environment`
sampling: {temperature: 0.7, max_new_tokens: 4}
evaluation: {tasks: 64}
stages:
  - name: sft  # brings a model that knows nothing to where rewards are earned at all; a trained one does without
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
"""An environment: which number is meant? A recipe names it `environment: {kind: "$name:$thing", tries: 5}`."""

from ratchet.environments.single_turn import Problem, Procedural
from ratchet.protocols import Step
from ratchet.types import Message


class $thing(Procedural):
    name = "$name"

    def __init__(self, most: int = 1000, tries: int = 8):  # keys of a recipe
        self.most, self.tries = most, tries

    def sample(self, rng):
        """One task, drawn with `rng` alone: what the policy reads, its answer for rewards, and what `reset` needs."""
        low = rng.randint(1, self.most)
        secret = rng.randint(low, low + self.most)
        return Problem(f"from {low} to {low + self.most}", str(secret), {"secret": secret})

    def demonstration(self, task):
        """How it is done, for supervised training; remove it where nobody knows."""
        return (Message("assistant", str(task.answer)),)

    async def reset(self, task):
        """Begins an attempt; what belongs to it alone is set here."""
        self.secret, self.left = task.meta["secret"], self.tries
        return task.messages

    async def step(self, message):
        """Answers the policy. It may have written anything: what can't be read earns 0, and never raises."""
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
    """What every environment must do; `ratchet check $name:$thing` shows it as a table."""
    check_environment($thing(), n=5)


def test_tries_are_a_key():
    check_environment($thing(tries=1), n=5)
'''

REWARD = '''\
"""A reward: right, and a little more where it is brief. A recipe names it `rewards: [{kind: "$name:$thing", limit: 4}]`."""

from ratchet.rewards.base import answer_text


def $thing(trajectory, task, limit: int = 8):  # parameters after the first two are keys of a recipe
    """Named parts sum to the reward, and are logged by name. An answer may hold anything: never run it, and return 0 where it
    is wrong; raise only where the task is broken."""
    text = answer_text(trajectory).strip()  # of the last message; all of them are trajectory.messages
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
    """As a file of Python: MyMaze and my-maze are my_maze. Raises ConfigError where it can be
    none."""
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    if not module.isidentifier() or keyword.iskeyword(module):
        raise ConfigError(
            f"'{name}' can't name a file of Python: use letters, digits and _, say "
            f"my_{re.sub(r'[^a-z0-9]+', '_', module)}"
        )
    return module


def _recipe(name: str) -> tuple[Mapping[str, str], str]:
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
        raise ConfigError(f"'{name}' can't name a recipe: use letters, digits and _ . + -")
    return {f"{name}.yaml": _filled(RECIPE, name=name)}, f"ratchet train {name}.yaml"


def _environment(name: str) -> tuple[Mapping[str, str], str]:
    module = _module(name)
    names = {"name": module, "thing": "".join(word.capitalize() for word in module.split("_"))}
    files = {
        f"{module}.py": _filled(ENVIRONMENT, **names),
        f"test_{module}.py": _filled(ENVIRONMENT_TEST, **names),
    }
    return files, f"ratchet check {module}:{names['thing']}"


def _reward(name: str) -> tuple[Mapping[str, str], str]:
    module = _module(name)
    names = {"name": module, "thing": module}
    files = {
        f"{module}.py": _filled(REWARD, **names),
        f"test_{module}.py": _filled(REWARD_TEST, **names),
    }
    return files, f"ratchet check {module}:{module}"


def _filled(text: str, **names: str) -> str:
    return Template(text).substitute(names)


KINDS: Mapping[str, Callable[[str], tuple[Mapping[str, str], str]]] = {
    "recipe": _recipe,
    "environment": _environment,
    "reward": _reward,
}


def scaffold(kind: str, name: str, directory: Path = Path()) -> tuple[list[Path], str]:
    """Writes the files; returns them, and the command that comes next. Raises ConfigError, having
    written nothing, for a name that can't be one, and where a file is there already."""
    files, command = KINDS[kind](name)
    paths = {directory / file: text for file, text in files.items()}
    for path in paths:
        if path.exists():
            raise ConfigError(
                f"{path} is there already, and is not overwritten: choose another name"
            )
    for path, text in paths.items():
        path.write_text(text, encoding="utf-8")
    return list(paths), command
