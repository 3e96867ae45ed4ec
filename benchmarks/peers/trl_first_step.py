"""Seconds from the start of the process to the end of TRL's first optimizer step on the
quick-start's model and demonstrations: the least that a user would write. The model comes from
../ours/sorting_start.py."""

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
    sorting = protocol.sorting(options.model)
    rows = sorting["train"][: sorting["batch_size"]]
    with trl_common.training(options) as (directory, timer):
        trainer = trl.SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.model),
            args=trl.SFTConfig(
                **trl_common.common(options, directory),
                **trl_common.tuned(options),
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
