"""The results of an evaluation: every attempt at every prompt, and the measures computed from them.

No prompt is dropped. An attempt without a reward (failed, cancelled, or truncated so that it could
not be judged) is kept and counted, and is neither right nor wrong. A prompt without any reward is
excluded from the means, and each mean has the number of prompts that it covers.
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
from ratchet.evals.statistics import bootstrap_interval, estimate_consensus, estimate_pass_at_k
from ratchet.observe.write_files import replace_text
from ratchet.types import Task, is_finite_number
from ratchet.utils.safe_read import read_json

FORMAT = 2
RESULTS = "results.json"
MAX_PROMPT_CHARS = 2000  # maximum number of characters that are kept of a prompt
PROMPT_TYPES = {"votes": (bool,), **dict.fromkeys(("id", "tag", "digest", "prompt"), (str,))}
ATTEMPT_TYPES = {
    "end": (str,),
    "reward": (int, float, type(None)),
    "answer": (str, int, float, type(None)),
    "tokens": (int,),
    "text": (str,),
    "detail": (str,),
}
AttemptEnd = Literal["scored", "truncated", "unjudged", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """The record of an attempt."""

    end: AttemptEnd
    """How the attempt ended."""
    reward: float | None
    """None if the attempt was not judged."""
    answer: str | None = None
    """The final answer, if the rewards can extract it."""
    tokens: int = 0
    """Number of tokens that the policy wrote."""
    text: str = ""
    """The policy's last message."""
    detail: str = ""
    """The description of a failure, its kind first."""

    @property
    def kind(self) -> str:
        """Return the category under which an attempt without a reward is counted."""
        return self.detail.partition(":")[0] if self.end == "failed" else self.end


@dataclass(frozen=True, slots=True)
class PromptResult:
    """The attempts at one held-out task."""

    id: str
    tag: str
    digest: str
    """A hash of the task (see `hash_task`)."""
    votes: bool
    """True if the final answers can be compared, so that the attempts can vote (cons@k)."""
    greedy: AttemptResult | None = None
    sampled: tuple[AttemptResult, ...] = ()
    prompt: str = ""
    """The last message of the task, at most MAX_PROMPT_CHARS of it; "" in results of earlier
    versions."""

    @property
    def attempts(self) -> tuple[AttemptResult, ...]:
        return self.sampled if self.greedy is None else (self.greedy, *self.sampled)

    def mean(self, attempts: Sequence[AttemptResult | None]) -> float | None:
        """Return the mean reward of the attempts; None if none of them has a reward."""
        rewards = [
            attempt.reward
            for attempt in attempts
            if attempt is not None and attempt.reward is not None
        ]
        return fmean(rewards) if rewards else None


class Measure(NamedTuple):
    """A mean over prompts with its confidence interval."""

    name: str
    value: float
    low: float
    high: float
    prompts: int
    """Number of prompts that have a value."""
    error: float = 0.0
    """Standard error of a value that is estimated by sampling; 0 for an exact value."""


def hash_task(task: Task) -> str:
    """Return a hash of a task's messages and reference answer."""
    messages = [[message.role, message.text, *message.media] for message in task.messages]
    text = json.dumps([messages, task.answer], sort_keys=True, default=str)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def shorten_prompt(task: Task) -> str:
    """Return the beginning of a task's last message, by which a reader recognises the task."""
    return task.messages[-1].text[:MAX_PROMPT_CHARS] if task.messages else ""


def list_powers_of_two(n: int) -> list[int]:
    """Return the powers of two up to n, and n itself; [] for 0."""
    return sorted({*(1 << i for i in range(n.bit_length())), n}) if n else []


@dataclass(frozen=True)
class EvalResults:
    """The results of an evaluation."""

    prompts: tuple[PromptResult, ...]
    pass_threshold: float = 1.0
    """The reward from which an attempt counts as passed."""
    seed: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)
    """The model, the tasks and the settings of the evaluation."""

    @property
    def samples(self) -> int:
        """Return the largest number of sampled attempts of a prompt."""
        return max((len(prompt.sampled) for prompt in self.prompts), default=0)

    @property
    def accuracy_attempts(self) -> list[AttemptResult]:
        """Return the greedy attempts, or the sampled ones if there are none."""
        greedy = [prompt.greedy for prompt in self.prompts if prompt.greedy is not None]
        return greedy or [attempt for prompt in self.prompts for attempt in prompt.sampled]

    @property
    def failures(self) -> dict[str, int]:
        """Return the number of attempts without a reward, by reason."""
        attempts = (attempt for prompt in self.prompts for attempt in prompt.attempts)
        return dict(Counter(attempt.kind for attempt in attempts if attempt.reward is None))

    @property
    def tags(self) -> list[str]:
        return sorted({prompt.tag for prompt in self.prompts})

    def for_tag(self, tag: str) -> EvalResults:
        """Return the results of the prompts with a tag."""
        return replace(self, prompts=tuple(prompt for prompt in self.prompts if prompt.tag == tag))

    def compute_measures(self, *, every_k: bool = True) -> list[Measure]:
        """Return accuracy, mean@n, pass@k and cons@k.

        Accuracy is the mean reward of the greedy attempts, or of the sampled ones without greedy
        attempts. The k are 1, 2, 4, ... and n. With `every_k`, pass@k has all k from 1 to n.
        """
        measures = [self.accuracy]
        if self.samples:
            measures.append(
                self._measure_mean("sampled", lambda prompt: prompt.mean(prompt.sampled))
            )
            measures += self._compute_pass_at_k(
                range(1, self.samples + 1) if every_k else list_powers_of_two(self.samples)
            )
            measures += self._compute_consensus()
        return measures

    @property
    def accuracy(self) -> Measure:
        has_greedy = any(prompt.greedy for prompt in self.prompts)
        return self._measure_mean(
            "accuracy",
            lambda prompt: prompt.mean([prompt.greedy] if has_greedy else prompt.sampled),
        )

    def get_metrics(self) -> dict[str, float]:
        """Return the metrics that a run logs."""
        attempts = self.accuracy_attempts
        metrics = {measure.name: measure.value for measure in self.compute_measures(every_k=False)}
        metrics |= {"accuracy_low": self.accuracy.low, "accuracy_high": self.accuracy.high}
        metrics["truncated_share"] = (
            fmean(attempt.end == "truncated" for attempt in attempts) if attempts else math.nan
        )
        metrics["failed"] = float(sum(self.failures.values()))
        rewards = [
            attempt.reward
            for prompt in self.prompts
            for attempt in prompt.attempts
            if attempt.reward is not None
        ]
        if rewards:
            metrics |= {"min_reward": min(rewards), "max_reward": max(rewards)}
        if len(self.tags) > 1:
            metrics |= {f"accuracy/{tag}": self.for_tag(tag).accuracy.value for tag in self.tags}
        return metrics

    def _measure_mean(
        self, name: str, get_value: Callable[[PromptResult], float | None]
    ) -> Measure:
        values = [value for prompt in self.prompts if (value := get_value(prompt)) is not None]
        return _measure(name, values, self.seed)

    def _compute_pass_at_k(self, ks: Sequence[int]) -> Iterator[Measure]:
        """Yield pass@k, each over the prompts with at least k attempts that have a reward."""
        curves = []
        for prompt in self.prompts:
            rewards = [attempt.reward for attempt in prompt.sampled if attempt.reward is not None]
            curves.append(
                estimate_pass_at_k(
                    len(rewards), sum(reward >= self.pass_threshold for reward in rewards)
                )
            )
        for k in ks:
            yield _measure(
                f"pass_at_{k}",
                [float(curve[k - 1]) for curve in curves if len(curve) >= k],
                self.seed,
            )

    def _compute_consensus(self) -> Iterator[Measure]:
        """Yield cons@k over the prompts with at least k attempts that have a reward."""
        vote_counts = [_count_votes(prompt) for prompt in self.prompts if prompt.votes]
        for k in list_powers_of_two(self.samples) if vote_counts else []:
            estimates = [
                estimate_consensus(
                    counts, values, [k], without_answer=without_answer, seed=self.seed + i
                )
                for i, (counts, values, without_answer) in enumerate(vote_counts)
                if sum(counts) + without_answer >= k
            ]
            measure = _measure(
                f"cons_at_{k}", [float(estimate.values[0]) for estimate in estimates], self.seed
            )
            error = math.sqrt(sum(float(estimate.errors[0]) ** 2 for estimate in estimates)) / max(
                len(estimates), 1
            )
            yield measure._replace(error=error)

    # --- on disk

    def as_dict(self) -> dict[str, Any]:
        """Return the content of results.json."""
        by_tag = (
            {tag: _as_rows(self.for_tag(tag).compute_measures()) for tag in self.tags}
            if len(self.tags) > 1
            else {}
        )
        return {
            "format": FORMAT,
            "about": dict(self.about),
            "pass_threshold": self.pass_threshold,
            "seed": self.seed,
            "measures": _as_rows(self.compute_measures()),
            "by_tag": by_tag,
            "failures": self.failures,
            "prompts": [asdict(prompt) for prompt in self.prompts],
        }

    def write(self, directory: Path) -> None:
        """Write results.json.

        Raises:
            OSError: The file can't be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        replace_text(
            directory / RESULTS, json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n"
        )

    @classmethod
    def read(cls, path: Path) -> EvalResults:
        """Read results.json.

        Args:
            path: The file or its directory.

        Raises:
            DataError: The file can't be read or holds no results.
        """
        path = path / RESULTS if path.is_dir() else path
        try:
            content = read_json(path)
            if content["format"] != FORMAT:
                raise DataError(
                    f"{path} has format {content['format']}, and this version reads {FORMAT}. "
                    "Evaluate again"
                )
            prompts = tuple(_parse_prompt(row) for row in content["prompts"])
            _check_types(content, {"pass_threshold": (int, float), "about": (dict,)})
            return cls(prompts, content["pass_threshold"], content["seed"], content["about"])
        except OSError as error:
            raise DataError(f"{path}: can't be read: {error.strerror}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} holds no results of `ratchet eval`: {type(error).__name__}: {error}"
            ) from error


def _measure(name: str, values: Sequence[float], seed: int) -> Measure:
    low, high = bootstrap_interval(values, seed=seed)
    return Measure(name, fmean(values) if values else math.nan, low, high, len(values))


def _count_votes(prompt: PromptResult) -> tuple[list[int], list[float], int]:
    """Return (votes for each answer, value of each answer, number of attempts without an answer).

    Only attempts with a reward vote. If equal answers have different rewards, for example because a
    length reward counts too, the answer's value is their mean.
    """
    rewards_by_answer: dict[str | None, list[float]] = {}
    for attempt in prompt.sampled:
        if attempt.reward is not None:
            rewards_by_answer.setdefault(attempt.answer, []).append(attempt.reward)
    without_answer = len(rewards_by_answer.pop(None, []))
    return (
        [len(rewards) for rewards in rewards_by_answer.values()],
        [fmean(rewards) for rewards in rewards_by_answer.values()],
        without_answer,
    )


def _as_rows(measures: Sequence[Measure]) -> list[dict[str, Any]]:
    return [
        {
            key: None if isinstance(value, float) and math.isnan(value) else value
            for key, value in measure._asdict().items()
        }
        for measure in measures
    ]


def _parse_prompt(row: Mapping[str, Any]) -> PromptResult:
    _check_types(row, PROMPT_TYPES)
    greedy = None if row["greedy"] is None else _parse_attempt(row["greedy"])
    return PromptResult(
        **{
            **row,
            "greedy": greedy,
            "sampled": tuple(_parse_attempt(attempt) for attempt in row["sampled"]),
        }
    )


def _parse_attempt(row: Mapping[str, Any]) -> AttemptResult:
    _check_types(row, ATTEMPT_TYPES)
    attempt = AttemptResult(**row)
    if attempt.end not in get_args(AttemptEnd):
        raise ValueError(f"an attempt ended as '{attempt.end}'")
    if attempt.reward is not None and not is_finite_number(attempt.reward):
        raise ValueError(f"an attempt has the reward {attempt.reward}")
    return attempt


def _check_types(row: Mapping[str, Any], types: Mapping[str, tuple[type, ...]]) -> None:
    """Raise ValueError for a value of another type. Absent keys are left to the constructor."""
    for name, kinds in types.items():
        if name in row and not isinstance(row[name], kinds):
            raise ValueError(f"{name} is {str(row[name])[:80]!r}")
