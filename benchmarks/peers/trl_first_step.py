"""Measure the seconds from the start of the process to the end of TRL's first optimizer step.

The script is a minimal one, on the quick-start's model and demonstrations. The model comes from
../ours/sorting_start.py.
"""

from __future__ import annotations

import time

import protocol
import trl_common

options = trl_common.start(protocol.arguments("the first step of TRL"))

import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    options.warmup, options.steps = 0, 1
    sorting = protocol.read_sorting_settings(options.model)
    rows = sorting["train"][: sorting["batch_size"]]
    with trl_common.training(options) as (directory, timer):
        trainer = trl.SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.model),
            args=trl.SFTConfig(
                **trl_common.make_common_settings(options, directory),
                **trl_common.make_tuned_settings(options),
                per_device_train_batch_size=len(rows),
            ),
            train_dataset=Dataset.from_list(
                [{"prompt": prompt, "completion": answer} for prompt, answer in rows]
            ),
            processing_class=AutoTokenizer.from_pretrained(options.model),
            callbacks=[timer],
        )
        trainer.train()
        seconds = protocol.since_spawn(time.time())
    protocol.emit(options, [seconds], case="startup", peer="trl", version=trl.__version__)


main()
