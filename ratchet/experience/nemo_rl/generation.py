"""Call token generators and batch generators through the same functions.

A token generator (`ratchet.protocols.Generator`) takes the tokens of one prompt and a `Sampling`. A
batch generator (`GenerationInterface`) takes a whole batch of prompts.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ratchet.errors import ConfigError
from ratchet.experience.nemo_rl.batched_data_dict import BatchedDataDict
from ratchet.experience.nemo_rl.specs import GenerationDatumSpec
from ratchet.types import Completion, PlacedMedium, Sampling, StopReason

T = TypeVar("T")


class PromptRequest(NamedTuple):
    """A prompt with its media."""

    tokens: Sequence[int] | NDArray[np.int64]
    sampling: Sampling
    media: Sequence[PlacedMedium] = ()


@dataclass(frozen=True)
class WithSampling:
    """A generator with sampling parameters, for rollout functions without a sampling argument."""

    generator: Any
    """Any object with the `generate` of `ratchet.protocols.Generator`."""
    sampling: Sampling

    @property
    def version(self) -> int:
        return get_weights_version(self.generator)

    async def generate(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        sampling: Sampling,
        media: Sequence[PlacedMedium] = (),
    ) -> Completion:
        return await self.generator.generate(tokens, sampling, media)


def get_weights_version(policy_generation: Any) -> int:
    """Return the version of a generator's weights, or 0 if it has none."""
    # The generator may be a plain class of a user that lacks this attribute.
    return int(policy_generation.version) if hasattr(policy_generation, "version") else 0


def get_sampling(
    policy_generation: Any, stop_ids: Sequence[int], *, max_new_tokens: int, greedy: bool
) -> Sampling:
    """Return the generator's sampling parameters, with `stop_ids` added to its stop ids.

    A generator without sampling parameters (see `WithSampling`) gets temperature 1 and
    `max_new_tokens`.

    Args:
        greedy: True sets the temperature to 0.
    """
    # The generator may be a plain class of a user that lacks this attribute.
    sampling = getattr(policy_generation, "sampling", None)
    if not sampling:
        sampling = Sampling(max_new_tokens=max_new_tokens)
    return replace(
        sampling,
        temperature=0.0 if greedy else sampling.temperature,
        stop_ids=tuple(dict.fromkeys((*sampling.stop_ids, *stop_ids))),
    )


def takes_batches(policy_generation: Any) -> bool:
    """True if the generator takes batches.

    Such a generator has the methods of `GenerationInterface`, or only `generate_async`.

    Raises ConfigError for an object that has neither `generate` nor `generate_async`.
    """
    generate = policy_generation.generate if hasattr(policy_generation, "generate") else None
    if generate is None and not hasattr(policy_generation, "generate_async"):
        raise ConfigError(
            f"policy_generation={type(policy_generation).__name__} has neither `generate` nor "
            "`generate_async`. "
            "Pass a generator of Ratchet, or one with the methods of GenerationInterface"
        )
    return generate is None or not inspect.iscoroutinefunction(generate)


def is_synchronous_batch_generator(policy_generation: Any) -> bool:
    """True if the generator answers a whole batch in one call, without a running event loop."""
    return takes_batches(policy_generation) and hasattr(policy_generation, "generate")


class UnbatchedGenerator:
    """An adapter of a batch generator to the `Generator` protocol. Each request is a batch of 1.

    Attributes:
        tokens_by_worker: Number of generated tokens by worker, where the generator names its worker
            in the output's column `gen_leader_worker_idx`.
    """

    def __init__(self, policy_generation: Any, *, pad_id: int) -> None:
        self.policy_generation = policy_generation
        self.pad_id = pad_id
        self.tokens_by_worker: Counter[int] = Counter()

    async def generate(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        sampling: Sampling,
        media: Sequence[PlacedMedium] = (),
    ) -> Completion:
        requests = [PromptRequest(tokens, sampling, media)]
        if not hasattr(self.policy_generation, "generate_async"):
            return complete_batch(self.policy_generation, requests, pad_id=self.pad_id)[0]
        data = _make_generation_data(self.policy_generation, requests, self.pad_id)
        # Read before the request: a push meanwhile must not make older tokens look fresh.
        version = get_weights_version(self.policy_generation)
        rows = self.policy_generation.generate_async(data, greedy=sampling.greedy)
        ((_, output),) = [row async for row in rows]
        completion = _make_completion(output, 0, requests[0], version)
        if "gen_leader_worker_idx" in output:
            worker = torch.as_tensor(output["gen_leader_worker_idx"]).flatten()[0]
            self.tokens_by_worker[int(worker)] += len(completion.tokens)
        return completion


def complete_batch(
    policy_generation: Any, requests: Sequence[PromptRequest], *, pad_id: int
) -> list[Completion]:
    """Complete all requests in one call of a batch generator."""
    data = _make_generation_data(policy_generation, requests, pad_id)
    version = get_weights_version(policy_generation)
    output = policy_generation.generate(data, greedy=requests[0].sampling.greedy)
    return [_make_completion(output, i, request, version) for i, request in enumerate(requests)]


async def complete(
    policy_generation: Any, requests: Sequence[PromptRequest], *, pad_id: int
) -> list[Completion]:
    """Complete all requests concurrently, and return the completions in order."""
    if not takes_batches(policy_generation):
        return list(
            await asyncio.gather(
                *(
                    # A generator that reads only text need not have the argument `media`.
                    policy_generation.generate(*(request if request.media else request[:2]))
                    for request in requests
                )
            )
        )
    if not hasattr(policy_generation, "generate_async"):
        return complete_batch(policy_generation, requests, pad_id=pad_id)
    rows = policy_generation.generate_async(
        _make_generation_data(policy_generation, requests, pad_id),
        greedy=requests[0].sampling.greedy,
    )
    completions = {
        i: completion
        async for i, completion in _iterate_completions(
            rows, requests, get_weights_version(policy_generation)
        )
    }
    return [completions[i] for i in range(len(requests))]


async def _iterate_completions(
    rows: AsyncIterator[tuple[int, Any]], requests: Sequence[PromptRequest], version: int
) -> AsyncIterator[tuple[int, Completion]]:
    async for i, output in rows:
        yield i, _make_completion(output, 0, requests[i], version)


def _make_generation_data(
    policy_generation: Any, requests: Sequence[PromptRequest], pad_id: int
) -> BatchedDataDict[GenerationDatumSpec]:
    """Return the prompts of a batch generator.

    Raises ConfigError for media if the generator does not say that it reads them.
    """
    prompts = [torch.as_tensor(np.asarray(request.tokens, dtype=np.int64)) for request in requests]
    data = BatchedDataDict[GenerationDatumSpec](
        {
            "input_ids": pad_sequence(prompts, batch_first=True, padding_value=pad_id),
            "input_lengths": torch.tensor([len(prompt) for prompt in prompts]),
            "stop_strings": [list(request.sampling.stop) or None for request in requests],
        }
    )
    if any(request.media for request in requests):
        # The generator may be a plain class of a user that lacks this attribute.
        if not getattr(policy_generation, "reads_media", False):
            raise ConfigError(
                "a prompt has media, which the batch generator "
                f"{type(policy_generation).__name__} does not read. Set its attribute "
                "reads_media=True, and read the column `media`; or use a generator with the "
                "`generate` of ratchet.protocols.Generator"
            )
        data["media"] = [tuple(request.media) for request in requests]
    return data


def _make_completion(output: Any, row: int, request: PromptRequest, version: int) -> Completion:
    """Return row `row` of a GenerationOutputSpec as a completion.

    Logprobs are NaN if the generator returned none. The stop reason is derived from `truncated` and
    the last token.
    """
    new_slice = slice(len(request.tokens), int(output["unpadded_sequence_lengths"][row]))
    new_tokens = _to_numpy(output["output_ids"][row, new_slice], np.int64)
    logprobs = (
        output["logprobs"][row, new_slice]
        if "logprobs" in output
        else torch.full((len(new_tokens),), torch.nan)
    )
    is_truncated = bool(output["truncated"][row]) if "truncated" in output else False
    last_token = int(new_tokens[-1]) if len(new_tokens) else None
    # A stop token at the length limit ends the row too, though some generators report truncation.
    has_stop_token = last_token in request.sampling.stop_ids
    return Completion(
        tokens=new_tokens,
        logprobs=_to_numpy(logprobs, np.float32),
        log_kept_mass=np.zeros(len(new_tokens), np.float32),
        versions=np.full(len(new_tokens), version, np.int32),
        stop=StopReason.STOP_TOKEN
        if has_stop_token
        else StopReason.LENGTH
        if is_truncated
        else StopReason.STOP_STRING,
    )


def _to_numpy(values: Tensor, dtype: Any) -> NDArray[Any]:
    return values.detach().cpu().numpy().astype(dtype)


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
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
