"""Measure how long TRL trains until the quick-start's second stage reaches a held-out accuracy.

The seconds exclude evaluation. Model and settings come from ../ours/sorting_start.py, with the same
schedule of the learning rate. Other settings are tuned as in trl_grpo.py.
"""

from __future__ import annotations

import time
from typing import Any

import protocol
import trl_common

options = trl_common.start(protocol.target_arguments("the quick-start's GRPO stage with TRL"))

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

sorting = protocol.read_sorting_settings(options.model)
algorithm, adamw, sampling = (sorting[name] for name in ("algorithm", "optimizer", "sampling"))
tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
updates = sorting["steps"] * algorithm["minibatches"]
goal = protocol.Goal(options.target)


def reward(
    completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: Any
) -> list[float]:
    """Return 1 for a completion that is the answer and ends with the end-of-text token, else 0."""
    has_ended = [ids[-1] == tokenizer.eos_token_id for ids in completion_ids]
    return [
        float(completion == expected and ended)
        for completion, expected, ended in zip(completions, answer, has_ended, strict=True)
    ]


def measure_accuracy() -> float:
    """Return the share of held-out tasks that greedy decoding solves."""
    prompts = [prompt for prompt, _ in sorting["test"]]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    model.eval()
    with torch.no_grad():
        output = model.generate(
            **inputs, max_new_tokens=sampling["max_new_tokens"], do_sample=False
        )
    model.train()
    width = inputs["input_ids"].shape[1]
    ids = [
        [token for token in row if token != tokenizer.pad_token_id]
        for row in output[:, width:].tolist()
    ]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    rewards = reward(texts, [answer for _, answer in sorting["test"]], [row or [-1] for row in ids])
    return sum(rewards) / len(rewards)


class Evaluator(TrainerCallback):
    """A callback that evaluates every `--every` batches, each of several optimizer steps.

    seconds: training time so far, without evaluation.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.mark = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.mark = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        batch, rest = divmod(state.global_step, algorithm["minibatches"])
        if rest or (batch % options.every and batch < sorting["steps"]):
            return
        self.seconds += time.perf_counter() - self.mark
        control.should_training_stop |= goal.is_reached(batch, self.seconds, measure_accuracy())
        self.mark = time.perf_counter()


def rate_factor(step: int) -> float:
    """Return the factor of the learning rate: linear warm-up, then linear decay, as the recipe's."""
    warmup, min_ratio = adamw["warmup_steps"], adamw["min_lr_ratio"]
    done = min(1.0, max(0, step - warmup) / max(1, updates - warmup))
    return min(1.0, (step + 1) / warmup) * (min_ratio + (1 - min_ratio) * (1 - done))


def main() -> None:
    rows = sorting["batch_size"] * algorithm["group_size"]
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=adamw["lr"],
        betas=adamw["betas"],
        eps=adamw["eps"],
        weight_decay=adamw["weight_decay"],
    )
    with trl_common.training(options) as (directory, _):
        settings = {
            **trl_common.make_common_settings(options, directory),
            **trl_common.make_tuned_settings(options),
            "max_steps": updates,
        }
        args = trl.GRPOConfig(
            **settings,
            num_generations=algorithm["group_size"],
            max_completion_length=sampling["max_new_tokens"],
            temperature=sampling["temperature"],
            per_device_train_batch_size=rows // algorithm["minibatches"],
            steps_per_generation=algorithm["minibatches"],
            max_grad_norm=adamw["max_grad_norm"],
            beta=0.0,
        )
        trl.GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_list(
                [{"prompt": prompt, "answer": answer} for prompt, answer in sorting["train"]]
            ),
            processing_class=tokenizer,
            callbacks=[Evaluator()],
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate_factor)),
        ).train()
    protocol.emit(
        options,
        [goal.seconds()],
        case="quickstart",
        peer="trl",
        version=trl.__version__,
        curve=goal.curve,
    )


main()
