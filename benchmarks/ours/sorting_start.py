"""Writes the quick-start's model after so many steps of its supervised stage, with tasks and
settings of the stage after it: `sorting_start.py DIR [--steps 48]`. So the other side needs nothing
of Ratchet."""

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
from ratchet.training.from_config import build_env_setup, build_policy, build_run

torch.set_num_threads(1)  # the recipe's, and so its course


def main() -> None:
    parser = argparse.ArgumentParser(description="the quick-start's model before GRPO")
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--steps", type=int, default=0, help="of the supervised stage; 0: random weights"
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
    written = {
        split: [[task.messages[0].text, task.answer] for task in several]
        for split, several in tasks.items()
    }
    settings = {"steps": stage.steps, "batch_size": stage.batch_size, **sections, **written}
    (options.directory / "sorting.json").write_text(json.dumps(settings), encoding="utf-8")


main()
