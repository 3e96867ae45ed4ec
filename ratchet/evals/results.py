"""What an evaluation found: every attempt at every prompt, as it is saved, and what follows from
them.

No prompt is dropped: an attempt without a reward (failed, cancelled, cut off where nobody could
judge it) is kept and counted, and is neither right nor wrong; a prompt without any other is out of
the means, and each of these says of how many it is.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, get_args

from ratchet.errors import DataError
from ratchet.evals.statistics import consensus, interval, pass_at_k
from ratchet.observe.write_files import replace_text
from ratchet.types import Task
from ratchet.utils.safe_read import read_json

FORMAT = 1
RESULTS = "results.json"
End = Literal["scored", "truncated", "unjudged", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """end: how it ended. answer: the final answer, where rewards can tell. tokens: that the policy
    wrote. detail: of a failure, its kind first."""

    end: End
    reward: float | None
    answer: str | None = None
    tokens: int = 0
    text: str = ""
    detail: str = ""

    @property
    def kind(self) -> str:
        """What it is counted under where it has no reward."""
        return self.detail.partition(":")[0] if self.end == "failed" else self.end


@dataclass(frozen=True, slots=True)
class Prompt:
    """digest: of what was asked. votes: whether the attempts' answers can be told apart."""

    id: str
    tag: str
    digest: str
    votes: bool
    greedy: Attempt | None = None
    sampled: tuple[Attempt, ...] = ()

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        return self.sampled if self.greedy is None else (self.greedy, *self.sampled)

    def mean(self, attempts: Sequence[Attempt | None]) -> float | None:
        """None without a reward."""
        rewards = [
            attempt.reward
            for attempt in attempts
            if attempt is not None and attempt.reward is not None
        ]
        return fmean(rewards) if rewards else None


class Measure(NamedTuple):
    """A mean over prompts with its confidence interval. error: standard error of what was sampled
    to estimate it, 0 where it is exact."""

    name: str
    value: float
    low: float
    high: float
    prompts: int
    error: float = 0.0


def digest(task: Task) -> str:
    """Of what a task asks, and of the answer that it is judged by."""
    said = [[message.role, message.text, *message.media] for message in task.messages]
    text = json.dumps([said, task.answer], sort_keys=True, default=str)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def ladder(n: int) -> list[int]:
    """1, 2, 4, ... and n."""
    return sorted({*(1 << i for i in range(n.bit_length())), n}) if n else []


@dataclass(frozen=True)
class Results:
    """about: what was asked, of whom, and how. passing: the reward from which on an attempt counts
    as passed."""

    prompts: tuple[Prompt, ...]
    passing: float = 1.0
    seed: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return max((len(prompt.sampled) for prompt in self.prompts), default=0)

    @property
    def first(self) -> list[Attempt]:
        """The greedy attempts; without any, the sampled ones."""
        greedy = [prompt.greedy for prompt in self.prompts if prompt.greedy is not None]
        return greedy or [attempt for prompt in self.prompts for attempt in prompt.sampled]

    @property
    def failures(self) -> dict[str, int]:
        """How many attempts have no reward, by why."""
        attempts = (attempt for prompt in self.prompts for attempt in prompt.attempts)
        return dict(Counter(attempt.kind for attempt in attempts if attempt.reward is None))

    @property
    def tags(self) -> list[str]:
        return sorted({prompt.tag for prompt in self.prompts})

    def of(self, tag: str) -> Results:
        return replace(self, prompts=tuple(prompt for prompt in self.prompts if prompt.tag == tag))

    def measures(self, *, every_k: bool = True) -> list[Measure]:
        """accuracy: of greedy attempts, or, without any, of sampled ones; mean@n; pass@k for all k,
        or k = 1, 2, 4, ..., n; cons@k for the latter."""
        found = [self.accuracy]
        if self.samples:
            found.append(self._mean("sampled", lambda prompt: prompt.mean(prompt.sampled)))
            found += self._passes(range(1, self.samples + 1) if every_k else ladder(self.samples))
            found += self._consensus()
        return found

    @property
    def accuracy(self) -> Measure:
        greedy = any(prompt.greedy for prompt in self.prompts)
        return self._mean(
            "accuracy", lambda prompt: prompt.mean([prompt.greedy] if greedy else prompt.sampled)
        )

    def numbers(self) -> dict[str, float]:
        """For the sinks of a run."""
        first = self.first
        named = {measure.name: measure.value for measure in self.measures(every_k=False)}
        named |= {"accuracy_low": self.accuracy.low, "accuracy_high": self.accuracy.high}
        named["truncated_share"] = (
            fmean(attempt.end == "truncated" for attempt in first) if first else math.nan
        )
        named["failed"] = float(sum(self.failures.values()))
        if len(self.tags) > 1:
            named |= {f"accuracy/{tag}": self.of(tag).accuracy.value for tag in self.tags}
        return named

    def _mean(self, name: str, of: Callable[[Prompt], float | None]) -> Measure:
        values = [value for prompt in self.prompts if (value := of(prompt)) is not None]
        return _measure(name, values, self.seed)

    def _passes(self, ks: Sequence[int]) -> Iterator[Measure]:
        """Of the prompts with at least k attempts that have a reward."""
        curves = []
        for prompt in self.prompts:
            rewards = [attempt.reward for attempt in prompt.sampled if attempt.reward is not None]
            curves.append(
                pass_at_k(len(rewards), sum(reward >= self.passing for reward in rewards))
            )
        for k in ks:
            yield _measure(
                f"pass_at_{k}",
                [float(curve[k - 1]) for curve in curves if len(curve) >= k],
                self.seed,
            )

    def _consensus(self) -> Iterator[Measure]:
        counted = [_votes(prompt) for prompt in self.prompts if prompt.votes]
        for k in ladder(self.samples) if counted else []:
            found = [
                consensus(counts, values, [k], silent=silent, seed=self.seed + i)
                for i, (counts, values, silent) in enumerate(counted)
                if sum(counts) + silent >= k
            ]
            measure = _measure(f"cons_at_{k}", [float(one.values[0]) for one in found], self.seed)
            error = math.sqrt(sum(float(one.errors[0]) ** 2 for one in found)) / max(len(found), 1)
            yield measure._replace(error=error)

    # --- on disk

    def as_dict(self) -> dict[str, Any]:
        by_tag = (
            {tag: _rows(self.of(tag).measures()) for tag in self.tags} if len(self.tags) > 1 else {}
        )
        return {
            "format": FORMAT,
            "about": dict(self.about),
            "passing": self.passing,
            "seed": self.seed,
            "measures": _rows(self.measures()),
            "by_tag": by_tag,
            "failures": self.failures,
            "prompts": [asdict(prompt) for prompt in self.prompts],
        }

    def write(self, directory: Path) -> None:
        """Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        replace_text(
            directory / RESULTS, json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n"
        )

    @classmethod
    def read(cls, path: Path) -> Results:
        """path: of the file, or of its directory. Raises DataError."""
        path = path / RESULTS if path.is_dir() else path
        try:
            given = read_json(path)
            if given["format"] != FORMAT:
                raise DataError(
                    f"{path} is of format {given['format']}, this version reads {FORMAT}: evaluate "
                    "again"
                )
            prompts = tuple(_prompt(row) for row in given["prompts"])
            return cls(prompts, given["passing"], given["seed"], given["about"])
        except OSError as error:
            raise DataError(f"{path}: can't be read: {error.strerror}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} holds no results of `ratchet eval`: {type(error).__name__}: {error}"
            ) from error


def _measure(name: str, values: Sequence[float], seed: int) -> Measure:
    low, high = interval(values, seed=seed)
    return Measure(name, fmean(values) if values else math.nan, low, high, len(values))


def _votes(prompt: Prompt) -> tuple[list[int], list[float], int]:
    """(how often each answer was given, what it is worth, how many gave none), of attempts with a
    reward. Should the same answer have earned differently (another reward was added to its own), it
    is worth the mean."""
    earned: dict[str | None, list[float]] = {}
    for attempt in prompt.sampled:
        if attempt.reward is not None:
            earned.setdefault(attempt.answer, []).append(attempt.reward)
    silent = len(earned.pop(None, []))
    return (
        [len(rewards) for rewards in earned.values()],
        [fmean(rewards) for rewards in earned.values()],
        silent,
    )


def _rows(measures: Sequence[Measure]) -> list[dict[str, Any]]:
    return [
        {
            key: None if isinstance(value, float) and math.isnan(value) else value
            for key, value in measure._asdict().items()
        }
        for measure in measures
    ]


def _prompt(row: Mapping[str, Any]) -> Prompt:
    greedy = None if row["greedy"] is None else _attempt(row["greedy"])
    return Prompt(
        **{**row, "greedy": greedy, "sampled": tuple(_attempt(one) for one in row["sampled"])}
    )


def _attempt(row: Mapping[str, Any]) -> Attempt:
    attempt = Attempt(**row)
    if attempt.end not in get_args(End):
        raise ValueError(f"an attempt ended as '{attempt.end}'")
    return attempt
