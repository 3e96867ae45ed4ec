"""A small environment of Atropos, played and trained on; run with the package on the path.

Writes results.json into the directory that it is given.
"""

import asyncio
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import yaml
from experience.openai_proxy.talk import RENDERER, TEMPLATE, Scripted, sampling

from ratchet.config.resolve import build, resolve
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.training.sources import make_manager_with_player
from ratchet.training.stage import EnvSetup
from ratchet.training.start import resume_run, start_run

here = Path(sys.argv[1])
policy = here / "tokenizer"
RENDERER.tokenizer.save(policy)
for name, value in (("chat_template", TEMPLATE), ("eos_token", "<eos>")):
    path = policy / "tokenizer_config.json"
    path.write_text(json.dumps({name: value, **json.loads(path.read_text())}), encoding="utf-8")

section = {
    "kind": "atropos",
    "path": "experience.atropos.real_environment:Letters",
    "config": {"tokenizer_name": str(policy)},
    "test_tasks": 2,
}
environment = build(resolve("environment", section))
manager = make_manager_with_player(
    EpisodePlayer(Scripted(["a", "aba", "b", "aa"]), RENDERER, max_context=4096),
    RENDERER,
    EnvSetup(environment),
    None,
    SimpleNamespace(attempt_timeout_s=None, retries=0),
    needs_reward=True,
)
task = next(environment.tasks("train", seed=0))
group = asyncio.run(manager.group(task, sampling(), group_id="g", attempts=2))
values = {
    "threads": 1,
    "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
    "tokenizer": {"kind": "auto", "path": str(policy)},
    "environment": section,
    "sampling": {"max_new_tokens": 4},
    "evaluation": {"tasks": 1},
    "algorithm": {"kind": "grpo", "group_size": 2},
    "steps": 1,
    "batch_size": 2,
}
recipe = here / "recipe.yaml"
recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
statuses = [
    start_run(recipe, [], here / "run", command="ratchet train"),
    resume_run(here / "run", ["steps=2"], command="ratchet train"),
]
records = [path.read_bytes() for path in sorted((here / "run" / "steps").glob("*.parquet"))]
results = {
    "outcomes": [repr(row.outcome) for row in group.trajectories],
    "turns": [len(row.turns) for row in group.trajectories],
    "trained": [
        RENDERER.tokenizer.decode(row.tokens[row.trainable].tolist(), skip_special=True)
        for row in group.trajectories
    ],
    "statuses": statuses,
    # The records of the two steps, the second after the resume.
    "items": [re.findall(rb"Letters/train/(\d)", record)[0].decode() for record in records],
}
(here / "results.json").write_text(json.dumps(results), encoding="utf-8")
