"""Times whole GRPO steps of Hugging Face TRL: sample, score, one optimizer step. See protocol.py
for the arguments.

Tuned: what a careful user sets on a CPU, and TRL doesn't by default: float32 instead of bfloat16
autocast, no gradient checkpointing, all rows in one micro-batch, no logging. `--defaults` leaves
those to TRL; then the rows of a step are accumulated over micro-batches of its default size. Either
way a step is one optimizer step on the same rows. What is fastest depends on the CPU:
`--micro-batch` and `--bf16` are there to look for TRL's best before comparing with it (bfloat16 is
several times slower than float32 on AVX2 alone, and can win where the CPU has AMX).
"""

from __future__ import annotations

import random
from typing import Any

import protocol
import trl_common

parser = protocol.arguments("GRPO steps of TRL")
parser.add_argument(
    "--defaults",
    action="store_true",
    help="TRL's own defaults for precision, checkpointing and micro-batches",
)
parser.add_argument(
    "--micro-batch",
    type=int,
    help="rows per micro-batch (default: all, or with --defaults TRL's own)",
)
parser.add_argument("--bf16", action="store_true", help="tuned, but under bfloat16 autocast")
options = trl_common.start(parser)

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase


def texts(tokenizer: PreTrainedTokenizerBase, count: int, length: int, seed: int) -> list[str]:
    """Random texts of exactly `length` tokens: TRL takes text, and tokenizes it itself."""
    rng = random.Random(seed)
    ids = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
    usable = [
        i for i in ids if tokenizer.encode(tokenizer.decode([i]), add_special_tokens=False) == [i]
    ]
    wanted = length - tokenizer.num_special_tokens_to_add()
    found: list[str] = []
    for _ in range(200 * count):
        text = tokenizer.decode([rng.choice(usable) for _ in range(wanted)])
        if len(tokenizer(text)["input_ids"]) == length:
            found.append(text)
        if len(found) == count:
            return found
    raise SystemExit(
        f"no texts of exactly {length} tokens were found for this tokenizer; use another "
        "--prompt-tokens"
    )


def config(directory: str, rows: int) -> trl.GRPOConfig:
    settings: dict[str, Any] = (
        {}
        if options.defaults
        else {**trl_common.tuned(options), "per_device_train_batch_size": rows}
    )
    if options.bf16:
        settings["bf16"] = True
    if options.micro_batch:
        settings["per_device_train_batch_size"] = options.micro_batch
    micro_batch = settings.get(
        "per_device_train_batch_size", trl.GRPOConfig.per_device_train_batch_size
    )
    if rows % micro_batch:
        raise SystemExit(
            f"{rows} rows don't divide into micro-batches of {micro_batch}: set --micro-batch"
        )
    return trl.GRPOConfig(
        **trl_common.common(options, directory),
        num_generations=options.group_size,
        max_completion_length=options.new_tokens,
        generation_kwargs={"min_new_tokens": options.new_tokens},
        gradient_accumulation_steps=rows // micro_batch,
        temperature=1.0,
        beta=0.0,
        **settings,
    )


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Cheap, and different within a group, so that no advantage is zero."""
    return [float(sum(token % 2 for token in ids)) for ids in completion_ids]


def main() -> None:
    rows = options.prompts * options.group_size
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    prompts = texts(
        tokenizer,
        options.prompts * (options.warmup + options.steps),
        options.prompt_tokens,
        options.seed,
    )
    with trl_common.training(options) as (directory, timer):
        args = config(directory, rows)
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=tokenizer,
            callbacks=[timer],
        )
        model.generate = timer.phases.timed("generate", checked(model.generate, rows))
        trl_common.watch(trainer, timer).train()
    trl_common.emit(
        options,
        timer,
        trainer,
        case="grpo_step",
        phases_s={
            name: round(value, 4)
            for name, value in timer.phases.medians(options.warmup, options.steps).items()
        },
    )


def checked(generate: Any, rows: int) -> Any:
    """Refuses to time anything but the agreed number of rows and tokens."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        made = generate(*args, **kwargs)
        wanted = (rows, options.prompt_tokens + options.new_tokens)
        assert tuple(made.shape) == wanted, f"generated {tuple(made.shape)} instead of {wanted}"
        return made

    return wrapped


if __name__ == "__main__":
    main()
