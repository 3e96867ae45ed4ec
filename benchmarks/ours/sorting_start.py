"""Write the quick-start's model after some steps of its supervised stage.

    python benchmarks/ours/sorting_start.py DIR [--steps 48]

The directory also gets the tasks and settings of the next stage (sorting.json), so that the peer's
driver does not need Ratchet.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from pathlib import Path

import common
import torch

import ratchet as rt
from ratchet.config.loader import load_config
from ratchet.training.from_config import build_policy
from ratchet.training.stage_from_config import build_env_setup, build_run

torch.set_num_threads(1)  # as in the recipe, so that training gives the same weights


def main() -> None:
    parser = argparse.ArgumentParser(description="the quick-start's model before GRPO")
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--steps", type=int, default=0, help="steps of the supervised stage; 0: random weights"
    )
    options = parser.parse_args()
    config = load_config(common.QUICKSTART, ["device=cpu"])
    policy = build_policy(config)
    run = build_run(config, 0, policy)
    run.evaluator, run.end_step = None, min(run.end_step, options.steps)
    asyncio.run(rt.train(run))
    policy.model.save(options.directory)
    policy.tokenizer.save(options.directory)
    stage = config.stages[1]
    environment = build_env_setup(stage).environment
    sections = {
        name: section.model_dump(mode="json")
        for name, section in stage
        if hasattr(section, "model_dump")
    }
    tasks = {
        "train": itertools.islice(
            environment.tasks("train", seed=0), stage.steps * stage.batch_size
        ),
        "test": itertools.islice(environment.tasks("test", seed=0), stage.evaluation.tasks),
    }
    task_texts = {
        split: [[task.messages[0].text, task.answer] for task in split_tasks]
        for split, split_tasks in tasks.items()
    }
    settings = {"steps": stage.steps, "batch_size": stage.batch_size, **sections, **task_texts}
    (options.directory / "sorting.json").write_text(json.dumps(settings), encoding="utf-8")


main()
