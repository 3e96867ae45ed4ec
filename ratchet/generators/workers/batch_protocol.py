"""What router and workers send each other: many small requests and answers as a few long columns,
which cost little to pack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.generators.request import PromptKey
from ratchet.types import Completion, Medium, Placed, Sampling, StopReason

FIELDS = tuple(field.name for field in fields(Sampling))


@dataclass(frozen=True)
class Asked:
    """Requests. numbers: their names. prompts: the distinct ones end to end, from `starts` on;
    prompt_of: which is whose. media: the distinct ones; placed: of each prompt, where which of them
    is; () where none has any."""

    numbers: Sequence[int] = ()
    prompts: NDArray[np.int64] | None = None
    starts: Sequence[int] = (0,)
    prompt_of: Sequence[int] = ()
    samplings: Sequence[tuple[Any, ...]] = ()
    media: Sequence[Medium] = ()
    placed: Sequence[Sequence[tuple[int, int]]] = ()

    @classmethod
    def of(
        cls, requests: Mapping[int, tuple[NDArray[np.int64], PromptKey, Sampling, Sequence[Placed]]]
    ) -> Asked:
        """By number: (prompt, what is equal for equal prompts, how, its media)."""
        distinct = {key: (tokens, media) for tokens, key, _, media in requests.values()}
        places = {key: place for place, key in enumerate(distinct)}
        prompts = [tokens for tokens, _ in distinct.values()]
        known = {medium.key: medium for _, media in distinct.values() for _, medium in media}
        numbers = {key: number for number, key in enumerate(known)}
        return cls(
            list(requests),
            np.concatenate(prompts) if prompts else None,
            np.cumsum([0, *map(len, prompts)]).tolist(),
            [places[key] for _, key, _, _ in requests.values()],
            [
                tuple(getattr(sampling, name) for name in FIELDS)
                for _, _, sampling, _ in requests.values()
            ],
            list(known.values()),
            [
                [(start, numbers[medium.key]) for start, medium in media]
                for _, media in distinct.values()
            ]
            if known
            else (),
        )

    def each(self) -> list[tuple[int, NDArray[np.int64], Sampling, tuple[Placed, ...]]]:
        """(number, prompt, how, its media)"""
        if self.prompts is None:
            return []
        prompts = [self.prompts[start:end] for start, end in pairwise(self.starts)]
        placed = [
            tuple(Placed(start, self.media[i]) for start, i in each) for each in self.placed
        ] or [()] * len(prompts)
        return [
            (number, prompts[place], Sampling(*values), placed[place])
            for number, place, values in zip(
                self.numbers, self.prompt_of, self.samplings, strict=True
            )
        ]


@dataclass(frozen=True)
class Answered:
    """Completions, their columns end to end, and errors by number."""

    numbers: Sequence[int]
    starts: Sequence[int]
    columns: tuple[NDArray[Any], ...]  # tokens, logprobs, log_kept_mass, versions
    stops: Sequence[str]
    routes: Sequence[NDArray[np.int16] | None]
    extras: Sequence[Mapping[str, Any]]
    errors: Mapping[int, Exception]

    @classmethod
    def of(cls, completions: Mapping[int, Completion], errors: Mapping[int, Exception]) -> Answered:
        found = list(completions.values())
        columns = ("tokens", "logprobs", "log_kept_mass", "versions")
        return cls(
            list(completions),
            np.cumsum([0, *(len(one.tokens) for one in found)]).tolist(),
            tuple(np.concatenate([getattr(one, name) for one in found]) for name in columns)
            if found
            else (),
            [str(one.stop) for one in found],
            [one.routes for one in found],
            [one.extras for one in found],
            errors,
        )

    def each(self) -> list[tuple[int, Completion]]:
        if not self.columns:
            return []
        tokens, logprobs, kept, versions = self.columns
        rows = [slice(*ends) for ends in pairwise(self.starts)]
        return [
            (
                number,
                Completion(
                    tokens[row],
                    logprobs[row],
                    kept[row],
                    versions[row],
                    StopReason(stop),
                    routes,
                    extras,
                ),
            )
            for number, row, stop, routes, extras in zip(
                self.numbers, rows, self.stops, self.routes, self.extras, strict=True
            )
        ]
