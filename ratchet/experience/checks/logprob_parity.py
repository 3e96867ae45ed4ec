"""The parity gate: compare the sampler's log-probabilities with the learner's.

Both compute the same policy from copied weights, but with different code and often in different
precision. If they disagree, the run optimizes another policy than it samples from, and often looks
healthy. So before an update the learner scores some of the tokens just sampled, while both have the
same weights. If the difference is too large, a report compares the two part by part to find the
cause.

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
from ratchet.protocols import Generator, HasReadableWeights, Learner, WeightAudit, WeightSync
from ratchet.types import Sampling

log = logging.getLogger(__name__)

# Starts of the ranges of positions in which the difference is reported.
POSITIONS = (0, 1, 4, 16, 64, 256, 1024)
# A generator with one of these formats rounds the weights it receives, so they are not compared.
QUANTISED = ("float8", "nf4")
REPEATED = 4  # number of rows, and of tokens per row, that the sampler generates again


@dataclass(frozen=True)
class ParityPair:
    """The learner and the sampler to compare.

    `fingerprints` has those of the tokenizers, by owner: "policy" and, if known, "generator".
    """

    learner: Learner
    generator: Generator
    weight_sync: WeightSync
    fingerprints: Mapping[str, str]

    @classmethod
    def create(
        cls, learner: Learner, generator: Generator, weight_sync: WeightSync, tokenizer: Tokenizer
    ) -> ParityPair:
        """Return the pair to compare; `tokenizer` is the policy's."""
        fingerprints = {"policy": tokenizer.fingerprint}
        generator_tokenizer = getattr(generator, "tokenizer", None)
        fingerprint = getattr(generator_tokenizer, "fingerprint", None)
        if fingerprint is not None:
            fingerprints["generator"] = str(fingerprint)
        return cls(learner, generator, weight_sync, fingerprints)


@dataclass(frozen=True)
class ParityFinding:
    """The result of one comparison; `guilty` is True if it explains the difference."""

    cause: str
    text: str
    guilty: bool = False


class ParityGate:
    """A check of some steps for parity, which stops the run or warns (see `ParityConfig`).

    Steps are counted from the start of the process, so that a resumed run checks its first weight
    syncs again.
    """

    def __init__(self, ends: ParityPair, config: ParityConfig) -> None:
        self.ends = ends
        self.threshold = config.threshold
        self.action = config.action
        self.first_steps = config.first_steps
        self.every = config.every
        self.sample = config.sample

    def due(self, step: int) -> bool:
        """True if this step must be checked."""
        return step < self.first_steps or (self.every > 0 and step % self.every == 0)

    async def check(self, batch: Batch, version: int) -> dict[str, float]:
        """Compare some rows of a batch, and return the metrics.

        Rows with tokens of other versions are left out; {} if none remain.

        Args:
            batch: The batch that was just sampled.
            version: The version of the learner's weights.

        Raises:
            ParityError: The difference exceeds the threshold, and `parity.action` is "stop".
                Otherwise the report is logged.
        """
        rows = select_comparable_rows(batch, version)
        if not rows:
            return {}
        part = batch.take(_sample_evenly(rows, self.sample))
        difference_T = await self._difference(part)
        mean = float(difference_T.mean())
        maximum = float(difference_T.max())
        # Written so that NaN fails too.
        if not mean <= self.threshold:
            report = await self.report(part, difference_T)
            if self.action == "stop":
                raise ParityError(report)
            log.warning("%s", report)
        return {"mean": mean, "max": maximum, "tokens": float(len(difference_T))}

    async def _difference(self, part: Batch) -> Tensor:
        """Return |learner - sampler| of each predicted token, float64."""
        logprobs_T = (await self.ends.learner.score(part, ["logprobs"]))["logprobs"]
        return (logprobs_T.double() - part.rollout_logprobs_T.double()).abs()[part.predicted_T]

    async def report(self, part: Batch, difference_T: Tensor) -> str:
        """Return all findings as text, after the first one that explains the difference."""
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

    # --- possible causes

    @property
    def _rounded_to(self) -> str | None:
        """The format to which the generator rounds the weights it receives."""
        return getattr(self.ends.generator, "precision", None)

    async def _weights(self) -> ParityFinding:
        if self._rounded_to in QUANTISED:
            return ParityFinding(
                "weights",
                f"not compared: the generator rounds received weights to {self._rounded_to}",
            )
        differing = (
            await self.ends.weight_sync.audit()
            if isinstance(self.ends.weight_sync, WeightAudit)
            else None
        )
        if differing is None:
            return ParityFinding("weights", "not compared: the generator doesn't show them")
        if not differing:
            return ParityFinding("weights", "equal, by the checksum of every tensor")
        return ParityFinding(
            "weights", f"{len(differing)} tensors differ, the first is {differing[0]}", guilty=True
        )

    def _tokenizer(self) -> ParityFinding:
        prints = self.ends.fingerprints
        if len(set(prints.values())) > 1:
            return ParityFinding(
                "tokenizer",
                "different: " + ", ".join(f"{name} {value}" for name, value in prints.items()),
                guilty=True,
            )
        return ParityFinding(
            "tokenizer", "the same" if len(prints) > 1 else "not compared: only one is known"
        )

    async def _temperature(self, part: Batch) -> ParityFinding:
        """Test whether the sampler ignored the temperature, or applied it twice."""
        temperature_S = part.temperature_S
        if bool((temperature_S == 1).all()):
            return ParityFinding("temperature", "1: nothing to get wrong")
        for what, other_S in (
            ("ignores", torch.ones_like(temperature_S)),
            ("applies twice", temperature_S.square()),
        ):
            mean = float((await self._difference(replace(part, temperature_S=other_S))).mean())
            if mean <= self.threshold:
                return ParityFinding(
                    "temperature",
                    f"the sampler {what} it: {mean:.3g} nats differ then",
                    guilty=True,
                )
        return ParityFinding("temperature", "explains nothing")

    def _dtype(self) -> ParityFinding:
        learner = {
            shard.tensor.dtype
            for shard in self.ends.learner.weights()
            if shard.tensor.is_floating_point()
        }
        generator = (
            {s.tensor.dtype for s in self.ends.generator.weights()}
            if isinstance(self.ends.generator, HasReadableWeights)
            else set()
        )
        held = self._rounded_to or _names(generator)
        if not learner or not held:
            return ParityFinding("dtype", "not compared: one of the two doesn't show its weights")
        return ParityFinding(
            "dtype", f"learner {_names(learner)}, generator {held}", guilty=_names(learner) != held
        )

    async def _kernel(self, part: Batch, difference_T: Tensor) -> list[ParityFinding]:
        """Return findings on the positions of the difference, and on batch invariance."""
        alone = [await self._difference(part.take([row])) for row in range(part.n_sequences)]
        learner = float((torch.cat(alone) - difference_T).abs().max())
        return [
            ParityFinding("positions", _by_position(part, difference_T)),
            ParityFinding(
                "batches",
                f"alone or together: learner {learner:.3g}, sampler "
                f"{await self._asked_again(part):.3g} at most",
            ),
        ]

    async def _asked_again(self, part: Batch) -> float:
        """Return the largest difference in the sampler's logprobs between alone and batched.

        Tokens are compared up to the first that differs.
        """
        generator = self.ends.generator
        starts = part.starts_S.tolist()
        requests = []
        for row in range(min(REPEATED, part.n_sequences)):
            row_slice = slice(starts[row], starts[row] + int(part.lengths_S[row]))
            first = int(part.predicted_T[row_slice].nonzero()[0])
            sampling = Sampling(
                temperature=float(part.temperature_S[row]), max_new_tokens=REPEATED, seed=row
            )
            media = (
                [placed for placed in part.media_S[row] if placed.start < first]
                if part.media_S
                else []
            )
            requests.append((part.tokens_T[row_slice][:first].tolist(), sampling, media))
        together = await asyncio.gather(*(generator.generate(*request) for request in requests))
        largest = 0.0
        for request, with_others in zip(requests, together, strict=True):
            alone = await generator.generate(*request)
            for a, b, x, y in zip(
                alone.tokens, with_others.tokens, alone.logprobs, with_others.logprobs, strict=False
            ):
                if a != b:
                    break
                largest = max(largest, abs(float(x) - float(y)))
        return largest


def select_comparable_rows(batch: Batch, version: int) -> list[int]:
    """Return the rows with predicted tokens whose tokens were all sampled from this version."""
    predicted_S = batch.sequence_sum(batch.predicted_T.double())
    current_S = batch.sequence_sum((batch.predicted_T & (batch.versions_T == version)).double())
    return ((predicted_S > 0) & (predicted_S == current_S)).nonzero().squeeze(1).tolist()


def _sample_evenly(rows: Sequence[int], count: int) -> list[int]:
    """Return at most `count` rows, evenly spaced, from the first on."""
    if len(rows) <= count:
        return list(rows)
    return [rows[i * len(rows) // count] for i in range(count)]


def _by_position(part: Batch, difference_T: Tensor) -> str:
    """Return mean differences by ranges of position among each row's predicted tokens."""
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
