"""Rollouts as functions over batches of message logs: single turns, rewards and whole episodes.

`ratchet.experience.rollout.episode` plays the episodes. In the synchronous functions all rows run
in lockstep, and an environment gets all rows of a turn in one call. In the asynchronous functions
each row runs on its own. The results are the same. docs/rollouts.md describes all functions.

B = rows of a batch, S = tokens of its longest prompt.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratchet.errors import DataError
from ratchet.experience.nemo_rl.attempt import RowBarrier, step_alone, step_each
from ratchet.experience.nemo_rl.batched_data_dict import BatchedDataDict
from ratchet.experience.nemo_rl.environment import (
    EnvironmentInterface,
    EnvironmentReply,
    EnvironmentReturn,
    get_environment,
    join_replies,
    post_process,
    step_rows,
)
from ratchet.experience.nemo_rl.generation import (
    Request,
    UnbatchedGenerator,
    complete,
    complete_batch,
    get_sampling,
    get_weights_version,
    is_synchronous_batch_generator,
    refuse_media,
    takes_batches,
)
from ratchet.experience.nemo_rl.metrics import measure_samples
from ratchet.experience.nemo_rl.row import RowPlayer, concatenate_tokens, make_answer_entry
from ratchet.experience.nemo_rl.specs import DatumSpec, GenerationDatumSpec, MessageLog
from ratchet.experience.nemo_rl.tokens import TokenizerType, get_log_renderer
from ratchet.experience.seeds import derive_seed
from ratchet.types import Completion, Placed, Sampling

__all__ = [
    "TokenizerType",
    "async_generate_response_for_sample_turn",
    "calculate_rewards",
    "generate_responses",
    "generate_responses_async",
    "run_async_multi_turn_rollout",
    "run_multi_turn_rollout",
    "run_sample_multi_turn_rollout",
]

NO_TURN_LIMIT = 999_999
Environments = Mapping[str, EnvironmentInterface[Any]]
T = TypeVar("T")


# --- one turn


def generate_responses(
    policy_generation: Any,
    generation_input_data: BatchedDataDict[GenerationDatumSpec],
    batch: BatchedDataDict[DatumSpec],
    tokenizer: TokenizerType,
    input_lengths: Tensor,
    include_logprobs: bool = True,
    greedy: bool = False,
) -> tuple[BatchedDataDict[DatumSpec], list[Tensor], dict[str, float]]:
    """Append an answer of the policy to each log of `batch`, in place.

    Each row's seed is made from the sampling's seed, the version of the weights, the row's number
    and the length of its prompt.

    Args:
        policy_generation: A `Generator`, a `WithSampling`, or a `GenerationInterface`, which may
            have only `generate_async`.
        generation_input_data: `input_ids` int64 [B, S]; its `stop_strings` are replaced by the
            `stop_strings` of `batch`.
        batch: The logs.
        tokenizer: The policy's tokenizer.
        input_lengths: int64 [B].
        include_logprobs: Store the logprobs in the logs.
        greedy: Sample at temperature 0.

    Returns:
        The batch with `truncated` bool [B], the generated tokens of each row (int64), and metrics.
    """
    requests = _make_requests(
        policy_generation, generation_input_data, batch, tokenizer, input_lengths, greedy=greedy
    )
    if is_synchronous_batch_generator(policy_generation):
        completions = (
            complete_batch(policy_generation, requests, pad_id=_get_pad_id(tokenizer))
            if requests
            else []
        )
    else:
        completions = _run_blocking(
            complete(policy_generation, requests, pad_id=_get_pad_id(tokenizer))
        )
    return _append_answers(batch, completions, tokenizer, include_logprobs)


async def generate_responses_async(
    policy_generation: Any,
    generation_input_data: BatchedDataDict[GenerationDatumSpec],
    batch: BatchedDataDict[DatumSpec],
    tokenizer: TokenizerType,
    input_lengths: Tensor,
    include_logprobs: bool = True,
    greedy: bool = False,
) -> tuple[BatchedDataDict[DatumSpec], list[Tensor], dict[str, float]]:
    """Append answers like `generate_responses`.

    A batch generator's `generate_async` is used if it has one.
    """
    requests = _make_requests(
        policy_generation, generation_input_data, batch, tokenizer, input_lengths, greedy=greedy
    )
    completions = (
        await complete(policy_generation, requests, pad_id=_get_pad_id(tokenizer))
        if requests
        else []
    )
    return _append_answers(batch, completions, tokenizer, include_logprobs)


async def async_generate_response_for_sample_turn(
    policy_generation: Any,
    sample_message_log: MessageLog,
    sample_stop_strings: list[str] | None,
    tokenizer: TokenizerType,
    max_seq_len: int,
    greedy: bool = False,
) -> tuple[MessageLog, Tensor, Tensor, dict[str, float]]:
    """Append the next answer to one log, in place.

    The answer has the seed of row 0 of a batch. To draw several answers to one log, give each draw
    its own seed (`WithSampling`).

    Returns:
        The log, the generated tokens, the prompt's length as int64 [1], and metrics.

    Raises:
        DataError: The log already fills `max_seq_len`.
    """
    prompt = concatenate_tokens(sample_message_log)
    room = max_seq_len - len(prompt)
    if room <= 0:
        raise DataError(
            f"the log has {len(prompt)} tokens, max_seq_len is {max_seq_len}: there is no room for "
            "an answer"
        )
    lengths = torch.tensor([len(prompt)])
    batch = BatchedDataDict[DatumSpec](
        {"message_log": [sample_message_log], "stop_strings": [sample_stop_strings]}
    )
    data = BatchedDataDict[GenerationDatumSpec](
        {"input_ids": prompt[None], "input_lengths": lengths}
    )
    requests = _make_requests(
        policy_generation, data, batch, tokenizer, lengths, greedy=greedy, room=room
    )
    completions = await complete(policy_generation, requests, pad_id=_get_pad_id(tokenizer))
    batch, (generated,), metrics = _append_answers(
        batch, completions, tokenizer, include_logprobs=True
    )
    return batch["message_log"][0], generated, lengths, metrics


def calculate_rewards(
    batch: BatchedDataDict[DatumSpec], task_to_env: Environments
) -> EnvironmentReturn[Any]:
    """Return the environments' replies to the logs of `batch`.

    Each environment is called once for each of its task names, with the roles and contents of all
    rows of that name. `rewards` are named parts if any reward has parts. A reward without parts is
    then the part "reward".

    Raises:
        DataError: A task has no environment, or a return has the wrong shape. Exceptions of
            environments are raised unchanged.
    """
    replies: dict[int, EnvironmentReply] = {}
    for name in dict.fromkeys(batch["task_name"]):
        rows = [row for row, task_name in enumerate(batch["task_name"]) if task_name == name]
        logs, metadata = (
            [batch[column][row] for row in rows] for column in ("message_log", "extra_env_info")
        )
        environment_replies = step_rows(get_environment(task_to_env, name), logs, metadata)
        replies |= dict(zip(rows, environment_replies, strict=True))
    return join_replies([replies[row] for row in range(batch.size)])


# --- whole episodes


def run_multi_turn_rollout(
    policy_generation: Any,
    input_batch: BatchedDataDict[DatumSpec],
    tokenizer: TokenizerType,
    task_to_env: Environments,
    max_seq_len: int,
    max_rollout_turns: int = NO_TURN_LIMIT,
    greedy: bool = False,
) -> tuple[BatchedDataDict[DatumSpec], dict[str, Any]]:
    """Play every row until its environment ends it, or it reaches a limit of turns or tokens.

    The rows run in lockstep: an environment is called once a turn, for all remaining rows.

    Returns:
        A new batch and metrics. The batch has the input's rows with the whole `message_log`, the
        final `extra_env_info` and `stop_strings`, `total_reward` float32 [B], `truncated` bool [B]
        (by tokens), `failed` (the failure, or None), and a column for each named part of the
        rewards. A failed row has the reward NaN and `loss_multiplier` 0. The metrics come from
        `measure_samples` and from the environments.
    """
    player = RowPlayer(
        policy_generation, get_log_renderer(tokenizer), max_seq_len, max_rollout_turns, greedy
    )
    return _run_blocking(
        _play_in_lockstep(player, input_batch, task_to_env, _get_pad_id(tokenizer))
    )


def run_async_multi_turn_rollout(
    policy_generation: Any,
    input_batch: BatchedDataDict[DatumSpec],
    tokenizer: TokenizerType,
    task_to_env: Environments,
    max_seq_len: int,
    max_rollout_turns: int = NO_TURN_LIMIT,
    greedy: bool = False,
) -> tuple[BatchedDataDict[DatumSpec], dict[str, Any]]:
    """Play rows like `run_multi_turn_rollout`, but each row calls its environment alone.

    Each row has a thread of its own.
    """

    async def play() -> tuple[BatchedDataDict[DatumSpec], dict[str, Any]]:
        rows = _split_rows(input_batch)
        options = (
            policy_generation,
            tokenizer,
            task_to_env,
            max_seq_len,
            max_rollout_turns,
            greedy,
        )
        results = await asyncio.gather(
            *(run_sample_multi_turn_rollout(i, row, *options) for i, row in enumerate(rows))
        )
        return _make_batch(input_batch, results, task_to_env)

    return _run_blocking(play())


async def run_sample_multi_turn_rollout(
    sample_idx: int,
    initial_sample_state: Mapping[str, Any],
    policy_generation: Any,
    tokenizer: TokenizerType,
    task_to_env: Environments,
    max_seq_len: int,
    max_rollout_turns: int = NO_TURN_LIMIT,
    greedy: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Play row `sample_idx` of a batch from the DatumSpec `initial_sample_state`.

    Returns:
        The row's final state, whose `parts` are sums of the reward's named parts, and the metrics
        of `measure_sample`.
    """
    environment = get_environment(task_to_env, initial_sample_state["task_name"])
    player = RowPlayer(
        policy_generation, get_log_renderer(tokenizer), max_seq_len, max_rollout_turns, greedy
    )
    generator = policy_generation
    if takes_batches(policy_generation):
        generator = UnbatchedGenerator(policy_generation, pad_id=_get_pad_id(tokenizer))
    return await player.play(
        sample_idx, initial_sample_state, generator, partial(step_alone, environment)
    )


# --- helpers


async def _play_in_lockstep(
    player: RowPlayer,
    input_batch: BatchedDataDict[DatumSpec],
    task_to_env: Environments,
    pad_id: int,
) -> tuple[BatchedDataDict[DatumSpec], dict[str, Any]]:
    """Play all rows in lockstep."""
    rows = _split_rows(input_batch)
    barrier = RowBarrier[Any](len(rows))
    names = dict.fromkeys(row["task_name"] for row in rows)
    step_functions = {
        name: partial(step_each, get_environment(task_to_env, name)) for name in names
    }
    complete_rows = partial(complete_batch, player.policy_generation, pad_id=pad_id)

    async def play(i: int, row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        generator = player.policy_generation
        if is_synchronous_batch_generator(generator):
            generator = _LockstepGenerator(barrier, i, complete_rows)
        elif takes_batches(generator):
            generator = UnbatchedGenerator(generator, pad_id=pad_id)
        step_batch = step_functions[row["task_name"]]

        def step_row(log: Any, metadata: Any) -> Any:
            return barrier.submit(i, step_batch, (log, metadata))

        try:
            return await player.play(i, row, generator, step_row)
        finally:
            barrier.leave()

    results = await asyncio.gather(*(play(i, row) for i, row in enumerate(rows)))
    return _make_batch(input_batch, results, task_to_env)


@dataclass(frozen=True)
class _LockstepGenerator:
    """The generator of one row. Its requests are batched with the requests of the other rows."""

    barrier: RowBarrier[Any]
    row: int
    complete_rows: Any

    async def generate(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        sampling: Sampling,
        media: Sequence[Placed] = (),
    ) -> Completion:
        refuse_media(media)
        return await self.barrier.submit(self.row, self.complete_rows, (tokens, sampling))


def _split_rows(batch: BatchedDataDict[DatumSpec]) -> list[dict[str, Any]]:
    for column in ("message_log", "task_name"):
        if column not in batch:
            raise DataError(
                f"the batch has no column '{column}': `collate` makes one of DatumSpecs"
            )
    return [{name: column[row] for name, column in batch.items()} for row in range(batch.size)]


def _make_batch(
    input_batch: BatchedDataDict[DatumSpec],
    results: Sequence[tuple[dict[str, Any], dict[str, Any]]],
    task_to_env: Environments,
) -> tuple[BatchedDataDict[DatumSpec], dict[str, Any]]:
    """Return the played rows as a batch in order, and all metrics.

    The environments post-process the batch.
    """
    states = [state for state, _ in results]
    samples = [sample for _, sample in results]
    batch = BatchedDataDict[DatumSpec](dict(input_batch))
    for name in ("message_log", "extra_env_info", "stop_strings", "failed"):
        batch[name] = [state[name] for state in states]
    batch["total_reward"] = torch.tensor(
        [sample["total_reward"] for sample in samples], dtype=torch.float32
    )
    batch["truncated"] = torch.tensor([sample["truncated"] for sample in samples], dtype=torch.bool)
    failed = torch.tensor([sample["failed"] for sample in samples], dtype=torch.bool)
    multiplier = batch.get("loss_multiplier", torch.ones(len(results)))
    batch["loss_multiplier"] = torch.as_tensor(multiplier).masked_fill(failed, 0.0)
    for part in dict.fromkeys(name for state in states for name in state["parts"]):
        if part in batch:
            raise DataError(
                f"an environment's reward has a part '{part}', and the batch has a column of that "
                "name. Rename one"
            )
        values = [
            math.nan if sample["failed"] else state["parts"].get(part, 0.0)
            for state, sample in results
        ]
        batch[part] = torch.tensor(values, dtype=torch.float32)
    batch, environment_metrics = post_process(batch, task_to_env)
    return batch, measure_samples(samples) | environment_metrics


def _make_requests(
    policy_generation: Any,
    data: BatchedDataDict[GenerationDatumSpec],
    batch: BatchedDataDict[DatumSpec],
    tokenizer: TokenizerType,
    input_lengths: Tensor,
    *,
    greedy: bool,
    room: int | None = None,
) -> list[Request]:
    """Return a request for each row. `room` is another limit on the number of new tokens."""
    stop_strings = batch.get("stop_strings") or [None] * len(input_lengths)
    data["stop_strings"] = stop_strings
    budget = room or Sampling().max_new_tokens
    base_sampling = get_sampling(
        policy_generation,
        get_log_renderer(tokenizer).stop_ids,
        max_new_tokens=budget,
        greedy=greedy,
    )
    base_sampling = replace(
        base_sampling,
        max_new_tokens=min(base_sampling.max_new_tokens, room or base_sampling.max_new_tokens),
    )
    requests: list[Request] = []
    for row, (length, row_stop_strings) in enumerate(
        zip(input_lengths.tolist(), stop_strings, strict=True)
    ):
        seed = derive_seed(base_sampling.seed, get_weights_version(policy_generation), row, length)
        sampling = replace(
            base_sampling, seed=seed, stop=(*base_sampling.stop, *(row_stop_strings or ()))
        )
        requests.append((data["input_ids"][row, :length].cpu().numpy(), sampling))
    return requests


def _append_answers(
    batch: BatchedDataDict[DatumSpec],
    completions: Sequence[Completion],
    tokenizer: TokenizerType,
    include_logprobs: bool,
) -> tuple[BatchedDataDict[DatumSpec], list[Tensor], dict[str, float]]:
    renderer = get_log_renderer(tokenizer)
    for log, completion in zip(batch["message_log"], completions, strict=True):
        text = renderer.parse(completion.tokens.tolist(), completion.stop).text
        entry = make_answer_entry(text, completion.tokens, completion.logprobs)
        log.append(
            entry
            if include_logprobs
            else {name: entry[name] for name in ("role", "content", "token_ids")}
        )
    is_truncated = [not completion.stop.finished for completion in completions]
    batch["truncated"] = torch.tensor(is_truncated, dtype=torch.bool)
    generated = [torch.from_numpy(completion.tokens.copy()) for completion in completions]
    lengths = [len(tokens) for tokens in generated] or [0]
    return (
        batch,
        generated,
        {
            "mean_generation_length": fmean(lengths),
            "total_generated_tokens": float(sum(lengths)),
            "truncation_rate": fmean(is_truncated or [False]),
        },
    )


def _get_pad_id(tokenizer: TokenizerType) -> int:
    return get_log_renderer(tokenizer).tokenizer.pad_id or 0


def _run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end.

    Raises:
        RuntimeError: The caller is inside a running event loop, which this call would block.
    """
    if _is_in_event_loop():
        coroutine.close()
        raise RuntimeError(
            "this function blocks, so it can't run inside an event loop. Call it with `await "
            "asyncio.to_thread(...)`"
        )
    return asyncio.run(coroutine)


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
