"""The parity gate: does the sampler give what it samples the probability that the learner gives it?

The two compute the same policy by other code, often in other precision, from weights that were
moved. Where they disagree, the run optimizes something else than it samples, and mostly looks
healthy. So the learner scores some of the tokens that were just sampled, before an update, while
both still have the weights that they were drawn with; and if the difference is too large, the ends
are compared part by part to say why.

T = tokens of the rows that are compared.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ratchet.batch import Batch
from ratchet.config.experience import ParityConfig
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.errors import ParityError
from ratchet.protocols import Audits, Generator, Learner, Link, ShowsWeights
from ratchet.types import Sampling

log = logging.getLogger(__name__)

# first tokens of the ranges in which the difference is reported
POSITIONS = (0, 1, 4, 16, 64, 256, 1024)
QUANTISED = ("float8", "nf4")  # with scales of their own: no tensor that is sent is a tensor there
ASKED = 4  # rows, and tokens of each, that the sampler is asked for again


@dataclass(frozen=True)
class Ends:
    """What is compared. fingerprints: of the tokenizers that are known, by whose they are."""

    learner: Learner
    generator: Generator
    link: Link
    fingerprints: Mapping[str, str]

    @classmethod
    def of(cls, learner: Learner, generator: Generator, link: Link, tokenizer: Tokenizer) -> Ends:
        """tokenizer: the policy's."""
        own = getattr(getattr(generator, "tokenizer", None), "fingerprint", None)
        known = {} if own is None else {"generator": str(own)}
        return cls(learner, generator, link, {"policy": tokenizer.fingerprint, **known})


@dataclass(frozen=True)
class Finding:
    """guilty: whether it explains the difference."""

    cause: str
    text: str
    guilty: bool = False


class ParityGate:
    """See `ParityConfig`. Steps are those of a run, which counts from 0 when it is resumed: its
    pushes are new ones."""

    def __init__(self, ends: Ends, config: ParityConfig) -> None:
        self.ends, self.threshold, self.action = ends, config.threshold, config.action
        self.first_steps, self.every, self.sample = config.first_steps, config.every, config.sample

    def due(self, step: int) -> bool:
        return step < self.first_steps or (self.every > 0 and step % self.every == 0)

    async def check(self, batch: Batch, version: int) -> dict[str, float]:
        """version: of the weights that the learner has. Rows with tokens of other versions are left
        out; {} for none that is left. Raises ParityError with the report, or logs it."""
        rows = comparable(batch, version)
        if not rows:
            return {}
        part = batch.take(_spread(rows, self.sample))
        difference_T = await self._difference(part)
        mean, most = float(difference_T.mean()), float(difference_T.max())
        if not mean <= self.threshold:  # NaN too
            report = await self.report(part, difference_T)
            if self.action == "stop":
                raise ParityError(report)
            log.warning("%s", report)
        return {"mean": mean, "max": most, "tokens": float(len(difference_T))}

    async def _difference(self, part: Batch) -> Tensor:
        """|learner - sampler| of each predicted token, float64."""
        logprobs_T = (await self.ends.learner.score(part, ["logprobs"]))["logprobs"]
        return (logprobs_T.double() - part.rollout_logprobs_T.double()).abs()[part.predicted_T]

    async def report(self, part: Batch, difference_T: Tensor) -> str:
        """Every suspect, the guilty first."""
        findings = [
            await self._weights(),
            self._tokenizer(),
            await self._temperature(part),
            self._dtype(),
            *await self._kernel(part, difference_T),
        ]
        guilty = next((finding for finding in findings if finding.guilty), None)
        verdict = (
            f"the cause is: {guilty.cause} ({guilty.text})"
            if guilty
            else "weights and inputs agree: a kernel differs"
        )
        lines = [f"  {finding.cause:<12} {finding.text}" for finding in findings]
        return "\n".join(
            (
                f"sampler and learner differ by {float(difference_T.mean()):.3g} nats a token in "
                "the mean, at most "
                f"{float(difference_T.max()):.3g} (parity.threshold={self.threshold:g}, "
                f"{len(difference_T)} tokens): {verdict}",
                *lines,
                "Where that is expected, raise parity.threshold or set parity.action=warn.",
            )
        )

    # --- the suspects

    @property
    def _rounded_to(self) -> str | None:
        """What a generator brings weights to that come."""
        return getattr(self.ends.generator, "precision", None)

    async def _weights(self) -> Finding:
        if self._rounded_to in QUANTISED:
            return Finding(
                "weights",
                f"not compared: the generator rounds those that come to {self._rounded_to}",
            )
        differing = await self.ends.link.audit() if isinstance(self.ends.link, Audits) else None
        if differing is None:
            return Finding("weights", "not compared: the generator doesn't show them")
        if not differing:
            return Finding("weights", "equal, by the checksum of every tensor")
        return Finding(
            "weights", f"{len(differing)} tensors differ, the first is {differing[0]}", guilty=True
        )

    def _tokenizer(self) -> Finding:
        prints = self.ends.fingerprints
        if len(set(prints.values())) > 1:
            return Finding(
                "tokenizer",
                "different: " + ", ".join(f"{who} {own}" for who, own in prints.items()),
                guilty=True,
            )
        return Finding(
            "tokenizer", "the same" if len(prints) > 1 else "not compared: only one is known"
        )

    async def _temperature(self, part: Batch) -> Finding:
        """As if the sampler had left it out, or applied it twice."""
        own_S = part.temperature_S
        if bool((own_S == 1).all()):
            return Finding("temperature", "1: nothing to get wrong")
        for what, other_S in (
            ("ignores", torch.ones_like(own_S)),
            ("applies twice", own_S.square()),
        ):
            mean = float((await self._difference(replace(part, temperature_S=other_S))).mean())
            if mean <= self.threshold:
                return Finding(
                    "temperature",
                    f"the sampler {what} it: {mean:.3g} nats differ then",
                    guilty=True,
                )
        return Finding("temperature", "explains nothing")

    def _dtype(self) -> Finding:
        learner = {
            shard.tensor.dtype
            for shard in self.ends.learner.weights()
            if shard.tensor.is_floating_point()
        }
        generator = (
            {s.tensor.dtype for s in self.ends.generator.weights()}
            if isinstance(self.ends.generator, ShowsWeights)
            else set()
        )
        held = self._rounded_to or _names(generator)
        if not learner or not held:
            return Finding("dtype", "not compared: one of both doesn't show its weights")
        return Finding(
            "dtype", f"learner {_names(learner)}, generator {held}", guilty=_names(learner) != held
        )

    async def _kernel(self, part: Batch, difference_T: Tensor) -> list[Finding]:
        """Where the difference lies, and whether either end depends on who else is in a batch."""
        alone = [await self._difference(part.take([row])) for row in range(part.n_sequences)]
        learner = float((torch.cat(alone) - difference_T).abs().max())
        return [
            Finding("positions", _by_position(part, difference_T)),
            Finding(
                "batches",
                f"alone or together: learner {learner:.3g}, sampler "
                f"{await self._asked_again(part):.3g} at most",
            ),
        ]

    async def _asked_again(self, part: Batch) -> float:
        """How much the sampler's logprobs of equal tokens differ between requests that run alone
        and together."""
        generator, starts = self.ends.generator, part.starts_S.tolist()
        requests = []
        for row in range(min(ASKED, part.n_sequences)):
            own = slice(starts[row], starts[row] + int(part.lengths_S[row]))
            first = int(part.predicted_T[own].nonzero()[0])
            sampling = Sampling(
                temperature=float(part.temperature_S[row]), max_new_tokens=ASKED, seed=row
            )
            media = (
                [placed for placed in part.media_S[row] if placed.start < first]
                if part.media_S
                else []
            )
            requests.append((part.tokens_T[own][:first].tolist(), sampling, media))
        together = await asyncio.gather(*(generator.generate(*request) for request in requests))
        most = 0.0
        for request, with_others in zip(requests, together, strict=True):
            alone = await generator.generate(*request)
            for a, b, x, y in zip(
                alone.tokens, with_others.tokens, alone.logprobs, with_others.logprobs, strict=False
            ):
                if a != b:
                    break
                most = max(most, abs(float(x) - float(y)))
        return most


def comparable(batch: Batch, version: int) -> list[int]:
    """The rows all of whose predicted tokens were sampled from this version, and that have some."""
    predicted_S = batch.sequence_sum(batch.predicted_T.double())
    current_S = batch.sequence_sum((batch.predicted_T & (batch.versions_T == version)).double())
    return ((predicted_S > 0) & (predicted_S == current_S)).nonzero().squeeze(1).tolist()


def _spread(rows: Sequence[int], count: int) -> list[int]:
    """So many of them, from the first to the last."""
    if len(rows) <= count:
        return list(rows)
    return [rows[i * len(rows) // count] for i in range(count)]


def _by_position(part: Batch, difference_T: Tensor) -> str:
    """Means over ranges of the predicted tokens of each row, counted from 0."""
    predicted_T = part.predicted_T.long()
    before_T = predicted_T.cumsum(0) - predicted_T
    place_T = (before_T - before_T[part.starts_S][part.sequence_T])[part.predicted_T]
    texts = []
    for first, after in zip(POSITIONS, (*POSITIONS[1:], None), strict=True):
        chosen = (place_T >= first) & (place_T < (after if after is not None else torch.inf))
        if chosen.any():
            texts.append(f"from {first}: {float(difference_T[chosen].mean()):.3g}")
    return ", ".join(texts)


def _names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
