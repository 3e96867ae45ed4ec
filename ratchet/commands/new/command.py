"""The command `ratchet new`: write small starter files, which run unchanged, for users to edit."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

from ratchet.commands.new.project import make_project_files
from ratchet.errors import ConfigError
from ratchet.utils.atomic_files import atomic_path
from ratchet.utils.terminal_text import shorten_text

RECIPE = """\
# Describe here what the recipe is for. `ratchet check $name.yaml` shows its batch arithmetic.
name: "$name"
# Random weights. For a trained model write {path: Qwen/Qwen3-0.6B}, and remove the tokenizer below.
model: {preset: tiny}
tokenizer: {kind: characters, alphabet: "0123456789="}
# An environment of your own (`ratchet new environment`) is {kind: "my_module:MyEnvironment"}.
environment: {kind: sorting, digits: 3}
sampling: {temperature: 0.7, max_new_tokens: 4}
evaluation: {tasks: 64}
stages:
  # Random weights earn no reward before some supervised steps. A trained model may skip this stage.
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

A recipe names it `environment: {kind: "$name:$symbol", tries: 5}`.
"""

from ratchet.environments.single_turn import Problem, Procedural
from ratchet.protocols import Step
from ratchet.types import Message


class $symbol(Procedural):
    name = "$name"

    def __init__(self, size: int = 1000, tries: int = 8):  # keys of a recipe
        self.size, self.tries = size, tries

    def sample(self, rng):
        """Return a task: the prompt, the answer for rewards, and data for `reset`.

        All randomness must come from `rng`. One prompt in ten is held out. If all prompts are the
        same, add key=str(secret): then the key, not the prompt, decides which tasks are held out.
        """
        low = rng.randint(1, self.size)
        secret = rng.randint(low, low + self.size)
        return Problem(f"from {low} to {low + self.size}", str(secret), {"secret": secret})

    def demonstration(self, task):
        """Return a right answer for supervised training; remove this method if there is none."""
        return (Message("assistant", str(task.answer)),)

    async def reset(self, task):
        """Begin an attempt: set the state of this attempt."""
        self.secret, self.tries_left = task.meta["secret"], self.tries
        return task.messages

    async def step(self, message):
        """Answer the policy, which may write anything: unreadable text earns 0 and never raises."""
        guess = message.text.strip()
        self.tries_left -= 1
        if not (guess.isascii() and guess.isdigit() and len(guess) < 10):
            return Step(reward=0.0, done=True, metrics={"unreadable": 1.0})
        if int(guess) == self.secret:
            return Step(reward=1.0, done=True)
        hint = Message("user", "higher" if int(guess) < self.secret else "lower")
        return Step((hint,), reward=0.0, done=self.tries_left == 0)
'''

ENVIRONMENT_TEST = '''\
from $name import $symbol

from ratchet.testing import check_environment


def test_it_keeps_the_contract():
    """Check the contract of environments; `ratchet check $name:$symbol` shows it as a table."""
    check_environment($symbol(), n=5)


def test_tries_are_a_key():
    check_environment($symbol(tries=1), n=5)
'''

REWARD = '''\
"""A reward: 1 for a right answer, and a little more for a brief one.

A recipe names it `rewards: [{kind: "$name:$symbol", limit: 4}]`.
"""

from ratchet.rewards.base import answer_text


def $symbol(trajectory, task, limit: int = 8):  # `limit` is a key of a recipe
    """Return named parts, which sum to the reward and are logged by name.

    An answer may hold anything: never execute it, and return 0 if it is wrong. Raise an error only
    for a broken task.
    """
    text = answer_text(trajectory).strip()  # the last message; trajectory.messages has all
    right = float(text == str(task.answer))
    return {"right": right, "brief": 0.1 * right * (len(text) <= limit)}
'''

REWARD_TEST = '''\
from $name import $symbol

from ratchet.rewards.base import as_reward
from ratchet.testing import check_reward
from ratchet.types import Message, Task

TASK = Task("task/0", (Message("user", "2+3="),), answer="5")


def test_it_keeps_the_contract():
    """Check the contract of rewards; `ratchet check $name:$symbol` shows it as a table."""
    check_reward(as_reward($symbol), TASK, good="5", bad="6")
'''


HARBOR_TASK: Mapping[str, str] = {
    "task.toml": """\
schema_version = "1.4"
# Files of the agent that the tests get: they run in a new container.
artifacts = ["/app/sum.txt"]

[metadata]

[verifier]
environment_mode = "separate"
timeout_sec = 60.0

[agent]
timeout_sec = 300.0

[environment]
build_timeout_sec = 600.0
network_mode = "no-network"
workdir = "/app"
""",
    "instruction.md": "Write the sum of the numbers in /app/numbers.txt into /app/sum.txt.\n",
    "environment/Dockerfile": "FROM python:3.11-slim\nWORKDIR /app\nCOPY numbers.txt ./\n",
    "environment/numbers.txt": "1\n2\n",
    "solution/solve.sh": """\
#!/bin/bash
# A solution that earns the full reward. It runs as /solution/solve.sh.
total=0
while read -r number; do total=$((total + number)); done </app/numbers.txt
echo "$total" >/app/sum.txt
""",
    "tests/test.sh": """\
#!/bin/bash
# It runs as /tests/test.sh in the working directory. It must write a number into reward.txt, or an
# object of named numbers into reward.json.
if [ "$(cat /app/sum.txt)" = "$(cat /tests/expected.txt)" ]; then
  echo 1 >/logs/verifier/reward.txt
else
  echo 0 >/logs/verifier/reward.txt
fi
""",
    "tests/expected.txt": "3\n",
}


@dataclass(frozen=True)
class RecipeRequest:
    """The options of a new recipe for a file and a model."""

    like: str
    """An algorithm's kind, or the name of a recipe that comes with Ratchet."""
    data: str
    """A file, pattern, directory or address."""
    model: str
    """A Hugging Face directory, or a Hub id."""
    reward: str | None = None
    """A kind of reward, `module:function`, or `file.py:function`; None: no reward."""
    teacher: str | None = None
    """The model directory that a distillation learns from."""


def _make_module_name(name: str) -> str:
    """Return a name in the form of a Python module's: MyMaze and my-maze become my_maze.

    Raises ConfigError if the result is not a valid module name.
    """
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    if not module.isidentifier() or keyword.iskeyword(module):
        raise ConfigError(
            f"'{name}' can't name a Python file: use letters, digits and _, for example "
            f"my_{re.sub(r'[^a-z0-9]+', '_', module)}"
        )
    return module


def _make_recipe(name: str) -> tuple[Mapping[str, str], str]:
    """Return the text of a recipe by file name, and the next command."""
    _check_recipe_name(name)
    return {f"{name}.yaml": _fill(RECIPE, name=name)}, f"ratchet train {name}.yaml"


def _check_recipe_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,99}", name):
        raise ConfigError(
            f"'{shorten_text(name, 100)}' can't name a recipe: use at most 100 letters, digits and "
            "_ . + -"
        )


def _make_environment(name: str) -> tuple[Mapping[str, str], str]:
    """Return an environment and its test as text by file name, and the next command."""
    module = _make_module_name(name)
    class_name = "".join(word.capitalize() for word in module.split("_"))
    names = {"name": module, "symbol": class_name}
    files = {
        f"{module}.py": _fill(ENVIRONMENT, **names),
        f"test_{module}.py": _fill(ENVIRONMENT_TEST, **names),
    }
    return files, f"ratchet check {module}:{class_name}"


def _make_reward(name: str) -> tuple[Mapping[str, str], str]:
    """Return a reward and its test as text by file name, and the next command."""
    module = _make_module_name(name)
    names = {"name": module, "symbol": module}
    files = {
        f"{module}.py": _fill(REWARD, **names),
        f"test_{module}.py": _fill(REWARD_TEST, **names),
    }
    return files, f"ratchet check {module}:{module}"


def _make_harbor_task(name: str) -> tuple[Mapping[str, str], str]:
    """Return the files of a task directory in Harbor's format, and the next command."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise ConfigError(f"'{name}' can't name a task: use letters, digits and _ . -")
    files = {f"{name}/{file}": text for file, text in HARBOR_TASK.items()}
    return files, f"ratchet eval oracle --on harbor test={name} 'waive=[image]'"


def _make_project(name: str) -> tuple[Mapping[str, str], str]:
    """Return the files of a project as text by file name, and the next command."""
    _check_recipe_name(name)
    files = {f"{name}/{file}": text for file, text in make_project_files(name).items()}
    return files, f"cd {name} && make test && ratchet train recipe.yaml"


def _fill(text: str, **names: str) -> str:
    """Return the template text with its $name placeholders replaced."""
    return Template(text).substitute(names)


# Each function returns the texts of its files by file name, and the command to run next.
KINDS: Mapping[str, Callable[[str], tuple[Mapping[str, str], str]]] = {
    "project": _make_project,
    "recipe": _make_recipe,
    "environment": _make_environment,
    "reward": _make_reward,
    "harbor-task": _make_harbor_task,
}


def scaffold(kind: str, name: str) -> tuple[list[Path], str]:
    """Write the starter files of a kind; return their paths and the command to run next.

    Raises ConfigError if the name is invalid or a file exists already. Then nothing is written.
    """
    files, command = KINDS[kind](name)
    return _write(files), command


def scaffold_recipe(name: str | None, request: RecipeRequest) -> tuple[list[Path], str]:
    """Write a recipe for a file and a model; return its path and the command to run next.

    Args:
        name: The name of the recipe; None: the value of `request.like`.
        request: The options of the recipe.

    Raises ConfigError or DataError, and then nothing is written.
    """
    from ratchet.commands.new.recipe import write_recipe  # it imports torch

    name = name or request.like.removesuffix(".yaml")
    _check_recipe_name(name)
    _refuse_existing([f"{name}.yaml"])
    files = {f"{name}.yaml": write_recipe(name, request)}
    return _write(files), f"ratchet check {name}.yaml && ratchet train {name}.yaml"


def _refuse_existing(files: Iterable[str]) -> None:
    for file in files:
        if Path(file).exists():
            raise ConfigError(f"{file} exists already and is not replaced: choose another name")


def _write(files: Mapping[str, str]) -> list[Path]:
    _refuse_existing(files)
    paths: list[Path] = []
    try:
        for file, text in files.items():
            path = Path(file)
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(path) as draft:
                draft.write_text(text, encoding="utf-8")
            paths.append(path)
    except OSError:  # without this, the next try would be refused because files exist
        for path in paths:
            path.unlink(missing_ok=True)
        raise
    return paths
