"""A scripted environment of the batched interface, scripted generators of both shapes, and batches
for them."""

from __future__ import annotations

import math
import random
from typing import Any

import torch

from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.experience.nemo_rl import (
    BatchedDataDict,
    EnvironmentInterface,
    EnvironmentReturn,
    GenerationInterface,
    collate,
    make_datum,
)
from ratchet.types import Sampling

# one token a character; the template "plain" puts messages end to end, EOS after answers
TOKENIZER = character_tokenizer()
EOS = TOKENIZER.eos_ids[0]


def ids(text):
    return TOKENIZER.encode(text)


class Counting(EnvironmentInterface[dict]):
    """Says "<1>", "<2>", ... and ends after metadata["turns"]; 0.5 a turn. `fault` at turn `at`:
    what goes wrong there."""

    def __init__(self, parts=False):
        self.parts, self.calls = parts, []

    def step(self, message_log_batch, metadata):
        self.calls.append(len(metadata))
        observations, rewards = [], []
        for log, state in zip(message_log_batch, metadata, strict=True):
            state["turn"] = turn = state.get("turn", 0) + 1
            faulty = state.get("at") == turn
            if faulty and state["fault"] == "raises":
                raise ValueError("the maze is on fire")
            if faulty and state["fault"] == "exhausted":
                next(iter([]))
            rewards.append(math.nan if faulty and state["fault"] == "nan" else 0.5)
            observations.append({"role": "environment", "content": f"<{turn}>"})
            log.clear()  # its copy, and nobody else's
        reward = torch.tensor(rewards)
        return EnvironmentReturn(
            observations=observations,
            metadata=metadata,
            next_stop_strings=[
                [f"s{state['turn']}"] if state["turn"] == 1 else None for state in metadata
            ],
            rewards={"reward/low": 0.2 * reward, "reward/high": 0.8 * reward}
            if self.parts
            else reward,
            terminateds=torch.tensor([state["turn"] >= state["turns"] for state in metadata]),
            answers=None,
        )

    def global_post_process_and_metrics(self, batch):
        return batch, {"rows": batch.size, "best": float(batch["total_reward"].nan_to_num(0).max())}


def by_seed(tokens, sampling):
    """One to six characters; every eighth answer doesn't end."""
    draw = random.Random(sampling.seed)
    said = ids("".join(draw.choices("abcdefgh", k=draw.randint(1, 6))))
    return said if draw.random() < 0.125 else [*said, EOS]


class Batched(GenerationInterface):
    """The same script behind the other shape of generators."""

    def __init__(self, script):
        self.script, self.sizes = script, []

    def generate(self, data, greedy=False):
        self.sizes.append(data.size)
        rows = []
        for row, length in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True):
            prompt = row[:length].tolist()
            said = self.script(prompt, Sampling(seed=sum(prompt), stop_ids=(EOS,)))
            rows.append((prompt, said))
        totals = torch.tensor([len(prompt) + len(said) for prompt, said in rows])
        output = torch.zeros(len(rows), int(totals.max()), dtype=torch.int64)
        for i, (prompt, said) in enumerate(rows):
            output[i, : totals[i]] = torch.tensor([*prompt, *said])
        return BatchedDataDict({
            "output_ids": output,
            "generation_lengths": torch.tensor([len(said) for _, said in rows]),
            "unpadded_sequence_lengths": totals,
            "logprobs": torch.where(torch.arange(output.shape[1]) < data["input_lengths"][:, None], 0.0, -2.0),
            "truncated": torch.tensor([said[-1] != EOS for _, said in rows]),
        })  # fmt: skip


class BatchedAsync(Batched):
    async def generate_async(self, data, greedy=False):
        for row in reversed(range(data.size)):
            yield row, self.generate(data.slice(row, row + 1), greedy)


class AsyncAlone:
    """A generator of batches without `generate`."""

    def __init__(self, script):
        self.inner = BatchedAsync(script)

    def generate_async(self, data, greedy=False):
        return self.inner.generate_async(data, greedy)


def batch_of(*infos, stop=None):
    """A row an info; its task is "count" unless the info says otherwise."""
    return collate([
        make_datum([{"role": "user", "content": "hi"}], TOKENIZER, idx=i, task_name=info.pop("task", "count"),
                   extra_env_info=info, stop_strings=stop)
        for i, info in enumerate(infos)
    ])  # fmt: skip


def mixed():
    """Rows that end, break, and go on for ever."""
    faults = [{"turns": 4, "fault": "raises", "at": 2}, {"turns": 4, "fault": "nan", "at": 1}]
    return batch_of(
        *({"turns": 1 + i % 5} for i in range(8)),
        *faults,
        {"turns": 99},
        {"turns": 2, "task": "other"},
    )


def flat(value: Any) -> Any:
    """Comparable: tensors as lists, NaN as a word."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), flat(value.tolist())]
    if isinstance(value, dict | BatchedDataDict):
        return {name: flat(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [flat(item) for item in value]
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def causes(batch):
    """Tracebacks differ in the frames that they come through: what is left is the last line."""
    failed = [text and text.strip().splitlines()[-1] for text in batch["failed"]]
    return BatchedDataDict({**batch, "failed": failed})
