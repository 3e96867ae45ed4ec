"""The messages between the pool of generator workers and each worker.

Many small requests or completions are packed into a few long columns, which are cheap to send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.allowed_tokens import AllowedTokens
from ratchet.generators.request import PromptKey
from ratchet.types import Completion, Medium, PlacedMedium, Sampling, StopReason

FIELDS = tuple(field.name for field in fields(Sampling))


@dataclass(frozen=True)
class RequestBatch:
    """A batch of requests, in which equal prompts and equal media are stored once."""

    numbers: Sequence[int] = ()  # the number that identifies each request
    prompts: NDArray[np.int64] | None = None  # the distinct prompts, end to end
    starts: Sequence[int] = (0,)  # start of each distinct prompt, and the end of the last
    prompt_indices: Sequence[int] = ()  # index of each request's prompt
    samplings: Sequence[tuple[Any, ...]] = ()  # each request's values of the sampling `FIELDS`
    media: Sequence[Medium] = ()  # the distinct media
    # (start, index of the medium) of each prompt's media; () if no prompt has any
    media_positions: Sequence[Sequence[tuple[int, int]]] = ()

    @classmethod
    def from_requests(
        cls,
        requests: Mapping[
            int, tuple[NDArray[np.int64], PromptKey, Sampling, Sequence[PlacedMedium]]
        ],
    ) -> RequestBatch:
        """Pack requests.

        requests: (prompt, prompt key, sampling, media) by request number.
        """
        distinct_prompts = {key: (tokens, media) for tokens, key, _, media in requests.values()}
        prompt_index_by_key = {key: index for index, key in enumerate(distinct_prompts)}
        prompts = [tokens for tokens, _ in distinct_prompts.values()]
        all_media = {
            medium.key: medium for _, media in distinct_prompts.values() for _, medium in media
        }
        medium_index_by_key = {key: number for number, key in enumerate(all_media)}
        return cls(
            list(requests),
            np.concatenate(prompts) if prompts else None,
            np.cumsum([0, *map(len, prompts)]).tolist(),
            [prompt_index_by_key[key] for _, key, _, _ in requests.values()],
            [
                tuple(getattr(sampling, name) for name in FIELDS)
                for _, _, sampling, _ in requests.values()
            ],
            list(all_media.values()),
            [
                [(start, medium_index_by_key[medium.key]) for start, medium in media]
                for _, media in distinct_prompts.values()
            ]
            if all_media
            else (),
        )

    def unpack(self) -> list[tuple[int, NDArray[np.int64], Sampling, tuple[PlacedMedium, ...]]]:
        """Return (number, prompt, sampling, media) of each request."""
        if self.prompts is None:
            return []
        prompts = [self.prompts[start:end] for start, end in pairwise(self.starts)]
        media_by_prompt = [
            tuple(PlacedMedium(start, self.media[i]) for start, i in media_of_prompt)
            for media_of_prompt in self.media_positions
        ] or [()] * len(prompts)
        return [
            (number, prompts[prompt_index], Sampling(*values), media_by_prompt[prompt_index])
            for number, prompt_index, values in zip(
                self.numbers, self.prompt_indices, self.samplings, strict=True
            )
        ]


@dataclass(frozen=True)
class CompletionBatch:
    """A batch of completions, whose columns are concatenated, and of failed requests' errors."""

    numbers: Sequence[int]  # number of each completion's request
    starts: Sequence[int]  # start of each completion in the columns, and the end of the last
    columns: tuple[NDArray[Any], ...]  # tokens, logprobs, log_kept_mass, versions
    stops: Sequence[str]
    routes: Sequence[NDArray[np.int16] | None]
    extras: Sequence[Mapping[str, Any]]
    allowed: Sequence[AllowedTokens | None]
    errors: Mapping[int, Exception]  # by request number

    @classmethod
    def from_completions(
        cls, completions: Mapping[int, Completion], errors: Mapping[int, Exception]
    ) -> CompletionBatch:
        """Pack completions and errors, both keyed by request number."""
        completion_list = list(completions.values())
        columns = ("tokens", "logprobs", "log_kept_mass", "versions")
        return cls(
            list(completions),
            np.cumsum([0, *(len(completion.tokens) for completion in completion_list)]).tolist(),
            tuple(
                np.concatenate([getattr(completion, name) for completion in completion_list])
                for name in columns
            )
            if completion_list
            else (),
            [str(completion.stop) for completion in completion_list],
            [completion.routes for completion in completion_list],
            [completion.extras for completion in completion_list],
            [completion.allowed for completion in completion_list],
            errors,
        )

    def unpack(self) -> list[tuple[int, Completion]]:
        """Return (number, completion) of each completion."""
        if not self.columns:
            return []
        tokens, logprobs, log_kept_mass, versions = self.columns
        slices = [slice(*bounds) for bounds in pairwise(self.starts)]
        return [
            (
                number,
                Completion(
                    tokens[span],
                    logprobs[span],
                    log_kept_mass[span],
                    versions[span],
                    StopReason(stop),
                    routes,
                    extras,
                    allowed,
                ),
            )
            for number, span, stop, routes, extras, allowed in zip(
                self.numbers,
                slices,
                self.stops,
                self.routes,
                self.extras,
                self.allowed,
                strict=True,
            )
        ]
