"""Time optimizer steps of TRL on given text: SFT on conversations, DPO on pairs.

See protocol.py for the arguments. The settings are tuned as in trl_grpo.py. `--layout packing` fills
rows of PACKED tokens with whole conversations, so a step has about as many tokens as Ratchet's, but
other conversations. `--layout padding-free` lays the conversations of a micro-batch end to end. In
these two layouts transformers masks attention between conversations. Rates count the tokens of
conversations without padding.
"""

from __future__ import annotations

from typing import Any

import protocol
import trl_common

parser = protocol.given_arguments("SFT or DPO of TRL")
parser.add_argument("--layout", choices=("padded", "packing", "padding-free"), default="padded")
parser.add_argument(
    "--micro-batch",
    type=int,
    default=8,
    help="conversations or pairs of a micro-batch; when packing, about as many tokens",
)
options = trl_common.start(parser)
# Tokens of a packed row. Longer rows cost more attention, which is computed although it is masked.
PACKED = max(512, options.longest)

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer


def message(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def rows() -> Dataset:
    names = ("completion",) if options.algorithm == "sft" else ("chosen", "rejected")
    texts = protocol.conversations(options, answers=len(names))
    if options.layout == "packing":
        texts = texts * 2  # rows may be packed incompletely, and all steps must have enough of them
    return Dataset.from_list(
        [
            {"prompt": message("user", question)}
            | {
                name: message("assistant", answer)
                for name, answer in zip(names, answers, strict=True)
            }
            for question, *answers in texts
        ]
    )


def config(directory: str) -> trl.SFTConfig | trl.DPOConfig:
    settings: dict[str, Any] = {
        **trl_common.make_common_settings(options, directory),
        **trl_common.make_tuned_settings(options),
    }
    batch = min(options.micro_batch, options.rows)
    steps = options.rows // batch
    if options.layout == "packing":
        mean = (options.shortest + options.longest) / 2
        batch = max(1, round(batch * mean / PACKED))
        steps = max(1, round(options.rows * mean / PACKED / batch))
        settings |= {"packing": True, "shuffle_dataset": True}
    if options.layout == "padding-free":
        settings["padding_free"] = True
    settings |= {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps}
    if options.algorithm == "dpo":
        return trl.DPOConfig(**settings, max_length=options.longest)
    return trl.SFTConfig(**settings, max_length=PACKED if options.layout == "packing" else None)


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    with trl_common.training(options) as (directory, timer):
        trainer = (trl.SFTTrainer if options.algorithm == "sft" else trl.DPOTrainer)(
            model=model,
            args=config(directory),
            train_dataset=rows(),
            processing_class=tokenizer,
            callbacks=[timer],
        )
        trl_common.watch(trainer, timer).train()
    tokens = timer.tokens[timer.timed]
    work = tokens if options.algorithm == "sft" else options.rows
    trl_common.emit(options, timer, trainer, case=options.algorithm, work=work, tokens=tokens)


main()
