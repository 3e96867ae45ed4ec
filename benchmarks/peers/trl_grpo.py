"""Time whole GRPO steps of Hugging Face TRL: sample, score, one optimizer step.

See protocol.py for the arguments. By default the settings are tuned, as a careful user would on a
CPU: float32 instead of bfloat16 autocast, no gradient checkpointing, all rows in one micro-batch, no
logging. `--defaults` keeps TRL's defaults for these; the rows of a step are then accumulated over
micro-batches of TRL's default size. In both cases a step is one optimizer step on the same rows.

The fastest settings depend on the CPU. `--micro-batch` and `--bf16` serve to find them (bfloat16 is
several times slower than float32 with AVX2 only, and can be faster with AMX).
"""

from __future__ import annotations

import importlib.util
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
parser.add_argument(
    "--vllm",
    action="store_true",
    help="generate with vLLM in this process (TRL's mode colocate), with 0.3 of the device's memory",
)
options = trl_common.start(parser)
if options.vllm and importlib.util.find_spec("vllm") is None:
    protocol.unavailable("vLLM is not installed")

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase


def draw_texts(tokenizer: PreTrainedTokenizerBase, count: int, length: int, seed: int) -> list[str]:
    """Return random texts of exactly `length` tokens, because TRL tokenizes prompts itself."""
    rng = random.Random(seed)
    ids = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
    usable = [
        i for i in ids if tokenizer.encode(tokenizer.decode([i]), add_special_tokens=False) == [i]
    ]
    n_drawn = length - tokenizer.num_special_tokens_to_add()
    texts: list[str] = []
    for _ in range(200 * count):
        text = tokenizer.decode([rng.choice(usable) for _ in range(n_drawn)])
        if len(tokenizer(text)["input_ids"]) == length:
            texts.append(text)
        if len(texts) == count:
            return texts
    raise SystemExit(
        f"--prompt-tokens={length}: too few texts of exactly this length were found for this "
        "tokenizer. Set another --prompt-tokens."
    )


def config(directory: str, rows: int) -> trl.GRPOConfig:
    settings: dict[str, Any] = (
        {}
        if options.defaults
        else {**trl_common.make_tuned_settings(options), "per_device_train_batch_size": rows}
    )
    if options.micro_batch:
        settings["per_device_train_batch_size"] = options.micro_batch
    micro_batch = settings.get(
        "per_device_train_batch_size", trl.GRPOConfig.per_device_train_batch_size
    )
    if rows % micro_batch:
        raise SystemExit(
            f"--micro-batch={micro_batch} does not divide the {rows} rows of a step. Set "
            f"--micro-batch={rows}."
        )
    return trl.GRPOConfig(
        **trl_common.make_common_settings(options, directory),
        num_generations=options.group_size,
        max_completion_length=options.new_tokens,
        **make_generation_settings(),
        gradient_accumulation_steps=rows // micro_batch,
        temperature=1.0,
        beta=0.0,
        **settings,
    )


def make_generation_settings() -> dict[str, Any]:
    """Return the settings of the generator, which generates exactly `--new-tokens` tokens."""
    if not options.vllm:
        return {"generation_kwargs": {"min_new_tokens": options.new_tokens}}
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": options.prompt_tokens + options.new_tokens,
        "generation_kwargs": {"min_tokens": options.new_tokens, "ignore_eos": True},
    }


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return a cheap reward that differs within a group, so that no advantage is zero."""
    assert {len(ids) for ids in completion_ids} == {options.new_tokens}, "a completion is shorter"
    return [float(sum(token % 2 for token in ids)) for ids in completion_ids]


def main() -> None:
    rows = options.prompts * options.group_size
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    prompts = draw_texts(
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
        model.generate = timer.phases.timed("generate", check_shape(model.generate, rows))
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


def check_shape(generate: Any, rows: int) -> Any:
    """Return `generate` with a check that it generates the agreed number of rows and tokens."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **kwargs)
        expected = (rows, options.prompt_tokens + options.new_tokens)
        assert tuple(output.shape) == expected, f"{tuple(output.shape)} instead of {expected}"
        return output

    return wrapped


if __name__ == "__main__":
    main()
