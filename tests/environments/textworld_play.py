"""Games that TextWorld makes, played by the environment; run with the package on the path.

Writes results.json into the directory that it is given.
"""

import asyncio
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import textworld
import yaml

from ratchet.config.resolve import build, resolve
from ratchet.testing.environments import check_environment
from ratchet.training.start import start_run
from ratchet.types import Message

here = Path(sys.argv[1])
maker = Path(textworld.__file__).parents[1] / "bin" / "tw-make"
options = ["--rewards", "dense", "--goal", "detailed", "--format", "z8", "-f"]
for seed, folder in ((1, "train"), (3, "test")):
    path = here / folder / f"game{seed}.z8"
    words = ["tw-simple", "--seed", str(seed), *options, "--output", path]
    subprocess.run([sys.executable, maker, *words], check=True, stdout=subprocess.DEVNULL)
for copy, suffix in itertools.product(range(6), (".z8", ".json")):
    shutil.copy(here / "train" / f"game1{suffix}", here / "train" / f"copy{copy}{suffix}")

section = {"kind": "textworld", "train": [f"{here}/train"], "test": [f"{here}/test/*.z8"]}
environment = build(resolve("environment", section))
check_environment(environment, n=2, max_turns=60)
(task,) = environment.rows("test")
game = textworld.start(task.meta["game"], textworld.EnvInfos(policy_commands=True))
solution = game.reset().policy_commands


async def play(commands):
    first = await environment.reset(task)
    steps = [await environment.step(Message("assistant", command)) for command in commands]
    await environment.close()
    return first[0].text, steps


start, steps = asyncio.run(play([f"I think.\n> {command.upper()}." for command in solution]))
_, odd = asyncio.run(play(["save", "quit", "restart. look", "", "look"]))
recipe = here / "recipe.yaml"
values = {
    "threads": 1,
    "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
    "tokenizer": {"kind": "bytes"},
    "environment": {**section, "max_turns": 2, "commands": False},
    "sampling": {"max_new_tokens": 4},
    "evaluation": {"tasks": 1},
    "algorithm": {"kind": "grpo", "group_size": 2},
    "steps": 1,
    "batch_size": 4,
}
recipe.write_text(yaml.safe_dump(values))
results = {
    "start": start,
    "rewards": [step.reward for step in steps],
    "ends": [step.done for step in steps],
    "won": steps[-1].metrics["won"],
    "keys": len({step.state_key for step in steps}),
    "impossible": [step.metrics["impossible_commands"] for step in odd],
    "odd rewards": [step.reward for step in odd],
    "status": start_run(recipe, [], here / "run", command="ratchet train"),
}
(here / "results.json").write_text(json.dumps(results))
