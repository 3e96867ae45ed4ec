"""Times whole GRPO steps of Hugging Face TRL: sample, score, one optimizer step. See protocol.py for the arguments.

Tuned: what a careful user sets on a CPU, and TRL doesn't by default: float32 instead of bfloat16 autocast, no gradient
checkpointing, all rows in one micro-batch, no logging. `--defaults` leaves those to TRL; then the rows of a step are
accumulated over micro-batches of its default size. Either way a step is one optimizer step on the same rows. What is fastest
depends on the CPU: `--micro-batch` and `--bf16` are there to look for TRL's best before comparing with it (bfloat16 is
several times slower than float32 on AVX2 alone, and can win where the CPU has AMX).
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
import time
import warnings
from typing import Any

import protocol

parser = protocol.arguments("GRPO steps of TRL")
parser.add_argument("--defaults", action="store_true", help="TRL's own defaults for precision, checkpointing and micro-batches")
parser.add_argument("--micro-batch", type=int, help="rows per micro-batch (default: all, or with --defaults TRL's own)")
parser.add_argument("--bf16", action="store_true", help="tuned, but under bfloat16 autocast")
options = parser.parse_args()
protocol.quiet_offline(options.threads)
warnings.filterwarnings("ignore")

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, TrainerCallback

torch.set_num_threads(options.threads)


class StepTimer(TrainerCallback):
    """The time from one optimizer step's end to the next one's."""

    def __init__(self, phases: protocol.Phases) -> None:
        self.phases = phases
        self.seconds: list[float] = []
        self.startup_s = 0.0
        self.mark = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.mark = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        self.startup_s = self.startup_s or now - protocol.STARTED
        self.seconds.append(now - self.mark)
        self.phases.next_step()
        self.mark = time.perf_counter()


def texts(tokenizer: PreTrainedTokenizerBase, count: int, length: int, seed: int) -> list[str]:
    """Random texts of exactly `length` tokens: TRL takes text, and tokenizes it itself."""
    rng = random.Random(seed)
    ids = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
    usable = [i for i in ids if tokenizer.encode(tokenizer.decode([i]), add_special_tokens=False) == [i]]
    wanted = length - tokenizer.num_special_tokens_to_add()
    found: list[str] = []
    for _ in range(200 * count):
        text = tokenizer.decode([rng.choice(usable) for _ in range(wanted)])
        if len(tokenizer(text)["input_ids"]) == length:
            found.append(text)
        if len(found) == count:
            return found
    raise SystemExit(f"no texts of exactly {length} tokens were found for this tokenizer; use another --prompt-tokens")


def config(directory: str, rows: int) -> trl.GRPOConfig:
    settings: dict[str, Any] = {}
    if not options.defaults:
        settings = {"bf16": options.bf16, "gradient_checkpointing": False, "logging_strategy": "no"}
        settings["per_device_train_batch_size"] = rows
    if options.micro_batch:
        settings["per_device_train_batch_size"] = options.micro_batch
    micro_batch = settings.get("per_device_train_batch_size", trl.GRPOConfig.per_device_train_batch_size)
    if rows % micro_batch:
        raise SystemExit(f"{rows} rows don't divide into micro-batches of {micro_batch}: set --micro-batch")
    return trl.GRPOConfig(
        output_dir=directory,
        max_steps=options.warmup + options.steps,
        num_generations=options.group_size,
        max_completion_length=options.new_tokens,
        generation_kwargs={"min_new_tokens": options.new_tokens},
        gradient_accumulation_steps=rows // micro_batch,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        seed=options.seed,
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **settings,
    )


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Cheap, and different within a group, so that no advantage is zero."""
    return [float(sum(token % 2 for token in ids)) for ids in completion_ids]


def main() -> None:
    rows = options.prompts * options.group_size
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    steps = options.warmup + options.steps
    prompts = texts(tokenizer, options.prompts * steps, options.prompt_tokens, options.seed)
    phases = protocol.Phases()
    timer = StepTimer(phases)
    with tempfile.TemporaryDirectory() as directory:
        args = config(directory, rows)
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=tokenizer,
            callbacks=[timer],
        )
        model.generate = phases.timed("generate", checked(model.generate, rows))
        trainer.compute_loss = phases.timed("forward", trainer.compute_loss)
        trainer.accelerator.backward = phases.timed("backward", trainer.accelerator.backward)
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result alone
            trainer.train()
    assert len(timer.seconds) == steps, f"{len(timer.seconds)} optimizer steps instead of {steps}"
    protocol.emit(
        options,
        timer.seconds[options.warmup :],
        peer="trl",
        version=trl.__version__,
        torch=torch.__version__,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        case="grpo_step",
        parameters=model.num_parameters(),
        autocast="bfloat16" if args.bf16 else None,
        gradient_checkpointing=args.gradient_checkpointing,
        rows_per_micro_batch=args.per_device_train_batch_size,
        phases_s={name: round(value, 4) for name, value in phases.medians(options.warmup, options.steps).items()},
        startup_s=round(timer.startup_s, 2),
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
