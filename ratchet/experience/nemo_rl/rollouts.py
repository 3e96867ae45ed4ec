"""Rollouts as functions over batches of message logs: single turns, rewards and whole episodes.

`ratchet.experience.rollout.episode` plays the episodes. In the synchronous functions all rows run
in lockstep, and an environment gets all rows of a turn in one call. In the asynchronous functions
each row runs on its own. The results are the same. docs/rollouts.md describes all functions.

B = rows of a batch, S = tokens of its longest prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from ratchet.errors import DataError
from ratchet.experience.nemo_rl.attempt import step_alone
from ratchet.experience.nemo_rl.batched_data_dict import BatchedDataDict
from ratchet.experience.nemo_rl.environment import (
    EnvironmentReply,
    EnvironmentReturn,
    get_environment,
    join_replies,
    step_rows,
)
from ratchet.experience.nemo_rl.generation import (
    PromptRequest,
    UnbatchedGenerator,
    complete,
    complete_batch,
    get_sampling,
    get_weights_version,
    is_synchronous_batch_generator,
    run_blocking,
    takes_batches,
)
from ratchet.experience.nemo_rl.lockstep import play_in_lockstep
from ratchet.experience.nemo_rl.played_batch import Environments, make_batch, split_rows
from ratchet.experience.nemo_rl.row import RowPlayer, concatenate_tokens, make_answer_entry
from ratchet.experience.nemo_rl.specs import DatumSpec, GenerationDatumSpec, MessageLog
from ratchet.experience.nemo_rl.tokens import TokenizerType, find_media, get_answer_decoder
from ratchet.experience.seeds import derive_seed
from ratchet.types import Completion, Sampling

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
        tokenizer: The policy's tokenizer; for logs with images, audio or video a `Renderer` with
            the model's processor.
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
        completions = run_blocking(
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
    rows of that name. The calls run concurrently, each in a thread. `rewards` are named parts if
    any reward has parts. A reward without parts is then the part "reward".

    Raises:
        DataError: A task has no environment, or a return value has the wrong shape. Exceptions of
            environments are raised unchanged. If several environments raise, the exception for the
            task name that comes first in the batch is raised.
    """
    rows_by_name: dict[str, list[int]] = {}
    for row, name in enumerate(batch["task_name"]):
        rows_by_name.setdefault(name, []).append(row)

    def step(name: str) -> list[EnvironmentReply]:
        logs, metadata = (
            [batch[column][row] for row in rows_by_name[name]]
            for column in ("message_log", "extra_env_info")
        )
        return step_rows(environments[name], logs, metadata)

    environments = {name: get_environment(task_to_env, name) for name in rows_by_name}
    with ThreadPoolExecutor(max_workers=len(rows_by_name) or 1) as threads:
        replies_by_name = dict(zip(rows_by_name, threads.map(step, rows_by_name), strict=True))
    replies: dict[int, EnvironmentReply] = {}
    for name, rows in rows_by_name.items():
        replies |= dict(zip(rows, replies_by_name[name], strict=True))
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

    The rows run in lockstep: an environment is called once a turn, for all remaining rows, and
    several environments are called concurrently.

    Returns:
        A new batch and metrics. The batch has the input's rows with the whole `message_log`, the
        final `extra_env_info` and `stop_strings`, `total_reward` float32 [B], `truncated` bool [B]
        (by tokens), `failed` (the failure, or None), and a column for each named part of the
        rewards. A failed row has the reward NaN and `loss_multiplier` 0. The metrics come from
        `measure_samples` and from the environments.
    """
    player = RowPlayer(policy_generation, tokenizer, max_seq_len, max_rollout_turns, greedy)
    return run_blocking(play_in_lockstep(player, input_batch, task_to_env, _get_pad_id(tokenizer)))


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

    Each call runs in a thread of its own. An exception fails its row, as in the synchronous form.
    NeMo RL ends the batch there, which loses the other rows.
    """

    async def play() -> tuple[BatchedDataDict[DatumSpec], dict[str, Any]]:
        rows = split_rows(input_batch)
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
        return make_batch(input_batch, results, task_to_env)

    return run_blocking(play())


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
        The row's final state, with the sums of the reward's named parts and `idx` = `sample_idx`,
        and the metrics of `measure_sample`. `per_worker_token_counts` is added if a batch generator
        names its workers.
    """
    environment = get_environment(task_to_env, initial_sample_state["task_name"])
    player = RowPlayer(policy_generation, tokenizer, max_seq_len, max_rollout_turns, greedy)
    generator = policy_generation
    if takes_batches(policy_generation):
        generator = UnbatchedGenerator(policy_generation, pad_id=_get_pad_id(tokenizer))
    final_state, metrics = await player.play(
        sample_idx,
        initial_sample_state,
        generator,
        environment,
        partial(step_alone, environment),
    )
    if isinstance(generator, UnbatchedGenerator) and generator.tokens_by_worker:
        metrics["per_worker_token_counts"] = dict(generator.tokens_by_worker)
    return final_state, metrics


# --- helpers


def _make_requests(
    policy_generation: Any,
    data: BatchedDataDict[GenerationDatumSpec],
    batch: BatchedDataDict[DatumSpec],
    tokenizer: TokenizerType,
    input_lengths: Tensor,
    *,
    greedy: bool,
    room: int | None = None,
) -> list[PromptRequest]:
    """Return a request for each row. `room` is another limit on the number of new tokens."""
    stop_strings = batch.get("stop_strings") or [None] * len(input_lengths)
    data["stop_strings"] = stop_strings
    budget = room or Sampling().max_new_tokens
    base_sampling = get_sampling(
        policy_generation,
        get_answer_decoder(tokenizer).stop_ids,
        max_new_tokens=budget,
        greedy=greedy,
    )
    base_sampling = replace(
        base_sampling,
        max_new_tokens=min(base_sampling.max_new_tokens, room or base_sampling.max_new_tokens),
    )
    requests: list[PromptRequest] = []
    for row, (length, row_stop_strings) in enumerate(
        zip(input_lengths.tolist(), stop_strings, strict=True)
    ):
        seed = derive_seed(base_sampling.seed, get_weights_version(policy_generation), row, length)
        sampling = replace(
            base_sampling, seed=seed, stop=(*base_sampling.stop, *(row_stop_strings or ()))
        )
        tokens = data["input_ids"][row, :length].cpu().numpy()
        media = find_media(batch["message_log"][row], tokens, tokenizer)
        requests.append(PromptRequest(tokens, sampling, media))
    return requests


def _append_answers(
    batch: BatchedDataDict[DatumSpec],
    completions: Sequence[Completion],
    tokenizer: TokenizerType,
    include_logprobs: bool,
) -> tuple[BatchedDataDict[DatumSpec], list[Tensor], dict[str, float]]:
    """Append the completions to the logs; return the batch, the generated tokens and metrics."""
    decoder = get_answer_decoder(tokenizer)
    for log, completion in zip(batch["message_log"], completions, strict=True):
        text = decoder.decode(completion.tokens.tolist(), completion.stop)
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
    return get_answer_decoder(tokenizer).pad_id
